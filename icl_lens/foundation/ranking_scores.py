"""The scores that rank heads, with the same names in functions, commands and results.

- "effect": the log-odds that the answer loses when the head is zeroed at the last position. The
  default for locating heads on many prompts: what the heads that it finds cost jointly is largest
  (docs/results/which-score.md).
- "exchange": the log-odds that the answer loses when the head's query there is exchanged for that
  of a query of another class.
- "contrast": what a head adds to log p(answer) − log Σ p(other labels). The default for explaining
  what heads write on a prompt, wherever there are other labels, or other tokens to compare with:
  heads that raise all labels alike find no answer.
- "increase": what a head adds to log p(answer), as in the paper. The default for a prompt where
  there is nothing to compare with.

Log-odds are the model's own log p(answer) − log Σ p(others); where there is nothing to compare
with, an effect is what log p(answer) loses. All scores are in nats. Contrast and increase are read
from the activations of an unedited pass.
Source: docs/howto/numbers.md.
"""

from collections.abc import Sequence
from typing import Literal, TypeVar, cast, get_args

from icl_lens.errors import InputError, check_choice, short_repr

Score = Literal["effect", "exchange", "contrast", "increase"]
DirectScore = Literal["contrast", "increase"]
"""The scores that need no edited pass."""
SCORES: tuple[Score, ...] = get_args(Score)
LOCATING_SCORE: Score = "effect"
"""The score that locates heads on many prompts by default."""
DIRECT_SCORES: tuple[DirectScore, ...] = get_args(DirectScore)

SomeScore = TypeVar("SomeScore", Score, DirectScore)


def choose_score(
    by: SomeScore | None, choices: Sequence[SomeScore], *, comparable: bool
) -> SomeScore:
    """Return the score that ranks what is written on a prompt: `by` or, by default, contrast if
    there are tokens to compare with.

    Raise InputError for a score that is not one of `choices`, and for a contrast without tokens to
    compare with.

    Example:
        >>> from icl_lens.foundation.ranking_scores import DIRECT_SCORES, choose_score
        >>> choose_score(None, DIRECT_SCORES, comparable=True)
        'contrast'
        >>> choose_score(None, DIRECT_SCORES, comparable=False)
        'increase'
    """
    if by is None:
        return cast(SomeScore, "contrast" if comparable else "increase")
    check_choice("by", by, choices)
    if by == "contrast" and not comparable:
        allowed = [repr(choice) for choice in choices if choice not in ("contrast", "exchange")]
        raise InputError(
            f"by must be {' or '.join(allowed)} without tokens to compare with, got {short_repr(by)}; pass against="
        )
    return by


def score_of_parts(by: Score, *, comparable: bool) -> DirectScore:
    """Return the score that ranks (head, position) parts if heads are ranked `by` this one.

    Parts are ranked by increase if heads are, or if there is nothing to compare with, and else by
    contrast.
    """
    return "contrast" if comparable and by != "increase" else "increase"
