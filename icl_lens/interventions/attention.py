"""Editing how much a head attends where: label positions weighted anew, the position term taken out."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.edit_checks import check_pattern_recomputable, warn_if_inert
from icl_lens.interventions.editor import AttentionState, Edit, Stage, editing
from icl_lens.interventions.selection import Positions, flatten_heads, group_by_layer
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


@contextmanager
def scale_label_attention(
    model: Any,
    heads: Iterable[Head | tuple[int, int]],
    batch: PromptBatch,
    weights: Tensor | Sequence[Sequence[float]],
    *,
    renormalize: bool,
) -> Iterator[None]:
    """Multiplies the attention that chosen heads pay from the last position to each label position.

    `weights` [batch demo] are factors: 1 leaves a label alone, 0 hides it. With `renormalize` the row is divided by
    its sum afterwards, so that what labels lose goes to all positions in proportion; without, it is lost. The passes
    in the block must be over `batch`; where `batch` is one prompt, over any number of rows that begin with it.

    Warns once if a head does not reach the logits. Raises InputError for weights that are negative, not finite or of
    another shape, a head the model does not have, and passes over something else. Source: the published version,
    section 4.1 (weights against the majority label's bias).

    Example:
        >>> with il.scale_label_attention(model, [il.Head(2, 0)], batch, [[0.0, 0.0, 1.0, 1.0]], renormalize=True):
        ...     foo_only = il.capture(model, batch)
        >>> il.attention_by_label(foo_only)[0, 2, 0, 0]
        tensor(0.)
    """
    view = ModelView.of(model)
    by_layer = group_by_layer(view, heads)
    batch.require_labels("label attention to scale", "block_attention edits attention to any position")
    try:
        weights = torch.as_tensor(weights, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"weights={weights!r} are no numbers; give one per prompt and demonstration") from None
    shape = tuple(batch.label_positions.shape)
    if tuple(weights.shape) != shape:
        raise InputError(f"weights have shape {tuple(weights.shape)}; give one per prompt and demonstration, {shape}")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise InputError("weights must be finite and not negative; 1 leaves a label alone, 0 hides it")
    check_pattern_recomputable(view, by_layer)

    def scale(work: AttentionState, indices: list[int], layer: int) -> None:
        assert work.pattern is not None
        rows, device = len(work.pattern), work.pattern.device
        if len(batch) not in (1, rows):
            raise InputError(
                f"the weights are for {len(batch)} prompts, and the forward pass has {rows} rows; run the same batch"
            )
        positions = batch.label_positions.to(device).expand(rows, -1)
        if int(batch.last.max()) >= work.pattern.shape[-1]:
            raise InputError("the forward pass is shorter than the batch that the weights are for; run the same batch")
        whole = at_positions(weights.expand(rows, -1), positions, width=work.pattern.shape[-1])
        every = torch.arange(rows, device=device)[:, None]
        places = torch.tensor(work.indices_of(indices), device=device)[None]
        row = work.pattern[every, places, work.last[:, None]] * whole[:, None].to(work.pattern.dtype)
        if renormalize:
            row = row / row.sum(-1, keepdim=True).clamp(min=torch.finfo(row.dtype).tiny)
        work.pattern[every, places, work.last[:, None]] = row

    warn_if_inert(view, flatten_heads(by_layer))
    with editing(view, Edit(Stage.pattern, by_layer, scale, only=batch)):
        yield


def at_positions(
    weights: Float[Tensor, "batch demo"], positions: Int[Tensor, "batch demo"], *, width: int
) -> Float[Tensor, "batch key"]:
    """Each demonstration's factor at its position (-1: there is none), 1 at all others, on the positions' device."""
    factors = weights.to(positions.device).masked_fill(positions < 0, 1.0)
    whole = factors.new_ones(len(positions), width)
    return whole.scatter_reduce(1, positions.clamp(min=0), factors, "prod")


@contextmanager
def remove_position(
    model: Any,
    heads: Iterable[Head | tuple[int, int]],
    *,
    strength: float = 1.0,
    positions: Positions = "all",
) -> Iterator[None]:
    """Takes the position term out of chosen heads' query-key products.

    Rotary models: q·k without rotation. Learned positions: the position embedding's share is taken out of the heads'
    query and key inputs, under the scale that the norm has anyway. ALiBi: no slope. Mask and softmax stay. Positions
    can still come in through the residual stream, which earlier layers have written into. `strength` mixes the scores:
    1 none of the position term, 0 all of it. `positions="last"` edits what the last position sees only.

    Warns once if a head does not reach the logits. Raises InputError for a head the model does not have, a strength
    outside 0 to 1, and families whose attention cannot be recomputed. Source: the published version, section 4.2.

    Example:
        >>> with il.remove_position(model, [il.Head(2, 0)], strength=0.5):
        ...     weakened = il.label_log_probs(model, batch)
        >>> weakened.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    by_layer = group_by_layer(view, heads)
    check_choice("positions", positions, ("all", "last"))
    if not 0 <= strength <= 1:
        raise InputError(f"strength={strength} must lie between 0, which changes nothing, and 1")
    check_pattern_recomputable(view, by_layer)

    def weaken(work: AttentionState, indices: list[int], layer: int) -> None:
        places = work.indices_of(indices)
        work.rescored.update(places)
        if positions == "all":
            work.weight[:, places] *= 1 - strength
        else:
            rows = torch.arange(len(work.weight), device=work.weight.device)[:, None]
            work.weight[rows, torch.tensor(places)[None], work.last[:, None]] *= 1 - strength

    warn_if_inert(view, flatten_heads(by_layer))
    with editing(view, Edit(Stage.scores, by_layer, weaken)):
        yield


@contextmanager
def block_attention(
    model: Any, heads: Iterable[Head | tuple[int, int]], edges: Bool[Tensor, "batch query key"]
) -> Iterator[None]:
    """Stops chosen heads from attending along `edges`, and gives what they attend there to the other positions.

    A query all of whose attention is stopped attends nowhere. `edges` with one row serves every row of a pass. Warns
    once if a head does not reach the logits. Raises InputError for a head the model does not have, and for passes of
    another shape.

    Example:
        >>> edges = batch.attention_mask.new_zeros((1, batch.tokens.shape[1], batch.tokens.shape[1])).bool()
        >>> edges[0, -1, batch.label_positions[0, :2]] = True  # from the last position to both "bar"
        >>> with il.block_attention(model, [il.Head(2, 0)], edges):
        ...     blocked = il.capture(model, batch)
        >>> il.attention_to_labels(blocked)[0, 2, 0, :2]
        tensor([0., 0.])
    """
    view = ModelView.of(model)
    by_layer = group_by_layer(view, heads)
    if not isinstance(edges, Tensor) or edges.dtype != torch.bool or edges.ndim != 3:
        what = f"{tuple(edges.shape)} {edges.dtype}" if isinstance(edges, Tensor) else type(edges).__name__
        raise InputError(f"edges must be a tensor of booleans, [batch query key], true where none may go; got {what}")
    check_pattern_recomputable(view, by_layer)

    def block(work: AttentionState, indices: list[int], layer: int) -> None:
        assert work.pattern is not None
        rows, _, n_queries, n_keys = work.pattern.shape
        if edges.shape[0] not in (1, rows) or tuple(edges.shape[1:]) != (n_queries, n_keys):
            raise InputError(
                f"edges have shape {tuple(edges.shape)}, and the forward pass attends {(rows, n_queries, n_keys)}; "
                "run the same batch"
            )
        places = work.indices_of(indices)
        left = work.pattern[:, places].masked_fill(edges[:, None].to(work.pattern.device), 0.0)
        work.pattern[:, places] = left / left.sum(-1, keepdim=True).clamp(min=torch.finfo(left.dtype).tiny)

    warn_if_inert(view, flatten_heads(by_layer))
    with editing(view, Edit(Stage.pattern, by_layer, block)):
        yield
