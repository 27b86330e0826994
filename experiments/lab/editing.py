"""Passes with interventions: label scores of edited models, and the heads that the published version edits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

import icl_lens as il
from experiments.lab.passes import Tensors, joined
from experiments.lab.study import Study, Variant
from icl_lens.interventions.ablation import every_head, mean_z
from icl_lens.interventions.choice import Positions
from icl_lens.interventions.head_sets import answers_without
from icl_lens.metrics import is_correct, label_log_odds

REFERENCE = 25
"""Prompts of each kind that a mean-ablation averages over."""

FOO, BAR = Variant(), Variant(swapped=True)
"""The true label is "foo", or "bar"."""


Sets = Sequence[Sequence[il.Head]]

PIECE = 320
"""Prompts through the model, or as much work, after which a chunk is kept: what a killed run loses at most."""
ROW = 0.1
"""Of a prompt: what a row of one token costs, about."""
FEWEST_SETS = 8
"""In a piece, each of which begins with a pass over its prompts as they are."""


def side_by_side(
    study: Study,
    what: str,
    batches: Sequence[il.PromptBatch],
    sets: Sets,
    compute: Callable[[il.PromptBatch, Sets], Tensors],
    *,
    cost: float,
) -> dict[str, Shaped[Tensor, "prompt set ..."]]:
    """What `compute` gives for some prompts and sets of heads, [prompt set …], of all of them, in pieces.

    `cost`: of a prompt and set, in prompts. A piece has few prompts rather than few sets: each prompt's pass as it is
    serves all sets of its piece.
    """
    parts: list[list[tuple[il.PromptBatch, Sets]]] = []
    for batch in batches:
        for piece in batch.split(max(1, int(PIECE / (cost * len(sets))))):
            step = max(FEWEST_SETS, int(PIECE / (cost * len(piece))))
            parts.append([(piece, sets[start : start + step]) for start in range(0, len(sets), step)])
    jobs = [job for part in parts for job in part]
    sizes = [max(1, round(cost * len(batch) * len(some))) for batch, some in jobs]
    found = iter(study.passes.run(what, sizes, lambda i: compute(*jobs[i])))
    rows = []
    for part in parts:
        each = [next(found) for _ in part]
        rows.append({name: torch.cat([one[name] for one in each], dim=1) for name in each[0]})
    return joined(rows)


def says_without(
    study: Study,
    variant: Variant,
    rows: Int[Tensor, " row"],
    sets: Sets,
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
    variants = [replace(one, asked=asked) for one in (FOO, BAR) for asked in ("true", "false")]
    reference = [study.batch(one)[study.halves[0][:REFERENCE]] for one in variants] if mode == "mean" else []

    def said(batch: il.PromptBatch, some: Sets) -> Tensors:
        means = None
        if reference:
            about = ("means", positions)
            means = study.once(about, lambda: mean_z(study.view, every_head(study.view), reference, positions))
        found = answers_without(
            study.model, batch, some, positions=positions, mode=mode, reference=reference or None, means=means
        )
        return {
            "label": torch.stack([one.label_log_probs for one in found], dim=1),
            "top": torch.stack([one.right for one in found], dim=1).double(),
        }

    found = side_by_side(study, what, batches, sets, said, cost=1.0 if positions == "all" else ROW)
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
