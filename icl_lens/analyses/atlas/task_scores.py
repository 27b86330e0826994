"""Scores of heads on prompts of an in-context task that are read from unedited passes.

- contrast and increase, as `il.locate` measures them;
- attention from the last position to labels that are the answer, and to others (2307.09476);
- attention from a label to the text of its demonstration (2410.04468, 2505.16694);
- task recognition and task learning of the head's output (TSLA, 2509.24164);
- similarity of the last query to the keys of labels of its class and of others (2402.02872).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.measures.head_measures import DirectInputs, DirectMeasure
from icl_lens.measures.label_attention import attention_by_truth, true_and_false_labels
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Demonstration, Prompt
from icl_lens.reading.activations import Activations
from icl_lens.reading.capture import capture_with_hooks
from icl_lens.reading.scored_tokens import CheckedAgainst, select_rows
from icl_lens.reading.similarity import compared_positions, similarity_in
from icl_lens.runs.run import Run
from icl_lens.runs.stream import Plan


@dataclass(frozen=True, eq=False)
class ReadScores:
    """The scores of prompts that need no edited pass; all are read from one pass."""

    view: ModelView
    batch: PromptBatch
    direct: DirectMeasure
    """How increases are measured, which decides how many prompts a batch has."""
    against: CheckedAgainst
    """What contrasts compare the answers with; None if there is nothing to compare them with."""
    has_similarity: bool
    """Whether attention of this model follows from similarities of queries and keys."""

    def plan(self, run: Run | None) -> Plan:
        """Return the rows of each batch."""
        return self.direct.plan(run)

    def measure(self, rows: list[int]) -> dict[str, Tensor]:
        """Return scores [row layer head] by name; NaN where a prompt lacks what a score needs."""
        inputs = []
        pieces: dict[str, list[Tensor]] = {}
        for piece in self.direct.captured_at_a_time(rows):
            batch = self.batch[piece]
            writers = compared_positions(batch) if self.has_similarity else False
            reading = LabelsReadingTexts(self.view, batch)
            hooks = reading.hooks() if has_labels(batch) else []
            acts = capture_with_hooks(self.view.model, batch, hooks, writers=writers)
            inputs.append(DirectInputs.of(acts, self.direct.final_norm, self.direct.bias))
            if has_labels(batch):
                scores_of_labels = self._of_labels(acts)
                scores_of_labels["label_reads_text"] = reading.attention()
                for name, values in scores_of_labels.items():
                    pieces.setdefault(name, []).append(values.double().cpu())
        scores = {name: torch.cat(values) for name, values in pieces.items()}
        targets, of_heads = self.direct.targets[rows], DirectInputs.joined(inputs)
        scores["increase"] = of_heads.scores(self.view, targets, None).cpu()
        if self.against is not None:
            against = select_rows(self.against, rows)
            scores["contrast"] = of_heads.scores(self.view, targets, against).cpu()
        return scores

    def _of_labels(self, acts: Activations) -> dict[str, Tensor]:
        """Return the scores of prompts with demonstrations, by name."""
        attention = attention_by_truth(acts)
        difference = attention["true_label_attention"] - attention["false_label_attention"]
        scores = {**attention, "label_difference": difference, **task_subspace_scores(acts)}
        if self.has_similarity:
            scores["similarity"] = similarity_auroc(acts)
        return scores


def has_labels(batch: PromptBatch) -> bool:
    """Return whether prompts have demonstrations, whose labels heads can read."""
    return batch.has_demonstrations and bool(batch.prompts)


class LabelsReadingTexts:
    """The attention from each label's scored token to the text of its demonstration, summed over the
    text's tokens, mean over demonstrations; read by the hooks of a pass over the batch.
    """

    def __init__(self, view: ModelView, batch: PromptBatch) -> None:
        self.view, self.batch = view, batch
        self.by_layer: list[Float[Tensor, "batch head"]] = []

    def hooks(self) -> list[tuple[str, Callable[..., None]]]:
        """Return the hooks, which read the attention of every layer."""
        batch = self.batch
        key = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        start, end = batch.text_ranges[..., None].unbind(2)
        is_text = (start <= key) & (key < end)
        is_shown = (batch.label_positions >= 0) & (start[..., 0] >= 0)
        rows = torch.arange(len(batch))[:, None]
        labels = batch.label_positions.clamp(min=0)

        def keep(pattern: Tensor, hook: Any) -> None:
            of_labels = pattern[rows, :, labels.to(pattern.device)].double()  # batch demo head key
            in_text = (of_labels * is_text[:, :, None].to(pattern.device)).sum(-1)
            counted = is_shown.to(in_text)
            mean = (in_text * counted[..., None]).sum(1) / counted.sum(1)[:, None]
            self.by_layer.append(mean.cpu())

        view = self.view
        return [(view.hook(layer, "attn.hook_pattern"), keep) for layer in range(view.n_layers)]

    def attention(self) -> Float[Tensor, "batch layer head"]:
        """Return the attention, after the pass."""
        return torch.stack(self.by_layer, dim=1)


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
        choices = is_choice[row].nonzero()[:, 0].tolist()
        wrong_labels = [label for label in choices if label != answer]
        if answer < 0 or not wrong_labels:
            continue
        basis, _ = torch.linalg.qr(columns[[answer, *wrong_labels]].T)
        recognition[row] = (by_prompt[row] @ basis).square().sum(-1)
        difference = by_prompt[row] @ (columns[answer] - columns[wrong_labels].mean(0))
        learning[row] = difference / recognition[row]
    return {"task_recognition": recognition, "task_learning": learning}


def similarity_auroc(acts: Activations) -> Float[Tensor, "batch layer head"]:
    """Return in which share of pairs of a label that is the answer and another one the last query
    is more similar to the key of the first (`il.label_similarity`); ties count half.

    NaN for prompts that do not show both. `acts` hold writers at `compared_positions`, and the
    model's attention must follow from such similarities, which `label_similarity` checks.
    """
    view = acts.view
    similarity = similarity_in(acts, view.heads(), "last", check=False)[:, :, 0].double().cpu()
    is_true, is_false = (kind.cpu() for kind in true_and_false_labels(acts.batch))
    share_of_prompts = []
    for of_prompt, is_answer, is_other in zip(similarity, is_true, is_false, strict=True):
        answers, others = of_prompt[:, is_answer, None], of_prompt[:, None, is_other]
        n_larger = (answers > others).sum((1, 2)).double()
        n_equal = (answers == others).sum((1, 2)).double()
        share_of_prompts.append((n_larger + 0.5 * n_equal) / (is_answer.sum() * is_other.sum()))
    return torch.stack(share_of_prompts).unflatten(1, (view.n_layers, view.n_heads))


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
