"""Run a model under edits: in blocks, and as the scores of prompts under many sets of edits.

`score` chooses for each set the fastest exact way:

1. One-token rows: if only the last position changes, the prompts run once, and each set re-runs one token per prompt
   (`prefix_cache`).
2. Restarts: if only z changes, each set re-runs the prompts from its first layer (`restart`).
3. Whole passes, one per set (`editor`), for everything else, and where a model does not support rows.

This module alone decides which, and alone falls back from the first to the others.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.label_scores import LabelScores
from icl_lens.activations.passes import NO_LABELS_HINT, last_log_probs
from icl_lens.edits.edit import ATTENTION_STAGES, Z_STAGES, Edit, Placed, Positions, Stage
from icl_lens.edits.patch import Align, HeadActivation, Patch
from icl_lens.edits.standard import Ablate, Mode, Reference
from icl_lens.engine.edit_checks import checked_heads
from icl_lens.engine.editor import editing
from icl_lens.engine.prefix_cache import PrefixCache, PrefixCacheUnsupported, RowEdits, max_prompts, max_rows
from icl_lens.engine.restart import Read, score_restarted
from icl_lens.errors import InputError, check_integers
from icl_lens.models.active_edits import DESCRIBE
from icl_lens.models.head import AnyHead
from icl_lens.models.inference import log_probs_of
from icl_lens.models.locking import model_lock
from icl_lens.models.memory import LOG_PROB_BYTES, PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_batch

Sets = Sequence[Iterable[Edit]]

# Largest allowed difference between an unedited row and the model's own log-probability, nats. Some families compute
# norms and softmax in float32 even in float64 models.
CLEAN_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


@contextmanager
def edited(model: Any, *edits: Edit, batch: PromptBatch | None = None) -> Iterator[None]:
    """Edit the model while the block runs.

    Edits apply in a fixed order, however they are given and blocks are nested: queries, keys and values, then scores,
    then patterns, then z, then ablation; within one of these stages, in the order given, and those of an inner block
    after those of an outer one. `batch` are the prompts that passes in the block must run; edits that belong to
    particular prompts need them (`Reweight`, `AddVector`, `WithoutEdges`, `Patch(align="labels")`).

    In `model.generate`, edits of some positions or of attention need `use_past_kv_cache=False`.

    Warn once if a head does not reach the logits. Raise InputError for invalid edits, a missing `batch`,
    and passes over other prompts.

    Example:
        >>> with il.edited(model, il.Ablate(["L2H0"]), il.RemovePosition(["L3H1"])):
        ...     both = il.score(model, batch)
        >>> both.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    if batch is not None:
        check_batch(batch)
    for edit in edits:
        _check_edit(edit)
        if edit.needs_batch and batch is None:
            raise InputError(f"batch must be the prompts run in the block for {type(edit).__name__}, got None")
    (placed,) = place(view, [edits], batch)
    _check_whole(view, [edits])
    with editing(view, *placed):
        yield


def ablate_heads(
    model: Any,
    heads: Iterable[AnyHead],
    *,
    mode: Mode = "zero",
    reference: Reference = None,
    positions: Positions = "all",
) -> AbstractContextManager[None]:
    """Ablate heads while the block runs: `il.edited(model, il.Ablate(heads, ...))`.

    Example:
        >>> with il.ablate_heads(model, [il.Head(2, 0), il.Head(3, 1)]):
        ...     ablated = il.score(model, batch)
        >>> ablated.shape
        torch.Size([1, 2])
    """
    return edited(model, Ablate(heads, mode=mode, reference=reference, positions=positions))


def patch_heads(
    model: Any,
    heads: Iterable[AnyHead],
    source: PromptBatch,
    *,
    activation: HeadActivation,
    positions: Positions = "all",
    align: Align = "positions",
    batch: PromptBatch | None = None,
) -> AbstractContextManager[None]:
    """Patch heads while the block runs: `il.edited(model, il.Patch(heads, source, ...), batch=batch)`.

    Example:
        >>> other = il.tokenize(model, il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :"))
        >>> with il.patch_heads(model, [il.Head(2, 0)], other, activation="q", positions="last"):
        ...     patched = il.score(model, batch)
        >>> patched.shape
        torch.Size([1, 2])
    """
    return edited(model, Patch(heads, source, activation=activation, positions=positions, align=align), batch=batch)


@overload
def score(model: Any, batch: PromptBatch, sets: Sets | None = None, *, read: None = None) -> LabelScores: ...
@overload
def score(model: Any, batch: PromptBatch, sets: Sets | None = None, *, read: Read) -> Tensor: ...
def score(model: Any, batch: PromptBatch, sets: Sets | None = None, *, read: Read | None = None) -> Tensor:
    """Return what is read after each prompt, [batch ...], or under each set of edits, [batch set ...].

    By default, that is the log-probability of each label's token, nats, as `LabelScores` [batch label] or [batch set
    label]: the columns are `batch.labels`, and `batch.label_mask` tells which of them are choices of a prompt. `read`
    is any other function of the log-probabilities over the vocabulary: it gets them [row d_vocab], with the index of
    each row's prompt in the batch [row], and returns a tensor [row ...]. An empty set, like no sets, is the model as it
    is, in a block with the edits of the block.

    Without sets, this is one forward pass, with logits at the last position only. With sets, it takes the fastest exact
    way: for each set, the result equals that in a block of `il.edited`, up to rounding. If only the last position
    changes (see each edit), every prompt runs once, and each set re-runs one token per prompt. If only z changes, each
    set re-runs the prompts from its first edited layer; otherwise, one whole pass per set. The passes that edits need
    of their own (a mean, a source) run once for all sets.

    Raise InputError for sets that are empty or not lists of edits and, without `read`, for prompts without labels or
    with two labels scored by the same token.

    Example:
        >>> il.score(model, batch).shape, il.score(model, batch).labels
        (torch.Size([1, 2]), ('bar', 'foo'))
        >>> found = il.score(model, batch, [[], [il.Ablate(["L5H0"])], [il.Ablate(["L5H0", "L4H1"])]])
        >>> found.shape, (found[:, 0] - il.score(model, batch)).abs().max() < 1e-4
        (torch.Size([1, 3, 2]), tensor(True))
        >>> entropy = lambda log_probs, prompt: -(log_probs.exp() * log_probs).sum(-1)
        >>> il.score(model, batch, [[], [il.Ablate(["L5H0"])]], read=entropy).shape
        torch.Size([1, 2])
    """
    check_batch(batch)
    if read is None:
        batch.require_labels("label to score", NO_LABELS_HINT)
        return LabelScores.from_tensor(score(model, batch, sets, read=read_labels(batch)), batch.labels)
    if sets is None:
        return _checked(read)(last_log_probs(model, batch), torch.arange(len(batch)))
    return score_sets(ModelView.of(model), batch, sets, read)[0]


def read_labels(batch: PromptBatch) -> Read:
    """Return a function that selects the labels' log-probabilities from those of the vocabulary."""
    tokens = batch.label_tokens
    return lambda log_probs, prompt: log_probs[:, tokens.to(log_probs.device)]


def score_sets(
    view: ModelView,
    batch: PromptBatch,
    sets: Sets,
    read: Read,
    *,
    pass_tokens: int = PASS_TOKENS,
    tokens: Int[Tensor, " n"] | None = None,
    cached: PrefixCache | None = None,
) -> tuple[Float[Tensor, "batch set *n"], str]:
    """Return `score`, and why sets that change only the last position did not run as rows, "" if they did.

    With `tokens`, the labels' tokens, rows read the log-probabilities of these tokens among themselves instead of
    `read`: they need no logits of the rest of the vocabulary, a large part of the cost of a row. `cached` is a cache of
    the whole batch with the same `tokens`, if there is one already.
    """
    check_integers(pass_tokens=pass_tokens)
    if pass_tokens < 1:
        raise InputError(f"pass_tokens must be at least 1, got {pass_tokens}")
    checked, read = check_sets(sets), _checked(read)
    is_row = [all(edit.is_only_last(batch) for edit in one) for one in checked]
    if all(not one for one in checked):
        is_row = [False] * len(checked)
    placed = place(view, checked, batch)
    found: dict[int, Tensor] = {}
    reason = ""
    rows = [number for number, only_last in enumerate(is_row) if only_last]
    if any(checked[number] for number in rows):
        by_rows, reason = _score_rows(
            view, batch, [placed[number] for number in rows], read, pass_tokens, tokens, cached
        )
        if by_rows is not None:
            found |= dict(zip(rows, by_rows.unbind(1), strict=True))
            if tokens is None:
                _check_own_edits(view, batch, {number: placed[number] for number in rows}, found, read)
    rest = [number for number in range(len(checked)) if number not in found]
    _check_whole(view, [checked[number] for number in rest])
    # Restarts write after the edits of open blocks, which is the order of stages only for ablation.
    allowed = {*Z_STAGES} if view.model not in DESCRIBE else {Stage.removal}
    restarted = [number for number in rest if all({*one.edit.stages} <= allowed for one in placed[number])]
    if restarted:
        scores = score_restarted(view, batch, [placed[number] for number in restarted], read, pass_tokens=pass_tokens)
        found |= dict(zip(restarted, scores.unbind(1), strict=True))
    for number in rest:
        if number not in found:
            found[number] = _read_whole(view, batch, placed[number], read)
        if tokens is not None:
            found[number] = log_probs_of(found[number])
    return torch.stack([found[number] for number in range(len(checked))], dim=1), reason


def _read_whole(view: ModelView, batch: PromptBatch, placed: Sequence[Placed], read: Read) -> Tensor:
    """Return what is read in one pass over whole prompts."""
    with model_lock(view.model), editing(view, *placed):
        return read(last_log_probs(view.model, batch), torch.arange(len(batch)))


def check_sets(sets: Sets) -> list[tuple[Edit, ...]]:
    """Return sets of edits as tuples; raise InputError for anything else."""
    form = "sets must be a list of lists of edits"
    if isinstance(sets, Edit) or not isinstance(sets, Iterable):
        raise InputError(f"{form}, got {sets!r}; write [[{sets!r}]]")
    found = []
    for one in sets:
        if isinstance(one, Edit) or not isinstance(one, Iterable) or isinstance(one, str):
            shown = repr(one) if isinstance(one, Edit) else f"il.Ablate([{one!r}])"
            raise InputError(f"{form}, got {one!r} as a set; write [[{shown}], ...], with one list per set")
        found.append(tuple(one))
        for edit in found[-1]:
            _check_edit(edit)
    if not found:
        raise InputError("sets must contain at least one set, got none; a set may be empty")
    return found


def _check_edit(edit: object) -> None:
    if not isinstance(edit, Edit):
        hint = "; write il.edited(model, *edits)" if isinstance(edit, (list, tuple)) else ""
        raise InputError(f"edits must be values such as il.Ablate(heads), got {edit!r}{hint}")
    if not isinstance(edit.stages, tuple):
        raise InputError(
            f"stages of {type(edit).__name__} must be a tuple of names, got {edit.stages!r}; e.g. ('pattern',)"
        )


def place(view: ModelView, sets: Sequence[Sequence[Edit]], batch: PromptBatch | None) -> list[list[Placed]]:
    """Return sets of edits ready to write; edits of one type are prepared together, so that their passes are shared."""
    by_type: dict[type[Edit], dict[int, Edit]] = {}
    for edit in (edit for one in sets for edit in one):
        by_type.setdefault(type(edit), {})[id(edit)] = edit
    ready: dict[int, Placed] = {}
    for kind, some in by_type.items():
        edits = list(some.values())
        if kind.write_rows is None:
            _check_heads(view, edits)
        for edit, prepared in zip(edits, kind.prepare(view, edits, batch), strict=True):
            ready[id(edit)] = Placed(prepared, prepared.by_layer(view), batch)
    return [[ready[id(edit)] for edit in one] for one in sets]


def _check_whole(view: ModelView, sets: Sequence[Sequence[Edit]]) -> None:
    """Check the heads of edits that write their rows themselves, and thus need this only for whole passes."""
    _check_heads(view, [edit for one in sets for edit in one if type(edit).write_rows is not None])


def _check_heads(view: ModelView, edits: Sequence[Edit]) -> None:
    attention = any({*edit.stages} & {*ATTENTION_STAGES} for edit in edits)
    checked_heads(view, [head for edit in edits for head in edit.heads], attention=attention)


def _score_rows(
    view: ModelView,
    batch: PromptBatch,
    sets: Sequence[Sequence[Placed]],
    read: Read,
    pass_tokens: int,
    tokens: Int[Tensor, " n"] | None,
    cached: PrefixCache | None,
) -> tuple[Float[Tensor, "batch set *n"] | None, str]:
    """Return the scores of sets as rows of one token; None and the reason if the model does not support them."""
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
                logits, row_of = cache.run(edits, some, prompts)
                clean = cache.log_probs
                if tokens is not None:
                    clean = _among(clean, tokens)
                    logits = _among(logits, tokens if cache.columns is None else None)
                _check_clean(view, logits[:, 0], clean)
                values = logits if tokens is not None else _read_rows(logits, prompts, read)
                values = values[:, row_of]
                if scores is None:
                    scores = values.new_empty(len(order), len(sets), *values.shape[2:])
                scores[prompts, some.start : some.stop] = values
        except (PrefixCacheUnsupported, InputError) as error:  # InputError: a hook that the family does not expose
            return None, str(error)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            text = (str(error) or type(error).__name__).splitlines()[0]
            return None, f"{view.architecture} does not support single-token rows ({text})"
    return scores, ""


def _checked(read: Read) -> Read:
    """Return `read` that raises InputError unless it returns a tensor with one entry per row."""

    def checked(log_probs: Tensor, prompt: Tensor) -> Tensor:
        found = read(log_probs, prompt)
        if not isinstance(found, Tensor) or found.ndim < 1 or len(found) != len(log_probs):
            got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(f"read must return a tensor with one entry per row, {len(log_probs)}, got {got}")
        return found

    return checked


def _check_own_edits(
    view: ModelView,
    batch: PromptBatch,
    sets: Mapping[int, Sequence[Placed]],
    scores: Mapping[int, Tensor],
    read: Read,
) -> None:
    """Raise InputError if an edit defined elsewhere changes or reads more than the last position, as it says.

    The first set with an edit of each such type is run whole.
    """
    seen: set[type[Edit]] = set()
    for number, placed in sets.items():
        kinds = {type(one.edit) for one in placed}
        own = {kind for kind in kinds if not kind.__module__.startswith("icl_lens.")} - seen
        if not own:
            continue
        seen |= own
        whole = _read_whole(view, batch, placed, read).to(scores[number])
        tolerance = CLEAN_TOLERANCE.get(view.model.W_U.dtype, 1e-3)
        if not torch.allclose(whole, scores[number], atol=tolerance, rtol=tolerance, equal_nan=True):
            names = ", ".join(sorted(kind.__name__ for kind in own))
            raise InputError(
                f"{names} must change and read only the last position, as positions='last' says, but passes over whole "
                "prompts give other scores; omit positions, or write at at.last only"
            )


def _among(logits: Float[Tensor, "*rest d_vocab"], tokens: Int[Tensor, " n"] | None) -> Float[Tensor, "*rest n"]:
    """Return the log-probabilities of some tokens among themselves; None if `logits` has only these."""
    return log_probs_of(logits if tokens is None else logits[..., tokens.to(logits.device)])


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
