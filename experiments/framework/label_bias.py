"""A label bias before and after its published fix: the gap, the share removed, and accuracy in either kind of prompt.

Prompts come in pairs with one query: in the favored prompt the bias helps the answer, in the other one it does not. The
bias is the difference of the answer's log-odds (nats) or of accuracy. A fix is tried at several strengths in the
located heads and in random sets of heads from the same layers; every set gets its own strength on the locating half.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import icl_lens as il
from experiments.framework.estimate import Clusters, compare, compare_ratios
from experiments.framework.finding import Measure, Row, percent, rows_of
from experiments.framework.sentences import by_outcome, each
from experiments.framework.study import Scores, Study, clusters_of
from icl_lens.edits.edit import Edit
from icl_lens.measures.debias import Fix

STRENGTHS = (0.25, 0.5, 0.75, 1.0)
"""Strengths that are tried in addition to 0, which changes nothing."""
MAX_ACCURACY_DROP = 0.01
"""Accuracy (0–1) that a strength may cost over favored and unfavored prompts of the locating half."""
N_RANDOM_SETS = 5
N_CHOOSING = 60
"""Minimum number of locating prompts (if there are more) that strengths are tried on."""


@dataclass(frozen=True)
class Pairs:
    """Prompts with the same query and answer in each row; the bias helps the answer in `favored` only."""

    favored: il.PromptBatch
    unfavored: il.PromptBatch


def fix_measures(favored: str, unfavored: str, paper: int) -> tuple[Measure, ...]:
    """Return the measures of `measure_fix`; `paper` is the share of the bias that the paper's fix removes, %."""
    return (
        Measure(
            "removed",
            "removed by the fix in located heads",
            "removed by the fix in random heads",
            "% of the bias in log-odds",
            scale=100,
            digits=0,
            paper={"published version": paper},
        ),
        percent(
            "fixed", "gap with the fix in located heads", "gap without the fix", "accuracy between the labels, points"
        ),
        *(
            percent(
                name,
                f"accuracy where {words}, with the fix in located heads",
                "without the fix",
                "accuracy between the labels, %",
            )
            for name, words in (("favored", favored), ("unfavored", unfavored))
        ),
    )


FixedHeads = tuple[Sequence[il.Head], dict[str, float]]
"""Heads, and strengths as in `il.debias_edits`."""
NO_FIX: FixedHeads = ((), {})


def scores(study: Study, batch: il.PromptBatch, fixes: Sequence[FixedHeads] = (NO_FIX,)) -> Scores:
    """Return how each prompt is answered with each fix."""

    def sets_of(rows: slice) -> list[list[Edit]]:
        piece = batch[rows]
        return [
            il.debias_edits(piece, heads, majority=of.get("majority", 0.0), recency=of.get("recency", 0.0))
            for heads, of in fixes
        ]

    return study.scores(batch, sets_of)


def answered(study: Study, pairs: Pairs, fixes: Sequence[FixedHeads] = (NO_FIX,)) -> tuple[Scores, Scores]:
    """Return how favored and unfavored prompts are answered with each fix."""
    return scores(study, pairs.favored, fixes), scores(study, pairs.unfavored, fixes)


def choose_strengths(study: Study, pairs: Pairs, sets: Sequence[Sequence[il.Head]], fix: Fix) -> list[float]:
    """Return, for each set of heads, the strength that leaves the smallest bias at little cost in accuracy.

    Unlike `il.choose_strength`, it tries many sets in one pass, and a strength may lower accuracy on the favored
    prompts as much as it raises accuracy on the others.
    """
    fixes = [NO_FIX, *((heads, {fix: strength}) for heads in sets for strength in STRENGTHS)]
    return best_strengths(*answered(study, pairs, fixes))


def best_strengths(favored: Scores, unfavored: Scores) -> list[float]:
    """Return the best strength of each set, from scores without a fix and then with each set's `STRENGTHS`."""
    bias = np.abs((favored.odds - unfavored.odds).mean(0))
    accuracy = ((favored.correct + unfavored.correct) / 2).mean(0)
    bias[accuracy < accuracy[0] - MAX_ACCURACY_DROP - 1e-9] = np.inf
    tried = [[(bias[0], 0.0), *zip(some, STRENGTHS, strict=True)] for some in bias[1:].reshape(-1, len(STRENGTHS))]
    return [min(some)[1] for some in tried]


def bias_answer(cells: Sequence[Any], *, text: str, control: str) -> str:
    """Return whether there is the bias, its size next to the control's, and what the fix removes."""
    said = by_outcome(cells, "bias", text)
    fixed = each(cells, "removed", "{q}% of it (random heads: {c}%)")
    rest = f" The paper's fix removes {fixed}." if fixed else ""
    return f"{said}: {each(cells, 'bias', f'{{q}} nats ({control}: {{c}})')}.{rest}"


def gap_rows(pairs: tuple[Scores, Scores], control: tuple[Scores, Scores], clusters: Clusters) -> list[Row]:
    """Return rows "gap" (accuracy) and "bias" (log-odds): favored minus unfavored prompts, next to the control's."""
    (favored, unfavored), (also_favored, also_unfavored) = pairs, control
    gap, control_gap = favored.correct - unfavored.correct, also_favored.correct - also_unfavored.correct
    bias, control_bias = favored.odds - unfavored.odds, also_favored.odds - also_unfavored.odds
    found = {
        "gap": compare(gap[:, 0], control_gap[:, 0], clusters, bounds=(-1, 1)),
        "bias": compare(bias[:, 0], control_bias[:, 0], clusters),
    }
    return rows_of(found)


def accuracies(condition: str, favored: Scores, unfavored: Scores, **about: str | float) -> dict[str, str | float]:
    """Return a row of the details: accuracy in favored and unfavored prompts."""
    shares = {"favored": float(favored.correct.mean()), "unfavored": float(unfavored.correct.mean())}
    return {"condition": condition, **shares, **about}


def measure_fix(
    study: Study, fix: Fix, choosing: Pairs, tested: Pairs
) -> tuple[list[Row], list[dict[str, str | float]]]:
    """Measure what the fix does in heads located by either ranking; see `fix_measures`.

    Details: `accuracies` with the fix in located and in random heads. For models whose attention cannot be edited, the
    rows say so.
    """
    rows: list[Row] = []
    details = []
    for ranked in study.by_ranking():
        sets = [ranked.located, *ranked.random_sets(ranked.located, N_RANDOM_SETS)]
        try:
            strengths = choose_strengths(study, choosing, sets, fix)
        except il.InputError as error:
            return rows_of(dict.fromkeys(("removed", "fixed", "favored", "unfavored"), str(error))), []
        fixes = [NO_FIX, *((heads, {fix: strength}) for heads, strength in zip(sets, strengths, strict=True))]
        favored, unfavored = answered(study, tested, fixes)
        about = {"ranking": ranked.ranking, "note": f"strength {strengths[0]:g}"}
        rows += fix_rows(favored, unfavored, clusters_of(tested.favored), about)
        for name, some in (("located", slice(1, 2)), ("random", slice(2, None))):
            parts = favored.select(some), unfavored.select(some)
            details.append(accuracies(f"fix in {name} heads", *parts, ranking=ranked.ranking, strength=strengths[0]))
    return rows, details


def fix_rows(favored: Scores, unfavored: Scores, clusters: Clusters, about: dict[str, str]) -> list[Row]:
    """Return rows from scores without the fix, with it in located heads, and with it in each random set."""
    bias, gap = favored.odds - unfavored.odds, favored.correct - unfavored.correct
    removed = bias[:, :1] - bias
    shares = (removed[:, 1], bias[:, 0]), (removed[:, 2:].mean(1), bias[:, 0])
    found = {
        "removed": compare_ratios(*shares, clusters, total="the bias, nats,"),
        "fixed": compare(gap[:, 1], gap[:, 0], clusters, bounds=(-1, 1)),
    }
    for name, correct in (("favored", favored.correct), ("unfavored", unfavored.correct)):
        found[name] = compare(correct[:, 1], correct[:, 0], clusters, bounds=(0, 1))
    return [Row.from_result(name, one, **about) for name, one in found.items()]
