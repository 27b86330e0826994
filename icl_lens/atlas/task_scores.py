"""Scores of heads on prompts of an in-context task that are read from unedited passes.

- attention from the last position to labels that are the answer, and to others (2307.09476);
- attention from a label to the text of its demonstration (2410.04468, 2505.16694);
- task recognition and task learning of the head's output (TSLA, 2509.24164);
- similarity of the last query to the keys of labels of its class and of others (2402.02872).
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import Activations, capture
from icl_lens.activations.passes import last_logits
from icl_lens.attribution.similarity import label_similarity
from icl_lens.measures.label_attention import attention_by_truth, true_and_false_labels
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Demonstration, Prompt
from icl_lens.runs.run import Run
from icl_lens.runs.stream import Plan, plan_batches


@dataclass(frozen=True, eq=False)
class ReadScores:
    """The scores of prompts with demonstrations that need no edited pass."""

    view: ModelView
    batch: PromptBatch

    def plan(self, run: Run | None) -> Plan:
        """Return the rows of each batch."""
        return plan_batches(self.view, self.batch, run)

    def measure(self, rows: list[int]) -> dict[str, Tensor]:
        """Return scores [row layer head] by name; NaN where a prompt lacks what a score needs."""
        acts = capture(self.view.model, self.batch[rows])
        attention = attention_by_truth(acts)
        difference = attention["true_label_attention"] - attention["false_label_attention"]
        scores = {**attention, "label_difference": difference, **task_subspace_scores(acts)}
        scores["label_reads_text"] = attention_of_labels_to_texts(self.view, acts.batch)
        return {name: values.double().cpu() for name, values in scores.items()}


def attention_of_labels_to_texts(
    view: ModelView, batch: PromptBatch
) -> Float[Tensor, "batch layer head"]:
    """Return the attention from each label's scored token to the text of its demonstration, summed
    over the text's tokens, mean over demonstrations; one forward pass.
    """
    key = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    start, end = batch.text_ranges[..., None].unbind(2)
    is_text = (start <= key) & (key < end)
    is_shown = (batch.label_positions >= 0) & (start[..., 0] >= 0)
    rows = torch.arange(len(batch))[:, None]
    labels = batch.label_positions.clamp(min=0)
    by_layer: list[Tensor] = []

    def keep(pattern: Tensor, hook: Any) -> None:
        of_labels = pattern[rows, :, labels.to(pattern.device)].double()  # [batch demo head key]
        in_text = (of_labels * is_text[:, :, None].to(pattern.device)).sum(-1)
        counted = is_shown.to(in_text)
        by_layer.append(((in_text * counted[..., None]).sum(1) / counted.sum(1)[:, None]).cpu())

    hooks = [(view.hook(layer, "attn.hook_pattern"), keep) for layer in range(view.n_layers)]
    last_logits(view.model, batch, hooks)
    return torch.stack(by_layer, dim=1)


def task_subspace_scores(acts: Activations) -> dict[str, Float[Tensor, "batch layer head"]]:
    """Return task recognition and task learning of each head's output at the last position.

    Recognition is ‖P a‖², with the head's output a and the projection P to the span of the labels'
    columns of W_U. Learning is the mean over the other labels of a · (W_U[answer] − W_U[label]),
    over recognition. Columns of W_U are taken as they are, without the final norm, as in the source
    (Yang et al., arXiv 2509.24164). NaN for prompts with fewer than two labels or without answer.
    """
    batch, W_U = acts.batch, acts.readout.W_U
    shape = (len(batch), acts.view.n_layers, acts.view.n_heads)
    recognition = torch.full(shape, torch.nan, dtype=torch.float64)
    learning = recognition.clone()
    is_choice, answers = batch.label_mask.cpu(), batch.answer.tolist()
    columns = W_U.T[batch.label_tokens.to(W_U.device)].double().cpu()
    outputs = [acts.head_outputs(layer).double().cpu() for layer in range(acts.view.n_layers)]
    by_prompt = torch.stack(outputs, dim=1)
    for row, answer in enumerate(answers):
        others = [label for label in is_choice[row].nonzero()[:, 0].tolist() if label != answer]
        if answer < 0 or not others:
            continue
        basis, _ = torch.linalg.qr(columns[[answer, *others]].T)
        recognition[row] = (by_prompt[row] @ basis).square().sum(-1)
        difference = by_prompt[row] @ (columns[answer] - columns[others].mean(0))
        learning[row] = difference / recognition[row]
    return {"task_recognition": recognition, "task_learning": learning}


def similarity_auroc(view: ModelView, batch: PromptBatch) -> Float[Tensor, "batch layer head"]:
    """Return in which share of pairs of a label that is the answer and another one the last query
    is more similar to the key of the first (`il.label_similarity`); ties count half.

    NaN for prompts that do not show both.
    """
    similarity = label_similarity(view.model, batch, view.heads())[:, :, -1].double().cpu()
    is_true, is_false = (kind.cpu() for kind in true_and_false_labels(batch))
    is_pair = (is_true[:, :, None] & is_false[:, None, :])[:, None]
    first, second = similarity[..., :, None], similarity[..., None, :]
    is_larger = (first > second).double() + 0.5 * (first == second).double()
    share = (is_larger * is_pair).sum((-1, -2)) / is_pair.sum((-1, -2))
    return share.unflatten(1, (view.n_layers, view.n_heads))


def with_shuffled_labels(prompt: Prompt, seed: int) -> Prompt:
    """Return a prompt with the labels of its demonstrations in another random order; the same if
    all are equal.
    """
    labels = [demonstration.label for demonstration in prompt.demonstrations]
    shuffled = list(labels)
    generator = random.Random(seed)
    while shuffled == labels and len(set(labels)) > 1:
        generator.shuffle(shuffled)
    demonstrations = []
    for demonstration, label in zip(prompt.demonstrations, shuffled, strict=True):
        demonstrations.append(Demonstration(demonstration.text, label))
    return replace(prompt, demonstrations=tuple(demonstrations))
