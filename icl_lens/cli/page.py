"""Pages from the command line: written where the user says, opened in the browser where the user asks."""

import tempfile
import webbrowser
from pathlib import Path

from rich.console import Console

from icl_lens.cli.options import PageOptions


def save_page(page: str, options: PageOptions) -> Path:
    """Writes a page where the options say, or to a temporary file that stays.

    Raises InputError where the folder does not allow it.
    """
    from icl_lens.report.html import write_page

    path = options.html
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="icl-lens-")) / "page.html"
    write_page(page, path)
    return path


def show_page(path: Path, options: PageOptions, console: Console) -> None:
    """Says where the page is, and opens it if asked."""
    console.print(f"Page: {path}", soft_wrap=True)
    if options.open_page and not webbrowser.open(path.resolve().as_uri()):
        console.print("No browser could be started; open the page by hand.")
