"""The tables of an explanation, row by row; each is made of the sections that it shows."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd

from icl_lens.analyses.explanation_reports import (
    AblationReport,
    AllHeadsReport,
    Grid,
    HeadReport,
    LayerReport,
    ScoreReport,
    SubheadsReport,
)
from icl_lens.head_scores import SCORES, DirectScore, Score
from icl_lens.models.head import Head
from icl_lens.reading.reasons import SIDES, AttentionReasons

TableName = Literal[
    "heads", "layers", "subheads", "labels", "demonstrations", "words", "similarity", "why"
]
Row = dict[str, Any]
TopWords = tuple[int, str, tuple[str, ...], float | None, int | None]
"""Position, kind ("value", "key" or "query"), top words, standout and, for values, rank."""
Place = tuple[int, str | None]
"""A position, and the label there; None if it is not known."""


def heads(all_heads: AllHeadsReport, by: Score) -> Iterator[Row]:
    """Yield all heads, with the score that ranks them first."""
    grids: dict[Score, Grid] = {}
    for score in (by, *SCORES):
        if grid := all_heads.by(score):
            grids[score] = grid
    for layer, head in product(*map(range, all_heads.shape)):
        scores = {score: grid[layer][head] for score, grid in grids.items()}
        yield {"name": str(Head(layer, head)), **scores, "layer": layer, "head": head}


def layers(report: LayerReport) -> Iterator[Row]:
    """Yield what attention and FFN of each layer add."""
    components = (
        ("attn", report.attn, report.attn_contrast),
        ("ffn", report.ffn, report.ffn_contrast),
    )
    for component, values, contrasts in components:
        for layer, value in enumerate(values):
            row = {"layer": layer, "component": component, "increase": value}
            if contrasts:
                row["contrast"] = contrasts[layer]
            yield row


def subheads(report: SubheadsReport, by: DirectScore) -> Iterator[Row]:
    """Yield the largest (head, position) parts."""
    for part in report.largest:
        row = {"name": str(part.head), by: getattr(part, by)}
        row |= {"position": part.position, "token": part.token}
        row |= {"increase": part.increase, "contrast": part.contrast}
        yield row | {"layer": part.head.layer, "head": part.head.head}


def labels(scores: ScoreReport, ablation: AblationReport) -> Iterator[Row]:
    """Yield each label's log-probability, of the unedited model and with heads zeroed.

    Over the draws of random heads, it is the log of the mean probability, as the page and the
    terminal show it.
    """
    draws = ablation.random
    random_zeroed = [math.nan] * len(scores.labels)
    if draws:
        random_zeroed = (np.logaddexp.reduce(draws) - math.log(len(draws))).tolist()
    for i, label in enumerate(scores.labels):
        row = {
            "label": label,
            "log_prob": scores.log_probs[i],
            "log_prob_located_zeroed": ablation.located[i],
            "log_prob_random_zeroed": random_zeroed[i],
        }
        if scores.spellings:
            row["scored_token"] = scores.scored_tokens[i]
        if scores.whole_log_probs:
            row["log_prob_whole"] = scores.whole_log_probs[i]
        yield row


def words(
    reports: Iterable[HeadReport],
    words_of: Callable[[HeadReport], Iterable[TopWords]],
    token_names: Sequence[str],
) -> Iterator[Row]:
    """Yield the top words of the located heads' values, keys and queries."""
    for report in reports:
        for position, kind, top_words, standout, rank in words_of(report):
            yield {
                "name": str(report.head),
                "position": position,
                "token": token_names[position],
                "kind": kind,
                "words": " ".join(top_words),
                "standout": math.nan if standout is None else standout,
                "own_label_rank": pd.NA if rank is None else rank,
            }


def similarity(
    reports: Iterable[HeadReport], queries: Sequence[Place], keys: Sequence[Place]
) -> Iterator[Row]:
    """Yield the score of every query with every label's key."""
    for report in reports:
        if not report.similarity:
            continue
        for (query, query_label), scores in zip(queries, report.similarity, strict=True):
            for (key, key_label), score in zip(keys, scores, strict=True):
                yield {
                    "name": str(report.head),
                    "query_position": query,
                    "query_label": query_label,
                    "key_position": key,
                    "key_label": key_label,
                    "score": score,
                }


def why(reports: Iterable[HeadReport], key_name: Callable[[int], str]) -> Iterator[Row]:
    """Yield the largest parts, by writer, of the heads' attention scores and of what their values
    add.
    """
    for report in reports:
        if report.why is None:
            continue
        compared = {
            "name": str(report.head),
            "more": " ".join(map(key_name, report.why.more)),
            "less": " ".join(map(key_name, report.why.less)),
        }
        for part in _parts_by_writer(report.why):
            yield compared | part


def _parts_by_writer(reasons: AttentionReasons) -> Iterator[Row]:
    """Yield the parts of each side, with the words of the largest, and those of pairs."""
    for side in SIDES:
        in_words = reasons.words(side)
        for writer, value in getattr(reasons, side):
            top_words, standout = in_words.get(writer, ((), math.nan))
            row = {"side": side, "writer": writer, "value": value}
            yield row | {"words": " ".join(top_words), "standout": standout}
    for query_writer, key_writer, value in reasons.pairs:
        yield {"side": "pair", "writer": f"{query_writer} × {key_writer}", "value": value}
