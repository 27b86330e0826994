"""Estimate what passes hold in memory, so that each has as many rows as its limit allows."""

from icl_lens.models.passes.memory import PASS_BYTES
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
