"""The experiments there are, in the paper's order."""

from importlib import import_module

from experiments.lab.experiment import Experiment
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
    "neighbours",
    "common-heads",
    "best-head",
    "ffn",
    "ablation",
    "causal-location",
    "label-features",
    "prediction-shift",
    "majority-bias",
    "recency-bias",
    "two-tower",
    "metric",
    "copy",
    "head-count",
    "shallow-flow",
    "task-transfer",
    "head-atlas",
    "location-methods",
    "learning-kind",
    "induction",
    "anchors",
    "function-vectors",
)
"""One module each: "top-heads" is experiments/claims/top_heads.py, whose EXPERIMENT describes it."""


def find(experiment_id: str) -> Experiment:
    """The experiment of that id; raises InputError if there is none."""
    if experiment_id not in IDS:
        raise InputError(f"there is no experiment {experiment_id!r}; choose from {', '.join(IDS)}")
    return import_module(f"experiments.claims.{experiment_id.replace('-', '_')}").EXPERIMENT
