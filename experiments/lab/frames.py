"""Tidy tables to and from arrays."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped
from torch import Tensor

from experiments.lab.intervals import CLUSTERS


def long(values: Tensor | np.ndarray, value: str, **axes: Iterable[Any]) -> pd.DataFrame:
    """An array as a table with one row for each value: a column for each axis, in order, holding that axis' names."""
    array = np.asarray(values)
    names = [list(axis) for axis in axes.values()]
    assert array.shape == tuple(map(len, names)), f"{array.shape} values for axes of {[*map(len, names)]}"
    frame = pd.MultiIndex.from_product(names, names=list(axes)).to_frame(index=False)
    return frame.assign(**{value: array.reshape(-1)})


def stack(*frames: pd.DataFrame) -> pd.DataFrame:
    """Tables under one another."""
    return pd.concat(frames, ignore_index=True)


def where(table: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """The rows in which columns have these values."""
    keep = np.ones(len(table), dtype=bool)
    for name, value in wanted.items():
        keep &= table[name].to_numpy() == value
    return table.loc[keep]


def array(table: pd.DataFrame, value: str) -> Shaped[np.ndarray, " row"]:
    """A column as an array."""
    return np.asarray(table[value])


def wide(table: pd.DataFrame, value: str, *, index: str, columns: str) -> pd.DataFrame:
    """One row for each `index`, one column for each `columns`, in order of appearance; means of several values."""
    return table.pivot_table(value, index=index, columns=columns, aggfunc="mean", sort=False)


def levels(table: pd.DataFrame) -> list[str]:
    """The columns that tell prompts from one another and say which of them belong together."""
    return ["prompt", *(name for name in CLUSTERS if name in table)]


def by_prompt(table: pd.DataFrame, value: str, **wanted: Any) -> pd.Series:
    """The mean of a column over each prompt's rows, among those in which columns have these values; by prompt.

    Its index names each prompt and its clusters, so that differences are taken prompt by prompt and intervals know
    which prompts share a query (`intervals.mean_estimate`).
    """
    means = where(table, **wanted).groupby(levels(table))[value].mean()
    assert isinstance(means, pd.Series)
    return means


def mean_by(table: pd.DataFrame, value: str, name: str) -> Float[np.ndarray, " name"]:
    """The mean of a column for each value of another column, in the order of these values."""
    return np.asarray(table.groupby(name)[value].mean())


def of_ranking(table: pd.DataFrame, ranking: str) -> pd.DataFrame:
    """The rows by this ranking, and those of any (`ranking` None), without the column."""
    own = table["ranking"].isna() | (table["ranking"] == ranking)
    return table.loc[own].drop(columns="ranking").reset_index(drop=True)
