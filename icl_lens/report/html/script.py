"""The scripts and styles of a page: circuitsvis' own bundle from the installed package, and ours."""

import re
from functools import cache
from importlib.resources import files

from icl_lens.errors import InputError


@cache
def circuitsvis_bundle() -> str:
    """circuitsvis' bundled script, ready to stand once inside a script element; nothing is fetched.

    Raises InputError where the installed circuitsvis has no such file.
    """
    path = files("circuitsvis") / "dist" / "cdn" / "iife.js"
    if not path.is_file():
        raise InputError(
            "the installed circuitsvis has no dist/cdn/iife.js to draw with; install circuitsvis 1.43 from its wheel"
        )
    source = path.read_text(encoding="utf-8")
    # Without its source map, which a browser's tools would try to fetch, and unable to end the element it stands in.
    source = re.sub(r"\n//# sourceMappingURL=.*", "", source)
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--").strip()


@cache
def own(name: str) -> str:
    """One of our own files beside this module: `page.css`, `page.js`."""
    return (files("icl_lens.report.html") / name).read_text(encoding="utf-8").strip()


def document(title: str, body: str, *, circuitsvis: bool) -> str:
    """A complete, self-contained page around `body`. `title` must be escaped already."""
    bundle = f"<script>{circuitsvis_bundle()}</script>" if circuitsvis else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{own('page.css')}</style></head><body>{body}"
        f"{bundle}<script>{own('page.js')}</script></body></html>\n"
    )
