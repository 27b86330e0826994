"""What all figures share: axes with small print, legends above them, colors by sign, and checks of
tables.
"""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from icl_lens.errors import InputError
from icl_lens.report.notebook_figure import NotebookFigure
from icl_lens.report.palette import BLUE, INK, ORANGE, PALE

DIVERGING = LinearSegmentedColormap.from_list("orange_blue", [ORANGE, PALE, BLUE])
"""Scale of signed values: orange below zero, blue above."""
MARKERS = "osD^v<>P"
"""Markers of lines and points, in the order of `palette.LINES`."""

ERROR_BARS: dict[str, Any] = {"error_kw": {"elinewidth": 0.8, "capsize": 1.5, "ecolor": INK}}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of this size, inches."""
    return NotebookFigure(figsize=(width, height), dpi=200, layout="constrained")


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of this size, inches, and its only axes."""
    figure = new_figure(width, height)
    return figure, figure.subplots()


def tidy(ax: Axes) -> None:
    """Remove the frame's upper and right side, and write ticks and names in small print."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=7, length=2)
    for text in (ax.xaxis.label, ax.yaxis.label):
        text.set_fontsize(8)


def legend(ax: Axes, *, ncols: int = 3) -> None:
    """Place the legend above the axes."""
    ax.legend(
        frameon=False,
        fontsize=7,
        handlelength=1,
        columnspacing=1,
        ncols=ncols,
        loc="lower left",
        bbox_to_anchor=(0, 1),
    )


def by_sign(values: np.ndarray) -> list[str]:
    """Return blue for values of at least zero and orange for others."""
    return [BLUE if value >= 0 else ORANGE for value in values]


def error_lengths(rows: pd.DataFrame, values: np.ndarray) -> np.ndarray | None:
    """Return the distances of interval ends from the values, clipped at zero, or None without
    intervals.
    """
    if not {"low", "high"} <= set(rows):
        return None
    low, high = rows["low"].to_numpy(dtype=float), rows["high"].to_numpy(dtype=float)
    return np.clip(np.stack([values - low, high - values]), 0, None)


def signed_mesh(ax: Axes, grid: np.ndarray) -> QuadMesh:
    """Draw signed values on a symmetric scale, as shapes without seams rather than pixels; nothing
    where a value is NaN.
    """
    reach = float(np.abs(grid[np.isfinite(grid)]).max(initial=0.0)) or 1.0
    rows, columns = (np.arange(size + 1) - 0.5 for size in grid.shape)
    style: dict[str, Any] = {"edgecolors": "face", "linewidth": 0.1}
    ax.spines[:].set_visible(False)
    return ax.pcolormesh(columns, rows, grid, cmap=DIVERGING, vmin=-reach, vmax=reach, **style)


def signed_image(figure: Figure, ax: Axes, grid: np.ndarray, label: str) -> None:
    """Draw `signed_mesh` with its color bar, the first row on top."""
    mesh = signed_mesh(ax, grid)
    ax.invert_yaxis()
    ax.tick_params(length=0)
    bar = figure.colorbar(mesh, ax=ax, shrink=0.9, pad=0.03)
    bar.solids.set(rasterized=False, edgecolor="face")  # pyright: ignore[reportOptionalMemberAccess]
    bar.set_label(label, fontsize=7)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def plain(name: str) -> str:
    """Escape dollar signs, which matplotlib interprets as math."""
    return name.replace("$", r"\$")


def to_array(values: Any) -> np.ndarray:
    """Return a tensor, array or nested list as an array of floats."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().float()
    return np.asarray(values, dtype=float)


def require(frame: pd.DataFrame, *columns: str) -> None:
    """Raise InputError for a table without one of these columns, or without rows."""
    missing = [column for column in columns if column not in frame]
    if missing:
        raise InputError(
            f"table must have the columns {', '.join(map(repr, missing))}, got {list(frame.columns)}"
        )
    if frame.empty:
        raise InputError("table must have at least one row, got none")
