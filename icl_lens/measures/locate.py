"""Locate the heads with the largest mean score over any number of prompts.

1. The prompts run in batches (`runs.stream`), each of which gives every prompt's scores of all
   heads: a measure of `head_measures`.
2. `ranking_means` makes means, intervals and `selected` of them.

Source: docs/howto/numbers.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.edits.edit import Positions
from icl_lens.edits.score import score
from icl_lens.errors import InputError, check_at_least, check_choice, check_integers
from icl_lens.foundation.defaults import N_LOCATED, N_RANDOM_SETS
from icl_lens.foundation.intervals import MIN_RANDOM_SETS
from icl_lens.foundation.ranking_scores import LOCATING_SCORE, SCORES, Score
from icl_lens.measures.controlled_ablation import ablate_with_controls
from icl_lens.measures.controlled_ablation_result import ControlledAblation
from icl_lens.measures.effects import (
    AnswerTokens,
    Method,
    Outcome,
)
from icl_lens.measures.exchanges import tower_prompts
from icl_lens.measures.head_measures import (
    DirectMeasure,
    EffectMeasure,
    ExchangeMeasure,
    HeadMeasure,
)
from icl_lens.measures.locate_result import LocatedHeads
from icl_lens.measures.other_scores import OtherScores
from icl_lens.measures.ranking_means import MeanScore, mean_score
from icl_lens.metrics import most_probable
from icl_lens.models.active_edits import active_edits
from icl_lens.models.head import Head
from icl_lens.models.passes.memory import MAX_ROWS
from icl_lens.models.readout import FinalNorm
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, count_prompts, with_answers
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize
from icl_lens.reading.scored_tokens import Against
from icl_lens.reading.search import check_k
from icl_lens.runs.configuration import tensors_digest
from icl_lens.runs.progress import OTHER_SCORES
from icl_lens.runs.run import Run, as_run
from icl_lens.runs.stream import start


def locate(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    *,
    by: Score = LOCATING_SCORE,
    k: int | None = None,
    targets: Int[Tensor, " prompt"] | None = None,
    against: Against = None,
    positions: Positions = "last",
    method: Method = "exact",
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    other_scores: bool = True,
    held_out: PromptBatch | Sequence[Prompt] | None = None,
    n_random: int = N_RANDOM_SETS,
    seed: int = 0,
    run: Run | None = None,
) -> LocatedHeads:
    """Locate the k heads with the largest mean score over any number of prompts (default: 12, or
    all if fewer).

    `by` is the score (docs/howto/numbers.md has the definitions), in nats:

    - "effect", the default: what the log-odds, or log p where there is nothing to compare with,
      lose if the head is zeroed at the last position, or at all `positions`, which takes much
      longer; `method="gradient"` is a first-order estimate;
    - "exchange": what the log-odds lose if the head's query at the last position is that of the
      same demonstrations with a query of the other class. The table also has what exchanging keys
      or values costs;
    - "contrast": what a head adds to log p(target) − log Σ p(against);
    - "increase": what a head adds to log p(target), as in the paper.

    `targets` defaults to the answers, `against` to the other labels of each prompt. `final_norm`
    and `bias` are those of contrasts and increases (`Readout`), which one forward pass gives; a
    head may rank first by these and have no effect, because later components compensate for it.

    The first k heads are also measured by every other score that the prompts allow, and their
    attention to labels of the answer and to other labels is read (`OtherScores`), unless
    `other_scores` is False.

    On `held_out` prompts, which should have other queries (`il.split_by_query`), the first k heads,
    at most half of the model's, are zeroed jointly, beside `n_random` random sets of heads of the
    same layers (`ablate_with_controls`). What the answer loses is the first sentence of the result,
    because a list of heads that were chosen on some prompts says little about others.

    Intervals are 95% intervals over queries, because prompts with the same query are not
    independent. `selected` says how firm the list is: in which share of draws of queries each head
    is among the first k. Memory grows by a few numbers per prompt and head. `run` says how the
    prompts run; its folder holds every prompt's scores, heads.parquet and heads.csv (the table),
    and result.json.

    Raise InputError for an invalid `by`, `k`, `targets` or `against`, for options of another score,
    for scores that are not finite, by exchange for prompts that do not demonstrate their answer and
    another label, and like `Run`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> located = il.locate(model, many, k=4)
        >>> located.by, len(located.heads), located.score.mean.shape
        ('effect', 4, torch.Size([8, 6]))
        >>> il.locate(model, many, by="exchange", k=4).n_prompts
        20
    """
    batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    view = ModelView.of(model)
    check_batch(batch)
    n_heads = len(view.heads())
    k = check_k(min(N_LOCATED, n_heads) if k is None else k, n_heads, "heads")
    (n_random,) = check_at_least(MIN_RANDOM_SETS, n_random=n_random)
    (seed,) = check_integers(seed=seed)
    check_score_options(
        by, targets, against, positions=positions, method=method, final_norm=final_norm, bias=bias
    )
    head_measure: HeadMeasure
    if by == "effect":
        tokens = AnswerTokens.from_batch(view, batch, targets, against)
        digests = tensors_digest(targets=targets, against=against)
        head_measure = EffectMeasure(view, batch, tokens, positions, method, digests)
    elif by == "exchange":
        head_measure = ExchangeMeasure(view, tower_prompts(model, batch), as_run(run).memory)
    else:
        head_measure = DirectMeasure.from_batch(
            model, batch, by, targets, against, final_norm=final_norm, bias=bias, run=run
        )
    scored_tokens = None
    if other_scores:
        scored_tokens = AnswerTokens.from_batch(view, batch, targets, against)
    remove_jointly = None
    if held_out is not None:
        testing = held_out if isinstance(held_out, PromptBatch) else tokenize(model, held_out)
        remove_jointly = partial(
            ablate_with_controls,
            model,
            testing,
            n_random=n_random,
            all_layers=False,
            seed=seed,
            run=as_run(run).step("removal"),
        )
    return mean_over_prompts(
        head_measure,
        view,
        batch,
        k=k,
        run=run,
        scored_tokens=scored_tokens,
        final_norm=final_norm,
        bias=bias,
        remove_jointly=remove_jointly,
    )


def check_score_options(
    by: Score,
    targets: Int[Tensor, " prompt"] | None,
    against: Against,
    *,
    positions: Positions,
    method: Method,
    final_norm: FinalNorm,
    bias: bool,
) -> None:
    """Raise InputError for an unknown score, and for options of another score."""
    check_choice("positions", positions, ("all", "last"))
    check_choice("method", method, ("exact", "gradient"))
    check_choice("by", by, SCORES)
    if by != "effect" and (positions, method) != ("last", "exact"):
        raise InputError(
            f"positions and method must be omitted with by={by!r}; only by='effect' zeroes heads"
        )
    if by in ("effect", "exchange") and (final_norm, bias) != ("frozen", True):
        raise InputError(
            f"final_norm and bias must be omitted with by={by!r}, which reads the model's output"
        )
    if by == "exchange" and not (targets is None and against is None):
        raise InputError(
            "targets and against must be omitted with by='exchange', which compares labels"
        )


def mean_over_prompts(
    head_measure: HeadMeasure,
    view: ModelView,
    batch: PromptBatch,
    *,
    k: int,
    run: Run | None,
    scored_tokens: AnswerTokens | None = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    remove_jointly: Callable[[Sequence[Head]], ControlledAblation] | None = None,
) -> LocatedHeads:
    """Return the heads with the largest mean score.

    `scored_tokens` are those of the other scores of the first k heads, if these are to be measured.
    `remove_jointly` tests the heads on held-out prompts.
    """
    options = head_measure.options()
    plan = head_measure.plan(run)
    with start(run, view.model, batch, head_measure.by, options, plan=plan) as stream:
        columns = stream.map("part", head_measure.measure)
        located = stream.distributed.run_on_main(
            lambda: _located_heads(head_measure, view, batch, columns, k)
        )
        if scored_tokens is not None:
            other_scores = OtherScores.of(
                view, batch, located, scored_tokens, final_norm=final_norm, bias=bias, run=run
            )
            values = stream.map(f"{OTHER_SCORES}{k}", other_scores.measure)
            located = stream.distributed.run_on_main(lambda: other_scores.added_to(located, values))
        if remove_jointly is not None:
            n_removed = len(view.heads()) // 2  # random sets need as many other heads
            removal = remove_jointly(located.heads[:n_removed])
            n_shared = len(set(batch.queries).intersection(removal.queries))
            located = replace(located, removal=removal, n_shared_queries=n_shared)
        stream.write_result({"heads": located.to_frame()}, located.to_dict())
    return located


def _located_heads(
    head_measure: HeadMeasure,
    view: ModelView,
    batch: PromptBatch,
    columns: dict[str, np.ndarray],
    k: int,
) -> LocatedHeads:
    """Return the means of what was measured; each column has one row per prompt."""
    columns = dict(columns)
    algorithms = columns.pop("algorithm", None)
    reasons = columns.pop("fallback_reason", [])
    outcome: Outcome = "log_odds"
    if head_measure.by == "effect":
        by_outcome = {name: columns.pop(name) for name in ("log_odds", "log_prob")}
        outcome = "log_prob" if np.isnan(by_outcome["log_odds"]).all() else "log_odds"
        columns["effect"] = by_outcome[outcome]
        columns["log_prob"] = by_outcome["log_prob"]
    scores: dict[str, MeanScore] = {}
    for name, values in columns.items():
        scores[name] = mean_score(name, values, batch.queries, k)
    return LocatedHeads(
        by=head_measure.by,
        scores=scores,
        k=k,
        n_prompts=count_prompts(batch),
        n_queries=len(set(batch.queries)),
        outcome=outcome,
        positions=getattr(head_measure, "positions", "last"),
        algorithms=None if algorithms is None else _counts(algorithms),
        fallback_reason=next(filter(None, reasons), ""),
        edits=active_edits(view),
    )


def _counts(names: np.ndarray) -> dict[Any, int]:
    """Return how often each name occurs."""
    values, counts = np.unique(names.astype(str), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def with_predicted_answers(model: Any, batch: PromptBatch) -> PromptBatch:
    """Return the batch with the model's most probable label as the answer of prompts that have
    none.
    """
    if bool((batch.answer >= 0).all()):
        return batch
    predicted = []
    for prompts in batch.split(MAX_ROWS):
        predicted.append(most_probable(score(model, prompts), prompts.label_mask))
    answer = torch.where(
        batch.answer < 0, torch.cat(predicted).to(batch.answer.device), batch.answer
    )
    return with_answers(batch, answer)
