"""Two models compared over many prompts, as tables, a figure and a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from icl_lens.display import Result, format_signed, interval_texts, text_table
from icl_lens.errors import InputError
from icl_lens.metrics import bootstrap_interval, mean_intervals
from icl_lens.models.active_edits import edits_note
from icl_lens.models.head import Head
from icl_lens.report.comparison import MODELS_NOTE
from icl_lens.report.html.parts import Bar, Cell, HeadMap, Scatter, Table, largest
from icl_lens.report.number_format import percent, signed
from icl_lens.report.terminal import new_table
from icl_lens.scores import DIRECT_SCORES, Score

TEMPLATE, N_SHOWN = "compare_models.html.j2", 12
MEASURES = ("accuracy", "log p", "log-odds")


@dataclass(frozen=True, repr=False, eq=False)
class ModelComparison(Result):
    """Scores of the same prompts by two models, A and B, returned by `compare_models`.

    `a` and `b` hold one value per prompt for "accuracy" (0 or 1, among the labels; see `compare_models`), "log p" of
    the answer and its "log-odds" against the other labels (nats), and [prompt layer head] for the heads' "contrast",
    "increase" and, if heads are ranked by it, "effect" or "towers" (nats). Intervals are paired 95% bootstrap intervals
    over `queries`, because prompts with the same query are not independent; they are NaN for a single query.

    Example:
        >>> both = il.compare_models(model, model, il.load_task("sentiment-number", n=4))
        >>> both.summary().columns.tolist()
        ['measure', 'a', 'b', 'change', 'low', 'high']
    """

    models: tuple[str, str]
    by: Score
    a: Mapping[str, np.ndarray]
    b: Mapping[str, np.ndarray]
    queries: tuple[str, ...]
    """The query of each prompt (`PromptBatch.queries`)."""
    edits: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """What edited A and B: the edits of open `with` blocks, and other hooks."""

    @property
    def n_prompts(self) -> int:
        """Number of prompts."""
        return len(self.a["log p"])

    @property
    def same_heads(self) -> bool:
        """Whether both models have the same number of layers and heads, so that heads can be compared directly."""
        return self.a["increase"].shape == self.b["increase"].shape

    def summary(self) -> pd.DataFrame:
        """Return means over prompts: measure, a, b, change, and the change's interval (low, high)."""
        rows = []
        for name in MEASURES:
            bounds = (-1.0, 1.0) if name == "accuracy" else None
            change = bootstrap_interval(self.b[name] - self.a[name], clusters=self.queries, bounds=bounds)
            rows.append((name, float(self.a[name].mean()), float(self.b[name].mean()), *change))
        return pd.DataFrame(rows, columns=["measure", "a", "b", "change", "low", "high"])

    def to_frame(self, by: Score | None = None) -> pd.DataFrame:
        """Return each head's mean score in A and B and its change with a 95% interval, nats, largest change first.

        Raise InputError if the models have different numbers of layers or heads, or for a score that was not computed.
        """
        by = by or self.by
        if not self.same_heads or by not in self.a:
            raise InputError(
                f"models must have the same (layers, heads) and scores of every head by {by!r}, got "
                f"{self.a['increase'].shape[1:]} and {self.b['increase'].shape[1:]} with {', '.join(self.a)}"
            )
        a, b = self.a[by], self.b[by]
        heads = [Head(layer, head) for layer, head in np.ndindex(a.shape[1:])]
        layer, head = zip(*heads, strict=True)
        change, low, high = mean_intervals((b - a).reshape(len(a), -1), self.queries)
        frame = pd.DataFrame({"name": list(map(str, heads)), "change": change, "low": low, "high": high})
        frame = frame.assign(a=a.mean(0).ravel(), b=b.mean(0).ravel(), layer=layer, head=head)
        return frame.sort_values("change", key=lambda x: -x.abs(), kind="stable", ignore_index=True)

    @property
    def edits_notes(self) -> list[str]:
        """One sentence per edited model."""
        return [edits_note(edits, f"Numbers of {name}") for name, edits in zip("AB", self.edits, strict=True) if edits]

    @property
    def shown_scores(self) -> list[Score]:
        """The scores by which heads are shown: the one that ranks them, the contrast and the increase."""
        scores: list[Score] = [self.by, *DIRECT_SCORES]
        return list(dict.fromkeys(scores))

    def __repr__(self) -> str:
        correct = [percent(float(side["accuracy"].mean())) for side in (self.a, self.b)]
        title = (
            f"ModelComparison({self.n_prompts} prompts: {correct[0]} correct, A, {self.models[0]}; {correct[1]}, B, "
        )
        title += f"{self.models[1]}; heads by change of {self.by}, nats)"
        if not self.same_heads:
            return title
        frame = self.to_frame().head(N_SHOWN)
        columns = {"head": frame["name"].tolist()}
        columns |= {name: list(map(format_signed, frame[name])) for name in ("a", "b", "change", "low", "high")}
        return text_table(title, columns, total=self.a["increase"][0].size)


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
            table.add_row(row["name"], *(f"{row[column]:+.3f}" for column in ("a", "b", "change")), interval)
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
