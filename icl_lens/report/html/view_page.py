"""The page of any view: templates/view.html.j2 draws what is said here, table by table."""

import base64
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from icl_lens.models.head import Head
from icl_lens.report.html.elements import Bar, Chip, HeadMap, PageCell, PageDots, PageTable, largest
from icl_lens.result import view as views
from icl_lens.result.view import Column, HeadValues, Section, View, cell_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = "view.html.j2"


def contents(view: View, figures: Mapping[str, "Figure"]) -> dict[str, Any]:
    """Return what the template shows of a view; `figures` has those that its sections name."""
    return {
        "title": f"{view.about}: {view.title}" if view.about else view.title,
        "heading": view.title,
        "about": view.about,
        "sentences": view.sentences,
        "sections": [contents_of_section(section, figures) for section in view.sections],
        "all_rows": None,
        "n_rows": "",
    }


def table(section: Section) -> PageTable:
    """Return a section's table: labels in their colors, floats of some columns with bars."""
    names: list[PageCell] = []
    for column in section.columns:
        names.append(f"#{column.name}" if column.is_number else column.name)
    scale = _scale(section)
    rows: list[list[PageCell]] = []
    for row in section.rows:
        cells: list[PageCell] = []
        for cell, column in zip(row, section.columns, strict=True):
            cells.append(_cell(cell, column, scale))
        rows.append(cells)
    return PageTable(names, rows, _style(section))


def contents_of_section(section: Section, figures: Mapping[str, "Figure"]) -> dict[str, Any]:
    """Return what templates show of a section."""
    return {
        "id": re.sub(r"\W+", "-", section.title.lower()).strip("-"),
        "title": section.title,
        "explanation": section.explanation,
        "figure": _image(figures[section.figure]) if section.figure else None,
        "map": None if section.head_map is None else _head_map(section.head_map),
        "table": table(section) if section.columns else None,
        "n_more": section.n_more,
        "full_table": section.full_table,
        "notes": section.notes,
        "has_dots": any(isinstance(cell, views.Dots) for row in section.rows for cell in row),
        "quote": [_quoted(piece) for piece in section.quote],
        "code": section.code,
    }


def _quoted(piece: str | views.Label) -> tuple[str, Chip | None]:
    if isinstance(piece, views.Label):
        return piece.text, Chip(piece.text, piece.index)
    return piece, None


def _style(section: Section) -> str:
    """Return the table's CSS class: the last column of one with dots takes its width."""
    for row in section.rows:
        if isinstance(row[-1], views.Dots):
            return "removal"
    return "located"


def _scale(section: Section) -> float:
    """Return the largest size of a number with a bar: all bars of a table have one scale."""
    numbers = []
    for row in section.rows:
        for cell, column in zip(row, section.columns, strict=True):
            if column.has_bars and isinstance(cell, float):
                numbers.append(cell)
    return largest(numbers)


def _cell(cell: views.Cell, column: Column, scale: float) -> PageCell:
    if isinstance(cell, views.Label):
        return Chip(cell.text, cell.index)
    if isinstance(cell, views.Dots):
        return PageDots(cell.before, cell.after, cell.draws)
    text = cell_text(cell, column)
    if column.has_bars and isinstance(cell, float) and cell == cell:
        return Bar(text, abs(cell) / scale, "p" if cell >= 0 else "n")
    return text


def _head_map(head_map: HeadValues) -> HeadMap:
    marked = {Head(layer, head) for layer, head in head_map.marked}
    return HeadMap(head_map.values, marked, head_map.name, unit="")


def _image(figure: "Figure") -> dict[str, Any]:
    """Return a figure for both color schemes, and the width at which its names are as large as the
    page's text.
    """
    from icl_lens.report.notebook_figure import transparent_png

    png = base64.b64encode(transparent_png(figure)).decode("ascii")
    return {"url": f"data:image/png;base64,{png}", "width": round(125 * figure.get_figwidth())}
