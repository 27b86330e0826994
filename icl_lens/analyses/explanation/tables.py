"""The tables of an explanation, row by row, and what else its page and terminal list."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd

from icl_lens.analyses.explanation.reports import ExplanationReports, Grid, words_of
from icl_lens.foundation.ranking_scores import SCORES, DirectScore, Score, score_of_parts
from icl_lens.models.head import Head
from icl_lens.reading.reasons import SIDES, AttentionReasons
from icl_lens.result.view import Label

TableName = Literal[
    "heads", "layers", "subheads", "labels", "demonstrations", "words", "similarity", "why"
]
TableRow = dict[str, Any]
LabeledPosition = tuple[int, str | None]
"""A position, and the label there; None if it is not known."""
MAX_DEMONSTRATIONS = 16
"""Demonstrations shown by the page and the terminal: those with the largest effects."""


def heads(reports: ExplanationReports) -> Iterator[TableRow]:
    """Yield all heads, with the score that ranks them first."""
    all_heads = reports.all_heads
    grids: dict[Score, Grid] = {}
    for score in (reports.settings.by, *SCORES):
        if grid := all_heads.by(score):
            grids[score] = grid
    for layer, head in product(*map(range, all_heads.shape)):
        scores = {score: grid[layer][head] for score, grid in grids.items()}
        yield {"name": str(Head(layer, head)), **scores, "layer": layer, "head": head}


def layers(reports: ExplanationReports) -> Iterator[TableRow]:
    """Yield what attention and FFN of each layer add."""
    report = reports.layers
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


def subheads(reports: ExplanationReports) -> Iterator[TableRow]:
    """Yield the largest (head, position) parts."""
    by = part_score(reports)
    for part in reports.subheads.largest:
        row = {"name": str(part.head), by: getattr(part, by)}
        row |= {"position": part.position, "token": part.token}
        row |= {"increase": part.increase, "contrast": part.contrast}
        yield row | {"layer": part.head.layer, "head": part.head.head}


def labels(reports: ExplanationReports) -> Iterator[TableRow]:
    """Yield each label's log-probability, of the unedited model and with heads zeroed.

    Over the draws of random heads, it is the log of the mean probability, as the page and the
    terminal show it.
    """
    scores, ablation = reports.scores, reports.ablation
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


def demonstrations(reports: ExplanationReports) -> list[TableRow]:
    """Return what each demonstration adds, without the totals."""
    return demonstration_rows(reports)[:-2]


def words(reports: ExplanationReports) -> Iterator[TableRow]:
    """Yield the top words of the located heads' values, keys and queries."""
    for report in reports.heads:
        for position, kind, top_words, standout, rank in words_of(reports.input, report):
            yield {
                "name": str(report.head),
                "position": position,
                "token": reports.input.token_names[position],
                "kind": kind,
                "words": " ".join(top_words),
                "standout": math.nan if standout is None else standout,
                "own_label_rank": pd.NA if rank is None else rank,
            }


def similarity(reports: ExplanationReports) -> Iterator[TableRow]:
    """Yield the score of every query with every label's key; nothing predicts a label at the start."""
    queries, keys = _query_places(reports), _key_places(reports)
    for report in reports.heads:
        if not report.similarity:
            continue
        for (query, query_label), scores in zip(queries, report.similarity, strict=True):
            if query < 0:
                continue
            for (key, key_label), score in zip(keys, scores, strict=True):
                yield {
                    "name": str(report.head),
                    "query_position": query,
                    "query_label": query_label,
                    "key_position": key,
                    "key_label": key_label,
                    "score": score,
                }


def why(reports: ExplanationReports) -> Iterator[TableRow]:
    """Yield the largest parts, by writer, of the heads' attention scores and of what their values
    add.
    """
    for report in reports.heads:
        if report.why is None:
            continue
        compared = {
            "name": str(report.head),
            "more": " ".join(key_name(reports, position) for position in report.why.more),
            "less": " ".join(key_name(reports, position) for position in report.why.less),
        }
        for part in _parts_by_writer(report.why):
            yield compared | part


def _parts_by_writer(reasons: AttentionReasons) -> Iterator[TableRow]:
    """Yield the parts of each side, with the words of the largest, and those of pairs."""
    for side in SIDES:
        in_words = reasons.words(side)
        for writer, value in getattr(reasons, side):
            top_words, standout = in_words.get(writer, ((), math.nan))
            row = {"side": side, "writer": writer, "value": value}
            yield row | {"words": " ".join(top_words), "standout": standout}
    for query_writer, key_writer, value in reasons.pairs:
        yield {"side": "pair", "writer": f"{query_writer} × {key_writer}", "value": value}


def demonstration_rows(reports: ExplanationReports) -> list[dict[str, Any]]:
    """Return one row per demonstration, one of their sum, and one of all of them at once.

    Keys: text, label, hidden, keys, values (nats) and place. Empty if `demonstrations` is None.
    """
    report, prompt = reports.demonstrations, reports.input.prompt
    if report is None or prompt is None:
        return []
    ways = {"hidden": report.hidden, "keys": report.keys, "values": report.values}
    rows: list[dict[str, Any]] = []
    for index, demonstration in enumerate(prompt.demonstrations):
        losses = {way: by_demonstration[index] for way, by_demonstration in ways.items()}
        text, label = demonstration.text, demonstration.label
        rows.append({"text": text, "label": label, **losses, "place": index + 1})
    total = {way: math.fsum(losses[:-1]) for way, losses in ways.items()}
    rows.append({"text": "sum", "label": "", **total, "place": 0})
    all_at_once = {way: losses[-1] for way, losses in ways.items()}
    rows.append({"text": "all at once", "label": "", **all_at_once, "place": 0})
    return rows


def shown_demonstrations(reports: ExplanationReports) -> list[dict[str, Any]]:
    """Return the rows to show: those with the largest effects, in order, and the totals."""
    *rows, total, all_at_once = demonstration_rows(reports)
    largest = sorted(rows, key=lambda row: -abs(row["hidden"]))[:MAX_DEMONSTRATIONS]
    return [*sorted(largest, key=lambda row: row["place"]), total, all_at_once]


def prompt_pieces(reports: ExplanationReports) -> tuple[str | Label, ...]:
    """Return the text that the model continues, in pieces; demonstrations' labels are `Label`s."""
    if reports.input.prompt is None:
        return (reports.input.text,)
    rendered = reports.input.template.render(reports.input.prompt)
    pieces: list[str | Label] = []
    end = 0
    for (start, stop), label in zip(
        rendered.label_spans, reports.input.demonstration_labels, strict=True
    ):
        pieces += [rendered.text[end:start], Label(rendered.text[start:stop], label)]
        end = stop
    return (*pieces, rendered.text[end:] + reports.input.appended_text)


def query_labels(reports: ExplanationReports) -> tuple[int, ...]:
    """Return the index of the correct label of each row of `HeadReport.similarity`; -1 if unknown."""
    last = -1 if reports.answer is None else reports.labels.index(reports.answer)
    return (*reports.input.demonstration_labels, last)


def _query_places(reports: ExplanationReports) -> list[LabeledPosition]:
    """Return where each row of `HeadReport.similarity` is, and the label that is correct there."""
    positions = (*reports.input.prediction_positions, len(reports.input.tokens) - 1)
    names = (*reports.labels, None)  # the last for -1
    labels = [names[label] for label in query_labels(reports)]
    return list(zip(positions, labels, strict=True))


def _key_places(reports: ExplanationReports) -> list[LabeledPosition]:
    """Return where each column of `HeadReport.similarity` is, and the label there."""
    labels = [reports.labels[label] for label in reports.input.demonstration_labels]
    return list(zip(reports.input.label_positions, labels, strict=True))


def part_score(reports: ExplanationReports) -> DirectScore:
    """Return the score that ranks (head, position) parts."""
    return score_of_parts(reports.settings.by, comparable=bool(reports.scores.compared_with))


def key_name(reports: ExplanationReports, position: int) -> str:
    """Return the name of a label or token with its position, such as "foo@8"."""
    label = reports.input.label_at.get(position)
    name = reports.input.token_names[position].strip() if label is None else reports.labels[label]
    return f"{name}@{position}"
