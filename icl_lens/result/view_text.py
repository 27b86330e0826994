"""Write views as plain text, as Markdown and as data for JSON."""

from typing import Any

from icl_lens.result.view import MAX_ROWS, Cell, Dots, Section, View, finite_or_none


def plain_text(view: View) -> str:
    """Return what `print` shows: the sentences, or else the title, and the tables."""
    lines = list(view.sentences or (view.title,))
    for section in view.sections:
        if section.is_printed:
            lines += [section.title] if section.title else []
            lines += table_lines(section.first_rows(MAX_ROWS))
    return "\n".join(lines)


def table_lines(section: Section) -> list[str]:
    """Return a table as lines of text with aligned columns; columns that only a page draws are left
    out.
    """
    places = text_places(section)
    columns = [section.columns[place] for place in places]
    lines = [[column.name for column in columns]]
    for texts in section.texts():
        lines.append([texts[place] for place in places])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligned = []
    for cells in lines:
        padded = []
        for cell, width, column in zip(cells, widths, columns, strict=True):
            padded.append(cell.rjust(width) if column.is_number else cell.ljust(width))
        aligned.append("  ".join(padded).rstrip())
    return aligned + more_rows(section)


def more_rows(section: Section, *, or_file: str = "") -> list[str]:
    """Return a line with the number of rows that are not shown, and what has all; empty if none.

    `or_file` names a file that has them as well.
    """
    if not section.n_more:
        return []
    return [f"… {section.n_more} more rows: {section.full_table}{or_file} has all"]


def markdown(view: View) -> str:
    """Return the view as Markdown: a heading, paragraphs, and a table in each section."""
    paragraphs = [f"# {_escaped(view.title)}", *map(_escaped, view.sentences)]
    for section in view.sections:
        if section.title:
            paragraphs.append(f"## {_escaped(section.title)}")
        if section.quote:
            paragraphs.append(f"> {_escaped(''.join(map(str, section.quote)))}")
        if section.code:
            paragraphs.append(_fenced(section.code))
        if section.columns:
            paragraphs.append("\n".join(_markdown_table(section)))
        paragraphs += map(_escaped, (*more_rows(section), *section.notes))
    return "\n\n".join(paragraphs) + "\n"


def records(view: View) -> dict[str, Any]:
    """Return the view for JSON: numbers as numbers, and None for those that JSON lacks."""
    sections = []
    for section in view.sections:
        places = text_places(section)
        rows = []
        for row in section.rows:
            rows.append([_json_cell(row[place]) for place in places])
        entry = {
            "title": section.title,
            "columns": [section.columns[place].name for place in places],
            "rows": rows,
            "n_rows": len(rows) + section.n_more,
            "notes": list(section.notes),
        }
        sections.append({name: value for name, value in entry.items() if value})
    return {"title": view.title, "sentences": list(view.sentences), "sections": sections}


def text_places(section: Section) -> list[int]:
    """Return the columns that can be written as text, by place."""
    places = []
    for place in range(len(section.columns)):
        cells = [row[place] for row in section.rows]
        if not cells or not all(isinstance(cell, Dots) for cell in cells):
            places.append(place)
    return places


def _markdown_table(section: Section) -> list[str]:
    places = text_places(section)
    columns = [section.columns[place] for place in places]
    rules = ["--:" if column.is_number else ":--" for column in columns]
    lines = [_markdown_row([column.name for column in columns]), f"| {' | '.join(rules)} |"]
    for texts in section.texts():
        lines.append(_markdown_row([texts[place] for place in places]))
    return lines


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Return text as Markdown shows it literally, on one line."""
    for character in "\\`*_[]<>|#":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.splitlines())


def _fenced(code: str) -> str:
    """Return code between fences that are longer than any run of backticks in it."""
    fence = "```"
    while fence in code:
        fence += "`"
    return f"{fence}\n{code}\n{fence}"


def _json_cell(cell: Cell) -> str | int | float | None:
    if isinstance(cell, float):
        return finite_or_none(cell)
    return cell if isinstance(cell, int) else str(cell)
