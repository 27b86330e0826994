"""Bootstrap intervals over prompts.

All intervals draw clusters with `draw_clusters`: prompts with the same query (`PromptBatch.queries`) are not
independent, so a draw contains all prompts of a query or none. Axes named `prompt` or `row` have one entry per prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError

# Confidence level of intervals.
LEVEL = 0.95
# Values drawn at a time: limits the memory of a bootstrap for any number of prompts.
MAX_DRAWN_VALUES = 2_000_000
# Columns whose bootstrap samples fit in a processor's cache.
N_COLUMNS_PER_CHUNK = 64


@dataclass(frozen=True)
class Interval:
    """A statistic and its bootstrap interval, in the unit of the statistic."""

    value: float
    low: float
    high: float

    def __iter__(self) -> Iterator[float]:
        """Support `value, low, high = …`."""
        return iter((self.value, self.low, self.high))

    def to_frame(self) -> pd.DataFrame:
        """Return one row: value, low, high."""
        return pd.DataFrame([asdict(self)])


def bootstrap_interval(
    per_prompt: Sequence[float] | np.ndarray | Tensor,
    *,
    statistic: Callable[[np.ndarray], float] | None = None,
    clusters: Sequence[object] | None = None,
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return a statistic over prompts and its percentile bootstrap interval.

    `per_prompt` has one row per prompt: one number, or several that are resampled jointly (scores before and after).
    `statistic` maps any number of such rows to one number; the default is the mean. Draws with a non-finite statistic
    (a ratio with a zero denominator) are dropped; the interval is NaN if these are more than 5% of the draws. The
    same seed gives the same interval.

    Prompts that share a query are not independent: with `clusters`, such as the query of each prompt, whole clusters
    are resampled; the statistic must then be the mean. With `bounds`, the smallest and largest possible value, an
    interval of zero width, as for equal rows, is widened to the exact binomial width for the number of clusters (else
    of prompts): 30 of 30 correct answers give 90.5% to 100%.

    Raise InputError for fewer than two prompts, values that are not finite, a level outside 0 to 1, fewer than one
    draw, `clusters` with a `statistic`, or rows of several numbers without one.
    """
    rows = np.asarray(per_prompt.detach().cpu() if isinstance(per_prompt, Tensor) else per_prompt, dtype=float)
    n = len(rows)
    if n < 2:
        raise InputError(f"per_prompt must have at least two rows for an interval, got {n}; use more prompts")
    if not np.isfinite(rows).all():
        n_invalid = int((~np.isfinite(rows)).sum())
        raise InputError(f"per_prompt must be finite, got {n_invalid} NaN or infinite values; drop them")
    if not 0 < level < 1 or draws < 1:
        raise InputError(f"level must be between 0 and 1 and draws at least 1, got level={level} and draws={draws}")
    if statistic is None and rows.ndim != 1:
        raise InputError(
            f"per_prompt must have one number per prompt, got shape {rows.shape}; pass statistic= to reduce rows to "
            "one number"
        )
    if clusters is not None and statistic is not None:
        raise InputError("clusters requires the mean; omit statistic=")
    value = float(rows.mean() if statistic is None else statistic(rows))
    if clusters is not None:
        samples = cluster_weights(clusters, draws=draws, seed=seed) @ rows
        return percentile_interval(value, samples, n_clusters=len(set(clusters)), bounds=bounds, level=level)
    rng = np.random.default_rng(seed)
    samples = np.empty(draws)
    step = max(1, MAX_DRAWN_VALUES // n)
    for start in range(0, draws, step):
        index = rng.integers(n, size=(min(step, draws - start), n))
        chunk = slice(start, start + len(index))
        samples[chunk] = rows[index].mean(-1) if statistic is None else [statistic(rows[one]) for one in index]
    return percentile_interval(value, samples, n_clusters=n, bounds=bounds, level=level)


def mean_intervals(
    rows: Float[np.ndarray, "prompt column"], clusters: Sequence[str], *, level: float = LEVEL
) -> tuple[Float[np.ndarray, " column"], Float[np.ndarray, " column"], Float[np.ndarray, " column"]]:
    """Return each column's mean and the ends of its `bootstrap_interval` with `clusters`; NaN for a single cluster.

    Ends are NaN for a column with a value that is not finite. Results have the same bytes in every process: no matrix
    product is used, since its rounding depends on alignment.
    """
    mean = rows.mean(0)
    if len(set(clusters)) < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    ends = np.empty((2, rows.shape[1]))
    for start in range(0, rows.shape[1], N_COLUMNS_PER_CHUNK):
        some = slice(start, start + N_COLUMNS_PER_CHUNK)
        ends[:, some] = percentile_ends(resampled_means(rows[:, some], clusters), level=level)
    return mean, ends[0], ends[1]


def interval_table(
    values: Float[Tensor, "prompt *axes"] | Float[np.ndarray, "prompt *axes"],
    axes: Mapping[str, Sequence[object]],
    clusters: Sequence[str],
    *,
    value: str = "value",
) -> pd.DataFrame:
    """Return means over prompts with their 95% intervals as a table, which figures take: one row per entry.

    `axes` names the axes after the first and their entries, in order, and `clusters` is the query of each prompt
    (`PromptBatch.queries`). Columns: one for each axis, `value`, low and high, in the unit of `values`; the ends are
    NaN for a single query. Raise InputError if the entries or the clusters do not match the shape of `values`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> effects = il.head_effects(model, many).log_odds  # [batch layer head]
        >>> axes = {"layer": range(8), "head": range(6)}
        >>> table = il.metrics.interval_table(effects, axes, many.queries, value="effect")
        >>> table.columns.tolist(), len(table)
        (['layer', 'head', 'effect', 'low', 'high'], 48)
    """
    rows = np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=float)
    shape = [len(clusters), *map(len, axes.values())]
    if list(rows.shape) != shape:
        raise InputError(
            f"values must have shape [prompt {' '.join(axes)}] = {shape}, got {list(rows.shape)}; pass one cluster per "
            "prompt and the entries of every other axis"
        )
    mean, low, high = mean_intervals(rows.reshape(len(rows), -1), clusters)
    index = pd.MultiIndex.from_product([list(entries) for entries in axes.values()], names=list(axes))
    return index.to_frame(index=False).assign(**{value: mean}, low=low, high=high)


def resampled_means(
    rows: Float[np.ndarray, "prompt column"], clusters: Sequence[str]
) -> Float[np.ndarray, "draw column"]:
    """Return each column's mean in bootstrap draws of clusters; see `cluster_weights`."""
    weights, members = cluster_weights(clusters), dict[str, list[int]]()
    for row, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(row)
    samples = np.zeros((len(weights), rows.shape[1]))
    for own in members.values():
        samples += weights[:, own[0], None] * rows[own].sum(0)
    return samples


def cluster_weights(
    clusters: Sequence[object] | np.ndarray, *, draws: int = 2000, seed: int = 0
) -> Float[np.ndarray, "draw row"]:
    """Return the weight of each row in bootstrap draws of clusters (see `draw_clusters`); a draw's weights sum to 1."""
    counts, place = draw_clusters(clusters, draws=draws, seed=seed)
    weights = counts[:, place].astype(float)
    return weights / weights.sum(1, keepdims=True)


def weights_with_data(
    clusters: Sequence[object] | np.ndarray, *, draws: int = 2000, seed: int = 0
) -> Float[np.ndarray, "draw row"]:
    """Return the weights of the rows: first those of the data, all equal, then those of each draw of clusters."""
    data = np.full((1, len(clusters)), 1 / len(clusters))
    return np.concatenate([data, cluster_weights(clusters, draws=draws, seed=seed)])


def draw_clusters(
    clusters: Sequence[object] | np.ndarray, *, draws: int = 2000, seed: int = 0
) -> tuple[Int[np.ndarray, "draw cluster"], Int[np.ndarray, " row"]]:
    """Return how often each cluster is drawn in each bootstrap draw, and each row's index into the clusters.

    Of G clusters, G − 1 are drawn, so that the spread of the draws is that of a mean over G clusters (Rao and Wu 1988).
    A single cluster is always drawn once. Draws do not depend on the order of the rows.
    """
    keys = clusters if isinstance(clusters, np.ndarray) else np.array([str(one) for one in clusters])
    _, place = np.unique(keys, return_inverse=True)
    n_clusters = int(place.max()) + 1
    counts, rng = np.empty((draws, n_clusters), np.int32), np.random.default_rng(seed)
    step, chances = max(1, MAX_DRAWN_VALUES // n_clusters), np.full(n_clusters, 1 / n_clusters)
    for start in range(0, draws, step):
        size = min(step, draws - start)
        counts[start : start + size] = rng.multinomial(max(1, n_clusters - 1), chances, size=size)
    return counts, place


def percentile_ends(samples: Float[np.ndarray, "draw *rest"], *, level: float = LEVEL) -> Float[np.ndarray, "2 *rest"]:
    """Return the low and high ends of the central `level` of the samples."""
    return np.quantile(samples, [(1 - level) / 2, (1 + level) / 2], axis=0)


def top_places(values: Float[np.ndarray, "draw item"], k: int) -> Float[np.ndarray, "draw item"]:
    """Return 1 for the k largest items of each draw, else 0; items that tie for the last places share them.

    Rows sum to k. The mean over draws is the share of draws in which an item is among the first k.
    """
    last = np.partition(values, values.shape[1] - k, axis=1)[:, -k, None]
    is_first, is_tied = values > last, values == last
    return is_first + is_tied * (k - is_first.sum(1, keepdims=True)) / is_tied.sum(1, keepdims=True)


def percentile_interval(
    value: float,
    samples: Float[np.ndarray, " draw"],
    *,
    n_clusters: int,
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Interval:
    """Return a value with the percentile interval of its bootstrap samples; see `bootstrap_interval`.

    The interval is NaN if more than 5% of the samples are not finite, or for a single cluster.
    """
    usable = samples[np.isfinite(samples)]
    if len(usable) < 0.95 * len(samples) or n_clusters < 2:
        return Interval(value, float("nan"), float("nan"))
    low, high = map(float, percentile_ends(usable, level=level))
    if bounds is not None and high - low < 1e-9:
        reach = (bounds[1] - bounds[0]) * (1 - (1 - level) ** (1 / n_clusters))
        low, high = max(bounds[0], low - reach), min(bounds[1], high + reach)
    return Interval(value, low, high)
