"""Lines with bands: columns over another, ablations over the number of heads, faithfulness over the
share of edges.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from icl_lens.errors import InputError, check_choice
from icl_lens.measures.circuit import Circuit
from icl_lens.measures.controlled_ablation_result import ControlledAblation, Measure
from icl_lens.report.axes import MARKERS, legend, new_axes, require, tidy
from icl_lens.report.notebook_figure import COLUMN
from icl_lens.report.palette import BLUE, GRAY, LINES

_MEASURES: dict[Measure, str] = {
    "log_odds": "log-odds of the answer (nats)",
    "accuracy": "accuracy between the labels",
    "auroc": "AUROC of the labels' log-odds",
    "over_vocabulary": "share with the answer on top",
}


def curves(
    table: pd.DataFrame,
    columns: Mapping[str, str],
    *,
    x: str,
    label: str = "",
    width: float = COLUMN,
) -> Figure:
    """Plot columns of a table over its column `x`, one line each; `columns` maps them to their
    names in the legend.

    A line has a band between the columns with the suffixes "_low" and "_high", if the table has
    both. `label` names the vertical axis. Raise InputError for missing columns, an empty table, or
    no columns.
    """
    if not columns:
        raise InputError("columns must name at least one column of the table, got none")
    require(table, x, *columns)
    figure, ax = new_axes(width, 0.75 * width)
    for (column, name), color, marker in zip(
        columns.items(), cycle(LINES), cycle(MARKERS), strict=False
    ):
        ends = [f"{column}_low", f"{column}_high"]
        band = (table[ends[0]], table[ends[1]]) if {*ends} <= {*table} else None
        _draw_line(ax, table[x], table[column], band, color=color, marker=marker, label=name)
    ax.set_xlabel(x)
    ax.set_ylabel(label)
    if ax.dataLim.y0 >= 0:
        ax.set_ylim(bottom=0)
    legend(ax, ncols=1)
    tidy(ax)
    return figure


def ablation_curve(
    ablations: Sequence[ControlledAblation], *, measure: Measure = "log_odds", width: float = COLUMN
) -> Figure:
    """Plot what ablating more and more heads costs, next to random heads of the same layers.

    `ablations` has one result of `il.ablate_with_controls` for each number of heads, on the same
    prompts. Blue: the chosen heads, with the 95% interval. Gray: the mean and range over random
    sets of as many heads of the same layers. Both begin without ablation. Raise InputError for no
    results, results of different prompts or without random sets, and an unknown measure.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> heads = ["L5H0", "L4H1"]
        >>> ablations = []
        >>> for k in (1, 2):
        ...     ablations.append(il.ablate_with_controls(model, many, heads[:k], n_random=3))
        >>> il.plots.ablation_curve(ablations).axes[0].get_ylabel()
        'log-odds of the answer (nats)'
    """
    check_choice("measure", measure, tuple(_MEASURES))
    ablations = sorted(ablations, key=lambda ablation: len(ablation.heads))
    _check_comparable(ablations)
    intact = ablations[0].to_frame().loc["no ablation"]
    located_rows, random_rows, n_heads = [intact], [intact], [0]
    for ablation in ablations:
        conditions = ablation.to_frame()
        located_rows.append(conditions.loc["heads"])
        random_rows.append(conditions.loc["same layers"])
        n_heads.append(len(ablation.heads))
    located, random = pd.DataFrame(located_rows), pd.DataFrame(random_rows)
    n_sets = len(ablations[0].conditions["same layers"].sets)
    figure, ax = new_axes(width, 0.75 * width)
    band = located[f"{measure}_low"], located[f"{measure}_high"]
    _draw_line(
        ax,
        n_heads,
        located[measure],
        band,
        color=BLUE,
        marker="o",
        label="chosen heads (95% interval)",
    )
    name = f"{n_sets} random sets, same layers (mean, range)"
    band = random[f"{measure}_min"], random[f"{measure}_max"]
    _draw_line(
        ax, n_heads, random[measure], band, color=GRAY, marker="s", label=name, linestyle="--"
    )
    ax.set_xlabel(f"heads {ablations[0].ablated}")
    ax.set_ylabel(_MEASURES[measure])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if measure == "log_odds":
        ax.axhline(0, color=GRAY, linewidth=0.6, linestyle=":")
    legend(ax, ncols=1)
    tidy(ax)
    return figure


def circuit_curve(circuit: Circuit, *, width: float = COLUMN) -> Figure:
    """Plot the faithfulness of the strongest edges of `il.locate_circuit` over the share of edges
    kept (log scale).

    Blue: the strongest edges, with their 95% interval. Gray: random edges with the same number per
    part, role and writer's layer, as the mean and range over random rankings. Raise InputError if
    faithfulness is undefined, because the interval of m(all) − m(none) includes 0.
    """
    if not circuit.is_defined:
        raise InputError(
            "circuit must carry a part of the answer, got an interval of m(all) − m(none) that includes 0"
        )
    rows = circuit.curve
    figure, ax = new_axes(width, 0.8 * width)
    share = 100 * rows["share"]
    band, name = (rows["low"], rows["high"]), "first edges (95% interval)"
    _draw_line(ax, share, rows["faithfulness"], band, color=BLUE, marker="o", label=name)
    name = f"random edges (mean, range of {circuit.n_random})"
    band = rows["random_low"], rows["random_high"]
    _draw_line(ax, share, rows["random"], band, color=GRAY, marker="s", label=name, linestyle="--")
    for value in (0, 1):
        ax.axhline(value, color=GRAY, linewidth=0.6, linestyle=":")
    ax.set_xscale("log")
    ax.set_xlim(right=100)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    ax.minorticks_off()
    ax.set_xlabel(f"edges kept, % of {circuit.n_all_edges:,}")
    ax.set_ylabel("faithfulness (0: no edge, 1: all)")
    legend(ax, ncols=1)
    tidy(ax)
    return figure


def _draw_line(
    ax: Axes, x: Any, y: Any, band: tuple[Any, Any] | None, *, color: str, **style: Any
) -> None:
    """Draw a line with its markers and, if it has one, its band."""
    x = np.asarray(x, dtype=float)
    if band is not None:
        low, high = (np.asarray(end, dtype=float) for end in band)
        ax.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
    ax.plot(x, np.asarray(y, dtype=float), color=color, markersize=2.5, linewidth=1.2, **style)


def _check_comparable(ablations: Sequence[ControlledAblation]) -> None:
    """Raise InputError for no ablations, and for those that differ in more than their heads."""
    if not ablations:
        raise InputError(
            "ablations must have at least one result of il.ablate_with_controls, got none"
        )
    settings = set()
    for ablation in ablations:
        settings.add((ablation.queries, ablation.labels, ablation.ablated, ablation.positions))
        if not ablation.conditions["same layers"].sets:
            raise InputError(
                "results must have random sets; "
                "call il.ablate_with_controls with n_random of at least 1"
            )
    if len(settings) > 1:
        raise InputError(
            "results must be of the same prompts, mode and positions; "
            "ablate more heads of the same batch"
        )
