"""Attention to labels by class, measured or predicted by softmax without some keys; edges into and from labels."""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import icl_lens as il
from icl_lens.measures.saliency import edge_kinds


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


def text_edges(batch: il.PromptBatch) -> Bool[Tensor, "row query key"]:
    """Return edges from each label, and the tokens between text and label, to the tokens of its own text."""
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    start, stop = (batch.text_ranges[..., i, None] for i in (0, 1))
    is_text = (place >= start) & (place < stop)
    is_reader = (place >= stop) & (place < batch.label_ranges[..., 1:])
    return (is_reader[..., :, None] & is_text[..., None, :]).any(1)


def label_edges(batch: il.PromptBatch) -> Bool[Tensor, "row query key"]:
    """Return edges from the last position to every label."""
    return edge_kinds(batch)["label_to_last"]


def random_edges(edges: Bool[Tensor, "row query key"], rng: torch.Generator) -> Bool[Tensor, "row query key"]:
    """Return the same number of other edges from each query, to random earlier positions, or all if they are fewer.

    Many heads attend mostly to the first position: an edge to it is returned if and only if it is among `edges`.
    """
    width = edges.shape[-1]
    earlier = torch.ones(width, width, dtype=torch.bool, device=edges.device).tril(-1)
    priority = torch.rand(edges.shape, generator=rng).to(edges.device).masked_fill(edges | ~earlier, -1.0)
    priority[..., 0] = torch.where(edges[..., 0], 2.0, -1.0)
    rank = priority.argsort(-1, descending=True).argsort(-1)
    return (rank < edges.sum(-1, keepdim=True)) & (priority >= 0)
