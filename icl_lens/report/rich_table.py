"""Tables for the terminal."""

from rich import box
from rich.table import Table


def new_table(*columns: str, left: tuple[int, ...] = (0,)) -> Table:
    """Return an empty table whose columns are right-aligned except those at the indices `left`."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right")
    return table
