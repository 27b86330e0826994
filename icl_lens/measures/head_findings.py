"""What the removal of listed heads shows, as the first sentence of `locate`, `ablate` and `explain`.

Rules, for the difference between what the answer loses without the heads and what it loses without
random ones:

- its interval is above zero: the heads matter, if the answer also loses something without them;
- below zero: they cost the answer less than random heads do;
- it includes zero: it is not shown that they matter more than random heads;
- there is no interval: they are not compared.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from icl_lens.foundation.intervals import MIN_CLUSTERS, MIN_RANDOM_SETS, Interval
from icl_lens.result.number_format import interval_text, joined

MAX_NAMED_HEADS = 6
JOINT_NOT_MEASURED = (
    "What removing them jointly costs beside random heads is not measured here; "
    "icl-lens ablate (il.ablate_with_controls) measures it."
)
NEEDED_INSTEAD = (
    "Heads that the answer needs are found by --by effect (il.locate with by='effect'), "
    "which removes each head."
)
"""What to try where no head adds to the answer."""
MODELS_NOTE = "Heads of two models correspond only if one model was trained from the other."


def heads_in_words(heads: Sequence[object]) -> str:
    """Return the names of a few heads, such as "L5H0 and L4H1", or "the 20 heads"."""
    if len(heads) > MAX_NAMED_HEADS:
        return f"the {len(heads)} heads"
    return joined([str(head) for head in heads])


def heads_matter(lost: float, difference: Interval) -> bool:
    """Return whether the answer loses something without heads, in the digits in which it is
    printed, and is shown to lose more than without random heads.
    """
    is_loss = lost > 0 and _is_printed_apart_from_zero(lost, difference)
    return is_loss and difference.low > 0


def _is_printed_apart_from_zero(change: float, difference: Interval) -> bool:
    return interval_text(change, near=difference) != interval_text(0.0, near=difference)


def removal_finding(
    heads: Sequence[object],
    difference: Interval,
    *,
    lost: float,
    unit: str,
    where: str,
    random: str,
    n_random_sets: int,
    over: str = "",
) -> str:
    """Return one or two sentences on whether heads matter more than random ones.

    `lost` is what the answer loses without the heads, and `difference` how much more that is than
    without random heads. `unit` is the unit of both ("nats of log-odds"); `where` says what was
    done ("zeroed at the last position"), and `random` names the random heads, such as "random heads
    of the same layers". `n_random_sets` is their number of sets. `over`
    names what the interval is over, if it is not over prompts.
    """
    subject = heads_in_words(heads)
    subject = subject[0].upper() + subject[1:]
    matter = "matters" if len(heads) == 1 else "matter"
    loss = _loss(lost, difference, unit, where, is_one=len(heads) == 1)
    if difference.low != difference.low:
        reason = f"that needs prompts with at least {MIN_CLUSTERS} different queries"
        if n_random_sets < MIN_RANDOM_SETS:
            reason = f"that needs at least {MIN_RANDOM_SETS} random sets, got {n_random_sets}"
        they_are = "It is" if len(heads) == 1 else "They are"
        return f"{subject}: {loss}. {they_are} not compared with {random}: {reason}."
    from_random = interval_text(*difference, over=over)
    if lost >= 0 and difference.value >= 0:
        compared = f"{from_random} more than {random} do"
    else:
        compared = f"and the difference from {random} is {from_random}"
    gain = _gain_without_random(lost, difference, random)
    if heads_matter(lost, difference):
        return f"{subject} {matter}: {loss}, {compared}.{gain}"
    if difference.low > 0:
        needs = f"It is not shown that the answer needs {heads_in_words(heads)}"
        return f"{needs}: {loss}, {compared}."
    if difference.high < 0:
        cost = "costs" if len(heads) == 1 else "cost"
        return f"{subject} {cost} the answer less than {random} do: {loss}, {compared}."
    return (
        f"It is not shown that {heads_in_words(heads)} {matter} more than {random}: {loss}, "
        f"{compared}, which includes zero.{gain}"
    )


def _loss(lost: float, difference: Interval, unit: str, where: str, *, is_one: bool) -> str:
    """Return what the answer loses, or gains, without the heads, with as many digits as the
    difference from random heads.
    """
    subject = f"{where}, it" if is_one else f"jointly {where}, they"
    gained = interval_text(-lost, near=difference)
    if lost < 0 and _is_printed_apart_from_zero(lost, difference):
        take = "takes" if is_one else "take"
        return f"{subject} {take} nothing from the answer, which gains {gained} {unit}"
    cost = "costs" if is_one else "cost"
    return f"{subject} {cost} the answer {interval_text(lost, near=difference)} {unit}"


def _gain_without_random(lost: float, difference: Interval, random: str) -> str:
    """Return a sentence on why a difference exceeds the loss: the answer gains if random heads are
    removed. Empty if it does not gain.
    """
    gained = interval_text(difference.value - lost, near=difference)
    if lost <= 0 or difference.value <= lost or gained == interval_text(0.0, near=difference):
        return ""
    return f" With {random} removed instead, the answer gains {gained}."


def list_finding(
    table: pd.DataFrame,
    k: int,
    score: str,
    *,
    n_heads: int,
    joint_removal: str = JOINT_NOT_MEASURED,
) -> str:
    """Return sentences on how many of the first k heads of a table have a score that is above zero.

    `table` has one row per head, best first, with low and high, the ends of the interval of the
    mean `score`, and, if each head was zeroed alone, effect_low and effect_high. `n_heads` is the
    number of heads that were ranked: if none of them added anything, 1 of 40 would have an interval
    above zero. `joint_removal` says what removing the heads jointly costs beside random heads, as
    `removal_finding` does.
    """
    rows = table.head(k)
    n = len(rows)
    in_table = "the head in the table" if n == 1 else f"the {n} heads in the table"
    if "low" not in rows or bool(np.isnan(np.asarray(rows["low"], dtype=float)).all()):
        return (
            f"Nothing is shown about {in_table}: with fewer than {MIN_CLUSTERS} different queries, the mean {score} "
            "has no interval."
        )
    n_above = int((np.asarray(rows["low"], dtype=float) > 0).sum())
    n_all_above = int((np.asarray(table["low"], dtype=float) > 0).sum())
    above_zero = f"a mean {score} above zero (whole 95% interval)"
    loses_alone = "effect_low" in rows and (np.asarray(rows["effect_low"], dtype=float) > 0).any()
    if n_above == 0:
        sentences = _none_above(above_zero, n, score, loses_alone=bool(loses_alone))
    else:
        subject = f"{n_above} of {in_table} {'has' if n_above == 1 else 'have'}"
        if n_above == n:
            subject = "The head in the table has" if n == 1 else f"All {n} heads in the table have"
        sentences = [f"{subject} {above_zero}.", *_by_chance(n, n_heads, n_all_above)]
    if "effect_low" in rows:
        sentences.append(_zeroed_alone(rows))
    return " ".join([*sentences, joint_removal])


def _none_above(above_zero: str, n: int, score: str, *, loses_alone: bool) -> list[str]:
    """Return sentences on a table of n heads none of whose intervals is above zero; with
    `loses_alone`, the answer is shown to lose something without one of them.
    """
    if n == 1:
        it, sentences = "it", [f"It is not shown that the head in the table has {above_zero}."]
    else:
        it, sentences = "any of them", [f"None of the {n} heads in the table has {above_zero}."]
    if score == "effect":
        return [*sentences, f"It is not shown that zeroing {it} alone costs the answer anything."]
    if loses_alone:
        return sentences
    return [*sentences, f"It is not shown that {it} helps the answer.", NEEDED_INSTEAD]


def _by_chance(n: int, n_heads: int, n_all_above: int) -> list[str]:
    """Return sentences on which heads a table lists, the n best of `n_heads`, and how many of all
    have an interval above zero, beside how many would by chance: 1 of 40.
    """
    if n == n_heads:
        listed = "The table lists all heads."
    elif n == 1:
        listed = f"Its mean is the largest of all {n_heads} heads."
    else:
        listed = f"The table lists the {n} of all {n_heads} heads whose mean is largest."
    by_chance = n_heads / 40
    about = "fewer than 1" if by_chance < 0.75 else f"about {round(by_chance)}"
    return [
        listed,
        f"Of all {n_heads} heads, {n_all_above} {'is' if n_all_above == 1 else 'are'} above zero; if no head did "
        f"anything, {about} would be by chance.",
    ]


def _zeroed_alone(rows: pd.DataFrame) -> str:
    """Return a sentence on which heads the answer loses or gains from when each is zeroed alone."""
    low = np.asarray(rows["effect_low"], dtype=float)
    high = np.asarray(rows["effect_high"], dtype=float)
    names = [str(name) for name in rows["name"]]
    less_likely = [name for name, end in zip(names, low, strict=True) if end > 0]
    more_likely = [name for name, end in zip(names, high, strict=True) if end < 0]
    n_neither = len(rows) - len(less_likely) - len(more_likely)
    if len(rows) == 1:
        if n_neither:
            return (
                "Whether zeroing it alone makes the answer less likely is not shown: the 95% "
                "interval includes zero."
            )
        direction = "less" if less_likely else "more"
        return f"Zeroing it alone makes the answer {direction} likely (95% interval)."
    if n_neither == len(rows):
        return (
            "Whether zeroing one head alone makes the answer less likely is not shown for any of "
            "them: each 95% interval includes zero."
        )
    sentence = (
        f"Zeroing one head alone makes the answer less likely for {_which(less_likely)} and more "
        f"likely for {_which(more_likely)}"
    )
    if not n_neither:
        return f"{sentence}."
    remaining = "the other one" if n_neither == 1 else f"the other {n_neither}"
    return f"{sentence}; for {remaining}, the 95% interval includes zero."


def _which(names: Sequence[str]) -> str:
    """Return which heads of a table these are: their names or, of many, their number."""
    if not names:
        return "none"
    if len(names) > MAX_NAMED_HEADS:
        return f"{len(names)} of them"
    return joined(names)
