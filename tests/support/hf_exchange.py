"""Exchanges of queries, keys and values at the last position, with Hugging Face's own key-value cache.

The prompt's tokens before the last one fill a cache, in which keys and values at some positions are overwritten by
those of other prompts' caches; then the last token runs alone. Cached keys are rotated, so that positions must be the
same in both prompts. A cache has one key per group of heads: exchange whole groups. This module does not import the
package.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import reference_hf
import torch
from torch import Tensor, nn
from transformers import DynamicCache

Places = Mapping[int, tuple[Tensor, int]]
"""Position -> ids of the prompt, and the position in it, that its key or value comes from."""


def groups(hf: Any) -> tuple[int, int]:
    """Return the numbers of heads and of key-value heads."""
    n_heads = reference_hf._setting(hf.config, "num_attention_heads", "num_heads", "n_head")
    return n_heads, reference_hf._n_kv_heads(hf.config, n_heads)


def exchanged(
    hf: Any,
    ids: Tensor,
    heads: Mapping[int, list[int]],
    *,
    q: Tensor | None = None,
    k: Places | None = None,
    v: Places | None = None,
) -> Tensor:
    """Return log-probabilities after the prompt [vocab] with an exchange in whole groups of heads, by layer.

    `q` are the ids of the prompt whose last query is used.
    """
    cache = _cache(hf, ids[:-1])
    n_heads, n_kv = groups(hf)
    for name, places in (("keys", k), ("values", v)):
        for position, (source, place) in (places or {}).items():
            theirs = _cache(hf, source[: place + 1])
            for layer, chosen in heads.items():
                own = sorted({head // (n_heads // n_kv) for head in chosen})
                getattr(cache.layers[layer], name)[0, own, position] = getattr(theirs.layers[layer], name)[
                    0, own, place
                ]
    with ExitStack() as stack:
        if q is not None:
            for layer, last in _queries(hf, q, heads).items():
                module, of_head = _query_module(hf, layer)
                handle = module.register_forward_hook(_replace(of_head, heads[layer], last))
                stack.callback(handle.remove)
        with torch.no_grad():
            logits = hf(ids[None, -1:], past_key_values=cache, use_cache=True).logits[0, -1]
    return torch.log_softmax(logits, dim=-1)


def _cache(hf: Any, ids: Tensor) -> DynamicCache:
    """Return the cache of a prompt, with all positions also in layers with a sliding window."""
    with torch.no_grad():
        return hf(ids[None], past_key_values=DynamicCache(), use_cache=True).past_key_values


def _query_module(hf: Any, layer: int) -> tuple[nn.Module, Any]:
    """Return the module whose output has a layer's queries before rotation, and a function to a view [.., head, d]."""
    wiring = reference_hf._WIRING[hf.config.model_type]
    block = reference_hf._layers(hf)[layer]
    n_heads, n_kv = groups(hf)
    attention = block.get_submodule(wiring.out.rpartition(".")[0])
    norm = getattr(attention, "q_norm", None)
    d_head = reference_hf._weight_in_out(block.get_submodule(wiring.out)).shape[0] // n_heads
    if isinstance(norm, nn.Module) and norm.weight.numel() == d_head:
        return norm, lambda x: x  # [batch pos head d] or [batch head pos d]: see `_replace`
    if isinstance(norm, nn.Module):
        return norm, lambda x: x.unflatten(-1, (n_heads, -1))
    projection = block.get_submodule(wiring.values)
    if wiring.layout == "grouped":
        return projection, lambda x: x.unflatten(-1, (n_kv, -1, d_head))[..., :-2, :]
    if wiring.layout == "last":
        return projection, lambda x: x[..., : n_heads * d_head].unflatten(-1, (n_heads, d_head))
    query = block.get_submodule(wiring.values.replace("v_proj", "q_proj"))
    return query, lambda x: x.unflatten(-1, (n_heads, d_head))


def _queries(hf: Any, ids: Tensor, heads: Mapping[int, list[int]]) -> dict[int, Tensor]:
    """Return each layer's raw output at the last position of a prompt, alone with the cache of the others."""
    found: dict[int, Tensor] = {}
    with ExitStack() as stack:
        for layer in heads:
            module, _ = _query_module(hf, layer)
            hook = module.register_forward_hook(lambda m, a, out, layer=layer: found.__setitem__(layer, out.clone()))
            stack.callback(hook.remove)
        cache = _cache(hf, ids[:-1])
        with torch.no_grad():
            hf(ids[None, -1:], past_key_values=cache, use_cache=True)
    return found


def _replace(of_head: Any, heads: list[int], theirs: Tensor) -> Any:
    """Return a hook that overwrites the queries of some heads in a module's output for one token."""

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        ours, other = of_head(output), of_head(theirs)
        if ours.ndim == 5:  # groups of heads: [1 1 group member d]
            for head in heads:
                at = divmod(head, ours.shape[3])
                ours[:, :, at[0], at[1]] = other[:, :, at[0], at[1]]
        else:  # [1 1 head d], or [1 head 1 d]: one token
            flat, its = ours.view(-1, ours.shape[-1]), other.reshape(-1, other.shape[-1])
            flat[heads] = its[heads]
        return output

    return hook
