"""Columns of a chunk, the table of a batch's results, with one row per prompt and head.

As an array index, a head is `layer · n_heads + head`.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int


def index_columns(rows: Int[np.ndarray, " batch"], heads: Int[np.ndarray, " head"], n_heads: int) -> dict[str, Any]:
    """Return the columns prompt, layer and head of a chunk with one table row per prompt and head."""
    return {
        "prompt": np.repeat(rows, len(heads)).astype(np.int32),
        "layer": np.tile(heads // n_heads, len(rows)).astype(np.int16),
        "head": np.tile(heads % n_heads, len(rows)).astype(np.int16),
    }


def repeated_column(text: str, n: int) -> pa.Array:
    """Return a column of `n` rows that all hold one text."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int8)), [text])


def read_index(table: pa.Table, n_heads: int) -> tuple[Int[np.ndarray, " batch"], Int[np.ndarray, " head"]]:
    """Return the prompts and heads of a table that begins with `index_columns`."""
    prompt, layer, head = (table.column(name).to_numpy().astype(np.int64) for name in ("prompt", "layer", "head"))
    rows = prompt[np.flatnonzero(np.diff(prompt, prepend=-1))]
    return rows, (layer * n_heads + head)[: len(prompt) // len(rows)]


def increase_columns(
    rows: Int[np.ndarray, " batch"],
    bound: Float[np.ndarray, "batch all_heads"] | None,
    heads: Int[np.ndarray, " head"],
    increase: Float[np.ndarray, "batch head"],
    n_heads: int,
) -> dict[str, Any]:
    """Return prompt, layer, head, bound and increase (nats) of a batch; `heads`, ascending, are evaluated exactly.

    With bounds, there are rows for all heads, and `increase` is null for those not evaluated. Without bounds, there are
    rows only for `heads`, and `bound` is null.
    """
    if bound is None:
        nulls = pa.nulls(increase.size, pa.from_numpy_dtype(increase.dtype))
        return index_columns(rows, heads, n_heads) | {"bound": nulls, "increase": increase.ravel()}
    all_increases, is_null = np.zeros_like(bound), np.ones(bound.shape, dtype=bool)
    all_increases[:, heads], is_null[:, heads] = increase, False
    return index_columns(rows, np.arange(bound.shape[1]), n_heads) | {
        "bound": bound.ravel(),
        "increase": pa.array(all_increases.ravel(), mask=is_null.ravel()),
    }


def read_increases(
    table: pa.Table, n_heads: int
) -> tuple[Float[np.ndarray, "batch all_heads"] | None, Int[np.ndarray, " head"], Float[np.ndarray, "batch head"]]:
    """Return bounds, exactly evaluated heads and their increases from a table of `increase_columns`."""
    rows, heads = read_index(table, n_heads)
    bound, increase = (table.column(name).to_numpy().reshape(len(rows), -1) for name in ("bound", "increase"))
    if table.column("bound").null_count:
        return None, heads, increase
    known = np.asarray(table.column("increase").is_valid())[: len(heads)]
    return bound, heads[known], increase[:, known]
