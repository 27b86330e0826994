"""Tables of results: long ones with named columns, and small ones as text or static HTML."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.result.number_format import percent

# Rows in the repr of a result; `to_frame` returns all of them.
SHOWN_ROWS = 20


def head_name(layer: int, head: int) -> str:
    """Return a head's name, such as `L22H0`."""
    return f"L{layer}H{head}"


def long_frame(values: Tensor, axes: Sequence[str], *, value: str = "value") -> pd.DataFrame:
    """Return a tensor as a long table: one integer column per axis and one column of values.

    With both a `layer` and a `head` axis, a column `name` (`L22H0`) is added. Raise InputError if the number of axis
    names does not match.
    """
    if len(axes) != values.ndim:
        raise InputError(f"axes must have one name per axis of the shape {tuple(values.shape)}, got {list(axes)}")
    index = torch.cartesian_prod(*[torch.arange(n) for n in values.shape]).reshape(-1, values.ndim)
    frame = pd.DataFrame(index.numpy(), columns=list(axes))
    if {"layer", "head"} <= set(axes):
        frame["name"] = [head_name(layer, head) for layer, head in zip(frame["layer"], frame["head"], strict=True)]
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


def format_signed(value: float) -> str:
    """Format an increase as "+1.234", and NaN as "–"."""
    return "–" if value != value else f"{value:+z.3f}"


def format_share(value: float) -> str:
    """Format a share of draws, 0 to 1, as "97.8%", and NaN as "–"."""
    return "–" if value != value else f"{value:.1%}"


def interval_texts(table: pd.DataFrame) -> list[str]:
    """Return the columns low and high of each row as "+0.123 … +0.456"."""
    return [
        f"{format_signed(low)} … {format_signed(high)}" for low, high in zip(table["low"], table["high"], strict=True)
    ]


def selected_note(k: int, n: int, what: str = "head") -> str:
    """Return a clause that says what the column `selected` is, and what a random one of n heads or edges would have."""
    by_chance = f"random {what}: {percent(k / n)}"
    return f"selected: how often the {what} is among the first {k} when these queries are drawn again ({by_chance})"


def json_records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table's rows for JSON, which has no NaN: it becomes None."""
    rows = table.to_dict("records")
    return [{str(column): None if value != value else value for column, value in row.items()} for row in rows]


def text_table(title: str, columns: Mapping[str, Sequence[Any]], *, total: int | None = None) -> str:
    """Format a small table as text; `total` is the number of rows of the full table."""
    names, rows = list(columns), _rows(columns)
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    right = [is_number_column(column) for column in columns.values()]
    lines = [
        "  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in line).rstrip()
        for line in (zip(row, widths, right, strict=True) for row in [names, *rows])
    ]
    return "\n".join([title, *lines, *_rest(rows, total)])


def html_table(title: str, columns: Mapping[str, Sequence[Any]], *, total: int | None = None) -> str:
    """Format a small table as HTML without scripts or style sheets."""
    rows = _rows(columns)
    right = [' style="text-align: right"' if is_number_column(column) else "" for column in columns.values()]
    head = "".join(f"<th{how}>{escape(name)}</th>" for name, how in zip(columns, right, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{how}>{escape(cell)}</td>" for cell, how in zip(row, right, strict=True)) + "</tr>"
        for row in rows
    )
    rest = "".join(f"<p>{escape(line)}</p>" for line in _rest(rows, total))
    caption = f'<caption style="text-align: left">{escape(title)}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in zip(*columns.values(), strict=True)]


def _rest(rows: list[list[str]], total: int | None) -> list[str]:
    """Return a line with the number of rows that are not shown; empty if all are."""
    return [] if total is None or total <= len(rows) else [f"… {total - len(rows)} more rows: to_frame() has all"]


def is_number_column(column: Sequence[Any]) -> bool:
    """Return whether a non-empty column holds only numbers, percentages and texts that begin with "+", "-" or "–"."""
    texts = [str(cell) for cell in column if not isinstance(cell, (int, float))]
    return all(text[:1] in "+-–" or text.endswith("%") for text in texts) and bool(column)
