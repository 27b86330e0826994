"""Arguments that all blocks share: heads, grouped by layer, and positions."""

from collections.abc import Iterable
from typing import Literal

from icl_lens.errors import InputError
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView

Positions = Literal["all", "last"]


def group_by_layer(view: ModelView, heads: Iterable[Head | tuple[int, int]]) -> dict[int, list[int]]:
    """Return layer -> its chosen heads, without duplicates; raise InputError for an unknown head."""
    if not isinstance(heads, Iterable):
        raise InputError(f"heads must be an iterable of heads, got {heads!r}; e.g. [(1, 6), 'L22H0']")
    by_layer: dict[int, list[int]] = {}
    for layer, index in sorted({view.check_head(head) for head in heads}):
        by_layer.setdefault(layer, []).append(index)
    return by_layer


def flatten_heads(by_layer: dict[int, list[int]]) -> list[Head]:
    """Return the heads of a grouping by layer, as returned by `group_by_layer`."""
    return [Head(layer, index) for layer, indices in by_layer.items() for index in indices]
