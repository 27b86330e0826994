"""Bounds and exact increases of one batch, and their on-disk format."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int


@dataclass(frozen=True)
class HeadChunk:
    """Bounds and exact increases of one batch, nats. Heads are indexed as `layer · n_heads + head`."""

    rows: Int[np.ndarray, " batch"]
    """Indices of the batch's prompts."""
    bound: Float[np.ndarray, "batch all_heads"] | None
    """None if there are no bounds, or another chunk holds them."""
    heads: Int[np.ndarray, " head"]
    """Heads evaluated exactly, in ascending order."""
    increase: Float[np.ndarray, "batch head"]


def chunk_name(kind: str, number: int) -> str:
    """Return a chunk's file name; `kind` is "part" for the first pass over a batch, "refined" for the second."""
    return f"{kind}-{number:05d}.parquet"


def columns_of(chunk: HeadChunk, n_heads: int) -> dict[str, Any]:
    """Return a chunk as columns prompt, layer, head, bound, increase (nats), with one row per prompt and head.

    With bounds, every head has rows, and `increase` is null where it was not evaluated; without, `bound` is null.
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
    """Return the chunk stored in a table of `columns_of`."""
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
