"""Matplotlib figures from tidy tables or arrays; functions return a Figure and neither show nor
save it.

Every function takes `width` in inches: `COLUMN` (3.25, one of a paper's two columns) or `PAGE`
(5.5, the page of a paper with one column). Text has its final size there: include the file without
scaling it. `savefig("heads.pdf")` embeds the fonts; in an SVG file, text is drawn as outlines.
Colors are from the Okabe-Ito palette or a diverging orange-white-blue scale, both safe for
color-vision deficiency; lines also differ in their markers. In a notebook, figures have no
background and are legible in light and dark themes; saved files are black on white.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from icl_lens.analyses.explanation.reports import n_largest
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_TOP
from icl_lens.report.atlas_maps import atlas as atlas
from icl_lens.report.axes import (
    DIVERGING,
    ERROR_BARS,
    MARKERS,
    by_sign,
    error_lengths,
    legend,
    new_axes,
    new_figure,
    plain,
    require,
    signed_image,
    tidy,
    to_array,
)
from icl_lens.report.circuit_graph import circuit as circuit
from icl_lens.report.curves import ablation_curve as ablation_curve
from icl_lens.report.curves import circuit_curve as circuit_curve
from icl_lens.report.curves import curves as curves
from icl_lens.report.notebook_figure import COLUMN
from icl_lens.report.notebook_figure import PAGE as PAGE
from icl_lens.report.palette import BLUE, FILLS, GRAY, LINES

__all__ = [
    "COLUMN",
    "PAGE",
    "ablation_curve",
    "atlas",
    "attention_scatter",
    "circuit",
    "circuit_curve",
    "curves",
    "exchanges",
    "explanation_figures",
    "head_heatmap",
    "head_scatter",
    "label_attention_bars",
    "layer_bars",
    "similarity_matrix",
    "top_head_bars",
    "trace",
    "writer_pairs",
]


def __dir__() -> list[str]:
    return __all__


_INCREASE = "log-probability increase (nats)"
_LABELS = {
    "increase": _INCREASE,
    "contrast": "contrast (nats)",
    "effect": "effect of zeroing (nats)",
    "exchange": "effect of exchanging the query (nats)",
}


def layer_bars(
    layers: pd.DataFrame,
    *,
    value: str = "increase",
    label: str | None = None,
    width: float = COLUMN,
) -> Figure:
    """Plot what attention and FFNs add by layer (nats) in two panels with a shared scale, with
    intervals if given.

    `layers` has columns layer, component ("attn" | "ffn") and `value`, optionally low and high;
    rows of several prompts are averaged. `label` is by default the name of the column. Raise
    InputError for missing columns or an empty table.
    """
    require(layers, "layer", "component", value)
    figure = new_figure(width, 0.75 * width)
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    columns = [column for column in (value, "low", "high") if column in layers]
    for ax, (component, name) in zip(axes, (("attn", "attention"), ("ffn", "FFN")), strict=True):
        means: Any = layers[layers["component"] == component].groupby("layer")[columns].mean()
        values = means[value].to_numpy(dtype=float)
        errors = error_lengths(means, values)
        ax.bar(
            means.index.to_numpy(),
            values,
            width=0.75,
            color=by_sign(values),
            yerr=errors,
            **ERROR_BARS,
        )
        ax.axhline(0, color=GRAY, linewidth=0.6)
        ax.set_title(name, loc="left", fontsize=8)
        tidy(ax)
    axes[1].set_xlabel("layer")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supylabel(_LABELS.get(value, value) if label is None else label, fontsize=8)
    return figure


def head_heatmap(
    heads: pd.DataFrame | Any,
    *,
    value: str = "increase",
    label: str | None = None,
    width: float = COLUMN,
) -> Figure:
    """Plot values by layer and head on a symmetric scale, orange below zero and blue above (alike
    in gray prints).

    `heads` is a [layer head] array, or a table with columns layer, head and `value` (rows of
    several prompts are averaged). `label` says what the values are, with their unit; by default,
    the scale has the name of the table's column, and no name for an array, whose quantity only you
    know. Raise InputError for missing columns, an empty table, or an array of another shape.
    """
    if isinstance(heads, pd.DataFrame):
        label = _LABELS.get(value, value) if label is None else label
        require(heads, "layer", "head", value)
        grid = heads.pivot_table(
            index="layer", columns="head", values=value, aggfunc="mean"
        ).to_numpy()
    else:
        grid = to_array(heads)
        if grid.ndim != 2:
            raise InputError(
                f"heads must have shape [layer head], got {list(grid.shape)}; pass one value per head"
            )
    n_layers, n_heads = grid.shape
    figure, ax = new_axes(width, min(max(width * n_heads / n_layers * 0.8 + 0.8, 1.8), 1.3 * width))
    signed_image(figure, ax, grid.T, label or "")
    ax.set_xlabel("layer", fontsize=8)
    ax.set_ylabel("head", fontsize=8)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    ax.tick_params(labelsize=7)
    return figure


def similarity_matrix(
    values: Any,
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    label: str = "score",
    width: float = COLUMN,
) -> Figure:
    """Plot a head's scores of queries and keys, `values` [query key], orange below zero and blue
    above.

    Rows and columns keep their order; group words by class so that a metric that distinguishes
    classes shows blocks. Raise InputError if the sizes do not match.
    """
    grid = to_array(values)
    if grid.shape != (len(queries), len(keys)):
        raise InputError(
            f"values must have shape [query key] = {[len(queries), len(keys)]}, got {list(grid.shape)}; pass one row "
            "per query and one column per key"
        )
    figure, ax = new_axes(width, min(max(width * len(queries) / len(keys), 1.5), 1.6 * width))
    signed_image(figure, ax, grid, label)
    font_size = 6 if max(grid.shape) <= 24 else 4
    ax.set_xticks(range(len(keys)), [plain(key) for key in keys], fontsize=font_size, rotation=90)
    ax.set_yticks(range(len(queries)), [plain(query) for query in queries], fontsize=font_size)
    ax.set_xlabel("key", fontsize=8)
    ax.set_ylabel("query", fontsize=8)
    return figure


def top_head_bars(
    heads: pd.DataFrame,
    *,
    k: int = N_TOP,
    value: str = "increase",
    label: str | None = None,
    width: float = COLUMN,
) -> Figure:
    """Plot the `k` heads with the largest values, best on top, with intervals if the table has
    `low` and `high`.

    Columns: name (L22H0) and `value`, optionally low and high. `label` is by default the name of
    the column. Raise InputError for missing columns or an empty table.
    """
    require(heads, "name", value)
    best = heads.nlargest(k, value).iloc[::-1]
    figure, ax = new_axes(width, 0.55 + 0.16 * len(best))
    values = best[value].to_numpy(dtype=float)
    errors = error_lengths(best, values)
    ax.barh(range(len(best)), values, height=0.7, color=by_sign(values), xerr=errors, **ERROR_BARS)
    ax.set_yticks(range(len(best)), best["name"], fontsize=7)
    ax.axvline(0, color=GRAY, linewidth=0.6)
    ax.set_xlabel(_LABELS.get(value, value) if label is None else label)
    ax.margins(y=0.02)
    tidy(ax)
    return figure


def label_attention_bars(
    attention: pd.DataFrame,
    *,
    group: str = "is_answer",
    names: Mapping[Any, str] | None = None,
    width: float = COLUMN,
) -> Figure:
    """Plot attention probability on true and false labels as a pair of bars per head, with
    intervals if given.

    Columns: name, attention and `group` (default: is_answer, whether a label is the answer),
    optionally low and high. Rows with the same head and group are averaged. Heads keep the table's
    order. `names` maps groups to legend labels. Raise InputError for missing columns or an empty
    table.
    """
    require(attention, "name", "attention", group)
    names = names or {True: "true label", False: "false label"}
    heads = list(dict.fromkeys(attention["name"]))
    groups = sorted(attention[group].unique(), reverse=True)
    columns = [column for column in ("attention", "low", "high") if column in attention]
    figure, ax = new_axes(width, 0.62 * width)
    bar_width = 0.8 / len(groups)
    for i, (key, color) in enumerate(zip(groups, cycle(FILLS), strict=False)):
        means: Any = attention[attention[group] == key].groupby("name")[columns].mean()
        rows = means.reindex(heads)
        values = rows["attention"].to_numpy(dtype=float)
        at = np.arange(len(heads)) + (i - (len(groups) - 1) / 2) * bar_width
        label, errors = names.get(key, str(key)), error_lengths(rows, values)
        ax.bar(at, values, bar_width, color=color, label=label, yerr=errors, **ERROR_BARS)
    ax.set_xticks(range(len(heads)), heads, fontsize=7, rotation=90 if len(heads) > 6 else 0)
    ax.set_ylabel("attention probability")
    ax.set_ylim(bottom=0)
    legend(ax)
    tidy(ax)
    return figure


def attention_scatter(
    parts: pd.DataFrame,
    *,
    hue: str | None = None,
    names: Mapping[Any, str] | None = None,
    width: float = COLUMN,
) -> Figure:
    """Plot log-probability increase (nats) over attention probability, one point per row.

    Columns: attention, increase, and `hue` (if given) for color and marker. Raise InputError for
    missing columns or an empty table.
    """
    require(parts, "attention", "increase", *([hue] if hue else []))
    figure, ax = new_axes(width, 0.8 * width)
    groups = [(None, parts)] if hue is None else list(parts.groupby(hue, sort=False))
    for (key, rows), color, marker in zip(groups, cycle(LINES), cycle(MARKERS), strict=False):
        label = None if key is None else (names or {}).get(key, str(key))
        style: dict[str, Any] = {"color": color, "marker": marker, "label": label}
        ax.scatter(rows["attention"], rows["increase"], s=12, alpha=0.75, linewidths=0, **style)
    ax.axhline(0, color=GRAY, linewidth=0.6)
    ax.set_xlabel("attention probability")
    ax.set_ylabel(_INCREASE)
    ax.set_xlim(left=0)
    if hue is not None:
        legend(ax)
    tidy(ax)
    return figure


def head_scatter(
    heads: pd.DataFrame,
    *,
    names: tuple[str, str] = ("A", "B"),
    k: int = 5,
    label: str = "score",
    width: float = COLUMN,
) -> Figure:
    """Plot each head's score in B over its score in A, with the line of equal scores; label the `k`
    that differ most.

    A and B are two prompts or two models. Columns: name (L22H0), a, b, optionally low and high, the
    interval of b − a, which is drawn around b. Both axes have one scale. Raise InputError for
    missing columns or an empty table.
    """
    require(heads, "name", "a", "b")
    figure, ax = new_axes(width, width)
    a, b = (heads[name].to_numpy(dtype=float) for name in ("a", "b"))
    errors = error_lengths(heads, b - a)
    ends = [a, b] if errors is None else [a, b - errors[0], b + errors[1]]
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    margin = 0.1 * (high - low) or 1.0
    low, high = low - margin, high + margin
    ax.axline((low, low), slope=1, color=GRAY, linewidth=0.6)
    ax.errorbar(a, b, yerr=errors, fmt="none", elinewidth=0.8, ecolor=BLUE, alpha=0.6)
    ax.scatter(a, b, s=10, color=BLUE, alpha=0.6, linewidths=0)
    most = np.argsort(-np.abs(b - a), kind="stable")[:k]
    points_per_unit = 0.8 * 72 * width / (high - low)
    for i, place in zip(
        most, _label_places(points_per_unit * np.stack([a, b], axis=1), most), strict=True
    ):
        style: dict[str, Any] = {"ha": "left" if place[0] > 0 else "right", "va": "center"}
        ax.annotate(
            heads["name"].iloc[i],
            (a[i], b[i]),
            place,
            textcoords="offset points",
            fontsize=6,
            **style,
        )
    ax.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    ax.set_xlabel(f"{plain(names[0])}: {label}")
    ax.set_ylabel(f"{plain(names[1])}: {label}")
    tidy(ax)
    return figure


def _label_places(points: np.ndarray, labeled: np.ndarray) -> list[tuple[float, float]]:
    """Return where each label is, next to its point, in points: where it covers the fewest points
    and labels.
    """
    size = np.array([20.0, 6.0])  # of a name in small print
    options = [(x, y) for y, x in product((0.0, 5.0, -5.0, 10.0, -10.0), (4.0, -4.0))]
    taken = [*points]
    places = []
    for i in labeled:
        centers = [points[i] + (x + np.sign(x) * size[0] / 2, y) for x, y in options]
        n_covered = []
        for center in centers:
            is_near = np.abs(np.array(taken) - center) < size
            n_covered.append(int(is_near.all(1).sum()))
        best = int(np.argmin(n_covered))
        taken += [centers[best] + (shift, 0) for shift in (-size[0] / 2, 0, size[0] / 2)]
        places.append(options[best])
    return places


def writer_pairs(
    parts: pd.DataFrame,
    *,
    name: str | None = None,
    n: int = 6,
    n_pairs: int = 8,
    width: float = COLUMN,
) -> Figure:
    """Plot why a head attends: its strongest query writers left, key writers right, and their
    strongest pairs between.

    A writer is an earlier component that adds to the residual stream: the embedding, a head, an FFN
    or the biases. `parts` is `MeanScoreParts.to_frame()` or `explanation.to_frame("why")`: columns
    name, side ("query", "key" or "pair"), writer and value, optionally low and high (interval).
    `name` selects a head, by default the first; `n` writers of each side and `n_pairs` pairs among
    them are shown. Blue parts raise the score difference, orange ones lower it; the width of a line
    is the size of a pair. Raise InputError for missing columns, or a head without query and key
    parts.
    """
    require(parts, "name", "side", "writer", "value")
    name = parts["name"].iloc[0] if name is None else name
    of_head: Any = parts[parts["name"] == name]
    sides = [
        of_head[of_head["side"] == side].sort_values("value", key=abs, ascending=False)[:n]
        for side in ("query", "key")
    ]
    if any(side.empty for side in sides):
        raise InputError(
            f"table must have query and key parts of {name!r}; pass the name of a head in the table"
        )
    rows = max(map(len, sides))
    figure = new_figure(width, 0.6 + 0.17 * rows)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 0.7, 1))
    columns = ["value", *({"low", "high"} & set(parts))]
    ends = np.concatenate([side[columns].to_numpy(dtype=float).ravel() for side in sides])
    low, high = min(0.0, 1.05 * float(np.nanmin(ends))), max(0.0, 1.05 * float(np.nanmax(ends)))
    _draw_writers(left, sides[0], "at the last token")
    _draw_writers(right, sides[1], "at the keys")
    left.set_xlim(high, low)  # bars begin next to the names
    right.set_xlim(low, high)
    for ax in (left, right):
        ax.set_ylim(rows - 0.5, -0.5)
    left.yaxis.tick_right()
    left.tick_params(axis="y", length=0)
    middle.set_axis_off()
    middle.set_xlim(0, 1)
    middle.set_ylim(rows - 0.5, -0.5)
    pairs = _strongest_pairs(of_head[of_head["side"] == "pair"], sides)
    for query_row, key_row, value in reversed(pairs[:n_pairs]):
        thickness = 0.4 + 2.6 * abs(value) / abs(pairs[0][2])
        color = by_sign(np.array([value]))[0]
        middle.plot(
            (0, 1),
            (query_row, key_row),
            color=color,
            lw=thickness,
            alpha=0.8,
            solid_capstyle="butt",
        )
    figure.supxlabel(f"{name}: part of the score difference", fontsize=8)
    return figure


def _draw_writers(ax: Axes, side: pd.DataFrame, title: str) -> None:
    """Draw what a side's writers add as bars, the first one on top."""
    values = side["value"].to_numpy(dtype=float)
    errors = error_lengths(side, values)
    places = range(len(side))
    ax.barh(places, values, height=0.65, color=by_sign(values), xerr=errors, **ERROR_BARS)
    ax.set_yticks(places, side["writer"])
    ax.axvline(0, color=GRAY, linewidth=0.6)
    ax.set_title(title, fontsize=8)
    tidy(ax)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _strongest_pairs(
    pairs: pd.DataFrame, sides: Sequence[pd.DataFrame]
) -> list[tuple[int, int, float]]:
    """Return row of the query writer, row of the key writer, and value of each pair, the largest
    first.
    """
    query_rows = {writer: row for row, writer in enumerate(sides[0]["writer"])}
    key_rows = {writer: row for row, writer in enumerate(sides[1]["writer"])}
    placed = []
    for writers, value in pairs[["writer", "value"]].to_numpy():
        query_writer, key_writer = writers.split(" × ")
        if query_writer in query_rows and key_writer in key_rows:
            placed.append((query_rows[query_writer], key_rows[key_writer], float(value)))
    placed.sort(key=lambda pair: abs(pair[2]), reverse=True)
    return placed


def exchanges(table: pd.DataFrame, *, width: float = COLUMN) -> Figure:
    """Plot what each exchange of `il.two_towers` costs the answer (nats), with its interval, next
    to random heads.

    `table` is `TwoTowers.to_frame()`: columns exchanged, predicted ("other" or "same" label),
    log_odds_lost, low, high, random_low and random_high. Filled points are exchanges that give the
    other label if heads are two towers, open ones those that change nothing; gray bars are the
    range of random sets. Raise InputError for missing columns or an empty table.
    """
    require(
        table, "exchanged", "predicted", "log_odds_lost", "low", "high", "random_low", "random_high"
    )
    figure, ax = new_axes(width, 0.75 + 0.17 * len(table))
    at = np.arange(len(table))
    values, low, high = (
        table[name].to_numpy(dtype=float) for name in ("log_odds_lost", "random_low", "random_high")
    )
    errors = error_lengths(table, values)
    ax.barh(
        at,
        high - low,
        0.55,
        left=low,
        color=GRAY,
        edgecolor=GRAY,
        alpha=0.45,
        linewidth=0.8,
        label="random heads",
    )
    is_other = (table["predicted"] == "other").to_numpy()
    for is_filled, name, face in (
        (is_other, "predicted: other label", BLUE),
        (~is_other, "predicted: unchanged", "white"),
    ):
        if is_filled.any():
            style: dict[str, Any] = {
                "markerfacecolor": face,
                "markersize": 4.5,
                "elinewidth": 0.8,
                "capsize": 1.5,
            }
            bars = None if errors is None else errors[:, is_filled]
            ax.errorbar(
                values[is_filled],
                at[is_filled],
                xerr=bars,
                fmt="o",
                color=BLUE,
                label=name,
                **style,
            )
    ax.axvline(0, color=GRAY, linewidth=0.6)
    ax.set_yticks(at, table["exchanged"], fontsize=7)
    ax.invert_yaxis()
    ax.set_xlabel("log-odds lost by the answer (nats)")
    legend(ax, ncols=1)
    tidy(ax)
    return figure


def trace(table: pd.DataFrame, *, value: str = "log_odds_lost", width: float = COLUMN) -> Figure:
    """Plot what each exchange of `il.trace` costs the answer (nats), by role and layer, one map for
    each site.

    `table` is `Trace.to_frame()`: columns site, role, layer and `value` ("difference" is that from
    the control). All maps have one symmetric scale, blue where the answer loses and orange where it
    gains. Raise InputError for missing columns or an empty table.
    """
    require(table, "site", "role", "layer", value)
    sites, roles = list(dict.fromkeys(table["site"])), list(dict.fromkeys(table["role"]))
    layers = sorted(set(table["layer"]))
    figure = new_figure(width, len(sites) * (0.55 + 0.17 * len(roles)) + 0.3)
    axes = figure.subplots(len(sites), 1, squeeze=False)[:, 0]
    reach = float(np.abs(table[value].to_numpy(dtype=float)).max()) or 1.0
    meshes = []
    for ax, site in zip(axes, sites, strict=True):
        of_site = table[table["site"] == site]
        grid = of_site.pivot_table(index="role", columns="layer", values=value)
        rows = grid.loc[roles, layers].to_numpy()
        style: dict[str, Any] = {"edgecolors": "face", "linewidth": 0.1}
        edges = np.arange(len(layers) + 1) - 0.5, np.arange(len(roles) + 1) - 0.5
        mesh = ax.pcolormesh(*edges, rows, cmap=DIVERGING, vmin=-reach, vmax=reach, **style)
        meshes.append(mesh)
        ax.invert_yaxis()
        ax.spines[:].set_visible(False)
        ax.set_yticks(np.arange(len(roles)), list(map(plain, roles)), fontsize=7)
        step = max(1, len(layers) // 8)
        ax.set_xticks(np.arange(0, len(layers), step), layers[::step], fontsize=7)
        ax.tick_params(length=0)
        ax.set_title(site, loc="left", fontsize=8)
    axes[-1].set_xlabel("layer", fontsize=8)
    bar = figure.colorbar(meshes[0], ax=list(axes), shrink=0.9, pad=0.03)
    bar.set_label("beyond control (nats)" if value == "difference" else "log-odds lost (nats)")
    bar.ax.yaxis.label.set_fontsize(7)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def explanation_figures(explanation: Explanation, *, width: float = COLUMN) -> dict[str, Figure]:
    """Return an explanation's figures: "layers", "heads" (heatmap), "top_heads" (those of the
    largest scores) and "why".

    "heads" and "top_heads" show the score that ranks the heads. "why" shows the writers that make
    one head attend: the head passed to `explain` as `why=`, by default the first located one. It is
    omitted if scores could not be split.
    """
    heads, by = explanation.to_frame("heads"), explanation.settings.by
    figures = {
        "layers": layer_bars(explanation.to_frame("layers"), width=width),
        "heads": head_heatmap(heads, value=by, width=width),
        "top_heads": top_head_bars(heads, k=n_largest(explanation), value=by, width=width),
    }
    if any(report.why for report in explanation.heads):
        figures["why"] = writer_pairs(
            explanation.to_frame("why"), name=explanation.settings.why, width=width
        )
    return figures
