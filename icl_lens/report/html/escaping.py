"""Escape user strings and format numbers for HTML."""

import json
import math
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape, unescape
from typing import Any

# Characters that are invisible or change the text direction, shown as code points. Joiners stay: emoji need them.
_HIDDEN = set("\u00ad\u061c\u200b\u200e\u200f\u2060\ufeff") | {
    chr(code) for start, stop in ((0x202A, 0x202F), (0x2066, 0x206A)) for code in range(start, stop)
}
_BREAKS = {"\n": "↵", "\r": "␍", "\t": "⇥", "\u2028": "↵", "\u2029": "↵", "\u0085": "↵"}
_WORD_JOINER = "\u2060"
N_LABEL_COLORS = 6


def visible(text: str, *, keep: str = "") -> str:
    """Return text with line breaks, control characters, direction marks and lone surrogates as visible symbols.

    Characters in `keep` are unchanged. The result is text and not escaped for HTML.
    """
    return "".join(char if char in keep else _sign(char) for char in text)


def _sign(char: str) -> str:
    if char in _BREAKS:
        return _BREAKS[char]
    if char in _HIDDEN or unicodedata.category(char) in ("Cc", "Cs"):
        return f"⟨U+{ord(char):04X}⟩"
    return char


def safe(text: str) -> str:
    """Return visible, escaped text for HTML content and attributes."""
    return escape(visible(text))


def token(text: str) -> str:
    """Return one token as HTML, isolated so that right-to-left text does not reorder its neighbors."""
    shown = visible(text)
    return isolated(shown if shown.strip() else "␣" * len(shown) or "∅")


def isolated(text: str) -> str:
    """Return text as HTML that cannot reorder its neighbors; ASCII needs no isolation."""
    return safe(text) if text.isascii() else f"<bdi>{safe(text)}</bdi>"


def chip(text: str, label: int | None = None) -> str:
    """Return a token as an inline chip, in its label's color if it belongs to a label."""
    color = "" if label is None or label < 0 else f" {label_class(label)}"
    return f'<span class="tok{color}">{token(text.strip() or text)}</span>'


def label_class(label: int) -> str:
    """Return the CSS class of a label's color; colors repeat after six labels."""
    return f"l{label % N_LABEL_COLORS}"


def for_circuitsvis(text: str) -> str:
    """Return a token for circuitsvis, which inserts tokens as HTML in one place and as text in another.

    An invisible word joiner after every `<` and `&` makes both show the same characters, because no tag or entity can
    start with it.
    """
    shown = visible(text) or "∅"
    return shown.replace("<", "<" + _WORD_JOINER).replace("&", "&" + _WORD_JOINER)


def json_script(value: Any) -> str:
    """Return JSON for a script element, with characters escaped that could end the element or open a comment."""
    text = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    """Round floats to five significant digits; non-finite values become null."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def signed(value: float, digits: int = 3) -> str:
    """Format a number with its sign, as `+0.123` or `−0.123` (U+2212)."""
    return f"{value:+.{digits}f}".replace("-", "−")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """Return an HTML table of HTML cells. Entries of `head` that start with `#` are numeric columns."""
    names = [name.removeprefix("#") for name in head]
    style = ['class="n" ' if name.startswith("#") else "" for name in head]
    header = "".join(f'<th scope="col" {s}>{name}</th>' for name, s in zip(names, style, strict=True))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td {s}data-c="{escape(unescape(_untagged(name)))}">{cell}</td>'
            for name, s, cell in zip(names, style, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _untagged(markup: str) -> str:
    """Return a column's name without tags, for the narrow layout that repeats it in each cell."""
    out, inside = [], False
    for char in markup:
        inside = char == "<" or (inside and char != ">")
        if not inside and char != ">":
            out.append(char)
    return "".join(out)
