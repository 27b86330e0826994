"""A head's query-key metric applied to prompts: similarity of the query to each label."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.active_edits import edits_of_rows, rows_per_pass
from icl_lens.models.head import AnyHead, Head, head_tuple
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, require_demonstrations
from icl_lens.reading.activations import Activations
from icl_lens.reading.capture import capture_with_hooks
from icl_lens.reading.qk_metric import (
    QueryKeyMetric,
    check_metric,
    layer_scores,
    metric_with_rotation,
    query_key_metric,
    rotation_between,
)

ComparedQueries = Literal["all", "last"]
"""The queries where labels are predicted and at the last position, or the last one alone."""


def label_similarity(
    model: Any, batch: PromptBatch, heads: Sequence[AnyHead]
) -> Float[Tensor, "batch head query demo"]:
    """Return heads' similarity scores between the query vectors of a prompt and the key vectors at
    its labels.

    Query vectors are those at the positions where labels are predicted
    (`batch.prediction_positions`) and at the last position, key vectors those at the labels' scored
    tokens. Scores are `query_key_metric(...).scores` without rotation and without a mask, so they
    include keys after a query. In a head that compares texts by class, queries and keys of the same
    label score higher. Zero where a prompt has fewer demonstrations, and where nothing precedes its
    first label. Costs one forward pass, over as many prompts at a time as fit in little memory.

    Raise InputError for unknown heads, an empty list of heads, prompts without demonstrations, and
    a family in which the heads' attention does not follow from such scores. Source: the paper,
    section 5; docs/howto/numbers.md.

    Example:
        >>> il.label_similarity(model, batch, ["L2H0", "L4H0"]).shape
        torch.Size([1, 2, 5, 4])
    """
    view = ModelView.of(model)
    check_batch(batch)
    checked_heads = [view.check_head(head) for head in head_tuple(heads)]
    if not checked_heads:
        raise InputError("heads must name at least one head, got none; e.g. ['L3H1']")
    require_demonstrations(
        batch,
        "label position to read",
        "use il.query_key_metric(model, head).scores on any two inputs",
    )
    return _similarity(view, batch, checked_heads, "all")


def check_similarity(view: ModelView, batch: PromptBatch) -> None:
    """Raise InputError unless the attention of all heads follows from `label_similarity` on the
    prompts of a batch.
    """
    _similarity(view, batch, view.heads(), "last")  # of one query, which takes little memory


def _similarity(
    view: ModelView, batch: PromptBatch, heads: Sequence[Head], queries: ComparedQueries
) -> Float[Tensor, "batch head query demo"]:
    """Return `label_similarity`, over as many prompts at a time as fit in a pass."""
    similarity_of_passes = []
    for rows in torch.arange(len(batch)).split(rows_per_pass(view, batch)):
        with edits_of_rows(view, rows.tolist()):
            of_pass = _captured_similarity(view, batch[rows], heads, queries)
        similarity_of_passes.append(of_pass)
    return torch.cat(similarity_of_passes)


def _captured_similarity(
    view: ModelView, batch: PromptBatch, heads: Sequence[Head], queries: ComparedQueries
) -> Float[Tensor, "batch head query demo"]:
    """Return `label_similarity` of prompts that fit in a pass; nothing else is kept of it."""
    acts = capture_with_hooks(
        view.model,
        batch,
        [],
        writers=compared_positions(batch),
        readers=[head.layer for head in heads],
        check=False,
    )
    return similarity_in(acts, heads, queries)


def compared_positions(batch: PromptBatch) -> list[list[int]]:
    """Return the positions where labels are predicted, and those of labels' tokens: what
    `label_similarity` reads.
    """
    positions = torch.cat([batch.prediction_positions, batch.all_label_positions.flatten(1)], dim=1)
    return [row[row >= 0].tolist() or [-1] for row in positions]


@torch.no_grad()
def similarity_in(
    acts: Activations,
    heads: Sequence[Head],
    queries: ComparedQueries = "all",
    *,
    check: bool = True,
) -> Float[Tensor, "batch head query demo"]:
    """Return `label_similarity` from activations that hold writers at `compared_positions`; with
    "last", of the query at the last position only.

    `check` verifies in each head that the model's attention follows from the scores, which takes
    longer than the scores; turn it off for prompts of a kind that has been checked.
    """
    view, batch, writers = acts.view, acts.batch, acts.writers
    assert writers is not None
    query_positions = batch.last[:, None]
    if queries == "all":
        query_positions = torch.cat([batch.prediction_positions, query_positions], dim=1)
    n_queries, n_labels = query_positions.shape[1], batch.label_positions.shape[1]
    rows = writers.rows_at(torch.cat([query_positions, batch.label_positions], dim=1))
    by_layer: dict[int, Float[Tensor, "batch head query demo"]] = {}
    for layer in sorted({head.layer for head in heads}):
        rotation = rotation_between(acts, layer, None)
        if check:
            for head in heads:
                if head.layer == layer:
                    metric = metric_with_rotation(view, head, None, rotation)
                    _check_similarity(metric, acts)
        at_positions = writers.inputs(layer)[rows.clamp(min=0)]
        query_inputs, key_inputs = at_positions.split([n_queries, n_labels], 1)
        by_layer[layer] = layer_scores(view, layer, query_inputs, key_inputs, rotation)
    scores = [by_layer[head.layer][:, head.head] for head in heads]
    is_known = rows >= 0
    is_pair = is_known[:, :n_queries, None] & is_known[:, None, n_queries:]
    return torch.stack(scores, dim=1).masked_fill(~is_pair[:, None], 0)


def _check_similarity(metric: QueryKeyMetric, acts: Activations) -> None:
    """Raise InputError unless the model's attention follows from a head's metric."""
    try:
        check_metric(metric, acts)
    except InputError:
        if not acts.view.has_hooks:
            raise
        query_key_metric(acts.view, metric.head)  # hooks may edit attention: check without them
