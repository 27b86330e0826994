"""What an experiment is: its caption, its configuration, and how it is computed, judged and drawn."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.lab.study import Need, Study, StudySettings
from experiments.lab.verdict import Verdict


@dataclass(frozen=True)
class Caption:
    """What stands beside a figure or table, in an experiment and in each of its results."""

    id: str
    title: str
    source: str
    """Where it is in the paper: "Figure 2"."""
    claim: str
    """The paper's claim, in our words."""
    criterion: str
    """When the verdict is "supported"."""
    paper: str | None
    """The paper's number, where it has one."""

    def caption(self) -> dict[str, Any]:
        """These six by name, to make something else that bears the same caption."""
        return {field.name: getattr(self, field.name) for field in fields(Caption)}


@dataclass(frozen=True)
class Experiment(Caption):
    """A figure or table of the paper: what is claimed, how it is computed, judged and drawn."""

    config: Any
    """A frozen dataclass; its values are part of the result's configuration."""
    table: Callable[[Study, Any], pd.DataFrame]
    verdict: Callable[[pd.DataFrame], Verdict]
    figure: Callable[[pd.DataFrame], Figure]
    needs: tuple[Need, ...] = ()
    """Reductions that can be computed in a pass shared with other experiments."""
    needs_for: Callable[[Any, StudySettings], Iterable[Need]] | None = None
    """More of them, where they depend on the configuration or on the task under study."""
    mechanism: bool = True
    """Whether the claim is about HOW a model does the task, and so means nothing for a model that does not."""

    def all_needs(self, settings: StudySettings) -> tuple[Need, ...]:
        """Every reduction that can be computed in a shared pass, for these settings."""
        further = () if self.needs_for is None else self.needs_for(self.config, settings)
        return (*self.needs, *further)
