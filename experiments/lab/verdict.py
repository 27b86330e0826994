"""Verdicts: from an effect and its interval to supported, not supported or undecided."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from icl_lens.metrics import bootstrap_interval

Outcome = Literal["supported", "not supported", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What the data say about a claim: an effect in `unit` with its 95 % interval, and the outcome with its reason."""

    outcome: Outcome
    effect: float
    low: float
    high: float
    unit: str
    reason: str


def judge(per_prompt: Sequence[float] | np.ndarray, *, least: float, unit: str, what: str) -> Verdict:
    """Whether the mean of one number per prompt exceeds `least`, the smallest effect worth the claim.

    Supported if the whole 95 % bootstrap interval over prompts lies above `least`, not supported if it lies below,
    undecided if `least` is inside. `what` names the effect in the reason. Prompts without a value (NaN) are left
    out; fewer than two prompts leave it undecided.
    """
    values = np.asarray(per_prompt, dtype=float)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        effect = float(values.mean()) if len(values) else math.nan
        return Verdict("undecided", effect, math.nan, math.nan, unit, f"{what}: {len(values)} prompts are too few")
    effect, low, high = bootstrap_interval(values)
    return verdict(effect, low, high, least=least, unit=unit, what=what)


def verdict(effect: float, low: float, high: float, *, least: float, unit: str, what: str) -> Verdict:
    """`judge` for an effect whose interval is already known."""
    outcome: Outcome = "supported" if low > least else "not supported" if high < least else "undecided"
    where = {"supported": "above", "not supported": "below", "undecided": "on both sides of"}[outcome]
    if not all(map(math.isfinite, (effect, low, high))):
        outcome, where = "undecided", "not comparable with"
    reason = f"{what} is {effect:.3g} {unit} [{low:.3g}, {high:.3g}], {where} {least:g}"
    return Verdict(outcome, effect, low, high, unit, reason)


def all_of(first: Verdict, *others: Verdict) -> Verdict:
    """A claim that needs several: supported if all are, not supported if one is not; the first one's effect."""
    verdicts = (first, *others)
    outcomes = [judged.outcome for judged in verdicts]
    outcome: Outcome = (
        "not supported"
        if "not supported" in outcomes
        else "supported"
        if all(outcome == "supported" for outcome in outcomes)
        else "undecided"
    )
    return replace(first, outcome=outcome, reason="; ".join(judged.reason for judged in verdicts))
