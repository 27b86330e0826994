"""Copy a Hugging Face model without its weights."""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def with_shared_weights(hf_model: Any) -> Any:
    """Return a copy of a Hugging Face model that shares the memory of its weights.

    A bridge replaces modules, switches to eager attention and turns gradients off, which must not
    change the original.
    """
    return copy.deepcopy(hf_model, _shared_weights(list(hf_model.modules())))


def unbridged(model: Any) -> Any:
    """Return a copy of the Hugging Face model in a bridge that shares the memory of its weights and
    buffers and has its own modules in place of those that the bridge put there.

    The bridge does not change, since other threads may read it.
    """
    hf_model = model.original_model
    modules = list(hf_model.modules())
    copies = _shared_weights(modules)
    for module in modules:
        for buffer in module._buffers.values():
            copies[id(buffer)] = buffer
    with _garbage_collection_paused():
        for bridge, original in reversed(list(_bridges(hf_model))):  # inner ones first
            copies[id(bridge)] = copy.deepcopy(original, copies)
        return copy.deepcopy(hf_model, copies)


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Let Python not look for garbage inside the block.

    The many small objects of a copy would make it search all of the process's objects, which takes
    longer than the copy. They go by themselves when the copy is dropped.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


def _shared_weights(modules: list[nn.Module]) -> dict[int, Any]:
    """Return what `copy.deepcopy` takes in place of the parameters of modules, by their ids:
    parameters of the same memory.
    """
    shared: dict[int, Any] = {}
    for module in modules:
        for parameter in module._parameters.values():
            if type(parameter) is not torch.nn.Parameter:
                shared[id(parameter)] = parameter
            elif id(parameter) not in shared:
                shared[id(parameter)] = torch.nn.Parameter(parameter.detach(), requires_grad=False)
        # weights that accelerate keeps outside the modules
        hook = getattr(module, "_hf_hook", None)
        for align_hook in (hook, *getattr(hook, "hooks", ())):
            for weights in (
                getattr(align_hook, "weights_map", None),
                getattr(align_hook, "tied_params_map", None),
            ):
                shared[id(weights)] = weights
    return shared
