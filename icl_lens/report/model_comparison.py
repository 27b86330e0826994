"""Two models compared over many prompts, as the terminal's tables and as a page."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from icl_lens.analyses.model_comparison import N_SHOWN, ModelComparison
from icl_lens.models.head import Head
from icl_lens.report.comparison import MODELS_NOTE
from icl_lens.report.html.parts import Bar, Cell, HeadMap, Scatter, Table, largest
from icl_lens.report.terminal import new_table
from icl_lens.result.number_format import percent, signed
from icl_lens.result.tables import interval_texts

TEMPLATE = "compare_models.html.j2"


def terminal(both: ModelComparison) -> Group:
    """Return the means of the answers' scores and the heads that changed most, with intervals of the changes."""
    answers = new_table("", "A", "B", "change", "95% interval")
    for row in _answer_rows(both):
        answers.add_row(*row)
    title = f"Answers to {both.n_prompts} prompts: {both.models[0]} (A) and {both.models[1]} (B)"
    intervals = Text(f"95% intervals resample the {len(set(both.queries))} distinct queries.", "dim")
    shown: list[RenderableType] = [Text(title, "bold"), answers, intervals, *map(Text, both.edits_notes)]
    if not both.same_heads:
        note = "The models have different numbers of layers or heads, so their heads do not correspond."
        return Group(*shown, Text(note, "dim"))
    for by in both.shown_scores:
        table = new_table("head", "A", "B", "change", "95% interval")
        rows = both.to_frame(by).head(N_SHOWN)
        for row, interval in zip(rows.to_dict("records"), interval_texts(rows), strict=True):
            table.add_row(row["name"], *(f"{row[column]:+z.3f}" for column in ("a", "b", "change")), interval)
        shown += [Text(f"Heads whose mean {by} changed most, nats", "bold"), table]
    return Group(*shown, MODELS_NOTE)


def page(both: ModelComparison) -> tuple[str, dict[str, Any]]:
    """Return the page's template and its contents."""
    content: dict[str, Any] = {
        "title": "Two models compared",
        "both": both,
        "n_queries": len(set(both.queries)),
        "edits_notes": both.edits_notes,
        "correct": [percent(float(side["accuracy"].mean())) for side in (both.a, both.b)],
        "measures": Table(["", "#A", "#B", "#change", "#95% interval"], _answer_rows(both)),
        "same_heads": both.same_heads,
    }
    if not both.same_heads:
        return TEMPLATE, content | {"tables": [], "best": [_best(both, "A", both.a), _best(both, "B", both.b)]}
    rows = both.to_frame().to_dict("records")
    changed = {Head(row["layer"], row["head"]) for row in rows[:N_SHOWN]}
    return TEMPLATE, content | {
        "tables": [(by, _table(both.to_frame(by).to_dict("records")[:N_SHOWN])) for by in both.shown_scores],
        "changes": HeadMap(
            (both.b[both.by] - both.a[both.by]).mean(0).tolist(), changed, f"change of {both.by}, B minus A, nats"
        ),
        "scatter": Scatter(
            f"mean {both.by}, nats", [(row["name"], row["a"], row["b"], i < N_SHOWN) for i, row in enumerate(rows)]
        ),
    }


def _best(both: ModelComparison, name: str, side: Mapping[str, np.ndarray]) -> tuple[str, Table]:
    """Return the name of a side and the table of its heads with the largest mean scores."""
    means = side[both.by].mean(0)
    heads = [Head.from_index(int(index), means.shape[1]) for index in np.argsort(-means, axis=None)[:N_SHOWN]]
    reach = largest([float(means[head]) for head in heads])
    rows: list[list[Cell]] = [[str(head), Bar.signed(float(means[head]), reach)] for head in heads]
    return name, Table(["head", f"#mean {both.by}, nats"], rows)


def _answer_rows(both: ModelComparison) -> list[list[str]]:
    rows = []
    for row in both.summary().to_dict("records"):
        is_share = row["measure"] == "accuracy"
        name = "accuracy (change in points)" if is_share else row["measure"]
        value = percent if is_share else signed
        scale, digits = (100, 1) if is_share else (1, 3)
        change, low, high = (signed(scale * row[column], digits) for column in ("change", "low", "high"))
        rows.append([name, value(row["a"]), value(row["b"]), change, f"{low} … {high}"])
    return rows


def _table(rows: Sequence[Mapping[Any, Any]]) -> Table:
    """Return rows of `ModelComparison.to_frame` as a table of the page."""
    reach = largest([row["change"] for row in rows])
    cells: list[list[Cell]] = []
    for row in rows:
        a, b, low, high = (signed(row[column]) for column in ("a", "b", "low", "high"))
        cells.append([row["name"], a, b, Bar.signed(row["change"], reach), f"{low} … {high}"])
    return Table(["head", "#A, nats", "#B, nats", "#change, nats", "#95% interval"], cells)
