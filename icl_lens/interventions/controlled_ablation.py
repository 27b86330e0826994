"""What is left when located heads are removed: their choice, the removal, and as many random heads beside it.

1. The heads of largest mean increase over some prompts are located (`most_increasing`).
2. Sets of as many other heads are drawn (`random_sets`).
3. Other prompts are answered with nothing, the located heads, and each random set zeroed (`remove_heads`).
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
from icl_lens.models.locking import locks_model
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Prompts in one forward pass.
ROWS = 64


@dataclass(frozen=True)
class ControlledAblation:
    """Answers with nothing removed, with chosen heads zeroed together, and with as many random ones, set by set."""

    heads: tuple[Head, ...]
    baseline: AnswerScores
    ablated: AnswerScores
    random: tuple[AnswerScores, ...]


def top_heads_by_increase(
    model: Any, batch: PromptBatch, k: int, *, by: Literal["increase", "contrast"] = "increase"
) -> list[Head]:
    """The k heads of largest mean log-probability increase of the answer, largest first.

    With `by="contrast"`, of largest mean increase of log p(answer) − log Σ p(other labels).

    For a prompt without an answer the label that the model finds most probable takes its place. Exhaustive; for many
    prompts see `locate_heads`. Raises InputError unless the model has k heads.
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
    """`draws` sets of as many heads, none of them among `heads`, each set without repetition.

    Raises InputError if fewer heads are left than there are in `heads`.
    """
    every = view.heads()
    rest = [head for head in every if head not in heads]
    if len(rest) < len(heads):
        raise InputError(f"{len(heads)} of {len(every)} heads leave too few random ones; remove fewer")
    rng = random.Random(seed)
    return [rng.sample(rest, len(heads)) for _ in range(draws)]


@locks_model
def ablate_with_controls(
    model: Any, batch: PromptBatch, heads: Sequence[Head | tuple[int, int]], *, n_random_sets: int = 20, seed: int = 0
) -> ControlledAblation:
    """Answers a batch with nothing, with `heads`, and with `draws` sets of as many random other heads zeroed.

    Raises InputError for a head that the model lacks, and if too few other heads are left to draw from.
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
    """The answers to pieces of a batch, one after the other."""
    return AnswerScores(*(torch.cat([getattr(one, field.name) for one in pieces]) for field in fields(AnswerScores)))
