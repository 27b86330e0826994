"""How many prompts, rows and layers rows of one token take at once: as many as fit into the memory meant for them."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# What keys and values of the prompts of one piece may take, and the widest activations of the rows of one pass.
KEY_BYTES = 384 * 2**20
ROW_BYTES = 256 * 2**20
# What keys and values may take that all rows use once: those of some layers at a time, in stages.
STAGE_BYTES = 32 * 2**20


def max_prompts(
    view: ModelView, batch: PromptBatch, *, pass_tokens: int, n_rows: int | None = None, position_free: bool = False
) -> int:
    """Prompts whose keys and rows fit in the memory meant for them: `n_rows` each, or one without each head."""
    width = batch.tokens.shape[1]
    keys = _key_bytes(view, width, position_free=position_free)
    rows = 1 + (view.n_layers * view.n_heads if n_rows is None else n_rows)
    return max(1, min(KEY_BYTES // keys, max_rows(view) // rows, pass_tokens // width))


def max_rows(view: ModelView) -> int:
    """Rows of one pass."""
    size = 4 if view.compute_dtype == torch.float32 else 8
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * view.d_model)
    return max(1 + view.n_heads, ROW_BYTES // (size * max(view.model.W_U.shape[1], 3 * d_mlp)))


def layer_chunks(view: ModelView, n: int) -> Iterator[range]:
    """Consecutive layers whose heads are removed in one pass over the rows of `n` prompts."""
    step = max(1, (max_rows(view) // n - 1) // view.n_heads)
    for first in range(0, view.n_layers, step):
        yield range(first, min(first + step, view.n_layers))


def stages(view: ModelView, batch: PromptBatch) -> Iterator[range]:
    """Consecutive layers whose keys and values of all prompts fit in the memory meant for those of a stage."""
    count = min(view.n_layers, -(-len(batch) * _key_bytes(view, batch.tokens.shape[1]) // STAGE_BYTES))
    bounds = [view.n_layers * stage // count for stage in range(count + 1)]
    yield from (range(first, stop) for first, stop in pairwise(bounds))


def _key_bytes(view: ModelView, width: int, *, position_free: bool = False) -> int:
    """Of one prompt, all layers."""
    size = 4 if view.compute_dtype == torch.float32 else 8
    return (3 if position_free else 2) * view.n_layers * view.n_kv_heads * view.d_head * width * size
