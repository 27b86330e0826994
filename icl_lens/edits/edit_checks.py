"""Check once per model that edits of heads reach the logits and that patterns can be recomputed."""

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from icl_lens.edits.edit import group_by_layer
from icl_lens.edits.recomputed_patterns import (
    LayerValues,
    recompute_pattern,
    recording_hooks,
    score_inputs,
)
from icl_lens.errors import InputError
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.view import ModelView

# Model -> heads that were tested for reaching the logits, and layers whose patterns can be
# recomputed.
_TESTED: "WeakKeyDictionary[Any, set[Head]]" = WeakKeyDictionary()
_RECOMPUTABLE: "WeakKeyDictionary[Any, set[int]]" = WeakKeyDictionary()

# Length of the random prompt on which patterns are recomputed, and heads tested per pass.
N_TOKENS = 24
ROWS = 256
# Absolute tolerance of recomputed attention probabilities, by dtype of the model.
PATTERN_TOLERANCE = {
    torch.float64: 1e-5,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
# Largest allowed difference between an unedited row and the model's own log-probability, nats. Some
# families compute norms and softmax in float32 even in float64 models.
UNEDITED_TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-3,
    torch.bfloat16: 0.5,
    torch.float16: 0.1,
}


def unedited_tolerance(view: ModelView) -> float:
    """Return how far an unedited row may be from the model's own log-probability, nats."""
    return UNEDITED_TOLERANCE.get(view.model.W_U.dtype, 1e-3)


def checked_heads(
    view: ModelView, heads: Iterable[AnyHead], *, attention: bool = False
) -> dict[int, list[int]]:
    """Return layer -> its heads among `heads`, after checking that edits of them have an effect.

    The edits are of z or, with `attention`, of attention. Warn the first time that a head does not
    reach the logits. Raise InputError for an unknown head and, with `attention`, for a model whose
    attention patterns cannot be recomputed.
    """
    by_layer = group_by_layer(view, heads)
    if attention:
        _check_pattern_recomputable(view, by_layer)
    distinct_heads = []
    for layer, indices in by_layer.items():
        distinct_heads += [Head(layer, index) for index in indices]
    _warn_if_inert(view, distinct_heads)
    return by_layer


def _warn_if_inert(view: ModelView, heads: list[Head]) -> None:
    """Warn of heads whose z can be noise, in rows of one token, without changing the logits."""
    known = _TESTED.setdefault(view.model, set())
    new = sorted(set(heads) - known)
    for start in range(0, len(new), ROWS):
        heads_at_once = new[start : start + ROWS]
        reach_logits = _reach_logits(view, heads_at_once)
        inert = [
            str(head)
            for head, reaches in zip(heads_at_once, reach_logits, strict=True)
            if not reaches
        ]
        if inert:
            warnings.warn(
                f"editing {', '.join(inert)} does not change the logits of {view.name}, so their "
                "measured effects are zero by construction",
                stacklevel=5,
            )
    known.update(new)


def _reach_logits(view: ModelView, heads: list[Head]) -> list[bool]:
    """Return, for each head, whether noise in its z changes the logits."""
    rows_of: dict[int, list[tuple[int, int]]] = {}
    for row, (layer, head) in enumerate(heads):
        rows_of.setdefault(layer, []).append((row, head))

    def write_noise(z: Tensor, hook: Any, rows: list[tuple[int, int]]) -> Tensor:
        noise = torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(0))
        noise = noise * (z.abs().mean() + 1).cpu()
        z = z.clone()
        for row, head in rows:
            z[row, :, head] = noise[:, head].to(z)
        return z

    hooks = []
    for layer, rows in rows_of.items():
        hooks.append((view.hook(layer, "attn.hook_z"), partial(write_noise, rows=rows)))
    logits = _run(view, _tokens(view, 1).expand(len(heads) + 1, -1), hooks)
    return [not torch.equal(row, logits[-1]) for row in logits[:-1]]


def _check_pattern_recomputable(view: ModelView, layers: Iterable[int]) -> None:
    """Raise InputError if recomputed patterns differ from the model's in a layer not yet tested."""
    known = _RECOMPUTABLE.setdefault(view.model, set())
    values = [LayerValues(view, layer) for layer in sorted(set(layers) - known)]
    if not values:
        return
    tokens = _tokens(view, N_TOKENS)
    hooks = []
    for layer_values in values:
        hooks += recording_hooks(layer_values)
    _run(view, tokens, hooks)
    all_heads = list(range(view.n_heads))
    for layer_values in values:
        inputs = score_inputs(layer_values, all_heads)
        scale = inputs.q.new_ones(1, view.n_heads, tokens.shape[1])
        ours = recompute_pattern(layer_values, inputs, all_heads, scale)
        error = float((ours.float() - layer_values.seen["pattern"].float()).abs().max())
        if not error <= PATTERN_TOLERANCE.get(ours.dtype, 1e-4):
            raise InputError(
                f"{view.architecture} is not supported by this intervention: in layer "
                f"{layer_values.layer} recomputed attention differs from the model's by "
                f"{error:.1e}; use ablate_heads, which does not recompute it"
            )
        known.add(layer_values.layer)


def _tokens(view: ModelView, n: int) -> Tensor:
    """Return one row of up to `n` random tokens, the same in every call."""
    n = min(n, int(view.cfg.n_ctx))
    d_vocab = view.model.W_U.shape[1]
    tokens = torch.randint(d_vocab, (1, n), generator=torch.Generator().manual_seed(0))
    return tokens.to(getattr(view.cfg, "device", None) or view.unembed_device)


def _run(view: ModelView, tokens: Tensor, hooks: list[tuple[str, Any]]) -> Tensor:
    """Return the last position's logits in a pass with `hooks` and without active edits."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(view.exclusive_pass())
        stack.enter_context(edits_disabled(view))
        stack.enter_context(view.model.hooks(fwd_hooks=hooks))
        return view.model(tokens, return_type="logits")[:, -1]
