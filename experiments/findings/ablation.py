"""What is lost without the located heads, and how many heads does it take?"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

import icl_lens as il
from experiments.framework.estimate import Bounds, Comparison, compare
from experiments.framework.finding import Finding, Measure, Measured, Row, percent, rows_of
from experiments.framework.plotting import curves
from experiments.framework.sentences import by_outcome, each
from experiments.framework.study import MAX_ROWS, Scores, Study, thin_out
from icl_lens.prompts.donors import other_queries, partner_label, with_query

COUNTS = (1, 2, 4, 8, 16, 32, 64)
N_MEAN = 60
"""Minimum number of locating prompts (if there are more) that means are taken over."""

LOG_ODDS = Measure(
    "log_odds", "lost without located heads", "lost without random heads", "log-odds of the answer, nats"
)
ACCURACY = percent(
    "accuracy",
    "accuracy lost without located heads",
    "accuracy lost without random heads",
    "accuracy between the labels, points",
    paper={"GPT-J": 63.2},
)
MEAN = Measure(
    "log_odds_mean",
    "lost with located heads' means over other prompts",
    "lost with random heads' means",
    "log-odds of the answer, nats",
)
FROM_OTHER, FROM_SAME = (
    Measure(
        f"z_{name}",
        f"lost with located heads' outputs from prompts with {words}",
        "lost with random heads' outputs",
        "log-odds of the answer, nats",
    )
    for name, words in (("other", "the other answer"), ("same", "the same answer"))
)
INTACT = percent(
    "intact", "accuracy of the intact model", "accuracy without located heads", "accuracy between the labels, %"
)


def measure(study: Study) -> Measured:
    """Remove located heads at the last position, next to 20 random sets from the same layers, for both rankings."""
    rows: list[Row] = []
    details: list[pd.DataFrame] = []
    for ranked in study.by_ranking():
        sets = [[], ranked.located, *ranked.random_sets(ranked.located)]
        zero = ablated_scores(study, sets)
        found = {
            "log_odds": _lost(study, zero.odds),
            "accuracy": _lost(study, zero.correct, bounds=(0, 1)),
            "intact": compare(zero.correct[:, 0], zero.correct[:, 1], study.clusters, bounds=(0, 1)),
            "log_odds_mean": _lost(study, log_odds_with_means(study, sets)),
        }
        for name, source in exchanged_queries(study).items():
            found[f"z_{name}"] = _lost(study, log_odds_from(study, source, sets))
        rows += rows_of(found, ranking=ranked.ranking)
        details.append(_curve(ranked))
    return Measured(rows, pd.concat(details, ignore_index=True))


def _lost(study: Study, values: Float[np.ndarray, "row set"], bounds: Bounds | None = None) -> Comparison:
    """Compare what prompts lose with the second set of heads with the mean of the sets after it; the first is empty."""
    lost = values[:, :1] - values
    return compare(lost[:, 1], lost[:, 2:].mean(1), study.clusters, bounds=bounds)


def ablated_scores(study: Study, sets: Sequence[Sequence[il.Head]]) -> Scores:
    """Return how held-out prompts are answered without each set; heads are set to zero at the last position."""
    return study.scores(study.held_out, lambda rows: [[il.Ablate(heads, positions="last")] for heads in sets])


def log_odds_with_means(study: Study, sets: Sequence[Sequence[il.Head]]) -> Float[np.ndarray, "row set"]:
    """Return the answer's log-odds, nats, with each set's z at the last position set to its mean over other prompts."""
    reference = list(thin_out(study.halves()[0], N_MEAN).split(MAX_ROWS))
    edits = [[il.Ablate(heads, positions="last", mode="mean", reference=reference)] for heads in sets]
    return study.scores(study.held_out, lambda rows: edits).odds


def exchanged_queries(study: Study) -> dict[str, il.PromptBatch]:
    """Return the held-out prompts with another query: of the other class ("other"), or of the same one ("same")."""

    def tokenize() -> dict[str, il.PromptBatch]:
        prompts = study.held_out.prompts
        pairs = list(zip(prompts, other_queries(prompts), strict=True))
        other = [with_query(prompt, queries.other, partner_label(prompt)) for prompt, queries in pairs]
        same = [with_query(prompt, queries.same, prompt.answer) for prompt, queries in pairs]
        return {"other": study.tokenize(other), "same": study.tokenize(same)}

    return study.memoize("exchanged queries", tokenize)


def log_odds_from(
    study: Study, source: il.PromptBatch, sets: Sequence[Sequence[il.Head]]
) -> Float[np.ndarray, "row set"]:
    """Return the answer's log-odds, nats, with each set's z at the last position taken from the source's prompts."""

    def sets_of(rows: slice) -> list[list[il.Patch]]:
        donors = source[rows]  # one batch for all patches, which then share its pass
        return [[il.Patch(heads, donors, activation="z", positions="last")] for heads in sets]

    return study.scores(study.held_out, sets_of).odds


def _curve(study: Study) -> pd.DataFrame:
    """Return accuracy and log-odds without the first 1, 2, 4, … heads, and without as many random heads (5 sets)."""
    ranked = study.ranked_heads()
    counts = [count for count in COUNTS if count <= len(ranked) // 2]
    random = [study.random_sets(ranked[:count], n=5) for count in counts]
    sets: list[Sequence[il.Head]] = [[]]
    names = [("none", 0)]
    for count, drawn in zip(counts, random, strict=True):
        names += [("located", count), *[("random", count)] * len(drawn)]
        sets += [ranked[:count], *drawn]
    odds, correct = (values.mean(0) for values in ablated_scores(study, sets))
    table = pd.DataFrame(names, columns=["heads", "count"]).assign(accuracy=correct, log_odds=odds)
    means: Any = table.groupby(["heads", "count"], sort=False, as_index=False).mean()
    return means.assign(ranking=study.ranking)


def answer(cells: Sequence[Any]) -> str:
    """Return the answer in one or two sentences."""
    said = by_outcome(cells, "log_odds", "{where}, more than without random heads")
    lost = each(cells, "log_odds", "{q} nats (random heads: {c})")
    return f"{said}: removing the located heads costs the answer {lost}."


FINDING = Finding(
    id="ablation",
    title="What is lost without the located heads?",
    question="Does removing the located heads cost the answer more than removing other heads of the same layers?",
    answer=answer,
    claim="Removing 12 of GPT-J's 448 heads (6 for each label) lowers accuracy from 87.6% to 24.4%; "
    "removing random heads changes little.",
    covers="the published version's ablation, and the paper's open question 3: how many heads",
    measures=(LOG_ODDS, MEAN, FROM_OTHER, FROM_SAME, ACCURACY, INTACT),
    measure=measure,
    look_for="The answer's log-odds with the first 1, 2, 4, … located heads set to zero, and with as many random "
    "heads of the same layers.",
    method="Heads are ranked by contrast (in the rows “by increase”, by increase) on one half of the prompts and set "
    "to zero at the last position on the other half, whose queries are other words. Each of 20 random sets has the "
    "same number of heads from the same layers, none of them located. The answer's log-odds are log p(answer) − log "
    "p(other label).",
    caveats=(
        "Located heads are chosen because they write the answer. Even if nearly all of it comes from elsewhere, such "
        "as an FFN, removing them therefore costs a little more than removing random heads: compare the loss with the "
        "log-odds of the intact model.",
        "With two labels, accuracy cannot fall far below 50%; the paper's 24.4% is over the whole vocabulary.",
        "Heads are removed at the last position only; what they do elsewhere is not measured here.",
    ),
    draw=partial(curves, x="count", y="log_odds", by="heads", labels=("heads removed", "answer's log-odds, nats")),
)
