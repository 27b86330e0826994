"""Overlap of lists of heads, next to that of random lists with the same number of heads in each layer."""

import numpy as np
from jaxtyping import Bool, Float, Int

from icl_lens.intervals import weights_with_data

Lists = Bool[np.ndarray, "draw layer head"]
"""Which heads are on a list: in the data (first) and in each bootstrap draw."""


def drawn_lists(
    values: Float[np.ndarray, "row layer head"], clusters: Int[np.ndarray, " row"], k: int, *, seed: int
) -> Lists:
    """List the k heads of largest mean, ranked again in each bootstrap draw of clusters.

    Lists that are to be drawn independently of each other need different seeds.
    """
    means = weights_with_data(clusters, seed=seed) @ values.reshape(len(values), -1)
    best = np.argsort(-means, axis=1, kind="stable")[:, :k]
    lists = np.zeros(means.shape, dtype=bool)
    np.put_along_axis(lists, best, True, axis=1)
    return lists.reshape(-1, *values.shape[1:])


def overlap(first: Lists, second: Lists) -> Float[np.ndarray, " draw"]:
    """Return the share of the first list's heads that are also on the second one (0 to 1)."""
    return (first & second).sum((1, 2)) / first.sum((1, 2))


def expected_overlap(first: Lists, second: Lists) -> Float[np.ndarray, " draw"]:
    """Return the expected overlap of random lists with the same number of heads in each layer as these two (0 to 1).

    In a layer of H heads, a random heads and b random heads have a · b / H in common on average (hypergeometric).
    """
    in_common = (first.sum(2) * second.sum(2)).sum(1) / first.shape[2]
    return in_common / first.sum((1, 2))


def most_shared_by_chance(
    lists: Bool[np.ndarray, "task layer head"], draws: int, *, seed: int
) -> Int[np.ndarray, " draw"]:
    """Return, for each draw of random lists, the largest number of lists that one head is on.

    In each draw, every list is replaced by a random one with the same number of heads in each layer.
    """
    rng = np.random.default_rng(seed)
    counts = np.zeros((draws, *lists.shape[1:]), dtype=int)
    for one in lists:
        places = rng.random(counts.shape).argsort(axis=2).argsort(axis=2)
        counts += places < one.sum(1)[:, None]
    return counts.max((1, 2))
