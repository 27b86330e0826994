"""Which heads and positions a block edits: the arguments all blocks share, checked and grouped by layer."""

from collections.abc import Iterable
from typing import Literal

from icl_lens.errors import InputError
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView

Positions = Literal["all", "last"]


def group_by_layer(view: ModelView, heads: Iterable[Head | tuple[int, int]]) -> dict[int, list[int]]:
    """Layer -> its chosen heads, each once; raises InputError for a head the model does not have."""
    if not isinstance(heads, Iterable):
        raise InputError(f"heads={heads!r} are no heads; give several, as in [(1, 6), 'L22H0']")
    by_layer: dict[int, list[int]] = {}
    for layer, index in sorted({view.check_head(head) for head in heads}):
        by_layer.setdefault(layer, []).append(index)
    return by_layer


def flatten_heads(by_layer: dict[int, list[int]]) -> list[Head]:
    """The heads of a grouping by layer, as made by `group`."""
    return [Head(layer, index) for layer, indices in by_layer.items() for index in indices]
