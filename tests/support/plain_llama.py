"""What the heads of a Llama compute, from Hugging Face modules and hooks alone.

`run` reads each head's queries, keys, values, attention and output vector of one prompt. `written`
runs a prompt once for each of some heads, each time with another vector in that head's place at the
last position. Attention is computed here from queries and keys, rotation included, and compared
with the model's own, so that a misread module fails. No code of the package.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Heads = Sequence[tuple[int, int]]
MAX_ERROR = 1e-5


@dataclass
class Pass:
    """One prompt; groups of keys and values are repeated, one for each head."""

    x: list[Tensor] = field(default_factory=list)
    """The residual stream before each layer [position d_model]."""
    q: list[Tensor] = field(default_factory=list)
    """[head position d_head], without positions, as are keys."""
    k: list[Tensor] = field(default_factory=list)
    v: list[Tensor] = field(default_factory=list)
    z: list[Tensor] = field(default_factory=list)
    """Attention times values, which W_O reads [head position d_head]."""
    pattern: list[Tensor] = field(default_factory=list)
    """[head query key]"""
    final: Tensor = field(default_factory=lambda: torch.empty(0))
    """The residual stream before the final norm [position d_model]."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


def layers(hf: Any) -> Any:
    return hf.model.layers


def output_weights(hf: Any, layer: int) -> Tensor:
    """Return W_O [head d_head d_model]."""
    weight = layers(hf)[layer].self_attn.o_proj.weight.detach().T
    return weight.unflatten(0, (hf.config.num_attention_heads, -1))


def rotated(hf: Any, x: Tensor) -> Tensor:
    """Return queries or keys [head position d_head] turned by their positions."""
    d_head, n_positions = x.shape[-1], x.shape[-2]
    theta = hf.config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(0, d_head, 2).double() / d_head)
    angles = torch.arange(n_positions).double()[:, None] * frequencies
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    first, second = x[..., : d_head // 2], x[..., d_head // 2 :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(hf: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return the attention of queries to keys [head query key]."""
    scores = rotated(hf, q) @ rotated(hf, k).transpose(-1, -2) / q.shape[-1] ** 0.5
    is_later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(is_later, -torch.inf).softmax(-1)


@torch.no_grad()
def run(hf: Any, ids: Tensor) -> Pass:
    """Run one prompt."""
    seen, handles = Pass(), []
    n_heads, n_groups = hf.config.num_attention_heads, hf.config.num_key_value_heads

    def keep_input(module: Any, args: Any, kwargs: Any) -> None:
        seen.x.append((args[0] if args else kwargs["hidden_states"])[0].clone())

    def keep(values: list[Tensor], n: int) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            by_head = output[0].unflatten(-1, (n, -1)).transpose(0, 1)
            values.append(by_head.repeat_interleave(n_heads // n, dim=0).clone())

        return hook

    def keep_z(module: Any, args: Any) -> None:
        seen.z.append(args[0][0].unflatten(-1, (n_heads, -1)).transpose(0, 1).clone())

    for layer in layers(hf):
        module = layer.self_attn
        handles += [
            layer.register_forward_pre_hook(keep_input, with_kwargs=True),
            module.q_proj.register_forward_hook(keep(seen.q, n_heads)),
            module.k_proj.register_forward_hook(keep(seen.k, n_groups)),
            module.v_proj.register_forward_hook(keep(seen.v, n_groups)),
            module.o_proj.register_forward_pre_hook(keep_z),
        ]
    handles.append(
        hf.model.norm.register_forward_pre_hook(lambda m, a: setattr(seen, "final", a[0][0]))
    )
    output = hf(ids[None], output_attentions=True, use_cache=False)
    for handle in handles:
        handle.remove()
    seen.pattern = [pattern[0] for pattern in output.attentions]
    seen.logits = output.logits[0]
    for layer, pattern in enumerate(seen.pattern):
        error = (attention(hf, seen.q[layer], seen.k[layer]) - pattern).abs().max()
        assert error < MAX_ERROR, f"attention of layer {layer}: {error}"
    return seen


@torch.no_grad()
def written(hf: Any, ids: Tensor, heads: Heads, vectors: Sequence[Tensor]) -> Tensor:
    """Return the log-probabilities after the prompt [head vocab], for each head with its vector
    [d_head] in place of its own z at the last position.
    """

    def write(layer: int) -> Any:
        def hook(module: Any, args: Any) -> tuple[Tensor]:
            z = args[0].clone()
            d_head = z.shape[-1] // hf.config.num_attention_heads
            for row, (where, head) in enumerate(heads):
                if where == layer:
                    z[row, -1, head * d_head : (head + 1) * d_head] = vectors[row]
            return (z,)

        return hook

    handles = []
    for layer, block in enumerate(layers(hf)):
        handles.append(block.self_attn.o_proj.register_forward_pre_hook(write(layer)))
    logits = hf(ids.expand(len(heads), -1), use_cache=False, logits_to_keep=1).logits[:, -1]
    for handle in handles:
        handle.remove()
    return logits.log_softmax(-1)
