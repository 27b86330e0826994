"""What the experiments' figures have in common: hues, interval whiskers, a column's width."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from icl_lens.metrics import bootstrap_interval

COLUMN, PAGE = 3.3, 6.8
"""Width of a figure in one column and across the page, inches."""

# Okabe-Ito hues, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#e69f00", "#009e73", "#999999"

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


def whiskers(samples: Iterable[np.ndarray]) -> np.ndarray:
    """[2 item] how far the 95 % bootstrap interval of each item's mean over prompts reaches below and above it."""
    reach = [(0.0, 0.0) if len(sample) < 2 else _reach(sample) for sample in samples]
    return np.array(reach).reshape(-1, 2).T


def _reach(sample: np.ndarray) -> tuple[float, float]:
    mean, low, high = bootstrap_interval(sample)
    return max(mean - low, 0.0), max(high - mean, 0.0)
