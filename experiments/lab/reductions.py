"""What passes keep of the activations: small tensors, one row for each prompt. Experiments share them."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

import icl_lens as il
from icl_lens.attribution.circuits import label_ranks


def correct(acts: il.Activations) -> Float[Tensor, " prompt"]:
    """1 where the more probable of the prompt's labels is the answer, else 0."""
    return (acts.predicted == acts.batch.answer.to(acts.predicted.device)).float()


def layer_increases(acts: il.Activations) -> Float[Tensor, "prompt layer 2"]:
    """Log-probability increase of the answer by attention and by FFN, nats."""
    return torch.stack(tuple(il.layer_log_prob_increase(acts, acts.batch.answer_tokens)), dim=-1)


def head_increases(acts: il.Activations) -> Float[Tensor, "prompt layer head"]:
    """Log-probability increase of the answer, nats."""
    return il.head_log_prob_increase(acts, acts.batch.answer_tokens)


def layer_contrasts(acts: il.Activations) -> Float[Tensor, "prompt layer 2"]:
    """Increase of the answer's log-odds against the prompt's other labels, by attention and by FFN, nats."""
    against = acts.batch.other_label_tokens
    return torch.stack(tuple(il.layer_log_prob_increase(acts, acts.batch.answer_tokens, against=against)), dim=-1)


def head_contrasts(acts: il.Activations) -> Float[Tensor, "prompt layer head"]:
    """Increase of the answer's log-odds against the prompt's other labels, nats."""
    return il.head_log_prob_increase(acts, acts.batch.answer_tokens, against=acts.batch.other_label_tokens)


RANKED = {"increase": head_increases, "contrast": head_contrasts}
"""What heads are ranked by, by its name."""


def is_true_label(batch: il.PromptBatch) -> Bool[Tensor, "prompt demo"]:
    """Whether the demonstration bears the answer's label; False where a prompt has fewer."""
    return (batch.label_index == batch.answer[:, None]) & (batch.label_index >= 0)


def class_attention(acts: il.Activations) -> Float[Tensor, "prompt layer head 2"]:
    """Attention from the last position, summed over true and over false labels."""
    attention = il.attention_to_labels(acts).float()
    true = is_true_label(acts.batch).to(attention.device)[:, None, None]
    return torch.stack([(attention * true).sum(-1), (attention * ~true).sum(-1)], dim=-1)


@dataclass(frozen=True)
class LabelRanks:
    """Of true and of false labels' own tokens among a head's label values: reciprocal rank, and log2 of the rank.

    Means over a prompt's labels of the class.
    """

    heads: tuple[il.Head, ...]

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt head 2 2"]:
        true = is_true_label(acts.batch).to(acts.readout.W_U.device)
        false = ~true & (acts.batch.label_index >= 0).to(true.device)
        ranks = label_ranks(acts, self.heads).clamp(min=1).float()
        both = torch.stack([ranks.reciprocal(), ranks.log2()], dim=-1)
        kinds = [(both * kind[:, None, :, None]).sum(2) / kind.sum(1)[:, None, None] for kind in (true, false)]
        return torch.stack(kinds, dim=2)
