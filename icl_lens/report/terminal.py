"""Tables for the terminal."""

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def new_table(*columns: str | Text, left: tuple[int, ...] = (0,), title: str | None = None) -> Table:
    """Return an empty table whose columns are right-aligned except those at the indices `left`."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", overflow="fold")
    return table


def full_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: tuple[int, ...] = (0,)) -> Table:
    """Return a table of rows; only its first column wraps."""
    table = new_table(*columns, left=left)
    for column in table.columns[1:]:
        column.no_wrap = True
    for row in rows:
        table.add_row(*map(Text, row))
    return table
