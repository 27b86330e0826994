"""Measure a score of every head on a batch of prompts, for the scores of `icl_lens.foundation.ranking_scores`.

`DirectMeasure` gives increases and contrasts, `EffectMeasure` what zeroing a head costs, and
`ExchangeMeasure` what a donor's query, keys or values cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.ablate import Ablate
from icl_lens.edits.edit import Positions
from icl_lens.foundation.ranking_scores import DirectScore, Score
from icl_lens.measures.effects import (
    AnswerTokens,
    Method,
    estimated_effects,
    exact_effects,
)
from icl_lens.measures.exchanges import PromptsWithDonors, single_exchanges
from icl_lens.models.passes.memory import LOGIT_BYTES, STREAM_BYTES
from icl_lens.models.readout import FinalNorm, Readout
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.activations import Activations
from icl_lens.reading.capture import capture
from icl_lens.reading.head_parts import scaled_z
from icl_lens.reading.increases import every_head_increase, min_prompts_to_fold
from icl_lens.reading.scored_tokens import Against, CheckedAgainst, choose_tokens, select_rows
from icl_lens.runs.configuration import tensors_digest
from icl_lens.runs.run import Run, as_run
from icl_lens.runs.stream import Plan, plan_batches


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


@dataclass(frozen=True, eq=False)
class DirectMeasure:
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
    ) -> "DirectMeasure":
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
        bytes_per_prompt = view.n_layers * (view.n_heads * view.d_head + view.d_model) * 4
        n_in_group = min(max(4 * n_to_fold, n_logit_rows), STREAM_BYTES // bytes_per_prompt)
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
        return cls(readout, acts.resid_pre, scaled_z(acts))

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
class EffectMeasure:
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
class ExchangeMeasure:
    """What the log-odds lose when each head alone takes its query, keys or values from a donor.

    Donors are made once, from all prompts: the query that takes a prompt's place comes from another
    one. What a batch gives therefore does not depend on how prompts are divided into batches.
    """

    view: ModelView
    prompts: PromptsWithDonors
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
