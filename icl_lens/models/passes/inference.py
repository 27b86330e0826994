"""Context managers for inference passes that keep no attention or KV cache."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu

from icl_lens.models.passes.modules import all_modules

# Dtypes in which one fused kernel and transformers' expanded formula of tanh GELU differ
# negligibly.
EXACT = (torch.float32, torch.float64)


@contextmanager
def inference_kwargs(model: Any) -> Iterator[dict[str, Any]]:
    """Yield arguments for passes that keep only what hooks record; see
    `ModelView.inference_pass`.

    While the block runs, attention modules drop their patterns after each pass, and GELU, of which
    transformers' formula keeps several copies of the neurons, is computed in one step.
    """
    from transformers.activations import NewGELUActivation

    original = getattr(model, "original_model", None)
    if original is None:
        yield {}
        return

    def forget_pattern(attn: Any, *_: Any) -> None:
        attn._pattern = None

    handles = [
        block.attn.register_forward_hook(forget_pattern)
        for block in model.blocks
        if hasattr(block.attn, "_pattern")
    ]
    gelu_forwards = [
        (module, partial(_gelu, module.forward))
        for module in all_modules(original)
        if type(module) is NewGELUActivation
    ]
    try:
        with replace_forwards(gelu_forwards):
            yield {"output_attentions": False, "use_cache": False}
    finally:
        for handle in handles:
            handle.remove()


def _gelu(expanded: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Compute tanh GELU in one kernel or, in half precision, with `expanded`, whose formula makes
    eight passes over `x`.
    """
    return gelu(x, approximate="tanh") if x.dtype in EXACT else expanded(x)


@contextmanager
def replace_forwards(forwards: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Replace `forward` in each (module, forward) pair's module while the block runs."""
    before = [vars(module).get("forward") for module, _ in forwards]
    try:
        for module, forward in forwards:
            vars(module)["forward"] = forward
        yield
    finally:
        for (module, _), forward_before in zip(forwards, before, strict=True):
            if forward_before is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = forward_before


def log_probs_of(logits: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
    """Return log-probabilities, nats, computed in float32 or, for float64 logits, in float64."""
    return torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
