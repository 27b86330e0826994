"""A page that compares two explanations; templates/compare.html.j2 draws it."""

import math
from typing import Any

import pandas as pd

from icl_lens.models.head import Head
from icl_lens.report.command import command
from icl_lens.report.findings import Findings
from icl_lens.report.html.heads import attention_bar, label_sum
from icl_lens.report.html.parts import Bar, Cell, Chip, HeadMap, Table, largest
from icl_lens.report.html.sections import answer, label_chips, layer_charts, layers_table, prompt_pieces, unit_name
from icl_lens.report.number_format import percent, signed
from icl_lens.scores import Score


def content(a: Findings, b: Findings, scores: list[Score], changed: pd.DataFrame | None) -> dict[str, Any]:
    """Return what the page shows of two explanations.

    `changed` are the rows of `Comparison.to_frame` to show; None if the models have different numbers of layers or
    heads: the page then shows each model's best heads.
    """
    plain_text, by = a.is_plain_text or b.is_plain_text, scores[0]
    shown = {
        "title": "Two explanations compared",
        "a": a,
        "b": b,
        "sides": [_side("A", a, b), _side("B", b, a)],
        "plain_text": plain_text,
        "same_prompt": a.prompt == b.prompt and a.text == b.text,
        "answers": _answers(a, b) if set(a.labels) == set(b.labels) else None,
        "changed": None,
        "by": by,
    }
    if changed is not None:
        heads = list(map(Head, changed["layer"], changed["head"]))
        changes = [
            [y - x for x, y in zip(*rows, strict=True)] for rows in zip(a.scores_by(by), b.scores_by(by), strict=True)
        ]
        shown |= {"changed": _changed_table(changed, scores)}
        shown |= {"changes": HeadMap(changes, set(heads), f"change of {by}, B minus A, nats")}
        if not plain_text:
            names = list(dict.fromkeys([*a.labels, *b.labels]))
            shown |= {"labels": names, "attention": _attention_table(a, b, heads, names)}
    return shown


def _side(name: str, e: Findings, other: Findings) -> dict[str, Any]:
    """Return what the page shows of each explanation by itself."""
    chips, word = label_chips(e), e.next_tokens[0][0] if e.is_plain_text else e.predicted
    by = e.settings.by
    reach = largest([report.scores[by] for report in e.heads])
    best = [[str(report.head), Bar.signed(report.scores[by], reach)] for report in e.heads]
    attention: list[list[Cell]] = []
    for report in e.heads:
        weights = report.attention_to(e.label_ranges)
        attention.append([str(report.head), *(attention_bar(label_sum(e, weights, i), i) for i in range(len(chips)))])
    return {
        "name": name,
        "e": e,
        "target": Chip(e.target),
        "continuation": chips.get(word, Chip(word)),
        "prompt": prompt_pieces(e),
        "answer": answer(e),
        "layer_charts": layer_charts(e, other),
        "layers": layers_table(e),
        "best": Table(["head", f"#{by}, nats"], best),
        "attention": Table(["head", *(["#to ", chip] for chip in chips.values())], attention, "located"),
        "command": command(e),
    }


def _answers(a: Findings, b: Findings) -> Table:
    rows: list[list[Cell]] = []
    for i, label in enumerate(a.labels):
        before, after = a.label_log_probs[i], b.label_log_probs[b.labels.index(label)]
        rows.append([Chip(label, i), percent(math.exp(before)), percent(math.exp(after)), signed(after - before)])
    return Table([unit_name(a), "#A", "#B", "#change of log p, nats"], rows)


def _changed_table(rows: pd.DataFrame, scores: list[Score]) -> Table:
    columns: list[Cell] = ["head"]
    cells: list[list[Cell]] = [[name] for name in rows["name"]]
    for by in scores:
        prefix = "" if by == scores[0] else f"{by}_"
        columns += [f"#{by} in A", "#in B", "#change, nats"]
        changes = rows[f"{prefix}change"].tolist()
        for row, a, b, change in zip(cells, rows[f"{prefix}a"], rows[f"{prefix}b"], changes, strict=True):
            row += [signed(a), signed(b), Bar.signed(change, largest(changes))]
    return Table(columns, cells, "located")


def _attention_table(a: Findings, b: Findings, heads: list[Head], names: list[str]) -> Table:
    """Return attention summed by label, or "–" where a prompt does not have the label."""

    def bar(e: Findings, head: Head, i: int) -> Cell:
        if names[i] not in e.labels:
            return "–"
        weights = e.label_attention[head.layer][head.head]
        return attention_bar(label_sum(e, weights, e.labels.index(names[i])), i)

    rows: list[list[Cell]] = [
        [str(head), *(bar(e, head, i) for i in range(len(names)) for e in (a, b))] for head in heads
    ]
    columns: list[Cell] = [[f"#{side} to ", Chip(name, i)] for i, name in enumerate(names) for side in "AB"]
    return Table(["head", *columns], rows, "located")
