"""A page that compares two explanations; templates/compare.html.j2 draws it."""

import math
from typing import Any, get_args

from icl_lens.errors import InputError
from icl_lens.models.head import Head
from icl_lens.report.command import command
from icl_lens.report.findings import By, Findings
from icl_lens.report.html.heads import attention_bar, label_sum
from icl_lens.report.html.parts import Bar, Cell, Chip, HeadMap, Table, largest
from icl_lens.report.html.sections import answer, label_chips, layer_charts, layers_table, prompt_pieces, unit_name
from icl_lens.report.html.templating import render_page
from icl_lens.report.number_format import percent, signed

TEMPLATE, N_CHANGED = "compare.html.j2", 12


def compare_page(a: Findings, b: Findings) -> str:
    """Return a self-contained page that compares two prompts or two models.

    The page shows label probabilities, layer bars on a shared scale, and attention to labels. If both models have the
    same number of layers and heads, it also shows the heads whose increase changed most and the change of every head;
    otherwise, the best heads of each. Increases refer to each explanation's own target; the page notes where the
    targets differ.
    """
    return render_page(TEMPLATE, **content(a, b))


def check_same_shape(a: Findings, b: Findings) -> None:
    """Raise InputError if the models have different numbers of layers or heads."""
    if a.shape != b.shape:
        raise InputError(
            f"models must have the same (layers, heads), got {a.shape} for {a.model} and {b.shape} for {b.model}; use "
            "a.to_frame() and b.to_frame() instead"
        )


def most_changed(a: Findings, b: Findings) -> list[Head]:
    """Return the heads whose score differs most between two explanations, largest change first.

    The score is the one that ranks the heads of both explanations, or the increase if these differ.

    Raise InputError if the models have different numbers of layers or heads.
    """
    check_same_shape(a, b)
    heads = [Head(layer, head) for layer in range(a.shape[0]) for head in range(a.shape[1])]
    x, y = (e.scores_by(compared_by(a, b)) for e in (a, b))
    heads.sort(key=lambda head: -abs(y[head.layer][head.head] - x[head.layer][head.head]))
    return heads[:N_CHANGED]


def compared_by(a: Findings, b: Findings) -> By:
    """Return the score that ranks the heads of both explanations, or the increase if they are ranked differently."""
    return a.settings.by if a.settings.by == b.settings.by else "increase"


def compared_scores(a: Findings, b: Findings) -> list[By]:
    """Return the scores that both explanations have of every head; the one that ranks changes is first."""
    first = compared_by(a, b)
    return [first, *(by for by in get_args(By) if by != first and a.scores_by(by) and b.scores_by(by))]


def content(a: Findings, b: Findings) -> dict[str, Any]:
    """Return what the page shows of two explanations."""
    plain_text = a.is_plain_text or b.is_plain_text
    shown = {
        "title": "Two explanations compared",
        "a": a,
        "b": b,
        "sides": [_side("A", a, b), _side("B", b, a)],
        "plain_text": plain_text,
        "same_prompt": a.prompt == b.prompt and a.text == b.text,
        "answers": _answers(a, b) if set(a.labels) == set(b.labels) else None,
        "changed": None,
        "by": compared_by(a, b),
    }
    if a.shape == b.shape:
        heads = most_changed(a, b)
        by = compared_by(a, b)
        changes = [
            [y - x for x, y in zip(*rows, strict=True)] for rows in zip(a.scores_by(by), b.scores_by(by), strict=True)
        ]
        shown |= {"changed": _changed_table(a, b, heads)}
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
        weights = report.label_attention(e.label_positions)
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


def _changed_table(a: Findings, b: Findings, heads: list[Head]) -> Table:
    columns: list[Cell] = ["head"]
    rows: list[list[Cell]] = [[str(head)] for head in heads]
    for by in compared_scores(a, b):
        x, y = ([e.scores_by(by)[head.layer][head.head] for head in heads] for e in (a, b))
        changes = [after - before for before, after in zip(x, y, strict=True)]
        columns += [f"#{by} in A", "#in B", "#change, nats"]
        for row, *values, change in zip(rows, x, y, changes, strict=True):
            row += [*map(signed, values), Bar.signed(change, largest(changes))]
    return Table(columns, rows, "located")


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
