"""Estimate what passes hold in memory, so that each has as many rows as its limit allows."""

from typing import Any

import torch
from torch import Tensor

from icl_lens.models.passes.memory import PASS_BYTES, release_freed_memory
from icl_lens.models.view import ModelView


def pass_bytes(view: ModelView, n_tokens: int, n_keys: int | None = None) -> int:
    """Estimate the temporary tensors of one row of a pass, bytes, of which a layer needs the most.

    `n_tokens` are run, after keys that a cache has; `n_keys` counts both, by default the tokens
    alone. The FFN holds about four tensors of its width, and eager attention two and a half
    matrices of scores, with keys and values that are repeated for all heads.
    """
    n_keys = n_tokens if n_keys is None else n_keys
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * view.d_model)
    ffn = n_tokens * (4 * d_mlp + 2 * view.d_model)
    scores = 5 * view.n_heads * n_tokens * n_keys // 2
    keys = 2 * (view.n_heads + view.n_kv_heads) * view.d_head * n_keys
    return max(ffn, scores + keys) * view.model.W_U.element_size()


def key_bytes(view: ModelView, n_keys: int) -> int:
    """Return the size of one prompt's cached keys and values in all layers, bytes; they are cached
    in float32.
    """
    size = view.compute_dtype.itemsize
    return 2 * view.n_layers * view.n_kv_heads * view.d_head * n_keys * size


def captured_bytes(view: ModelView, n_tokens: int) -> int:
    """Estimate the memory of one prompt of this length while its batch is captured, bytes."""
    layers, d_model, heads = view.n_layers, view.d_model, view.n_heads
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * d_model)
    per_prompt = 7 * d_model + 2 * heads * view.d_head + d_mlp
    per_token = view.n_kv_heads * view.d_head + heads
    captured = layers * (per_prompt + n_tokens * per_token)
    temporary = n_tokens * (4 * d_mlp + 8 * d_model) + 4 * heads * n_tokens**2
    return (captured + temporary) * view.model.W_U.element_size()


def rows_at_once(view: ModelView, n_tokens: int, memory: int = PASS_BYTES) -> int:
    """Return how many rows of this length one pass can run; at least one."""
    return max(1, memory // pass_bytes(view, n_tokens))


def make_room(
    view: ModelView, n_rows: int, n_tokens: int, n_keys: int | None = None
) -> list[tuple[str, Any]]:
    """Return freed memory to the system before a pass that takes more than half of `PASS_BYTES`,
    which would stay beside its attention, and return hooks for the pass.

    In a pass that takes more than `PASS_BYTES`, such as one over a long prompt, they do the same
    before each layer.
    """
    n_bytes = n_rows * pass_bytes(view, n_tokens, n_keys)
    if torch.device(view.cfg.device).type != "cpu" or n_bytes <= PASS_BYTES // 2:
        return []
    release_freed_memory()
    if n_bytes <= PASS_BYTES:
        return []
    layers = range(view.n_layers)
    return [(view.hook(layer, "hook_resid_pre"), _release_freed_memory) for layer in layers]


def release_after_large_pass(view: ModelView, n_tokens: int) -> None:
    """Return freed memory to the system if a pass over one prompt takes more than half of
    `PASS_BYTES`, so that it does not stay beside what is computed next.
    """
    on_cpu = torch.device(view.cfg.device).type == "cpu"
    if on_cpu and pass_bytes(view, n_tokens) > PASS_BYTES // 2:
        release_freed_memory()


def _release_freed_memory(x: Tensor, hook: Any) -> None:
    release_freed_memory()
