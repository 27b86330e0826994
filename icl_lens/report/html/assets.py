"""Scripts and styles of a page: the bundle of the installed circuitsvis package, and this package's own files."""

import base64
import gzip
import re
from functools import cache
from importlib.resources import files

from icl_lens.errors import InputError


@cache
def circuitsvis_bundle() -> str:
    """Return circuitsvis' bundled script without its source map.

    Raises InputError if the installed circuitsvis does not contain the file.
    """
    path = files("circuitsvis") / "dist" / "cdn" / "iife.js"
    if not path.is_file():
        raise InputError("the installed circuitsvis lacks dist/cdn/iife.js; install circuitsvis 1.43 from its wheel")
    source = path.read_text(encoding="utf-8")
    # Browser developer tools would try to load the source map.
    return re.sub(r"\n//# sourceMappingURL=.*", "", source).strip()


@cache
def packed_bundle() -> str:
    """Return the bundle gzipped and base64-encoded, a third of its size; the page's script unpacks it.

    Every visualization embeds its own copy, because notebook cells are run, cleared and copied independently.
    """
    return base64.b64encode(gzip.compress(circuitsvis_bundle().encode(), 9, mtime=0)).decode()


@cache
def read_asset(name: str) -> str:
    """Return a file from this module's folder: `page.css`, `page.js`, `theme.js` or `frame.js`."""
    return (files("icl_lens.report.html") / name).read_text(encoding="utf-8").strip()


def document(title: str, body: str, *, circuitsvis: bool) -> str:
    """Return a complete, self-contained page around `body`. `title` must already be escaped."""
    bundle = f'<script type="text/plain" id="circuitsvis">{packed_bundle()}</script>' if circuitsvis else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{read_asset('page.css')}</style>"
        f"<script>{read_asset('theme.js')}</script></head><body>{body}"
        f"{bundle}<script>{read_asset('page.js')}</script></body></html>\n"
    )
