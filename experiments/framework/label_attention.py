"""Attention to labels by class, measured or predicted by softmax without some keys."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import icl_lens as il


def last_true_tokens(batch: il.PromptBatch) -> Bool[Tensor, "row key"]:
    """Return the tokens of each prompt's last demonstration with the answer's label: those after the label before."""
    true = batch.label_index == batch.answer[:, None]
    last = (true * torch.arange(1, true.shape[1] + 1, device=true.device)).argmax(1, keepdim=True)
    stop = batch.label_ranges[..., 1].gather(1, last)
    start = batch.label_ranges[..., 1].gather(1, (last - 1).clamp(min=0))
    place = torch.arange(batch.tokens.shape[1], device=true.device)
    return (place >= torch.where(last > 0, start, 0)) & (place < stop)


def attention_by_class(
    acts: il.Activations, without: Bool[Tensor, "row key"] | None = None
) -> Float[Tensor, "row layer head 2"]:
    """Return the last position's attention (0–1) to labels of the answer and to others.

    With `without`, these keys are removed from its softmax, and all others are renormalized.
    """
    if without is not None:
        pattern = acts.pattern.float().masked_fill(without.to(acts.pattern.device)[:, None, None], 0.0)
        acts = replace(acts, pattern=pattern / pattern.sum(-1, keepdim=True))
    attention = acts.attention_to_labels().float()
    true = (acts.batch.label_index == acts.batch.answer[:, None]).to(attention.device)[:, None, None]
    return torch.stack([(attention * true).sum(-1), (attention * ~true).sum(-1)], dim=-1)
