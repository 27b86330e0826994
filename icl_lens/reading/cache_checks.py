"""Checks that a TransformerLens cache is of the tokens of a batch."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models import attention_scores
from icl_lens.models.passes.independent_rows import first_angles
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.embeddings import embedded


def check_same_tokens(model: Any, cache: Any, batch: PromptBatch) -> None:
    """Raise InputError if the cache was made from other tokens than the batch's."""
    remedy = (
        "create it with model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask), "
        "since strings may be tokenized differently, for instance with a beginning-of-sequence "
        "token"
    )
    try:
        cached = cache["hook_embed"]
    except KeyError:
        return  # a filtered cache: missing hooks are reported when they are read
    if cached.ndim != 3 or len(cached) != len(batch):
        return  # reported when the hooks are read
    if cached.shape[1] != batch.tokens.shape[1]:
        raise InputError(
            f"cache must be of tokens of shape {tuple(batch.tokens.shape)}, got "
            f"{tuple(cached.shape[:2])}; {remedy}"
        )
    expected = embedded(model, batch).to(cached.device)
    real = batch.attention_mask.to(cached.device).bool()
    error = (expected.to(cached) - cached)[real].abs().max()
    if not error <= 1e-3 * expected[real].abs().max():
        raise InputError(f"cache must be of the batch's tokens, got other embeddings; {remedy}")


def check_same_rotations(view: ModelView, cache: Any, batch: PromptBatch) -> None:
    """Raise InputError if a row of the cache has another rotation than it has alone (see
    `independent_rows`).
    """
    lengths = (batch.last + 1).tolist()
    angles_alone = {length: first_angles(view.model, length) for length in set(lengths)}
    if not angles_alone[lengths[0]] or batch.tokens.shape[1] < 2:
        return
    for layer in range(view.n_layers):
        hooks = attention_scores.rotation_hooks(view, layer) or ()
        cached = [cache[hook] for hook in hooks if hook in cache]
        if len(cached) != 2:
            continue
        for row, length in enumerate(lengths):
            if not _is_among(_angles_of_row(cached, row), angles_alone[length]):
                raise InputError(
                    f"cache must have the rotation that prompt {row} has alone, but that of "
                    f"{view.name} depends on the longest prompt of a pass; use il.capture(model, "
                    "batch), which rotates each prompt alone"
                )


def _angles_of_row(cached: Sequence[Tensor], row: int) -> Tensor:
    """Return the cosines and sines of a row's second position; a single row's are those of all."""
    return torch.cat([angles[row if len(angles) > 1 else 0, 1] for angles in cached])


def _is_among(angles: Tensor, candidates: Iterable[Tensor]) -> bool:
    """Return whether angles equal one of several candidates up to rounding."""
    rounding = 8 * torch.finfo(angles.dtype).eps
    return any(
        torch.allclose(candidate.to(angles), angles, atol=rounding, rtol=0)
        for candidate in candidates
    )
