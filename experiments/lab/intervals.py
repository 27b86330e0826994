"""Intervals and p-values for prompts that share words, and for heads that stand beside others of their layers.

1. Prompts that ask about the same word are no independent draws: whole clusters are drawn. With G clusters, G − 1 are
   drawn with replacement and their weights scaled to G, which makes the bootstrap variance that of G clusters (Rao and
   Wu 1988); prompts that ask two questions have two clusters, and the product of both weights (Owen 2007).
2. A claim about heads also draws the heads, within each layer and group, in the same way. A single head has no spread.
3. The standard deviation of the draws is the standard error; the interval and the p-value are those of Student's t with
   G − 1 degrees of freedom, and so always agree. Shares are kept within their bounds.
4. Where every cluster says the same, there is no spread to learn from. What has bounds, such as a share, gets the exact
   binomial bound of G clusters: so many may be otherwise and not be seen. A difference of none throughout (two edits
   that never differ), and what has no bounds, gets no interval beyond itself, and the p-value of a sign test.
5. Where many verdicts are given, their p-values are adjusted together (Holm 1979).

Everything is a matrix product of weights [draw row] and values, and the same seed gives the same interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeGuard

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from scipy.stats import t as student

from icl_lens.errors import InputError

DRAWS = 2000
LEVEL = 0.95
CLUSTERS = ("query", "other")
"""Columns that say which prompts belong together: by the word asked about, and by that of a second question."""

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % interval, in its own unit; its standard error; and the clusters that it rests on."""

    value: float
    low: float
    high: float
    error: float
    clusters: int
    bounds: Bounds | None = None

    def p(self, least: float) -> float:
        """The two-sided p-value of "the true value is `least`"; 1 where it cannot be told."""
        if self.clusters < 2 or not math.isfinite(self.value) or math.isnan(self.error):
            return 1.0
        if self.error > 0:
            return float(2 * student.sf(abs(self.value - least) / self.error, self.clusters - 1))
        if self.value == least:
            return 1.0
        if _can_vary(self.bounds, self.value):
            low, high = self.bounds
            # The share of clusters that must have been otherwise, and were not seen, for the mean to be `least`.
            room = high - self.value if least > self.value else self.value - low
            unseen = min(1.0, abs(least - self.value) / room) if room > 0 else 1.0
            return min(1.0, 2 * (1 - unseen) ** self.clusters)
        return 2.0 ** (1 - self.clusters)


@dataclass(frozen=True)
class Resample:
    """Weights of rows in the data as they are (first) and in each bootstrap draw."""

    weights: Float[np.ndarray, "draw row"]
    clusters: int

    def mean(self, values: Float[np.ndarray, "row *more"]) -> Float[np.ndarray, "draw *more"]:
        """The weighted mean of each column of `values`, in the data and in every draw; rows without a value left out.

        NaN where a draw has no such row.
        """
        values = np.asarray(values, dtype=float)
        there = np.isfinite(values)
        flat, known = (
            np.where(there, values, 0.0).reshape(len(values), -1),
            there.reshape(len(values), -1).astype(float),
        )
        with np.errstate(invalid="ignore", divide="ignore"):
            means = (self.weights @ flat) / (self.weights @ known)
        return means.reshape(len(self.weights), *values.shape[1:])

    def estimate(self, statistic: Float[np.ndarray, " draw"], *, bounds: Bounds | None = None) -> Estimate:
        """The interval of a statistic from its values in the data (first) and in the draws.

        Not finite if more than one draw in twenty is not.
        """
        value, drawn = float(statistic[0]), statistic[1:]
        drawn = drawn[np.isfinite(drawn)]
        if self.clusters < 2 or not math.isfinite(value) or len(drawn) < LEVEL * (len(statistic) - 1):
            return Estimate(value, math.nan, math.nan, math.nan, self.clusters, bounds)
        error = float(drawn.std())
        if error <= 1e-9 * max(1.0, abs(value)):
            return _constant(value, self.clusters, bounds)
        reach = float(student.ppf(0.5 + LEVEL / 2, self.clusters - 1)) * error
        low, high = value - reach, value + reach
        if bounds is not None:
            low, high = max(low, bounds[0]), min(high, bounds[1])
        return Estimate(value, low, high, error, self.clusters, bounds)


def _constant(value: float, clusters: int, bounds: Bounds | None) -> Estimate:
    """The interval of what is the same in every cluster: so many may be otherwise, at a bound, and not be seen."""
    if bounds is not None:
        # A value next to its bound, or to none, by rounding, lies on it.
        value = next((known for known in (*bounds, 0.0) if math.isclose(value, known, abs_tol=1e-9)), value)
    if not _can_vary(bounds, value):
        return Estimate(value, value, value, 0.0, clusters, bounds)
    unseen = 1 - ((1 - LEVEL) / 2) ** (1 / clusters)
    low, high = value - unseen * (value - bounds[0]), value + unseen * (bounds[1] - value)
    return Estimate(value, low, high, 0.0, clusters, bounds)


def _can_vary(bounds: Bounds | None, value: float) -> TypeGuard[Bounds]:
    """Whether other clusters may be otherwise: all that has bounds, but not a difference that is none throughout."""
    return bounds is not None and (value != 0 or value in bounds)


def resample(clusters: Sequence[Int[np.ndarray, " row"]], *, draws: int = DRAWS, seed: int = 0) -> Resample:
    """Weights of rows when whole clusters are drawn, by one numbering of the rows or by several at once.

    Raises InputError for rows without any numbering.
    """
    if not clusters:
        raise InputError("these values do not say which prompts share a query; give the table a column 'query'")
    return _resample(tuple(np.asarray(ids, dtype=np.int64).tobytes() for ids in clusters), draws, seed)


@lru_cache(maxsize=16)
def _resample(clusters: tuple[bytes, ...], draws: int, seed: int) -> Resample:
    """The same prompts are asked about again and again, for every bar of every figure."""
    rng = np.random.default_rng(seed)
    numberings = [np.frombuffer(ids, dtype=np.int64) for ids in clusters]
    weights = np.ones((draws + 1, len(numberings[0])))
    counts = []
    for ids in numberings:
        found, place = np.unique(ids, return_inverse=True)
        counts.append(len(found))
        if len(found) > 1:
            weights[1:] *= drawn_counts(len(found), draws, rng)[:, place]
    weights.flags.writeable = False
    return Resample(weights, min(counts))


def drawn_counts(n: int, draws: int, rng: np.random.Generator) -> Float[np.ndarray, "draw n"]:
    """How often each of n is drawn when n − 1 are, with replacement, times n / (n − 1); 1 where there is one only."""
    if n == 1:
        return np.ones((draws, 1))
    return rng.multinomial(n - 1, np.full(n, 1 / n), size=draws) * (n / (n - 1))


def clusters_of(index: pd.Index) -> list[Int[np.ndarray, " row"]]:
    """The clusters that an index of prompts (`frames.by_prompt`) names; raises InputError if it names none."""
    levels = [name for name in CLUSTERS if name in index.names]
    if not levels:
        raise InputError("these values do not say which prompts share a query; give the table a column 'query'")
    return [pd.factorize(index.get_level_values(name))[0] for name in levels]


def mean_estimate(values: pd.Series | Sequence[float] | np.ndarray, *, bounds: Bounds | None = None) -> Estimate:
    """The mean of one number per prompt and its interval; prompts without a value (NaN) are left out.

    A Series (`frames.by_prompt`) names the clusters of its prompts; the numbers of a plain array are independent.
    """
    numbers = np.asarray(values, dtype=float)
    ids = clusters_of(values.index) if isinstance(values, pd.Series) else [np.arange(len(numbers))]
    kept = np.isfinite(numbers)
    if not kept.any():
        return Estimate(math.nan, math.nan, math.nan, math.nan, 0, bounds)
    drawn = resample([one[kept] for one in ids])
    return drawn.estimate(drawn.mean(numbers[kept]), bounds=bounds)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for having been given together, in the same order (Holm's step-down); NaN counts as 1."""
    p = np.nan_to_num(np.asarray(p_values, dtype=float), nan=1.0)
    order = p.argsort(kind="stable")
    adjusted = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    result = np.empty(len(p))
    result[order] = np.minimum(adjusted, 1.0)
    return result.tolist()
