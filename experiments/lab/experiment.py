"""What an experiment is: its caption, its configuration, and how it is computed, judged and drawn."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import pandas as pd
from matplotlib.figure import Figure

from experiments.lab.frames import stack, where
from experiments.lab.reductions import head_contrasts, head_increases, layer_contrasts, layer_increases
from experiments.lab.study import RANKINGS, Need, Ranking, Study, StudySettings
from experiments.lab.verdict import Verdict

NO_HEADS = "the whole model: no heads are located, so both rankings give the same verdict"
OWN_RANKINGS = "heads that the experiment ranks itself, in several ways: there is one verdict"
EVERYWHERE = (
    "Heads are ranked on one half of the prompts and looked at on the other, which asks about other texts (but for "
    "head-overlap, which is about the rankings), and the best by contrast stand beside the best by increase; the "
    "paper ranks and shows the same prompts, by increase. Located heads stand beside the other heads of their layers, "
    "where the paper has one random head of the layer or none. Its claims have no thresholds: those here are ours. "
    "Increases are read out with the final norm's scale as it is in the unedited model, which the paper's formula "
    "leaves open."
)
"""Where all experiments differ from what the paper did."""


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
    about: str = "located heads"
    """Which heads the claim is about; with `NO_HEADS` and `OWN_RANKINGS` there is one verdict for both rankings."""
    chosen: str = ""
    """Which choices were made after seeing results, and on which model and task a verdict is therefore exploratory."""
    departs: str = ""
    """Where it differs from what the paper did, beside `EVERYWHERE`; every experiment says it."""

    def caption(self) -> dict[str, Any]:
        """These by name, to make something else that bears the same caption."""
        return {field.name: getattr(self, field.name) for field in fields(Caption)}


@dataclass(frozen=True, kw_only=True)
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
    compares: bool = False
    """Whether it looks at the tasks that the settings name beside the one under study (`StudySettings.others`)."""
    classes: Literal["two", "any"] = "two"
    """Whether it needs one of two labels to be the answer in turn, or works with any number of classes."""
    leaves_out: bool = False
    """Whether one of its layouts leaves out a true demonstration."""

    timed: Callable[[Study, Any], Mapping[str, float]] | None = None
    """Seconds by what they were spent on: measured along with the result, but no part of it (`results.SECONDS`)."""

    def refusal(self, settings: StudySettings) -> str | None:
        """Why it cannot be run with these settings, in one sentence; None where it can."""
        if settings.classes == "all" and self.classes == "two":
            return (
                "it makes either of two labels the answer in turn, and with classes='all' each class has its own; ask "
                "for classes='binary'"
            )
        if settings.demonstrations < 2 and self.leaves_out:
            return (
                "it leaves out one of the true demonstrations, and there is only one; ask for demonstrations=2 or more"
            )
        return None

    def all_needs(self, settings: StudySettings) -> tuple[Need, ...]:
        """Every reduction that can be computed in a shared pass, for these settings."""
        further = () if self.needs_for is None else self.needs_for(self.config, settings)
        needs = [*self.needs, *further]
        if len(self.rankings) > 1:
            by_contrast = {head_increases: head_contrasts, layer_increases: layer_contrasts}
            needs += [Need(one.variant, by_contrast[one.reduction]) for one in needs if one.reduction in by_contrast]
        return tuple(needs)

    @property
    def rankings(self) -> tuple[Ranking, ...]:
        """By what heads are located, in turn: the paper's ranking first."""
        return RANKINGS[:1] if self.about in (NO_HEADS, OWN_RANKINGS) else RANKINGS

    def tabulate(self, study: Study) -> pd.DataFrame:
        """The experiment's table for every ranking (`by`), each prompt with the number of its query (`query`)."""
        frames = []
        for ranking in self.rankings:
            table = self.table(study.ranked_by(ranking), self.config)
            if "prompt" in table and "query" not in table:
                table = table.assign(query=study.queries()[table["prompt"].to_numpy(dtype=int)])
            frames.append(table.assign(by=ranking))
        return stack(*frames)

    def verdicts(self, table: pd.DataFrame) -> dict[Ranking, Verdict]:
        """The verdict on the part of `tabulate`'s table that each ranking made."""
        return {ranking: self.verdict(where(table, by=ranking)) for ranking in self.rankings}

    def figures(self, table: pd.DataFrame) -> dict[Ranking, Figure]:
        """The figure of the part of `tabulate`'s table that each ranking made."""
        return {ranking: self.figure(where(table, by=ranking)) for ranking in self.rankings}
