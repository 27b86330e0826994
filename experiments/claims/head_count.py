"""Open question 3: accuracy as more and more located heads are removed, or as only they are kept."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

import icl_lens as il
from experiments.lab.drawing import legend_below, whiskers
from experiments.lab.editing import BAR, FOO, EditOf, located_for_both, right, scores
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, stack, where
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, all_of, judge
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import COLUMN

LINES = {
    "removed": ("located heads removed", ORANGE, "o-"),
    "random removed": ("random heads removed", GREY, "s--"),
    "kept": ("only located heads kept", BLUE, "^-"),
}

CHANCE = 0.5
"""Of the two labels of these tasks."""


@dataclass(frozen=True)
class HeadCountConfig:
    """Sets of random heads for each number of heads."""

    draws: int = 5


def table(study: Study, config: HeadCountConfig) -> pd.DataFrame:
    """edit (of LINES), count, share (of all heads), prompt, answer, correct (0–1).

    Zeroed at the last position only, so that earlier positions are as they were and what counts is which heads read
    them out. "random removed": mean of all draws.
    """
    everything = study.view.heads()
    ranked = located_for_both(study, len(everything))
    counts = [0, *(2**i for i in range(len(everything).bit_length()) if 2**i <= len(everything) // 2)]
    frames = []
    for answer, variant in (("foo", FOO), ("bar", BAR)):

        def correct(
            removed: list[il.Head], variant: Variant = variant, answer: str = answer
        ) -> Float[np.ndarray, " row"]:
            edit: EditOf = lambda batch: il.ablate_heads(study.model, removed, positions="last")  # noqa: E731
            label_scores = scores(study, variant, study.test, edit, what=f"without {len(removed)} heads, {answer}")
            return right(study, variant, study.test, label_scores)

        for count in counts:
            best = ranked[:count]
            draws = study.controls(best, config.draws) if count else [[]]
            values = {
                "removed": correct(best),
                "random removed": np.mean([correct(drawn) for drawn in draws], axis=0),
                "kept": correct([head for head in everything if head not in best]),
            }
            for edit, hits in values.items():
                frame = pd.DataFrame({"prompt": study.test.tolist(), "correct": hits})
                frames.append(frame.assign(edit=edit, count=count, share=count / len(everything), answer=answer))
    return stack(*frames)


def claim(table: pd.DataFrame) -> Verdict:
    """One head in eight is enough when kept alone, and is missed more than random ones when removed."""
    counts = sorted(table["count"].unique())
    few = max([count for count in counts if count and where(table, count=count)["share"].iloc[0] <= 0.125] or [1])
    whole = by_prompt(table, "correct", edit="removed", count=0)
    kept, removed, other = (
        by_prompt(table, "correct", edit=edit, count=few) for edit in ("kept", "removed", "random removed")
    )
    return all_of(
        judge(
            (kept - CHANCE) - 0.9 * (whole - CHANCE),
            least=0.0,
            unit="of accuracy",
            what=f"accuracy above chance with {few} heads kept minus 90 % of that with all",
        ),
        judge(other - removed, least=0.0, unit="of accuracy", what=f"cost of removing {few} beyond random ones"),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Accuracy against the number of heads, removed or kept, 95 % intervals."""
    drawn = Figure(figsize=(COLUMN, 2.5), layout="constrained")
    ax = drawn.subplots()
    counts = sorted(table["count"].unique())
    at = np.arange(len(counts))
    for edit, (label, hue, style) in LINES.items():
        samples = [by_prompt(table, "correct", edit=edit, count=count) for count in counts]
        means = [sample.mean() for sample in samples]
        ax.plot(at, means, style, color=hue, markersize=3.5, linewidth=1, label=label)
        ax.errorbar(at, means, yerr=whiskers(samples), fmt="none", ecolor=hue, elinewidth=0.8, capsize=1.5)
    ax.axhline(0.5, color="0.3", linewidth=0.6, linestyle=":")
    ax.set_xticks(at, [str(count) for count in counts])
    ax.set(xlabel="Located heads", ylabel="Accuracy (0–1)", ylim=(0, 1.02))
    legend_below(drawn, ax, columns=1)
    return drawn


EXPERIMENT = Experiment(
    id="head-count",
    title="How many heads it takes",
    source="Published version, open question 3",
    claim="Few heads read out: an eighth, kept alone at the last position, keeps 90 % of accuracy above chance.",
    criterion="One head in eight keeps 90 % of accuracy above chance; removing those costs more than random ones.",
    paper=None,
    config=HeadCountConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
