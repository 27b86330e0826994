"""Number of prompts, rows and layers that passes over single-token rows process at once within a memory budget."""

from collections.abc import Iterator
from itertools import pairwise

import torch

from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Memory for the keys and values of one piece's prompts, and for the widest activations of one pass's rows.
KEY_BYTES = 384 * 2**20
ROW_BYTES = 256 * 2**20
# Memory for the keys and values of one stage (some consecutive layers), where each row uses them only once.
STAGE_BYTES = 32 * 2**20


def max_prompts(
    view: ModelView, batch: PromptBatch, *, pass_tokens: int, n_rows: int | None = None, position_free: bool = False
) -> int:
    """Return the number of prompts whose keys and rows fit the budget; `n_rows` defaults to one row per head."""
    width = batch.tokens.shape[1]
    keys = _key_bytes(view, width, position_free=position_free)
    rows = 1 + (view.n_layers * view.n_heads if n_rows is None else n_rows)
    return max(1, min(KEY_BYTES // keys, max_rows(view) // rows, pass_tokens // width))


def max_rows(view: ModelView) -> int:
    """Return the number of rows per pass."""
    size = 4 if view.compute_dtype == torch.float32 else 8
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * view.d_model)
    return max(1 + view.n_heads, ROW_BYTES // (size * max(view.model.W_U.shape[1], 3 * d_mlp)))


def layer_chunks(view: ModelView, n: int) -> Iterator[range]:
    """Yield ranges of layers whose heads are ablated in one pass over the rows of `n` prompts."""
    step = max(1, (max_rows(view) // n - 1) // view.n_heads)
    for first in range(0, view.n_layers, step):
        yield range(first, min(first + step, view.n_layers))


def stages(view: ModelView, batch: PromptBatch) -> Iterator[range]:
    """Yield ranges of layers whose keys and values, for all prompts, fit in `STAGE_BYTES`."""
    count = min(view.n_layers, -(-len(batch) * _key_bytes(view, batch.tokens.shape[1]) // STAGE_BYTES))
    bounds = [view.n_layers * stage // count for stage in range(count + 1)]
    yield from (range(first, stop) for first, stop in pairwise(bounds))


def _key_bytes(view: ModelView, width: int, *, position_free: bool = False) -> int:
    """Return the bytes of one prompt's keys and values in all layers."""
    size = 4 if view.compute_dtype == torch.float32 else 8
    return (3 if position_free else 2) * view.n_layers * view.n_kv_heads * view.d_head * width * size
