"""The experiments there are, in the paper's order."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.lab.study import Need, Settings, Study
from experiments.lab.verdict import Verdict
from icl_lens.errors import InputError

IDS = (
    "layers",
    "vocabulary",
    "accuracy",
    "top-heads",
    "head-overlap",
    "label-rank",
    "label-attention",
    "attention-vs-increase",
    "imbalance",
    "order",
    "ffn",
    "ablation",
    "label-features",
    "prediction-shift",
    "majority-bias",
    "recency-bias",
    "two-tower",
    "head-count",
    "shallow-flow",
    "task-transfer",
    "head-atlas",
)
"""One module each: "top-heads" is experiments/top_heads.py, whose EXPERIMENT describes it."""


def no_needs(config: Any, settings: Settings) -> Iterable[Need]:
    """For experiments that make their own passes."""
    return ()


@dataclass(frozen=True)
class Experiment:
    """A figure or table of the paper: what is claimed, how it is computed, judged and drawn."""

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
    config: Any
    """A frozen dataclass; its values are part of the result's configuration."""
    table: Callable[[Study, Any], pd.DataFrame]
    verdict: Callable[[pd.DataFrame], Verdict]
    figure: Callable[[pd.DataFrame], Figure]
    needs: Callable[[Any, Settings], Iterable[Need]] = no_needs
    """Reductions that can be computed in a pass shared with other experiments."""
    mechanism: bool = True
    """Whether the claim is about HOW a model does the task, and so means nothing for a model that does not."""


def find(experiment_id: str) -> Experiment:
    """The experiment of that id; raises InputError if there is none."""
    if experiment_id not in IDS:
        raise InputError(f"there is no experiment {experiment_id!r}; choose from {', '.join(IDS)}")
    return import_module(f"experiments.{experiment_id.replace('-', '_')}").EXPERIMENT
