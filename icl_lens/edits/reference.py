"""What heads compute on reference prompts, which ablation and vectors use: z, its mean, and draws of prompts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.passes import last_logits
from icl_lens.edits.edit import Positions
from icl_lens.errors import InputError
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_batch, check_vocabulary

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
    """Return layer -> float64 mean of its heads' z over all tokens of the reference, or over each prompt's last."""
    sums: dict[int, Tensor] = {}
    count = 0

    def add(batch: PromptBatch, layer: int, z: Tensor) -> None:
        mask = batch.attention_mask.to(z.device, torch.float64)
        total = (
            _at_last(batch, z).double().sum(0) if positions == "last" else torch.einsum("bphd,bp->hd", z.double(), mask)
        )
        sums[layer] = sums.get(layer, 0.0) + total

    for batch in reference_batches(reference):
        count += len(batch) if positions == "last" else int(batch.attention_mask.sum())
        _read_z(view, layers, batch, add)
    means = {layer: total[None] / count for layer, total in sums.items()}
    if not all(bool(mean.isfinite().all()) for mean in means.values()):
        raise InputError("the mean over reference must be finite, got NaN or infinite values; pass other prompts")
    return means


def last_z(
    view: ModelView, layers: Sequence[int], reference: Batches
) -> dict[int, Float[Tensor, "prompt head d_head"]]:
    """Return layer -> its heads' z at the last token of each reference prompt."""
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for batch in reference_batches(reference):
        _read_z(view, layers, batch, lambda batch, layer, z: found[layer].append(_at_last(batch, z).clone()))
    return {layer: torch.cat(pieces) for layer, pieces in found.items()}


def drawn_prompts(reference: Batches, batch: PromptBatch, seed: int) -> Int[Tensor, " prompt"]:
    """Return for each prompt of the batch the index of a reference prompt: drawn by its tokens, and never itself."""
    known = [tokens for one in reference_batches(reference) for tokens in _token_rows(one)]
    drawn = []
    for number, tokens in enumerate(_token_rows(batch)):
        others = [index for index, other in enumerate(known) if other != tokens]
        if not others:
            raise InputError(f"reference must have a prompt other than prompt {number} of the batch; pass more prompts")
        drawn.append(others[crc32(repr((seed, tokens)).encode()) % len(others)])
    return torch.tensor(drawn)


def _token_rows(batch: PromptBatch) -> list[tuple[int, ...]]:
    return [tuple(row[: last + 1]) for row, last in zip(batch.tokens.tolist(), batch.last.tolist(), strict=True)]


def _at_last(batch: PromptBatch, z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch head d_head"]:
    return z[torch.arange(len(z)), batch.last.to(z.device)]


def _read_z(
    view: ModelView, layers: Sequence[int], batch: PromptBatch, read: Callable[[PromptBatch, int, Tensor], None]
) -> None:
    """Run prompts of a reference without edits, and call `read` with each layer's z."""

    def reader(layer: int) -> Any:
        return lambda z, hook: read(batch, layer, z.detach())

    check_vocabulary(view.model, batch, "reference")
    with edits_disabled(view):
        last_logits(view.model, batch, [(view.hook(layer, "attn.hook_z"), reader(layer)) for layer in layers])
