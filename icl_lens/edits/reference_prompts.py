"""What heads compute on reference prompts, which ablation and vectors use: z, its mean, and draws
of prompts.

A mean over prompts of one task of pairs keeps what its heads do in every prompt, such as a function
vector. The mean over several tasks, a batch each, does not; `SamePairsWarning` tells a user who
takes the first.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from warnings import warn
from zlib import crc32

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.edit import Positions
from icl_lens.errors import InputError
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, check_vocabulary
from icl_lens.reading.last_logits import last_logits

Batches = PromptBatch | Iterable[PromptBatch]


def reference_batches(reference: Batches) -> list[PromptBatch]:
    """Return the batches of a reference; raise InputError if there are none."""
    batches: list[Any] = [reference]
    if isinstance(reference, Iterable) and not isinstance(reference, PromptBatch):
        batches = list(reference)
    if not batches:
        raise InputError("reference must contain at least one batch, got none")
    for batch in batches:
        check_batch(batch, "reference")
    return batches


def mean_z(
    view: ModelView, layers: Sequence[int], reference: Batches, positions: Positions
) -> dict[int, Float[Tensor, "1 head d_head"]]:
    """Return layer -> float64 mean of its heads' z over all tokens of the reference, or over each
    prompt's last.

    Every token, or prompt, has the same weight, however the reference is divided into batches.
    """
    batches = reference_batches(reference)
    sums: dict[int, Tensor] = {}

    def add(prompts: PromptBatch, layer: int, z: Tensor) -> None:
        if positions == "last":
            total = _at_last(prompts, z).double().sum(0)
        else:
            mask = prompts.attention_mask.to(z.device, torch.float64)
            total = torch.einsum("bphd,bp->hd", z.double(), mask)
        sums[layer] = sums.get(layer, 0.0) + total

    for batch in batches:
        _read_z(view, layers, batch, add)
    if positions == "last":
        weight = sum(len(batch) for batch in batches)
    else:
        weight = sum(int(batch.attention_mask.sum()) for batch in batches)
    return finite_means({layer: total[None] / weight for layer, total in sums.items()})


def finite_means(means: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return layer -> mean over a reference; raise InputError unless all are finite."""
    if not all(bool(mean.isfinite().all()) for mean in means.values()):
        raise InputError(
            "the mean over reference must be finite, got NaN or infinite values; pass other prompts"
        )
    return means


def last_z(
    view: ModelView, layers: Sequence[int], reference: Batches
) -> dict[int, Float[Tensor, "prompt head d_head"]]:
    """Return layer -> its heads' z at the last token of each reference prompt."""
    pieces: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def add(batch: PromptBatch, layer: int, z: Tensor) -> None:
        pieces[layer].append(_at_last(batch, z).clone())

    for batch in reference_batches(reference):
        _read_z(view, layers, batch, add)
    return {layer: torch.cat(layer_pieces) for layer, layer_pieces in pieces.items()}


def drawn_prompts(reference: Batches, batch: PromptBatch, seed: int) -> Int[Tensor, " prompt"]:
    """Return for each prompt of the batch the index of a reference prompt: drawn by its tokens, and
    never itself.
    """
    reference_tokens = []
    for reference_batch in reference_batches(reference):
        reference_tokens += _token_rows(reference_batch)
    drawn = []
    for number, tokens in enumerate(_token_rows(batch)):
        different = [index for index, row in enumerate(reference_tokens) if row != tokens]
        if not different:
            raise InputError(
                f"reference must have a prompt other than prompt {number} of the batch; pass more "
                "prompts"
            )
        drawn.append(different[crc32(repr((seed, tokens)).encode()) % len(different)])
    return torch.tensor(drawn)


class SamePairsWarning(UserWarning):
    """Given if all reference prompts show pairs of the task that is scored."""


MIN_SHARED = 0.05
"""Least share of the scored prompts' pairs that a batch of the same task shows; other tasks share a
few by chance.
"""


def warn_of_same_pairs(batch: PromptBatch, reference: Batches, *, stacklevel: int = 3) -> None:
    """Warn if every batch of the reference shows some of the pairs of the prompts that are scored,
    and so is likely of the same task. `stacklevel` leads from here to the user's call.
    """
    if is_of_same_pairs(batch, reference):
        warn(
            SamePairsWarning(
                "reference must contain other tasks to take away what heads do for this one, got "
                "prompts of the same pairs, whose mean keeps it; pass several batches, one for "
                "each of several tasks"
            ),
            stacklevel=stacklevel,
        )


def is_of_same_pairs(batch: PromptBatch, reference: Batches) -> bool:
    """Return whether the prompts show pairs, and every batch of the reference shows at least
    `MIN_SHARED` of them.
    """
    pairs = _pairs(batch)
    n_texts = len({text for text, _ in pairs})
    n_outputs = len({output for _, output in pairs})
    if n_texts > 2 * n_outputs or n_outputs <= 2:
        return False  # texts of a few classes, or no prompts with demonstrations
    for reference_batch in reference_batches(reference):
        if len(pairs & _pairs(reference_batch)) < MIN_SHARED * len(pairs):
            return False
    return True


def reference_in_words(batch: PromptBatch, reference: Batches) -> str:
    """Return in words which prompts a reference has: "16 prompts in 2 batches", "8 prompts of the
    same task, which keeps what heads do in all of them".
    """
    batches = reference_batches(reference)
    n_prompts = sum(map(len, batches))
    text = f"{n_prompts} prompt{'s' * (n_prompts != 1)}"
    if len(batches) > 1:
        text += f" in {len(batches)} batches"
    if is_of_same_pairs(batch, reference):
        text += " of the same task, which keeps what heads do in all of them"
    return text


def _pairs(batch: PromptBatch) -> set[tuple[str, str]]:
    """Return all texts of a batch's prompts with their labels, queries with answers included."""
    pairs: set[tuple[str, str]] = set()
    for prompt in batch.prompts:
        for demonstration in prompt.demonstrations:
            pairs.add((demonstration.text, demonstration.label))
        if prompt.answer is not None:
            pairs.add((prompt.query, prompt.answer))
    return pairs


def _token_rows(batch: PromptBatch) -> list[tuple[int, ...]]:
    rows = []
    for ids, last in zip(batch.tokens.tolist(), batch.last.tolist(), strict=True):
        rows.append(tuple(ids[: last + 1]))
    return rows


def _at_last(
    batch: PromptBatch, z: Float[Tensor, "batch pos head d_head"]
) -> Float[Tensor, "batch head d_head"]:
    return z[torch.arange(len(z)), batch.last.to(z.device)]


def _read_z(
    view: ModelView,
    layers: Sequence[int],
    batch: PromptBatch,
    read: Callable[[PromptBatch, int, Tensor], None],
) -> None:
    """Run prompts of a reference without edits, a few at a time, and call `read` with each layer's
    z.
    """

    def reader(layer: int) -> Any:
        return lambda z, hook: read(prompts, layer, z.detach())

    check_vocabulary(view.model, batch, "reference")
    hooks = [(view.hook(layer, "attn.hook_z"), reader(layer)) for layer in layers]
    with edits_disabled(view):
        for prompts in batch.split(rows_at_once(view, batch.tokens.shape[1])):
            last_logits(view.model, prompts, hooks)
