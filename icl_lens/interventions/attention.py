"""Edit attention patterns: reweight labels, remove the position term, knock out query-key pairs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.edit_checks import checked_heads
from icl_lens.interventions.editor import AttentionState, Edit, Positions, Stage, editing
from icl_lens.models.head import AnyHead
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


@contextmanager
def scale_label_attention(
    model: Any,
    heads: Iterable[AnyHead],
    batch: PromptBatch,
    weights: Tensor | Sequence[Sequence[float]],
    *,
    renormalize: bool,
) -> Iterator[None]:
    """Multiply the attention of chosen heads from the last position to all tokens of each label.

    `weights` [batch demo] are factors: 1 keeps the attention to a label, 0 removes it. With `renormalize`, the last
    position's attention is then scaled to the sum it had, which redistributes removed attention. Passes in the
    block must be over `batch` or, if `batch` is one prompt, over any number of rows that all begin with this prompt.

    Warn once if a head does not reach the logits. Raise InputError for weights that are negative, not finite or of the
    wrong shape, an unknown head, prompts without demonstrations, passes over other prompts, and families whose
    attention cannot be recomputed. Source: the published version, section 4.1 (weights against majority-label bias).

    Example:
        >>> with il.scale_label_attention(model, [il.Head(2, 0)], batch, [[0.0, 0.0, 1.0, 1.0]], renormalize=True):
        ...     foo_only = il.capture(model, batch)
        >>> il.attention_by_label(foo_only)[0, 2, 0, 0]
        tensor(0.)
    """
    view = ModelView.of(model)
    batch.require_demonstrations(
        "label attention to scale", "use block_attention, which edits attention to any position"
    )
    try:
        weights = torch.as_tensor(weights, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"weights must be numbers, one per prompt and demonstration, got {weights!r}") from None
    shape = tuple(batch.label_positions.shape)
    if tuple(weights.shape) != shape:
        raise InputError(
            f"weights must have shape {shape}, one per prompt and demonstration, got {tuple(weights.shape)}"
        )
    valid = torch.isfinite(weights) & (weights >= 0)
    if not bool(valid.all()):
        raise InputError(
            f"weights must be finite and non-negative, got {float(weights[~valid][0])}; 1 keeps a label, 0 hides it"
        )
    by_layer = checked_heads(view, heads, attention=True)
    with editing(view, label_attention_edit(by_layer, batch, weights, renormalize=renormalize)):
        yield


def label_attention_edit(
    by_layer: dict[int, list[int]], batch: PromptBatch, weights: Float[Tensor, "batch demo"], *, renormalize: bool
) -> Edit:
    """Return the edit of `scale_label_attention`."""

    def scale(attention: AttentionState, heads: list[int], layer: int) -> None:
        assert attention.pattern is not None
        rows, n_keys, device = len(attention.pattern), attention.pattern.shape[-1], attention.pattern.device
        if len(batch) not in (1, rows):
            raise InputError(f"the forward pass must have {len(batch)} rows like batch, got {rows}; run the same batch")
        if (n_tokens := int(batch.last.max()) + 1) > n_keys:
            raise InputError(
                f"the forward pass must have at least {n_tokens} tokens like batch, got {n_keys}; run the same batch"
            )
        tokens = batch.label_token_positions.to(device)
        factors = weights.to(device)[..., None].expand(tokens.shape).flatten(1).expand(rows, -1)
        positions = tokens.flatten(1).expand(rows, -1)
        factors = factors.masked_fill(positions < 0, 1.0)
        ones = factors.new_ones(rows, n_keys)
        factor_of_key = ones.scatter_reduce(1, positions.clamp(min=0), factors, "prod")[:, None]
        indices = torch.tensor(attention.indices_of(heads), device=device)
        last_queries = torch.arange(rows, device=device)[:, None], indices, attention.last[:, None]
        intact = attention.pattern[last_queries]
        row = intact * factor_of_key.to(attention.pattern.dtype)
        if renormalize:  # to the sum it had, which is less than 1 with an attention sink
            before, after = (one.sum(-1, keepdim=True) for one in (intact, row))
            row = row * (before / after.clamp(min=torch.finfo(row.dtype).tiny))
        attention.pattern[last_queries] = row

    return Edit(Stage.pattern, by_layer, scale, required_batch=batch, what="with scaled attention to labels")


@contextmanager
def remove_position(
    model: Any,
    heads: Iterable[AnyHead],
    *,
    strength: float = 1.0,
    positions: Positions = "all",
) -> Iterator[None]:
    """Remove the position term from chosen heads' query-key products.

    In rotary models, q·k is computed without rotation. With learned positions, the position embedding's share of the
    heads' queries and keys is subtracted; the norm's scale stays that of the unedited input. With ALiBi, the bias is
    omitted. Mask and softmax are unchanged, and position information that earlier layers wrote remains. `strength`
    interpolates the scores: 1 removes the position term, 0 keeps it. `positions="last"` edits only the attention of the
    last position.

    Warn once if a head does not reach the logits. Raise InputError for an unknown head, a strength outside 0 to 1, and
    families whose attention cannot be recomputed. Source: the published version, section 4.2.

    Example:
        >>> with il.remove_position(model, [il.Head(2, 0)], strength=0.5):
        ...     weakened = il.label_log_probs(model, batch)
        >>> weakened.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    check_choice("positions", positions, ("all", "last"))
    if not 0 <= strength <= 1:
        raise InputError(f"strength must be between 0 (no change) and 1, got {strength!r}")
    by_layer = checked_heads(view, heads, attention=True)
    with editing(view, position_edit(by_layer, strength, positions)):
        yield


def position_edit(by_layer: dict[int, list[int]], strength: float, positions: Positions) -> Edit:
    """Return the edit of `remove_position`."""

    def weaken(attention: AttentionState, heads: list[int], layer: int) -> None:
        indices = attention.indices_of(heads)
        attention.rescored.update(indices)
        if positions == "all":
            attention.weight[:, indices] *= 1 - strength
        else:
            rows = torch.arange(len(attention.weight), device=attention.weight.device)[:, None]
            attention.weight[rows, torch.tensor(indices)[None], attention.last[:, None]] *= 1 - strength

    return Edit(Stage.scores, by_layer, weaken, what="with a weakened position term")


@contextmanager
def block_attention(model: Any, heads: Iterable[AnyHead], edges: Bool[Tensor, "batch query key"]) -> Iterator[None]:
    """Block attention of chosen heads where `edges` is True and renormalize over the other keys (attention knockout).

    An edge is here a pair of a query and a key position. A query with all edges blocked attends nowhere. If `edges` has
    batch size 1, it applies to every row of a pass. Warn once if a head does not reach the logits. Raise InputError for
    an unknown head, passes of another shape, and families whose attention cannot be recomputed.

    Example:
        >>> edges = batch.attention_mask.new_zeros((1, batch.tokens.shape[1], batch.tokens.shape[1])).bool()
        >>> edges[0, -1, batch.label_positions[0, :2]] = True  # from the last position to both "bar"
        >>> with il.block_attention(model, [il.Head(2, 0)], edges):
        ...     blocked = il.capture(model, batch)
        >>> il.attention_to_labels(blocked)[0, 2, 0, :2]
        tensor([0., 0.])
    """
    view = ModelView.of(model)
    if not isinstance(edges, Tensor) or edges.dtype != torch.bool or edges.ndim != 3:
        what = f"{tuple(edges.shape)} {edges.dtype}" if isinstance(edges, Tensor) else type(edges).__name__
        raise InputError(f"edges must be a boolean tensor [batch query key], True to block attention, got {what}")
    by_layer = checked_heads(view, heads, attention=True)

    def block(attention: AttentionState, heads: list[int], layer: int) -> None:
        assert attention.pattern is not None
        rows, _, n_queries, n_keys = attention.pattern.shape
        if edges.shape[0] not in (1, rows) or tuple(edges.shape[1:]) != (n_queries, n_keys):
            raise InputError(
                f"edges must have the shape of the pass, {(rows, n_queries, n_keys)}, got {tuple(edges.shape)}; run "
                "the same batch"
            )
        indices = attention.indices_of(heads)
        kept = attention.pattern[:, indices].masked_fill(edges[:, None].to(attention.pattern.device), 0.0)
        attention.pattern[:, indices] = kept / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)

    with editing(view, Edit(Stage.pattern, by_layer, block, what="with blocked attention")):
        yield
