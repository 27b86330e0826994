"""Attention of GPT-2, GPT-J and Llama written out by hand on Hugging Face modules, so that it can be edited.

One unpadded prompt at a time. Queries, keys and values are read off the projections, patterns are computed here
(rotation as multiplication of complex numbers), and what comes out replaces the chosen heads' part of the output
projection's input. Imports nothing of the package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Edit = Callable[["HandAttention"], None]


@dataclass
class HandAttention:
    """One layer's attention for one prompt: change what you like, and `z` follows."""

    layer: int
    q: Tensor  # [head pos d_head], before rotation
    k: Tensor
    v: Tensor
    q_flat: Tensor  # the same without the position embedding's share (GPT-2)
    k_flat: Tensor
    rotary: tuple[int, bool] | None  # rotated dimensions, interleaved
    flat: set[int]  # heads whose scores have no position term
    flat_from: int = 0  # first row of which that is so
    row_edits: Callable[[int, Tensor], Tensor] = lambda head, pattern: pattern
    z: Tensor | None = None

    def pattern(self, head: int) -> Tensor:
        n = self.q.shape[1]
        with_position = self._scores(self.q[head], self.k[head], turned=True)
        without = self._scores(self.q_flat[head], self.k_flat[head], turned=False)
        scores = with_position.clone()
        if head in self.flat:
            scores[self.flat_from :] = without[self.flat_from :]
        future = torch.arange(n)[None, :] > torch.arange(n)[:, None]
        return self.row_edits(head, torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1))

    def _scores(self, q: Tensor, k: Tensor, *, turned: bool) -> Tensor:
        if self.rotary is not None and turned:
            q, k = self._turn(q), self._turn(k)
        return q @ k.T / q.shape[-1] ** 0.5

    def _turn(self, x: Tensor) -> Tensor:
        assert self.rotary is not None
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

    def own_z(self, head: int) -> Tensor:
        return self.pattern(head) @ self.v[head]


def _parts(hf: Any, layer: int) -> tuple[Any, Any]:
    """(attention module, output projection)."""
    if hf.config.model_type == "llama":
        attn = hf.model.layers[layer].self_attn
        return attn, attn.o_proj
    attn = hf.transformer.h[layer].attn
    return attn, attn.c_proj if hf.config.model_type == "gpt2" else attn.out_proj


def edited_log_probs(hf: Any, ids: Tensor, heads: list[tuple[int, int]], edit: Edit) -> Tensor:
    """Log-probabilities after the prompt [vocab] when `edit` has been at the chosen heads' attention."""
    return edited_run(hf, ids, heads, edit)[0]


def edited_run(
    hf: Any, ids: Tensor, heads: list[tuple[int, int]], edit: Edit
) -> tuple[Tensor, dict[int, HandAttention]]:
    """The log-probabilities, and layer -> the attention as it was after editing."""
    config = hf.config
    n_heads = config.num_attention_heads
    n_kv = getattr(config, "num_key_value_heads", None) or n_heads
    seen: dict[int, HandAttention] = {}
    handles = []
    for layer in sorted({layer for layer, _ in heads}):
        attn, out = _parts(hf, layer)
        chosen = [head for where, head in heads if where == layer]
        entry: dict[str, Tensor] = {}

        def keep(name: str, entry: dict[str, Tensor] = entry):
            def hook(module: Any, args: tuple, output: Tensor) -> None:
                entry[name] = output[0].detach()

            return hook

        def split(x: Tensor, n: int) -> Tensor:
            return x.reshape(len(x), n, -1).transpose(0, 1)

        def replace(module, args, layer=layer, attn=attn, chosen=chosen, entry=entry, split=split):
            if config.model_type == "gpt2":
                q, k, v = (split(part, n_heads) for part in entry["qkv"].chunk(3, dim=-1))
                q_flat, k_flat = (
                    split(p, n_heads) for p in _without_share(hf, layer, attn, entry["x"]).chunk(3, -1)[:2]
                )
                rotary = None
            else:
                q, k, v = split(entry["q"], n_heads), split(entry["k"], n_kv), split(entry["v"], n_kv)
                k, v = (x.repeat_interleave(n_heads // n_kv, dim=0) for x in (k, v))
                q_flat, k_flat = q, k
                is_llama = config.model_type == "llama"
                rotary = (q.shape[-1], False) if is_llama else (config.rotary_dim, True)
            hand = HandAttention(layer, q.clone(), k.clone(), v.clone(), q_flat.clone(), k_flat.clone(), rotary, set())
            if hand.rotary is not None:
                hand.q_flat, hand.k_flat = hand.q, hand.k  # content: what is patched in one is in the other
            edit(hand)
            seen[layer] = hand
            z = args[0][0].clone().reshape(len(ids), n_heads, -1)
            for head in chosen:
                z[:, head] = hand.own_z(head) if hand.z is None else hand.z[:, head]
            return (z.reshape(1, len(ids), -1),)

        if config.model_type == "gpt2":
            handles.append(attn.c_attn.register_forward_hook(keep("qkv")))
            block = hf.transformer.h[layer]

            def keep_x(module, args, entry=entry):
                entry["x"] = args[0][0].detach()

            handles.append(block.ln_1.register_forward_pre_hook(keep_x))
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
    """GPT-2's queries, keys and values from the residual without the position embedding, at the scale with it."""
    norm = hf.transformer.h[layer].ln_1
    std = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    content = x - hf.transformer.wpe.weight[: len(x)]
    content = (content - content.mean(-1, keepdim=True)) / std * norm.weight + norm.bias
    return content @ attn.c_attn.weight + attn.c_attn.bias
