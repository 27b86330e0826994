"""What a run keeps of one batch: bounds and exact increases, and their form on disk."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int


@dataclass(frozen=True)
class HeadChunk:
    """Bounds and exact increases on one batch, nats. Heads are numbered `layer · n_heads + head`."""

    rows: Int[np.ndarray, " batch"]
    """The prompts, as indices into all of them."""
    bound: Float[np.ndarray, "batch all_heads"] | None
    """None where there are no bounds, or they are known from another chunk."""
    heads: Int[np.ndarray, " head"]
    """Those evaluated exactly, in ascending order."""
    increase: Float[np.ndarray, "batch head"]


def chunk_name(kind: str, number: int) -> str:
    """The file of a chunk: kind is "part" for the first pass over a batch, "refined" for the second."""
    return f"{kind}-{number:05d}.parquet"


def columns_of(chunk: HeadChunk, n_heads: int) -> dict[str, Any]:
    """A chunk as table columns: prompt, layer, head, bound, increase (nats), one row a prompt and head.

    With bounds, all heads are rows, and `increase` is missing where it was not evaluated; without, `bound` is missing.
    """
    n = len(chunk.rows)
    if chunk.bound is None:
        heads, increase, known = chunk.heads, chunk.increase, None
        bound = pa.nulls(increase.size, pa.from_numpy_dtype(increase.dtype))
    else:
        heads = np.arange(chunk.bound.shape[1])
        increase = np.zeros_like(chunk.bound)
        increase[:, chunk.heads] = chunk.increase
        known = np.zeros(increase.shape, dtype=bool)
        known[:, chunk.heads] = True
        bound = pa.array(chunk.bound.ravel())
    return {
        "prompt": np.repeat(chunk.rows, len(heads)).astype(np.int32),
        "layer": np.tile(heads // n_heads, n).astype(np.int16),
        "head": np.tile(heads % n_heads, n).astype(np.int16),
        "bound": bound,
        "increase": pa.array(increase.ravel(), mask=None if known is None else ~known.ravel()),
    }


def chunk_from(table: pa.Table, n_heads: int) -> HeadChunk:
    """The chunk that `columns_of` made a table of."""
    columns = {name: table.column(name).to_numpy() for name in table.column_names}
    rows = columns["prompt"]
    n = int((np.diff(rows, prepend=-1) != 0).sum())
    heads = (columns["layer"].astype(np.int64) * n_heads + columns["head"])[: len(rows) // n]
    increase = columns["increase"].reshape(n, -1)
    prompts = rows.reshape(n, -1)[:, 0].astype(np.int64)
    if table.column("bound").null_count:
        return HeadChunk(prompts, None, heads, increase)
    known = table.column("increase").is_valid().to_numpy()[: len(heads)]
    return HeadChunk(prompts, columns["bound"].reshape(n, -1), heads[known], increase[:, known])
