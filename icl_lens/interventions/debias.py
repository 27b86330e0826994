"""The two corrections for label biases of the paper's published version, with a strength chosen on held-out prompts.

Both edit only the attention of the last position. After one pass over the prompts, each strength or head set therefore
costs only one more single-token row per prompt (`prefix_cache`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.label_scores import LabelScores
from icl_lens.display import Result, format_signed
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.attention import label_attention_edit, position_edit
from icl_lens.interventions.edit_checks import checked_heads
from icl_lens.interventions.edited_scores import read_labels, score_passes, score_rows
from icl_lens.interventions.editor import Edit, editing, group_by_layer
from icl_lens.interventions.prefix_cache import RowEdits
from icl_lens.metrics import is_correct, label_log_odds
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.head import AnyHead
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

Fix = Literal["majority", "recency"]
"""Which of the two strengths of `debias` is set."""

_TIED = 1e-5
"""Nats within which two biases count as equal, so that rounding does not choose the strength."""


@contextmanager
def debias(
    model: Any,
    batch: PromptBatch,
    heads: Iterable[AnyHead],
    *,
    majority: float = 0.0,
    recency: float = 0.0,
    renormalize: bool = True,
) -> Iterator[None]:
    """Reduce the label bias carried by `heads` while the block runs; passes must be over `batch`.

    `majority`: the attention from the last position to each label is divided by the label's frequency to this power; 0
    is no change, 1 treats all labels as equally frequent. `recency`: share of the position term removed from the last
    position's attention, 0 to 1. Generate with `use_past_kv_cache=False`. Raise InputError for a negative `majority`, a
    `recency` outside 0 to 1, and like `scale_label_attention` and `remove_position`. Source: the published version,
    sections 4.1 and 4.2.

    Example:
        >>> with il.debias(model, batch, [il.Head(2, 0)], majority=1.0, recency=0.5):
        ...     fairer = il.label_log_probs(model, batch)
        >>> fairer.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    check_strengths(majority, recency)
    by_layer = checked_heads(view, heads, attention=bool(majority or recency))
    with editing(view, *_edits(by_layer, batch, majority, recency, renormalize=renormalize)):
        yield


def _edits(
    by_layer: dict[int, list[int]], batch: PromptBatch, majority: float, recency: float, *, renormalize: bool = True
) -> list[Edit]:
    """Return the edits of `debias`."""
    edits = [position_edit(by_layer, recency, "last")] if recency else []
    if majority:
        weights = balancing_weights(batch, majority)
        edits.append(label_attention_edit(by_layer, batch, weights, renormalize=renormalize))
    return edits


def balancing_weights(batch: PromptBatch, strength: float = 1.0) -> Float[Tensor, "batch demo"]:
    """Return a factor per demonstration: (mean label frequency / its label's frequency) ** strength, within a prompt.

    All factors are 1 where labels are equally frequent. Raise InputError for a negative strength, and for prompts
    without demonstrations.

    Example:
        >>> uneven = il.tokenize(model, il.Prompt.parse("love : bar eight : foo two : foo one :"))
        >>> il.balancing_weights(uneven)
        tensor([[1.5000, 0.7500, 0.7500]])
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


@dataclass(frozen=True)
class DebiasSettings:
    """Arguments of `debias`: heads and strengths; without heads the model is unchanged.

    Example:
        >>> il.DebiasSettings([(2, 0)], majority=1.0).recency
        0.0
    """

    heads: Sequence[AnyHead]
    majority: float = 0.0
    recency: float = 0.0

    def block(self, model: Any, batch: PromptBatch) -> AbstractContextManager[None]:
        """Return `debias` with these settings as a context manager."""
        return debias(model, batch, self.heads, majority=self.majority, recency=self.recency)


def label_log_probs_debiased(model: Any, batch: PromptBatch, settings: Sequence[DebiasSettings]) -> LabelScores:
    """Return each label's log-probability [batch setting label] after each prompt under several settings, nats.

    Equals `label_log_probs` within `debias` for each setting, up to rounding. Costs one pass over the prompts and one
    single-token row per setting and prompt, or one pass per setting where the prefix cache is not supported (see
    `head_effects`). Raise InputError for empty settings, prompts without demonstrations, and like `debias`.

    Example:
        >>> settings = [il.DebiasSettings([(2, 0)], majority=strength) for strength in (0.0, 0.5, 1.0)]
        >>> found = il.label_log_probs_debiased(model, batch, settings)
        >>> found.shape, (found[:, 0] - il.label_log_probs(model, batch)).abs().max() < 1e-4
        (torch.Size([1, 3, 2]), tensor(True))
    """
    view, read = ModelView.of(model), read_labels(batch)
    if not settings:
        raise InputError("settings must contain at least one DebiasSettings, got none")
    batch.require_demonstrations("label to balance", "pass prompts with demonstrations (il.tokenize)")
    for one in settings:
        check_strengths(one.majority, one.recency)
    checked_heads(view, [head for one in settings for head in one.heads], attention=True)
    grouped = [group_by_layer(view, one.heads) for one in settings]

    def edits_of(rows: list[int]) -> RowEdits:
        some = batch[rows]
        pairs = zip(grouped, settings, strict=True)
        return RowEdits.applying(view, [_edits(heads, some, one.majority, one.recency) for heads, one in pairs])

    def run_full_passes() -> Tensor:
        return score_passes(view, batch, (one.block(model, batch) for one in settings), read)

    scores, _ = score_rows(view, batch, edits_of, read, run_full_passes, n_sets=len(settings), attention=True)
    return LabelScores.from_tensor(scores, batch.labels)


def check_strengths(majority: float, recency: float) -> None:
    """Raise InputError for strengths that `debias` does not accept."""
    if not majority >= 0:
        raise InputError(f"majority must be non-negative, got {majority!r}; 0 is no change")
    if not 0 <= recency <= 1:
        raise InputError(f"recency must be between 0 (no change) and 1, got {recency!r}")


@dataclass(frozen=True, repr=False)
class StrengthSearch(Result):
    """The selected strength, and bias and accuracy of all tried strengths on the prompts that selected it.

    Example:
        >>> even = il.tokenize(model, il.load_task("sentiment-number", n=10, layout="order"))
        >>> uneven = il.tokenize(model, il.load_task("sentiment-number", n=10, layout="imbalanced"))
        >>> il.choose_strength(model, [il.Head(2, 0)], even, uneven, fix="majority", strengths=[0.5]).strengths
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
    heads: Sequence[AnyHead],
    favored: PromptBatch,
    unfavored: PromptBatch,
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
        raise InputError(f"strengths must be finite and non-negative, got {tuple(strengths)}; 0 is no change")
    if not max_accuracy_drop >= 0:
        raise InputError(
            f"max_accuracy_drop must be non-negative, got {max_accuracy_drop!r}; e.g. 0.01 allows a drop of 1%"
        )
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
    settings = [DebiasSettings(heads, **{fix: strength}) for strength in strengths]
    return [
        (
            label_log_odds(scores, batch.answer, choices=batch.label_mask),
            is_correct(scores, batch.answer, choices=batch.label_mask),
        )
        for scores in label_log_probs_debiased(model, batch, settings).unbind(1)
    ]
