"""A cache of Hugging Face that gathers the keys and values that rows begin with, layer by layer.

Rows of one pass may begin with different numbers of tokens of different prompts. Their keys and
values are copied for one layer at a time, so that a pass over many rows needs the memory of one
layer, not of all.
"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class GatheredLayer(DynamicLayer):
    """One layer of the cache: what each row begins with, from the caches of prompts."""

    def __init__(
        self,
        layers: Sequence[Any],
        source: Int[Tensor, "row 2"],
        positions: Int[Tensor, "row key"],
    ) -> None:
        """`layers` are this layer of prompts' caches, `source` each row's cache and row there."""
        super().__init__()
        self.layers, self.source, self.positions = layers, source, positions
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the rows begin with, followed by those of the pass."""
        return self._joined("keys", key_states), self._joined("values", value_states)

    def get_seq_length(self) -> int:
        """Return the largest number of tokens that a row begins with."""
        return self.positions.shape[1]

    def _joined(self, name: str, new: Tensor) -> Tensor:
        width = self.get_seq_length()
        joined = new.new_empty(*new.shape[:2], width + new.shape[2], new.shape[3])
        joined[:, :, width:] = new
        for number in self.source[:, 0].unique().tolist():
            rows = (self.source[:, 0] == number).nonzero()[:, 0]
            stored = getattr(self.layers[number], name)
            prompts, positions = self.source[rows, 1, None], self.positions[rows]
            gathered = stored[prompts.to(new.device), :, positions.to(new.device)]
            joined[rows.to(new.device), :, :width] = gathered.transpose(1, 2)
        return joined


def gathered_cache(
    caches: Sequence[Any],
    n_layers: int,
    source: Int[Tensor, "row 2"],
    positions: Int[Tensor, "row key"],
) -> DynamicCache:
    """Return a cache of the keys and values at `positions` of prompts.

    `source` is each row's cache, and its row there. Positions end where the pass begins; the mask
    hides what stands before a row's own first tokens.
    """
    cache: Any = DynamicCache()
    cache.layers = []
    for layer in range(n_layers):
        layer_of_caches = [prompts.layers[layer] for prompts in caches]
        cache.layers.append(GatheredLayer(layer_of_caches, source, positions))
    return cache
