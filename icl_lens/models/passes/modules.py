"""All PyTorch modules of a model."""

from typing import Any

from torch import nn


def all_modules(owner: Any) -> list[nn.Module]:
    """Return every module of a model, or of a part of it, once; with those of the Hugging Face
    model that it wraps.

    A bridge does not register all of them. Several times as fast as `torch.nn.Module.modules`,
    which joins names.
    """
    modules: dict[int, nn.Module] = {}
    roots = owner, getattr(owner, "original_model", None)
    left = [root for root in reversed(roots) if isinstance(root, nn.Module)]
    while left:
        module = left.pop()
        if id(module) not in modules:
            modules[id(module)] = module
            left.extend(child for child in reversed(module._modules.values()) if child is not None)
    return list(modules.values())
