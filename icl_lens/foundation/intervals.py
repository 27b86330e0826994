"""Intervals over prompts: one recipe for all of them.

1. Prompts with the same query (`PromptBatch.queries`) are not independent. They are one cluster:
   its prompts count together or not at all.
2. The standard error is the jackknife's: the statistic is computed without each cluster in turn.
3. How far the ends are from the value, in standard errors, is read off a studentized bootstrap
   (bootstrap-t; Efron and Tibshirani 1993, chapter 12): clusters are drawn with replacement, and
   each draw's difference from the value is divided by the draw's own standard error. Ends of skewed
   data are thus not symmetric. An end is at most twice as far away as that of Student's t interval;
   few clusters, or few wrong answers, would give infinite ends. There is no interval for fewer than
   four clusters: with two or three, ends are anywhere, or at the value itself.
4. A mean over random sets (of heads, of edges) also varies because other sets could have been
   drawn. The distance of each end from the value grows to sqrt(d² + s²), where d is the distance
   over prompts and s that of Student's t interval over the sets (method of variance estimates
   recovery; Zou and Donner 2008). There is no interval for fewer than three sets.

docs/howto/intervals.md says how often such intervals cover the truth. Axes named `prompt` or `row`
have one entry per prompt.

Means over prompts: `mean_intervals` (many columns) and `bootstrap_interval` (one number). Other
statistics, such as ratios: `leave_one_out_weights` gives the weights of the prompts for which the
statistic is computed, and `leave_one_out_interval` takes the results. Differences from random sets:
`with_random_sets` widens either.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError

# Confidence level of intervals.
LEVEL = 0.95
# Bootstrap draws.
DRAWS = 2000
# More clusters are merged into this many, which limits the memory of a bootstrap.
MAX_CLUSTERS = 2000
# The largest distance of an end from the value, in units of that of Student's t interval.
MAX_REACH = 2.0
# Fewer clusters (prompts with different queries) give no interval.
MIN_CLUSTERS = 4
# Fewer random sets give no interval of a mean over them.
MIN_RANDOM_SETS = 3
# Columns whose bootstrap samples fit in a processor's cache.
N_COLUMNS_PER_CHUNK = 64
# Significant bits of a float64, of which one is left for the sign of sums.
N_EXACT_BITS = 52


@dataclass(frozen=True)
class Interval:
    """A statistic and its interval, in its unit; the ends are NaN if there is none."""

    value: float
    low: float
    high: float

    def __iter__(self) -> Iterator[float]:
        """Support `value, low, high = …`."""
        return iter((self.value, self.low, self.high))

    @property
    def excludes_zero(self) -> bool:
        """Whether both ends are above zero or both below; False if there is no interval."""
        return self.low > 0 or self.high < 0

    @property
    def is_undecided(self) -> bool:
        """Whether more queries could show that the statistic is not zero: the interval includes
        zero and other numbers, or there is none.
        """
        if math.isnan(self.value):
            return False
        return not self.excludes_zero and self.low != self.high

    def to_frame(self) -> pd.DataFrame:
        """Return one row: value, low, high."""
        return pd.DataFrame([asdict(self)])


def bootstrap_interval(
    per_prompt: Sequence[float] | np.ndarray | Tensor,
    *,
    statistic: Callable[[np.ndarray], float] | None = None,
    clusters: Sequence[object] | np.ndarray | None = None,
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Return a statistic over prompts and its studentized bootstrap interval (see the recipe of
    this module).

    `per_prompt` has one row per prompt: one number, or several that belong together (scores before
    and after). `statistic` maps any number of such rows to one number; the default is the mean. It
    is called once without each cluster; the interval is NaN if any of these values is not finite.
    The same seed gives the same interval.

    Prompts that share a query are not independent: pass `clusters=batch.queries`. Without it, every
    prompt is its own cluster. `bounds` are the smallest and largest possible value: ends do not
    exceed them, and an interval of zero width, as for equal rows, is widened to the exact binomial
    width for the number of clusters: 30 of 30 correct answers give 90.5% to 100%. The interval is
    NaN for fewer than `MIN_CLUSTERS` (4) clusters.

    Raise InputError for fewer than two prompts, values that are not finite, a level outside 0 to 1,
    fewer than one draw, a number of `clusters` other than that of prompts, or rows of several
    numbers without a `statistic`.
    """
    rows = np.asarray(
        per_prompt.detach().cpu() if isinstance(per_prompt, Tensor) else per_prompt, dtype=float
    )
    n = len(rows)
    if n < 2:
        raise InputError(
            f"per_prompt must have at least two rows for an interval, got {n}; use more prompts"
        )
    if not np.isfinite(rows).all():
        n_invalid = int((~np.isfinite(rows)).sum())
        raise InputError(
            f"per_prompt must be finite, got {n_invalid} NaN or infinite values; drop them"
        )
    if not 0 < level < 1 or draws < 1:
        raise InputError(
            f"level must be between 0 and 1 and draws at least 1, got level={level} and draws={draws}"
        )
    if statistic is None and rows.ndim != 1:
        raise InputError(
            f"per_prompt must have one number per prompt, got shape {rows.shape}; pass statistic= to reduce rows to "
            "one number"
        )
    if clusters is None:
        clusters = range(n)
    if len(clusters) != n:
        raise InputError(
            f"clusters must have one entry per prompt, {n}, got {len(clusters)}; pass batch.queries"
        )
    cluster = cluster_index(clusters)
    sizes = np.bincount(cluster).astype(float)
    if statistic is None:
        value = float(rows.mean())
        sums = np.bincount(cluster, weights=rows)
    else:
        value = float(statistic(rows))
        without = np.array(
            [statistic(rows[cluster != number]) for number in range(len(sizes))], dtype=float
        )
        sums = _sums_from_leave_one_out(value, without, sizes)
    return _interval(value, sums, sizes, bounds=bounds, level=level, draws=draws, seed=seed)


def mean_intervals(
    rows: Float[np.ndarray, "prompt column"],
    clusters: Sequence[object] | np.ndarray,
    *,
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> tuple[
    Float[np.ndarray, " column"], Float[np.ndarray, " column"], Float[np.ndarray, " column"]
]:
    """Return each column's mean and the low and high ends of its `bootstrap_interval` with
    `clusters`.

    `rows` has one row per prompt, and `clusters` the query of each. Ends are NaN for fewer
    than `MIN_CLUSTERS` clusters, and for a column with a value that is not finite. Results have the same bytes in every
    process.
    """
    cluster = cluster_index(clusters)
    sizes = np.bincount(cluster).astype(float)
    sums = np.zeros((len(sizes), rows.shape[1]))
    np.add.at(sums, cluster, rows)
    mean = rows.mean(0)
    low, high = studentized_ends(sums, sizes, level=level)
    if bounds is not None:
        for column in range(len(mean)):
            interval = _within(
                Interval(mean[column], low[column], high[column]), bounds, len(sizes), level
            )
            low[column], high[column] = interval.low, interval.high
    return mean, low, high


def interval_table(
    values: Float[Tensor, "prompt *axes"] | Float[np.ndarray, "prompt *axes"],
    axes: Mapping[str, Sequence[object]],
    clusters: Sequence[str],
    *,
    value: str = "value",
) -> pd.DataFrame:
    """Return means over prompts with their 95% intervals as a table, which figures take: one row
    per entry.

    `axes` names the axes after the first and their entries, in order, and `clusters` is the query
    of each prompt (`PromptBatch.queries`). Columns: one for each axis, `value`, low and high, in
    the unit of `values`; the ends are NaN for fewer than four queries. Raise InputError if the
    entries or the clusters do not match the shape of `values`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> effects = il.head_effects(model, many).log_odds  # [batch layer head]
        >>> axes = {"layer": range(8), "head": range(6)}
        >>> table = il.metrics.interval_table(effects, axes, many.queries, value="effect")
        >>> table.columns.tolist(), len(table)
        (['layer', 'head', 'effect', 'low', 'high'], 48)
    """
    rows = np.asarray(
        values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=float
    )
    shape = [len(clusters), *map(len, axes.values())]
    if list(rows.shape) != shape:
        raise InputError(
            f"values must have shape [prompt {' '.join(axes)}] = {shape}, got {list(rows.shape)}; pass one cluster per "
            "prompt and the entries of every other axis"
        )
    mean, low, high = mean_intervals(rows.reshape(len(rows), -1), clusters)
    index = pd.MultiIndex.from_product(
        [list(entries) for entries in axes.values()], names=list(axes)
    )
    return index.to_frame(index=False).assign(**{value: mean}, low=low, high=high)


def leave_one_out_weights(clusters: Sequence[object] | np.ndarray) -> Float[np.ndarray, "draw row"]:
    """Return the weights of the rows: first those of all rows, then those without each cluster.
    Weights sum to 1.

    A statistic of weighted rows, computed for each line of weights, is what
    `leave_one_out_interval` takes. For a single cluster, there is only the first line.
    """
    cluster = cluster_index(clusters)
    n_clusters = int(cluster.max()) + 1
    weights = np.ones((1, len(cluster)))
    if n_clusters > 1:
        weights = np.concatenate(
            [weights, (cluster != np.arange(n_clusters)[:, None]).astype(float)]
        )
    return weights / weights.sum(1, keepdims=True)


def leave_one_out_interval(
    values: Float[np.ndarray, " draw"],
    clusters: Sequence[object] | np.ndarray,
    *,
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Interval:
    """Return a statistic and its interval from its values for the lines of
    `leave_one_out_weights(clusters)`.

    For a mean of the rows, this is `bootstrap_interval` with `clusters`. The interval is NaN for
    fewer than `MIN_CLUSTERS` clusters, or if any value is not finite. See `bootstrap_interval` for `bounds`.
    """
    sizes = np.bincount(cluster_index(clusters)).astype(float)
    if len(sizes) < MIN_CLUSTERS:
        return Interval(float(values[0]), math.nan, math.nan)
    sums = _sums_from_leave_one_out(float(values[0]), values[1:], sizes)
    return _interval(float(values[0]), sums, sizes, bounds=bounds, level=level)


def leave_one_out_means(
    rows: Float[np.ndarray, "prompt column"], clusters: Sequence[object] | np.ndarray
) -> Float[np.ndarray, "draw column"]:
    """Return each column's mean for the lines of `leave_one_out_weights(clusters)`, with the same
    bytes everywhere.
    """
    cluster = cluster_index(clusters)
    sizes = np.bincount(cluster)[:, None]
    sums = np.zeros((len(sizes), rows.shape[1]))
    np.add.at(sums, cluster, rows)
    mean = rows.mean(0, keepdims=True)
    if len(sizes) < 2:
        return mean
    return np.concatenate([mean, (rows.sum(0) - sums) / (len(rows) - sizes)])


def with_random_sets(
    interval: Interval,
    *means_of_sets: Float[np.ndarray, " _"] | Float[Tensor, " _"],
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Interval:
    """Return the interval of a difference from a mean over random sets (item 4 of the recipe), or
    of that mean itself.

    `interval` is that over prompts, of the values that are already averaged over the sets;
    `means_of_sets` are the means over prompts of each random set, in the same unit, one array for
    every condition of random sets. The ends are NaN if any of these has fewer than
    `MIN_RANDOM_SETS` sets: with one or two, nothing says how much random sets vary.

    Example:
        >>> from icl_lens.foundation.intervals import bootstrap_interval, with_random_sets
        >>> lost, lost_in_sets = np.random.rand(12), np.random.rand(5, 12)  # [prompt], [set prompt]
        >>> over_prompts = bootstrap_interval(lost - lost_in_sets.mean(0))
        >>> with_random_sets(over_prompts, lost_in_sets.mean(1)).low < over_prompts.low
        True
    """
    variance = 0.0
    for means in map(np.asarray, means_of_sets):
        n_sets = len(means)
        if n_sets < MIN_RANDOM_SETS:
            return Interval(interval.value, math.nan, math.nan)
        reach = (
            student_quantile(0.5 + level / 2, n_sets - 1)
            * float(np.std(means, ddof=1))
            / math.sqrt(n_sets)
        )
        variance += reach**2
    low = interval.value - math.sqrt((interval.value - interval.low) ** 2 + variance)
    high = interval.value + math.sqrt((interval.high - interval.value) ** 2 + variance)
    if bounds is not None and not math.isnan(low):
        low, high = max(bounds[0], low), min(bounds[1], high)
    return Interval(interval.value, low, high)


def beside_random_sets(
    value: float | Float[Tensor, ""],
    values_of_sets: Float[np.ndarray, " set"] | Float[Tensor, " set"] | Sequence[float],
    *,
    level: float = LEVEL,
) -> Interval:
    """Return a value of one prompt minus the mean of random sets, with the interval in which
    another set would lie.

    This is Student's t prediction interval: it excludes zero if the value is outside of what random
    sets have. NaN for fewer than `MIN_RANDOM_SETS` sets.
    """
    value, values_of_sets = float(value), np.asarray(values_of_sets)
    n_sets = len(values_of_sets)
    if n_sets < MIN_RANDOM_SETS:
        return Interval(
            value - float(np.mean(values_of_sets)) if n_sets else math.nan, math.nan, math.nan
        )
    difference = value - float(np.mean(values_of_sets))
    spread = float(np.std(values_of_sets, ddof=1)) * math.sqrt(1 + 1 / n_sets)
    reach = student_quantile(0.5 + level / 2, n_sets - 1) * spread
    return Interval(difference, difference - reach, difference + reach)


def studentized_ends(
    sums: Float[np.ndarray, "cluster column"],
    sizes: Float[np.ndarray, " cluster"],
    *,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> Float[np.ndarray, "2 column"]:
    """Return the low and high ends of the intervals of sums / sizes, each summed over clusters
    (items 1 to 3).

    `sums` are the sums over the prompts of each cluster, and `sizes` their numbers. Clusters of
    size 0 are left out. Ends are NaN if fewer than `MIN_CLUSTERS` are left, and for columns with a
    sum that is not finite.
    """
    sums, sizes = sums[sizes > 0], sizes[sizes > 0]
    n_clusters, n_columns = sums.shape
    if n_clusters < MIN_CLUSTERS:
        return np.full((2, n_columns), np.nan)
    total = sizes.sum()
    jackknife_weight = (1 - sizes / total)[:, None] ** -2.0
    counts = _drawn_counts(n_clusters, draws, seed)
    drawn_total = (counts @ sizes)[:, None]
    drawn_square_sizes = resampled_sums(counts, jackknife_weight * sizes[:, None] ** 2)
    most = MAX_REACH * student_quantile(0.5 + level / 2, n_clusters - 1)
    ends = np.empty((2, n_columns))
    for start in range(0, n_columns, N_COLUMNS_PER_CHUNK):
        columns = slice(start, start + N_COLUMNS_PER_CHUNK)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = sums[:, columns].sum(0) / total
            residuals = sums[:, columns] - mean * sizes[:, None]
            weighted = jackknife_weight * residuals
            # Sums over clusters of the squared residuals of the data, and of those of each draw
            # around its own mean.
            squares = (weighted * residuals).sum(0)
            error = np.sqrt(squares * (n_clusters - 1) / n_clusters) / total
            change = resampled_sums(counts, residuals) / drawn_total
            drawn_squares = resampled_sums(counts, weighted * residuals)
            drawn_squares -= 2 * change * resampled_sums(counts, weighted * sizes[:, None])
            drawn_squares += change**2 * drawn_square_sizes
            # A draw of equal clusters has no spread: rounding leaves less than this.
            drawn_squares[drawn_squares < 1e-9 * squares] = 0
            drawn_error = np.sqrt(drawn_squares * (n_clusters - 1) / n_clusters) / drawn_total
            studentized = np.clip(change / drawn_error, -most, most)
        studentized[change == 0] = 0  # 0 / 0
        highest, lowest = np.quantile(studentized, [(1 + level) / 2, (1 - level) / 2], axis=0)
        ends[:, columns] = mean - highest * error, mean - lowest * error
    return ends


def resampled_sums(
    counts: Float[np.ndarray, "draw cluster"], sums: Float[np.ndarray, "cluster column"]
) -> Float[np.ndarray, "draw column"]:
    """Return counts @ sums, with the same bytes on every machine and in every process.

    The columns of `sums` are rounded to multiples of a power of two so small that they fill 52
    bits. All products and sums are then exact, whatever their order; those of equal columns are
    equal. `counts` are whole numbers.
    """
    with np.errstate(invalid="ignore"):  # columns that are not finite stay so
        largest = np.abs(sums).max(0) * counts.sum(1).max()
        bits = N_EXACT_BITS - np.frexp(largest)[1]
        return np.ldexp(counts @ np.rint(np.ldexp(sums, bits)), -bits)


def cluster_index(clusters: Sequence[object] | np.ndarray) -> Int[np.ndarray, " row"]:
    """Return the number of each row's cluster. It does not depend on the order of the rows.

    If there are more than `MAX_CLUSTERS`, several clusters share a number.
    """
    keys = (
        clusters
        if isinstance(clusters, np.ndarray)
        else np.array([str(cluster) for cluster in clusters])
    )
    return np.unique(keys, return_inverse=True)[1] % MAX_CLUSTERS


def draw_clusters(
    clusters: Sequence[object] | np.ndarray, *, draws: int = DRAWS, seed: int = 0
) -> tuple[Int[np.ndarray, "draw cluster"], Int[np.ndarray, " row"]]:
    """Return how often each cluster is drawn in each bootstrap draw, and each row's index into the
    clusters.

    Of G clusters, G − 1 are drawn, so that the spread of the draws is that of a mean over G
    clusters (Rao and Wu 1988). A single cluster is always drawn once. Draws do not depend on the
    order of the rows. Use them for what is ranked again in every draw, such as `selected`;
    intervals have their own draws (`studentized_ends`).
    """
    cluster = cluster_index(clusters)
    n_clusters = int(cluster.max()) + 1
    chances = np.full(n_clusters, 1 / n_clusters)
    counts = np.random.default_rng(seed).multinomial(max(1, n_clusters - 1), chances, size=draws)
    return counts.astype(np.int32), cluster


def top_places(values: Float[np.ndarray, "draw item"], k: int) -> Float[np.ndarray, "draw item"]:
    """Return 1 for the k largest items of each draw, else 0; ties share the last places.

    Rows sum to k. The mean over draws is the share of draws in which an item is among the first k.
    """
    last = np.partition(values, values.shape[1] - k, axis=1)[:, -k, None]
    is_first, is_tied = values > last, values == last
    return is_first + is_tied * (k - is_first.sum(1, keepdims=True)) / is_tied.sum(1, keepdims=True)


@lru_cache(maxsize=64)
def student_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t distribution, for a probability above ½.

    t = sqrt(freedom) · tan(angle) has this distribution if the density of the angle is proportional
    to cos(angle) ** (freedom − 1), which is summed here in steps of the trapezoidal rule.
    """
    angles = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    angle = np.interp(2 * probability - 1, below / below[-1], angles)
    return math.sqrt(freedom) * math.tan(angle)


@lru_cache(maxsize=4)
def _drawn_counts(n_clusters: int, draws: int, seed: int) -> Float[np.ndarray, "draw cluster"]:
    """Return how often each of the clusters is drawn in each draw of as many clusters."""
    chances = np.full(n_clusters, 1 / n_clusters)
    counts = np.random.default_rng(seed).multinomial(n_clusters, chances, size=draws).astype(float)
    counts.setflags(write=False)
    return counts


def _sums_from_leave_one_out(
    value: float, without: Float[np.ndarray, " cluster"], sizes: Float[np.ndarray, " cluster"]
) -> Float[np.ndarray, " cluster"]:
    """Return the sums of the clusters for which a mean would have these values without each
    cluster.
    """
    total = sizes.sum()
    return value * total - without * (total - sizes)


def _interval(
    value: float,
    sums: Float[np.ndarray, " cluster"],
    sizes: Float[np.ndarray, " cluster"],
    *,
    bounds: tuple[float, float] | None,
    level: float,
    draws: int = DRAWS,
    seed: int = 0,
) -> Interval:
    """Return the value with the studentized ends of the mean of the sums, moved to it."""
    low, high = studentized_ends(sums[:, None], sizes, level=level, draws=draws, seed=seed)[:, 0]
    shift = value - float(
        sums.sum() / sizes.sum()
    )  # 0 for a mean, and small for a smooth statistic
    interval = Interval(value, float(low) + shift, float(high) + shift)
    return interval if bounds is None else _within(interval, bounds, len(sizes), level)


def _within(
    interval: Interval, bounds: tuple[float, float], n_clusters: int, level: float
) -> Interval:
    """Return the interval within the bounds; one of zero width gets the exact binomial width."""
    value, low, high = interval
    if math.isnan(low):
        return interval
    if high - low < 1e-9:
        reach = (bounds[1] - bounds[0]) * (1 - (1 - level) ** (1 / n_clusters))
        low, high = value - reach, value + reach
    return Interval(value, max(bounds[0], low), min(bounds[1], high))
