"""Draw the figures of docs/gallery.md with the page's own code: `python docs/refresh.py gallery`.

The page is the only source: its Python blocks run from top to bottom, in a folder like this one, and save the figures
that it shows. `CODE` stores the digest of the code that has drawn the stored figures; tests compare both with the page.
"""

import hashlib
from contextlib import chdir
from pathlib import Path

from examples import code_blocks

DOCS = Path(__file__).parent
PAGE = DOCS / "gallery.md"
FIGURES = DOCS / "gallery"
CODE = FIGURES / "code.sha256"


def digest(page: str) -> str:
    """Return the digest of a page's Python code."""
    return hashlib.sha256("\n".join(code_blocks(page, "python")).encode()).hexdigest()


def run(page: str, folder: Path) -> None:
    """Run a page's Python blocks, one after the other, in `folder`."""
    names: dict[str, object] = {}
    with chdir(folder):
        for number, block in enumerate(code_blocks(page, "python")):
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)


def refresh_gallery() -> None:
    """Draw all figures of the page, and remove those that it no longer draws."""
    page = PAGE.read_text(encoding="utf-8")
    FIGURES.mkdir(exist_ok=True)
    for figure in FIGURES.glob("*.svg"):
        figure.unlink()
    run(page, DOCS)
    CODE.write_text(digest(page) + "\n", encoding="utf-8")
    print(PAGE.name)
