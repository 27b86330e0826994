"""Ablate many sets of heads: curves over numbers of heads, or located versus random heads.

At the last position, a prompt's keys and values are computed once, and every set is a single-token row
(`prefix_cache`), so a set costs about as much as one more token in the prompt. At all positions, a set is a row of the
prompt's length that starts at the set's first layer (`partial_forward`). Unsupported families, and models with active
edits, take a full forward pass per set.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.activations import last_log_probs
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.ablation import ablate_heads, every_head, mean_z
from icl_lens.interventions.edit_checks import warn_if_inert
from icl_lens.interventions.editor import Positions, group_by_layer
from icl_lens.interventions.effects import CLEAN_TOLERANCE, PASS_TOKENS
from icl_lens.interventions.memory_budget import max_prompts, max_rows
from icl_lens.interventions.partial_forward import Replacement, map_ablated_sets
from icl_lens.interventions.prefix_cache import PrefixCache, PrefixCacheUnsupported, check_no_hooks
from icl_lens.metrics import accuracy
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

RowsOf = Callable[[PrefixCache, slice, list[int]], Float[Tensor, "prompt row d_vocab"]]
"""Function of a prefix cache, edits and prompt indices that returns logits; row 0 of each prompt is not edited."""
Reducer = Callable[[Float[Tensor, "batch row d_vocab"], PromptBatch], Float[Tensor, "batch row n"]]
"""Function that reduces the log-probabilities after some prompts, with several rows each."""
Mode = Literal["zero", "mean"]
Sets = Sequence[Iterable[Head | tuple[int, int]]]
Reference = PromptBatch | Iterable[PromptBatch] | None


@dataclass(frozen=True)
class AnswerScores:
    """Label log-probabilities (nats), and whether the correct label is the top token of the full vocabulary."""

    label_log_probs: Float[Tensor, "prompt label"]
    top1_correct: Bool[Tensor, " prompt"]
    answer: Int[Tensor, " prompt"]
    """Index of the correct label; -1 where a prompt has no answer."""
    label_mask: Bool[Tensor, "prompt label"]
    """Labels that occur in each prompt."""

    @property
    def accuracy_between_labels(self) -> float:
        """Share of prompts whose correct label is the most probable of their labels, 0 to 1."""
        return accuracy(self.label_log_probs, self.answer, choices=self.label_mask)

    @property
    def accuracy_over_vocabulary(self) -> float:
        """Share of prompts whose correct label's token is the most probable of all tokens, 0 to 1."""
        return float(self.top1_correct.float().mean())


def label_log_probs_ablated(
    model: Any,
    batch: PromptBatch,
    head_sets: Sets,
    *,
    positions: Positions = "last",
    mode: Mode = "zero",
    reference: Reference = None,
) -> Float[Tensor, "batch set label"]:
    """Return the log-probability of each label after each prompt when the heads of each set are ablated jointly, nats.

    At the last position, or at all positions, z is set to zero or, with `mode="mean"`, to its mean over the same
    positions of the `reference` prompts. Equals `label_log_probs` within
    `ablate_heads(model, heads, positions=positions)` for each set, up to rounding; an empty set is the unedited model.
    To keep only some heads, ablate all others.

    At the last position this costs one pass over the prompts and one single-token row per set and prompt; at all
    positions, one row of the prompt's length from the set's first layer on; where neither is supported (see
    `head_effects`), one full pass per set. Raise InputError for empty `head_sets`, unknown heads, prompts without
    labels, and a mean without reference.

    Example:
        >>> curve = il.label_log_probs_ablated(model, batch, [[], [(5, 0)], [(5, 0), (4, 1)]])
        >>> curve.shape, (curve[:, 0] - il.label_log_probs(model, batch)).abs().max() < 1e-4
        (torch.Size([1, 3, 2]), tensor(True))
    """
    batch.require_labels("label to score", "use head_effects, which scores any target")
    return _without(model, batch, head_sets, _labels, positions, mode, reference)


def score_ablated_sets(
    model: Any,
    batch: PromptBatch,
    sets: Sets,
    *,
    positions: Positions = "all",
    mode: Mode = "zero",
    reference: Reference = None,
    means: Replacement = None,
) -> list[AnswerScores]:
    """Return the answer scores under ablation of each set of heads, on the CPU; see `label_log_probs_ablated`.

    `means`: precomputed means over `reference`, from `mean_z` of all heads.
    """
    batch.require_labels("label to score", "use head_effects, which scores any target")

    def read(log_probs: Tensor, some: PromptBatch) -> Tensor:
        right = log_probs.argmax(-1) == some.answer_tokens.to(log_probs.device)[:, None]
        return torch.cat([_labels(log_probs, some), right[..., None].to(log_probs)], dim=-1)

    found = _without(model, batch, sets, read, positions, mode, reference, means).cpu()
    return [
        AnswerScores(one[:, :-1].float(), one[:, -1] > 0.5, batch.answer.cpu(), batch.label_mask.cpu())
        for one in found.unbind(1)
    ]


def _labels(log_probs: Float[Tensor, "batch row d_vocab"], batch: PromptBatch) -> Float[Tensor, "batch row label"]:
    return log_probs[:, :, batch.label_tokens.to(log_probs.device)]


def _without(
    model: Any,
    batch: PromptBatch,
    sets: Sets,
    read: Reducer,
    positions: Positions,
    mode: Mode,
    reference: Reference,
    means: Replacement = None,
) -> Float[Tensor, "batch set n"]:
    """Return `read` of the log-probabilities after each prompt under ablation of each set of heads."""
    view = ModelView.of(model)
    check_choice("positions", positions, ("last", "all"))
    check_choice("mode", mode, ("zero", "mean"))
    if (mode == "mean") != (reference is not None):
        raise InputError(
            f"reference must be {'given for' if mode == 'mean' else 'omitted for'} mode={mode!r}, got "
            f"{'None' if reference is None else type(reference).__name__}"
        )
    if not len(sets):
        raise InputError("head_sets must contain at least one set, got none; a set may be empty")
    removed = head_mask(view, sets)
    averaged = None
    if reference is not None:
        averaged = [reference] if isinstance(reference, PromptBatch) else list(reference)
    if positions == "all":  # as in `ablate_heads`; at the last position sets may contain every head
        warn_if_inert(view, [Head(*place) for place in removed.any(0).nonzero().tolist()])
    try:
        replacement = None
        if averaged is not None:
            replacement = means or mean_z(view, every_head(view), averaged, positions)
        if positions == "last":
            return map_cached_rows(
                view, batch, len(removed), lambda kept, some, _: kept.ablate_sets(removed[some], replacement), read
            )
        check_no_hooks(view)
        return map_ablated_sets(
            view,
            batch,
            removed,
            lambda log_probs, rows: read(log_probs[:, None], batch[rows])[:, 0],
            replacement,
            pass_tokens=PASS_TOKENS,
        )
    except PrefixCacheUnsupported:
        return _full_passes(model, batch, removed, read, positions, mode, averaged)


def head_mask(view: ModelView, sets: Sequence[Iterable[Head | tuple[int, int]]]) -> Bool[Tensor, "set layer head"]:
    """Return which heads each set contains; raise InputError for unknown heads."""
    removed = torch.zeros(len(sets), view.n_layers, view.n_heads, dtype=torch.bool)
    for row, heads in enumerate(sets):
        some = list(heads)
        for layer, indices in group_by_layer(view, some).items() if some else ():
            removed[row, layer, indices] = True
    return removed


def labels_by_rows(
    view: ModelView,
    batch: PromptBatch,
    n_sets: int,
    rows_of: RowsOf,
    *,
    position_free: bool = False,
) -> Float[Tensor, "batch set label"]:
    """Return the log-probability of each label under each of several last-position edits; see `map_cached_rows`."""
    return map_cached_rows(view, batch, n_sets, rows_of, _labels, position_free=position_free)


def map_cached_rows(
    view: ModelView,
    batch: PromptBatch,
    n_sets: int,
    rows_of: RowsOf,
    read: Reducer,
    *,
    position_free: bool = False,
) -> Float[Tensor, "batch set n"]:
    """Return `read` of the log-probabilities under each of several last-position edits, from the prefix cache.

    `rows_of` gets the prefix cache of some prompts (with `position_free`, including position-free keys), the slice of
    edits, and the prompts' indices. Raise PrefixCacheUnsupported if rows do not reproduce the model's own pass.
    """
    size = max_prompts(view, batch, pass_tokens=PASS_TOKENS, n_rows=n_sets, position_free=position_free)
    # Prompts of similar length share a pass, to minimize padding.
    order = batch.last.argsort(stable=True).tolist()
    found: Tensor | None = None
    for start in range(0, len(order), size):
        prompts = order[start : start + size]
        some = batch[prompts]
        step = max(1, max_rows(view) // len(prompts) - 1)
        kept = _reraise_unsupported(view, lambda some=some: PrefixCache.of(view, some, position_free=position_free))
        clean = kept.log_probs[:, None]
        for first in range(0, n_sets, step):
            sets = slice(first, min(first + step, n_sets))
            rows = _reraise_unsupported(
                view, lambda kept=kept, sets=sets, prompts=prompts: rows_of(kept, sets, prompts)
            )
            own = torch.log_softmax(rows.to(clean.dtype), dim=-1)
            off = float((_checked(own[:, :1], clean, some) - _checked(clean, clean, some)).abs().max())
            if not off <= CLEAN_TOLERANCE.get(view.model.W_U.dtype, 1e-3):
                raise PrefixCacheUnsupported(f"unedited rows of {view.architecture} deviate by {off:.1e} nats")
            kept_of = read(own[:, 1:], some)
            if found is None:
                found = kept_of.new_empty(len(order), n_sets, kept_of.shape[-1])
            found[prompts, sets] = kept_of
    assert found is not None
    return found


def _checked(log_probs: Tensor, clean: Tensor, batch: PromptBatch) -> Float[Tensor, "batch row token"]:
    """Return the log-probabilities to check rows by: those of the labels or, without labels, of the top token."""
    if len(batch.label_tokens):
        return _labels(log_probs, batch)
    return log_probs.gather(-1, clean.argmax(-1, keepdim=True))


def _reraise_unsupported(view: ModelView, compute: Callable[[], Any]) -> Any:
    """Return `compute()`; raise PrefixCacheUnsupported if the family lacks hooks or cannot run single-token rows."""
    try:
        return compute()
    except InputError as error:
        raise PrefixCacheUnsupported(str(error)) from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        text = str(error).splitlines()[0]
        raise PrefixCacheUnsupported(f"{view.architecture} does not support single-token rows ({text})") from error


def _full_passes(
    model: Any,
    batch: PromptBatch,
    removed: Bool[Tensor, "set layer head"],
    read: Reducer,
    positions: Positions,
    mode: Mode,
    averaged: list[PromptBatch] | None,
) -> Float[Tensor, "batch set n"]:
    """Like `_without`, with one full forward pass per set."""
    found = []
    for one in removed:
        heads = [Head(*place) for place in one.nonzero().tolist()]
        edit = ablate_heads(model, heads, mode=mode, reference=averaged, positions=positions)
        with edit if heads else nullcontext():
            found.append(read(last_log_probs(model, batch)[:, None], batch))
    return torch.cat(found, dim=1)
