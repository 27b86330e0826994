"""What the scripts on label biases share: a bias as a difference between pairs of prompts, and its
published fix.

Prompts come in pairs with one query: in the favored prompt the bias helps the answer, in the other
one it does not. The bias is the difference of the answer's log-odds, or of accuracy. A fix
(`il.debias_edits`) is tried at several strengths in the located heads and in random sets of heads
of the same layers; each set gets the strength that leaves the smallest bias on the locating half,
among those that cost at most one point of accuracy."""

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from common import COLORS, RANKINGS, Ranking, Scores, Study, Table, legend_below, panels
from matplotlib.figure import Figure

import icl_lens as il

Fix = Literal["majority", "recency"]
STRENGTHS = (0.25, 0.5, 0.75, 1.0)
"""Strengths that are tried beside 0, which changes nothing."""
MAX_ACCURACY_DROP = 0.01
N_RANDOM_SETS = 5
N_CHOOSING = 60
"""Strengths are tried on this many locating prompts to twice as many, or on all of a half that has
fewer."""
BIAS = "log-odds, favored − unfavored prompts"
GAP = "accuracy, favored − unfavored prompts"
REMOVED = "share of the bias that the fix removes"


class Pairs(NamedTuple):
    """Prompts with the same query and answer in each row; the bias helps the answer in the favored
    ones only."""

    favored: il.PromptBatch
    unfavored: il.PromptBatch


class PairScores(NamedTuple):
    """How both prompts of every pair are answered under sets of edits."""

    favored: Scores
    unfavored: Scores

    @property
    def bias(self) -> np.ndarray:
        """The difference of the answer's log-odds, nats, [pair set]."""
        return self.favored.log_odds - self.unfavored.log_odds

    @property
    def gap(self) -> np.ndarray:
        """The difference of being right, −1 to 1, [pair set]."""
        return self.favored.correct - self.unfavored.correct


def answered(
    study: Study,
    part: str,
    pairs: Pairs,
    fix: Fix,
    settings: Sequence[tuple[Sequence[il.Head], float]] = (((), 0.0),),
) -> PairScores:
    """Return how pairs are answered with the fix in some heads at some strength, one set per entry
    of `settings`."""
    names = [[" ".join(map(str, heads)), strength] for heads, strength in settings]
    options = {"fix": fix, "settings": names}
    scores = []
    for name, batch in zip(Pairs._fields, pairs, strict=True):

        def edits_of(rows: list[int], batch: il.PromptBatch = batch) -> list[Any]:
            edits = []
            for heads, strength in settings:
                of_fix: dict[str, Any] = {fix: strength}
                edits.append(il.debias_edits(batch[rows], heads, **of_fix))
            return edits

        scores.append(study.scores(f"{part}, {name}", batch, edits_of, options))
    return PairScores(*scores)


def add_bias(
    study: Study, table: Table, pairs: Pairs, control: Pairs, fix: Fix, *, versus: str
) -> None:
    """Add the bias in log-odds and in accuracy, next to that in other pairs of prompts."""
    with_bias = answered(study, "bias", pairs, fix)
    without_bias = answered(study, "control", control, fix)
    queries, about = pairs.favored.queries, {"versus": versus}
    table.add(BIAS, with_bias.bias[:, 0], without_bias.bias[:, 0], queries, **about)
    gaps = with_bias.gap[:, 0], without_bias.gap[:, 0]
    table.add_difference_of_shares(GAP, *gaps, queries, **about)
    add_accuracy(table, "no fix", with_bias, 0, queries)


def add_accuracy(
    table: Table,
    condition: str,
    scores: PairScores,
    place: int,
    queries: Sequence[str],
    ranking: str = "",
) -> None:
    """Add the accuracy in favored prompts next to that in unfavored ones."""
    favored, unfavored = scores.favored.correct[:, place], scores.unfavored.correct[:, place]
    about = {"at": condition, "ranking": ranking, "unit": "%", "versus": "unfavored prompts"}
    table.add("accuracy in favored prompts", favored, unfavored, queries, **about)


def add_fix(study: Study, table: Table, fix: Fix, choosing: Pairs, tested: Pairs) -> None:
    """Add what the fix removes of the bias in heads located by either ranking, next to random
    heads."""
    for ranking in RANKINGS:
        located = study.located_heads(ranking)
        random_sets = il.random_head_sets(
            study.model, located, n_random=N_RANDOM_SETS, seed=study.seed
        )
        head_sets = [located, *random_sets]
        try:
            strengths = choose_strengths(study, fix, choosing, head_sets, ranking)
        except il.InputError as error:  # a model whose attention cannot be edited
            table.add_missing(REMOVED, error)
            return
        settings = [((), 0.0), *zip(head_sets, strengths, strict=True)]
        scores = answered(study, f"fixed, {ranking}", tested, fix, settings)
        add_fixed(table, scores, tested.favored.queries, ranking, f"strength {strengths[0]:g}")


def choose_strengths(
    study: Study,
    fix: Fix,
    choosing: Pairs,
    head_sets: Sequence[Sequence[il.Head]],
    ranking: Ranking,
) -> list[float]:
    """Return, for each set of heads, the strength with the smallest bias at little cost in
    accuracy."""
    tried = list(product(head_sets, STRENGTHS))
    scores = answered(study, f"choosing, {ranking}", choosing, fix, [((), 0.0), *tried])
    bias = np.abs(scores.bias.mean(0))
    accuracy = ((scores.favored.correct + scores.unfavored.correct) / 2).mean(0)
    bias[accuracy < accuracy[0] - MAX_ACCURACY_DROP - 1e-9] = np.inf
    strengths = []
    for of_set in bias[1:].reshape(-1, len(STRENGTHS)):
        candidates = [(bias[0], 0.0), *zip(of_set, STRENGTHS, strict=True)]
        strengths.append(min(candidates)[1])
    return strengths


def add_fixed(
    table: Table, scores: PairScores, queries: Sequence[str], ranking: Ranking, note: str
) -> None:
    """Add what the fix removes, and accuracy with it; the first set has no fix, the second is the
    located heads."""
    about: dict[str, Any] = {"ranking": ranking, "note": note}
    without_fix = about | {"versus": "without the fix"}
    bias = scores.bias
    removed = bias[:, :1] - bias
    rows = np.stack([bias[:, 0], removed[:, 1], removed[:, 2:].mean(1)], axis=1)
    if il.metrics.bootstrap_interval(bias[:, 0], clusters=queries).low > 0:
        table.add_statistic(
            REMOVED,
            rows,
            lambda draws: draws[:, 1].mean() / draws[:, 0].mean(),
            lambda draws: draws[:, 2].mean() / draws[:, 0].mean(),
            queries,
            unit="%",
            set_values=removed[:, 2:].mean(0) / bias[:, 0].mean(),
            versus="the fix in random heads",
            **about,
        )
    else:
        table.add_missing(REMOVED, "the bias is not above zero, so it has no shares")
    gaps = scores.gap[:, 1], scores.gap[:, 0]
    table.add_difference_of_shares("accuracy gap with the fix", *gaps, queries, **without_fix)
    for name, of_prompts in zip(Pairs._fields, scores, strict=True):
        correct = of_prompts.correct
        measure = f"accuracy in {name} prompts with the fix"
        table.add(measure, correct[:, 1], correct[:, 0], queries, unit="%", **without_fix)
    add_accuracy(table, "fix in located heads", scores, 1, queries, ranking)


def by_answer(
    prompt: il.Prompt,
) -> tuple[list[il.Demonstration], list[il.Demonstration]]:
    """Return the demonstrations with the answer's label, and the others."""
    with_answer, without_answer = [], []
    for demonstration in prompt.demonstrations:
        is_true = demonstration.label == prompt.answer
        (with_answer if is_true else without_answer).append(demonstration)
    return with_answer, without_answer


def draw(table: pd.DataFrame) -> Figure:
    """Draw accuracy in favored and unfavored prompts, without and with the fix, for heads located
    by contrast."""
    accuracies = table.query("measure == 'accuracy in favored prompts' and ranking != 'increase'")
    figure, pairs = panels(accuracies, height=2.1)
    for place, (axes, rows) in enumerate(pairs):
        axes.hlines(rows["at"], rows["control"], rows["quantity"], color="#bbbbbb", lw=2, zorder=1)
        circle: dict[str, Any] = {"mfc": "white", "mec": COLORS[1], "ms": 8}
        axes.plot(rows["control"], rows["at"], "o", label="unfavored prompts", **circle)
        dot: dict[str, Any] = {"color": COLORS[0], "ms": 4.5}
        axes.plot(rows["quantity"], rows["at"], "o", label="favored prompts", **dot)
        axes.axvline(50, color="black", lw=0.8, ls="--")
        axes.set_ylim(len(rows) - 0.5, -0.5)
        if place % 3:
            axes.set_yticklabels([])
        axes.set_xlabel("accuracy, %", fontsize=8)
    legend_below(figure, pairs[0][0])
    return figure
