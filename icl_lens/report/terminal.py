"""Tables for the terminal.

A table that is wider than the terminal keeps whole words: columns of texts get narrower first, down
to their longest word. If that is not enough, the other columns are shown in several tables, each of
which begins with the first column.
"""

from collections.abc import Iterable, Sequence
from copy import copy

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

LONGEST_WORD = 24
"""Characters beyond which a word of a text may be broken, as in a column that a longer word would
fill.
"""
WIDEST = 10_000


class FittedTable(Table):
    """A table that fits the terminal without breaking words or leaving out columns.

    Its heading, unlike the title of a table, may be wider than the table.
    """

    heading: str | None = None

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterable[RenderableType | Segment]:
        if self.heading:
            yield Text(self.heading, "bold")
        for table in _fitted(self, console, options):
            yield from Table.__rich_console__(table, console, options)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Table.__rich_measure__(self, console, options)


def new_table(
    *columns: str | Text, left: tuple[int, ...] = (0,), title: str | None = None
) -> Table:
    """Return an empty table whose columns are right-aligned except those at the indices `left`."""
    table = FittedTable(box=box.SIMPLE_HEAD, pad_edge=False)
    table.heading = title
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", overflow="fold")
    return table


def full_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: tuple[int, ...] = (0,)
) -> Table:
    """Return a table of rows; only its first column wraps."""
    table = new_table(*columns, left=left)
    for column in table.columns[1:]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _fitted(table: Table, console: Console, options: ConsoleOptions) -> list[Table]:
    """Return the table with widths that fit, or tables with some of its columns each."""
    natural = [_natural_width(column, console) for column in table.columns]
    wide = options.update(width=WIDEST)
    borders = Measurement.get(console, wide, _with_widths(table, natural)).maximum - sum(natural)
    if sum(natural) + borders <= options.max_width or len(natural) < 2:
        return [table]
    smallest = [
        min(width, _smallest_width(column, console))
        for column, width in zip(table.columns, natural, strict=True)
    ]
    per_border = -(-borders // len(natural))
    tables: list[Table] = []
    for places in _groups(smallest, options.max_width, per_border):
        part = _with_columns(table, places)
        space = options.max_width - per_border * len(places)
        widths = _shrunk(
            [natural[place] for place in places], [smallest[place] for place in places], space
        )
        tables.append(_with_widths(part, widths))
    return tables


def _groups(smallest: Sequence[int], width: int, per_border: int) -> list[list[int]]:
    """Return the columns of each table; each begins with the first column and fits, if it has two
    columns or more.
    """
    groups = [[0]]
    used = first = smallest[0] + per_border
    for place in range(1, len(smallest)):
        if used + smallest[place] + per_border > width and len(groups[-1]) > 1:
            groups.append([0])
            used = first
        groups[-1].append(place)
        used += smallest[place] + per_border
    return groups


def _shrunk(natural: Sequence[int], smallest: Sequence[int], space: int) -> list[int]:
    """Return widths that sum to at most `space`, if possible: the widest columns get narrower
    first.
    """
    widths = list(natural)
    while sum(widths) > space:
        places = [place for place in range(len(widths)) if widths[place] > smallest[place]]
        if not places:
            break
        widest = max(places, key=lambda place: widths[place])
        widths[widest] -= 1
    return widths


def _natural_width(column: Column, console: Console) -> int:
    return max(map(_line_width, _texts(column, console)), default=0)


def _smallest_width(column: Column, console: Console) -> int:
    """Return the width that keeps words whole, and the lines of numbers; long words of texts may be
    broken.
    """
    header, *cells = _texts(column, console)
    header_width = _word_width(header)
    if column.justify == "right" or column.no_wrap:
        return max([header_width, *map(_line_width, cells)])
    return min(LONGEST_WORD, max([header_width, *map(_word_width, cells)]))


def _texts(column: Column, console: Console) -> list[str]:
    """Return the header and the cells of a column as they are printed without a limit."""
    return [_plain(cell, console) for cell in (column.header, *column.cells)]


def _plain(cell: RenderableType, console: Console) -> str:
    if isinstance(cell, Text):
        return cell.plain
    return cell if isinstance(cell, str) else console.render_str(str(cell)).plain


def _line_width(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


def _word_width(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _with_columns(table: Table, places: Sequence[int]) -> Table:
    part = copy(table)
    part.columns = []
    for number, place in enumerate(places):
        column = copy(table.columns[place])
        column._index = number
        part.columns.append(column)
    return part


def _with_widths(table: Table, widths: Sequence[int]) -> Table:
    part = _with_columns(table, range(len(table.columns)))
    for column, width in zip(part.columns, widths, strict=True):
        column.width, column.no_wrap = width, False
    return part
