"""The tables of an explanation: one function each, which yields rows, and `TABLES`, which names them."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from icl_lens.attribution.reasons import SIDES
from icl_lens.head_scores import SCORES
from icl_lens.models.head import Head

if TYPE_CHECKING:
    from icl_lens.analyses.explanation import Explanation

Table = Literal["heads", "layers", "subheads", "labels", "demonstrations", "words", "similarity", "why"]
Row = dict[str, Any]


def _heads(explanation: "Explanation") -> Iterator[Row]:
    """All heads, with the score that ranks them first."""
    found = explanation.all_heads
    maps = {by: values for by in (explanation.settings.by, *SCORES) if (values := found.by(by))}
    for layer, head in product(*map(range, found.shape)):
        scores = {by: values[layer][head] for by, values in maps.items()}
        yield {"name": str(Head(layer, head)), **scores, "layer": layer, "head": head}


def _layers(explanation: "Explanation") -> Iterator[Row]:
    layers = explanation.layers
    parts = (("attn", layers.attn, layers.attn_contrast), ("ffn", layers.ffn, layers.ffn_contrast))
    for component, values, contrasts in parts:
        for layer, value in enumerate(values):
            row = {"layer": layer, "component": component, "increase": value}
            yield row | ({"contrast": contrasts[layer]} if contrasts else {})


def _subheads(explanation: "Explanation") -> Iterator[Row]:
    """The largest (head, position) parts."""
    by = explanation.part_score
    for part in explanation.subheads.largest:
        row = {"name": str(part.head), by: getattr(part, by), "position": part.position, "token": part.token}
        row |= {"increase": part.increase, "contrast": part.contrast}
        yield row | {"layer": part.head.layer, "head": part.head.head}


def _labels(explanation: "Explanation") -> Iterator[Row]:
    """Log-probabilities, also with located and with random heads zeroed, for which it is that of the mean probability.

    The page and the terminal show the same.
    """
    scores, draws = explanation.scores, explanation.ablation.random
    random_zeroed = [math.nan] * len(scores.labels)
    if draws:
        random_zeroed = (np.logaddexp.reduce(draws) - math.log(len(draws))).tolist()
    for i, label in enumerate(scores.labels):
        row = {"label": label, "log_prob": scores.log_probs[i]}
        row |= {"log_prob_located_zeroed": explanation.ablation.located[i], "log_prob_random_zeroed": random_zeroed[i]}
        row |= {"scored_token": scores.scored_tokens[i]} if scores.spellings else {}
        yield row | ({"log_prob_whole": scores.whole_log_probs[i]} if scores.whole_log_probs else {})


def _demonstrations(explanation: "Explanation") -> list[Row]:
    return explanation.demonstration_rows[:-2]  # without the totals


def _words(explanation: "Explanation") -> Iterator[Row]:
    """Top words of the located heads' values, keys and queries."""
    for report in explanation.heads:
        for position, kind, words, standout, rank in explanation.words_of(report):
            yield {
                "name": str(report.head),
                "position": position,
                "token": explanation.input.token_names[position],
                "kind": kind,
                "words": " ".join(words),
                "standout": math.nan if standout is None else standout,
                "own_label_rank": pd.NA if rank is None else rank,
            }


def _similarity(explanation: "Explanation") -> Iterator[Row]:
    """Scores of every query with every label's key."""
    found, names = explanation.input, (*explanation.labels, None)
    queries = (*found.prediction_positions, len(found.tokens) - 1)
    for report in explanation.heads:
        if not report.similarity:
            continue
        for position, query_label, row in zip(queries, explanation.query_labels, report.similarity, strict=True):
            for key, label, score in zip(found.label_positions, found.demonstration_labels, row, strict=True):
                yield {
                    "name": str(report.head),
                    "query_position": position,
                    "query_label": names[query_label],
                    "key_position": key,
                    "key_label": names[label],
                    "score": score,
                }


def _why(explanation: "Explanation") -> Iterator[Row]:
    """The largest parts, by writer, of the located heads' attention scores and of what their values add."""
    for report in explanation.heads:
        if report.why is None:
            continue
        names = {"more": report.why.more, "less": report.why.less}
        keys = {name: " ".join(map(explanation.key_name, positions)) for name, positions in names.items()}
        for side in SIDES:
            in_words = report.why.words(side)
            for writer, value in getattr(report.why, side):
                words, standout = in_words.get(writer, ((), math.nan))
                row = {"name": str(report.head), **keys, "side": side, "writer": writer, "value": value}
                yield row | {"words": " ".join(words), "standout": standout}
        for query_writer, key_writer, value in report.why.pairs:
            pair = f"{query_writer} × {key_writer}"
            yield {"name": str(report.head), **keys, "side": "pair", "writer": pair, "value": value}


TABLES: dict[Table, Callable[["Explanation"], Iterable[Row]]] = {
    "heads": _heads,
    "layers": _layers,
    "subheads": _subheads,
    "labels": _labels,
    "demonstrations": _demonstrations,
    "words": _words,
    "similarity": _similarity,
    "why": _why,
}
