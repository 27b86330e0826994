"""The published version's two fixes for label biases, as one block or side by side, with a strength chosen on held-out
prompts.

Both edit what the last position attends to and nothing else, so several strengths and sets of heads cost a pass over
the prompts and a row of one token each (`cached_rows`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import label_log_probs
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.attention import at_positions, remove_position, scale_label_attention
from icl_lens.interventions.edit_checks import check_pattern_recomputable, warn_if_inert
from icl_lens.interventions.head_sets import head_mask, labels_by_rows
from icl_lens.interventions.prefix_cache import PrefixCache, PrefixCacheUnsupported
from icl_lens.interventions.selection import flatten_heads, group_by_layer
from icl_lens.metrics import is_correct, label_log_odds
from icl_lens.models.head import Head
from icl_lens.models.locking import locks_model
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

Fix = Literal["majority", "recency"]


@contextmanager
def debias(
    model: Any,
    batch: PromptBatch,
    heads: Iterable[Head | tuple[int, int]],
    *,
    majority: float = 0.0,
    recency: float = 0.0,
    renormalize: bool = True,
) -> Iterator[None]:
    """Scoring or generating in the block, over `batch`, suffers less from label biases that `heads` carry.

    `majority`: the attention from the last position to each label is divided by the label's frequency to this power:
    0 nothing, 1 as if all labels were equally frequent. `recency`: how much of the position term is taken out of what
    the last position sees, 0 to 1. Generate with `use_past_kv_cache=False`. Raises InputError for a negative
    `majority`, a `recency` outside 0 to 1, and as the interventions do. Source: the published version,
    sections 4.1 and 4.2.

    Example:
        >>> with il.debias(model, batch, [il.Head(2, 0)], majority=1.0, recency=0.5):
        ...     fairer = il.label_log_probs(model, batch)
        >>> fairer.shape
        torch.Size([1, 2])
    """
    heads = list(heads)
    with ExitStack() as stack:
        if recency:
            stack.enter_context(remove_position(model, heads, strength=recency, positions="last"))
        if majority:
            weights = balancing_weights(batch, majority)
            stack.enter_context(scale_label_attention(model, heads, batch, weights, renormalize=renormalize))
        yield


def balancing_weights(batch: PromptBatch, strength: float = 1.0) -> Float[Tensor, "batch demo"]:
    """A factor for each demonstration: (mean label frequency / its label's frequency) ** strength, within a prompt.

    1 throughout where labels are equally frequent. Raises InputError for a negative strength, and where
    there are no demonstrations.

    Example:
        >>> uneven = il.tokenize(model, il.Prompt.parse("love : bar eight : foo two : foo one :"))
        >>> il.balancing_weights(uneven)
        tensor([[1.5000, 0.7500, 0.7500]])
    """
    if not strength >= 0:
        raise InputError(f"strength={strength} must not be negative; 0 changes nothing")
    batch.require_labels("label to balance", "give prompts with demonstrations (il.tokenize)")
    index = batch.label_index
    real = index >= 0
    same = (index[:, :, None] == index[:, None, :]) & real[:, None, :]
    count = same.sum(-1).clamp(min=1).double()
    # Each label counts once in the mean: every demonstration of it contributes 1 / count.
    labels = (real / count).sum(-1, keepdim=True)
    mean = real.sum(-1, keepdim=True) / labels
    return ((mean / count) ** strength).masked_fill(~real, 1.0).float()


@dataclass(frozen=True)
class DebiasSettings:
    """Heads in which a fix is at work, and its strengths, as `debias` takes them; no heads: the model as it is.

    Example:
        >>> il.DebiasSettings([(2, 0)], majority=1.0).recency
        0.0
    """

    heads: Sequence[Head | tuple[int, int]]
    majority: float = 0.0
    recency: float = 0.0

    def block(self, model: Any, batch: PromptBatch) -> AbstractContextManager[None]:
        """`debias` with these."""
        if not self.heads:
            return nullcontext()
        return debias(model, batch, self.heads, majority=self.majority, recency=self.recency)


@locks_model
def label_log_probs_debiased(
    model: Any, batch: PromptBatch, settings: Sequence[DebiasSettings]
) -> Float[Tensor, "batch fix label"]:
    """Log-probability of each label after each prompt under each of several fixes, nats.

    The same numbers as `label_log_probs` within `debias`, a fix at a time, within rounding. Costs a pass over the
    prompts and a row of one token for each fix and prompt; where keys cannot be shared (see `head_effects`), a pass
    for each fix. Raises InputError for no fixes, prompts without demonstrations, and as `debias` does.

    Example:
        >>> fixes = [il.DebiasSettings([(2, 0)], majority=strength) for strength in (0.0, 0.5, 1.0)]
        >>> found = il.label_log_probs_debiased(model, batch, fixes)
        >>> found.shape, (found[:, 0] - il.label_log_probs(model, batch)).abs().max() < 1e-4
        (torch.Size([1, 3, 2]), tensor(True))
    """
    view = ModelView.of(model)
    if not settings:
        raise InputError("there is no fix to try; give at least one, which may be in no heads")
    batch.require_labels("label to balance", "give prompts with demonstrations (il.tokenize)")
    chosen = head_mask(view, [fix.heads for fix in settings])
    for fix in settings:
        check_strengths(fix.majority, fix.recency)
    by_layer = (
        group_by_layer(view, [Head(*place) for place in chosen.any(0).nonzero().tolist()]) if chosen.any() else {}
    )
    check_pattern_recomputable(view, by_layer)
    warn_if_inert(view, flatten_heads(by_layer))
    recency = torch.tensor([fix.recency for fix in settings], dtype=torch.float64)

    def rows_of(kept: PrefixCache, sets: slice, prompts: list[int]) -> Tensor:
        factor, some = None, [fix.majority for fix in settings[sets]]
        if any(some):
            of_strength = {strength: _factors(kept.batch, strength) for strength in set(some)}
            factor = torch.stack([of_strength[strength] for strength in some], dim=1)
        return kept.with_attention_edited(chosen[sets], 1 - recency[sets], factor)

    try:
        return labels_by_rows(view, batch, len(settings), rows_of, position_free=bool(recency.any()))
    except PrefixCacheUnsupported:
        found = []
        for fix in settings:
            with fix.block(model, batch):
                found.append(label_log_probs(model, batch))
        return torch.stack(found, dim=1)


def check_strengths(majority: float, recency: float) -> None:
    """Raises InputError for strengths that `debias` does not take."""
    if not majority >= 0:
        raise InputError(f"majority={majority} must not be negative; 0 changes nothing")
    if not 0 <= recency <= 1:
        raise InputError(f"recency={recency} must lie between 0, which changes nothing, and 1")


def _factors(batch: PromptBatch, strength: float) -> Float[Tensor, "batch key"]:
    """What attention to each position is multiplied by."""
    return at_positions(balancing_weights(batch, strength), batch.label_positions, width=batch.tokens.shape[1])


@dataclass(frozen=True)
class StrengthSearch:
    """A strength and what it does on the prompts it was chosen on, beside all those tried.

    Example:
        >>> even = il.tokenize(model, il.load_task("sentiment-number", n=10))
        >>> uneven = il.tokenize(model, il.load_task("sentiment-number", n=10, layout="imbalanced"))
        >>> il.choose_strength(model, [il.Head(2, 0)], even, uneven, fix="majority", strengths=[0.5]).strengths
        (0.0, 0.5)
    """

    fix: Fix
    strength: float
    strengths: tuple[float, ...]
    bias: tuple[float, ...]
    """For each strength tried: mean log-odds of the answer where it is favored minus where it is not, nats."""
    accuracy: tuple[float, ...]
    """For each strength tried: over all prompts, those that count for accuracy only included."""
    accuracy_drop: tuple[float, ...]
    """For each strength tried: what the batch that loses most loses of accuracy, 0 to 1."""

    def to_frame(self) -> pd.DataFrame:
        """strength, bias (nats), accuracy, loss, chosen: one row a strength tried."""
        chosen = [one == self.strength for one in self.strengths]
        columns = {
            "strength": self.strengths,
            "bias": self.bias,
            "accuracy": self.accuracy,
            "accuracy_drop": self.accuracy_drop,
        }
        return pd.DataFrame({**columns, "chosen": chosen})


@locks_model
def choose_strength(
    model: Any,
    heads: Sequence[Head | tuple[int, int]],
    favored: PromptBatch,
    unfavored: PromptBatch,
    *,
    fix: Fix,
    accuracy_batches: Sequence[PromptBatch] = (),
    strengths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    max_accuracy_drop: float = 0.01,
) -> StrengthSearch:
    """Return the strength with the smallest bias that costs at most `max_accuracy_drop` of accuracy in any batch.

    `favored` and `unfavored` are the same held-out prompts, in a layout that helps the answer (balanced; true
    demonstrations last) and in one that does not (answer's label rarer; true demonstrations first).
    `accuracy_batches` count for accuracy only: give prompts with a query of the other class, because a fix that goes
    too far shows only there. All are run with the fix. 0 is always among the strengths. Raise InputError for prompts
    without answers or batches of different length.

    Example:
        >>> favored = il.tokenize(model, il.load_task("sentiment-number", n=10, layout="order"))
        >>> unfavored = il.tokenize(model, il.load_task("sentiment-number", n=10, layout="reorder"))
        >>> other = il.tokenize(model, il.load_task("sentiment-number", n=10, layout="order", query_class="false"))
        >>> heads = [il.Head(2, 0)]
        >>> chosen = il.choose_strength(model, heads, favored, unfavored, fix="recency", accuracy_batches=[other])
        >>> chosen.strength in chosen.strengths
        True
    """
    check_choice("fix", fix, ("majority", "recency"))
    if not all(math.isfinite(one) and one >= 0 for one in strengths):
        raise InputError(f"strengths={tuple(strengths)} must be finite and not negative; 0 changes nothing")
    if not max_accuracy_drop >= 0:
        raise InputError(
            f"max_accuracy_drop={max_accuracy_drop} must not be negative; 0 keeps the accuracy, 0.01 gives up 1 %"
        )
    if len(favored) != len(unfavored):
        raise InputError(f"{len(favored)} and {len(unfavored)} prompts are not the same ones in two layouts")
    for row, (one, other) in enumerate(zip(favored.prompts, unfavored.prompts, strict=True)):
        if (one.query, one.answer) != (other.query, other.answer):
            raise InputError(
                f"prompt {row} asks about {one.query!r} (answer {one.answer!r}) in one layout and {other.query!r} "
                f"(answer {other.answer!r}) in the other; give the same prompts in two layouts"
            )
    strengths = tuple(dict.fromkeys([0.0, *strengths]))
    batches = [favored, unfavored, *accuracy_batches]
    sizes = torch.tensor([len(batch) for batch in batches], dtype=torch.float64)
    bias, right = [], []
    for of_strength in zip(*(_scored(model, batch, heads, fix, strengths) for batch in batches), strict=True):
        odds, correct = zip(*of_strength, strict=True)
        bias.append(float((odds[0] - odds[1]).mean()))
        right.append(torch.stack([one.double().mean().cpu() for one in correct]))
    loss = [float((right[0] - one).max()) for one in right]
    best = min((i for i, lost in enumerate(loss) if lost <= max_accuracy_drop), key=lambda i: abs(bias[i]))
    accuracy = tuple(float(one @ sizes / sizes.sum()) for one in right)
    return StrengthSearch(fix, strengths[best], strengths, tuple(bias), accuracy, tuple(loss))


def _scored(
    model: Any, batch: PromptBatch, heads: Sequence[Head | tuple[int, int]], fix: Fix, strengths: Sequence[float]
) -> list[tuple[Tensor, Tensor]]:
    """Under each strength: the answer's log-odds, nats, and whether it scores highest."""
    fixes = [DebiasSettings(heads, **{fix: strength}) for strength in strengths]
    return [
        (
            label_log_odds(scores, batch.answer, choices=batch.label_mask),
            is_correct(scores, batch.answer, choices=batch.label_mask),
        )
        for scores in label_log_probs_debiased(model, batch, fixes).unbind(1)
    ]
