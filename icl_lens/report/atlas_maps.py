"""The maps of an atlas side by side, with the same axes."""

from collections.abc import Sequence
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from icl_lens.analyses.atlas.head_atlas_result import HeadAtlas
from icl_lens.analyses.atlas.head_score import HeadScore
from icl_lens.report.axes import new_figure, plain, signed_mesh, to_array
from icl_lens.report.notebook_figure import PAGE
from icl_lens.report.palette import INK

MAP_WIDTH = 1.35
"""The smallest width of a map, inches."""
N_LETTERS = 18
"""Letters of a title that fit in an inch."""
TITLE_HEIGHT = 0.42
"""What titles and numbers take of a map's height, inches."""


def atlas(atlas: HeadAtlas, scores: Sequence[str] | None = None, *, width: float = PAGE) -> Figure:
    """Plot the scores of an atlas as maps of layers and heads, side by side with the same axes.

    Each map has a scale of its own, from zero (white) to its largest size, orange below zero and
    blue above; that of an AUROC is white at ½, its chance. The title has the smallest and the
    largest number. A dot marks a head that has the score's kind (`HeadAtlas.kinds`). `scores` are the
    names of the scores (default: all). Raise InputError for a score that the atlas does not have.

    Example:
        >>> figure = il.plots.atlas(il.head_atlas(model, n_sequences=2), ["induction", "copying"])
        >>> [ax.get_title(loc="left").splitlines()[0] for ax in figure.axes]
        ['induction', 'copying (eigenvalues)']
    """
    drawn = list(atlas) if scores is None else [atlas[name] for name in scores]
    n_columns = min(len(drawn), max(1, int(width / MAP_WIDTH)))
    n_rows = -(-len(drawn) // n_columns)
    n_layers, n_heads = atlas.shape
    map_width = width / n_columns
    map_height = min(max(map_width * n_heads / n_layers, 0.5), 1.3 * map_width)
    figure = new_figure(width, n_rows * (map_height + TITLE_HEIGHT) + 0.3)
    axes = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False).flatten()
    for place, ax in enumerate(axes):
        if place >= len(drawn):
            ax.remove()
            continue
        _draw_map(ax, drawn[place], atlas.rate, n_letters=int(N_LETTERS * map_width))
        if place + n_columns >= len(drawn):  # the last of its column
            ax.xaxis.set_tick_params(labelbottom=True)
    axes[0].invert_yaxis()  # of all maps
    figure.supxlabel("layer", fontsize=8)
    figure.supylabel("head", fontsize=8)
    return figure


def _draw_map(ax: Axes, score: HeadScore, rate: float, *, n_letters: int) -> None:
    """Draw one score, with its title and the heads that it names."""
    values = to_array(score.mean)
    center = 0.5 if score.unit == "AUROC" else 0.0
    signed_mesh(ax, values.T - center)
    numbers = "no numbers"
    if np.isfinite(values).any():
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        numbers = f"{score.format(low)} … {score.format(high)}"
    unit = f" {score.unit}" if score.unit in ("nats", "logit", "tokens") else ""
    title = fill(score.title, n_letters)
    ax.set_title(plain(f"{title}\n{numbers}{unit}"), loc="left", fontsize=6.5)
    if heads_of_kind := score.heads_of_kind(rate):
        layers, heads = zip(*heads_of_kind, strict=True)
        ax.scatter(layers, heads, s=2, color=INK, linewidths=0)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    ax.tick_params(labelsize=6, length=0)
