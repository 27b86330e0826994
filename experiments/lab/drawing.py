"""What the experiments' figures have in common: interval whiskers, legends, names of heads."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from icl_lens.metrics import bootstrap_interval

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


def whiskers(samples: Iterable[np.ndarray]) -> Float[np.ndarray, "2 item"]:
    """How far the 95 % bootstrap interval of each item's mean over prompts reaches below and above it."""
    reach = [(0.0, 0.0) if len(sample) < 2 else _reach(sample) for sample in samples]
    return np.array(reach).reshape(-1, 2).T


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


def _reach(sample: Shaped[np.ndarray, " prompt"]) -> tuple[float, float]:
    mean, low, high = bootstrap_interval(sample)
    return max(mean - low, 0.0), max(high - mean, 0.0)
