"""Visualizations of an explanation for notebooks, built from the same fragments as the page."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.errors import InputError
from icl_lens.models.head import Head
from icl_lens.report.findings import Findings, HeadReport
from icl_lens.report.html import heads as head_parts
from icl_lens.report.html import similarity, token_strips
from icl_lens.report.html.element import Element, circuitsvis_mount
from icl_lens.report.html.escaping import for_circuitsvis, safe


def attention_to_labels(
    source: Findings | Activations, heads: Sequence[Head] | None = None, *, row: int = 0
) -> Element:
    """Show the attention of some heads from the last token, with label tokens in color and all others dimmed.

    From an Explanation: located heads only (default: the first four). From Activations: any heads, for prompt `row`.
    Color intensity is attention probability, scaled to each head's largest weight. Rendered by circuitsvis. Raises
    InputError for heads that the explanation does not describe.
    """
    if isinstance(source, Findings):
        reports = _reports(source, heads)
        tokens, positions, index = source.shown_tokens, source.label_positions, source.demonstration_labels
        labels, rows = () if source.is_plain_text else source.labels, [report.attention for report in reports]
        names = [str(report.head) for report in reports]
    else:
        if not heads:
            raise InputError("heads must not be empty; pass the heads to draw, e.g. heads=[Head(3, 1)]")
        for head in heads:
            source.view.check_head(head)
        tokens = tuple(source.batch.token_strings[row])
        known = source.batch.label_positions[row] >= 0
        positions = tuple(source.batch.label_positions[row][known].tolist())
        index = tuple(source.batch.label_index[row][known].tolist())
        labels = source.batch.labels
        names = [str(head) for head in heads]
        rows = [tuple(source.pattern[row, head.layer, head.head, : len(tokens)].float().tolist()) for head in heads]
    body = "".join(
        f"<h3>{name}</h3>{token_strips.attention_strip(tokens, weights, positions, index, name)}"
        for name, weights in zip(names, rows, strict=True)
    )
    if not labels:
        return Element("Attention from the last token", body)
    return Element("Attention to labels", token_strips.label_legend(labels) + body)


def attention_patterns(
    tokens: Sequence[str], patterns: Float[Tensor, "head query key"], heads: Sequence[Head]
) -> Element:
    """Show full attention patterns as circuitsvis' attention_heads: hover to preview a head, click to pin it.

    `patterns` are attention probabilities, e.g. `cache["blocks.3.attn.hook_pattern"][0, [0, 5]]`. The page contains
    every value: 10 heads over 200 tokens take about 1.5 MB. Raises InputError if the sizes do not match.
    """
    if tuple(patterns.shape) != (len(heads), len(tokens), len(tokens)):
        raise InputError(
            f"patterns must have shape [head query key] = {[len(heads), len(tokens), len(tokens)]}, got "
            f"{list(patterns.shape)}; pass one pattern per head over all tokens"
        )
    props = {
        "attention": [[[round(x, 4) for x in row] for row in head] for head in patterns.float().tolist()],
        "tokens": [for_circuitsvis(token) for token in tokens],
        "attentionHeadNames": [str(head) for head in heads],
        "positiveColor": token_strips.POSITIVE,
        "negativeColor": token_strips.NEGATIVE,
        "maxValue": 1,
        "minValue": -1,
        "maskUpperTri": True,
    }
    names = ", ".join(str(head) for head in heads)
    return Element("Attention patterns", circuitsvis_mount("AttentionHeads", props, f"Attention patterns of {names}"))


def token_values(
    tokens: Sequence[str], values: Float[Tensor, "row pos"], names: Sequence[str], *, unit: str = "nats"
) -> Element:
    """Show signed values over tokens, one row per name, blue above zero and orange below on a shared scale.

    Rendered by circuitsvis' colored_tokens. Raises InputError if the sizes do not match.
    """
    if tuple(values.shape) != (len(names), len(tokens)):
        raise InputError(
            f"values must have shape [row pos] = {[len(names), len(tokens)]}, got {list(values.shape)}; pass one row "
            "per name and one column per token"
        )
    rows = values.float().tolist()
    reach = max((abs(x) for row in rows for x in row), default=0.0)
    body = "".join(
        f"<h3>{safe(name)}</h3>{token_strips.value_strip(tokens, row, name, reach=reach, unit=unit)}"
        for name, row in zip(names, rows, strict=True)
    )
    return Element("Values by token", body + token_strips.scale_legend(reach, unit))


def similarity_matrix(
    values: Float[Tensor, "query key"],
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    query_classes: Sequence[int] | None = None,
    key_classes: Sequence[int] | None = None,
    unit: str = "score",
) -> Element:
    """Show a head's metric between queries and keys as a table, blue above zero and orange below on a shared scale.

    `query_classes` and `key_classes` give the names their label colors. Rows and columns keep their order, so group
    words by class. Raises InputError if the sizes do not match.
    """
    classes = (query_classes or [-1] * len(queries), key_classes or [-1] * len(keys))
    if tuple(values.shape) != (len(queries), len(keys)) or tuple(map(len, classes)) != tuple(values.shape):
        raise InputError(
            f"values must have shape [query key] = {[len(queries), len(keys)]} with one class per name, got "
            f"{list(values.shape)} with {len(classes[0])} and {len(classes[1])} classes"
        )
    name = "Similarity of queries and keys"
    return Element(name, similarity.matrix(values.float().tolist(), queries, keys, classes, unit=unit, name=name))


def subhead_values(explanation: Findings, heads: Sequence[Head] | None = None) -> Element:
    """Show what located heads add to the answer's log-probability at each position (nats), as colored tokens.

    Default: the first four located heads. Each position is evaluated on its own, so the parts need not sum to the
    head's increase. Raises InputError for heads that the explanation does not describe.
    """
    reports = _reports(explanation, heads)
    values = torch.tensor([report.position_increases for report in reports])
    return token_values(explanation.shown_tokens, values, [str(report.head) for report in reports])


def words_by_position(explanation: Findings, heads: Sequence[Head] | None = None) -> Element:
    """Show the top words of located heads' values and keys at each label, and of their query at the last token.

    Default: the first located head. Raises InputError for heads that the explanation does not describe.
    """
    reports = _reports(explanation, heads, default=1)
    body = "".join(f"<h3>{report.head}</h3>{head_parts.words(explanation, report)}" for report in reports)
    return Element("Words by position", body)


def head_heatmap(source: Findings | Float[Tensor, "layer head"]) -> Element:
    """Show log-probability increases by layer and head (nats); cells are buttons for mouse, Tab and arrow keys.

    From an Explanation, selecting a cell shows that head. From a tensor, a cell only shows its value.
    """
    if isinstance(source, Findings):
        return Element("Increase by layer and head", head_parts.explorer(source))
    if source.ndim != 2:
        raise InputError(f"increases must have shape [layer head], got {list(source.shape)}; pass one value per head")
    return Element("Increase by layer and head", head_parts.heatmap(source.float().tolist(), located=()))


def _reports(explanation: Findings, heads: Sequence[Head] | None, default: int = 4) -> list[HeadReport]:
    if heads is None:
        return list(explanation.heads[:default])
    described = {report.head: report for report in explanation.heads}
    missing = [str(head) for head in heads if head not in described]
    if missing or not heads:
        raise InputError(
            f"heads must be located heads of the explanation ({', '.join(map(str, described))}), got "
            f"{', '.join(missing) or 'an empty list'}; call il.explain with a larger k"
        )
    return [described[head] for head in heads]
