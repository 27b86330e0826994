"""Means over prompts of the scores of all heads, or of all edges, with intervals and `selected`.

A score is an array with one row per prompt. Prompts that share a query are not independent, so
intervals (`icl_lens.foundation.intervals`) and draws for `selected` are over queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.foundation.intervals import draw_clusters, mean_intervals, resampled_sums, top_places
from icl_lens.models.head import Head

# Draws and columns whose ranking is computed at a time.
N_RANKED_DRAWS, N_RANKED_COLUMNS = 100, 4096


@dataclass(frozen=True)
class MeanScore:
    """Every head's mean of one score, nats, with its 95% interval over queries and `selected`.

    `selected` is the share of draws of queries, 0 to 1, in which the head is among the first `k` by
    this score. It is NaN for fewer than three queries, and the interval for one; all values are NaN
    if no prompt has the score.
    """

    mean: Float[Tensor, "layer head"]
    low: Float[Tensor, "layer head"]
    high: Float[Tensor, "layer head"]
    selected: Float[Tensor, "layer head"]


SHARE_LIMITS = (0.0, 1.0)
"""Ends of intervals of shares, such as attention, are not outside of these."""


def mean_score(
    name: str,
    scores: Float[np.ndarray, "prompt layer head"],
    queries: Sequence[str],
    k: int,
    *,
    limits: tuple[float, float] | None = None,
) -> MeanScore:
    """Return a score's means, 95% intervals and `selected`, over the prompts that have the score.

    `queries` is the query of each prompt, and `limits` are those of the score's values. A prompt
    whose scores are all NaN does not have the score. Raise InputError, which calls the score `name`,
    if a mean is NaN or infinite.
    """
    shape = scores.shape[1:]
    scores = scores.reshape(len(scores), -1).astype(np.float64)
    has_score = np.asarray(~np.isnan(scores).all(1))
    if not has_score.any():
        missing = torch.full(shape, torch.nan, dtype=torch.float64)
        return MeanScore(missing, missing, missing, missing)
    scores = scores[has_score]
    queries = [queries[row] for row in np.flatnonzero(has_score).tolist()]
    mean, low, high = mean_intervals(scores, queries)
    not_finite = np.flatnonzero(~np.isfinite(mean))
    if len(not_finite):
        head = Head.from_index(int(not_finite[0]), shape[1])
        raise InputError(
            f"the mean {name} of {head} is NaN or infinite; load the model in bfloat16 or float32, "
            "or remove edits"
        )
    if limits is not None:
        low, high = low.clip(*limits), high.clip(*limits)
    selected = selected_shares(scores, queries, k)
    columns = [torch.from_numpy(column).reshape(shape) for column in (mean, low, high, selected)]
    return MeanScore(*columns)


def mean_score_of_heads(
    values: Float[np.ndarray, "prompt listed_head"],
    heads: Sequence[Head],
    queries: Sequence[str],
    shape: Sequence[int],
    *,
    limits: tuple[float, float] | None = None,
) -> MeanScore:
    """Return the means and 95% intervals of a score that was measured in some heads only.

    `queries` is the query of each prompt, and `limits` are those of the score's values. A prompt
    whose values are all NaN does not have the score. Other heads are NaN, and so is `selected`.
    """
    columns = [torch.full(tuple(shape), torch.nan, dtype=torch.float64) for _ in range(4)]
    is_measured = np.asarray(~np.isnan(values).all(1))
    if is_measured.any():
        measured_queries = [queries[row] for row in np.flatnonzero(is_measured).tolist()]
        mean, low, high = mean_intervals(values[is_measured].astype(np.float64), measured_queries)
        if limits is not None:
            low, high = low.clip(*limits), high.clip(*limits)
        index = tuple(np.array(heads).T)
        for column, numbers in zip(columns[:3], (mean, low, high), strict=True):
            column[index] = torch.from_numpy(numbers)
    return MeanScore(*columns)


def selected_shares(
    scores: Float[np.ndarray, "prompt column"],
    queries: Sequence[str],
    k: int,
    *,
    absolute: bool = False,
) -> Float[np.ndarray, " column"]:
    """Return the share of draws of queries in which each column's mean is among the k largest.

    `absolute` ranks by the size of the mean. Columns of equal scores stay equal in every draw.
    Shares are NaN for fewer than three queries: of two, each draw has only one.
    """
    counts, query_of_prompt = draw_clusters(queries)
    n_columns = scores.shape[1]
    if counts.shape[1] < 3:
        return np.full(n_columns, np.nan)
    sums = np.zeros((counts.shape[1], n_columns))
    np.add.at(sums, query_of_prompt, scores)
    shares = np.zeros(n_columns)
    for start in range(0, len(counts), N_RANKED_DRAWS):
        drawn = counts[start : start + N_RANKED_DRAWS].astype(float)
        drawn_sums = np.empty((len(drawn), n_columns))
        for first in range(0, n_columns, N_RANKED_COLUMNS):
            columns = slice(first, first + N_RANKED_COLUMNS)
            drawn_sums[:, columns] = resampled_sums(drawn, sums[:, columns])
        if absolute:
            drawn_sums = np.abs(drawn_sums)
        shares += top_places(drawn_sums, k).sum(0)
    return shares / len(counts)
