"""Check once per model that edits of a head reach the logits and that its attention patterns can be recomputed."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.interventions.editor import edits_disabled, group_by_layer
from icl_lens.interventions.pattern import LayerValues, recompute_pattern, recording_hooks, score_inputs
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView

_MOVES: "WeakKeyDictionary[Any, set[Head]]" = WeakKeyDictionary()
_UNDERSTOOD: "WeakKeyDictionary[Any, set[int]]" = WeakKeyDictionary()

N_TOKENS = 24
ROWS = 256
# Absolute tolerance of recomputed attention probabilities, by dtype of the model.
PATTERN_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def checked_heads(
    view: ModelView, heads: Iterable[Head | tuple[int, int]], *, attention: bool = False
) -> dict[int, list[int]]:
    """Return layer -> its chosen heads, after checking that they can be edited; with `attention`, before z.

    Warn the first time a head that does not reach the logits is chosen. Raise InputError for an unknown head and, with
    `attention`, for a model whose attention patterns cannot be recomputed.
    """
    by_layer = group_by_layer(view, heads)
    if attention:
        _check_pattern_recomputable(view, by_layer)
    _warn_if_inert(view, [Head(layer, index) for layer, indices in by_layer.items() for index in indices])
    return by_layer


def _warn_if_inert(view: ModelView, heads: list[Head]) -> None:
    """Warn if setting a head's hook_z, to noise in a single-token row of its own, does not change the logits."""
    known = _MOVES.setdefault(view.model, set())
    new = sorted(set(heads) - known)
    for start in range(0, len(new), ROWS):
        some = new[start : start + ROWS]
        still = [str(head) for head, moved in zip(some, _moved(view, some), strict=True) if not moved]
        if still:
            warnings.warn(
                f"editing {', '.join(still)} does not change the logits of {view.name}, so their measured effects "
                "are zero by construction",
                stacklevel=5,
            )
    known.update(new)


def _moved(view: ModelView, heads: list[Head]) -> list[bool]:
    by_layer: dict[int, list[tuple[int, int]]] = {}
    for row, (layer, head) in enumerate(heads):
        by_layer.setdefault(layer, []).append((row, head))

    def edit(where: list[tuple[int, int]]) -> Any:
        def hook_fn(z: Tensor, hook: Any) -> Tensor:
            noise = torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(0))
            size = z.abs().mean() + 1
            z = z.clone()
            for row, head in where:
                z[row, :, head] = (noise[:, head] * size.cpu()).to(z)
            return z

        return hook_fn

    hooks = [(view.hook(layer, "attn.hook_z"), edit(where)) for layer, where in by_layer.items()]
    tokens = _tokens(view, 1).expand(len(heads) + 1, -1)
    logits = _run(view, tokens, hooks)
    return [not torch.equal(row, logits[-1]) for row in logits[:-1]]


def _check_pattern_recomputable(view: ModelView, layers: Iterable[int]) -> None:
    """Raise InputError if recomputed attention patterns differ from the model's own in any of `layers`.

    All layers of a model are tested once, in one pass.
    """
    known, asked = _UNDERSTOOD.setdefault(view.model, set()), set(layers)
    if known >= asked:
        return
    tokens = _tokens(view, N_TOKENS)
    seen: dict[int, LayerValues] = {}
    hooks = []
    for layer in range(view.n_layers):
        with _only_if(layer in asked):
            values = LayerValues(view, layer)
            hooks += recording_hooks(values)
            seen[layer] = values
    _run(view, tokens, hooks)
    everything = list(range(view.n_heads))
    for layer, values in seen.items():
        with _only_if(layer in asked):
            inputs = score_inputs(values, everything)
            ours = recompute_pattern(values, inputs, everything, inputs.q.new_ones(1, view.n_heads, tokens.shape[1]))
            error = float((ours.float() - values.seen["pattern"].float()).abs().max())
            if not error <= PATTERN_TOLERANCE.get(ours.dtype, 1e-4):
                raise InputError(
                    f"{view.architecture} is not supported by this intervention: in layer {layer} recomputed attention "
                    f"differs from the model's by {error:.1e}; use ablate_heads, which does not recompute it"
                )
            known.add(layer)


@contextmanager
def _only_if(asked: bool) -> Iterator[None]:
    """Suppress InputError in the block unless `asked`: errors of other layers do not matter."""
    try:
        yield
    except InputError:
        if asked:
            raise


def _tokens(view: ModelView, n: int) -> Tensor:
    n = min(n, int(view.cfg.n_ctx))
    d_vocab = view.model.W_U.shape[1]
    tokens = torch.randint(d_vocab, (1, n), generator=torch.Generator().manual_seed(0))
    return tokens.to(getattr(view.cfg, "device", None) or view.unembed_device)


def _run(view: ModelView, tokens: Tensor, hooks: list[tuple[str, Any]]) -> Tensor:
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(view.exclusive_pass())
        stack.enter_context(edits_disabled(view))
        stack.enter_context(view.model.hooks(fwd_hooks=hooks))
        return view.model(tokens, return_type="logits")[:, -1]
