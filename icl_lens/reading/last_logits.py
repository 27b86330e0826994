"""Run forward passes whose logits are computed at each prompt's last position only."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.active_edits import edits_of_rows, rows_per_pass
from icl_lens.models.freed_memory import make_room, release_freed_memory
from icl_lens.models.loading.bridge_comparison import compare_batch, compare_deferred, is_new_kind
from icl_lens.models.passes.inference import log_probs_of
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, check_vocabulary
from icl_lens.runs.progress import steps


def last_log_probs(
    model: Any, batch: PromptBatch, past: Any = None, first: int = 0
) -> Float[Tensor, "batch d_vocab"]:
    """Return the model's log-probabilities after each prompt, nats: one forward pass, logits at the
    last position only.

    Inside blocks of edits these are the edited model's. Computed in float32 (float64 for float64
    models). `past` and `first` are those of `last_logits`.
    """
    return log_probs_of(last_logits(model, batch, past=past, first=first))


def log_probs_in_passes(model: Any, batch: PromptBatch) -> Float[Tensor, "batch d_vocab"]:
    """Return `last_log_probs`, from passes over as many prompts at a time as `rows_per_pass`
    allows.
    """
    view = ModelView.of(model)
    check_batch(batch)
    size = rows_per_pass(view, batch)
    if len(batch) <= size:
        return last_log_probs(model, batch)
    pieces = []
    with steps("scoring", len(batch)) as advance:
        for rows in torch.arange(len(batch)).split(size):
            with edits_of_rows(view, rows.tolist()):
                pieces.append(last_log_probs(model, batch[rows]))
            advance(len(rows))
    return torch.cat(pieces)


def last_logits(
    model: Any,
    batch: PromptBatch,
    hooks: Sequence[tuple[str, Callable[..., Any]]] = (),
    past: Any = None,
    first: int = 0,
) -> Float[Tensor, "batch d_vocab"]:
    """Return the model's logits after each prompt, from one pass with hooks that fills the cache
    `past`, if given, and runs the tokens from `first` on, which follow those that it has.

    Raise InputError if they are not finite, or, in the first batch of a kind, not those of the
    Hugging Face model.
    """

    def only_last(x: Tensor, hook: Any) -> Tensor:
        last = batch.last.to(x.device) - first
        return x[torch.arange(len(x), device=x.device), last, None]

    view = ModelView.of(model)
    check_batch(batch)
    check_vocabulary(model, batch, "batch")
    is_compared = is_new_kind(model, batch.last) and not view.has_hooks
    cached = {} if past is None else {"use_cache": True, "past_key_values": past}
    n_tokens = batch.tokens.shape[1]
    room = make_room(view, len(batch), n_tokens - first, n_tokens)
    try:
        with (
            torch.no_grad(),
            view.inference_pass(is_compared=is_compared) as kwargs,
            model.hooks(fwd_hooks=[*room, *hooks, (view.last_logits_hook, only_last)]),
        ):
            passed = {
                "attention_mask": batch.attention_mask,
                "return_type": "logits",
                **kwargs,
                **cached,
            }
            logits = model(batch.tokens[:, first:], **passed)[:, 0]
    except Exception:
        compare_deferred(model)  # raises InputError if TransformerLens cannot run the model
        raise
    if room:  # what the pass has freed would stay beside what follows
        release_freed_memory()
    check_finite(logits)
    if is_compared:
        compare_batch(model, batch.tokens, batch.last, logits)
    return logits


def check_finite(logits: Float[Tensor, "batch d_vocab"]) -> None:
    """Raise InputError, naming the first prompt concerned, if the model's output is NaN or
    infinite.
    """
    best = logits.amax(-1)
    if bool(best.isfinite().all()):
        return
    row = int((~best.isfinite()).nonzero()[0])
    what = "NaN" if bool(best[row].isnan()) else "infinite"
    remedy = (
        "float16 overflows beyond 65,504, so load the model in bfloat16 or float32"
        if logits.dtype == torch.float16
        else "reload the model if its weights are not finite, or remove active edits"
    )
    raise InputError(f"model output after prompt {row} must be finite, got {what} values; {remedy}")
