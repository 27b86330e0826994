"""The scripts and styles of a page: circuitsvis' own bundle from the installed package, and ours."""

import base64
import gzip
import re
from functools import cache
from importlib.resources import files

from icl_lens.errors import InputError


@cache
def circuitsvis_bundle() -> str:
    """circuitsvis' bundled script without its source map; nothing is fetched.

    Raises InputError where the installed circuitsvis has no such file.
    """
    path = files("circuitsvis") / "dist" / "cdn" / "iife.js"
    if not path.is_file():
        raise InputError(
            "the installed circuitsvis has no dist/cdn/iife.js to draw with; install circuitsvis 1.43 from its wheel"
        )
    source = path.read_text(encoding="utf-8")
    # A browser's tools would try to fetch the source map.
    return re.sub(r"\n//# sourceMappingURL=.*", "", source).strip()


@cache
def packed_bundle() -> str:
    """The same in a third of the size: gzip, then base64. A page's own script unpacks it, with nothing but the browser.

    One copy a picture: cells of a notebook are run, cleared and copied one by one, so none may lean on another's.
    """
    return base64.b64encode(gzip.compress(circuitsvis_bundle().encode(), 9, mtime=0)).decode()


@cache
def read_asset(name: str) -> str:
    """One of our own files beside this module: `page.css`, `page.js`, `theme.js`, `frame.js`."""
    return (files("icl_lens.report.html") / name).read_text(encoding="utf-8").strip()


def document(title: str, body: str, *, circuitsvis: bool) -> str:
    """A complete, self-contained page around `body`. `title` must be escaped already."""
    bundle = f'<script type="text/plain" id="circuitsvis">{packed_bundle()}</script>' if circuitsvis else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{read_asset('page.css')}</style><script>{read_asset('theme.js')}</script></head><body>{body}"
        f"{bundle}<script>{read_asset('page.js')}</script></body></html>\n"
    )
