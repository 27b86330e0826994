"""Ablate heads jointly and compare with random head sets of the same size.

1. `random_heads` draws sets that have as many heads as were chosen and contain none of these. Some
   layers matter more than others, so sets from the chosen heads' layers are the stricter control;
   the other control is sets from all layers.
2. `ablate_with_controls` scores every prompt (`answer_scores`) without ablation, with the chosen
   heads ablated, and with each random set ablated.
3. `controlled_ablation_result` compares the scores.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.ablate import Ablate, Mode, Reference
from icl_lens.edits.edit import Positions
from icl_lens.edits.reference_prompts import reference_in_words, warn_of_same_pairs
from icl_lens.errors import InputError, check_at_least, check_integers
from icl_lens.foundation.defaults import N_RANDOM_SETS_PER_GROUP
from icl_lens.foundation.digest import weights_digest
from icl_lens.measures.answer_scores import AnswerScores, score_answers
from icl_lens.measures.controlled_ablation_result import (
    Condition,
    ConditionName,
    ControlledAblation,
)
from icl_lens.measures.random_heads import random_head_sets
from icl_lens.models.active_edits import active_edits
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.passes.memory import PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.runs.run import Run
from icl_lens.runs.stream import plan_in_order, start


def ablate_with_controls(
    model: Any,
    batch: PromptBatch,
    heads: Sequence[AnyHead],
    *,
    n_random: int = N_RANDOM_SETS_PER_GROUP,
    all_layers: bool = True,
    positions: Positions = "last",
    mode: Mode = "zero",
    reference: Reference = None,
    seed: int = 0,
    run: Run | None = None,
) -> ControlledAblation:
    """Score a batch without ablation, with `heads` ablated, and with random other heads ablated.

    `n_random` sets of as many other heads are drawn from the layers of `heads` ("same layers") and,
    unless `all_layers` is False, `n_random` more from all layers ("all layers"), the weaker
    control. Each set costs what `heads` cost.

    Heads are ablated at each prompt's last position; `positions="all"` ablates them everywhere,
    which takes much longer. `mode="zero"` sets their z to zero, `mode="mean"` to its mean over the
    `reference` prompts, `mode="resample"` to that of one of them (see `Ablate`). Pass several
    batches as `reference` for a mean over all prompts of several tasks; there is a warning if all
    of them are of the pairs that are scored, since their mean keeps what heads do for these. Zero
    is a value that later layers have not seen in training, so it can change more than the heads'
    own part. `run` says how the prompts run (see `Run`).

    Raise InputError for an unknown head, no heads, a negative `n_random`, fewer than `len(heads)`
    other heads, and like `Ablate` for `mode` and `reference`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> heads = il.locate(model, many, k=2).heads
        >>> ablation = il.ablate_with_controls(model, many, heads, n_random=3)
        >>> ablation.interval("no ablation", "accuracy").value > ablation.chance
        True
    """
    view = ModelView.of(model)
    check_batch(batch)
    (n_random,) = check_at_least(0, n_random=n_random)
    (seed,) = check_integers(seed=seed)
    checked_heads = list(view.check_heads(heads))
    if not checked_heads:
        raise InputError("heads must contain at least one head, got none")
    head_sets = _head_sets(
        model, checked_heads, n_random=n_random, all_layers=all_layers, seed=seed
    )
    ablation = Ablate([], mode=mode, reference=reference, positions=positions, seed=seed)
    edits = [replace(ablation, heads=heads) for heads in chain.from_iterable(head_sets.values())]
    if ablation.reference is not None:
        warn_of_same_pairs(batch, ablation.reference)
    edits = Ablate.prepare(view, edits, None)  # runs the reference once for all pieces
    options: dict[str, Any] = {
        "heads": list(map(str, checked_heads)),
        "n_random_sets": n_random,
        "seed": seed,
        "positions": positions,
        "mode": mode,
    }
    if not all_layers:
        options["all_layers"] = False
    if (z := edits[0].recorded_z) is not None:
        options["reference"] = weights_digest({str(layer): values for layer, values in z.items()})

    def compute(rows: list[int]) -> dict[str, Tensor]:
        return columns_of_sets(score_answers(view, batch[rows], [[edit] for edit in edits]))

    plan = plan_in_order(batch, run, n_tokens=PASS_TOKENS // len(edits))
    with start(run, model, batch, "ablation", options, plan=plan) as stream:
        columns = stream.map("ablation", compute)
    return ControlledAblation(
        heads=tuple(checked_heads),
        conditions=conditions_of_sets(batch, head_sets, columns["scores"], columns["top1"]),
        queries=batch.queries,
        labels=tuple(batch.labels),
        positions=positions,
        edits=active_edits(view),
        mode=mode,
        reference=""
        if ablation.reference is None
        else reference_in_words(batch, ablation.reference),
    )


def _head_sets(
    model: Any,
    heads: list[Head],
    *,
    n_random: int,
    all_layers: bool,
    seed: int,
) -> dict[ConditionName, list[list[Head]]]:
    """Return the sets of heads of each condition."""
    n_of_all_layers = n_random if all_layers else 0
    return {
        "no ablation": [[]],
        "heads": [heads],
        "same layers": random_head_sets(model, heads, n_random=n_random, seed=seed),
        "all layers": random_head_sets(
            model, heads, n_random=n_of_all_layers, seed=seed, same_layers=False
        ),
    }


def columns_of_sets(by_set: Sequence[AnswerScores]) -> dict[str, Tensor]:
    """Return the numbers of each set of heads as columns, which a run's folder stores:
    log-probabilities of labels [prompt set label], and whether the answer is the top token [prompt
    set].
    """
    label_log_probs = [scores.label_log_probs for scores in by_set]
    top1 = [scores.top1_correct.int() for scores in by_set]
    return {"scores": torch.stack(label_log_probs, dim=1), "top1": torch.stack(top1, dim=1)}


def conditions_of_sets(
    batch: PromptBatch,
    head_sets: dict[ConditionName, list[list[Head]]],
    label_log_probs: Float[np.ndarray, "prompt set label"],
    top1: Int[np.ndarray, "prompt set"],
) -> dict[ConditionName, Condition]:
    """Return the conditions with their scores; the axis of sets has those of one after another."""
    answer, mask = batch.answer.cpu(), batch.label_mask.cpu()
    conditions: dict[ConditionName, Condition] = {}
    number = 0
    for name, sets in head_sets.items():
        scores = []
        for _ in sets:
            log_probs = torch.from_numpy(label_log_probs[:, number])
            is_top1 = torch.from_numpy(top1[:, number]).bool()
            scores.append(AnswerScores(log_probs, is_top1, answer, mask))
            number += 1
        conditions[name] = Condition(tuple(map(tuple, sets)), tuple(scores))
    return conditions
