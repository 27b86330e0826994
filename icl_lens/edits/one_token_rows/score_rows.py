"""Score edits that change only the last position, in rows of one token over a cache of prompts.

1. Prompts of similar length share a `PrefixCache`, one pass over whole prompts.
2. Each set of edits re-runs the last token of each prompt, many sets at a time.
3. In every pass, an unedited row must give the model's own log-probabilities; otherwise, or if the
   model does not take such rows, `score_rows` returns the reason instead.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.edit import ATTENTION_STAGES, EditAtLayers
from icl_lens.edits.edit_checks import unedited_tolerance
from icl_lens.edits.one_token_rows.prefix_cache import (
    PrefixCache,
    PrefixCacheUnsupported,
    max_prompts,
    max_rows,
)
from icl_lens.edits.one_token_rows.run_rows import RowEdits, run_rows
from icl_lens.edits.read import Read, ReadAmong
from icl_lens.errors import InputError
from icl_lens.models.passes.inference import log_probs_of
from icl_lens.models.passes.memory import LOG_PROB_BYTES
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


def score_rows(
    view: ModelView,
    batch: PromptBatch,
    sets: Sequence[Sequence[EditAtLayers]],
    read: Read,
    pass_tokens: int,
    cached: PrefixCache | None,
    advance: Callable[[int], None],
) -> tuple[Float[Tensor, "batch set *n"] | None, str]:
    """Return the scores of sets as rows of one token.

    Return None and the reason instead if the model does not support such rows. `advance` is called
    with the number of scores that each pass adds.
    """
    tokens = read.tokens if isinstance(read, ReadAmong) else None
    attention = _need_recomputed_attention(sets)
    size = max_prompts(
        view,
        batch,
        pass_tokens=pass_tokens,
        n_rows=len(sets),
        attention=attention,
        n_logits=None if tokens is None else len(tokens),
    )
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
            for numbers, scores_of_pass in _passes(cache, edits, prompts, read):
                if scores is None:
                    axes = scores_of_pass.shape[2:]
                    scores = scores_of_pass.new_empty(len(order), len(sets), *axes)
                scores[prompts, numbers.start : numbers.stop] = scores_of_pass
                advance(len(prompts) * len(numbers))
        except (PrefixCacheUnsupported, InputError) as error:
            # An InputError is raised for a hook that the family does not expose.
            return None, str(error)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            text = (str(error) or type(error).__name__).splitlines()[0]
            return None, f"{view.architecture} does not support single-token rows ({text})"
    return scores, ""


def _need_recomputed_attention(sets: Sequence[Sequence[EditAtLayers]]) -> bool:
    """Return whether rows need keys from which edited attention is recomputed.

    They do for edits of attention that do not write rows themselves, and for several of them in one
    set.
    """
    for edit_set in sets:
        edits = [edit_at.edit for edit_at in edit_set]
        of_attention = [edit for edit in edits if {*edit.stages} & {*ATTENTION_STAGES}]
        if len(of_attention) > 1 or any(type(edit).write_rows is None for edit in of_attention):
            return True
    return False


def _passes(
    cache: PrefixCache, edits: RowEdits, prompts: Sequence[int], read: Read
) -> Iterator[tuple[range, Float[Tensor, "batch set *n"]]]:
    """Yield the sets of each pass over rows of the cached prompts, and what is read of their rows.

    Raise PrefixCacheUnsupported if unedited rows do not reproduce the model's log-probabilities.
    """
    view = cache.view
    n_logits = None
    if cache.columns is not None:
        assert isinstance(read, ReadAmong)
        n_logits = len(read.tokens)
    step = max(1, max_rows(view, n_logits) // len(prompts) - 1)
    for first in range(0, len(edits.sets), step):
        numbers = range(first, min(first + step, len(edits.sets)))
        logits, row_of = run_rows(cache, edits, numbers, prompts)
        if cache.columns is None:
            _check_unedited_rows(view, logits[:, 0], cache.log_probs)
            scores = _read_rows(logits, prompts, read)
        else:  # the logits are those of the tokens that `read` reads
            _check_unedited_rows(view, logits[:, 0], read(cache.log_probs, torch.tensor(prompts)))
            scores = log_probs_of(logits)
        yield numbers, scores[:, row_of]


def _read_rows(
    logits: Float[Tensor, "batch row d_vocab"], prompts: Sequence[int], read: Read
) -> Float[Tensor, "batch row *n"]:
    """Return what is read of the log-probabilities of several rows per prompt, in pieces."""
    flat, dtype = logits.flatten(0, 1), torch.promote_types(logits.dtype, torch.float32)
    step = max(1, LOG_PROB_BYTES // (4 * flat.shape[1]))
    prompt_of_row = torch.tensor(prompts).repeat_interleave(logits.shape[1])
    pieces = zip(flat.split(step), prompt_of_row.split(step), strict=True)
    readings = [read(torch.log_softmax(piece.to(dtype), dim=-1), rows) for piece, rows in pieces]
    return torch.cat(readings).unflatten(0, (len(logits), -1))


def _check_unedited_rows(
    view: ModelView,
    logits: Float[Tensor, "batch token"],
    log_probs: Float[Tensor, "batch token"],
) -> None:
    """Raise PrefixCacheUnsupported unless unedited rows give the model's largest log-probability,
    of the whole vocabulary or of the tokens that are read.
    """
    top = log_probs.argmax(-1, keepdim=True)
    row_log_probs = torch.log_softmax(logits.to(log_probs), dim=-1)
    deviation = float((row_log_probs - log_probs).gather(1, top).abs().max())
    if not deviation <= unedited_tolerance(view):
        raise PrefixCacheUnsupported(
            f"unedited rows of {view.architecture} deviate by {deviation:.1e} nats"
        )
