"""Figures of findings: dots next to their controls, curves, and bars."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from icl_lens.report.palette import AMBER, BLUE, GREEN, ORANGE, PINK, SKY

STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "icl_lens",
}
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, AMBER)
N_COLUMNS = 3
"""Panels in a row."""


def panels(
    table: pd.DataFrame, *, height: float = 2.3, by: Sequence[str] = ("model", "task")
) -> tuple[Figure, list[tuple[Axes, pd.DataFrame]]]:
    """Return a figure with one panel per model and task, and the part of the table that belongs to each."""
    groups: list[tuple[Any, pd.DataFrame]] = list(table.groupby([*by], sort=False))
    rows = -(-len(groups) // N_COLUMNS)
    figure = Figure(figsize=(7.2, height * rows), layout="constrained")
    every = np.atleast_1d(figure.subplots(rows, min(N_COLUMNS, len(groups)), sharey=False, squeeze=False)).flatten()
    for axes in every[len(groups) :]:
        axes.set_visible(False)
    found = []
    for axes, (names, part) in zip(every, groups, strict=False):
        axes.set_title("\n".join(map(str, names)), fontsize=8)
        found.append((axes, part))
    return figure, found


def curves(table: pd.DataFrame, *, x: str, y: str, by: str, labels: tuple[str, str]) -> Figure:
    """Draw y against x, one line per value of `by`, one panel per model and task; `labels` are those of x and y."""
    table = _by_contrast(table)
    figure, parts = panels(table)
    names = [name for name in table[by].unique() if name != "none"]
    for axes, part in parts:
        start = part[part[by] == "none"]
        for color, name in zip(COLORS, names, strict=False):
            line = pd.concat([start, part[part[by] == name]])
            axes.plot(line[x], line[y], "o-", color=color, ms=3, label=name)
        axes.axhline(0, color="#bbbbbb", lw=0.8)
        axes.set_xlabel(labels[0])
    parts[0][0].set_ylabel(labels[1])
    legend_below(figure, parts[0][0], columns=min(3, len(names)))
    return figure


def _label_conditions(axes: Axes, place: int, label: str) -> None:
    """Label the x-axis, and name the conditions only at the first panel of a row."""
    if place % N_COLUMNS:
        axes.set_yticklabels([])
    axes.set_xlabel(fill(label, 20), fontsize=8)


def condition_bars(table: pd.DataFrame, x: str, y: str, *, chance: float, label: str) -> Figure:
    """Draw horizontal bars of y for each value of x, one panel per model and task, with a line at chance."""
    figure, parts = panels(table)
    for i, (axes, part) in enumerate(parts):
        axes.barh(part[x], part[y], color=COLORS[0])
        axes.axvline(chance, color="black", lw=0.8, ls="--")
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
        axes.invert_yaxis()
        _label_conditions(axes, i, label)
    return figure


def accuracy_pairs(details: pd.DataFrame, favored: str, unfavored: str) -> Figure:
    """Draw the columns favored and unfavored by condition as two dots on one line, a panel per model and task."""
    details = _by_contrast(details)
    figure, parts = panels(details, height=2.1)
    low = min(0.5, details[["favored", "unfavored"]].min().min())
    for i, (axes, part) in enumerate(parts):
        axes.hlines(part["condition"], part["unfavored"], part["favored"], color="#bbbbbb", lw=2, zorder=1)
        axes.plot(part["unfavored"], part["condition"], "o", mfc="white", mec=COLORS[1], mew=1.5, ms=8, label=unfavored)
        axes.plot(part["favored"], part["condition"], "o", color=COLORS[0], ms=4.5, label=favored)
        axes.axvline(0.5, color="black", lw=0.8, ls="--")
        axes.set_xlim(low - 0.03, 1.03)
        axes.set_ylim(len(part) - 0.5, -0.5)
        _label_conditions(axes, i, "accuracy between the labels")
    legend_below(figure, parts[0][0], columns=2)
    return figure


def condition_dots(table: pd.DataFrame, x: str, *, label: str, names: tuple[str, str]) -> Figure:
    """Draw a quantity with its interval and its control for each value of x, one panel per model and task.

    `table` has the columns quantity, control, low and high (of the difference), as rows of findings do.
    """
    figure, parts = panels(table, height=max(2.3, 0.9 + 0.2 * len(set(table[x]))))
    for i, (axes, part) in enumerate(parts):
        ends = part["control"] + part["low"], part["control"] + part["high"]
        axes.hlines(part[x], *ends, color=COLORS[0], lw=2)
        axes.plot(part["quantity"], part[x], "o", color=COLORS[0], ms=6, label=names[0])
        axes.plot(part["control"], part[x], "o", mfc="none", mec=COLORS[1], mew=1.3, ms=8, label=names[1])
        axes.axvline(0, color="black", lw=0.8, ls="--")
        axes.margins(y=0.5 / len(set(part[x])))
        axes.invert_yaxis()
        _label_conditions(axes, i, label)
    legend_below(figure, parts[0][0], columns=2)
    return figure


def dots(axes: Axes, table: pd.DataFrame, labels: Sequence[str], *, names: tuple[str, str]) -> None:
    """Draw one labeled line per row: dot = quantity, bar = its interval, hollow dot = control."""
    y = np.arange(len(table))
    quantity, control, low, high = (table[name].to_numpy(float) for name in ("quantity", "control", "low", "high"))
    axes.hlines(y, control + low, control + high, colors=COLORS[0], lw=2)
    axes.plot(quantity, y, "o", color=COLORS[0], ms=6, label=names[0])
    axes.plot(control, y, "o", mfc="white", mec=COLORS[1], mew=1.5, ms=6, label=names[1])
    axes.set_yticks(y, labels, fontsize=7)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.axvline(0, color="#bbbbbb", lw=0.8)


def cell_rows(
    table: pd.DataFrame, columns: int, **options: Any
) -> tuple[Figure, list[tuple[Sequence[Axes], str, pd.DataFrame]]]:
    """Return a figure with one row of panels per model and task: the panels, the row's title, and its part."""
    groups: list[tuple[Any, pd.DataFrame]] = list(table.groupby(["model", "task"], sort=False))
    figure = Figure(figsize=(7.2, 0.5 + 2.1 * len(groups)), layout="constrained")
    every = figure.subplots(len(groups), columns, squeeze=False, **options)
    return figure, [
        ([*row], ", ".join(map(str, names)), part) for row, (names, part) in zip(every, groups, strict=True)
    ]


def legend_below(figure: Figure, *axes: Axes, columns: int = 4) -> None:
    """Put the labels of all these axes below the figure."""
    pairs = [pair for one in axes for pair in zip(*one.get_legend_handles_labels(), strict=True)]
    handles, labels = zip(*pairs, strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _by_contrast(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table without rows for heads located by increase."""
    return table.query("ranking.isna() or ranking == 'contrast'") if "ranking" in table else table


def head_dots(table: pd.DataFrame, series: Mapping[str, str], *, label: str) -> Figure:
    """Draw several numbers of each located head on a logarithmic axis, one panel per model and task.

    `table` has a row per head with its name in "head", and may have other rows; `series` names the columns drawn and
    their legends. The first is filled, the others are hollow.
    """
    figure, parts = panels(table.dropna(subset=[next(iter(series))]))
    styles = zip("osD^", COLORS, strict=False)
    looks = [(marker, color, color if i == 0 else "none") for i, (marker, color) in enumerate(styles)]
    for axes, part in parts:
        for (column, name), (marker, color, face) in zip(series.items(), looks, strict=False):
            size = 6.5 if face == "none" else 5  # hollow ones are drawn around filled ones
            axes.plot(part["head"], part[column], marker, color=color, mfc=face, mew=1.3, ms=size, label=name)
        axes.set_yscale("log")
        axes.tick_params(axis="x", rotation=60, labelsize=7)
        axes.margins(x=0.08)
    parts[0][0].set_ylabel(label, fontsize=8)
    legend_below(figure, parts[0][0], columns=3)
    return figure
