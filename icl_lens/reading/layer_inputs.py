"""What the layers of a model get as input: recorded in a pass, and put into one that begins at a
layer.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Float
from torch import Tensor

from icl_lens.models.passes.inference import replace_forwards
from icl_lens.models.view import ModelView


@dataclass
class LayerInputs:
    """Inputs of some layers in a pass over some prompts, from which later passes resume."""

    view: ModelView
    resid: dict[int, Float[Tensor, "batch *pos d_model"]] = field(default_factory=dict)
    """Layer -> what `recorded` kept of its input."""
    n_returned: int | None = None
    """Length of the tuple that each layer returns; None for a single tensor."""

    @contextmanager
    def recorded(self, layers: Iterable[int], keep: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Record what `keep` returns for the inputs of `layers`, in passes in the context."""

        def recorder(layer: int) -> Any:
            def hook_fn(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
                self.resid[layer] = keep(_stream(args, kwargs).detach())

            return hook_fn

        def count(module: Any, args: Any, output: Any) -> None:
            self.n_returned = len(output) if isinstance(output, tuple) else None

        blocks = self.view.model.blocks
        with ExitStack() as stack:
            stack.callback(blocks[0].register_forward_hook(count).remove)
            for layer in layers:
                hook_fn = recorder(layer)
                handle = blocks[layer].register_forward_pre_hook(hook_fn, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    @contextmanager
    def resumed_at(self, layer: int, resid: Float[Tensor, "row pos d_model"]) -> Iterator[None]:
        """Start passes in the context at a layer, with `resid` as its input."""
        blocks, n_returned = self.view.model.blocks, self.n_returned

        def identity(*args: Any, **kwargs: Any) -> Any:
            x = _stream(args, kwargs)
            return x if n_returned is None else (x, *[None] * (n_returned - 1))

        def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return replace_residual(args, kwargs, lambda x: resid.to(x.device))

        with replace_forwards([(blocks[skipped], identity) for skipped in range(layer)]):
            handle = blocks[layer].register_forward_pre_hook(enter, with_kwargs=True)
            try:
                yield
            finally:
                handle.remove()


def replace_residual(
    args: Any, kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a layer with the residual stream replaced by `change` of it."""
    x = change(_stream(args, kwargs))
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": x}
    return (x, *args[1:]), kwargs


def _stream(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the residual stream among a layer's arguments."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
