"""Passes with interventions: label scores of edited models, and the heads that the published version edits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

import icl_lens as il
from experiments.lab.passes import Tensors, joined
from experiments.lab.study import Study, Variant
from icl_lens.interventions.choice import Positions
from icl_lens.interventions.head_sets import answers_without
from icl_lens.metrics import is_correct, label_log_odds

REFERENCE = 25
"""Prompts of each kind that a mean-ablation averages over."""

FOO, BAR = Variant(), Variant(swapped=True)
"""The true label is "foo", or "bar"."""


def says_without(
    study: Study,
    variant: Variant,
    rows: Int[Tensor, " row"],
    sets: Sequence[Sequence[il.Head]],
    *,
    positions: Positions = "all",
    mode: Literal["zero", "mean"] = "zero",
    what: str,
) -> list[pd.DataFrame]:
    """Of each row, without each set of heads: correct (the answer is the likeliest label, 0–1), vocabulary (… token),
    odds (nats).

    Heads are set to zero, or to their mean over prompts on which heads are chosen. These are of both labels and classes
    alike: a mean over one label or class only would go on saying it.
    """
    batches = study.batches(variant, rows)
    reference = None
    if mode == "mean":
        four = [replace(one, asked=asked) for one in (FOO, BAR) for asked in ("true", "false")]
        reference = [study.batch(one)[study.halves[0][:REFERENCE]] for one in four]

    def said(i: int) -> Tensors:
        found = answers_without(study.model, batches[i], sets, positions=positions, mode=mode, reference=reference)
        label, top = (
            torch.stack([getattr(one, name) for one in found], dim=1) for name in ("label_log_probs", "right")
        )
        return {"label": label, "top": top.double()}

    found = joined(study.passes.run(what, [len(batch) * len(sets) for batch in batches], said))
    return [
        pd.DataFrame(
            {
                "correct": right(study, variant, rows, label),
                "vocabulary": top.numpy(),
                "odds": odds(study, variant, rows, label),
            }
        )
        for label, top in zip(found["label"].unbind(1), found["top"].unbind(1), strict=True)
    ]


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
