"""Run a range of layers and skip all others."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from icl_lens.models.inference import replaced_forwards
from icl_lens.models.view import ModelView

Returns = list[int | None]
"""Length of the tuple that each block returns; None for a single tensor."""


@contextmanager
def record_arity(view: ModelView, layers: Sequence[int], returns: Returns) -> Iterator[None]:
    """Append to `returns` the length of the tuple that each of these layers returns, for passes in the context."""

    def count(module: Any, args: Any, output: Any) -> None:
        returns.append(len(output) if isinstance(output, tuple) else None)

    handles = [view.model.blocks[layer].register_forward_hook(count) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def run_layers(
    view: ModelView, layers: range, returns: Returns, *, resid_in: Tensor | None = None, goes_on: slice = slice(None)
) -> Iterator[list[Tensor]]:
    """Run only these consecutive layers in the context; yield a list to which the last one's output is appended.

    `resid_in` is the input of the first layer, by default the model's embeddings. If layers follow the last one, the
    list receives the residual stream after it, and only the rows `goes_on` continue to the end of the pass. A block
    missing from `returns` is assumed to return as many values as the last recorded one.
    """
    blocks = view.model.blocks
    resid_out: list[Tensor] = []

    def hand_on(layer: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            count = returns[min(layer, len(returns) - 1)]
            x = _stream(args, kwargs)
            return x if count is None else (x, *[None] * (count - 1))

        return forward

    def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return replace_residual(args, kwargs, lambda x: x if resid_in is None else resid_in.to(x.device))

    def leave(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        resid_out.append(_stream(args, kwargs))
        return replace_residual(args, kwargs, lambda x: x[goes_on])

    handles = [blocks[layers.start].register_forward_pre_hook(enter, with_kwargs=True)]
    if layers.stop < view.n_layers:
        handles.append(blocks[layers.stop].register_forward_pre_hook(leave, with_kwargs=True))
    try:
        with replaced_forwards(
            [(blocks[layer], hand_on(layer)) for layer in range(view.n_layers) if layer not in layers]
        ):
            yield resid_out
    finally:
        for handle in handles:
            handle.remove()


def replace_residual(
    args: Any, kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a block with the residual stream replaced by `change` of it."""
    x = change(_stream(args, kwargs))
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": x}
    return (x, *args[1:]), kwargs


def _stream(args: Any, kwargs: dict[str, Any]) -> Tensor:
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
