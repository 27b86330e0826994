"""Draw any view in a terminal: sentences, then each section's table and notes."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from icl_lens.report.palette import AMBER, GREEN, ORANGE, PINK, SKY, YELLOW
from icl_lens.report.terminal import new_table
from icl_lens.result.number_format import joined
from icl_lens.result.view import MAX_ROWS, Column, Label, Section, View
from icl_lens.result.view_text import more_rows, text_places

LABEL_STYLES = tuple(f"bold {color}" for color in (SKY, AMBER, GREEN, PINK, YELLOW, ORANGE))
QUIET = "dim"
MAX_NAME_LINES = 3


@dataclass(frozen=True)
class ViewInTerminal:
    """A view that rich draws; a narrow terminal shows fewer columns."""

    view: View

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        finding, *sentences = self.view.sentences or (self.view.title,)
        yield Text(finding, "bold")
        yield from map(Text, sentences)
        for section in self.view.sections:
            if section.is_printed:
                yield SectionInTerminal(section)


@dataclass(frozen=True)
class SectionInTerminal:
    """A section that rich draws: its title, its table and its notes."""

    section: Section

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield from _section(self.section, console, options)


def label_style(index: int | None) -> str:
    """Return the style of a label's color; empty for no label."""
    return "" if index is None or index < 0 else LABEL_STYLES[index % len(LABEL_STYLES)]


def _section(
    section: Section, console: Console, options: ConsoleOptions
) -> Iterator[RenderableType]:
    section = section.first_rows(MAX_ROWS)
    if section.title:
        yield Text(section.title, "bold")
    places = text_places(section)
    unbounded = options.update(width=10_000)

    def width_of(table: Table) -> int:
        return Measurement.get(console, unbounded, table).maximum

    full_width = width_of(_table(section, places))
    notes = [*more_rows(section, or_file=" or --json"), *section.notes]
    details = [section.columns[place].name for place in places if section.columns[place].is_detail]
    if full_width > options.max_width and details:
        places = [place for place in places if not section.columns[place].is_detail]
        notes.append(f"A terminal of {full_width} columns also shows: {joined(details)}.")
    table = _table(section, places)
    for max_name_lines in range(1, MAX_NAME_LINES):
        wider_table = _table(section, places, max_name_lines)
        if width_of(wider_table) <= options.max_width:
            table = wider_table
            break
    yield table
    for note in notes:
        yield Text(note, QUIET)


def _table(section: Section, places: Sequence[int], max_name_lines: int = MAX_NAME_LINES) -> Table:
    """Return the columns at some places as a table of which only the first column wraps."""
    texts = section.texts()
    left, names = [], []
    for number, place in enumerate(places):
        column = section.columns[place]
        column_texts = [row[place] for row in texts]
        names.append(_broken_name(column, column_texts, max_name_lines))
        if not column.is_number:
            left.append(number)
    table = new_table(*map(Text, names), left=tuple(left))
    for column in table.columns[1:]:
        column.no_wrap = True
    for row, row_texts in zip(section.rows, texts, strict=True):
        cells = []
        for place in places:
            cell = row[place]
            style = label_style(cell.index) if isinstance(cell, Label) else ""
            cells.append(Text(row_texts[place], style))
        table.add_row(*cells)
    return table


def _broken_name(column: Column, texts: Sequence[str], max_lines: int) -> str:
    """Return a column's name in lines of whole words, about as wide as its cells unless that would
    be too many lines.
    """
    longest_word = max(map(len, column.name.split()), default=1)
    width = max([longest_word, *map(len, texts)])
    while True:
        lines = textwrap.wrap(column.name, width, break_long_words=False, break_on_hyphens=False)
        if len(lines) <= max_lines:
            return "\n".join(lines)
        width += 1
