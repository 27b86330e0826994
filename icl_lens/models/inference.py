"""Passes of our own: modules that run otherwise for their time, and nothing kept but what hooks keep."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu

# Where rounding after each step, as the formula written out has it, is below what can be told apart.
EXACT = (torch.float32, torch.float64)


@contextmanager
def inference_kwargs(model: Any) -> Iterator[dict[str, Any]]:
    """Arguments for passes in the block that keep nothing but what hooks keep; see `ModelView.lean_pass`."""
    from transformers.activations import NewGELUActivation

    original = getattr(model, "original_model", None)
    if original is None:
        yield {}
        return

    def forget(attn: Any, *_: Any) -> None:
        attn._pattern = None

    handles = [block.attn.register_forward_hook(forget) for block in model.blocks if hasattr(block.attn, "_pattern")]
    written_out = [module for module in original.modules() if type(module) is NewGELUActivation]
    try:
        with replaced_forwards([(module, partial(_gelu, module.forward)) for module in written_out]):
            yield {"output_attentions": False, "use_cache": False}
    finally:
        for handle in handles:
            handle.remove()


def _gelu(own: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """GELU by tanh in one kernel: written out, it goes over the widest activations eight times."""
    return gelu(x, approximate="tanh") if x.dtype in EXACT else own(x)


@contextmanager
def replaced_forwards(forwards: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Modules with another `forward` while the block runs."""
    before = [vars(module).get("forward") for module, _ in forwards]
    try:
        for module, forward in forwards:
            vars(module)["forward"] = forward
        yield
    finally:
        for (module, _), own in zip(forwards, before, strict=True):
            if own is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = own
