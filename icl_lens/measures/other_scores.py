"""Measure the first heads of a list by the scores that did not rank them, for one table of all
scores.

`il.locate` ranks all heads by one score; `OtherScores` measures the first of them by the others, on
the same prompts (`il.locate(other_scores=…)`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.ablate import Ablate
from icl_lens.edits.edit_checks import checked_heads
from icl_lens.edits.score import score_sets
from icl_lens.errors import InputError
from icl_lens.foundation.ranking_scores import Score
from icl_lens.measures.exchanges import (
    SINGLE,
    PromptsWithDonors,
    exchange_scores,
    tower_prompts,
)
from icl_lens.measures.label_attention import attention_by_truth
from icl_lens.measures.locate_result import LocatedHeads
from icl_lens.measures.ranking_means import SHARE_LIMITS, mean_score_of_heads
from icl_lens.models.head import Head
from icl_lens.models.readout import FinalNorm
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.capture import capture
from icl_lens.reading.increases import listed_head_increase
from icl_lens.reading.scored_tokens import OUTCOMES_OF_ANSWER, AnswerTokens, Outcome
from icl_lens.runs.run import Run, as_run
from icl_lens.runs.stream import plan_batches

EXCHANGE_SCORES = ("exchange", "keys", "values")
"""Names of the scores of exchanging a head's query, keys or values, in the order of `SINGLE`."""
LABEL_ATTENTION = ("true_label_attention", "false_label_attention")
"""Names of the scores that are shares of attention."""


@dataclass(frozen=True, eq=False)
class OtherScores:
    """What some heads do on prompts, by every score that did not rank them.

    - "contrast" and "increase": what a head adds to the answer, read from an unedited pass;
    - "effect": what the answer loses if the head alone is zeroed at the last position;
    - "exchange", "keys" and "values": what it loses if the head alone takes these from a donor;
    - "true_label_attention", "false_label_attention": attention from the last position to labels
      that are the answer, and to others, 0 to 1.

    Prompts without other labels have no contrast and no exchange. Texts without demonstrations
    have no attention to labels, and prompts that do not show their answer, such as pairs, none to
    true labels.
    """

    view: ModelView
    batch: PromptBatch
    heads: Sequence[Head]
    tokens: AnswerTokens
    by: Score
    """The score that ranked heads: by increases the answer loses log p, by the others log-odds."""
    donors: PromptsWithDonors | None
    """None where nothing can be exchanged."""
    no_exchanges: str
    """Why nothing is exchanged, as a sentence; empty if the prompts have nothing to exchange."""
    final_norm: FinalNorm
    bias: bool
    memory: int
    n_captured: int
    """How many prompts are captured at a time."""

    @classmethod
    def of(
        cls,
        view: ModelView,
        batch: PromptBatch,
        located: LocatedHeads,
        tokens: AnswerTokens,
        *,
        final_norm: FinalNorm,
        bias: bool,
        run: Run | None,
    ) -> "OtherScores":
        """Return the first heads of a result, with the tokens that score their prompts."""
        donors, no_exchanges = None, ""
        if not set(EXCHANGE_SCORES).issubset(located.scores):
            donors, no_exchanges = _donors(view, batch, located.heads)
        n_captured = len(plan_batches(view, batch, run)[0])  # as many of the longest prompts fit
        return cls(
            view,
            batch,
            located.heads,
            tokens,
            located.by,
            donors,
            no_exchanges,
            final_norm,
            bias,
            as_run(run).memory,
            n_captured,
        )

    @property
    def outcome(self) -> Outcome:
        """What an effect is lost of."""
        has_log_odds = self.by != "increase" and self.tokens.against is not None
        return "log_odds" if has_log_odds else "log_prob"

    def measure(self, rows: list[int]) -> dict[str, Tensor]:
        """Return the scores [row head] by name."""
        pieces: list[dict[str, Tensor]] = []
        for first in range(0, len(rows), self.n_captured):
            pieces.append(self._direct_scores(rows[first : first + self.n_captured]))
        scores = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        if self.by != "effect":
            scores["effect"] = self._effects(rows)
        if self.donors is not None:
            scores |= self._exchanges(rows)
        return {name: values.cpu() for name, values in scores.items() if name != self.by}

    def _direct_scores(self, rows: list[int]) -> dict[str, Tensor]:
        """Return what the heads add to the answer, and their attention to labels."""
        acts = capture(self.view.model, self.batch[rows])
        readout = acts.readout.using(final_norm=self.final_norm, bias=self.bias)
        targets, against = self.tokens.select(rows)
        scores = {}
        if against is not None:
            contrasts = listed_head_increase(acts, self.heads, targets, against, readout)
            is_missing = (against < 0).all(1).to(contrasts.device)
            scores["contrast"] = contrasts.masked_fill(is_missing[:, None], torch.nan)
        scores["increase"] = listed_head_increase(acts, self.heads, targets, None, readout)
        if acts.batch.has_demonstrations and acts.batch.prompts:
            layers, heads = torch.tensor(list(self.heads)).unbind(1)
            for name, attention in attention_by_truth(acts).items():
                scores[name] = attention[:, layers, heads]
        return scores

    def _effects(self, rows: list[int]) -> Float[Tensor, "row head"]:
        """Return what the answer loses when each head alone is zeroed at the last position.

        Each head costs one token per prompt, besides one pass over each prompt (see
        `head_effects`).
        """
        outcomes = self.tokens.select(rows).outcomes
        sets: list[list[Ablate]] = [[]]
        for head in self.heads:
            sets.append([Ablate([head], positions="last")])
        by_outcome, _ = score_sets(self.view, self.batch[rows], sets, outcomes)
        scores = by_outcome[..., OUTCOMES_OF_ANSWER.index(self.outcome)]
        return scores[:, :1] - scores[:, 1:]

    def _exchanges(self, rows: list[int]) -> dict[str, Tensor]:
        """Return the log-odds that the answer loses with each part of each head exchanged."""
        assert self.donors is not None
        sets = [(exchange, [head]) for exchange in SINGLE for head in self.heads]
        donors = self.donors.select(rows)
        scores, _, _ = exchange_scores(self.view, donors, sets, memory=self.memory)
        lost = scores.log_odds[:, :1] - scores.log_odds[:, 1:]
        by_part = lost.unflatten(1, (len(SINGLE), len(self.heads))).unbind(1)
        return dict(zip(EXCHANGE_SCORES, by_part, strict=True))

    def added_to(self, located: LocatedHeads, values: dict[str, np.ndarray]) -> LocatedHeads:
        """Return located heads with the means of these values; those of other heads are NaN."""
        scores = dict(located.scores)
        shape = located.score.mean.shape
        for name in values:
            limits = SHARE_LIMITS if name in LABEL_ATTENTION else None
            scores[name] = mean_score_of_heads(
                values[name], self.heads, self.batch.queries, shape, limits=limits
            )
        return replace(located, scores=scores, outcome=self.outcome, no_exchanges=self.no_exchanges)


def _donors(
    view: ModelView, batch: PromptBatch, heads: Sequence[Head]
) -> tuple[PromptsWithDonors | None, str]:
    """Return the donors of a batch; without them, None and why nothing can be exchanged.

    Texts and pairs, which have no classes, have nothing to exchange: they need no reason.
    """
    try:
        checked_heads(view, heads, attention=True)
        return tower_prompts(view.model, batch), ""
    except InputError as error:
        has_classes = bool(batch.prompts) and not any(
            prompt.has_own_answer for prompt in batch.prompts
        )
        reason = f"Queries, keys and values could not be exchanged: {error}."
        return None, reason if has_classes else ""
