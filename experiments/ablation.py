"""What is lost without the located heads, and how many heads does it take?

1. Heads are ranked by what they add to the answer, on one half of the prompts.
2. On the other half, the first 12 are set to zero at the last position; to their means over other
   prompts; and to what they write in donor prompts, whose query is of the other class, or another
   one of the same class.
3. The control is the mean over 20 random sets with as many heads of the same layers.
4. The curve has the answer's log-odds without the first 1, 2, 4, ... heads, and without as many
   random heads.

    python experiments/ablation.py --model icl-mini --task animal-country -n 200

The published paper's ablation, and its open question how many heads there are.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from common import (
    COLORS,
    N_RANDOM_SETS,
    RANKINGS,
    Ranking,
    Scores,
    Study,
    Table,
    digest,
    from_command_line,
    legend_below,
    panels,
    thinned,
)
from matplotlib.figure import Figure

import icl_lens as il

COUNTS = (1, 2, 4, 8, 16, 32, 64)
N_RANDOM_CURVE = 5
"""Random sets for each number of heads in the curve."""
N_MEAN = 60
"""Means are taken over this many prompts to twice as many, or over all of a half that has fewer."""
VERSUS = "random heads of the same layers"

HeadSets = Sequence[Sequence[il.Head]]


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Remove located heads in four ways, and more and more of them, next to random heads."""
    study = Study.from_command_line(
        "ablation", "What is lost without the located heads?", arguments
    )
    table = Table(study)
    for ranking in RANKINGS:
        add_removals(study, table, ranking)
        add_curve(study, table, ranking)
        table.save(draw(table.to_frame()))
    return table.write(draw(table.to_frame()))


def add_removals(study: Study, table: Table, ranking: Ranking) -> None:
    """Add what the answer loses without the located heads, by each way of removing them."""
    located = study.located_heads(ranking)
    random_sets = il.random_head_sets(study.model, located, n_random=N_RANDOM_SETS, seed=study.seed)
    head_sets = [[], located, *random_sets]
    about = {"versus": VERSUS, "ranking": ranking, "note": " ".join(map(str, located))}

    def add(measure: str, scores: np.ndarray, unit: str = "nats") -> None:
        lost = scores[:, :1] - scores
        table.add(measure, lost[:, 1], lost[:, 2:], unit=unit, **about)

    zeroed = ablated(study, head_sets, f"zeroed, {ranking}")
    add("log-odds lost, heads zeroed", zeroed.log_odds)
    add("accuracy lost, heads zeroed", zeroed.correct, unit="%")
    intact, without_located = zeroed.correct[:, 0], zeroed.correct[:, 1]
    beside = {"versus": "without located heads", "ranking": ranking, "unit": "%"}
    table.add("accuracy of the intact model", intact, without_located, **beside)
    with_means = averaged(study, head_sets, f"means, {ranking}")
    add("log-odds lost, means over other prompts", with_means.log_odds)
    donors = il.donor_prompts(study.testing.prompts)
    for name, answer in (("query", "other answer"), ("same class", "same answer")):
        source = study.tokenize(donors[name])
        patched = from_donors(study, head_sets, source, f"{name}, {ranking}")
        add(f"log-odds lost, outputs from prompts with the {answer}", patched.log_odds)


def ablated(study: Study, head_sets: HeadSets, part: str) -> Scores:
    """Return how testing prompts are answered with each set of heads zero at the last position."""
    edits = [[il.Ablate(heads, positions="last")] for heads in head_sets]
    return study.scores(part, study.testing, lambda rows: edits, {"zeroed": names_of(head_sets)})


def averaged(study: Study, head_sets: HeadSets, part: str) -> Scores:
    """Return how testing prompts are answered with each set of heads at its mean outputs."""
    averaged_over = mean_prompts(study)
    reference = list(averaged_over.split(64))
    edits = []
    for heads in head_sets:
        edits.append([il.Ablate(heads, positions="last", mode="mean", reference=reference)])
    options = {"means": names_of(head_sets), "over": digest(averaged_over.texts)}
    return study.scores(part, study.testing, lambda rows: edits, options)


def mean_prompts(study: Study) -> il.PromptBatch:
    """Return the prompts that means are taken over: some of the locating half.

    For means over another task: `study.changed(task_source="fruit-vehicle", path=None).locating`.
    """
    return thinned(study.locating, N_MEAN)


def from_donors(study: Study, head_sets: HeadSets, donors: il.PromptBatch, part: str) -> Scores:
    """Return how testing prompts are answered with outputs from the donor in the same row."""

    def edits_of(rows: list[int]) -> list[list[il.Patch]]:
        source = donors[rows]
        return [[il.Patch(heads, source, activation="z", positions="last")] for heads in head_sets]

    options = {"patched": names_of(head_sets), "donors": list(donors.texts)}
    return study.scores(part, study.testing, edits_of, options)


def add_curve(study: Study, table: Table, ranking: Ranking) -> None:
    """Add log-odds and accuracy without the first k heads, next to k random heads."""
    n_heads = study.model.cfg.n_layers * study.model.cfg.n_heads
    counts = [count for count in COUNTS if count <= n_heads // 2]
    ranked = study.located_heads(ranking, counts[-1])
    draws: dict[str, Any] = {"n_random": N_RANDOM_CURVE, "seed": study.seed}
    head_sets: list[list[il.Head]] = []
    for count in counts:
        first = ranked[:count]
        head_sets += [first, *il.random_head_sets(study.model, first, **draws)]
    scores = ablated(study, head_sets, f"curve, {ranking}")
    shape = (len(study.testing), len(counts), 1 + N_RANDOM_CURVE)
    log_odds, correct = scores.log_odds.reshape(shape), scores.correct.reshape(shape)
    for measure, unit, values in (
        ("log-odds without k heads", "nats", log_odds),
        ("accuracy without k heads", "%", correct),
    ):
        about = {"versus": VERSUS, "unit": unit, "ranking": ranking}
        for place, count in enumerate(counts):
            table.add(measure, values[:, place, 0], values[:, place, 1:], at=count, **about)


def names_of(head_sets: HeadSets) -> list[str]:
    """Return the names of each set's heads, by which a run folder recognizes them."""
    return [" ".join(map(str, heads)) for heads in head_sets]


def draw(table: pd.DataFrame) -> Figure:
    """Draw the answer's log-odds without the first k heads by contrast, or k random ones."""
    curve = table.query("measure == 'log-odds without k heads' and ranking == 'contrast'")
    figure, pairs = panels(curve)
    for axes, rows in pairs:
        n_removed = rows["at"].astype(float)  # texts in published tables
        axes.plot(n_removed, rows["quantity"], "o-", color=COLORS[0], ms=3, label="located heads")
        axes.plot(
            n_removed,
            rows["control"],
            "o-",
            color=COLORS[1],
            ms=3,
            label="random heads of the same layers",
        )
        axes.axhline(0, color="#bbbbbb", lw=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("heads removed")
    pairs[0][0].set_ylabel("answer's log-odds, nats")
    legend_below(figure, pairs[0][0])
    return figure


if __name__ == "__main__":
    from_command_line(main)
