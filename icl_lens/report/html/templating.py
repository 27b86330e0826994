"""Render the page templates as self-contained pages and as notebook output.

Each template renders the same data in two versions. The page has scripts and styles; the static
version (`static` in templates) needs neither and uses only the tags that `nbconvert
--sanitize-html` keeps; it is shown where scripts are stripped. All inserted text but `asset` is
automatically escaped, with invisible characters shown as symbols.
"""

import base64
import gzip
import json
import math
import re
import unicodedata
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from icl_lens.errors import InputError
from icl_lens.result.number_format import percent, signed
from icl_lens.result.view import Section
from icl_lens.result.view_text import more_rows

# Characters that are invisible or change the text direction, shown as code points. Emoji need zero-width joiners.
_HIDDEN = set("\u00ad\u061c\u200b\u200e\u200f\u2060\ufeff") | {
    chr(code) for start, stop in ((0x202A, 0x202F), (0x2066, 0x206A)) for code in range(start, stop)
}
_BREAKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", "\u2028": "⏎", "\u2029": "⏎", "\u0085": "⏎"}

# Tints of the static version, by the page's color classes: legible on white and on black.
TINTS = {
    "": "128,128,128",
    "p": "0,114,178",
    "n": "213,94,0",
    "l0": "86,180,233",
    "l1": "230,159,0",
    "l2": "0,158,115",
    "l3": "204,121,167",
    "l4": "216,201,0",
    "l5": "213,94,0",
}


N_LABEL_COLORS = 6


def label_color(label: int | None) -> str:
    """Return the color class of a label, or "" for no label; colors repeat after six labels."""
    return "" if label is None or label < 0 else f"l{label % N_LABEL_COLORS}"


class Prose(str):
    """Text whose line breaks are kept."""


def visible(text: str, *, keep: str = "") -> str:
    """Return text with line breaks, control characters, direction marks and lone surrogates as
    visible symbols.

    Characters in `keep` are unchanged.
    """
    if text.isprintable():
        return text
    return "".join(char if char in keep else _visible_symbol(char) for char in text)


def _visible_symbol(char: str) -> str:
    if char in _BREAKS:
        return _BREAKS[char]
    if char in _HIDDEN or unicodedata.category(char) in ("Cc", "Cs"):
        return f"⟨U+{ord(char):04X}⟩"
    return char


def visible_token(text: str) -> str:
    """Return a token without the spaces around it; white space alone as "␣", and nothing as "∅"."""
    token = visible(text.strip() or text)
    return token if token.strip() else "␣" * len(token) or "∅"


def _finalize(value: Any) -> Any:
    """Make every string that a template inserts visible; strings already escaped by a macro or
    filter are unchanged.
    """
    if isinstance(value, Prose):
        return visible(value, keep="\n")
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _compact_json(value: Any) -> str:
    """Return JSON with floats of five significant digits, and null for those that are not finite."""

    def to_json(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.5g}") if math.isfinite(value) else None
        if isinstance(value, dict):
            return {key: to_json(entry) for key, entry in value.items()}
        return [to_json(entry) for entry in value] if isinstance(value, list | tuple) else value

    return json.dumps(to_json(value), separators=(",", ":"), allow_nan=False)


@cache
def circuitsvis_bundle() -> str:
    """Return circuitsvis' script without its source map, gzipped and base64-encoded; the page's
    script unpacks it.

    Every visualization that circuitsvis draws embeds its own copy, because notebook cells are run,
    cleared and copied independently. Raise InputError if the installed circuitsvis does not contain
    the file.
    """
    path = files("circuitsvis") / "dist" / "cdn" / "iife.js"
    if not path.is_file():
        raise InputError(
            "the installed circuitsvis lacks dist/cdn/iife.js; install circuitsvis 1.43 from its wheel"
        )
    source = path.read_text(encoding="utf-8")
    # Browser developer tools would try to load the source map.
    source = re.sub(r"\n//# sourceMappingURL=.*", "", source).strip()
    return base64.b64encode(gzip.compress(source.encode(), 9, mtime=0)).decode()


@cache
def asset(name: str) -> Markup:
    """Return a style sheet or script of this folder, or "circuitsvis": the only text that templates
    do not escape.
    """
    if name == "circuitsvis":
        return Markup(circuitsvis_bundle())
    return Markup((files("icl_lens.report.html") / name).read_text(encoding="utf-8").strip())


TEMPLATES = Environment(
    loader=PackageLoader("icl_lens.report.html"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_finalize,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.policies["json.dumps_function"] = _compact_json
TEMPLATES.policies["json.dumps_kwargs"] = {}
TEMPLATES.filters |= {
    "percent": percent,
    "signed": signed,
    "prose": Prose,
    "token": visible_token,
    "label_color": label_color,
}
TEMPLATES.globals |= {"asset": asset, "tints": TINTS, "element": False, "circuitsvis": False}


def render_page(template: str, **content: Any) -> str:
    """Return `content` as a self-contained HTML document."""
    return TEMPLATES.get_template(template).render(content, layout="document.html.j2", static=False)


def render_notebook(template: str, *, height: int, **content: Any) -> str:
    """Return the page as a frame of `height` pixels, with the static version for viewers that strip
    scripts.

    The frame isolates the page's scripts, names and styles from the notebook. It grows to its
    content's height if the notebook allows it; otherwise it scrolls. The page's source is kept in
    an HTML attribute until a short script moves it into the frame. Viewers that strip scripts also
    strip unknown attributes, so the source never shows up as text.
    """
    page = render_page(template, **content)
    return TEMPLATES.get_template(template).render(
        content, layout="notebook.html.j2", static=True, page=page, height=height
    )


def render_small_table(title: str, section: Section) -> str:
    """Return a table of a view without scripts or style sheets."""
    return TEMPLATES.get_template("small_table.html.j2").render(
        title=title,
        section=section,
        rows=section.texts(),
        more=more_rows(section),
        right=Markup(' style="text-align: right"'),
    )


def render_static(template: str, **content: Any) -> str:
    """Return the static version alone."""
    return TEMPLATES.get_template(template).render(content, layout="body.html.j2", static=True)


def render_text(template: str, **content: Any) -> str:
    """Return the static version as plain text with aligned columns.

    This relies on the templates putting each table row and each paragraph on its own line.
    """
    body = render_static(template, **content)
    lines = [
        [Markup(cell).striptags() for cell in line.split("</td> ")] for line in body.splitlines()
    ]
    text = []
    for _, group in groupby(filter(any, lines), len):
        rows = list(group)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(text)
