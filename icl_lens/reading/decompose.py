"""Exact decompositions of attention and FFN outputs, as pure functions of tensors."""

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor


def head_outputs(
    z: Float[Tensor, "*batch head d_head"], W_O: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, "*batch head d_model"]:
    """Return what each head writes, in residual-stream units; the sum over `head` plus b_O is the
    attention output.

    Source: docs/howto/numbers.md.
    """
    return einsum(z, W_O.to(z.dtype), "... head d_head, head d_head d_model -> ... head d_model")


def repeat_kv(
    v: Float[Tensor, "*batch kv_head d_head"], n_heads: int
) -> Float[Tensor, "*batch head d_head"]:
    """Repeat values (or keys) of key-value groups for the query heads that read them (grouped-query
    attention).
    """
    return v if v.shape[-2] == n_heads else v.repeat_interleave(n_heads // v.shape[-2], dim=-2)


def scaled_rows(
    x: Float[Tensor, "*rows head d"], scale: Float[Tensor, "*rows"] | None
) -> Float[Tensor, "*rows head d"]:
    """Return rows of a layer times the scale of the norm after attention; None if there is no such
    norm.
    """
    return x if scale is None else x * scale[..., None, None]


def subhead_values(
    pattern: Float[Tensor, "batch head key"],
    v: Float[Tensor, "batch key head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "batch head key d_model"]:
    """Split each head's output by the position it is moved from; the sum over `key` is the head
    output.

    `v` contains b_V; b_O is not included. Source: docs/howto/numbers.md.
    """
    weighted = einsum(
        pattern.to(v.dtype), v, "batch head key, batch key head d_head -> batch head key d_head"
    )
    return einsum(
        weighted,
        W_O.to(v.dtype),
        "batch head key d_head, head d_head d_model -> batch head key d_model",
    )


def selected_subhead_values(
    pattern: Float[Tensor, "batch head key"],
    v: Float[Tensor, "batch key head d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    row: Int[Tensor, " n"],
    head: Int[Tensor, " n"],
    key: Int[Tensor, " n"],
) -> Float[Tensor, "n d_model"]:
    """Return `subhead_values(...)[row, head, key]` without computing the others."""
    weighted = pattern[row, head, key, None].to(v.dtype) * v[row, key, head]
    out = weighted.new_empty((len(row), W_O.shape[-1]))
    for h in head.unique().tolist():
        of_head = head == h
        out[of_head] = weighted[of_head] @ W_O[h].to(v.dtype)
    return out


def neuron_values(
    post: Float[Tensor, "batch neuron"], W_out: Float[Tensor, "neuron d_model"]
) -> Float[Tensor, "batch neuron d_model"]:
    """Return each FFN neuron's contribution: its activation times its row of W_out.

    The sum over `neuron` plus b_out is the FFN output. Source: docs/howto/numbers.md.
    """
    return torch.einsum("bn,nd->bnd", post, W_out.to(post.dtype))
