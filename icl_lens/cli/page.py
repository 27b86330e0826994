"""Write pages from the command line and open them in the browser."""

import tempfile
import webbrowser
from pathlib import Path

from rich.console import Console

from icl_lens.cli.options import PageOptions


def save_page(page: str, options: PageOptions) -> Path:
    """Write a page to `options.html`, or to a temporary file that is not deleted.

    Raises InputError if the folder is not writable.
    """
    from icl_lens.report.html import write_page

    path = options.html
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="icl-lens-")) / "page.html"
    write_page(page, path)
    return path


def show_page(path: Path, options: PageOptions, console: Console) -> None:
    """Print the page's path and, with `--open`, open it in the browser."""
    console.print(f"Page: {path}", soft_wrap=True)
    if options.open_page and not webbrowser.open(path.resolve().as_uri()):
        console.print("No browser could be started; open the page manually.")
