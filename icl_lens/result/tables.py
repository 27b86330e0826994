"""Tables of results: long frames with named columns, CSV that a spreadsheet opens safely, records
for JSON, and the notes below tables.
"""

import csv
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.foundation.intervals import MIN_CLUSTERS
from icl_lens.result.number_format import percent, signed_ends

# Rows in the repr of a result; `to_frame` returns all of them.
SHOWN_ROWS = 20
# Characters with which a spreadsheet's formulas begin.
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def head_name(layer: int, head: int) -> str:
    """Return a head's name, such as `L22H0`."""
    return f"L{layer}H{head}"


def long_frame(values: Tensor, axes: Sequence[str], *, value: str = "value") -> pd.DataFrame:
    """Return a tensor as a long table: one integer column per axis and one column of values.

    With both a `layer` and a `head` axis, a column `name` (`L22H0`) is added. Raise InputError if
    the number of axis names does not match.
    """
    if len(axes) != values.ndim:
        raise InputError(
            f"axes must have one name per axis of the shape {tuple(values.shape)}, got {list(axes)}"
        )
    index = torch.cartesian_prod(*[torch.arange(n) for n in values.shape]).reshape(-1, values.ndim)
    frame = pd.DataFrame(index.numpy(), columns=list(axes))
    if {"layer", "head"} <= set(axes):
        frame["name"] = [
            head_name(layer, head)
            for layer, head in zip(frame["layer"], frame["head"], strict=True)
        ]
    values = values.detach().cpu().reshape(-1)
    frame[value] = (values.float() if values.dtype.itemsize < 4 else values).numpy()
    return frame


def columns_first(table: pd.DataFrame, *names: str) -> pd.DataFrame:
    """Return a table with these columns first, if it has them, and the others in their order."""
    first = [name for name in names if name in table]
    return pd.DataFrame(table[[*first, *(name for name in table if name not in first)]])


def plural_prompts(n: int) -> str:
    """Return "1 prompt" or "20 prompts"."""
    return f"{n} prompt" + "s" * (n != 1)


def format_share(value: float) -> str:
    """Format a share of draws, 0 to 1, as "97.8%", and NaN as "–"."""
    return "–" if value != value else f"{value:.1%}"


def interval_texts(table: pd.DataFrame) -> list[str]:
    """Return the columns low and high of each row as "+0.123 … +0.456"."""
    return [signed_ends(low, high) for low, high in zip(table["low"], table["high"], strict=True)]


def intervals_note(n_queries: int, sentence: str) -> str:
    """Return a sentence on 95% intervals or, for too few queries, that there are none."""
    if n_queries >= MIN_CLUSTERS:
        return sentence
    return (
        f"There are no 95% intervals, which need prompts with at least {MIN_CLUSTERS} different "
        f"queries, got {n_queries}."
    )


def selected_note(k: int, n: int, what: str = "head") -> str:
    """Return a clause that says what the column `selected` is, and what a random one of n heads or
    edges would have.
    """
    by_chance = f"random {what}: {percent(k / n)}"
    return f"selected: how often the {what} is among the first {k} when these queries are drawn again ({by_chance})"


def json_records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table's rows for JSON, which has no NaN: it becomes None."""
    records = []
    for row in table.to_dict("records"):
        record = {}
        for column, value in row.items():
            record[str(column)] = None if value != value else value
        records.append(record)
    return records


def csv_text(table: pd.DataFrame, *, index: bool = False) -> str:
    """Return a table as CSV, with an apostrophe before texts that are formulas to a spreadsheet.

    `index` says whether the first column has the index.
    """
    safe = table.rename(columns=_as_text)
    if index:
        safe.index = safe.index.map(_as_text)
    quoting = csv.QUOTE_MINIMAL
    for name in safe.columns:
        texts = [cell for cell in safe[name] if isinstance(cell, str)]
        if texts:
            safe[name] = safe[name].map(_as_text)
        if any("\r" in text for text in texts):
            quoting = csv.QUOTE_NONNUMERIC  # the minimum leaves out cells that end a line so
    return safe.to_csv(index=index, lineterminator="\n", quoting=quoting)


def _as_text(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_SIGNS) else cell
