"""Passes with interventions: label scores of edited models, and the heads that the published version edits."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

import icl_lens as il
from experiments.lab.passes import Tensors
from experiments.lab.study import Study, Variant
from icl_lens.interventions.choice import Positions
from icl_lens.metrics import is_correct, label_log_odds

EditOf = Callable[[il.PromptBatch], AbstractContextManager]
"""From a batch to the block in which it is scored."""

REFERENCE = 25
"""Prompts of each kind that a mean-ablation averages over."""

FOO, BAR = Variant(), Variant(swapped=True)
"""The true label is "foo", or "bar"."""


def says(
    study: Study, variant: Variant, rows: Int[Tensor, " row"], edit: EditOf | None = None, *, what: str = ""
) -> pd.DataFrame:
    """Of each row, edited: correct (the answer is the likeliest label, 0–1), vocabulary (… token), odds (nats)."""

    def said(batch: il.PromptBatch) -> Tensors:
        with edit(batch) if edit is not None else nullcontext():
            log_probs = il.last_log_probs(study.model, batch).cpu()
        top = (log_probs.argmax(-1) == batch.answer_tokens.cpu()).double()
        return {"label": log_probs[:, batch.label_tokens.cpu()], "top": top}

    found = study.over(variant, rows, said, what=what)
    return pd.DataFrame(
        {
            "correct": right(study, variant, rows, found["label"]),
            "vocabulary": found["top"].numpy(),
            "odds": odds(study, variant, rows, found["label"]),
        }
    )


def right(
    study: Study, variant: Variant, rows: Int[Tensor, " row"], label_scores: Float[Tensor, "row label"]
) -> Float[np.ndarray, " row"]:
    """1 where the answer scores highest, else 0."""
    batch = study.batch(variant)
    return is_correct(label_scores, batch.answer.cpu()[rows], choices=batch.label_mask.cpu()[rows]).double().numpy()


def odds(
    study: Study, variant: Variant, rows: Int[Tensor, " row"], label_scores: Float[Tensor, "row label"]
) -> Float[np.ndarray, " row"]:
    """The answer's log-odds against the prompt's other labels, nats."""
    batch = study.batch(variant)
    return label_log_odds(label_scores, batch.answer.cpu()[rows], choices=batch.label_mask.cpu()[rows]).double().numpy()


def zeroed(study: Study, heads: list[il.Head], *, positions: Positions = "all") -> EditOf:
    """The edit that sets these heads to zero at every position, or at the last one only."""
    return lambda batch: il.ablate_heads(study.model, heads, positions=positions)


def averaged(study: Study, heads: list[il.Head]) -> EditOf:
    """The edit that sets these heads to their mean over prompts on which heads are chosen, both labels and classes
    alike.

    A mean over one label or class only would go on saying it.
    """
    variants = [replace(variant, asked=asked) for variant in (FOO, BAR) for asked in ("true", "false")]
    reference = [study.batch(variant)[study.halves[0][:REFERENCE]] for variant in variants]
    return lambda batch: il.ablate_heads(study.model, heads, mode="mean", reference=reference)


def located_for_both(study: Study, k: int) -> list[il.Head]:
    """The k best heads for the answer "foo" and the k best for "bar", each head once, by rank.

    By contrast both lists are the same (`Study.ranked`).
    """
    pairs = zip(study.located(k, FOO), study.located(k, BAR), strict=True)
    return list(dict.fromkeys(head for pair in pairs for head in pair))


def how_many(study: Study, at_least: int) -> int:
    """Heads for each label: `at_least`, or half of 1 % if more; but half a small model stays for controls."""
    total = study.view.n_layers * study.view.n_heads
    return max(1, min(max(at_least, total // 200), total // 8))
