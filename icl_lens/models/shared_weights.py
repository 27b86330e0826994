"""Copy a Hugging Face model without its weights."""

import copy
from typing import Any

import torch


def with_shared_weights(hf_model: Any) -> Any:
    """Return a copy of a Hugging Face model that shares the memory of its weights.

    A bridge replaces modules, switches to eager attention and turns gradients off, which must not
    change the original.
    """
    shared: dict[int, Any] = {}
    for parameter in hf_model.parameters():
        if type(parameter) is torch.nn.Parameter:
            shared[id(parameter)] = torch.nn.Parameter(parameter.detach(), requires_grad=False)
        else:
            shared[id(parameter)] = parameter
    for module in hf_model.modules():  # weights that accelerate keeps outside the modules
        hook = getattr(module, "_hf_hook", None)
        for align_hook in (hook, *getattr(hook, "hooks", ())):
            for weights in (
                getattr(align_hook, "weights_map", None),
                getattr(align_hook, "tied_params_map", None),
            ):
                shared[id(weights)] = weights
    return copy.deepcopy(hf_model, shared)
