"""Format probabilities as percentages, numbers with their sign, and numbers with their intervals.

All numbers that people read, in a terminal, on a page or in Markdown, are written here, so that each
of them has the same minus sign, U+2212. Data files keep the hyphen that programs read.
"""

import math
from collections.abc import Sequence
from decimal import Decimal
from statistics import fmean

from icl_lens.foundation.intervals import Interval

SMALLEST = 1e-8
"""Smallest probability that is written as a number."""


def percent(value: float) -> str:
    """Format a probability as a percentage: one decimal, or two significant digits if small; no
    exponents.

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
    """Format the mean of probabilities with their range, as "46.8% (18.8%–64.3%)"; a single one has
    no range.
    """
    if not shares:
        return "–"
    mean = percent(fmean(shares))
    return mean if len(shares) == 1 else f"{mean} ({percent(min(shares))}–{percent(max(shares))})"


def signed(value: float, digits: int = 3) -> str:
    """Format a number with its sign, as "+0.123" or "−0.123" (U+2212), and NaN as "–"; zero is
    "+0.000".
    """
    return "–" if value != value else f"{value:+z.{digits}f}".replace("-", "−")


def decimal(value: float, digits: int = 3) -> str:
    """Format a number as "0.123" or "−0.123" (U+2212), and NaN as "–"; zero is "0.000"."""
    return signed(value, digits).removeprefix("+")


def whole_percent(value: float) -> str:
    """Format a share, which may be negative, as "97%" or "−3%" (U+2212), and NaN as "–"."""
    return "–" if value != value else f"{decimal(100 * value, 0)}%"


def signed_ends(low: float, high: float, digits: int = 3) -> str:
    """Format the ends of an interval as "+0.123 … +0.456", and NaN as "–"."""
    return "–" if math.isnan(low) else f"{signed(low, digits)} … {signed(high, digits)}"


def interval_text(
    value: float,
    low: float = math.nan,
    high: float = math.nan,
    *,
    near: Interval | None = None,
    times: int = 1,
    over: str = "",
) -> str:
    """Format a number with its 95% interval: "+0.12 (95% interval +0.05 … +0.19)"; without ends,
    the number alone.

    Numbers have two decimals or more: as many as show two digits of the interval's width, or of
    that of an interval `near` it in the same sentence. `times` multiplies all numbers, such as by
    100 for percentage points. `over` names what the interval is over, if it is not over prompts.

    Example:
        >>> from icl_lens.result.number_format import interval_text
        >>> interval_text(-0.0004, -0.0012, 0.0004), interval_text(-0.0001)
        ('−0.0004 (95% interval −0.0012 … +0.0004)', '+0.00')
    """
    first, last = (low, high) if near is None else (near.low, near.high)
    decimals = interval_decimals(first, last, times=times)
    number = signed(times * value, decimals)
    if low != low:
        return number
    ends = f"{signed(times * low, decimals)} … {signed(times * high, decimals)}"
    over_what = f" over {over}" if over else ""
    return f"{number} (95% interval {ends}{over_what})"


def interval_decimals(low: float, high: float, *, times: int = 1) -> int:
    """Return with how many decimals an interval is written: two, or one for numbers that are
    multiplied, or as many as show two digits of its width.
    """
    width = times * (high - low)
    if not (width > 0 and math.isfinite(width)):
        return 2
    return min(8, max(1 if times > 1 else 2, 1 - math.floor(math.log10(width))))


def joined(names: Sequence[str], word: str = "and") -> str:
    """Return "a", "a and b", or "a, b and c"; `word` is what stands before the last name."""
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
