"""Bounds and exact increases of one batch, and their on-disk format."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int

from icl_lens.locate.stream import Chunk, index_columns, index_from


@dataclass(frozen=True)
class HeadChunk(Chunk):
    """Bounds and exact increases of one batch, nats. Heads are indexed as `layer · n_heads + head`."""

    bound: Float[np.ndarray, "batch all_heads"] | None
    """None if there are no bounds, or another chunk holds them."""
    heads: Int[np.ndarray, " head"]
    """Heads evaluated exactly, in ascending order."""
    increase: Float[np.ndarray, "batch head"]

    def columns(self, n_heads: int) -> dict[str, Any]:
        """Return the columns prompt, layer, head, bound, increase (nats), with one row per prompt and head.

        With bounds, every head has rows, and `increase` is null where it was not evaluated; without, `bound` is null.
        """
        if self.bound is None:
            bound = pa.nulls(self.increase.size, pa.from_numpy_dtype(self.increase.dtype))
            return index_columns(self.rows, self.heads, n_heads) | {"bound": bound, "increase": self.increase.ravel()}
        heads = np.arange(self.bound.shape[1])
        increase, unknown = np.zeros_like(self.bound), np.ones(self.bound.shape, dtype=bool)
        increase[:, self.heads], unknown[:, self.heads] = self.increase, False
        return index_columns(self.rows, heads, n_heads) | {
            "bound": self.bound.ravel(),
            "increase": pa.array(increase.ravel(), mask=unknown.ravel()),
        }

    @classmethod
    def from_table(cls, table: pa.Table, n_heads: int) -> "HeadChunk":
        """Return the chunk stored in a table of `columns`."""
        rows, heads = index_from(table, n_heads)
        bound, increase = (table.column(name).to_numpy().reshape(len(rows), -1) for name in ("bound", "increase"))
        if table.column("bound").null_count:
            return cls(rows, None, heads, increase)
        known = table.column("increase").is_valid().to_numpy()[: len(heads)]
        return cls(rows, bound, heads[known], increase[:, known])
