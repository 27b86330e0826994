"""Appendix A: how many of the located heads two tasks share, against chance."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

from experiments.lab.drawing import WHISKERS, legend_below
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, mean_by, stack, where
from experiments.lab.intervals import Resample, resample
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, StudySettings, Variant
from experiments.lab.verdict import SHARE, Verdict, verdict
from icl_lens.report.palette import BLUE
from icl_lens.report.plots import COLUMN


@dataclass(frozen=True)
class HeadOverlapConfig:
    """The tasks compared, with the one under study; heads located on each (at most one in eight); bootstrap draws."""

    tasks: tuple[str, ...] = ("sentiment-number", "animal-country", "number-sentiment", "country-animal")
    heads: int = 20
    draws: int = 1000


def compared(config: HeadOverlapConfig, settings: StudySettings) -> tuple[str, ...]:
    return tuple(dict.fromkeys((settings.task, *config.tasks)))


def needs_for(config: HeadOverlapConfig, settings: StudySettings) -> Iterable[Need]:
    return [Need(Variant(task=task), head_increases) for task in compared(config, settings)]


def table(study: Study, config: HeadOverlapConfig) -> pd.DataFrame:
    """pair, draw, shared (share of heads in both lists), chance, clusters (the smaller task's queries).

    Draw 0 is the data; the others draw whole queries of either task.
    """
    k = study.few(config.heads)
    lists, clusters = {}, {}
    for i, task in enumerate(compared(config, study.settings)):
        variant = Variant(task=task)
        drawn = resample([study.queries(variant)], draws=config.draws, seed=study.settings.seed + i)
        lists[task] = _top_lists(study.rises(variant).flatten(1), k, drawn)
        clusters[task] = drawn.clusters
    chance = k / len(study.view.heads())
    frames = []
    for first, second in combinations(lists, 2):
        shared = (lists[first] & lists[second]).sum(-1).numpy() / k
        columns = {"pair": f"{first} / {second}", "draw": range(len(shared)), "shared": shared, "chance": chance}
        frames.append(pd.DataFrame(columns).assign(clusters=min(clusters[first], clusters[second])))
    return stack(*frames)


def _top_lists(increases: Float[Tensor, "prompt head"], k: int, drawn: Resample) -> Bool[Tensor, "draw head"]:
    """Whether a head is among the k best: of all prompts, then of every draw's."""
    top = (torch.tensor(drawn.weights, dtype=increases.dtype) @ increases).topk(k, dim=-1).indices
    return torch.zeros(len(top), increases.shape[1], dtype=torch.bool).scatter_(1, top, True)


def claim(table: pd.DataFrame) -> Verdict:
    """The mean overlap of all pairs of tasks that are not the same words with the classes exchanged, beyond chance."""
    table = table.loc[[not _mirrored(pair) for pair in table["pair"]]]
    beyond = mean_by(table.assign(beyond=table["shared"] - table["chance"]), "beyond", "draw")
    found = Resample(np.ones((1, 1)), int(array(table, "clusters").min())).estimate(beyond)
    return verdict(found, least=0.25, unit="of the heads", what="overlap beyond chance")


def _mirrored(pair: str) -> bool:
    """Whether the two tasks are the same pair of categories with their roles exchanged."""
    first, second = pair.split(" / ")
    return first.split("-") == second.split("-")[::-1]


def figure(table: pd.DataFrame) -> Figure:
    """Share of located heads in common by pair of tasks, 95 % bootstrap intervals, and chance."""
    pairs = list(dict.fromkeys(table["pair"]))
    drawn = Figure(figsize=(COLUMN, 1.1 + 0.34 * len(pairs)), layout="constrained")
    ax = drawn.subplots()
    shared = [array(where(table, pair=pair), "shared") for pair in pairs]
    actual = np.array([values[0] for values in shared])
    clusters = [int(array(where(table, pair=pair), "clusters").min()) for pair in pairs]
    found = [
        Resample(np.ones((1, 1)), n).estimate(values, bounds=SHARE) for n, values in zip(clusters, shared, strict=True)
    ]
    reach = np.array([(one.low, one.high) for one in found]).T
    at = np.arange(len(pairs))[::-1]
    ax.barh(at, actual, height=0.6, color=BLUE)
    ax.errorbar(actual, at, xerr=np.maximum([actual - reach[0], reach[1] - actual], 0), **WHISKERS)
    ax.axvline(table["chance"].iloc[0], color="0.3", linewidth=0.8, linestyle="--", label="chance")
    ax.set_yticks(at, [pair.replace(" / ", "\n") for pair in pairs], fontsize=6)
    ax.set(xlabel="Located heads in common (share)", xlim=(0, 1.02))
    legend_below(drawn, ax)
    return drawn


EXPERIMENT = Experiment(
    id="head-overlap",
    title="Do tasks share their heads",
    source="Appendix A",
    claim="The heads that raise the answer are largely the same in different tasks.",
    criterion="Two tasks' lists of best heads share a quarter of their heads more than by chance, on average.",
    about="located heads, on all prompts of each task",
    departs=(
        "The paper calls the overlap large and gives no number, nor what chance would give; here it is the share of "
        "the lists in common beyond chance, of lists of at most one in eight heads where the paper's are 20 of 720. "
        "Pairs of tasks that are the same words with the classes exchanged do not count."
    ),
    paper="GPT-2 large: a large overlap; L26H14, L28H10 and L29H17 are important on all datasets",
    classes="any",
    config=HeadOverlapConfig(),
    needs_for=needs_for,
    table=table,
    verdict=claim,
    figure=figure,
)
