"""Verdicts: from an effect and its interval to supported, not supported or undecided; and from several to one.

The rules, fixed before results are looked at, are in docs/verdicts.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from experiments.lab.intervals import Bounds, Estimate, holm, mean_estimate

Outcome = Literal["supported", "not supported", "undecided"]

ALPHA = 0.05
SHARE: Bounds = (0.0, 1.0)
CHANGE: Bounds = (-1.0, 1.0)
"""Bounds of a share, and of the difference of two."""


@dataclass(frozen=True)
class Verdict:
    """What the data say about a claim: an effect in `unit` with its 95 % interval, and the outcome with its reason.

    Of a claim of several parts, the effect is that of the part that decided it: where all hold, of the least sure one.
    """

    outcome: Outcome
    effect: float
    low: float
    high: float
    unit: str
    reason: str
    p: float = math.nan
    """Of the outcome, two-sided, allowing for the claim's parts; not for other claims (`adjusted`)."""


def judge(
    per_prompt: pd.Series | Sequence[float] | np.ndarray,
    *,
    least: float,
    unit: str,
    what: str,
    bounds: Bounds | None = None,
) -> Verdict:
    """Whether the mean of one number per prompt exceeds `least`, the smallest effect worth the claim.

    A Series (`frames.by_prompt`) names the clusters of its prompts, which are drawn whole; the numbers of a plain array
    count as independent. Prompts without a value (NaN) are left out; fewer than two clusters leave it undecided.
    """
    return verdict(mean_estimate(per_prompt, bounds=bounds), least=least, unit=unit, what=what)


def verdict(estimate: Estimate, *, least: float, unit: str, what: str) -> Verdict:
    """Supported if the whole 95 % interval lies above `least`, not supported if it lies below, else undecided.

    `what` names the effect in the reason.
    """
    effect, low, high = estimate.value, estimate.low, estimate.high
    if estimate.clusters < 2 or not all(map(math.isfinite, (effect, low, high))):
        reason = f"{what}: {estimate.clusters} different queries are too few, or have no value, to tell"
        return Verdict("undecided", effect, math.nan, math.nan, unit, reason, 1.0)
    p = estimate.p(least)
    outcome: Outcome = "undecided" if p >= ALPHA else "supported" if effect > least else "not supported"
    where = {"supported": "above", "not supported": "below", "undecided": "not clearly on one side of"}[outcome]
    reason = f"{what} is {effect:.3g} {unit} [{low:.3g}, {high:.3g}], {where} {least:.3g}"
    return Verdict(outcome, effect, low, high, unit, reason, p)


def all_of(first: Verdict, *others: Verdict) -> Verdict:
    """A claim that needs several: supported if all are, not supported if one is not, allowing for their number.

    p: the largest where all are supported; for "not supported" the smallest times the number of parts, since each part
    is a chance to fail. The effect is that of the part whose p it is.
    """
    parts = (first, *others)
    if all(part.outcome == "supported" for part in parts):
        decider = max(parts, key=lambda part: part.p)
        return _joined(decider, parts, "supported", decider.p)
    failed = [part for part in parts if part.outcome == "not supported"]
    if failed:
        decider = min(failed, key=lambda part: part.p)
        p = min(1.0, len(parts) * decider.p)
        return _joined(decider, parts, "not supported" if p < ALPHA else "undecided", p)
    decider = max((part for part in parts if part.outcome == "undecided"), key=lambda part: part.p)
    return _joined(decider, parts, "undecided", decider.p)


def any_of(first: Verdict, *others: Verdict) -> Verdict:
    """A claim for which one of several is enough, allowing for their number; not supported if none is."""
    parts = (first, *others)
    if all(part.outcome == "not supported" for part in parts):
        decider = max(parts, key=lambda part: part.p)
        return _joined(decider, parts, "not supported", decider.p, word=" or ")
    good = [part for part in parts if part.outcome == "supported"]
    if good:
        decider = min(good, key=lambda part: part.p)
        p = min(1.0, len(parts) * decider.p)
        return _joined(decider, parts, "supported" if p < ALPHA else "undecided", p, word=" or ")
    decider = min((part for part in parts if part.outcome == "undecided"), key=lambda part: part.p)
    return _joined(decider, parts, "undecided", decider.p, word=" or ")


def _joined(decider: Verdict, parts: Sequence[Verdict], outcome: Outcome, p: float, word: str = "; ") -> Verdict:
    """The deciding part's effect; its reason first."""
    reasons = [decider.reason, *(part.reason for part in parts if part is not decider)]
    return replace(decider, outcome=outcome, p=p, reason=word.join(reasons))


def told(judged: Verdict, *notes: str) -> Verdict:
    """The same verdict with something said beside it that does not decide."""
    return replace(judged, reason="; ".join([judged.reason, *notes]))


def cannot_tell(why: str, *, unit: str, estimate: Estimate | None = None) -> Verdict:
    """Undecided because the question does not arise: no bias to reduce, the same heads in both sets."""
    effect, low, high = (estimate.value, estimate.low, estimate.high) if estimate is not None else (math.nan,) * 3
    return Verdict("undecided", effect, low, high, unit, why, 1.0)


def adjusted(verdicts: Sequence[Verdict]) -> list[tuple[Outcome, float]]:
    """Of verdicts given together: what of each is left, and its p-value, with their number allowed for (Holm)."""
    return [
        (one.outcome if p < ALPHA else "undecided", p)
        for one, p in zip(verdicts, holm([one.p for one in verdicts]), strict=True)
    ]
