"""Matplotlib figures from tidy tables or arrays; functions return a Figure and neither show nor save it.

Every function takes `width` in inches: `COLUMN` (3.3, one column of a paper) or `PAGE` (6.8). Colors are from the
Okabe-Ito palette or a diverging orange-white-blue scale, both safe for color-vision deficiency. In a notebook, figures
have no background and are legible in light and dark themes; saved files are black on white.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from icl_lens.analyses.explanation import Explanation
from icl_lens.errors import InputError
from icl_lens.locate.circuit import Circuit
from icl_lens.report.circuit_graph import circuit as circuit
from icl_lens.report.notebook_figure import COLUMN, NotebookFigure
from icl_lens.report.notebook_figure import PAGE as PAGE
from icl_lens.report.palette import AMBER, BLUE, GRAY, GREEN, INK, ORANGE, PALE, PINK, SKY

DIVERGING = LinearSegmentedColormap.from_list("orange_blue", [ORANGE, PALE, BLUE])
COLORS = (BLUE, ORANGE, GREEN, PINK, AMBER, SKY, GRAY)
_INCREASE = "log-probability increase (nats)"
_LABELS = {
    "increase": _INCREASE,
    "contrast": "contrast (nats)",
    "effect": "effect of zeroing (nats)",
    "towers": "effect of exchanging the query (nats)",
}


def layer_bars(layers: pd.DataFrame, *, value: str = "increase", width: float = COLUMN) -> Figure:
    """Plot attention and FFN increases by layer (nats) in two panels with a shared scale.

    `layers` has columns layer, component ("attn" | "ffn") and `value`; rows of several prompts are averaged. Raise
    InputError for missing columns or an empty table.
    """
    _require(layers, "layer", "component", value)
    figure = _figure(width, 0.75 * width)
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    for ax, (component, name) in zip(axes, (("attn", "attention"), ("ffn", "FFN")), strict=True):
        mean: Any = layers[layers["component"] == component].groupby("layer")[value].mean()
        values = mean.to_numpy(dtype=float)
        ax.bar(mean.index.to_numpy(), values, width=0.75, color=_by_sign(values))
        ax.axhline(0, color=GRAY, linewidth=0.6)
        ax.set_title(name, loc="left", fontsize=8)
        _tidy(ax)
    axes[1].set_xlabel("layer")
    axes[1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supylabel(_INCREASE, fontsize=8)
    return figure


def head_heatmap(
    heads: pd.DataFrame | Any, *, value: str = "increase", label: str | None = None, width: float = COLUMN
) -> Figure:
    """Plot values by layer and head on a symmetric scale, orange below zero and blue above.

    `heads` is a [layer head] array, or a table with columns layer, head and `value` (rows of several prompts are
    averaged). `label` says what the values are, with their unit; by default, the scale has the name of the table's
    column, and no name for an array, whose quantity only you know. Raise InputError for missing columns, an empty
    table, or an array of another shape.
    """
    if isinstance(heads, pd.DataFrame):
        label = _LABELS.get(value, value) if label is None else label
        _require(heads, "layer", "head", value)
        grid = heads.pivot_table(index="layer", columns="head", values=value, aggfunc="mean").to_numpy()
    else:
        grid = _array(heads)
        if grid.ndim != 2:
            raise InputError(f"heads must have shape [layer head], got {list(grid.shape)}; pass one value per head")
    n_layers, n_heads = grid.shape
    figure, ax = _axes(width, min(max(width * n_heads / n_layers * 0.8 + 0.8, 1.8), 1.3 * width))
    _image(figure, ax, grid.T, label or "")
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
    """Plot a head's scores of queries and keys, `values` [query key], orange below zero and blue above.

    Rows and columns keep their order; group words by class so that a metric that distinguishes classes shows blocks.
    Raise InputError if the sizes do not match.
    """
    grid = _array(values)
    if grid.shape != (len(queries), len(keys)):
        raise InputError(
            f"values must have shape [query key] = {[len(queries), len(keys)]}, got {list(grid.shape)}; pass one row "
            "per query and one column per key"
        )
    figure, ax = _axes(width, min(max(width * len(queries) / len(keys), 1.5), 1.6 * width))
    _image(figure, ax, grid, label)
    font_size = 6 if max(grid.shape) <= 24 else 4
    ax.set_xticks(range(len(keys)), [_plain(key) for key in keys], fontsize=font_size, rotation=90)
    ax.set_yticks(range(len(queries)), [_plain(query) for query in queries], fontsize=font_size)
    ax.set_xlabel("key", fontsize=8)
    ax.set_ylabel("query", fontsize=8)
    return figure


def top_head_bars(
    heads: pd.DataFrame, *, k: int = 20, value: str = "increase", label: str | None = None, width: float = COLUMN
) -> Figure:
    """Plot the `k` heads with the largest values, best on top, with intervals if the table has `low` and `high`.

    Columns: name (L22H0) and `value`, optionally low and high. `label` is by default the name of the column. Raise
    InputError for missing columns or an empty table.
    """
    _require(heads, "name", value)
    best = heads.nlargest(k, value).iloc[::-1]
    figure, ax = _axes(width, 0.55 + 0.16 * len(best))
    values = best[value].to_numpy(dtype=float)
    errors = _error_lengths(best, values)
    ax.barh(range(len(best)), values, height=0.7, color=_by_sign(values), xerr=errors, **_ERROR_BARS)
    ax.set_yticks(range(len(best)), best["name"], fontsize=7)
    ax.axvline(0, color=GRAY, linewidth=0.6)
    ax.set_xlabel(_LABELS.get(value, value) if label is None else label)
    ax.margins(y=0.02)
    _tidy(ax)
    return figure


def label_attention_bars(
    attention: pd.DataFrame,
    *,
    group: str = "is_answer",
    names: Mapping[Any, str] | None = None,
    width: float = COLUMN,
) -> Figure:
    """Plot attention probability on true and false labels as a pair of bars per head, with intervals if given.

    Columns: name, attention and `group` (default: is_answer, whether a label is the answer), optionally low and
    high. Rows with the same head and group are averaged. Heads keep the table's order. `names` maps groups to legend
    labels. Raise InputError for missing columns or an empty table.
    """
    _require(attention, "name", "attention", group)
    names = names or {True: "true label", False: "false label"}
    heads = list(dict.fromkeys(attention["name"]))
    groups = sorted(attention[group].unique(), reverse=True)
    columns = [column for column in ("attention", "low", "high") if column in attention]
    figure, ax = _axes(width, 0.62 * width)
    bar_width = 0.8 / len(groups)
    for i, (key, color) in enumerate(zip(groups, cycle(COLORS), strict=False)):
        means: Any = attention[attention[group] == key].groupby("name")[columns].mean()
        rows = means.reindex(heads)
        values = rows["attention"].to_numpy(dtype=float)
        at = np.arange(len(heads)) + (i - (len(groups) - 1) / 2) * bar_width
        label, errors = names.get(key, str(key)), _error_lengths(rows, values)
        ax.bar(at, values, bar_width, color=color, label=label, yerr=errors, **_ERROR_BARS)
    ax.set_xticks(range(len(heads)), heads, fontsize=7, rotation=90 if len(heads) > 6 else 0)
    ax.set_ylabel("attention probability")
    ax.set_ylim(bottom=0)
    _legend(ax)
    _tidy(ax)
    return figure


def attention_scatter(
    parts: pd.DataFrame, *, hue: str | None = None, names: Mapping[Any, str] | None = None, width: float = COLUMN
) -> Figure:
    """Plot log-probability increase (nats) over attention probability, one point per row.

    Columns: attention, increase, and `hue` (if given) for color and marker. Raise InputError for missing columns or
    an empty table.
    """
    _require(parts, "attention", "increase", *([hue] if hue else []))
    figure, ax = _axes(width, 0.8 * width)
    groups = [(None, parts)] if hue is None else list(parts.groupby(hue, sort=False))
    for (key, rows), color, marker in zip(groups, cycle(COLORS), cycle("osD^v<>P"), strict=False):
        label = None if key is None else (names or {}).get(key, str(key))
        style: dict[str, Any] = {"color": color, "marker": marker, "label": label}
        ax.scatter(rows["attention"], rows["increase"], s=12, alpha=0.75, linewidths=0, **style)
    ax.axhline(0, color=GRAY, linewidth=0.6)
    ax.set_xlabel("attention probability")
    ax.set_ylabel(_INCREASE)
    ax.set_xlim(left=0)
    if hue is not None:
        _legend(ax)
    _tidy(ax)
    return figure


def head_scatter(
    heads: pd.DataFrame,
    *,
    names: tuple[str, str] = ("A", "B"),
    k: int = 5,
    label: str = "score",
    width: float = COLUMN,
) -> Figure:
    """Plot each head's score in B over its score in A, with the line of equal scores; label the `k` that differ most.

    A and B are two prompts or two models. Columns: name (L22H0), a, b. Raise InputError for missing columns or an empty
    table.
    """
    _require(heads, "name", "a", "b")
    figure, ax = _axes(width, width)
    ax.axline((0, 0), slope=1, color=GRAY, linewidth=0.6)
    ax.scatter(heads["a"], heads["b"], s=10, color=BLUE, alpha=0.6, linewidths=0)
    rows = sorted(zip(heads["name"], heads["a"], heads["b"], strict=True), key=lambda row: -abs(row[2] - row[1]))
    for name, x, y in rows[:k]:
        ax.annotate(name, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=6)
    ax.set_xlabel(f"{_plain(names[0])}: {label}")
    ax.set_ylabel(f"{_plain(names[1])}: {label}")
    ax.margins(0.1)
    _tidy(ax)
    return figure


def writer_pairs(
    parts: pd.DataFrame, *, name: str | None = None, n: int = 6, n_pairs: int = 8, width: float = COLUMN
) -> Figure:
    """Plot why a head attends: its strongest query writers left, key writers right, and their strongest pairs between.

    A writer is an earlier component that adds to the residual stream: the embedding, a head, an FFN or the biases.
    `parts` is `MeanScoreParts.to_frame()` or `explanation.to_frame("why")`: columns name, side ("query", "key" or
    "pair"), writer and value, optionally low and high (interval). `name` selects a head, by default the first; `n`
    writers of each side and `n_pairs` pairs among them are shown. Blue parts raise the score difference, orange ones
    lower it; the width of a line is the size of a pair. Raise InputError for missing columns, or a head without query
    and key parts.
    """
    _require(parts, "name", "side", "writer", "value")
    name = parts["name"].iloc[0] if name is None else name
    of_head: Any = parts[parts["name"] == name]
    sides = [
        of_head[of_head["side"] == side].sort_values("value", key=abs, ascending=False)[:n] for side in ("query", "key")
    ]
    if any(side.empty for side in sides):
        raise InputError(f"table must have query and key parts of {name!r}; pass the name of a head in the table")
    rows = max(map(len, sides))
    figure = _figure(width, 0.6 + 0.17 * rows)
    left, middle, right = figure.subplots(1, 3, width_ratios=(1, 0.7, 1))
    ends = np.concatenate(
        [side[["value", *({"low", "high"} & set(parts))]].to_numpy(dtype=float).ravel() for side in sides]
    )
    low, high = min(0.0, 1.05 * float(np.nanmin(ends))), max(0.0, 1.05 * float(np.nanmax(ends)))
    for ax, side, title in ((left, sides[0], "at the last token"), (right, sides[1], "at the keys")):
        values = side["value"].to_numpy(dtype=float)
        errors = _error_lengths(side, values)
        ax.barh(range(len(side)), values, height=0.65, color=_by_sign(values), xerr=errors, **_ERROR_BARS)
        ax.set_yticks(range(len(side)), side["writer"])
        ax.axvline(0, color=GRAY, linewidth=0.6)
        ax.set_title(title, fontsize=8)
        ax.set_xlim(*((high, low) if ax is left else (low, high)))  # bars begin next to the names
        ax.set_ylim(rows - 0.5, -0.5)
        _tidy(ax)
        ax.spines["left"].set_visible(False)
        ax.tick_params(axis="y", length=0)
    left.yaxis.tick_right()
    left.tick_params(axis="y", length=0)
    middle.set_axis_off()
    middle.set_xlim(0, 1)
    middle.set_ylim(rows - 0.5, -0.5)
    query_rows, key_rows = ({writer: row for row, writer in enumerate(side["writer"])} for side in sides)
    pairs = []
    for writer, value in of_head[of_head["side"] == "pair"][["writer", "value"]].to_numpy():
        query, key = writer.split(" × ")
        if query in query_rows and key in key_rows:
            pairs.append((query_rows[query], key_rows[key], float(value)))
    pairs.sort(key=lambda pair: abs(pair[2]), reverse=True)
    for query_row, key_row, value in reversed(pairs[:n_pairs]):
        thickness = 0.4 + 2.6 * abs(value) / abs(pairs[0][2])
        color = _by_sign(np.array([value]))[0]
        middle.plot((0, 1), (query_row, key_row), color=color, lw=thickness, alpha=0.8, solid_capstyle="butt")
    figure.supxlabel(f"{name}: part of the score difference", fontsize=8)
    return figure


def exchanges(table: pd.DataFrame, *, width: float = COLUMN) -> Figure:
    """Plot what each exchange of `il.two_towers` costs the answer (nats), with its interval, next to random heads.

    `table` is `TwoTowers.to_frame()`: columns exchanged, predicted ("other" or "same" label), log_odds_lost, low, high,
    random_low and random_high. Filled points are exchanges that give the other label if heads are two towers,
    open ones those that change nothing; gray bars are the range of random sets. Raise InputError for missing columns or
    an empty table.
    """
    _require(table, "exchanged", "predicted", "log_odds_lost", "low", "high", "random_low", "random_high")
    figure, ax = _axes(width, 0.75 + 0.17 * len(table))
    at = np.arange(len(table))
    values, low, high = (table[name].to_numpy(dtype=float) for name in ("log_odds_lost", "random_low", "random_high"))
    errors = _error_lengths(table, values)
    ax.barh(at, high - low, 0.55, left=low, color=GRAY, alpha=0.45, linewidth=0, label="random heads")
    is_other = (table["predicted"] == "other").to_numpy()
    for chosen, name, face in (
        (is_other, "predicted: other label", BLUE),
        (~is_other, "predicted: unchanged", "white"),
    ):
        if chosen.any():
            style: dict[str, Any] = {"markerfacecolor": face, "markersize": 4.5, "elinewidth": 0.8, "capsize": 1.5}
            bars = None if errors is None else errors[:, chosen]
            ax.errorbar(values[chosen], at[chosen], xerr=bars, fmt="o", color=BLUE, label=name, **style)
    ax.axvline(0, color=GRAY, linewidth=0.6)
    ax.set_yticks(at, table["exchanged"], fontsize=7)
    ax.invert_yaxis()
    ax.set_xlabel("log-odds lost by the answer (nats)")
    _legend(ax, ncols=1)
    _tidy(ax)
    return figure


def circuit_curve(circuit: Circuit, *, width: float = COLUMN) -> Figure:
    """Plot the faithfulness of the strongest edges of `il.locate_circuit` over the share of edges kept (log scale).

    Blue: the strongest edges, with their 95% interval. Gray: random edges with the same number per part, role and
    writer's layer, as the mean and range over random rankings. Raise InputError if faithfulness is undefined, because
    the interval of m(all) − m(none) includes 0.
    """
    if not circuit.is_defined:
        raise InputError("circuit must carry a part of the answer, got an interval of m(all) − m(none) that includes 0")
    rows = circuit.curve
    figure, ax = _axes(width, 0.8 * width)
    share = 100 * rows["share"].to_numpy(dtype=float)
    for middle, low, high, color, label in (
        ("faithfulness", "low", "high", BLUE, "first edges (95% interval)"),
        ("random", "random_low", "random_high", GRAY, f"random edges (mean, range of {circuit.n_random})"),
    ):
        ax.fill_between(share, rows[low], rows[high], color=color, alpha=0.25, linewidth=0)
        ax.plot(share, rows[middle], color=color, marker="o", markersize=2.5, linewidth=1.2, label=label)
    for value in (0, 1):
        ax.axhline(value, color=GRAY, linewidth=0.6, linestyle=":")
    ax.set_xscale("log")
    ax.set_xlim(right=100)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
    ax.minorticks_off()
    ax.set_xlabel(f"edges kept, % of {circuit.n_edges:,}")
    ax.set_ylabel("faithfulness (0: no edge, 1: all)")
    _legend(ax, ncols=1)
    _tidy(ax)
    return figure


def explanation_figures(explanation: Explanation, *, width: float = COLUMN) -> dict[str, Figure]:
    """Return an explanation's figures: "layers", "heads" (heatmap), "top_heads" (located heads) and "why".

    "heads" and "top_heads" show the score that ranks the heads.
    "why" shows the writers that make one head attend: the head passed to `explain` as `why=`, by default the first
    located one. It is omitted if scores could not be split.
    """
    heads, by = explanation.to_frame("heads"), explanation.settings.by
    found = {
        "layers": layer_bars(explanation.to_frame("layers"), width=width),
        "heads": head_heatmap(heads, value=by, width=width),
        "top_heads": top_head_bars(heads, k=len(explanation.heads), value=by, width=width),
    }
    if any(report.why for report in explanation.heads):
        found["why"] = writer_pairs(explanation.to_frame("why"), name=explanation.settings.why, width=width)
    return found


_ERROR_BARS: dict[str, Any] = {"error_kw": {"elinewidth": 0.8, "capsize": 1.5, "ecolor": INK}}


def _figure(width: float, height: float) -> Figure:
    return NotebookFigure(figsize=(width, height), dpi=200, layout="constrained")


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = _figure(width, height)
    return figure, figure.subplots()


def _tidy(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=7, length=2)
    for text in (ax.xaxis.label, ax.yaxis.label):
        text.set_fontsize(8)


def _legend(ax: Axes, *, ncols: int = 3) -> None:
    """Place the legend above the axes."""
    ax.legend(
        frameon=False, fontsize=7, handlelength=1, columnspacing=1, ncols=ncols, loc="lower left", bbox_to_anchor=(0, 1)
    )


def _by_sign(values: np.ndarray) -> list[str]:
    return [BLUE if value >= 0 else ORANGE for value in values]


def _error_lengths(rows: pd.DataFrame, values: np.ndarray) -> np.ndarray | None:
    """Return the distances of interval ends from the values, clipped at zero, or None without intervals."""
    if not {"low", "high"} <= set(rows):
        return None
    low, high = rows["low"].to_numpy(dtype=float), rows["high"].to_numpy(dtype=float)
    return np.clip(np.stack([values - low, high - values]), 0, None)


def _image(figure: Figure, ax: Axes, grid: np.ndarray, label: str) -> None:
    """Draw signed values on a symmetric scale, with its color bar."""
    reach = float(np.nanmax(np.abs(grid))) or 1.0
    image = ax.imshow(grid, cmap=DIVERGING, vmin=-reach, vmax=reach, aspect="auto", interpolation="nearest")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=ax, shrink=0.9, pad=0.03)
    bar.set_label(label, fontsize=7)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def _plain(name: str) -> str:
    """Escape dollar signs, which matplotlib interprets as math."""
    return name.replace("$", r"\$")


def _array(values: Any) -> np.ndarray:
    if hasattr(values, "detach"):
        values = values.detach().cpu().float()
    return np.asarray(values, dtype=float)


def _require(frame: pd.DataFrame, *columns: str) -> None:
    missing = [column for column in columns if column not in frame]
    if missing:
        raise InputError(f"table must have the columns {', '.join(map(repr, missing))}, got {list(frame.columns)}")
    if frame.empty:
        raise InputError("table must have at least one row, got none")
