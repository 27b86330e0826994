"""A matplotlib figure that is legible in light and dark notebooks, and whose files are fit for a
paper.

A notebook's theme may change after a figure is stored, and an untrusted notebook runs no script
that could adapt it. Therefore the stored image has a transparent background and gray ink with
enough contrast to white and black. Files saved with `savefig` keep black ink on white, as large as
the figure. PDF and PostScript files embed their fonts as TrueType, which journals ask for; in SVG
files, text is drawn as outlines, which need no font. The same figure gives the same bytes.
"""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

COLUMN, PAGE = 3.25, 5.5
"""Widths of figures, inches: one of two columns (as in ICML's papers), or a page of one column
(NeurIPS, ICLR).
"""

FILES: dict[Any, Any] = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.hashsalt": "icl_lens"}
"""Settings of saved files: TrueType fonts, and names within an SVG file that depend on its contents
only.
"""

_NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}

INK = "#777777"
"""Contrast 4.5:1 to white, 4.2:1 to the #111 of JupyterLab's dark theme."""

# A color is ink if no channel exceeds the first value and its channels differ by at most the second.
_MAX_INK_CHANNEL, _MAX_INK_DIFFERENCE = 0.5, 0.06


class NotebookFigure(Figure):
    """A figure that notebooks display on a transparent background, with ink for light and dark
    themes.
    """

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """Save the figure, as matplotlib does, with embedded fonts and without the date."""
        kind = kwargs.get("format") or (
            Path(fname).suffix[1:] if isinstance(fname, str | Path) else ""
        )
        if kind.lower() in _NO_DATE:
            kwargs["metadata"] = {**_NO_DATE[kind.lower()], **(kwargs.get("metadata") or {})}
        with rc_context(FILES):
            super().savefig(fname, **kwargs)

    def _ipython_display_(self) -> None:
        from IPython.display import display  # imported only in IPython

        picture = base64.b64encode(transparent_png(self)).decode("ascii")
        display({"image/png": picture, "text/plain": repr(self)}, raw=True)


def transparent_png(figure: Figure) -> bytes:
    """Return the figure as PNG on a transparent background; the figure itself is unchanged."""
    file = io.BytesIO()
    with _in_gray(figure):
        figure.savefig(file, format="png", dpi=figure.dpi, facecolor="none", edgecolor="none")
    return file.getvalue()


@contextmanager
def _in_gray(figure: Figure) -> Iterator[None]:
    """Make axes transparent and black ink gray inside the block."""
    figure.draw_without_rendering()  # creates the ticks, which are colored individually
    before: list[tuple[Artist, str, Any]] = []

    def change(artist: Artist, name: str, value: Any) -> None:
        before.append((artist, name, getattr(artist, f"get_{name}")()))
        getattr(artist, f"set_{name}")(value)

    try:
        for axes in figure.axes:
            change(axes.patch, "facecolor", "none")
        for artist in figure.findobj():
            for name in _ink_properties(artist):
                if _is_ink(getattr(artist, f"get_{name}")()):
                    change(artist, name, INK)
        yield
    finally:
        for artist, name, value in reversed(before):
            getattr(artist, f"set_{name}")(value)


def _ink_properties(artist: Artist) -> tuple[str, ...]:
    """Return the color properties of an artist that may be ink."""
    if isinstance(artist, Text | LineCollection):
        return ("color",)
    if isinstance(artist, Line2D):
        return ("color", "markeredgecolor")
    return ("edgecolor",) if isinstance(artist, Patch) else ()


def _is_ink(color: Any) -> bool:
    """Return whether a color, or every color of a collection, is a visible black or dark gray."""
    colors = color if isinstance(color, list) or getattr(color, "ndim", 1) == 2 else [color]
    for channels in map(to_rgba, colors):
        *rgb, alpha = channels
        is_gray = max(rgb) - min(rgb) <= _MAX_INK_DIFFERENCE
        if alpha == 0 or max(rgb) > _MAX_INK_CHANNEL or not is_gray:
            return False
    return len(colors) > 0
