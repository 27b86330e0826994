"""Caches of Hugging Face with the keys and values of prompts, which later passes continue."""

from typing import Any

import torch

from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# What Hugging Face models raise if they do not take a cache.
CACHE_ERRORS = (AttributeError, TypeError, RuntimeError, ValueError, IndexError)


def new_cache(view: ModelView) -> Any:
    """Return an empty cache of Hugging Face, or None for models of other libraries."""
    if getattr(view.model, "original_model", None) is None:
        return None
    from transformers import DynamicCache

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


def raise_out_of_memory(error: Exception) -> None:
    """Raise errors of memory, which do not mean that a model takes no cache."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
