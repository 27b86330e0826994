"""Why a head has a kind or does not have it: sentences that follow from a score's numbers.

1. `why_not` says which rule or test of a kind a head missed.
2. `closest_kind` is the kind that a head misses by least: the one with the smallest q-value, as it
   is printed.
3. `outranked` says why a head does not have a kind though its score is larger than that of a head
   that has it.

Source: the tests are those of `icl_lens.analyses.atlas.kinds`.
"""

import math
from collections.abc import Iterable, Sequence

from icl_lens.analyses.atlas.head_score import HeadScore
from icl_lens.analyses.atlas.kinds import TURNED_KINDS
from icl_lens.models.head import Head

P_AT_NULL = 0.5
"""With a larger one-sided p-value, a head lies below the null."""


def why_not(score: HeadScore, head: Head, rate: float) -> str:
    """Return why a head does not have a tested kind, as the end of "has no kind: …"."""
    assert score.p_value is not None
    assert score.q_value is not None
    if _attends_elsewhere(score, head):
        return _attention_elsewhere(score, head)
    p_value, q_value = float(score.p_value[head]), float(score.q_value[head])
    if score.over == "prompts" and p_value > P_AT_NULL:
        return f"it is not above the mean absolute score of all heads (p = {p_text(p_value)})"
    q_text = _q_text(q_value, rate)
    return f"q = {q_text}, and a kind needs {p_text(rate)} or less (p = {p_text(p_value)})"


def closest_kind(scores: Iterable[HeadScore], head: Head, rate: float) -> HeadScore | None:
    """Return the tested score whose kind a head misses by least: that with the smallest q-value, of
    equal ones that with the smallest p-value, and of these that by which the head ranks highest.
    None if no score was tested.

    Values are compared as they are printed: all q-values that are printed as 1 are equal.
    """
    closest, smallest = None, (math.inf, math.inf, math.inf)
    for score in scores:
        rank = score.rank(head)
        if score.q_value is None or score.p_value is None or rank is None:
            continue
        q_text = _q_text(float(score.q_value[head]), rate)
        distance = (float(q_text), float(p_text(float(score.p_value[head]))), float(rank))
        if distance < smallest:
            closest, smallest = score, distance
    return closest


def outranked(score: HeadScore, head: Head, heads_of_kind: Sequence[Head]) -> str:
    """Return why a head does not have a kind though its score is larger than that of a head that
    has it; empty if no head of the kind has a smaller score, or if the head has the kind.
    `heads_of_kind` are the heads that have it, largest score first.
    """
    if not heads_of_kind or head in heads_of_kind:
        return ""
    lowest = heads_of_kind[-1]
    if not bool(score.mean[head] > score.mean[lowest]):
        return ""
    values = [float(score.mean[each_head]) for each_head in (head, lowest)]
    texts = [score.format(value) for value in values]
    if texts[0] == texts[1]:
        texts = [f"{value:.4g}".replace("-", "−") for value in values]
    value = texts[0] if score.title == score.kind else f"{score.title} of {texts[0]}"
    larger = (
        f"{head} does not have the kind {score.kind}, although its {value} is larger than the "
        f"{texts[1]} of {lowest}, which has it"
    )
    if (
        score.name in TURNED_KINDS
    ):  # its p-values fall with the score, so that only the rule is left
        return f"{larger}: {_attention_elsewhere(score, head)}."
    assert score.p_value is not None
    p_values = [float(score.p_value[each_head]) for each_head in (head, lowest)]
    against = f"p = {p_text(p_values[0])} against {p_text(p_values[1])}"
    if _relative_width(score, head) > _relative_width(score, lowest):
        ends = [_ends(score, each_head) for each_head in (head, lowest)]
        return (
            f"{larger}: it varies more over queries, for its size (95% interval {ends[0]} against "
            f"{ends[1]}; {against})."
        )
    return f"{larger}: the test is less sure of it ({against})."


def p_text(value: float) -> str:
    """Return a p-value, a q-value or a rate as text, with two significant digits.

    Example:
        >>> from icl_lens.analyses.atlas.kind_reasons import p_text
        >>> p_text(0.05), p_text(0.00004), p_text(1.0)
        ('0.05', '0.00004', '1')
    """
    if value >= 0.1:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    digits = 1 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def _q_text(q_value: float, rate: float) -> str:
    """Return a q-value as text, with more digits if it would be rounded down to the rate, which it
    exceeds.
    """
    q_text = p_text(q_value)
    return f"{q_value:.6f}" if float(q_text) <= rate < q_value else q_text


def _attends_elsewhere(score: HeadScore, head: Head) -> bool:
    """Return whether a head attends to another token at least as much as to that of the kind."""
    return score.elsewhere is not None and not bool(score.mean[head] > score.elsewhere.share[head])


def _attention_elsewhere(score: HeadScore, head: Head) -> str:
    if score.elsewhere is None:  # of a file that an earlier version has written
        return "it attends more to another token"
    share = score.format(float(score.elsewhere.share[head]))
    is_printed_alike = share == score.format(float(score.mean[head]))
    more = "as much" if is_printed_alike else "more"
    return f"it attends {more} to {score.elsewhere.token(head)} ({share})"


def _relative_width(score: HeadScore, head: Head) -> float:
    """Return the width of a head's interval over its mean; NaN without an interval."""
    return float((score.high[head] - score.low[head]) / score.mean[head])


def _ends(score: HeadScore, head: Head) -> str:
    return f"{score.format(float(score.low[head]))} … {score.format(float(score.high[head]))}"
