"""A quantity next to its control: both means, their difference, and its 95% interval.

1. Prompts with the same query word, a cluster, are not independent, so the bootstrap draws clusters (of G clusters,
   G − 1, with weights scaled to G: Rao and Wu 1988).
2. Comparisons of heads also draw the control heads of each layer, and the located heads. A located head's difference is
   the one from the control heads drawn for its layer.
3. The interval is the difference ± t · (standard deviation of the draws). The degrees of freedom of t are the number of
   clusters (or of located heads, if they are fewer) minus one.
4. If all draws of a bounded number agree, the interval has the width of the exact binomial bound: up to a share
   1 − 0.05^(1/G) of all possible clusters may differ although the G clusters agree.
5. The interval of a bounded number ends where control plus difference would exceed the bounds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import t as student

from icl_lens.intervals import cluster_weights, weights_with_data
from icl_lens.models.head import Head

DRAWS = 2000
LEVEL = 0.95

Clusters = Int[np.ndarray, " row"]
"""The number of each prompt's query word."""
Bounds = tuple[int | float, int | float]
"""The smallest and the largest value that a number can have."""
Ratio = tuple[Float[np.ndarray, " row"], Float[np.ndarray, " row"]]
"""Numerator and denominator for every prompt."""


@dataclass(frozen=True)
class Comparison:
    """Means of a quantity and of its control, and the 95% interval of their difference, in one unit.

    A size is 0 where it has no meaning: `n_prompts` of weights, `n_heads` where no heads are compared.
    """

    quantity: float
    control: float
    low: float
    high: float
    n_prompts: int
    n_clusters: int
    n_heads: int = 0


def compare(
    quantity: Float[np.ndarray, " row"],
    control: Float[np.ndarray, " row"] | float,
    clusters: Int[np.ndarray, " row"],
    *,
    bounds: Bounds | None = None,
) -> Comparison:
    """Compare two numbers per prompt, or one number with a constant; `bounds` limit each number."""
    quantity = np.asarray(quantity, dtype=float)
    control = np.broadcast_to(np.asarray(control, dtype=float), quantity.shape)
    weights = cluster_weights(clusters)
    n_clusters = len(np.unique(clusters))
    drawn = weights @ (quantity - control)
    low, high = _interval(float((quantity - control).mean()), drawn, n_clusters - 1, n_clusters, bounds)
    ends = _within(bounds, float(control.mean()), low, high)
    return Comparison(float(quantity.mean()), float(control.mean()), *ends, len(quantity), n_clusters)


def compare_heads(
    values: Float[np.ndarray, "row layer head"],
    located: Sequence[Head],
    controls: Mapping[int, Sequence[Head]],
    clusters: Int[np.ndarray, " row"] | None,
    *,
    bounds: Bounds | None = None,
) -> Comparison:
    """Compare located heads with the control heads of their layers; `values` has one number per prompt and head.

    Without `clusters`, `values` has one row, such as a number computed from each head's weights, and only heads are
    drawn.
    """
    values = np.asarray(values, dtype=float)
    rng = np.random.default_rng(1)
    rows = np.ones((1 + DRAWS, len(values))) if clusters is None else weights_with_data(clusters)
    of_located = np.stack([rows @ values[:, head.layer, head.head] for head in located], axis=1)
    of_controls = {}
    for layer, heads in controls.items():
        means = np.stack([rows @ values[:, head.layer, head.head] for head in heads], axis=1)
        of_controls[layer] = (means * _drawn_weights(len(heads), len(rows), rng)).sum(1)
    matched = np.stack([of_controls[head.layer] for head in located], axis=1)
    drawn = ((of_located - matched) * _drawn_weights(len(located), len(rows), rng)).sum(1)
    n_clusters = len(located) if clusters is None else len(np.unique(clusters))
    freedom = min(n_clusters, len(located)) - 1
    low, high = _interval(float(drawn[0]), drawn[1:], freedom, n_clusters, bounds)
    sizes = (0, 0) if clusters is None else (len(values), n_clusters)
    return Comparison(float(of_located[0].mean()), float(matched[0].mean()), low, high, *sizes, len(located))


def compare_same_heads(
    quantity: Float[np.ndarray, "row head"],
    control: Float[np.ndarray, "row head"] | float,
    clusters: Int[np.ndarray, " row"],
    *,
    bounds: Bounds | None = None,
) -> Comparison:
    """Compare two numbers per prompt and head, such as a head's own score and a baseline on its inputs."""
    heads = range(quantity.shape[1])
    pairs = np.stack([quantity, np.broadcast_to(control, quantity.shape)], axis=-1)
    located, controls = [Head(i, 0) for i in heads], {i: [Head(i, 1)] for i in heads}
    return compare_heads(pairs, located, controls, clusters, bounds=bounds)


def ratio_of_means(
    part: Float[np.ndarray, "row *rest"], total: Float[np.ndarray, "row *rest"]
) -> Float[np.ndarray, "row *rest"]:
    """Return numbers whose mean over the rows is mean(part) / mean(total): rows with a small total count little.

    Each row's number is its first-order term (the delta method), so that an interval of their mean is one of the ratio.
    NaN where every total is 0.
    """
    size = total.mean(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = part.mean(0) / size
        return ratio + (part - ratio * total) / size


def compare_ratios(quantity: Ratio, control: Ratio, clusters: Clusters, *, total: str) -> Comparison | str:
    """Compare two ratios of means over prompts, or return why not: a denominator, named by `total`, may be zero."""
    n, n_clusters = len(clusters), len(np.unique(clusters))
    weights = weights_with_data(clusters)
    ratios = []
    for top, bottom in (quantity, control):
        drawn = weights @ bottom
        low, high = _interval(float(drawn[0]), drawn[1:], n_clusters - 1, n_clusters, None)
        if not low > 0:
            return f"{total} is not above zero ({drawn[0]:.3g} [{low:.3g}, {high:.3g}]), so it has no shares"
        ratios.append((weights @ top) / drawn)
    return compare_drawn(ratios[0], ratios[1], n, n_clusters)


def compare_drawn(
    quantity: Float[np.ndarray, " draw"],
    control: Float[np.ndarray, " draw"] | float,
    n_prompts: int,
    n_clusters: int,
    *,
    n_heads: int = 0,
    bounds: Bounds | None = None,
) -> Comparison:
    """Compare two statistics, each computed from the data (first) and from each bootstrap draw of clusters.

    Use it for statistics that are not means over prompts, such as the overlap of two lists; see `weights_with_data`.
    """
    control = np.broadcast_to(np.asarray(control, dtype=float), quantity.shape)
    difference = quantity - control
    low, high = _interval(float(difference[0]), difference[1:], n_clusters - 1, n_clusters, bounds)
    low, high = _within(bounds, float(control[0]), low, high)
    return Comparison(float(quantity[0]), float(control[0]), low, high, n_prompts, n_clusters, n_heads)


def _drawn_weights(n: int, draws: int, rng: np.random.Generator) -> Float[np.ndarray, "draw n"]:
    """Return weights of n things that sum to 1, for each draw of n − 1 things; the first row is the data."""
    weights = np.ones((draws, 1))
    if n > 1:
        weights = rng.multinomial(n - 1, np.full(n, 1 / n), size=draws) * (n / (n - 1))
    weights[0] = 1.0
    return weights / n


def _within(bounds: Bounds | None, control: float, low: float, high: float) -> tuple[float, float]:
    """Return the ends of a difference's interval, cut where control plus difference would exceed the bounds."""
    if bounds is None:
        return low, high
    return max(low, bounds[0] - control), min(high, bounds[1] - control)


def _interval(
    difference: float, drawn: np.ndarray, freedom: int, n_clusters: int, bounds: Bounds | None
) -> tuple[float, float]:
    """Return the ends of the interval around a difference (items 3 and 4 above); NaN without a degree of freedom."""
    if freedom < 1:
        return math.nan, math.nan
    error = float(drawn.std())
    if error > 1e-9 * max(1.0, abs(difference)):
        reach = float(student.ppf(0.5 + LEVEL / 2, freedom)) * error
    elif bounds is not None:  # item 4
        reach = (bounds[1] - bounds[0]) * (1 - (1 - LEVEL) ** (1 / n_clusters))
    else:
        reach = 0.0
    width = math.inf if bounds is None else float(bounds[1] - bounds[0])
    return float(max(-width, difference - reach)), float(min(width, difference + reach))
