"""Forward hooks of PyTorch modules that were not set by a library, as by
`model.….register_forward_hook`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from icl_lens.models.passes.modules import all_modules

LIBRARIES = ("accelerate", "icl_lens", "torch", "transformer_lens", "transformers")
"""Packages whose own hooks run the model, read it, or belong to it. Hooks at hook points are
TransformerLens'.
"""


def hooked_modules(model: Any) -> list[str]:
    """Return the names of modules with a forward hook, or forward pre-hook, that none of
    `LIBRARIES` defines.

    Names are those of the model's own code (`transformer.h.3.mlp`); "the model" is the model
    itself.
    """
    hooked = {id(module) for module in all_modules(model) if _has_foreign_hook(module)}
    if not hooked:
        return []
    names: dict[int, str] = {}
    for root in (getattr(model, "original_model", model), model):
        for name, module in root.named_modules():
            if id(module) in hooked:
                names.setdefault(id(module), own_name(name))
    return list(dict.fromkeys(names.values()))


def _has_foreign_hook(module: Any) -> bool:
    """Return whether a module has a forward hook or pre-hook that none of `LIBRARIES` defines."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        if any(package_of(hook) not in LIBRARIES for hook in hooks.values()):
            return True
    return False


@contextmanager
def hooks_removed(model: Any) -> Iterator[None]:
    """Remove hooks of users, and temporary ones of hook points, inside the `with` block; restore
    them afterwards.

    Hooks that TransformerLens sets at the first pass, which may be in this block, stay.
    """
    before: list[tuple[Any, dict[int, Any]]] = []
    for module in all_modules(model):
        temporary = [
            handle.hook.id for handle in getattr(module, "fwd_hooks", ()) if not handle.is_permanent
        ]
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            hooks_before = dict(hooks)
            before.append((hooks, hooks_before))
            for key, hook in hooks_before.items():
                if key in temporary or package_of(hook) not in LIBRARIES:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, hooks_before in before:
            set_meanwhile = {key: hook for key, hook in hooks.items() if key not in hooks_before}
            hooks.clear()
            hooks.update(hooks_before | set_meanwhile)


def package_of(function: Callable[..., Any]) -> str:
    """Return the package that defines a function, such as a hook."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    return name.partition(".")[0]


def own_name(name: str) -> str:
    """Return a module's name without the wrappers that TransformerLens puts around it."""
    return (
        ".".join(part for part in name.split(".") if part != "_original_component") or "the model"
    )
