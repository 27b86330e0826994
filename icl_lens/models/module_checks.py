"""Check that modules compute what their weights say, before weights are read in their place.

Adapters (LoRA, DoRA, IA3 of peft) and modules of users may have the `weight` of the projection that
they wrap, and compute something else. A pass runs the module; a function that reads the weight
would describe another model.
"""

from typing import Any

import torch
from torch import Tensor, nn

from icl_lens.errors import InputError
from icl_lens.models.passes.module_hooks import LIBRARIES, own_name, package_of

REMEDY = (
    "merge an adapter with hf_model.merge_and_unload(), make pruning permanent with "
    "torch.nn.utils.prune.remove, or put your change into the weight, and load the model again"
)
N_VECTORS = 4
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Allowed difference of the outputs for random vectors, in parts of the largest output."""


def check_weight(model: Any, owner: Any, name: str) -> None:
    """Raise InputError if the module that a weight belongs to does not multiply by this weight.

    `owner` is a bridge of attention or an FFN, or the model; `name` is that of TransformerLens,
    such as "W_Q".
    """
    module = module_of(model, owner, name)
    if module is None or _is_of_a_library(module) or _multiplies(module):
        return
    names = {id(part): own_name(path) for path, part in model.original_model.named_modules()}
    raise InputError(
        f"{name} must be what the model computes with, but {names.get(id(module), 'its module')} "
        f"computes something else than its weight says ({type(module).__name__} of "
        f"{package_of(type(module))}); {REMEDY}"
    )


def adapter_parameters(model: Any, owner: Any, name: str) -> list[Tensor]:
    """Return the parameters of a weight's module if an adapter or a class of a user wraps it; else
    nothing.
    """
    module = module_of(model, owner, name)
    return [] if module is None or _is_of_a_library(module) else list(module.parameters())


def module_of(model: Any, owner: Any, name: str) -> nn.Module | None:
    """Return the module of the Hugging Face model that a weight belongs to, if a bridge states
    it.
    """
    if owner is model:
        bridge = getattr(model, "embed" if name == "W_E" else "unembed", None)
    else:
        part = name.partition("_")[2].lower()  # W_Q is the weight of `q`, b_out the bias of `out`
        bridge = getattr(owner, part, None)
    return getattr(bridge, "original_component", None)


def _is_of_a_library(module: nn.Module) -> bool:
    """Return whether a module runs only code of libraries that define its class together with its
    weight.
    """
    replaced = vars(module).get("forward")
    return package_of(type(module)) in LIBRARIES and (
        replaced is None or package_of(replaced) in LIBRARIES
    )


def _multiplies(module: nn.Module) -> bool:
    """Return whether a module multiplies random vectors by its weight and adds its bias."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return False
    generator = torch.Generator().manual_seed(0)
    for matrix in (weight.T, weight):  # as in nn.Linear, and as in GPT-2
        x = torch.randn(1, N_VECTORS, matrix.shape[0], generator=generator).to(weight)
        try:
            with torch.no_grad():
                output = module(x)
        except Exception:  # raised for vectors of the other side's size
            continue  # a module that always raises does not multiply
        expected = x @ matrix if bias is None else x @ matrix + bias
        if not isinstance(output, Tensor) or output.shape != expected.shape:
            continue
        error = float((output - expected).abs().max() / (expected.abs().max() + 1e-30))
        if error <= TOLERANCE.get(weight.dtype, 5e-2):
            return True
    return False
