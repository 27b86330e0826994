"""Label log-probabilities of prompts under sets of edits, and whether the answer is the top token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.edit import Edit
from icl_lens.edits.read import read_labels
from icl_lens.edits.score import score_sets
from icl_lens.metrics import accuracy, is_correct, label_log_odds
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import require_labels
from icl_lens.result.base import Displayed
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS, plural_prompts
from icl_lens.result.view import View, table_view

PromptMeasure = Literal["accuracy", "log_odds", "over_vocabulary"]


@dataclass(frozen=True, repr=False)
class AnswerScores(Displayed):
    """Label log-probabilities (nats), and whether the correct label is the top token."""

    label_log_probs: Float[Tensor, "prompt label"]
    top1_correct: Bool[Tensor, " prompt"]
    """Whether the correct label is the most probable token of the full vocabulary."""
    answer: Int[Tensor, " prompt"]
    """Index of the correct label; -1 where a prompt has no answer."""
    label_mask: Bool[Tensor, "prompt label"]
    """Labels that occur in each prompt."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row per prompt: answer (index), is_top_token, log p of each label (nats)."""
        frame = pd.DataFrame(
            {"answer": self.answer.tolist(), "is_top_token": self.top1_correct.tolist()}
        )
        return frame.join(pd.DataFrame(self.label_log_probs.tolist()).add_prefix("log_prob_"))

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        n_prompts, n_labels = self.label_log_probs.shape
        label_texts = []
        masks = self.label_mask.tolist()
        for log_probs, mask in zip(self.label_log_probs[:SHOWN_ROWS].tolist(), masks, strict=False):
            cells = []
            for log_prob, is_label in zip(log_probs, mask, strict=True):
                cells.append(signed(log_prob, 2) if is_label else "–")
            label_texts.append("  ".join(cells))
        columns: dict[str, list[object]] = {
            "prompt": list(range(len(label_texts))),
            "answer": self.answer[:SHOWN_ROWS].tolist(),
            "log p(labels), nats": label_texts,
            "is top token": list(map(str, self.top1_correct[:SHOWN_ROWS].tolist())),
        }
        title = f"AnswerScores({plural_prompts(n_prompts)} × {n_labels} labels)"
        return table_view(title, columns, n_prompts)

    @property
    def accuracy_between_labels(self) -> float:
        """Share of prompts whose correct label is the most probable of their labels, 0 to 1."""
        return accuracy(self.label_log_probs, self.answer, choices=self.label_mask)

    def per_prompt(self, measure: PromptMeasure) -> Tensor:
        """Return [prompt] a measure of `ControlledAblation` for every prompt."""
        if measure == "over_vocabulary":
            return self.top1_correct
        measure_labels = is_correct if measure == "accuracy" else label_log_odds
        return measure_labels(self.label_log_probs, self.answer, choices=self.label_mask)

    @property
    def top_token_share(self) -> float:
        """Share of prompts whose correct label is the top token, 0 to 1."""
        return float(self.top1_correct.double().mean())


def score_answers(
    view: ModelView, batch: PromptBatch, sets: Sequence[Sequence[Edit]]
) -> list[AnswerScores]:
    """Return each prompt's answer scores under each set of edits, on the CPU."""
    require_labels(batch, "label to score")
    labels = read_labels(batch)

    def labels_and_top1(log_probs: Tensor, prompt: Tensor) -> Tensor:
        is_top1 = log_probs.argmax(-1) == batch.answer_tokens[prompt].to(log_probs.device)
        return torch.cat([labels(log_probs, prompt), is_top1[:, None].to(log_probs)], dim=-1)

    answer, mask = batch.answer.cpu(), batch.label_mask.cpu()
    by_set = []
    for columns in score_sets(view, batch, sets, labels_and_top1)[0].cpu().unbind(1):
        log_probs, top1 = columns[:, :-1].float(), columns[:, -1] > 0.5
        by_set.append(AnswerScores(log_probs, top1, answer, mask))
    return by_set
