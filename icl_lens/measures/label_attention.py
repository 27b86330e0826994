"""Attention from the last position to labels that are the answer, and to other labels.

Source: Cho et al., arXiv 2307.09476 (there, attention to true and false demonstrations).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.activations import Activations


def true_and_false_labels(
    batch: PromptBatch,
) -> tuple[Bool[Tensor, "batch demo"], Bool[Tensor, "batch demo"]]:
    """Return which demonstrations have the answer as label, and which another label."""
    is_shown = (batch.label_index >= 0) & (batch.answer >= 0)[:, None]
    is_answer = batch.label_index == batch.answer[:, None]
    return is_shown & is_answer, is_shown & ~is_answer


def attention_by_truth(acts: Activations) -> dict[str, Float[Tensor, "batch layer head"]]:
    """Return `true_label_attention` and `false_label_attention`, 0 to 1; NaN for prompts that do
    not show such labels.
    """
    attention = acts.attention_to_labels()
    attention = attention.to(torch.promote_types(attention.dtype, torch.float32))
    is_true, is_false = (kind.to(attention.device) for kind in true_and_false_labels(acts.batch))
    scores = {}
    for name, is_counted in (("true", is_true), ("false", is_false)):
        to_labels = (attention * is_counted[:, None, None]).sum(-1)
        is_missing = ~is_counted.any(1)[:, None, None]
        scores[f"{name}_label_attention"] = to_labels.masked_fill(is_missing, torch.nan)
    return scores
