"""Compare two lists of heads: how many they share, and how many random lists would share.

1. Count the heads of each list in each layer.
2. In a layer of H heads, random lists of a and of b heads share a hypergeometric number of heads,
   on average a · b / H. Layers are independent, so the number over all layers has the convolution
   of their distributions, which is computed exactly.
3. The p-value is the probability that random lists share at least as many heads as these two.

Source: docs/howto/numbers.md, overlap of two lists.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from icl_lens.errors import InputError
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.view import ModelView
from icl_lens.result.base import Result
from icl_lens.result.number_format import joined
from icl_lens.result.view import View, table_view


@dataclass(frozen=True, repr=False)
class HeadOverlap(Result):
    """The heads that two lists share, beside random lists with as many heads in each layer.

    Example:
        >>> overlap = il.head_overlap(model, ["L1H0", "L5H2"], ["L5H2", "L5H3"])
        >>> overlap.to_frame().columns.tolist()
        ['common', 'expected', 'low', 'high', 'p_value', 'n_first', 'n_second', 'n_heads', 'heads']
    """

    common: tuple[Head, ...]
    """The heads in both lists, in the order of the first."""
    n_first: int
    n_second: int
    n_heads: int
    """The number of heads of the model."""
    expected: float
    """The number of heads that random lists share on average."""
    interval: tuple[int, int]
    """The numbers between which random lists share heads in at least 95 % of draws, 2.5 % at most
    on either side.
    """
    p_value: float
    """The probability that random lists share at least as many heads; one-sided."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row: common (number of heads in both lists), expected, low, high (`interval`),
        p_value, n_first, n_second, n_heads and heads (those in both lists).
        """
        low, high = self.interval
        row = {
            "common": len(self.common),
            "expected": self.expected,
            "low": low,
            "high": high,
            "p_value": self.p_value,
            "n_first": self.n_first,
            "n_second": self.n_second,
            "n_heads": self.n_heads,
            "heads": " ".join(map(str, self.common)),
        }
        return pd.DataFrame([row])

    @property
    def finding(self) -> str:
        """How many heads are in both lists, and which."""
        n_common = len(self.common)
        heads_are = "1 head is" if n_common == 1 else f"{n_common} heads are"
        names = f": {joined(list(map(str, self.common)))}" if self.common else ""
        return f"{heads_are} in both lists{names}."

    def to_view(self) -> View:
        """Return what is shown: the heads in both lists, and how many random lists share."""
        low, high = self.interval
        n_common = len(self.common)
        columns: dict[str, list[Any]] = {
            "in both lists": [n_common],
            "in random lists": [f"{self.expected:.2f}"],
            "95% of draws": [f"{low} … {high}"],
            f"{n_common} or more (p)": [f"{self.p_value:.2g}"],
        }
        title = (
            f"Two lists of heads: {self.n_first} and {self.n_second} of {self.n_heads:,}, beside "
            "random lists with as many heads in each layer"
        )
        return table_view(title, columns, 1, finding=self.finding)


def head_overlap(model: Any, first: Sequence[AnyHead], second: Sequence[AnyHead]) -> HeadOverlap:
    """Compare two lists of heads of a model with random lists that have as many heads in each
    layer.

    Heads are `il.Head`, pairs or names such as "L22H0"; a repeated head counts once. Two lists
    found on the same prompts are not independent of each other: a small p-value then says little.

    Raise InputError for an empty list and a head that the model does not have.

    Example:
        >>> overlap = il.head_overlap(model, ["L1H0", "L5H2"], ["L5H2", "L5H3"])
        >>> overlap.common, round(overlap.expected, 2)
        ((L5H2,), 0.33)
    """
    view = ModelView.of(model)
    lists = {"first": view.check_heads(first), "second": view.check_heads(second)}
    for name, heads in lists.items():
        if not heads:
            raise InputError(f"{name} must contain at least one head, got none")
    common = tuple(head for head in lists["first"] if head in lists["second"])
    first_in_layer = Counter(head.layer for head in lists["first"])
    second_in_layer = Counter(head.layer for head in lists["second"])
    shared = np.ones(1)
    for layer in first_in_layer.keys() & second_in_layer.keys():
        in_layer = _hypergeometric(view.n_heads, first_in_layer[layer], second_in_layer[layer])
        shared = np.convolve(shared, in_layer)
    at_most = shared.cumsum()
    at_least = shared[::-1].cumsum()[::-1]
    return HeadOverlap(
        common=common,
        n_first=len(lists["first"]),
        n_second=len(lists["second"]),
        n_heads=view.n_layers * view.n_heads,
        expected=float(shared @ np.arange(len(shared))),
        interval=(int((at_most <= 0.025).sum()), int((at_least > 0.025).sum()) - 1),
        p_value=min(1.0, float(at_least[len(common)])),
    )


def _hypergeometric(n_heads: int, n_first: int, n_second: int) -> Float[np.ndarray, " shared"]:
    """Return the probabilities that random lists of one layer share 0, 1, 2, … heads."""
    possible = range(min(n_first, n_second) + 1)
    ways = [comb(n_first, n) * comb(n_heads - n_first, n_second - n) for n in possible]
    return np.array(ways) / comb(n_heads, n_second)
