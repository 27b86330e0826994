"""Exact splits of what attention and FFN write into the residual stream. Pure einsum: no model, no state."""

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor


def head_outputs(
    z: Float[Tensor, "*batch head d_head"], W_O: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, "*batch head d_model"]:
    """What each head writes; summed over `head` and with b_O added it is the attention output.

    Residual-stream units. b_O belongs to no head. Source: docs/howto/numbers.md.
    """
    return einsum(z, W_O.to(z.dtype), "... head d_head, head d_head d_model -> ... head d_model")


def repeat_kv(v: Float[Tensor, "*batch kv_head d_head"], n_heads: int) -> Float[Tensor, "*batch head d_head"]:
    """Values (or keys) of key-value groups, repeated for the query heads that read them (grouped queries)."""
    return v if v.shape[-2] == n_heads else v.repeat_interleave(n_heads // v.shape[-2], dim=-2)


def subhead_values(
    pattern: Float[Tensor, "batch head key"],
    v: Float[Tensor, "batch key head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "batch head key d_model"]:
    """Each head's output, split by the position it was moved from.

    `v` contains b_V; b_O belongs to no head. Sums over `key` to the head output.
    Source: docs/howto/numbers.md.
    """
    weighted = einsum(pattern.to(v.dtype), v, "batch head key, batch key head d_head -> batch head key d_head")
    return einsum(weighted, W_O.to(v.dtype), "batch head key d_head, head d_head d_model -> batch head key d_model")


def selected_subhead_values(
    pattern: Float[Tensor, "batch head key"],
    v: Float[Tensor, "batch key head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    row: Int[Tensor, " n"],
    head: Int[Tensor, " n"],
    key: Int[Tensor, " n"],
) -> Float[Tensor, "n d_model"]:
    """`subhead_values(...)[row, head, key]`, computing only those."""
    weighted = pattern[row, head, key, None].to(v.dtype) * v[row, key, head]
    out = weighted.new_empty((len(row), W_O.shape[-1]))
    for h in head.unique().tolist():
        of_head = head == h
        out[of_head] = weighted[of_head] @ W_O[h].to(v.dtype)
    return out


def neuron_values(
    post: Float[Tensor, "batch neuron"], W_out: Float[Tensor, "neuron d_model"]
) -> Float[Tensor, "batch neuron d_model"]:
    """Each FFN neuron's share: coefficient times its row of the output matrix.

    Summed over `neuron` and with b_out added it is the FFN output. Source: docs/howto/numbers.md.
    """
    return torch.einsum("bn,nd->bnd", post, W_out.to(post.dtype))
