"""Ablate located heads and compare with random head sets of the same size.

1. `top_heads_by_increase` locates the heads with the largest mean increase over some prompts.
2. `random_head_sets` draws sets of the same number of other heads.
3. `ablate_with_controls` scores other prompts without ablation, with the located heads zeroed, and with each random set
   zeroed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from icl_lens.activations.activations import capture
from icl_lens.attribution.increases import head_log_prob_increase
from icl_lens.attribution.search import check_k
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.head_sets import AnswerScores, score_ablated_sets
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


def top_heads_by_increase(
    model: Any, batch: PromptBatch, k: int, *, by: Literal["increase", "contrast"] = "increase"
) -> list[Head]:
    """Return the k heads with the largest mean log-probability increase of the answer, largest first.

    With `by="contrast"`, those with the largest mean increase of log p(answer) − log Σ p(other labels).

    For a prompt without an answer, the model's most probable label is used. Exhaustive; use `locate_heads` for many
    prompts. Raise InputError if k exceeds the number of heads.
    """
    view = ModelView.of(model)
    check_k(k, view.n_layers * view.n_heads, "heads")
    check_choice("by", by, ("increase", "contrast"))
    increases = []
    for rows in batch.split(ROWS):
        acts = capture(model, rows)
        answer = torch.where(rows.answer < 0, acts.predicted.to(rows.answer.device), rows.answer)
        others = rows.label_tokens_except(answer) if by == "contrast" else None
        increases.append(head_log_prob_increase(acts, rows.label_tokens[answer], against=others))
    order = torch.cat(increases).mean(0).flatten().argsort(descending=True)[:k]
    return [Head.from_index(index, view.n_heads) for index in order.tolist()]


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
