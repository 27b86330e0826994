"""Editing the forward pass inside a `with` block; whatever was edited is restored on leaving, also after an error."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models import Head, ModelView


@contextmanager
def ablate_heads(
    model: Any, heads: Iterable[Head | tuple[int, int]], *, mode: Literal["zero"] = "zero"
) -> Iterator[None]:
    """Removes heads from the forward pass, at every position, while the block runs.

    `mode="zero"` sets the heads' z to zero, so that they write nothing; b_O, which belongs to no head, stays.
    Blocks nest. Raises InputError for a head the model does not have or an unknown mode.
    """
    if mode != "zero":
        raise InputError(f"mode={mode!r} is not known; use 'zero'")
    with _zero_z(model, [(slice(None), heads)]):
        yield


@contextmanager
def ablate_rows(model: Any, heads: Sequence[Iterable[Head | tuple[int, int]]]) -> Iterator[None]:
    """Zero-ablates different heads in each row of the batch: row i of a forward pass loses `heads[i]`.

    One pass over copies of a prompt then tries many ablations. Raises InputError for a head the model lacks.
    """
    with _zero_z(model, list(enumerate(heads))):
        yield


@contextmanager
def _zero_z(model: Any, sets: list[tuple[Any, Iterable[Head | tuple[int, int]]]]) -> Iterator[None]:
    view = ModelView.of(model)
    by_layer: dict[int, list[tuple[Any, int]]] = {}
    for row, heads in sets:
        for head in heads:
            layer, index = view.check_head(head)
            by_layer.setdefault(layer, []).append((row, index))

    def zero(where: list[tuple[Any, int]]) -> Callable[..., Tensor]:
        def hook_fn(z: Tensor, hook: Any) -> Tensor:
            z = z.clone()
            for row, index in where:
                z[row, :, index] = 0
            return z

        return hook_fn

    hooks = [(view.hook(layer, "attn.hook_z"), zero(where)) for layer, where in sorted(by_layer.items())]
    with model.hooks(fwd_hooks=hooks):
        yield
