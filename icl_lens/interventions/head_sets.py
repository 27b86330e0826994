"""Removing sets of heads together at the last position, as many sets as wanted: curves over numbers of heads.

A prompt's keys and values are made once, and every set is a row of one token (`cached_rows`), so that a set costs about
as much as one more token in the prompt. Families, and models with edits at work, for which that cannot be done are run
anew for each set.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from icl_lens.activations.activations import label_log_probs
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.ablation import ablate_heads, mean_z
from icl_lens.interventions.cached_rows import CachedRows, NotShared, prompts_at_once, rows_at_once
from icl_lens.interventions.choice import group
from icl_lens.interventions.effects import CLEAN_TOLERANCE, PASS_TOKENS
from icl_lens.models.head import Head
from icl_lens.models.turns import in_turn
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


@in_turn
def label_log_probs_without(
    model: Any,
    batch: PromptBatch,
    sets: Sequence[Iterable[Head | tuple[int, int]]],
    *,
    mode: Literal["zero", "mean"] = "zero",
    reference: PromptBatch | Iterable[PromptBatch] | None = None,
) -> Float[Tensor, "batch set label"]:
    """Log-probability of each label after each prompt when the heads of each set are removed together, nats.

    Removed at the prompt's last position, where z is set to zero, or with `mode="mean"` to its mean over the last
    positions of the `reference` prompts. The same numbers as `label_log_probs` within `ablate_heads(model, heads,
    positions="last")`, a set at a time, within rounding; an empty set is the model as it is. To keep some heads only,
    give all the others.

    Costs a pass over the prompts and a row of one token for each set and prompt; where keys cannot be shared (see
    `head_effects`), a pass for each set. Raises InputError for no sets, heads the model does not have, prompts without
    labels, and a mean without reference.

    Example:
        >>> curve = il.label_log_probs_without(model, batch, [[], [(5, 0)], [(5, 0), (4, 1)]])
        >>> curve.shape, (curve[:, 0] - il.label_log_probs(model, batch)).abs().max() < 1e-4
        (torch.Size([1, 3, 2]), tensor(True))
    """
    view = ModelView.of(model)
    check_choice("mode", mode, ("zero", "mean"))
    if (mode == "mean") != (reference is not None):
        raise InputError(
            f"mode={mode!r} {'needs' if mode == 'mean' else 'takes no'} reference= prompts to average over"
        )
    if not len(sets):
        raise InputError("there is no set of heads to remove; give at least one, which may be empty")
    batch.check_labels("label to score", "head_effects scores any target")
    removed = marked(view, sets)
    averaged = None
    if reference is not None:
        averaged = [reference] if isinstance(reference, PromptBatch) else list(reference)
    try:
        return _shared(view, batch, removed, averaged)
    except NotShared:
        return _whole(model, batch, removed, mode, averaged)


def marked(view: ModelView, sets: Sequence[Iterable[Head | tuple[int, int]]]) -> Bool[Tensor, "set layer head"]:
    """Which heads each set removes; raises InputError for heads that are not there."""
    removed = torch.zeros(len(sets), view.n_layers, view.n_heads, dtype=torch.bool)
    for row, heads in enumerate(sets):
        some = list(heads)
        for layer, indices in group(view, some).items() if some else ():
            removed[row, layer, indices] = True
    return removed


def _shared(
    view: ModelView, batch: PromptBatch, removed: Bool[Tensor, "set layer head"], averaged: list[PromptBatch] | None
) -> Float[Tensor, "batch set label"]:
    """From rows that share their prompt's keys; raises NotShared."""
    instead = None
    if averaged is not None:
        every = {layer: list(range(view.n_heads)) for layer in range(view.n_layers)}
        instead = mean_z(view, every, averaged, "last")

    def without(kept: CachedRows, sets: slice) -> Tensor:
        return kept.without_sets(removed[sets], instead)

    return labels_by_rows(view, batch, len(removed), without)


def labels_by_rows(
    view: ModelView,
    batch: PromptBatch,
    n_sets: int,
    rows_of: Callable[[CachedRows, slice], Float[Tensor, "prompt row d_vocab"]],
    *,
    plain: bool = False,
) -> Float[Tensor, "batch set label"]:
    """Log-probability of each label under each of several edits at the last position, from rows that share keys.

    `rows_of` gets some prompts' keys (`plain`: also without position) and which edits are wanted, and gives logits: row
    0 of each prompt without an edit, the others with one each. Raises NotShared.
    """
    size = prompts_at_once(view, batch, pass_tokens=PASS_TOKENS, plain=plain)
    # Prompts of about one length share a pass, so that none is padded for nothing.
    order = batch.last.argsort(stable=True).tolist()
    found: Tensor | None = None
    for start in range(0, len(order), size):
        prompts = order[start : start + size]
        some = batch[prompts]
        step = max(1, rows_at_once(view) // len(prompts) - 1)
        kept = _or_not_shared(view, lambda some=some: CachedRows.of(view, some, plain=plain))
        clean = kept.log_probs[:, some.label_tokens.to(kept.log_probs.device)]
        if found is None:
            found = clean.new_empty(len(order), n_sets, clean.shape[1])
        for first in range(0, n_sets, step):
            sets = slice(first, min(first + step, n_sets))
            rows = _or_not_shared(view, lambda kept=kept, sets=sets: rows_of(kept, sets))
            own = torch.log_softmax(rows.to(clean.dtype), dim=-1)[:, :, some.label_tokens.to(rows.device)]
            off = float((own[:, 0] - clean).abs().max())
            if not off <= CLEAN_TOLERANCE.get(view.model.W_U.dtype, 1e-3):
                raise NotShared(f"a row of {view.architecture} without any edit is off by {off:.1e} nats")
            assert found is not None
            found[prompts, sets] = own[:, 1:]
    assert found is not None
    return found


def _or_not_shared(view: ModelView, compute: Callable[[], Any]) -> Any:
    """What `compute` gives; NotShared where the family does not run on rows, or shows no hook for them."""
    try:
        return compute()
    except InputError as error:
        raise NotShared(str(error)) from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        text = str(error).splitlines()[0]
        raise NotShared(f"{view.architecture} does not run on rows of one token ({text})") from error


def _whole(
    model: Any,
    batch: PromptBatch,
    removed: Bool[Tensor, "set layer head"],
    mode: Literal["zero", "mean"],
    averaged: list[PromptBatch] | None,
) -> Float[Tensor, "batch set label"]:
    """A pass over whole prompts for each set."""
    found = []
    for one in removed:
        heads = [Head(*place) for place in one.nonzero().tolist()]
        edit = ablate_heads(model, heads, mode=mode, reference=averaged, positions="last") if heads else nullcontext()
        with edit:
            found.append(label_log_probs(model, batch))
    return torch.stack(found, dim=1)
