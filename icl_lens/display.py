"""Results and their display: long tables with named columns, and small tables as text or static HTML."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import pandas as pd
import torch
from torch import Tensor

from icl_lens import result_json
from icl_lens.errors import InputError
from icl_lens.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Rows in the repr of a result; `to_frame` returns all of them.
SHOWN_ROWS = 20

AnyResult = TypeVar("AnyResult", bound="Result")


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
    return "–" if value != value else f"{value:+.3f}"


def interval_texts(table: pd.DataFrame) -> list[str]:
    """Return the columns low and high of each row as "+0.123 … +0.456"."""
    return [
        f"{format_signed(low)} … {format_signed(high)}" for low, high in zip(table["low"], table["high"], strict=True)
    ]


def interval_suffix(low: float, high: float, number: str = "+.2f") -> str:
    """Return " (95% interval +0.12 … +0.45)", or "" if the interval is NaN."""
    return "" if low != low else f" (95% interval {low:{number}} … {high:{number}})"


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


class Displayed:
    """A frozen dataclass with views: `print` and notebooks show a few rows, `to_frame` has all, `to_html` is a page.

    Subclasses define `to_frame` and `_shown`. Pages, figures and the terminal's tables are in `report.views`, which is
    imported when one of them is asked for.
    """

    def to_frame(self) -> pd.DataFrame:
        """Return the numbers as a table, the columns that matter first."""
        raise NotImplementedError

    def _shown(self) -> tuple[str, Mapping[str, Sequence[Any]], int]:
        """Return a title, the columns of a small table, and the number of rows of the full one."""
        raise NotImplementedError

    def __repr__(self) -> str:
        title, columns, total = self._shown()
        return text_table(title, columns, total=total)

    def _repr_html_(self) -> str:
        return _views().notebook(self)

    def __rich__(self) -> Any:
        return _views().terminal(self)

    @cached_property
    def figures(self) -> "dict[str, Figure]":
        """Matplotlib figures by name; empty for results without figures."""
        return _views().figures(self)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> None: ...
    def to_html(self, path: str | Path | None = None) -> str | None:
        """Return a self-contained page, or write it to `path` atomically."""
        page = _views().page(self)
        return page if path is None else write_text(path, page)


class Result(Displayed):
    """What functions return: a frozen dataclass with views that is stored as JSON and restored exactly.

    Example:
        >>> import tempfile
        >>> best = il.top_heads(acts, k=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     best.save(f"{folder}/best.json")
        ...     loaded = il.results.TopHeads.load(f"{folder}/best.json")
        >>> loaded.heads == best.heads
        True
    """

    version: ClassVar[int] = 1
    """Version of the stored format; it increases when earlier files can no longer be read correctly."""

    def to_dict(self) -> dict[str, Any]:
        """Return what the stored file says in words and numbers for readers without icl-lens, as its "summary"."""
        return {}

    def to_json(self, **about: Any) -> str:
        """Return all fields as JSON; `about` is added to its "summary"."""
        return result_json.dumps(self, self.format_name(), self.version, self.to_dict() | about)

    def save(self, path: str | Path) -> None:
        """Write all fields as JSON that `load` reads. Raise InputError if the folder is not writable."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls: type[AnyResult], path: str | Path) -> AnyResult:
        """Load a result written by `save`, without the model; its tensors are on the CPU.

        Raise InputError for a file that is missing, damaged, or of another kind or version.
        """
        return result_json.load(cls, path, cls.format_name(), cls.version)

    @classmethod
    def format_name(cls) -> str:
        """Return the kind of a stored file, such as "icl-lens top heads"."""
        return "icl-lens" + re.sub("([A-Z])", r" \1", cls.__name__).lower()


def _views() -> Any:
    """Return the module that draws pages and terminal tables; it imports results, so results import it when asked."""
    return import_module("icl_lens.report.views")


def _rows(columns: Mapping[str, Sequence[Any]]) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in zip(*columns.values(), strict=True)]


def _rest(rows: list[list[str]], total: int | None) -> list[str]:
    """Return a line with the number of rows that are not shown; empty if all are."""
    return [] if total is None or total <= len(rows) else [f"… {total - len(rows)} more rows: to_frame() has all"]


def is_number_column(column: Sequence[Any]) -> bool:
    """Return whether a non-empty column holds only numbers and texts that begin with "+", "-" or "–"."""
    return all(isinstance(cell, (int, float)) or str(cell)[:1] in "+-–" for cell in column) and bool(column)
