"""What a result shows, as data: a title, sentences, and sections with tables.

1. A result describes itself once, in `to_view`.
2. Renderers walk the view. Plain text, Markdown and JSON are in `view_text`; `report` has the
   terminal, the page and the notebook.

A view says what stands where. Colors, widths and tags are the renderers' own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from icl_lens.result.number_format import signed


@dataclass(frozen=True)
class Label:
    """A label's text; `index` is its place among the labels, which fixes its color."""

    text: str
    index: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Dots:
    """Shares on a line from 0 to 1: without an ablation, with it, and with each random one.

    Only a page draws them, so the same numbers stand in other columns of the row.
    """

    before: float
    after: float
    draws: tuple[float, ...] = ()


Cell = str | int | float | Label | Dots
"""A cell of a table. Floats are written with their sign and the decimals of their column."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    """Name with its unit, such as "log-odds lost, nats"."""
    is_number: bool = True
    """Whether its cells are aligned at their ends."""
    digits: int = 3
    """Decimals of its floats."""
    has_bars: bool = False
    """Whether a page draws a bar beside each of its floats, on one scale."""
    is_detail: bool = False
    """Whether a terminal too narrow for all columns leaves it out."""


@dataclass(frozen=True)
class HeadValues:
    """A value of every head, for a map by layer and head."""

    name: str
    """What the values are, with their unit."""
    values: tuple[tuple[float, ...], ...]
    """[layer][head]."""
    marked: frozenset[tuple[int, int]] = frozenset()
    """(layer, head) of the heads to ring."""


@dataclass(frozen=True)
class Section:
    """One section of a view: sentences, a table, and notes that explain its numbers."""

    title: str = ""
    """Empty for the only section of a view."""
    explanation: str = ""
    """How to read the section, in one sentence; only a page shows it."""
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    n_rows: int | None = None
    """Number of rows of the full table, of which `rows` are the first; None if these are all."""
    full_table: str = "to_frame()"
    """What of the result has the full table."""
    notes: tuple[str, ...] = ()
    figure: str = ""
    """Name of the result's figure that a page shows above the table."""
    head_map: HeadValues | None = None
    """A map that a page shows above the table."""
    quote: tuple[str | Label, ...] = ()
    """Text that a model reads, in pieces, shown unchanged; only a page shows it."""
    code: str = ""
    """A command or Python code; only a page shows it."""
    is_detail: bool = False
    """Whether only a page shows it."""

    @property
    def is_printed(self) -> bool:
        """Whether `print` and the terminal show it."""
        return bool(self.columns) and not self.is_detail

    @property
    def n_more(self) -> int:
        """Number of rows of the full table that are not in `rows`."""
        return 0 if self.n_rows is None else max(0, self.n_rows - len(self.rows))

    def first_rows(self, n: int) -> "Section":
        """Return the section with the first n rows of its table."""
        n_rows = len(self.rows) if self.n_rows is None else self.n_rows
        return replace(self, rows=self.rows[:n], n_rows=n_rows)

    def texts(self) -> list[list[str]]:
        """Return the cells of all rows as texts; those that only a page draws are empty."""
        rows = []
        for row in self.rows:
            rows.append(
                [cell_text(cell, column) for cell, column in zip(row, self.columns, strict=True)]
            )
        return rows


@dataclass(frozen=True)
class View:
    """What a result shows: a title, sentences, and sections; the first sentence is the finding."""

    title: str
    sentences: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    about: str = ""
    """The kind of result and the model, such as "two towers · icl-mini"."""


MAX_ROWS = 24
"""Rows of a table that `print` and the terminal show."""


def table_view(
    title: str,
    columns: Mapping[str, Sequence[Any]],
    n_rows: int | None = None,
    *,
    full_table: str = "to_frame()",
    finding: str = "",
) -> View:
    """Return the view of one small table.

    `n_rows` is the number of rows of the full table and `full_table` what has it; `finding` is the
    sentence that comes before the title, of which a page then shows what is before the colon.
    """
    rows = tuple(zip(*columns.values(), strict=True))
    described = tuple(
        Column(name, is_number=is_number_column(cells)) for name, cells in columns.items()
    )
    sections = (Section(columns=described, rows=rows, n_rows=n_rows, full_table=full_table),)
    if not finding:
        return View(title, sections=sections)
    what, _, _ = title.partition(":")
    return View(what, (finding, title), sections)


def cell_text(cell: Cell, column: Column) -> str:
    """Return a cell as plain text."""
    if isinstance(cell, Dots):
        return ""
    if isinstance(cell, float):
        return signed(cell, column.digits)
    return str(cell)


def is_number_column(column: Sequence[object]) -> bool:
    """Return whether a non-empty column holds only numbers, percentages and signed texts.

    Signed texts begin with "+", "−" or "–".
    """
    texts = [str(cell) for cell in column if not isinstance(cell, (int, float))]
    return all(text[:1] in "+-−–" or text.endswith("%") for text in texts) and bool(column)


def finite_or_none(value: float) -> float | None:
    """Return a number, or None in place of one that JSON lacks."""
    return value if math.isfinite(value) else None
