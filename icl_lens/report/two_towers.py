"""Two towers as the terminal's tables and as a page."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from icl_lens.analyses.two_towers_result import COLUMNS, SCAN_COLUMNS, TwoTowers
from icl_lens.report.html.parts import Bar, Cell, Table, largest, text_table
from icl_lens.report.terminal import full_table

NARROW_COLUMNS = ("exchanged", "predicted\nlabel", "lost,\nnats", "95%\ninterval", "random\nheads", "as pre-\ndicted")
FULL_WIDTH = 116
"""Narrower terminals get `NARROW_COLUMNS`."""


@dataclass(frozen=True)
class Terminal:
    """What `icl-lens towers` prints; a narrow terminal shows fewer columns."""

    found: TwoTowers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        found = self.found
        yield Text(found.verdict, "bold")
        yield Text(found.summary)
        columns, rows = COLUMNS, found.rows()
        if options.max_width < FULL_WIDTH:
            columns = NARROW_COLUMNS
            rows = [[row[0], row[1].split()[0], row[2], row[3], row[4].split()[0], row[6]] for row in rows]
        yield full_table(columns, rows, left=(0, 1))
        if found.scan is not None:
            yield Text("Scan: effect of exchanging a single head's query, keys or values, nats", "bold")
            yield full_table(SCAN_COLUMNS, found.scan_rows())
        yield from (Text(note, "dim") for note in found.notes())


def page(found: TwoTowers) -> tuple[str, dict[str, Any]]:
    """Return the page's template and its contents."""
    return "two_towers.html.j2", {
        "title": f"{found.model}: queries, keys and values exchanged",
        "found": found,
        "table": _table(found),
        "scan": text_table(SCAN_COLUMNS, found.scan_rows()) if found.scan is not None else None,
        "chosen": "Found by a scan on other prompts." if found.scan is not None else "Selected.",
        "command": "",
        "behavior": "",
    }


def _table(found: TwoTowers) -> Table:
    """Return the page's table, with bars for the log-odds lost."""
    reach = largest([interval.value for interval in found.lost.values()])
    rows: list[list[Cell]] = []
    for (name, predicted, _, *rest), one in zip(found.rows(), found.exchanges, strict=True):
        rows.append([name, predicted, Bar.signed(found.lost[one.name].value, reach), *rest])
    return text_table(COLUMNS, rows, numbers=2)
