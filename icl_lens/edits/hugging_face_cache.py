"""Caches of Hugging Face: the keys and values of prompts, which later passes continue.

1. A pass over prompts fills the cache that `new_cache` returns.
2. `gathered_cache` makes of such caches what the rows of a later pass begin with. Rows may begin
   with different numbers of tokens of different prompts. Their keys and values are copied for one
   layer at a time, so that a pass over many rows needs the memory of one layer, not of all.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# What Hugging Face models raise if they do not take a cache.
CACHE_ERRORS = (AttributeError, TypeError, RuntimeError, ValueError, IndexError)


def new_cache(view: ModelView) -> Any:
    """Return an empty cache of Hugging Face, or None for models of other libraries."""
    if getattr(view.model, "original_model", None) is None:
        return None
    return DynamicCache()


def holds_all_layers(cache: Any, n_layers: int, batch: PromptBatch) -> bool:
    """Return whether a cache of Hugging Face has keys of every layer at every token of a batch."""
    layers = list(getattr(cache, "layers", ()))
    if len(layers) != n_layers:
        return False
    try:
        shapes = [(len(layer.keys), layer.keys.shape[2]) for layer in layers]
    except (AttributeError, TypeError):
        return False
    return all(shape == tuple(batch.tokens.shape) for shape in shapes)


def reraise_if_out_of_memory(error: Exception) -> None:
    """Raise `error` again if memory ran out, which does not mean that the model takes no cache;
    otherwise do nothing.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error


class GatheredLayer(DynamicLayer):
    """One layer of the cache: what each row begins with, from the caches of prompts."""

    def __init__(
        self,
        layers: Sequence[Any],
        source: Int[Tensor, "row 2"],
        positions: Int[Tensor, "row key"],
    ) -> None:
        """`layers` are this layer of prompts' caches, `source` each row's cache and row there, and
        `positions` the tokens of that row that the new row begins with.
        """
        super().__init__()
        self.layers, self.source, self.positions = layers, source, positions
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the rows begin with, followed by those of the pass."""
        keys = self._with_earlier_tokens("keys", key_states)
        return keys, self._with_earlier_tokens("values", value_states)

    def get_seq_length(self) -> int:
        """Return the largest number of tokens that a row begins with."""
        return self.positions.shape[1]

    def _with_earlier_tokens(self, name: str, new: Tensor) -> Tensor:
        """Return the keys or values (`name`) of the tokens that each row begins with, and then
        `new`, those of the pass.

        Rows that begin with fewer tokens have others in front, which the mask hides.
        """
        n_earlier = self.get_seq_length()
        joined = new.new_empty(*new.shape[:2], n_earlier + new.shape[2], new.shape[3])
        joined[:, :, n_earlier:] = new
        for cache_number in self.source[:, 0].unique().tolist():
            rows = (self.source[:, 0] == cache_number).nonzero()[:, 0]
            stored = getattr(self.layers[cache_number], name)
            rows_in_cache, positions = self.source[rows, 1, None], self.positions[rows]
            gathered = stored[rows_in_cache.to(new.device), :, positions.to(new.device)]
            joined[rows.to(new.device), :, :n_earlier] = gathered.transpose(1, 2)  # to row head key
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
        layer_of_caches = [filled.layers[layer] for filled in caches]
        cache.layers.append(GatheredLayer(layer_of_caches, source, positions))
    return cache
