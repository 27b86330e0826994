"""Strings from users and numbers, made fit for HTML: escaped, visible, and of a fixed form."""

import json
import math
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape, unescape
from typing import Any

# Characters that draw nothing or turn the text around them, in words instead. Joiners stay: emoji need them.
_HIDDEN = set("\u00ad\u061c\u200b\u200e\u200f\u2060\ufeff") | {
    chr(code) for start, stop in ((0x202A, 0x202F), (0x2066, 0x206A)) for code in range(start, stop)
}
_BREAKS = {"\n": "↵", "\r": "␍", "\t": "⇥", "\u2028": "↵", "\u2029": "↵", "\u0085": "↵"}
_WORD_JOINER = "\u2060"
N_LABEL_COLORS = 6


def visible(text: str, *, keep: str = "") -> str:
    """The text with line breaks, controls, direction marks and lone surrogates written as signs anyone can see.

    Characters in `keep` stay as they are. Not escaped yet: this is text, not HTML.
    """
    return "".join(char if char in keep else _sign(char) for char in text)


def _sign(char: str) -> str:
    if char in _BREAKS:
        return _BREAKS[char]
    if char in _HIDDEN or unicodedata.category(char) in ("Cc", "Cs"):
        return f"⟨U+{ord(char):04X}⟩"
    return char


def safe(text: str) -> str:
    """Text for HTML content and attributes: visible and escaped."""
    return escape(visible(text))


def token(text: str) -> str:
    """One token as HTML: isolated, so that right-to-left text does not reorder its neighbors."""
    shown = visible(text)
    return isolated(shown if shown.strip() else "␣" * len(shown) or "∅")


def isolated(text: str) -> str:
    """Text as HTML that cannot reorder its neighbors; ASCII never does."""
    return safe(text) if text.isascii() else f"<bdi>{safe(text)}</bdi>"


def chip(text: str, label: int | None = None) -> str:
    """A token set off from prose; marked with its label's color if it belongs to one."""
    color = "" if label is None or label < 0 else f" {label_class(label)}"
    return f'<span class="tok{color}">{token(text.strip() or text)}</span>'


def label_class(label: int) -> str:
    """The style class of a label's color; colors repeat after six, names stay next to them."""
    return f"l{label % N_LABEL_COLORS}"


def for_circuitsvis(text: str) -> str:
    """A token for circuitsvis, which writes tokens into the page as HTML in one place and as text in another.

    A word joiner (draws nothing) behind every `<` and `&` makes both show the same characters: no tag or entity can
    begin with it.
    """
    shown = visible(text) or "∅"
    return shown.replace("<", "<" + _WORD_JOINER).replace("&", "&" + _WORD_JOINER)


def json_script(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    """Floats to five significant digits, which is more than can be seen; what is not a number becomes null."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def signed(value: float, digits: int = 3) -> str:
    """`+0.123` or `−0.123`, with a real minus sign."""
    return f"{value:+.{digits}f}".replace("-", "−")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    """An HTML table of cells that are HTML already. `head` entries that start with `#` are numeric columns."""
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
    """A column's name without its own tags, for the narrow layout, where each cell carries it."""
    out, inside = [], False
    for char in markup:
        inside = char == "<" or (inside and char != ">")
        if not inside and char != ">":
            out.append(char)
    return "".join(out)
