"""Mean scores of all heads over chunks, with intervals over queries, in memory that does not grow with the prompts.

Sums over the prompts of each query are accumulated in float64 in the order of the chunks, so a resumed run writes the
same bytes. Intervals are those of `icl_lens.intervals.mean_intervals` over queries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.attribution.search import check_k
from icl_lens.errors import InputError
from icl_lens.intervals import draw_clusters, resampled_sums, studentized_ends, top_places
from icl_lens.locate.chunk import read_index
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView

# Length of the list of heads that `MeanScore.selected` refers to by default.
N_SELECTED = 20
# Draws and columns whose ranking is computed at a time.
N_RANKED_DRAWS, N_RANKED_COLUMNS = 100, 4096


@dataclass(frozen=True)
class MeanScore:
    """Every head's mean of one score, nats, with its 95% bootstrap interval over queries and `selected`.

    `selected` is the share of draws of queries, 0 to 1, in which the head is among the first `k` by this score. It and
    the interval are NaN if there is only one query; all values are NaN if no prompt has the score.
    """

    mean: Float[Tensor, "layer head"]
    low: Float[Tensor, "layer head"]
    high: Float[Tensor, "layer head"]
    selected: Float[Tensor, "layer head"]


def heads_frame(heads: Sequence[Head], scores: Mapping[str, Float[Tensor, "layer head"]]) -> pd.DataFrame:
    """Return a table with one row per head: its name, its scores, rank, layer and head."""
    index = tuple(np.array(heads).T)
    columns = {"name": list(map(str, heads))} | {name: values[index].numpy() for name, values in scores.items()}
    return pd.DataFrame(columns | {"rank": np.arange(1, len(heads) + 1), "layer": index[0], "head": index[1]})


class StreamedMeans:
    """Means of the scores in chunks with one table row per prompt and head; `queries` has one entry per prompt.

    `selected` refers to the first `k` heads, by default `N_SELECTED`, or all heads if there are fewer. Raise InputError
    for an invalid `k`.
    """

    def __init__(self, view: ModelView, queries: Sequence[str], k: int | None = None):
        n_heads = len(view.heads())
        self.view = view
        self.k = check_k(min(N_SELECTED, n_heads) if k is None else k, n_heads, "heads")
        self._counts, self._query_of_row = draw_clusters(queries)
        self._sums: dict[str, _Sums] = {}
        self.fallback_reason = ""
        """The first reason that a chunk gives for not using the prefix cache; empty if none does."""

    def add(self, chunk: pa.Table, names: Sequence[str]) -> int:
        """Add those of the scores that the chunk has; return its number of prompts."""
        rows, _ = read_index(chunk, self.view.n_heads)
        present = [name for name in names if name in chunk.column_names]
        scores = {name: chunk.column(name).to_numpy().reshape(len(rows), -1) for name in present}
        for i, query in enumerate(self._query_of_row[rows].tolist()):
            for name, values in scores.items():
                self._sums.setdefault(name, _Sums(self._counts, values.shape[1])).add(values[i], query)
        if "fallback_reason" in chunk.column_names:
            self.fallback_reason = self.fallback_reason or chunk.column("fallback_reason")[0].as_py()
        return len(rows)

    def means(self) -> dict[str, MeanScore]:
        """Return the scores that chunks have; raise InputError if a mean is NaN or infinite."""
        return {name: one.mean(name, self.view, self.k) for name, one in self._sums.items()}

    def n_queries(self, name: str) -> int:
        """Return the number of distinct queries of the prompts that have a score."""
        return int((self._sums[name].n_prompts > 0).sum())

    def counts(self, n_prompts: int, name: str) -> dict[str, Any]:
        """Return the numbers of prompts, queries with a score and heads, and the share `selected` of a random head."""
        n_heads = len(self.view.heads())
        return {
            "n_prompts": n_prompts,
            "n_queries": self.n_queries(name),
            "n_heads": n_heads,
            "expected_selected": self.k / n_heads,
        }


class ResampledSums:
    """Sums of heads' scores over the prompts of each query, from which every draw of queries can be computed.

    `counts` says how often each bootstrap draw contains each query. What is said of heads holds for edges.
    """

    def __init__(self, counts: Int[np.ndarray, "draw query"], n_heads: int):
        self.counts = counts
        self.sums = np.zeros((counts.shape[1], n_heads))

    def add(
        self, values: Float[np.ndarray, " head"], query: int, heads: Int[np.ndarray, " head"] | slice = slice(None)
    ) -> None:
        """Add one prompt's scores of all heads, or of some."""
        self.sums[query, heads] += values

    def ends(
        self, n_prompts: Int[np.ndarray, " query"], heads: Int[np.ndarray, " head"] | None = None
    ) -> Float[np.ndarray, "2 head"]:
        """Return the ends of the 95% intervals of all heads, or of some; `n_prompts` is each query's number."""
        sums = self.sums if heads is None else self.sums[:, heads]
        return studentized_ends(sums, n_prompts.astype(float))

    def selected(
        self,
        k: int,
        n_prompts: Int[np.ndarray, " query"],
        heads: Int[np.ndarray, " head"] | None = None,
        *,
        absolute: bool = False,
    ) -> Float[np.ndarray, " all_heads"]:
        """Return the share of draws in which each head is among the first k of all heads, or of some (NaN for others).

        `absolute` ranks by the size of the mean. Draws without a prompt are left out. Heads of equal scores stay equal
        in every draw (see `resampled_sums`).
        """
        n_heads = self.sums.shape[1]
        heads = np.arange(n_heads) if heads is None else heads
        draws = np.flatnonzero(self.counts @ n_prompts > 0)
        shares = np.zeros(len(heads))
        for start in range(0, len(draws), N_RANKED_DRAWS):
            counts = self.counts[draws[start : start + N_RANKED_DRAWS]].astype(float)
            values = np.empty((len(counts), len(heads)))
            for first in range(0, len(heads), N_RANKED_COLUMNS):
                columns = slice(first, first + N_RANKED_COLUMNS)
                values[:, columns] = resampled_sums(counts, self.sums[:, heads[columns]])
            shares += top_places(np.abs(values) if absolute else values, k).sum(0)
        selected = np.full(n_heads, np.nan)
        selected[heads] = shares / len(draws)
        return selected


class _Sums:
    """Sums of one score over all prompts and over those of each query."""

    def __init__(self, counts: Int[np.ndarray, "draw query"], n_heads: int):
        self.n = 0
        self.total = np.zeros(n_heads)
        self.resampled = ResampledSums(counts, n_heads)
        self.n_prompts = np.zeros(counts.shape[1], np.int64)
        """Number of prompts of each query that have the score."""

    def add(self, values: Float[np.ndarray, " head"], query: int) -> None:
        """Add one prompt's effects; a prompt without the score (all NaN) is skipped."""
        if np.isnan(values).all():
            return
        self.n += 1
        self.total += values.astype(np.float64)
        self.resampled.add(values, query)
        self.n_prompts[query] += 1

    def mean(self, name: str, view: ModelView, k: int) -> MeanScore:
        """Return the `MeanScore` of score `name`; raise InputError if a mean is NaN or infinite."""
        shape = (view.n_layers, view.n_heads)
        missing = torch.full(shape, torch.nan, dtype=torch.float64)
        if not self.n:
            return MeanScore(missing, missing, missing, missing)
        mean = self.total / self.n
        if not np.isfinite(mean).all():
            index = int(np.flatnonzero(~np.isfinite(mean))[0])
            raise InputError(
                f"the mean effect of {Head.from_index(index, view.n_heads)} ({name}) is NaN or infinite; load the "
                "model in bfloat16 or float32, or remove edits"
            )
        found = [mean, *np.full((3, mean.size), np.nan)]
        if (self.n_prompts > 0).sum() > 1:
            found = [mean, *self.resampled.ends(self.n_prompts), self.resampled.selected(k, self.n_prompts)]
        return MeanScore(*(torch.from_numpy(one).reshape(shape) for one in found))
