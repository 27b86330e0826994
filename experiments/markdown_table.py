"""Tables in Markdown."""

from collections.abc import Iterable


def table(columns: Iterable[str], rows: Iterable[Iterable[str]], *, align: str = "l") -> str:
    """Return a table; `align` has "l" or "r" for each column, and the columns that it does not
    reach are "r"."""
    names = list(columns)
    dashes = ["---" if side == "l" else "---:" for side in align.ljust(len(names), "r")]
    lines = []
    for row in (names, dashes, *rows):
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
