"""The tokens that are scored: each prompt's target, and the tokens that it is compared with.

1. Targets are, by default, the tokens of the answers.
2. The increase is that of log p(target), the contrast that of log p(target) − log Σ p(against).
3. Functions that rank heads choose between them: by default, a target is compared with the other
   labels of its prompt.
4. `AnswerTokens` reads both from log-probabilities, for all measures of what the answer loses.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError, short_repr
from icl_lens.foundation.ranking_scores import DIRECT_SCORES, DirectScore, choose_score
from icl_lens.models.readout import FinalNorm, Readout
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, tokens_of_labels
from icl_lens.reading.activations import Activations, check_device

Against = Int[Tensor, " batch"] | Int[Tensor, "batch other"] | None
"""Token ids to compare with: one per prompt, several (padded with -1 where a prompt has fewer), or
None.
"""
CheckedAgainst = Int[Tensor, "batch kept"] | None
"""`Against` after `check_against_ids`."""
Outcome = Literal["log_odds", "log_prob"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
OUTCOMES_OF_ANSWER: tuple[Outcome, ...] = ("log_prob", "log_odds")
"""The order of `AnswerTokens.outcomes`."""


def check_targets(
    view: ModelView, batch: PromptBatch, targets: Int[Tensor, " batch"] | None = None
) -> Int[Tensor, " batch"]:
    """Return `targets`, by default the answers' tokens, on the model's device.

    Raise InputError unless they are one valid token id per prompt.
    """
    targets = token_ids("targets", batch.answer_tokens if targets is None else targets, view)
    n, d_vocab = len(batch), view.model.W_U.shape[1]
    if targets.shape != (n,):
        raise InputError(
            f"targets must have shape ({n},), one token id per prompt, got {tuple(targets.shape)}"
        )
    if bool(((targets < 0) | (targets >= d_vocab)).any()):
        raise InputError(
            f"targets must be between 0 and {d_vocab - 1}, got {int(targets.min())} to "
            f"{int(targets.max())}; replace -1 (a prompt without an answer), for instance by the "
            "predicted label's token"
        )
    return targets


def token_ids(what: str, ids: Any, view: ModelView) -> Tensor:
    """Return token ids as a tensor on the model's device; raise InputError for anything else."""
    try:
        tensor = torch.as_tensor(ids, device=view.unembed_device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"{what} must be integer token ids, got {short_repr(ids)}; pass e.g. "
            "batch.answer_tokens"
        ) from None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(
            f"{what} must be integer token ids, got shape {tuple(tensor.shape)} {tensor.dtype}"
        )
    return tensor.long()


def check_against_ids(
    view: ModelView, targets: Int[Tensor, " batch"], against: Against
) -> CheckedAgainst:
    """Return `against` on the model's device as [prompt, token], with padding on the right and no
    wider than needed.

    `targets` must be checked. Raise InputError unless every prompt has at least one token to
    compare with and its tokens are in the vocabulary, distinct, and different from its target.
    """
    if against is None:
        return None
    against = token_ids("against", against, view)
    n, d_vocab = len(targets), view.model.W_U.shape[1]
    if against.ndim not in (1, 2) or len(against) != n:
        raise InputError(
            f"against must be token ids of shape ({n},), one per prompt, or ({n}, n_tokens), got "
            f"shape {tuple(against.shape)} {against.dtype}"
        )
    against = against.reshape(n, -1)
    if bool(((against < -1) | (against >= d_vocab)).any()):
        raise InputError(
            f"against must be between 0 and {d_vocab - 1}, or -1 for no token, got "
            f"{int(against.min())} to {int(against.max())}"
        )
    count = (against >= 0).sum(1)
    if bool((count == 0).any()):
        raise InputError(
            "against must have a token for every prompt, got none for prompt "
            f"{int((count == 0).nonzero()[0])}; add one or drop prompts with a single label or no "
            "answer"
        )
    same = (against == targets[:, None]).any(1)
    if bool(same.any()):
        row = int(same.nonzero()[0])
        raise InputError(
            f"against must differ from the target, got token {int(targets[row])} for both in "
            f"prompt {row}; remove it from against"
        )
    against = against.sort(dim=1, descending=True).values[:, : int(count.max())]
    has_duplicate = ((against[:, 1:] == against[:, :-1]) & (against[:, 1:] >= 0)).any(1)
    if bool(has_duplicate.any()):
        row = int(has_duplicate.nonzero()[0])
        raise InputError(
            f"against must have distinct tokens per prompt, got a duplicate in prompt {row}"
        )
    return against


def default_comparison(
    batch: PromptBatch, targets: Int[Tensor, " batch"]
) -> Int[Tensor, "batch other"] | None:
    """Return what targets are compared with by default: the tokens of each prompt's other labels,
    or `PromptBatch.against`.

    Rows are padded with -1; None if no row has such tokens. Rows with targets of their own
    (`PromptBatch.targets`) have no labels to compare with, only `against`.
    """
    if batch.targets is not None:
        return batch.against
    is_other = batch.label_tokens != targets.to(batch.label_tokens.device)[:, None]
    other_tokens = tokens_of_labels(batch, is_other)
    return other_tokens if bool((other_tokens >= 0).any()) else None


def choose_tokens(
    view: ModelView,
    batch: PromptBatch,
    by: DirectScore | None,
    targets: Int[Tensor, " batch"] | None,
    against: Against,
) -> tuple[DirectScore, Int[Tensor, " batch"], CheckedAgainst]:
    """Return the score that ranks heads, and checked targets and tokens to compare with; None for
    increases.

    By default, targets are the answers' tokens and are compared with
    `default_comparison`. Raise InputError for invalid ids or an unknown score, for
    `against` with increases, and for contrasts of prompts with one label.
    """
    targets, against_ids = check_targets(view, batch, targets), against
    if against_ids is None and by != "increase":
        against_ids = default_comparison(batch, targets)
    by = choose_score(by, DIRECT_SCORES, comparable=against_ids is not None)
    if by == "increase" and against is not None:
        raise InputError(
            "against must be None with by='increase', which compares with no token; omit one of "
            "them"
        )
    if by == "increase":
        return by, targets, None
    if (
        against is None
        and against_ids is not None
        and bool((missing := (against_ids < 0).all(1)).any())
    ):
        raise InputError(
            f"prompt {int(missing.nonzero()[0])} must have another label to compare its target "
            "with, got none; drop the prompt, or pass by='increase'"
        )
    return by, targets, check_against_ids(view, targets, against_ids)


def check_scoring(
    acts: Activations,
    targets: Int[Tensor, " batch"] | None,
    against: Against,
    final_norm: FinalNorm,
    bias: bool,
) -> tuple[Int[Tensor, " batch"], CheckedAgainst, Readout]:
    """Return checked `targets` and `against`, and the readout with these settings; raise InputError
    for invalid ids.
    """
    check_activations(acts)
    targets = check_targets(acts.view, acts.batch, targets)
    against_ids = check_against_ids(acts.view, targets, against)
    return targets, against_ids, acts.readout.using(final_norm=final_norm, bias=bias)


def choose_ranking(
    acts: Activations,
    by: DirectScore | None,
    targets: Int[Tensor, " batch"] | None,
    against: Against,
    final_norm: FinalNorm,
    bias: bool,
) -> tuple[DirectScore, Int[Tensor, " batch"], CheckedAgainst, Readout]:
    """Return the score, the checked tokens of `choose_tokens`, and the readout with these
    settings.
    """
    check_activations(acts)
    scored = choose_tokens(acts.view, acts.batch, by, targets, against)
    return *scored, acts.readout.using(final_norm=final_norm, bias=bias)


def check_activations(acts: Activations) -> None:
    """Raise InputError for anything but activations on their model's device."""
    if not isinstance(acts, Activations):
        raise InputError(
            f"acts must be Activations, got {type(acts).__name__}; pass il.capture(model, batch)"
        )
    check_device(acts)


def select_rows(against: CheckedAgainst, rows: Any) -> Int[Tensor, "row kept"] | None:
    """Return `against` for some prompts."""
    return None if against is None else against[rows]


class AnswerTokens(NamedTuple):
    """The token that answers each prompt, and those that the log-odds compare it with."""

    targets: Int[Tensor, " batch"]
    against: CheckedAgainst
    """None if there is nothing to compare with; rows without tokens to compare are all -1."""

    @classmethod
    def from_batch(
        cls,
        view: ModelView,
        batch: PromptBatch,
        targets: Int[Tensor, " batch"] | None,
        against: Against,
    ) -> "AnswerTokens":
        """Return checked tokens, by default the answers and the other labels.

        Raise InputError for invalid ids.
        """
        targets = check_targets(view, batch, targets)
        if against is not None:
            return cls(targets, check_against_ids(view, targets, against))
        compared = default_comparison(batch, targets)
        return cls(targets, None if compared is None else compared.to(targets.device))

    def select(self, prompts: Sequence[int]) -> "AnswerTokens":
        """Return the tokens of some of the prompts."""
        rows = list(prompts)
        return AnswerTokens(self.targets[rows], select_rows(self.against, rows))

    def outcomes(
        self, log_probs: Float[Tensor, "row d_vocab"], prompts: Int[Tensor, " row"]
    ) -> Float[Tensor, "row outcome=2"]:
        """Return log p(target) and the log-odds, in the order of `OUTCOMES_OF_ANSWER`.

        This is a function for `score`: `prompts` is the prompt of each row.
        """
        log_prob = self._target_log_probs(log_probs, prompts)
        return torch.cat([log_prob, self.log_odds(log_probs, prompts)], dim=1)

    def log_odds(
        self, log_probs: Float[Tensor, "row d_vocab"], prompts: Int[Tensor, " row"]
    ) -> Float[Tensor, "row 1"]:
        """Return log p(target) − log Σ p(against); NaN for prompts with nothing to compare with."""
        log_prob = self._target_log_probs(log_probs, prompts)
        if self.against is None:
            return torch.full_like(log_prob, torch.nan)
        # A clone, because ids may be inference tensors, which have no gradients.
        ids = self.against[prompts].clone().to(log_probs.device)
        is_missing = ids < 0
        compared = log_probs.gather(1, ids.clamp(min=0)).masked_fill(is_missing, -torch.inf)
        log_odds = log_prob - compared.logsumexp(-1, keepdim=True)
        return log_odds.masked_fill(is_missing.all(1, keepdim=True), torch.nan)

    def _target_log_probs(self, log_probs: Tensor, prompts: Tensor) -> Float[Tensor, "row 1"]:
        ids = self.targets[prompts].clone().to(log_probs.device)
        return log_probs.gather(1, ids[:, None])
