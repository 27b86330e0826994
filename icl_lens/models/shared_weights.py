"""Copy a Hugging Face model without its weights."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def with_shared_weights(hf_model: Any) -> Any:
    """Return a copy of a Hugging Face model that shares the memory of its weights.

    A bridge replaces modules, switches to eager attention and turns gradients off, which must not
    change the original.
    """
    return copy.deepcopy(hf_model, _shared_weights(hf_model))


def unbridged(model: Any) -> Any:
    """Return a copy of the Hugging Face model in a bridge that shares the memory of its weights and
    buffers and has its own modules in place of those that the bridge put there.

    The bridge does not change, since other threads may read it.
    """
    hf_model = model.original_model
    copies = _shared_weights(hf_model)
    for buffer in hf_model.buffers():
        copies[id(buffer)] = buffer
    for bridge, original in reversed(list(_bridges(hf_model))):  # inner ones first
        copies[id(bridge)] = copy.deepcopy(original, copies)
    return copy.deepcopy(hf_model, copies)


def _bridges(root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the modules that a bridge has put into a model, and what each stands for; outer ones
    first.
    """
    waiting, visited = [root], {id(root)}
    while waiting:
        for module in filter(None, waiting.pop()._modules.values()):
            original = module
            while (inner := original._modules.get("_original_component")) is not None:
                original = inner
            if original is not module:
                yield module, original
            if id(original) not in visited:
                visited.add(id(original))
                waiting.append(original)


def _shared_weights(hf_model: nn.Module) -> dict[int, Any]:
    """Return what `copy.deepcopy` takes in place of a model's parameters, by their ids: parameters
    of the same memory.
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
    return shared
