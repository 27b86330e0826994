"""Writers of a layer's input in groups: embeddings, heads and FFNs of early and of late layers, biases."""

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.models.view import ModelView

GROUPS = ("embeddings", "early heads", "early FFNs", "late heads", "late FFNs", "biases")
"""Early layers are those in the first half of the model."""
EARLY_GROUPS = ("embeddings", "early heads", "early FFNs")
"""Groups of early writers; a head in an early layer has no others except biases."""


def group_sums(
    values: Float[Tensor, "row writer"], view: ModelView, writers: tuple[str, ...]
) -> Float[Tensor, "row group"]:
    """Return sums over the writers of each of `GROUPS`."""
    numbers = torch.tensor([GROUPS.index(group_of(writer, view.n_layers)) for writer in writers], device=values.device)
    return values.new_zeros(len(values), len(GROUPS)).index_add(1, numbers, values)


def group_of(writer: str, n_layers: int) -> str:
    """Return the group of a writer, named as in `il.attention_score_parts`."""
    if writer in ("embed", "pos_embed"):
        return "embeddings"
    if writer == "bias":
        return "biases"
    return f"{'early' if 2 * layer_of(writer) < n_layers else 'late'} {'FFNs' if writer.startswith('F') else 'heads'}"


def layer_of(writer: str) -> int:
    """Return the layer of a head or FFN, named as in `il.attention_score_parts`; -1 for embeddings.

    Raise ValueError for "bias", which is a sum over layers.
    """
    if writer == "bias":
        raise ValueError("'bias' has no layer: it is a sum over layers")
    return -1 if writer in ("embed", "pos_embed") else int(writer[1:].partition("H")[0])
