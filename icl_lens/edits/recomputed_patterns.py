"""Recompute attention patterns from queries and keys, with a chosen share of the position term.

`LayerValues` holds one layer's recorded activations of one forward pass; `ModelView` handles
differences between families.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models import attention_scores
from icl_lens.models.attention_scores import AttentionScoring, rotate
from icl_lens.models.readout import norm_scale
from icl_lens.models.view import ModelView


@dataclass
class LayerValues:
    """One layer's recorded activations of one forward pass, by short name, and the mask of real
    keys.
    """

    view: ModelView
    layer: int
    key_mask: Bool[Tensor, "batch key"] | None = None
    seen: dict[str, Tensor] = field(default_factory=dict)
    queries: Int[Tensor, "batch query"] | None = None
    """Positions of the queries; None if there is one at every position."""

    def record(self, name: str, value: Tensor) -> None:
        """Store an activation under its name, without "_normed".

        Queries, keys and values are stored as attention reads them, [batch pos head d_head]: after
        norms, also those without a hook, and clipped. Normed queries and keys, which are recorded
        later, replace the raw ones.
        """
        if name.endswith("_normed"):
            # Per-head norms have the head axis first; OLMo-2's norm is over all heads jointly.
            is_per_head = value.ndim == 4
            if is_per_head:
                value = value.transpose(1, 2)
            else:
                value = value.unflatten(-1, (-1, self.view.d_head))
        elif name in ("q", "k"):
            norm = attention_scores.unhooked_qk_norm(self.view, self.layer, name)
            if norm is not None:
                is_joint = norm.width != self.view.d_head  # one norm over all heads
                shape = value.shape[2:]
                value = norm(value.flatten(2)).unflatten(2, shape) if is_joint else norm(value)
        if name.removesuffix("_normed") in ("q", "k", "v"):
            value = attention_scores.attention_scoring(self.view, self.layer).clipped(value)
        self.seen[name.removesuffix("_normed")] = value

    def heads(
        self, name: Literal["q", "k", "v", "z"], heads: Sequence[int]
    ) -> Float[Tensor, "batch pos selected d_head"]:
        """Return queries, keys, values or z of these heads, with key-value groups repeated."""
        x = self.seen[name]
        indices = list(heads)
        if x.shape[2] != self.view.n_heads:
            indices = [self.view.kv_head(head) for head in heads]
        return x[:, :, indices]

    def at_queries(
        self, x: Shaped[Tensor, "#batch pos *rest"]
    ) -> Shaped[Tensor, "#rows query *rest"]:
        """Select the positions of the queries."""
        if self.queries is None:
            return x
        rows = torch.arange(len(self.queries), device=x.device)[:, None]
        return x.expand(len(rows), *x.shape[1:])[rows, self.queries.to(x.device)]


def layer_hooks(view: ModelView, layer: int) -> dict[str, str]:
    """Return short name -> hook name of a layer's attention pattern and of what is needed to
    recompute it.

    "cos" and "sin" are those of rotary angles; "position" and "resid" give the share of learned
    positions.
    """
    hooks = {name: view.hook(layer, f"attn.hook_{name}") for name in ("q", "k", "v", "pattern")}
    hooks |= attention_scores.normed_hooks(view, layer)
    kind = attention_scores.attention_scoring(view, layer).position
    if kind == "rotary" and (angles := attention_scores.rotation_hooks(view, layer)) is not None:
        hooks["cos"], hooks["sin"] = angles
    if kind == "standard":
        hooks["position"] = "hook_pos_embed"
        hooks["resid"] = view.hook(layer, "hook_resid_pre")
    return hooks


def recording_hooks(values: LayerValues, *names: str) -> list[tuple[str, Any]]:
    """Return hooks that record the activations of `layer_hooks`, or those with the given names, in
    `values`.
    """

    def record(name: str, value: Tensor, hook: Any) -> None:
        values.record(name, value.detach())

    hooks = layer_hooks(values.view, values.layer).items()
    return [
        (hook, partial(record, name))
        for name, hook in hooks
        if not names or name.removesuffix("_normed") in names
    ]


@dataclass
class ScoreInputs:
    """Queries and keys of some heads before rotation, and the shares that learned positions add
    to them.

    The shares are separate so that they can be patched from another prompt together with the
    queries or keys.
    """

    q: Float[Tensor, "batch query selected d_head"]
    k: Float[Tensor, "batch key selected d_head"]
    q_share: Float[Tensor, "batch query selected d_head"] | None
    k_share: Float[Tensor, "batch key selected d_head"] | None


def score_inputs(
    values: LayerValues, heads: Sequence[int], *, position_share: bool = True
) -> ScoreInputs:
    """Return queries and keys of chosen heads and, for learned positions, the position embedding's
    share of them.
    """
    view, layer = values.view, values.layer
    q, k = values.heads("q", heads), values.heads("k", heads)
    if not position_share or attention_scores.attention_scoring(view, layer).position != "standard":
        return ScoreInputs(q, k, None, None)
    # The position embedding as input of the layer's attention, with the norm's centering, gain and
    # scale.
    norm = view.attn_input_norm(layer)
    position = values.seen["position"].to(q.device, torch.promote_types(q.dtype, torch.float32))
    if norm.center:
        position = position - position.mean(-1, keepdim=True)
    position = position * norm.gain_as(position.dtype).to(position.device)
    if norm.normalize:
        x = values.seen["resid"].to(position)
        position = position * norm_scale(x, eps=norm.eps, center=norm.center)[..., None]
    groups = [view.kv_head(head) for head in heads]
    share = "batch pos d_model, head d_model d_head -> batch pos head d_head"
    W_Q, W_K = view.W_Q(layer)[list(heads)].to(position), view.W_K(layer)[groups].to(position)
    q_share, k_share = einsum(values.at_queries(position), W_Q, share), einsum(position, W_K, share)
    return ScoreInputs(q, k, q_share.expand_as(q), k_share.expand_as(k))


def without_rotation(
    x: Float[Tensor, "batch pos head d_head"], cos: Tensor, sin: Tensor, scoring: AttentionScoring
) -> Float[Tensor, "batch pos head d_head"]:
    """Return queries or keys as if at position 0, keeping the scale that some families apply with
    the rotation.
    """
    return rotate(x, (cos.square() + sin.square()).sqrt(), torch.zeros_like(sin), scoring)


def recompute_pattern(
    values: LayerValues,
    inputs: ScoreInputs,
    heads: Sequence[int],
    weight: Float[Tensor, "batch selected query"],
) -> Float[Tensor, "batch selected query key"]:
    """Return the heads' attention with `weight` times the position term in their scores.

    Mask, soft-cap and softmax are the model's own.
    """
    scoring = attention_scores.attention_scoring(values.view, values.layer)
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    q, k = inputs.q.to(dtype), inputs.k.to(dtype)
    product = "batch query head d_head, batch key head d_head -> batch head query key"
    weight, n_keys = weight[..., None].to(dtype), k.shape[1]
    mask = (
        torch.ones(len(k), n_keys, dtype=torch.bool, device=k.device)
        if values.key_mask is None
        else values.key_mask
    )
    needs_free = not bool((weight == 1).all()) and scoring.position != "alibi"
    free_q, free_k = q, k  # without the position term
    if scoring.position == "rotary":
        cos, sin = (x.to(q.device, dtype) for x in rotation(values, mask))
        at_q, at_k = (values.at_queries(cos), values.at_queries(sin)), (cos, sin)
        if needs_free:
            free_q = without_rotation(q, *at_q, scoring)
            free_k = without_rotation(k, *at_k, scoring)
        q, k = rotate(q, *at_q, scoring), rotate(k, *at_k, scoring)
    elif inputs.q_share is not None and inputs.k_share is not None:
        free_q, free_k = q - inputs.q_share.to(dtype), k - inputs.k_share.to(dtype)
    logits = einsum(q, k, product)
    if needs_free:
        logits = weight * logits + (1 - weight) * einsum(free_q, free_k, product)
    logits = scoring.scale * logits
    if scoring.position == "alibi":
        bias = attention_scores.alibi(values.view, values.layer, mask).to(q.device, dtype)
        logits = logits + weight * bias[:, list(heads), None]
    logits = scoring.capped(logits)
    positions = torch.arange(n_keys, device=k.device)
    distance = values.at_queries(positions[None])[:, None, :, None] - positions
    allowed = distance >= 0
    if scoring.window is not None:
        allowed = allowed & (distance < scoring.window)
    allowed = allowed & mask.to(k.device)[:, None, None, :]
    # Padding before a prompt attends to nothing; its rows are never read, but must not be NaN.
    allowed = allowed | ~allowed.any(-1, keepdim=True)
    sinks = (
        None
        if scoring.sinks is None
        else scoring.sinks[list(heads), None].expand(logits.shape[:-1])
    )
    return attention_scores.attention(logits.masked_fill(~allowed, -torch.inf), sinks).to(
        inputs.q.dtype
    )


def without_keys(
    pattern: Float[Tensor, "batch head *query key"],
    hidden: Bool[Tensor, "#batch 1 *query key"],
    *,
    has_sink: bool,
) -> Float[Tensor, "batch head *query key"]:
    """Return attention probabilities without hidden keys, whose share the other keys and an
    attention sink get.
    """
    x = pattern.to(torch.promote_types(pattern.dtype, torch.float32))
    visible = x.masked_fill(hidden, 0.0)
    shared = visible.sum(-1, keepdim=True)
    if has_sink:  # which gets what positions do not
        shared = shared + (1 - x.sum(-1, keepdim=True)).clamp(min=0)
    return (visible / shared.clamp(min=torch.finfo(visible.dtype).tiny)).to(pattern.dtype)


def rotation(values: LayerValues, mask: Bool[Tensor, "batch key"]) -> tuple[Tensor, Tensor]:
    """Return cosines and sines at all positions: those recorded or, if the model has no hooks for
    them, a table's; [batch-or-1 pos d_rotary].

    d_rotary is 0 where the layer has hooks and did not rotate in the pass. `mask` are the keys that
    are tokens. Raise RotaryAnglesUnavailable if the model has neither hooks nor a table.
    """
    if "cos" in values.seen:
        return values.seen["cos"], values.seen["sin"]
    if attention_scores.rotation_hooks(values.view, values.layer) is not None:
        cos, sin = attention_scores.no_rotation(values.seen["q"])
        return cos.expand(1, mask.shape[1], 0), sin.expand(1, mask.shape[1], 0)
    positions: Int[Tensor, "batch key"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return attention_scores.rotation_table(values.view, values.layer, positions)


def check_no_cache(values: LayerValues) -> None:
    """Raise InputError if the pass uses a KV cache of earlier passes, which hooks do not expose."""
    pattern = values.seen.get("pattern")
    n_keys = values.seen["v"].shape[1]
    if (pattern is not None and pattern.shape[-1] != n_keys) or (
        values.key_mask is not None and values.key_mask.shape[1] != n_keys
    ):
        raise InputError(
            "attention edits do not support a KV cache of earlier passes; generate with "
            "use_past_kv_cache=False"
        )
