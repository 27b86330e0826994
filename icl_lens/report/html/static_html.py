"""Static fallbacks of visualizations: the same numbers as HTML without scripts and style sheets, and as plain text.

They are shown where scripts and frames are stripped, such as in untrusted notebooks and repository viewers. A parser
converts this package's markup in one pass: circuitsvis drawings become tinted tokens with the largest values as text,
the head map becomes a table, and tables are kept. Interactive and purely decorative elements are dropped.
"""

import json
import re
from collections.abc import Sequence
from html import escape
from html.parser import HTMLParser
from typing import Any

from icl_lens.report.html.escaping import safe, signed

# Colors that are legible on white and on black: a translucent tint with the inherited text color.
BLUE, ORANGE, GRAY = "0,114,178", "213,94,0", "128,128,128"
LABELS = ("86,180,233", "230,159,0", "0,158,115", "204,121,167", "216,201,0", "213,94,0")
# Number of largest values listed under a strip; most columns for which the map's cells show numbers.
NAMED, NUMBERED = 5, 16
NOTE = "Static version; trust and run the notebook for the interactive one."

VOID = {"br", "hr", "img", "input", "line", "rect", "circle"}
KEPT = {"p", "b", "table", "thead", "tbody", "tr", "blockquote", "dl", "dt", "dd", "pre", "code", "bdi"}
# Followed by white space, as are cells, so that words stay separate where tags are stripped.
BLOCKS = {"p", "tr", "blockquote", "dt", "dd", "pre"}
HEADINGS = {"h1": "h3", "h2": "h4", "h3": "h5", "h4": "h5"}
SKIPPED_TAGS = {"svg", "figure", "article", "summary", "i", "style"}
SKIPPED_CLASSES = {"bar", "caret", "maphead", "readout", "corner", "hh", "hl", "weights", "scale"}
# Text about clicks or graphical marks, by section.
SKIPPED_IN = {"heads": {"how"}, "removal": {"key"}}


# `nbconvert --sanitize-html` keeps div, span, pre, code, table, tr, td, blockquote, lists, a, b and em, and shows other
# tags as text. Margins are in style attributes, which it silently drops.
_PARAGRAPH, _HEADING = '<div style="margin: 0.5em 0">', '<div style="margin: 1em 0 0.3em; font-size: 1.1em">'
PLAIN = {
    "p": (_PARAGRAPH, "</div>"),
    "h3": (f"{_HEADING}<b>", "</b></div>"),
    "h4": (f"{_HEADING}<b>", "</b></div>"),
    "h5": (f"{_PARAGRAPH}<b>", "</b></div>"),
    "thead": ("", ""),
    "tbody": ("", ""),
    "th": ("<td><b>", "</b></td>"),
    "bdi": ("<span>", "</span>"),
    "dl": ("<div>", "</div>"),
    "dt": ("<div><b>", ": </b>"),
    "dd": ("<span>", "</span></div>"),
}


def static_html(body: str) -> str:
    """Return `body`, markup of this package, as HTML that needs no scripts or style sheets."""
    return re.sub(r"<(/?)(\w+)([^>]*)>", _plain, _static(body))


def _plain(found: re.Match[str]) -> str:
    """Return a tag in terms of tags that sanitizers keep."""
    end, tag, attributes = found.groups()
    if tag not in PLAIN:
        return found[0]
    start, stop = PLAIN[tag]
    return stop if end else start.replace("<td>", f"<td{attributes}>")


def _static(body: str) -> str:
    reader = _Static()
    reader.feed(body)
    reader.close()
    return "".join(reader.out)


def static_text(body: str) -> str:
    """Return `body` as plain text, with tables in aligned columns."""
    reader = _Lines()
    reader.feed(_static(body))
    reader.close()
    return "\n".join(reader.lines())


class _Static(HTMLParser):
    """Parser that appends the static form of a body to `out`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self._ends: list[str] = []  # closing text of each open element
        self._skip = 0  # open elements inside a dropped one
        self._data: str | None = None  # JSON of a circuitsvis placeholder while it is read
        self._component = ""
        self._cells: list[tuple[str, float]] | None = None
        self._section, self._legend = "", False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in VOID:
            return
        named = {name: value or "" for name, value in attrs}
        classes = set(named.get("class", "").split())
        if tag == "p":
            self._legend = "legend" in classes
        if tag == "section":
            self._section = named.get("id", "")
        if self._skip:
            self._skip += 1
            return
        if tag == "script":
            self._data = "" if self._component else None
            self._skip = 1
            return
        if tag in SKIPPED_TAGS or classes & SKIPPED_CLASSES or classes & SKIPPED_IN.get(self._section, set()):
            self._skip = 1
            return
        start, end = self._element(tag, named, classes)
        self.out.append(start)
        self._ends.append(end)

    def _element(self, tag: str, named: dict[str, str], classes: set[str]) -> tuple[str, str]:
        """Return the opening and closing text of an element."""
        if "cv" in classes:
            self._component = named["data-component"]
            return f"<p><em>{safe(named['aria-label'])}</em></p>", ""
        if "cells" in classes:
            self._cells = []
            return "", "map"
        if tag == "button":
            if self._cells is not None and "data-head" in named:
                self._cells.append((named["data-head"], float(named["data-value"])))
                return "", ""
            return "<b>", "</b>"
        if tag == "mark" or "tok" in classes:
            label = next((int(name[1:]) for name in classes if name[0] == "l" and name[1:].isdigit()), None)
            color, share = (GRAY, 0.15) if label is None else (LABELS[label], 0.4)
            space = " " if self._legend else ""
            return f"<span{tint(color, share)}>", f"</span>{space}"
        if tag in HEADINGS:
            return f"<{HEADINGS[tag]}>", f"</{HEADINGS[tag]}>\n"
        if tag in ("td", "th"):
            side = "right" if "n" in classes else "left"
            return f'<{tag} style="text-align: {side}{cell_tint(named, classes)}">', f"</{tag}> "
        if tag in BLOCKS:
            return f"<{tag}>", f"</{tag}>\n"
        return (f"<{tag}>", f"</{tag}>") if tag in KEPT else ("", "")

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if self._skip:
            self._skip -= 1
            if not self._skip and tag == "script" and self._data is not None:
                self.out.append(circuitsvis_fallback(self._component, json.loads(self._data)))
                self._data, self._component = None, ""
            return
        end = self._ends.pop()
        if end == "map":
            end, self._cells = head_map(self._cells or []), None
        self.out.append(end)

    def handle_data(self, data: str) -> None:
        if self._data is not None:
            self._data += data
        elif not self._skip:
            self.out.append(escape(data))


def tint(color: str, share: float) -> str:
    """Return a style attribute that tints the background of text."""
    return f' style="background-color: rgba({color},{share:.2f})"' if share >= 0.01 else ""


def cell_tint(named: dict[str, str], classes: set[str]) -> str:
    """Return the rest of a style attribute for matrix cells, which state their color intensity."""
    style = named.get("style", "")
    if not style.startswith("--v:"):
        return ""
    share = float(style.removeprefix("--v:").rstrip("%")) / 100 * 0.75
    return f"; background-color: rgba({BLUE if 'p' in classes else ORANGE},{share:.2f})"


def circuitsvis_fallback(component: str, data: dict[str, Any]) -> str:
    """Return a static version of a circuitsvis drawing: tokens tinted by value and the largest values as text."""
    props = data["props"]
    if component == "AttentionHeads":  # only the last token's row of a full pattern, where the answer is predicted
        return "".join(
            f"<h5>{safe(name)}, from the last token</h5>"
            f"{strip(props['tokens'], pattern[-1], reach=1.0, marks={}, attention=True)}"
            for name, pattern in zip(props["attentionHeadNames"], props["attention"], strict=True)
        )
    marks = {position: label for position, label, _ in data["marks"]}
    return strip(props["tokens"], props["values"], reach=props["maxValue"], marks=marks, attention=data["dim"])


def strip(
    tokens: Sequence[str], values: Sequence[float | None], *, reach: float, marks: dict[int, int], attention: bool
) -> str:
    """Return tokens tinted by signed value or by attention (labels in `marks` in their color, others gray)."""
    numbers = [value or 0.0 for value in values]
    shown = []
    for i, (token, value) in enumerate(zip(tokens, numbers, strict=True)):
        color = BLUE if value >= 0 else ORANGE
        if attention:
            color = LABELS[marks[i] % len(LABELS)] if marks.get(i, -1) >= 0 else GRAY
        shown.append(f"<span{tint(color, min(1.0, abs(value) / reach) * 0.8)}>{safe(token)}</span>")
    order = sorted(range(len(numbers)), key=lambda i: -abs(numbers[i]))[:NAMED]
    written = "{:.3f}".format if attention else signed
    largest = ", ".join(f"“{safe(tokens[i])}” at {i} {written(numbers[i])}" for i in order if numbers[i])
    return f"<p>{' '.join(shown)}</p><p>Largest: {largest or 'none'}.</p>"


def head_map(cells: Sequence[tuple[str, float]]) -> str:
    """Return increases as a table with heads as rows and layers as columns, like the map on a wide screen."""
    at = {tuple(map(int, name[1:].split("H"))): value for name, value in cells}
    n_layers, n_heads = 1 + max(layer for layer, _ in at), 1 + max(head for _, head in at)
    reach = max(map(abs, at.values())) or 1.0
    rows = ["<tr><th>head \\ layer</th> " + "".join(f"<th>{layer}</th> " for layer in range(n_layers)) + "</tr>\n"]
    for head in range(n_heads):
        row = [f"<tr><th>{head}</th> "]
        for layer in range(n_layers):
            value = at.get((layer, head))
            if value is None:
                row.append("<td></td> ")
                continue
            number = signed(value, 2) if n_layers <= NUMBERED else ""
            color = tint(BLUE if value >= 0 else ORANGE, 0.8 * abs(value) / reach)
            row.append(f'<td title="L{layer}H{head}: {signed(value)}"{color}>{number}</td> ')
        rows.append("".join(row) + "</tr>\n")
    order = sorted(at, key=lambda key: -abs(at[key]))[:NAMED]
    largest = ", ".join(f"L{layer}H{head} {signed(at[layer, head])}" for layer, head in order)
    return f"<table><tbody>{''.join(rows)}</tbody></table><p>Largest: {largest}.</p>"


class _Lines(HTMLParser):
    """Parser that reads static HTML as lines of text with aligned table cells."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._lines: list[str] = []
        self._text = ""
        self._rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("p", "table", "h3", "h4", "h5", "blockquote", "dt", "pre"):
            self._flush()
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th", "dd"):
            self._text = "" if tag != "dd" else f"{self._text}: "

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._rows[-1].append(" ".join(self._text.split()))
            self._text = ""
        elif tag == "table":
            widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
            for row in self._rows:
                cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
                self._lines.append("  ".join(cells).rstrip())
            self._rows = []
        elif tag in ("p", "h3", "h4", "h5", "blockquote", "dd", "pre"):
            self._flush()

    def handle_data(self, data: str) -> None:
        self._text += data

    def _flush(self) -> None:
        self._lines += [line for line in self._text.split("\n") if line.strip()]
        self._text = ""

    def lines(self) -> list[str]:
        """Return all lines read so far."""
        self._flush()
        return self._lines
