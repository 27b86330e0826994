"""The two corrections for label biases of the paper's published version, with a strength chosen on held-out prompts.

Both edit only the attention of the last position. After one pass over the prompts, each strength or head set therefore
costs only one more single-token row per prompt (see `engine`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.attention_edits import RemovePosition, Reweight
from icl_lens.edits.edit import Edit
from icl_lens.engine.score import score
from icl_lens.errors import InputError, check_choice
from icl_lens.metrics import is_correct, label_log_odds
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.head import AnyHead, head_tuple
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_batch
from icl_lens.result.base import Result
from icl_lens.result.tables import format_signed

Fix = Literal["majority", "recency"]
"""Which of the two strengths of `debias_edits` is set."""

_TIED = 1e-5
"""Nats within which two biases count as equal, so that rounding does not choose the strength."""


def debias_edits(
    batch: PromptBatch,
    heads: Iterable[AnyHead],
    *,
    majority: float = 0.0,
    recency: float = 0.0,
    renormalize: bool = True,
) -> list[Edit]:
    """Return the edits that reduce the label bias carried by `heads`, for `edited` and `score` over `batch`.

    `majority`: the attention from the last position to each label is divided by the label's frequency to this power; 0
    is no change, 1 treats all labels as equally frequent (`Reweight`). `recency`: share of the position term removed
    from the last position's attention, 0 to 1 (`RemovePosition`). Raise InputError for a negative `majority` and a
    `recency` outside 0 to 1. Source: the published version, sections 4.1 and 4.2.

    Example:
        >>> with il.edited(model, *il.debias_edits(batch, ["L2H0"], majority=1.0, recency=0.5), batch=batch):
        ...     fairer = il.score(model, batch)
        >>> sets = [il.debias_edits(batch, ["L2H0"], majority=strength) for strength in (0.0, 0.5, 1.0)]
        >>> il.score(model, batch, sets).shape
        torch.Size([1, 3, 2])
    """
    if not majority >= 0:
        raise InputError(f"majority must be non-negative, got {majority!r}; 0 is no change")
    if not 0 <= recency <= 1:
        raise InputError(f"recency must be between 0 (no change) and 1, got {recency!r}")
    check_batch(batch)
    heads = head_tuple(heads)
    edits: list[Edit] = [RemovePosition(heads, strength=recency, positions="last")] if recency else []
    if majority:
        edits.append(Reweight(heads, balancing_weights(batch, majority), renormalize=renormalize))
    return edits


def balancing_weights(batch: PromptBatch, strength: float = 1.0) -> Float[Tensor, "batch demo"]:
    """Return a factor per demonstration: (mean label frequency / its label's frequency) ** strength, within a prompt.

    All factors are 1 where labels are equally frequent. Raise InputError for a negative strength, and for prompts
    without demonstrations.
    """
    if not strength >= 0:
        raise InputError(f"strength must be non-negative, got {strength!r}; 0 is no change")
    batch.require_demonstrations("label to balance", "pass prompts with demonstrations (il.tokenize)")
    index = batch.label_index
    exists = index >= 0
    same_label = (index[:, :, None] == index[:, None, :]) & exists[:, None, :]
    count = same_label.sum(-1).clamp(min=1).double()
    # Each demonstration contributes 1 / count, so each label contributes 1.
    n_labels = (exists / count).sum(-1, keepdim=True)
    mean = exists.sum(-1, keepdim=True) / n_labels
    return ((mean / count) ** strength).masked_fill(~exists, 1.0).float()


@dataclass(frozen=True, repr=False)
class StrengthSearch(Result):
    """The selected strength, and bias and accuracy of all tried strengths on the prompts that selected it.

    Example:
        >>> even = il.tokenize(model, il.load_task("sentiment-number", n=10, layout="order"))
        >>> uneven = il.tokenize(model, il.load_task("sentiment-number", n=10, layout="imbalanced"))
        >>> il.choose_strength(model, even, uneven, ["L2H0"], fix="majority", strengths=[0.5]).strengths
        (0.0, 0.5)
    """

    fix: Fix
    strength: float
    strengths: tuple[float, ...]
    bias: tuple[float, ...]
    """For each strength: mean log-odds of the answer in `favored` minus that in `unfavored`, nats."""
    accuracy: tuple[float, ...]
    """For each strength: accuracy over all prompts, including `accuracy_batches`, 0 to 1."""
    accuracy_drop: tuple[float, ...]
    """For each strength: the largest drop in accuracy in any batch; negative if accuracy rises in all."""
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks. Empty if nothing edits it."""

    def _shown(self) -> tuple[str, dict[str, list[object]], int]:
        columns: dict[str, list[object]] = {
            "strength": [f"{one:g}{' (chosen)' if one == self.strength else ''}" for one in self.strengths],
            "bias": list(map(format_signed, self.bias)),
            "accuracy": [f"{one:.1%}" for one in self.accuracy],
            "largest drop": [f"{one:+.1%}" for one in self.accuracy_drop],
        }
        return f"StrengthSearch({self.fix} bias, nats){edits_suffix(self.edits)}", columns, len(self.strengths)

    def to_frame(self) -> pd.DataFrame:
        """Return strength, bias (nats), accuracy, accuracy_drop and chosen, one row per strength."""
        chosen = [one == self.strength for one in self.strengths]
        columns = {
            "strength": self.strengths,
            "bias": self.bias,
            "accuracy": self.accuracy,
            "accuracy_drop": self.accuracy_drop,
        }
        return pd.DataFrame({**columns, "chosen": chosen})


def choose_strength(
    model: Any,
    favored: PromptBatch,
    unfavored: PromptBatch,
    heads: Sequence[AnyHead],
    *,
    fix: Fix,
    accuracy_batches: Sequence[PromptBatch] = (),
    strengths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    max_accuracy_drop: float = 0.01,
) -> StrengthSearch:
    """Return the strength with the smallest bias that costs at most `max_accuracy_drop` of accuracy in any batch.

    `favored` and `unfavored` are the same held-out prompts in two layouts. For "majority", labels are equally frequent
    in `favored`, and the answer's label is rarer in `unfavored`. For "recency", true demonstrations are last in
    `favored` and first in `unfavored`. `accuracy_batches` count for accuracy only: pass prompts with a query of the
    other class, because only their accuracy drops if the strength is too large. 0 is always among the strengths. Raise
    InputError for prompts without answers, and unless `favored` and `unfavored` have the same queries and answers.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=10, layout="order")
        >>> favored = il.tokenize(model, prompts)
        >>> unfavored = il.tokenize(model, il.load_task("sentiment-number", n=10, layout="reorder"))
        >>> other = il.tokenize(model, [prompt.with_other_query() for prompt in prompts])
        >>> heads = [il.Head(2, 0)]
        >>> chosen = il.choose_strength(model, favored, unfavored, heads, fix="recency", accuracy_batches=[other])
        >>> chosen.strength in chosen.strengths
        True
    """
    check_choice("fix", fix, ("majority", "recency"))
    if not all(math.isfinite(one) and one >= 0 for one in strengths):
        raise InputError(f"strengths must be finite and non-negative, got {tuple(strengths)}; 0 is no change")
    if not max_accuracy_drop >= 0:
        raise InputError(
            f"max_accuracy_drop must be non-negative, got {max_accuracy_drop!r}; e.g. 0.01 allows a drop of 1%"
        )
    for name, batch in (("favored", favored), ("unfavored", unfavored)):
        check_batch(batch, name)
    if len(favored) != len(unfavored):
        raise InputError(
            f"favored and unfavored must be the same prompts in two layouts, got {len(favored)} and {len(unfavored)}"
        )
    for row, (one, other) in enumerate(zip(favored.prompts, unfavored.prompts, strict=True)):
        if (one.query, one.answer) != (other.query, other.answer):
            raise InputError(
                f"favored and unfavored must be the same prompts in two layouts, got query {one.query!r} (answer "
                f"{one.answer!r}) and {other.query!r} (answer {other.answer!r}) in prompt {row}"
            )
    strengths = tuple(dict.fromkeys([0.0, *strengths]))
    batches = [favored, unfavored, *accuracy_batches]
    sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.float64)
    bias, accuracies = [], []  # one entry per strength; accuracies are [batch]
    for scores_by_batch in zip(*(_scored(model, batch, heads, fix, strengths) for batch in batches), strict=True):
        odds, correct = zip(*scores_by_batch, strict=True)
        bias.append(float((odds[0] - odds[1]).mean()))
        accuracies.append(torch.stack([one.double().mean().cpu() for one in correct]))
    drops = [float((accuracies[0] - one).max()) for one in accuracies]
    allowed = [i for i, drop in enumerate(drops) if drop <= max_accuracy_drop]
    smallest = min(abs(bias[i]) for i in allowed)
    best = min((i for i in allowed if abs(bias[i]) <= smallest + _TIED), key=lambda i: strengths[i])
    accuracy = tuple(float(one @ sizes / sizes.sum()) for one in accuracies)
    edits = active_edits(ModelView.of(model))
    return StrengthSearch(fix, strengths[best], strengths, tuple(bias), accuracy, tuple(drops), edits)


def _scored(
    model: Any, batch: PromptBatch, heads: Sequence[AnyHead], fix: Fix, strengths: Sequence[float]
) -> list[tuple[Tensor, Tensor]]:
    """Return, for each strength, the answer's log-odds (nats) and whether it scores highest."""
    sets = [
        debias_edits(batch, heads, majority=one) if fix == "majority" else debias_edits(batch, heads, recency=one)
        for one in strengths
    ]
    return [
        (
            label_log_odds(scores, batch.answer, choices=batch.label_mask),
            is_correct(scores, batch.answer, choices=batch.label_mask),
        )
        for scores in score(model, batch, sets).unbind(1)
    ]
