"""Compute what an FFN writes for any input, with the model's own modules.

1. Every input is the residual stream of a text of one token. A pass begins at the FFN's layer, whose
   attention writes zeros, so that the FFN reads this stream.
2. Norms before and after the FFN, experts and multipliers are those of the model.
3. The pass ends where the FFN has written.
"""

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.models.passes.memory import ROW_BYTES
from icl_lens.models.view import ModelView
from icl_lens.reading.layer_inputs import LayerInputs


class _Stop(Exception):
    """Raised in a hook to end a forward pass early."""


def ffn_outputs(
    view: ModelView, layer: int, x: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n d_model"]:
    """Return what a layer's FFN adds to the residual stream when it reads `x`, the stream before
    its norm.

    Hooks of hook points, and thereby edits, are disabled.
    """
    if not len(x):
        return x
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * view.d_model)
    piece_rows = max(1, ROW_BYTES // (3 * d_mlp * x.element_size()))
    inputs = _layer_inputs(view)
    written = []
    with torch.no_grad(), view.hooks_disabled(), view.inference_pass() as kwargs:
        for rows in x.split(piece_rows):
            written.append(_written(view, layer, rows, inputs, kwargs).to(x))
    return torch.cat(written)


def _written(
    view: ModelView,
    layer: int,
    x: Float[Tensor, "n d_model"],
    inputs: LayerInputs,
    kwargs: dict[str, Any],
) -> Float[Tensor, "n d_model"]:
    """Return what the FFN writes for each input, in one pass."""
    seen: list[Tensor] = []

    def write_zeros(attn_out: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(attn_out)

    def keep(mlp_out: Tensor, hook: Any) -> None:
        seen.append(mlp_out.detach()[:, 0].clone())
        raise _Stop

    hooks = [
        (view.hook(layer, "hook_attn_out"), write_zeros),
        (view.hook(layer, "hook_mlp_out"), keep),
    ]
    tokens = torch.zeros(len(x), 1, dtype=torch.long, device=view.cfg.device)
    resid = x[:, None].to(view.model.W_U.dtype)
    with suppress(_Stop), inputs.resumed_at(layer, resid), view.model.hooks(fwd_hooks=hooks):
        view.model(tokens, attention_mask=torch.ones_like(tokens), return_type="logits", **kwargs)
    return seen[0]


# Model -> what its layers return, which one pass over a token shows.
_BLOCK_INPUTS: "WeakKeyDictionary[Any, int | None]" = WeakKeyDictionary()


def _layer_inputs(view: ModelView) -> LayerInputs:
    """Return what passes that begin at a layer need to know of the model's layers."""
    inputs = LayerInputs(view)
    if view.model not in _BLOCK_INPUTS:
        token = torch.zeros(1, 1, dtype=torch.long, device=view.cfg.device)
        with torch.no_grad(), inputs.recorded((), Tensor.clone), view.inference_pass() as kwargs:
            view.model(token, return_type="logits", **kwargs)
        _BLOCK_INPUTS[view.model] = inputs.n_returned
    inputs.n_returned = _BLOCK_INPUTS[view.model]
    return inputs
