"""Visualizations for notebooks, built from the same parts as the page; templates/element.html.j2
draws them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.analyses.explanation.reports import HeadReport
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.errors import InputError, short_repr
from icl_lens.models.head import AnyHead, Head, as_head
from icl_lens.reading.activations import Activations
from icl_lens.report.html import head_contents
from icl_lens.report.html.elements import Chip, HeadMap, Strip, ValueGrid, for_circuitsvis, largest
from icl_lens.report.html.templating import render_notebook, render_page, render_text
from icl_lens.report.palette import BLUE, ORANGE

TEMPLATE = "element.html.j2"
DRAWN_BY_CIRCUITSVIS = {"label_attention", "patterns"}
"""Names of the macros whose output is drawn by circuitsvis, so that its page must contain
circuitsvis' script.
"""


@dataclass(frozen=True)
class Element:
    """A visualization that displays itself in a notebook; `str(element)` is a self-contained page.

    `repr(element)`, and the HTML where scripts are stripped, show the same numbers as text and
    tables. No external resources are loaded.
    """

    title: str
    drawings: Sequence[tuple[str, Any]]
    """Names of macros in templates/macros.html.j2, each with the data that it draws."""

    def __str__(self) -> str:
        return render_page(TEMPLATE, **self._content())

    def _repr_html_(self) -> str:
        return render_notebook(TEMPLATE, height=320, **self._content())

    def __repr__(self) -> str:
        return f"{self.title}\n{render_text(TEMPLATE, **self._content())}"

    def _content(self) -> dict[str, Any]:
        circuitsvis = not DRAWN_BY_CIRCUITSVIS.isdisjoint(macro for macro, _ in self.drawings)
        return {
            "title": self.title,
            "drawings": self.drawings,
            "element": True,
            "circuitsvis": circuitsvis,
        }


def attention_to_labels(
    source: Explanation | Activations, heads: Sequence[AnyHead] | None = None, *, row: int = 0
) -> Element:
    """Show the attention of some heads from the last token, with label tokens in color and all
    others dimmed.

    An Explanation has the attention of located heads only (default: the first four), Activations
    that of any heads, for prompt `row`. Color intensity is attention probability, scaled to each
    head's largest weight. circuitsvis draws the tokens. Raise InputError for heads that the
    explanation does not describe or the model does not have.
    """
    if isinstance(source, Explanation):
        reports = _reports(source, heads)
        tokens, marks = source.input.token_names, source.input.label_at
        labels = () if source.is_plain_text else source.labels
        rows = {str(report.head): report.attention for report in reports}
    else:
        if not isinstance(source, Activations):
            raise InputError(
                f"source must be an Explanation or Activations, got {short_repr(source)}; pass the "
                "result of il.explain or il.capture"
            )
        if not heads:
            raise InputError(
                "heads must not be empty; pass the heads to draw, e.g. heads=[Head(3, 1)]"
            )
        heads = source.view.check_heads(heads)
        batch = source.batch
        tokens, labels = batch.token_names[row], batch.labels
        marks = {}
        ranges = batch.label_ranges[row].tolist()
        for label_range, label in zip(ranges, batch.label_index[row].tolist(), strict=True):
            marks |= dict.fromkeys(range(*label_range), label)
        pattern = source.pattern[row, :, :, : len(tokens)].float()
        rows = {str(head): pattern[head.layer, head.head].tolist() for head in heads}
    drawings: list[tuple[str, Any]] = [("legend", labels)] if labels else []
    for name, weights in rows.items():
        strip = head_contents.attention_strip(tokens, weights, marks, name)
        drawings += [("name", name), ("label_attention", strip)]
    return Element("Attention to labels" if labels else "Attention from the last token", drawings)


def attention_patterns(
    tokens: Sequence[str], patterns: Float[Tensor, "head query key"], heads: Sequence[AnyHead]
) -> Element:
    """Show full attention patterns as circuitsvis' attention_heads: hover to preview a head, click
    to pin it.

    `patterns` are attention probabilities, e.g. `cache["drawings.3.attn.hook_pattern"][0, [0, 5]]`.
    The page contains every value: 10 heads over 200 tokens take about 1.5 MB. Raise InputError if
    the sizes do not match.
    """
    if tuple(patterns.shape) != (len(heads), len(tokens), len(tokens)):
        raise InputError(
            "patterns must have shape [head query key] = "
            f"{[len(heads), len(tokens), len(tokens)]}, got {list(patterns.shape)}; pass one "
            "pattern per head over all tokens"
        )
    names, rows = [str(as_head(head)) for head in heads], patterns.float().tolist()
    props = {
        "attention": patterns.double().round(decimals=4).tolist(),
        "tokens": list(map(for_circuitsvis, tokens)),
        "attentionHeadNames": names,
        "positiveColor": BLUE,
        "negativeColor": ORANGE,
        "maxValue": 1,
        "minValue": -1,
        "maskUpperTri": True,
    }
    strips = [
        Strip(f"{name}, from the last token", tokens, pattern[-1], 1.0, {}, attention=True)
        for name, pattern in zip(names, rows, strict=True)
    ]
    data = {"props": props, "marks": [], "dim": False}
    patterns_of = {
        "name": f"Attention patterns of {', '.join(names)}",
        "data": data,
        "strips": strips,
    }
    return Element("Attention patterns", [("patterns", patterns_of)])


def token_values(
    tokens: Sequence[str],
    values: Float[Tensor, "row pos"],
    names: Sequence[str],
    *,
    unit: str = "nats",
) -> Element:
    """Show signed values over tokens, one row per name, blue above zero and orange below on a
    shared scale.

    Raise InputError if the sizes do not match.
    """
    if tuple(values.shape) != (len(names), len(tokens)):
        raise InputError(
            f"values must have shape [row pos] = {[len(names), len(tokens)]}, got "
            f"{list(values.shape)}; pass one row per name and one column per token"
        )
    rows = values.float().tolist()
    reach = largest(*rows)
    drawings: list[tuple[str, Any]] = []
    for name, row in zip(names, rows, strict=True):
        strip = Strip(f"{name}, {unit} by token", tokens, row, reach, {})
        drawings += [("name", name), ("strip", strip)]
    return Element("Values by token", [*drawings, ("scale", {"reach": reach, "unit": unit})])


def similarity_matrix(
    values: Float[Tensor, "query key"],
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    query_classes: Sequence[int] | None = None,
    key_classes: Sequence[int] | None = None,
    unit: str = "score",
) -> Element:
    """Show a head's metric between queries and keys as a table, blue above zero and orange below on
    a shared scale.

    `query_classes` and `key_classes` give the names their label colors. Rows and columns keep their
    order, so group words by class. Raise InputError if the sizes do not match.
    """
    classes = (query_classes or [-1] * len(queries), key_classes or [-1] * len(keys))
    n_classes = tuple(map(len, classes))
    if not tuple(values.shape) == (len(queries), len(keys)) == n_classes:
        raise InputError(
            f"values must have shape [query key] = {[len(queries), len(keys)]} with one class per "
            f"name, got {list(values.shape)} with {n_classes[0]} and {n_classes[1]} classes"
        )
    columns = list(map(Chip, keys, classes[1]))
    rows = list(zip(map(Chip, queries, classes[0]), values.float().tolist(), strict=True))
    grid = ValueGrid("Similarity of queries and keys", "query \\ key", columns, rows)
    return Element(grid.name, [("grid", grid), ("scale", {"reach": grid.reach, "unit": unit})])


def subhead_values(explanation: Explanation, heads: Sequence[AnyHead] | None = None) -> Element:
    """Show what located heads add to the answer's log-probability at each position (nats), as
    colored tokens.

    Default: the first four located heads. Each position is evaluated on its own, so the parts need
    not sum to the head's increase. Raise InputError for heads that the explanation does not
    describe.
    """
    reports = _reports(explanation, heads)
    values = torch.tensor([report.position_increases for report in reports])
    return token_values(
        explanation.input.token_names, values, [str(report.head) for report in reports]
    )


def words_by_position(explanation: Explanation, heads: Sequence[AnyHead] | None = None) -> Element:
    """Show the top words of located heads' values and keys at each label, and of their query at the
    last token.

    Default: the first located head. Raise InputError for heads that the explanation does not
    describe.
    """
    reports = _reports(explanation, heads, default=1)
    drawings: list[tuple[str, Any]] = []
    for report in reports:
        drawings += [
            ("name", str(report.head)),
            ("words_table", head_contents.words_table(explanation, report)),
        ]
    return Element("Words by position", drawings)


def head_heatmap(
    source: Explanation | Float[Tensor, "layer head"], *, label: str | None = None
) -> Element:
    """Show values by layer and head; cells are buttons for mouse, Tab and arrow keys.

    From an Explanation, the map shows the score that ranks its heads (nats), and selecting a cell
    shows that head. From a tensor, a cell only shows its value; `label` says what the values are,
    with their unit, such as "attention to labels" or "drop in log p(answer), nats". Raise
    InputError for a tensor of another shape, and for a label beside an explanation.
    """
    if isinstance(source, Explanation):
        if label is not None:
            raise InputError(
                "label must be None for an explanation, which names its scores, "
                f"got {short_repr(label)}; remove it"
            )
        title = f"{source.settings.by.capitalize()} by layer and head"
        return Element(title, [("explorer", head_contents.explorer(source))])
    if source.ndim != 2:
        raise InputError(
            f"source must have shape [layer head], got {list(source.shape)}; "
            "pass one value per head"
        )
    name = label or "Values"
    head_map = HeadMap(source.float().tolist(), name=name, unit="")
    return Element(f"{name[0].upper()}{name[1:]} by layer and head", [("head_map", head_map)])


def _reports(
    explanation: Explanation, heads: Sequence[AnyHead] | None, default: int = 4
) -> list[HeadReport]:
    """Return the reports of `heads`, or of the first `default` located heads; raise InputError for
    other heads.
    """
    if heads is None:
        return list(explanation.heads[:default])
    heads = [Head.parse(head) if isinstance(head, str) else head for head in heads]
    described: dict[AnyHead, HeadReport] = {report.head: report for report in explanation.heads}
    missing = [str(head) for head in heads if head not in described]
    if missing or not heads:
        raise InputError(
            "heads must be located heads of the explanation "
            f"({', '.join(map(str, described))}), got {', '.join(missing) or 'an empty list'}; "
            "call il.explain with a larger k"
        )
    return [described[head] for head in heads]
