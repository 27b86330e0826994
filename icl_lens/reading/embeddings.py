"""Read what enters the first layer, from forward passes that end before it.

Families scale or norm token embeddings, so they are read in a pass and not from the matrix.
"""

from contextlib import suppress
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.models.passes.locking import model_lock
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.writers import has_pos_embed


class _Stop(Exception):
    """Raised in a hook to end a forward pass early."""


def embedded(model: Any, batch: PromptBatch) -> Float[Tensor, "batch pos d_embed"]:
    """Return the batch's token embeddings."""
    return _before_layers(model, batch.tokens, batch.attention_mask, "hook_embed")["hook_embed"]


def _before_layers(model: Any, tokens: Tensor, mask: Tensor, last: str) -> dict[str, Tensor]:
    """Run a forward pass up to the hook `last`; return what this hook and the one of position
    embeddings have seen.
    """
    seen: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any, name: str) -> None:
        seen[name] = value.detach().clone()
        if name == last:
            raise _Stop

    hooks = [
        (name, partial(keep, name=name))
        for name in ("hook_pos_embed", last)
        if name in model.hook_dict
    ]
    with model_lock(model), suppress(_Stop), torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(tokens, attention_mask=mask, return_type="logits")
    return seen


def token_inputs(view: ModelView, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n d_model"]:
    """Return what the first layer reads of each token, without its position.

    These are embeddings after the norm of BLOOM or the multiplier of Gemma and Granite. Active
    hooks are disabled.
    """
    last = view.hook(0, "hook_resid_pre")
    rows = tokens[:, None].to(view.cfg.device)
    with view.hooks_disabled():
        seen = _before_layers(view.model, rows, torch.ones_like(rows), last)
    x = seen[last][:, 0].to(view.unembed_device, view.compute_dtype)
    if not has_pos_embed(view):
        return x
    return x - seen["hook_pos_embed"].to(x).expand(len(x), 1, -1)[:, 0]
