"""Attention of GPT-2, GPT-J and Llama written out by hand on Hugging Face modules, so that it can be edited.

One unpadded prompt at a time. Queries, keys and values are read off the projections, patterns are computed here
(rotation as multiplication of complex numbers), and the resulting z replaces the chosen heads' part of the output
projection's input. This module does not import the package.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Edit = Callable[["HandAttention"], None]


@dataclass
class HandAttention:
    """One layer's attention for one prompt; edits change its fields, and z follows from them unless `z` is set."""

    layer: int
    q: Tensor  # [head pos d_head], before rotation
    k: Tensor
    v: Tensor
    q_flat: Tensor  # q without the position embedding's share (GPT-2)
    k_flat: Tensor
    rotary: tuple[int, bool] | None  # number of rotated dimensions, whether interleaved
    flat: set[int] = field(default_factory=set)  # heads whose scores have no position term
    flat_from: int = 0  # first query position without a position term
    row_edits: Callable[[int, Tensor], Tensor] = lambda head, pattern: pattern
    z: Tensor | None = None

    def pattern(self, head: int) -> Tensor:
        n = self.q.shape[1]
        scores = self._turn(self.q[head]) @ self._turn(self.k[head]).T
        if head in self.flat:
            scores[self.flat_from :] = (self.q_flat[head] @ self.k_flat[head].T)[self.flat_from :]
        future = torch.arange(n)[None, :] > torch.arange(n)[:, None]
        scores = (scores / self.q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
        return self.row_edits(head, torch.softmax(scores, dim=-1))

    def _turn(self, x: Tensor) -> Tensor:
        if self.rotary is None:
            return x
        d, interleaved = self.rotary
        position = torch.arange(len(x), dtype=x.dtype)
        angle = position[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=x.dtype) / d)
        turn = torch.polar(torch.ones_like(angle), angle)
        if interleaved:
            pairs = torch.complex(x[:, 0:d:2], x[:, 1:d:2]) * turn
            part = torch.stack([pairs.real, pairs.imag], dim=-1).flatten(-2)
        else:
            pairs = torch.complex(x[:, : d // 2], x[:, d // 2 : d]) * turn
            part = torch.cat([pairs.real, pairs.imag], dim=-1)
        return torch.cat([part, x[:, d:]], dim=-1)

    def own_z(self) -> Tensor:
        """Return z [pos head d_head], computed from the patterns and values."""
        return torch.stack([self.pattern(head) @ self.v[head] for head in range(len(self.q))], dim=1)


def _parts(hf: Any, layer: int) -> tuple[Any, Any]:
    """Return (attention module, output projection)."""
    if hf.config.model_type == "llama":
        attn = hf.model.layers[layer].self_attn
        return attn, attn.o_proj
    attn = hf.transformer.h[layer].attn
    return attn, attn.c_proj if hf.config.model_type == "gpt2" else attn.out_proj


def edited_run(
    hf: Any, ids: Tensor, heads: list[tuple[int, int]], edit: Edit
) -> tuple[Tensor, dict[int, HandAttention]]:
    """Return log-probabilities after the prompt [vocab] with `edit` applied to the chosen heads' attention.

    Also return {layer: its attention after editing}.
    """
    config = hf.config
    n_heads = config.num_attention_heads
    n_kv = getattr(config, "num_key_value_heads", None) or n_heads
    seen: dict[int, HandAttention] = {}
    handles = []

    def split(x: Tensor, n: int) -> Tensor:
        return x.reshape(len(x), n, -1).transpose(0, 1).repeat_interleave(n_heads // n, dim=0)

    for layer in sorted({layer for layer, _ in heads}):
        attn, out = _parts(hf, layer)
        chosen = [head for where, head in heads if where == layer]
        entry: dict[str, Tensor] = {}

        def keep(name: str, entry: dict[str, Tensor] = entry, of: Callable[..., Tensor] = lambda args, output: output):
            return lambda module, args, output: entry.__setitem__(name, of(args, output)[0].detach())

        def replace(module, args, layer=layer, attn=attn, chosen=chosen, entry=entry):
            if config.model_type == "gpt2":
                q, k, v = (split(part, n_heads) for part in entry["qkv"].chunk(3, dim=-1))
                flat = _without_share(hf, layer, attn, entry["x"]).chunk(3, -1)[:2]
                q_flat, k_flat, rotary = *(split(part, n_heads) for part in flat), None
            else:
                q, k, v = split(entry["q"], n_heads), split(entry["k"], n_kv), split(entry["v"], n_kv)
                q_flat, k_flat = q, k  # the same tensors: an edit of q or k in place is in both
                is_llama = config.model_type == "llama"
                rotary = (q.shape[-1], False) if is_llama else (config.rotary_dim, True)
            hand = HandAttention(layer, q, k, v, q_flat, k_flat, rotary)
            edit(hand)
            seen[layer] = hand
            z = args[0][0].clone().reshape(len(ids), n_heads, -1)
            z[:, chosen] = (hand.own_z() if hand.z is None else hand.z)[:, chosen]
            return (z.reshape(1, len(ids), -1),)

        if config.model_type == "gpt2":
            handles.append(attn.c_attn.register_forward_hook(keep("qkv")))
            norm = hf.transformer.h[layer].ln_1
            handles.append(norm.register_forward_hook(keep("x", of=lambda args, output: args[0])))
        else:
            handles += [getattr(attn, f"{name}_proj").register_forward_hook(keep(name)) for name in "qkv"]
        handles.append(out.register_forward_pre_hook(replace))
    try:
        with torch.no_grad():
            logits = hf(ids[None]).logits[0, -1]
    finally:
        for handle in handles:
            handle.remove()
    return torch.log_softmax(logits, dim=-1), seen


def _without_share(hf: Any, layer: int, attn: Any, x: Tensor) -> Tensor:
    """Return GPT-2's q, k and v without the position embedding's share; the norm keeps the full residual's scale."""
    norm = hf.transformer.h[layer].ln_1
    std = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    content = x - hf.transformer.wpe.weight[: len(x)]
    content = (content - content.mean(-1, keepdim=True)) / std * norm.weight + norm.bias
    return content @ attn.c_attn.weight + attn.c_attn.bias
