"""Read weights that accelerate offloads to CPU memory or disk, one module at a time.

If a model does not fit, accelerate puts parameters on the "meta" device and adds a hook to each
module that loads them before the module runs and drops them afterwards. This module calls the same
hooks to read weights outside a pass. Source: accelerate.hooks.AlignDevicesHook.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from icl_lens.errors import InputError
from icl_lens.models.passes.modules import all_modules

# Models with offloaded weights; others need no search for align hooks at each read.
_OFFLOADED: "WeakSet[Any]" = WeakSet()


def mark_offloaded(model: Any, *, offloaded: bool) -> None:
    """Record whether a model has offloaded weights."""
    _OFFLOADED.add(model) if offloaded else _OFFLOADED.discard(model)


def weights_loaded_if_offloaded(model: Any, owner: Any) -> AbstractContextManager[None]:
    """Like `weights_loaded`, but skip models without offloaded weights."""
    return weights_loaded(owner) if model in _OFFLOADED else nullcontext()


def align_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that load a module's own weights; empty if they are not offloaded."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    loads_weights: list[Any] = []
    for part in hooks:
        if getattr(part, "offload", False) and getattr(part, "weights_map", None) is not None:
            loads_weights.append(part)
    return loads_weights


@contextmanager
def weights_loaded(owner: Any) -> Iterator[None]:
    """Load the weights of a part of a model while the block runs; tensors read inside stay valid
    after it.
    """
    with ExitStack() as stack:
        for module in all_modules(owner):
            if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                for hook in align_hooks(module):
                    stack.callback(hook.post_forward, module, None)
                    hook.pre_forward(module)
        yield


def execution_device(owner: Any) -> torch.device | None:
    """Return the device on which accelerate runs a module; None if it is not offloaded."""
    for module in all_modules(owner):
        for hook in align_hooks(module):
            if hook.execution_device is not None:
                return torch.device(hook.execution_device)
    return None


def has_missing_weights(model: Any) -> bool:
    """Return whether a model has weights on the meta device that no hook loads."""
    loadable = ParameterMap(model).offloaded
    return any(
        parameter.is_meta and id(parameter) not in loadable for parameter in model.parameters()
    )


class ParameterMap(Mapping[str, Tensor]):
    """A model's parameters by name; offloaded ones are loaded one at a time."""

    def __init__(self, model: Any):
        self._named: dict[str, Tensor] = dict(model.named_parameters())
        self.offloaded: dict[int, tuple[nn.Module, str]] = {}
        """The module and name of each parameter that a hook loads, by its id."""
        if any(parameter.is_meta for parameter in self._named.values()):
            for module in all_modules(model):
                if align_hooks(module):
                    for name, parameter in module.named_parameters(recurse=False):
                        self.offloaded[id(parameter)] = module, name

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._named[name]
        if not parameter.is_meta:
            return parameter
        if id(parameter) not in self.offloaded:
            raise InputError(
                f"weights {name} are not loaded (on the meta device); load the model with weights"
            )
        module, name_in_module = self.offloaded[id(parameter)]
        return align_hooks(module)[0].weights_map[name_in_module]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)
