"""Ablate located heads and compare with random head sets of the same size.

1. `random_head_sets` draws sets of the same number of other heads.
2. `ablate_with_controls` scores other prompts without ablation, with the chosen heads zeroed, and with each random set
   zeroed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from icl_lens.errors import InputError
from icl_lens.interventions.edited_scores import AnswerScores, score_ablated_sets
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Prompts per forward pass.
ROWS = 64


@dataclass(frozen=True)
class ControlledAblation:
    """Answer scores without ablation, with chosen heads zeroed jointly, and with each random head set zeroed."""

    heads: tuple[Head, ...]
    baseline: AnswerScores
    ablated: AnswerScores
    random: tuple[AnswerScores, ...]


def random_head_sets(view: ModelView, heads: Sequence[Head], *, draws: int, seed: int) -> list[list[Head]]:
    """Return `draws` random sets of `len(heads)` distinct heads that are not in `heads`.

    Raise InputError if fewer than `len(heads)` other heads exist.
    """
    every = view.heads()
    rest = [head for head in every if head not in heads]
    if len(rest) < len(heads):
        raise InputError(
            f"heads must be at most half of the model's {len(every)} heads, to draw random sets, got {len(heads)}"
        )
    rng = random.Random(seed)
    return [rng.sample(rest, len(heads)) for _ in range(draws)]


def ablate_with_controls(
    model: Any, batch: PromptBatch, heads: Sequence[Head | tuple[int, int]], *, n_random_sets: int = 20, seed: int = 0
) -> ControlledAblation:
    """Score a batch without ablation, with `heads` zeroed, and with each of `n_random_sets` random sets zeroed.

    The sets have the size of `heads` and exclude them. Raise InputError for an unknown head, and if too few other heads
    exist.
    """
    view = ModelView.of(model)
    chosen = [view.check_head(head) for head in heads]
    sets = random_head_sets(view, chosen, draws=n_random_sets, seed=seed)
    found: list[list[AnswerScores]] = [
        score_ablated_sets(model, rows, [[], chosen, *sets]) for rows in batch.split(ROWS)
    ]
    nothing, removed, *random = (_joined(pieces) for pieces in zip(*found, strict=True))
    return ControlledAblation(heads=tuple(chosen), baseline=nothing, ablated=removed, random=tuple(random))


def _joined(pieces: Sequence[AnswerScores]) -> AnswerScores:
    """Concatenate the scores of pieces of a batch."""
    return AnswerScores(*(torch.cat([getattr(one, field.name) for one in pieces]) for field in fields(AnswerScores)))
