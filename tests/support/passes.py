"""Watch which passes run, without the forward hooks under which every function runs whole
passes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from icl_lens.models.passes.inference import replace_forwards


def watched(
    note: Callable[[int, Tensor], Any], *modules: nn.Module
) -> AbstractContextManager[None]:
    """Call `note` with the index of the module and its first input, whenever one of the modules
    runs in the block.
    """

    def noted(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            note(
                index, args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values())))
            )
            return forward(*args, **kwargs)

        return run

    return replace_forwards(
        [(module, noted(index, module.forward)) for index, module in enumerate(modules)]
    )


def remains(model: Any) -> tuple[int, int, list[str], dict[str, bool]]:
    """Return what an edit could leave behind: hooks, replaced forwards, which parameters require
    gradients.

    Hooks that TransformerLens or transformers itself sets at a model's first pass don't count.
    """
    n_hooks = 0
    for point in model.hook_dict.values():
        n_hooks += len(point.fwd_hooks) + len(point.bwd_hooks)
    handles, capture_handles, forwards = set(), set(), []
    for name, module in model.named_modules():
        for handle, hook in {**module._forward_hooks, **module._forward_pre_hooks}.items():
            if not getattr(hook, "__module__", "").startswith("transformers."):
                handles.add(handle)
        if "forward" in vars(module):
            forwards.append(name)
    for block in model.blocks:
        capture_handles |= {handle.id for handle in getattr(block, "_capture_hook_handles", ())}
    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return n_hooks, len(handles - capture_handles), forwards, requires_grad
