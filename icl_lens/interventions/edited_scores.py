"""Score prompts under many edits, applied one at a time: sets of ablated heads, or edits at the last position.

1. Edits at the last position: the prompt's keys and values are computed once, and each edit re-runs only the last token
   (`prefix_cache`).
2. Edits at all positions, and models that the prefix cache does not support: each head set re-runs the prompt from the
   set's first layer (`partial_forward`); other edits need a full forward pass.

Only `score_rows` decides whether edits at the last position fall back from 1 to 2.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.activations import last_log_probs
from icl_lens.activations.label_scores import LabelScores
from icl_lens.display import SHOWN_ROWS, Displayed, plural_prompts
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.ablation import Mode, ablation_means
from icl_lens.interventions.edit_checks import checked_heads
from icl_lens.interventions.editor import Positions, head_mask
from icl_lens.interventions.partial_forward import ReduceLogProbs, Replacement, run_sets
from icl_lens.interventions.prefix_cache import PrefixCache, PrefixCacheUnsupported, RowEdits, max_prompts, max_rows
from icl_lens.metrics import accuracy
from icl_lens.models.head import AnyHead
from icl_lens.models.inference import log_probs_of
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

Sets = Sequence[Iterable[AnyHead]]
Reference = PromptBatch | Iterable[PromptBatch] | None

NO_LABELS_HINT = "use head_effects, which scores any target"

# Tokens per forward pass: enough for efficient matrix products, few enough to fit in small memory.
PASS_TOKENS = 4096
# Largest allowed difference between an unedited row and the model's own log-probability, nats. Some families compute
# norms and softmax in float32 even in float64 models.
CLEAN_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
# Log-probabilities of rows are computed and reduced in pieces of about this size, in bytes.
LOG_PROB_BYTES = 16 * 2**20


@dataclass(frozen=True, repr=False)
class AnswerScores(Displayed):
    """Label log-probabilities (nats), and whether the correct label is the top token of the full vocabulary."""

    label_log_probs: Float[Tensor, "prompt label"]
    top1_correct: Bool[Tensor, " prompt"]
    answer: Int[Tensor, " prompt"]
    """Index of the correct label; -1 where a prompt has no answer."""
    label_mask: Bool[Tensor, "prompt label"]
    """Labels that occur in each prompt."""

    def to_frame(self) -> pd.DataFrame:
        """Return answer (index), is_top_token, and log p of each label (nats): one row per prompt."""
        frame = pd.DataFrame({"answer": self.answer.tolist(), "is_top_token": self.top1_correct.tolist()})
        return frame.join(pd.DataFrame(self.label_log_probs.tolist()).add_prefix("log_prob_"))

    def _shown(self) -> tuple[str, dict[str, list[object]], int]:
        n, scores = len(self.answer), self.label_log_probs[:SHOWN_ROWS]
        columns: dict[str, list[object]] = {
            "prompt": list(range(len(scores))),
            "answer": self.answer[:SHOWN_ROWS].tolist(),
            "log p(labels), nats": [
                "  ".join(f"{value:+.2f}" if is_own else "–" for value, is_own in zip(row, own, strict=True))
                for row, own in zip(scores.tolist(), self.label_mask.tolist(), strict=False)
            ],
            "is top token": [str(one) for one in self.top1_correct[:SHOWN_ROWS].tolist()],
        }
        return f"AnswerScores({plural_prompts(n)} × {self.label_log_probs.shape[1]} labels)", columns, n

    @property
    def accuracy_between_labels(self) -> float:
        """Share of prompts whose correct label is the most probable of their labels, 0 to 1."""
        return accuracy(self.label_log_probs, self.answer, choices=self.label_mask)


def label_log_probs_ablated(
    model: Any,
    batch: PromptBatch,
    head_sets: Sets,
    *,
    positions: Positions = "all",
    mode: Mode = "zero",
    reference: Reference = None,
) -> LabelScores:
    """Return each label's log-probability [batch set label] when the heads of each set are ablated jointly, nats.

    `positions` selects whether z is ablated at all positions or only at the last. It is set to zero or, with
    `mode="mean"`, to its mean over all tokens, or over the last tokens, of the `reference` prompts. For each set, the
    result equals that of `label_log_probs` within `ablate_heads` with the same options, up to rounding. An empty set
    means the unedited model. To keep only some heads, ablate all others.

    At all positions, each set re-runs every prompt from the set's first layer on. At the last position, every prompt
    runs once, and each set then re-runs one token per prompt, if the prefix cache is supported (see `head_effects`).
    Raise InputError for empty `head_sets`, unknown heads, prompts without labels, and `mode="mean"` without
    `reference`.

    Example:
        >>> curve = il.label_log_probs_ablated(model, batch, [[], [(5, 0)], [(5, 0), (4, 1)]])
        >>> curve.shape, (curve[:, 0] - il.label_log_probs(model, batch)).abs().max() < 1e-4
        (torch.Size([1, 3, 2]), tensor(True))
    """
    view = ModelView.of(model)
    batch.require_labels("label to score", NO_LABELS_HINT)
    means = ablation_means(view, mode, reference, positions)
    scores, _ = score_sets(view, batch, head_sets, read_labels(batch), positions, means)
    return LabelScores.from_tensor(scores, batch.labels)


def score_ablated_sets(
    model: Any,
    batch: PromptBatch,
    sets: Sets,
    *,
    positions: Positions = "all",
    means: Replacement = None,
) -> list[AnswerScores]:
    """Return each prompt's answer scores for each ablated set of heads, on the CPU; `means` as in `score_sets`."""
    view = ModelView.of(model)
    batch.require_labels("label to score", NO_LABELS_HINT)
    labels = read_labels(batch)

    def labels_and_top1(log_probs: Tensor, prompts: Tensor) -> Tensor:
        is_top1 = log_probs.argmax(-1) == batch.answer_tokens[prompts].to(log_probs.device)
        return torch.cat([labels(log_probs, prompts), is_top1[:, None].to(log_probs)], dim=-1)

    scores = score_sets(view, batch, sets, labels_and_top1, positions, means)[0].cpu()
    return [
        AnswerScores(one_set[:, :-1].float(), one_set[:, -1] > 0.5, batch.answer.cpu(), batch.label_mask.cpu())
        for one_set in scores.unbind(1)
    ]


def score_sets(
    view: ModelView,
    batch: PromptBatch,
    sets: Sets,
    reduce_log_probs: ReduceLogProbs,
    positions: Positions,
    means: Replacement = None,
    *,
    pass_tokens: int = PASS_TOKENS,
) -> tuple[Float[Tensor, "batch set n"], str]:
    """Return `reduce_log_probs` of the log-probabilities after each prompt when each set of heads is ablated.

    `means` are those of `ablation_means`, None for zero. The second value is the reason why the prefix cache was not
    used for the last position, "" if it was used or if all positions were ablated.
    """
    check_choice("positions", positions, ("all", "last"))
    if not len(sets):
        raise InputError("head_sets must contain at least one set, got none; a set may be empty")
    ablated = head_mask(view, sets)
    if positions == "all":  # warns of heads that do not reach the logits, as in `ablate_heads`
        checked_heads(view, map(tuple, ablated.any(0).nonzero().tolist()))

    def run_partial_passes() -> Tensor:
        return run_sets(view, batch, ablated, reduce_log_probs, means, positions=positions, pass_tokens=pass_tokens)

    if positions == "all":
        return run_partial_passes(), ""
    edits = RowEdits.ablating(ablated, means)
    return score_rows(
        view, batch, lambda _: edits, reduce_log_probs, run_partial_passes, n_sets=len(sets), pass_tokens=pass_tokens
    )


def score_rows(
    view: ModelView,
    batch: PromptBatch,
    edits_of: Callable[[list[int]], RowEdits],
    reduce_log_probs: ReduceLogProbs,
    fallback: Callable[[], Float[Tensor, "batch set n"]],
    *,
    n_sets: int,
    pass_tokens: int = PASS_TOKENS,
    attention: bool = False,
    tokens: Int[Tensor, " n"] | None = None,
    cached: PrefixCache | None = None,
) -> tuple[Float[Tensor, "batch set n"], str]:
    """Return `reduce_log_probs` of the log-probabilities under each of several edits at the last position.

    With `tokens`, return the log-probabilities of these tokens among themselves instead: they need no logits of the
    rest of the vocabulary, a large part of the cost of a row.

    `edits_of(prompt_indices)` returns the edits for those prompts; its errors are raised. `attention` is True if they
    edit attention before z (queries, keys, values, scores or patterns). `cached` is a cache of the whole batch with the
    same `tokens`, if there is one already. If the prefix cache cannot be used, return the
    scores of `fallback()`. The second value is the reason for this fallback, "" if there was none.
    """
    n_logits = None if tokens is None else len(tokens)
    size = max_prompts(view, batch, pass_tokens=pass_tokens, n_rows=n_sets, attention=attention, n_logits=n_logits)
    # Prompts of similar length share a pass, to minimize padding.
    order = batch.last.argsort(stable=True).tolist()
    scores: Tensor | None = None
    for start in range(0, len(order), size):
        prompts = order[start : start + size]
        edits = edits_of(prompts)
        try:
            if cached is None:
                cache = PrefixCache.of(view, batch[prompts], attention=attention, tokens=tokens)
            else:
                cache = cached.select(prompts)
            step = max(1, max_rows(view, n_logits if cache.columns else None) // len(prompts) - 1)
            for first in range(0, n_sets, step):
                sets = range(first, min(first + step, n_sets))
                logits, row_of = cache.run(edits, sets)
                clean = cache.log_probs
                if tokens is not None:
                    clean = _among(clean, tokens)
                    logits = _among(logits, tokens if cache.columns is None else None)
                _check_clean(view, logits[:, 0], clean)
                values = logits if tokens is not None else _reduce_rows(logits, prompts, reduce_log_probs)
                values = values[:, row_of]
                if scores is None:
                    scores = values.new_empty(len(order), n_sets, values.shape[-1])
                scores[prompts, sets.start : sets.stop] = values
        except (PrefixCacheUnsupported, InputError) as error:  # InputError: a hook that the family does not expose
            return fallback(), str(error)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            text = str(error).splitlines()[0]
            return fallback(), f"{view.architecture} does not support single-token rows ({text})"
    assert scores is not None
    return scores, ""


def score_passes(
    view: ModelView,
    batch: PromptBatch,
    contexts: Iterable[AbstractContextManager[None]],
    reduce_log_probs: ReduceLogProbs,
) -> Float[Tensor, "batch set n"]:
    """Return `reduce_log_probs` of the log-probabilities of one full forward pass within each context manager."""
    scores = []
    for context in contexts:
        with context:
            scores.append(reduce_log_probs(last_log_probs(view.model, batch), torch.arange(len(batch))))
    return torch.stack(scores, dim=1)


def read_labels(batch: PromptBatch) -> ReduceLogProbs:
    """Return a function that selects the labels' log-probabilities from those of the vocabulary.

    Raise InputError if two labels of a prompt are scored by the same token.
    """
    tokens = batch.compared_label_tokens
    return lambda log_probs, prompts: log_probs[:, tokens.to(log_probs.device)]


def _among(logits: Float[Tensor, "*rest d_vocab"], tokens: Int[Tensor, " n"] | None) -> Float[Tensor, "*rest n"]:
    """Return the log-probabilities of some tokens among themselves; None if `logits` has only these."""
    chosen = logits if tokens is None else logits[..., tokens.to(logits.device)]
    return log_probs_of(chosen)


def _reduce_rows(
    logits: Float[Tensor, "batch row d_vocab"], prompts: Sequence[int], reduce_log_probs: ReduceLogProbs
) -> Float[Tensor, "batch row n"]:
    """Return `reduce_log_probs` of the log-probabilities of several rows per prompt, computed in pieces."""
    flat, dtype = logits.flatten(0, 1), torch.promote_types(logits.dtype, torch.float32)
    step = max(1, LOG_PROB_BYTES // (4 * flat.shape[1]))
    prompt_of_row = torch.tensor(prompts).repeat_interleave(logits.shape[1])
    pieces = zip(flat.split(step), prompt_of_row.split(step), strict=True)
    reduced = [reduce_log_probs(torch.log_softmax(piece.to(dtype), dim=-1), rows) for piece, rows in pieces]
    return torch.cat(reduced).unflatten(0, (len(logits), -1))


def _check_clean(view: ModelView, logits: Tensor, log_probs: Float[Tensor, "batch d_vocab"]) -> None:
    """Raise PrefixCacheUnsupported unless unedited rows reproduce the model's log-probability of its top token."""
    top = log_probs.argmax(-1, keepdim=True)
    row_log_probs = torch.log_softmax(logits.to(log_probs), dim=-1)
    deviation = float((row_log_probs - log_probs).gather(1, top).abs().max())
    if not deviation <= CLEAN_TOLERANCE.get(view.model.W_U.dtype, 1e-3):
        raise PrefixCacheUnsupported(f"unedited rows of {view.architecture} deviate by {deviation:.1e} nats")
