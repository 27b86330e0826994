"""What the experiments' figures have in common: interval whiskers, legends, names of heads."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.frames import by_prompt
from experiments.lab.intervals import mean_estimate
from icl_lens.report.plots import COLUMN

STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.titleweight": "bold",
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "pdf.fonttype": 42,
}
"""Matplotlib settings that all figures are drawn and saved under."""

WHISKERS: dict[str, Any] = {"fmt": "none", "ecolor": "0.2", "elinewidth": 0.8, "capsize": 1.5}
"""For `Axes.errorbar(x, mean, yerr=whiskers(…), **WHISKERS)`."""


Box = tuple[float, float, float, float]
"""Left, low, right, high; in points."""


def whiskers(samples: Iterable[pd.Series | np.ndarray]) -> Float[np.ndarray, "2 item"]:
    """How far the 95 % interval of each item's mean over prompts reaches below and above it; whole queries are drawn.

    Nothing is drawn where there is no interval.
    """
    reach = [_reach(sample) for sample in samples]
    return np.array(reach).reshape(-1, 2).T


def by_name(
    table: pd.DataFrame, value: str, names: Iterable[Any], *, column: str = "name", **wanted: Any
) -> list[pd.Series]:
    """One sample over prompts for each name in a column, for bars with `whiskers`."""
    return [by_prompt(table, value, **{column: name}, **wanted) for name in names]


def means(samples: Iterable[pd.Series | np.ndarray]) -> list[float]:
    """The mean of each sample; NaN, which draws nothing, where it is empty."""
    return [float(np.nanmean(sample)) if len(sample) else math.nan for sample in samples]


def added_to(table: pd.DataFrame) -> str:
    """What heads of this part of a table add to, for an axis: it depends on what they are ranked by."""
    return "log-odds" if "by" in table and {*table["by"]} == {"contrast"} else "log-probability"


def mark_zeros(ax: Axes, at: Iterable[Any], heights: Iterable[Any], *, across: bool = False) -> None:
    """A small ring where a bar has no height to be seen, so that zero does not look like missing data."""
    low, high = ax.get_xlim() if across else ax.get_ylim()
    least = 0.004 * (high - low)
    flat = [place for place, height in zip(at, heights, strict=True) if abs(height) < least]
    if not flat:  # an empty line that is not clipped would take the layout apart
        return
    here = ([0.0] * len(flat), flat) if across else (flat, [0.0] * len(flat))
    ax.plot(
        *here, "o", color="white", markeredgecolor="0.2", markeredgewidth=0.6, markersize=3, zorder=4, clip_on=False
    )


def nothing_to_show(why: str) -> Figure:
    """A figure that says why there is nothing in it."""
    drawn = Figure(figsize=(COLUMN, 1.2), layout="constrained")
    ax = drawn.subplots()
    ax.set_axis_off()
    ax.text(0.5, 0.5, f"Nothing to show:\n{why}", ha="center", va="center", transform=ax.transAxes, fontsize=8)
    return drawn


def legend_below(drawn: Figure, *axes: Axes, columns: int = 4) -> None:
    """One legend for all axes, under them, where it covers nothing."""
    handle_of: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        handle_of.update(zip(labels, handles, strict=True))
    drawn.legend(list(handle_of.values()), list(handle_of), loc="outside lower center", ncols=columns)


def name_heads(ax: Axes, names: Sequence[str]) -> None:
    """Names under groups of bars at 0, 1, 2, …; few groups do not grow wide."""
    ax.set_xticks(range(len(names)), list(names), rotation=60 if len(names) > 8 else 0)
    ax.set_xlim(-0.6, max(len(names), 4) - 0.4)


def name_dots(
    drawn: Figure,
    ax: Axes,
    dots: Mapping[str, tuple[float, float]],
    named: Sequence[str],
    *,
    size: float = 5,
    **text: Any,
) -> None:
    """Names beside some of the dots, best first, where they cover no other name and as few dots as can be.

    Limits and layout of the axes must be final.
    """
    drawn.draw_without_rendering()
    points = (ax.transData.transform(list(dots.values())) * 72 / drawn.dpi).tolist()
    place_of = dict(zip(dots, points, strict=True))
    names: list[Box] = []
    for name in named:
        x, y = place_of[name]
        width = 0.65 * size * len(name)
        places = [(dx, dy) for dx in (2, -2 - width) for dy in (3, -3 - size, 4 + size, -4 - 2 * size)]
        boxes = [(x + dx, y + dy, x + dx + width, y + dy + size) for dx, dy in places]

        def covered(place: int, boxes: list[Box] = boxes) -> int:
            left, low, right, high = boxes[place]
            on_dots = sum(left - 2 < px < right + 2 and low - 2 < py < high + 2 for px, py in points)
            return on_dots + len(points) * sum(_overlap(boxes[place], other) for other in names)

        best = min(range(len(places)), key=covered)
        names.append(boxes[best])
        ax.annotate(name, dots[name], xytext=places[best], textcoords="offset points", fontsize=size, **text)


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _reach(sample: pd.Series | np.ndarray) -> tuple[float, float]:
    found = mean_estimate(sample)
    if not math.isfinite(found.low) or not math.isfinite(found.high):
        return 0.0, 0.0
    return max(found.value - found.low, 0.0), max(found.high - found.value, 0.0)
