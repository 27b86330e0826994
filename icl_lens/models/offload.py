"""Weights that accelerate keeps in main memory or on the disk until a pass needs them: read a module at a time.

Where a model does not fit, accelerate leaves parameters without numbers (the "meta" device) and hangs a hook on each
module that brings them in before the module runs and drops them afterwards. The same hook is asked here when weights
are read outside a pass. Source: accelerate.hooks.AlignDevicesHook.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from icl_lens.errors import InputError

# Models some of whose weights are kept elsewhere: others are not searched for them at every reading.
_OFFLOADED: "WeakSet[Any]" = WeakSet()


def mark_offloaded(model: Any, *, away: bool) -> None:
    """Remembers whether a model has weights that are kept elsewhere."""
    _OFFLOADED.add(model) if away else _OFFLOADED.discard(model)


@contextmanager
def weights_loaded_if_offloaded(model: Any, owner: Any) -> Iterator[None]:
    """`present`, for a part of a model of which `note` has been told."""
    with weights_loaded(owner) if model in _OFFLOADED else nullcontext():
        yield


def align_hooks(module: nn.Module) -> list[Any]:
    """The hooks that bring a module's own weights in; none where they are in place."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return [one for one in hooks if getattr(one, "offload", False) and getattr(one, "weights_map", None) is not None]


def modules_of(owner: Any) -> Iterator[nn.Module]:
    """Every module of a bridge or a model once, also those of the Hugging Face module that it stands for."""
    seen: set[int] = set()
    for root in (owner, getattr(owner, "original_component", None), getattr(owner, "original_model", None)):
        for module in root.modules() if isinstance(root, nn.Module) else ():
            if id(module) not in seen:
                seen.add(id(module))
                yield module


@contextmanager
def weights_loaded(owner: Any) -> Iterator[None]:
    """A part of a model has its weights in memory while the block runs; what is read of them stays valid after it."""
    with ExitStack() as stack:
        for module in modules_of(owner):
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                for keeper in align_hooks(module):
                    stack.callback(keeper.post_forward, module, None)
                    keeper.pre_forward(module)
        yield


def execution_device(owner: Any) -> torch.device | None:
    """Where accelerate brings a module's weights to when it runs; None where nothing says so."""
    for module in modules_of(owner):
        for keeper in align_hooks(module):
            if keeper.execution_device is not None:
                return torch.device(keeper.execution_device)
    return None


def has_missing_weights(model: Any) -> bool:
    """Whether a model has weights without numbers that no hook brings in."""
    away = {id(parameter) for parameter in model.parameters() if parameter.is_meta}
    if not away:
        return False
    for module in modules_of(model):
        if align_hooks(module):
            away -= {id(parameter) for parameter in module.parameters(recurse=False)}
    return bool(away)


class ParameterMap(Mapping[str, Tensor]):
    """A model's parameters by name, read one at a time where they are kept elsewhere."""

    def __init__(self, model: Any):
        self._named: dict[str, Tensor] = dict(model.named_parameters())
        self._kept: dict[int, tuple[nn.Module, str]] = {}
        if any(parameter.is_meta for parameter in self._named.values()):
            for module in modules_of(model):
                if align_hooks(module):
                    own = module.named_parameters(recurse=False)
                    self._kept |= {id(parameter): (module, name) for name, parameter in own}

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._named[name]
        if not parameter.is_meta:
            return parameter
        if id(parameter) not in self._kept:
            raise InputError(f"the weights {name} are not in memory (on the meta device); load the model with weights")
        module, own = self._kept[id(parameter)]
        return align_hooks(module)[0].weights_map[own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)
