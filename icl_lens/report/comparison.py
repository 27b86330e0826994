"""A comparison of two explanations, as the terminal's tables and as a page."""

import math
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from icl_lens.analyses.comparison import Comparison
from icl_lens.analyses.explanation import Explanation
from icl_lens.head_scores import Score
from icl_lens.models.head import Head
from icl_lens.report.command import command
from icl_lens.report.html.heads import attention_bar, label_sum
from icl_lens.report.html.parts import Bar, Cell, Chip, HeadMap, Table, largest
from icl_lens.report.html.sections import answer, label_chips, layer_charts, layers_table, prompt_pieces, unit_name
from icl_lens.report.terminal import new_table
from icl_lens.result.number_format import percent, signed

N_CHANGED = 12
"""Number of heads on the page and in the terminal."""
MODELS_NOTE = Text("Heads of two models correspond only if one model was trained from the other.", "dim")


def terminal(both: Comparison) -> Group:
    """Return the probability of each label, and the heads that changed most or the best heads of each."""
    a, b = both.a, both.b
    answers = new_table("label", "A", "B")
    for label in dict.fromkeys([*a.labels, *b.labels]):
        probabilities = (side.scores.probs.get(label) for side in (a, b))
        answers.add_row(Text(label), *("–" if value is None else percent(value) for value in probabilities))
    edited = [Text(f"{name}: {side.edits_note}", "bold") for name, side in zip("AB", (a, b), strict=True) if side.edits]
    shown: list[RenderableType] = [*edited, Text("Probability of each label", "bold"), answers]
    targets = f"A: {a.target}, B: {b.target}"
    if not both.same_heads:
        table = new_table("A", a.settings.by, "B", b.settings.by, left=(0, 2))
        for x, y in zip(a.heads, b.heads, strict=False):
            scores = x.scores[a.settings.by], y.scores[b.settings.by]
            table.add_row(str(x.head), f"{scores[0]:+z.3f}", str(y.head), f"{scores[1]:+z.3f}")
        return Group(*shown, Text(f"Heads with the largest scores, nats ({targets})", "bold"), table)
    first, *others = both.scores
    table = new_table("head", *(column for by in (first, *others) for column in (f"{by} in A", "in B", "change")))
    columns = [prefix + name for prefix in ("", *(f"{by}_" for by in others)) for name in ("a", "b", "change")]
    for row in both.to_frame().head(N_CHANGED).to_dict("records"):
        table.add_row(row["name"], *(f"{row[column]:+z.3f}" for column in columns))
    shown += [Text(f"Heads whose {first} changed most, nats ({targets})", "bold"), table]
    shown += [MODELS_NOTE] if a.model != b.model else []
    if a.target != b.target and a.target in b.labels:
        note = (
            f"Changes compare what heads add to {a.target} in A with what they add to {b.target} in B; to explain "
            f"{a.target} in both, pass --answer {a.target} --answer-b {a.target}."
        )
        shown.append(Text(note, "dim"))
    return Group(*shown)


def page(both: Comparison) -> tuple[str, dict[str, Any]]:
    """Return the page of two explanations; models of other sizes have their best heads instead of changes."""
    a, b, scores = both.a, both.b, both.scores
    plain_text, by = a.is_plain_text or b.is_plain_text, scores[0]
    shown = {
        "title": "Two explanations compared",
        "a": a,
        "b": b,
        "sides": [_side("A", a, b), _side("B", b, a)],
        "plain_text": plain_text,
        "same_prompt": a.input.prompt == b.input.prompt and a.input.text == b.input.text,
        "answers": _answers(a, b) if set(a.labels) == set(b.labels) else None,
        "changed": None,
        "by": by,
    }
    if both.same_heads:
        changed = both.to_frame().head(N_CHANGED)
        heads = list(map(Head, changed["layer"], changed["head"]))
        changes = [
            [y - x for x, y in zip(*rows, strict=True)]
            for rows in zip(a.all_heads.by(by), b.all_heads.by(by), strict=True)
        ]
        shown |= {"changed": _changed_table(changed, scores)}
        shown |= {"changes": HeadMap(changes, set(heads), f"change of {by}, B minus A, nats")}
        if not plain_text:
            names = list(dict.fromkeys([*a.labels, *b.labels]))
            shown |= {"labels": names, "attention": _attention_table(a, b, heads, names)}
    return "compare.html.j2", shown


def _side(name: str, e: Explanation, other: Explanation) -> dict[str, Any]:
    """Return what the page shows of each explanation by itself."""
    chips, word = label_chips(e), e.scores.next_tokens[0][0] if e.is_plain_text else e.predicted
    by = e.settings.by
    reach = largest([report.scores[by] for report in e.heads])
    best = [[str(report.head), Bar.signed(report.scores[by], reach)] for report in e.heads]
    attention: list[list[Cell]] = []
    for report in e.heads:
        weights = report.attention_to(e.input.label_ranges)
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


def _answers(a: Explanation, b: Explanation) -> Table:
    rows: list[list[Cell]] = []
    for i, label in enumerate(a.labels):
        before, after = a.scores.log_probs[i], b.scores.log_probs[b.labels.index(label)]
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


def _attention_table(a: Explanation, b: Explanation, heads: list[Head], names: list[str]) -> Table:
    """Return attention summed by label, or "–" where a prompt does not have the label."""

    def bar(e: Explanation, head: Head, i: int) -> Cell:
        if names[i] not in e.labels:
            return "–"
        weights = e.all_heads.attention[head.layer][head.head]
        return attention_bar(label_sum(e, weights, e.labels.index(names[i])), i)

    rows: list[list[Cell]] = [
        [str(head), *(bar(e, head, i) for i in range(len(names)) for e in (a, b))] for head in heads
    ]
    columns: list[Cell] = [[f"#{side} to ", Chip(name, i)] for i, name in enumerate(names) for side in "AB"]
    return Table(["head", *columns], rows, "located")
