"""Watch which passes run, without the forward hooks under which every function runs whole
passes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from icl_lens.models.inference import replace_forwards


def watched(note: Callable[[int, Tensor], Any], *modules: nn.Module) -> AbstractContextManager[None]:
    """Call `note` with the index of the module and its first input, whenever one of the modules
    runs in the block.
    """

    def noted(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            note(index, args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()))))
            return forward(*args, **kwargs)

        return run

    return replace_forwards([(module, noted(index, module.forward)) for index, module in enumerate(modules)])
