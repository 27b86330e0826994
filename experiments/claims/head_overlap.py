"""Appendix A: how many of the located heads two tasks share, against chance."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

from experiments.claims.tasks import compared, mirrored
from experiments.lab.drawing import WHISKERS, legend_below, mark_zeros
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, stack, where
from experiments.lab.intervals import Resample, resample
from experiments.lab.reductions import correct, head_increases
from experiments.lab.study import Need, Study, StudySettings, Variant
from experiments.lab.verdict import SHARE, Verdict, all_of, cannot_tell, verdict
from icl_lens.prompts.tasks import WORD_TASKS
from icl_lens.report.palette import BLUE, SKY
from icl_lens.report.plots import COLUMN

QUARTER = 0.25
"""Of the heads: what two tasks share beyond chance."""
FULL = 0.9
"""Of the heads: where random ones of the same layers would share as many, the lists fill their layers."""
CASES = {"all": ("all prompts", BLUE), "correct": ("answered rightly", SKY)}


@dataclass(frozen=True)
class HeadOverlapConfig:
    """The tasks compared, with those of the study; heads located on each (at most one in eight); bootstrap draws."""

    tasks: tuple[str, ...] = WORD_TASKS
    heads: int = 20
    draws: int = 1000


def needs_for(config: HeadOverlapConfig, settings: StudySettings) -> Iterable[Need]:
    reductions = (head_increases, correct)
    return [Need(Variant(task=task), one) for task in compared(config.tasks, settings) for one in reductions]


def table(study: Study, config: HeadOverlapConfig) -> pd.DataFrame:
    """pair, cases ("all" | "correct"), draw, shared, chance, layers, clusters (the smaller task's queries).

    `shared`: share of heads in both lists; `chance`: what random heads would share, `layers`: random ones of the same
    layers. "correct": heads are located on prompts that the model answers rightly. Draw 0 is the data; the others draw
    whole queries of either task. Without a value where a draw has no such prompt.
    """
    k = study.few(config.heads)
    chance = k / len(study.view.heads())
    tasks = compared(config.tasks, study.settings)
    frames = []
    for cases in CASES:
        lists, clusters = {}, {}
        for i, task in enumerate(tasks):
            variant = Variant(task=task)
            queries = study.queries(variant)
            drawn = resample([queries], draws=config.draws, seed=study.settings.seed + i)
            counted = _right(study, variant) if cases == "correct" else np.ones(len(queries), bool)
            lists[task] = top_lists(study.ranked(variant), k, drawn.weights * counted)
            clusters[task] = len({*queries[counted]})
        for first, second in combinations(tasks, 2):
            shared, layers = in_common(lists[first], lists[second])
            columns = {"shared": shared, "layers": layers, "draw": range(len(shared)), "chance": chance}
            frame = pd.DataFrame(columns).assign(pair=f"{first} / {second}", cases=cases)
            frames.append(frame.assign(clusters=min(clusters[first], clusters[second])))
    return stack(*frames)


def _right(study: Study, variant: Variant) -> Bool[np.ndarray, " prompt"]:
    """Prompts that are answered rightly; by contrast with either label as the answer, as heads are ranked."""
    right = study.get(correct, variant).numpy() > 0.5
    if study.ranking == "contrast":
        right &= study.get(correct, replace(variant, swapped=not variant.swapped)).numpy() > 0.5
    return right


def top_lists(
    increases: Float[Tensor, "prompt layer head"], k: int, weights: Float[np.ndarray, "draw prompt"]
) -> Float[np.ndarray, "draw layer head"]:
    """1 where a head is among the k best of the prompts as they are weighted, else 0; NaN in a draw without prompts."""
    mean = torch.tensor(weights, dtype=increases.dtype) @ increases.flatten(1)
    lists = np.zeros(mean.shape)
    np.put_along_axis(lists, mean.topk(k, dim=-1).indices.numpy(), 1.0, axis=-1)
    lists[weights.sum(-1) == 0] = np.nan
    return lists.reshape(-1, *increases.shape[1:])


def in_common(
    first: Float[np.ndarray, "draw layer head"], second: Float[np.ndarray, "draw layer head"]
) -> tuple[Float[np.ndarray, " draw"], Float[np.ndarray, " draw"]]:
    """The share of heads in common, and what random lists with as many heads of each layer would have."""
    k = first.sum((1, 2))
    return (first * second).sum((1, 2)) / k, (first.sum(2) * second.sum(2)).sum(1) / first.shape[2] / k


def claim(table: pd.DataFrame) -> Verdict:
    """The mean overlap of all pairs of tasks that are not the same words with the classes exchanged.

    Beyond chance by a quarter, and beyond random heads of the same layers; on all prompts, and on those answered
    rightly.
    """
    table = table.loc[[not mirrored(*pair.split(" / ")) for pair in table["pair"]]]
    parts = []
    for cases, (named, _) in CASES.items():
        part = where(table, cases=cases)
        drawn = Resample(np.ones((1, 1)), int(array(part, "clusters").min()))
        shared, chance, layers = (_by_draw(part, column) for column in ("shared", "chance", "layers"))
        beyond = drawn.estimate(shared - chance)
        if layers[0] > FULL:
            why = f"random heads of the same layers would share {layers[0]:.0%} of the heads on {named}"
            return cannot_tell(why, unit="of the heads", estimate=beyond)
        unit, what = "of the heads", f"overlap beyond chance, {named}"
        parts.append(verdict(beyond, least=QUARTER, unit=unit, what=what))
        what = f"overlap beyond random heads of the same layers, {named}"
        parts.append(verdict(drawn.estimate(shared - layers), least=0.0, unit=unit, what=what))
    return all_of(*parts)


def _by_draw(table: pd.DataFrame, column: str) -> Float[np.ndarray, " draw"]:
    """The mean over pairs; none in a draw in which a pair has none."""
    values = table.pivot(index="draw", columns="pair", values=column).sort_index().to_numpy()
    return values.mean(1)


def figure(table: pd.DataFrame) -> Figure:
    """Share of located heads in common by pair of tasks, 95 % bootstrap intervals; chance, and that within layers."""
    pairs = list(dict.fromkeys(table["pair"]))
    drawn = Figure(figsize=(COLUMN, 1.3 + 0.36 * len(pairs)), layout="constrained")
    ax = drawn.subplots()
    bars: list[tuple[float, float]] = []
    for i, (cases, (named, hue)) in enumerate(CASES.items()):
        for at, pair in zip(range(len(pairs))[::-1], pairs, strict=True):
            part = where(table, pair=pair, cases=cases).sort_values("draw")
            n = int(array(part, "clusters").min())
            found = Resample(np.ones((1, 1)), n).estimate(array(part, "shared"), bounds=SHARE)
            y = at - 0.34 * (i - 0.5)
            ax.barh(y, found.value, height=0.32, color=hue, label=named if pair == pairs[0] else None)
            reach = [[found.value - found.low], [found.high - found.value]]
            ax.errorbar(found.value, y, xerr=np.maximum(np.nan_to_num(reach), 0), **WHISKERS)
            shown = "random heads, same layers" if i == 0 and pair == pairs[0] else None
            ax.plot([array(part, "layers")[0]] * 2, [y - 0.16, y + 0.16], color="black", linewidth=1.2, label=shown)
            bars.append((y, found.value))
    ax.axvline(table["chance"].iloc[0], color="0.3", linewidth=0.8, linestyle="--", label="chance")
    ax.set_yticks(range(len(pairs))[::-1], [pair.replace(" / ", "\n") for pair in pairs], fontsize=6)
    ax.set(xlabel="Located heads in common (share)", xlim=(0, 1.02))
    mark_zeros(ax, *zip(*bars, strict=True), across=True)
    legend_below(drawn, ax, columns=2)
    return drawn


EXPERIMENT = Experiment(
    id="head-overlap",
    title="Do tasks share their heads",
    source="Section 4.2, Appendices A, B",
    claim="The heads that raise the answer are largely the same in different tasks.",
    criterion=(
        "Two tasks' lists of best heads share a quarter of their heads more than by chance, and more than random heads "
        "of the same layers would, on average over pairs of tasks; on all prompts, and on those that the model answers "
        "rightly (the paper's)."
    ),
    about="located heads, on all prompts of each task",
    departs=(
        "The paper calls the overlap large and gives no number, nor what chance would give; here it is the share of "
        "the lists in common beyond chance, of lists of at most one in eight heads where the paper's are 20 of 720. "
        "Pairs of tasks that are the same words with the classes exchanged do not count."
    ),
    paper="GPT-2 large: a large overlap; L26H14, L28H10 and L29H17 are important on all datasets",
    classes="any",
    config=HeadOverlapConfig(),
    compares=True,
    needs_for=needs_for,
    table=table,
    verdict=claim,
    figure=figure,
)
