"""Attention from the last position to the demonstrations' labels."""

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import Activations


def attention_to_labels(acts: Activations) -> Float[Tensor, "batch layer head demo"]:
    """Return the attention probability from the last position to each label, summed over the label's tokens.

    Zero where a prompt has fewer demonstrations. Rows sum to less than one because other positions are attended too;
    `acts.pattern` is the attention to every position. Raise InputError for prompts without demonstrations.

    Example:
        >>> il.attention_to_labels(acts).shape
        torch.Size([1, 8, 6, 4])
    """
    acts.batch.require_demonstrations(
        "label to attend to", "use acts.pattern [batch layer head key], the attention to all positions"
    )
    positions = acts.batch.label_token_positions.to(acts.pattern.device)
    index = positions.flatten(1)[:, None, None].expand(-1, *acts.pattern.shape[1:3], -1)
    picked = acts.pattern.gather(-1, index.clamp(min=0)).masked_fill(index < 0, 0.0)
    return picked.unflatten(-1, positions.shape[1:]).sum(-1)


def attention_by_label(acts: Activations) -> Float[Tensor, "batch layer head label"]:
    """Return attention from the last position, summed over all tokens of the same label (axis: `batch.labels`).

    Example:
        >>> il.attention_by_label(acts).shape
        torch.Size([1, 8, 6, 2])
    """
    attention = attention_to_labels(acts)
    index = acts.batch.label_index.to(attention.device)
    onehot = torch.nn.functional.one_hot(index.clamp(min=0), len(acts.batch.labels)).to(attention.dtype)
    onehot = onehot * (index >= 0)[..., None]
    return torch.einsum("blhd,bdc->blhc", attention, onehot)
