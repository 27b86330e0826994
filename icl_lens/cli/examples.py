"""The cheat sheet: the shortest call for each purpose, from `cheatsheet.md`.

`icl-lens --examples` prints it; the documentation shows the same file, and tests run its lines.
"""

import re
from importlib.resources import files

INDENT = "  "


def cheat_sheet() -> str:
    """Return the cheat sheet as Markdown: headings of level 2, each with one block of Python or
    shell lines.
    """
    return (files("icl_lens.cli") / "cheatsheet.md").read_text(encoding="utf-8")


def as_text(sheet: str) -> str:
    """Return a sheet as plain text for a terminal: headings, and lines of code below them."""
    lines = []
    for heading, code in re.findall(
        r"^## ([^\n]+)\n\n```\w+\n(.*?)^```$", sheet, re.DOTALL | re.MULTILINE
    ):
        lines += [heading, *(INDENT + line if line else "" for line in code.splitlines()), ""]
    return "\n".join(lines[:-1])
