"""Scores of edits that change only the last position: rows of one token over a cache of the prompts.

1. Prompts of similar length share a `PrefixCache`, one pass over whole prompts.
2. Each set of edits re-runs the last token of each prompt, many sets at a time.
3. In every pass, an unedited row must give the model's own log-probabilities; otherwise, or if the model does not take
   such rows, `score_rows` returns the reason instead.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.edit import ATTENTION_STAGES, EditAtLayers
from icl_lens.engine.prefix_cache import PrefixCache, PrefixCacheUnsupported, max_prompts, max_rows
from icl_lens.engine.restart import Read, ReadAmong
from icl_lens.engine.row_pass import RowEdits, run_rows
from icl_lens.errors import InputError
from icl_lens.models.inference import log_probs_of
from icl_lens.models.memory import LOG_PROB_BYTES
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Largest allowed difference between an unedited row and the model's own log-probability, nats. Some families compute
# norms and softmax in float32 even in float64 models.
CLEAN_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


def score_rows(
    view: ModelView,
    batch: PromptBatch,
    sets: Sequence[Sequence[EditAtLayers]],
    read: Read,
    pass_tokens: int,
    cached: PrefixCache | None,
    advance: Callable[[int], None],
) -> tuple[Float[Tensor, "batch set *n"] | None, str]:
    """Return the scores of sets as rows of one token; None and the reason if the model does not support them.

    `advance` is called with the number of scores that each pass adds.
    """
    tokens = read.tokens if isinstance(read, ReadAmong) else None
    n_logits = None if tokens is None else len(tokens)
    attention = any(
        {*one.edit.stages} & {*ATTENTION_STAGES} and type(one.edit).write_rows is None for some in sets for one in some
    ) or any(sum(bool({*one.edit.stages} & {*ATTENTION_STAGES}) for one in some) > 1 for some in sets)
    size = max_prompts(view, batch, pass_tokens=pass_tokens, n_rows=len(sets), attention=attention, n_logits=n_logits)
    # Prompts of similar length share a pass, to minimize padding.
    order = batch.last.argsort(stable=True).tolist()
    edits = RowEdits(view, sets)
    scores: Tensor | None = None
    for start in range(0, len(order), size):
        prompts = order[start : start + size]
        try:
            if cached is None:
                cache = PrefixCache.of(view, batch[prompts], attention=attention, tokens=tokens)
            else:
                cache = cached.select(prompts)
            step = max(1, max_rows(view, n_logits if cache.columns else None) // len(prompts) - 1)
            for first in range(0, len(sets), step):
                some = range(first, min(first + step, len(sets)))
                logits, row_of = run_rows(cache, edits, some, prompts)
                if cache.columns is None:
                    _check_clean(view, logits[:, 0], cache.log_probs)
                    values = _read_rows(logits, prompts, read)
                else:  # the logits are those of the tokens that `read` reads
                    assert isinstance(read, ReadAmong)
                    _check_clean(view, logits[:, 0], read(cache.log_probs, torch.tensor(prompts)))
                    values = log_probs_of(logits)
                values = values[:, row_of]
                if scores is None:
                    scores = values.new_empty(len(order), len(sets), *values.shape[2:])
                scores[prompts, some.start : some.stop] = values
                advance(len(prompts) * len(some))
        except (PrefixCacheUnsupported, InputError) as error:  # InputError: a hook that the family does not expose
            return None, str(error)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            text = (str(error) or type(error).__name__).splitlines()[0]
            return None, f"{view.architecture} does not support single-token rows ({text})"
    return scores, ""


def _read_rows(
    logits: Float[Tensor, "batch row d_vocab"], prompts: Sequence[int], read: Read
) -> Float[Tensor, "batch row *n"]:
    """Return what is read of the log-probabilities of several rows per prompt, in pieces."""
    flat, dtype = logits.flatten(0, 1), torch.promote_types(logits.dtype, torch.float32)
    step = max(1, LOG_PROB_BYTES // (4 * flat.shape[1]))
    prompt_of_row = torch.tensor(prompts).repeat_interleave(logits.shape[1])
    pieces = zip(flat.split(step), prompt_of_row.split(step), strict=True)
    found = [read(torch.log_softmax(piece.to(dtype), dim=-1), rows) for piece, rows in pieces]
    return torch.cat(found).unflatten(0, (len(logits), -1))


def _check_clean(view: ModelView, logits: Tensor, log_probs: Float[Tensor, "batch d_vocab"]) -> None:
    """Raise PrefixCacheUnsupported unless unedited rows reproduce the model's log-probability of its top token."""
    top = log_probs.argmax(-1, keepdim=True)
    row_log_probs = torch.log_softmax(logits.to(log_probs), dim=-1)
    deviation = float((row_log_probs - log_probs).gather(1, top).abs().max())
    if not deviation <= CLEAN_TOLERANCE.get(view.model.W_U.dtype, 1e-3):
        raise PrefixCacheUnsupported(f"unedited rows of {view.architecture} deviate by {deviation:.1e} nats")
