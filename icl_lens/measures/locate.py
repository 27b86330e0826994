"""Locate the heads with the largest mean score over any number of prompts.

1. The prompts run in batches (`runs.stream`), each of which gives every prompt's scores of all
   heads. `DirectScores`, `Effects` and `Exchanges` compute them, for the scores of
   `icl_lens.head_scores`.
2. `mean_scores` makes means, intervals and `selected` of them.

Source: docs/howto/numbers.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.ablate import Ablate
from icl_lens.edits.edit import Positions
from icl_lens.edits.score import score
from icl_lens.errors import InputError, check_at_least, check_choice, check_integers
from icl_lens.head_scores import LOCATING_SCORE, SCORES, DirectScore, Score
from icl_lens.intervals import MIN_RANDOM_SETS
from icl_lens.measures.controlled_ablation import ablate_with_controls
from icl_lens.measures.controlled_ablation_result import ControlledAblation
from icl_lens.measures.effects import (
    AnswerTokens,
    Method,
    Outcome,
    estimated_effects,
    exact_effects,
)
from icl_lens.measures.exchanges import TowerPrompts, single_exchanges, tower_prompts
from icl_lens.measures.listed_heads import ListedHeads
from icl_lens.measures.located_heads import LocatedHeads
from icl_lens.measures.mean_scores import MeanScore, mean_score
from icl_lens.metrics import most_probable
from icl_lens.models.active_edits import active_edits
from icl_lens.models.head import Head
from icl_lens.models.memory import LOGIT_BYTES, MAX_ROWS, STREAM_BYTES
from icl_lens.models.readout import FinalNorm, Readout
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_batch, with_answers
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize
from icl_lens.reading.activations import Activations, capture
from icl_lens.reading.increases import every_head_increase, min_prompts_to_fold
from icl_lens.reading.scored_tokens import Against, CheckedAgainst, choose_tokens, select_rows
from icl_lens.reading.search import check_k
from icl_lens.runs.configuration import tensors_digest
from icl_lens.runs.progress import OTHER_SCORES
from icl_lens.runs.run import Run, as_run
from icl_lens.runs.stream import Plan, plan_batches, start

N_LOCATED = 12
"""Length of the list of heads by default, if the model has as many."""


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
    n_random: int = 10,
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
    attention to labels of the answer and to other labels is read (`ListedHeads`), unless
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
        head_measure = Effects(view, batch, tokens, positions, method, digests)
    elif by == "exchange":
        head_measure = Exchanges(view, tower_prompts(model, batch), as_run(run).memory)
    else:
        head_measure = DirectScores.from_batch(
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
            run=as_run(run).part("removal"),
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


@runtime_checkable
class HeadMeasure(Protocol):
    """A score of all heads that is measured on batches of prompts."""

    @property
    def by(self) -> Score: ...

    def options(self) -> dict[str, Any]:
        """Return what the numbers depend on beside the model and the prompts, as JSON."""
        ...

    def plan(self, run: Run | None) -> Plan:
        """Return the rows of each batch."""
        ...

    def measure(self, rows: list[int]) -> dict[str, Tensor | list[str]]:
        """Return scores [row layer head] by name, and texts about the rows."""
        ...


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
            listed = ListedHeads.of(
                view, batch, located, scored_tokens, final_norm=final_norm, bias=bias, run=run
            )
            values = stream.map(f"{OTHER_SCORES}{k}", listed.measure)
            located = stream.distributed.run_on_main(lambda: listed.added_to(located, values))
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
        n_prompts=batch.n_prompts,
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


@dataclass(frozen=True, eq=False)
class DirectScores:
    """What heads add to log p(target), the increase, or to the log-odds, the contrast."""

    model: Any
    batch: PromptBatch
    by: DirectScore
    targets: Int[Tensor, " prompt"]
    against: CheckedAgainst
    final_norm: FinalNorm
    bias: bool
    digests: dict[str, str]
    """Digests of the tokens, as options of a run."""
    n_captured: int
    """How many prompts are captured at a time."""

    @classmethod
    def from_batch(
        cls,
        model: Any,
        batch: PromptBatch,
        by: DirectScore | None,
        targets: Int[Tensor, " prompt"] | None,
        against: Against,
        *,
        final_norm: FinalNorm,
        bias: bool,
        run: Run | None,
    ) -> "DirectScores":
        """Return the score of checked tokens; raise InputError like `choose_tokens`."""
        view = ModelView.of(model)
        tokens = choose_tokens(view, batch, by, targets, against)
        digests = tensors_digest(
            targets=targets, against=batch.against if against is None else against
        )
        n_captured = len(plan_batches(view, batch, run)[0])  # as many of the longest prompts fit
        return cls(model, batch, *tokens, final_norm, bias, digests, n_captured)

    def options(self) -> dict[str, Any]:
        return {"final_norm": self.final_norm, "bias": self.bias, **self.digests}

    def plan(self, run: Run | None) -> Plan:
        """Return the rows of each batch, which for increases is larger than what is captured.

        The prompts of such a group share one product of W_O and W_U per head. Without groups, each
        head of each prompt is multiplied by W_U (`every_head_increase`).
        """
        view = ModelView.of(self.model)
        batches = plan_batches(view, self.batch, run)
        n_to_fold = min_prompts_to_fold(view.d_head, view.d_model)
        has_batch_size = as_run(run).batch_size is not None
        if self.by == "contrast" or has_batch_size or len(self.batch) < n_to_fold:
            return batches
        n_logit_rows = LOGIT_BYTES // (view.model.W_U.shape[1] * 4)
        prompt_bytes = view.n_layers * (view.n_heads * view.d_head + view.d_model) * 4
        n_in_group = min(max(4 * n_to_fold, n_logit_rows), STREAM_BYTES // prompt_bytes)
        groups: list[list[int]] = [[]]
        for rows in batches:
            if len(groups[-1]) >= n_in_group:
                groups.append([])
            groups[-1] += rows
        return groups

    def measure(self, rows: list[int]) -> dict[str, Tensor | list[str]]:
        inputs = []
        for piece in self.captured_at_a_time(rows):
            acts = capture(self.model, self.batch[piece])
            inputs.append(DirectInputs.of(acts, self.final_norm, self.bias))
        view, against = ModelView.of(self.model), select_rows(self.against, rows)
        scores = DirectInputs.joined(inputs).scores(view, self.targets[rows], against)
        return {self.by: scores.cpu()}

    def captured_at_a_time(self, rows: list[int]) -> list[list[int]]:
        """Return the rows of each pass over some of the prompts."""
        starts = range(0, len(rows), self.n_captured)
        return [rows[start : start + self.n_captured] for start in starts]


@dataclass(frozen=True, eq=False)
class DirectInputs:
    """What direct scores of prompts follow from: the readout, and what heads read and write."""

    readout: Readout
    resid_pre: Float[Tensor, "batch layer d_model"]
    scaled_z: Float[Tensor, "batch layer head d_head"]

    @classmethod
    def of(cls, acts: Activations, final_norm: FinalNorm, bias: bool) -> "DirectInputs":
        """Return the inputs of captured prompts."""
        readout = acts.readout.using(final_norm=final_norm, bias=bias)
        return cls(readout, acts.resid_pre, acts.scaled_z)

    @classmethod
    def joined(cls, pieces: Sequence["DirectInputs"]) -> "DirectInputs":
        """Return the inputs of the prompts of several passes."""
        scale = torch.cat([piece.readout.scale for piece in pieces])
        return cls(
            replace(pieces[0].readout, scale=scale),
            torch.cat([piece.resid_pre for piece in pieces]),
            torch.cat([piece.scaled_z for piece in pieces]),
        )

    def scores(
        self, view: ModelView, targets: Int[Tensor, " batch"], against: CheckedAgainst
    ) -> Float[Tensor, "batch layer head"]:
        """Return increases, or contrasts with the tokens `against`, nats."""
        return every_head_increase(
            view, self.readout, self.resid_pre, self.scaled_z, targets, against
        )


@dataclass(frozen=True, eq=False)
class Effects:
    """What the answer loses when each head alone is zeroed."""

    view: ModelView
    batch: PromptBatch
    tokens: AnswerTokens
    positions: Positions
    method: Method
    digests: dict[str, str]
    """Digests of the tokens, as options of a run."""
    by: Score = "effect"

    def options(self) -> dict[str, Any]:
        return {"positions": self.positions, "method": self.method, **self.digests}

    def plan(self, run: Run | None) -> Plan:
        return plan_batches(self.view, self.batch, run)

    def measure(self, rows: list[int]) -> dict[str, Tensor | list[str]]:
        prompts = self.batch[rows]
        tokens = self.tokens.select(rows)
        if self.method == "gradient":
            effects = estimated_effects(self.view, prompts, tokens, self.positions)
        else:
            ablation = Ablate([], positions=self.positions)
            effects = exact_effects(self.view, prompts, tokens, ablation)
        return {
            "log_odds": effects.log_odds.cpu(),
            "log_prob": effects.log_prob.cpu(),
            "algorithm": [effects.algorithm] * len(rows),
            "fallback_reason": [effects.fallback_reason] * len(rows),
        }


@dataclass(frozen=True, eq=False)
class Exchanges:
    """What the log-odds lose when each head alone takes its query, keys or values from a donor.

    Donors are made once, from all prompts: the query that takes a prompt's place comes from another
    one. What a batch gives therefore does not depend on how prompts are divided into batches.
    """

    view: ModelView
    prompts: TowerPrompts
    memory: int
    by: Score = "exchange"

    def options(self) -> dict[str, Any]:
        return {}

    def plan(self, run: Run | None) -> Plan:
        return plan_batches(self.view, self.prompts.batch, run)

    def measure(self, rows: list[int]) -> dict[str, Tensor | list[str]]:
        lost, reason = single_exchanges(self.view, self.prompts.select(rows), memory=self.memory)
        query, keys, values = lost.unbind(1)
        reasons = [reason] * len(rows)
        return {"exchange": query, "keys": keys, "values": values, "fallback_reason": reasons}


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
