"""Format probabilities as percentages, and numbers with their sign."""

from collections.abc import Sequence
from decimal import Decimal
from statistics import fmean

SMALLEST = 1e-8
"""Smallest probability that is written as a number."""


def percent(value: float) -> str:
    """Format a probability as a percentage: one decimal, or two significant digits if small; no exponents.

    Example:
        >>> from icl_lens.result.number_format import percent
        >>> percent(0.123), percent(0.000035), percent(0.0), percent(2e-11)
        ('12.3%', '0.0035%', '0.0%', '<0.000001%')
    """
    if value >= 0.001 or value == 0:
        return f"{value:.1%}"
    if value < SMALLEST:
        return "<0.000001%"
    return f"{Decimal(f'{100 * value:.1e}'):f}%"


def mean_and_range(shares: Sequence[float]) -> str:
    """Format the mean of probabilities with their range, as "46.8% (18.8%–64.3%)"; a single one has no range."""
    if not shares:
        return "–"
    mean = percent(fmean(shares))
    return mean if len(shares) == 1 else f"{mean} ({percent(min(shares))}–{percent(max(shares))})"


def signed(value: float, digits: int = 3) -> str:
    """Format a number with its sign, as "+0.123" or "−0.123" (U+2212), and NaN as "–"."""
    return "–" if value != value else f"{value:+.{digits}f}".replace("-", "−")
