"""Run a model under edits: in blocks, and as the scores of prompts under many sets of edits.

`score` chooses for each set the fastest exact way:

1. One-token rows: if only the last position changes, the prompts run once, and each set re-runs one
   token per prompt (`one_token_rows`).
2. Restarts: if only z or sites change, each set re-runs the prompts from its first layer and, at
   sites, from the first token that changes (`restarts`).
3. Whole passes, one per set (`whole_passes`), for everything else, and where a model does not
   support rows.

This module alone decides which, and alone falls back from the first to the others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.ablate import Ablate, Mode, Reference
from icl_lens.edits.edit import (
    ATTENTION_STAGES,
    SITE_STAGES,
    Z_STAGES,
    Edit,
    EditAtLayers,
    Positions,
    Stage,
)
from icl_lens.edits.edit_checks import checked_heads, unedited_tolerance
from icl_lens.edits.one_token_rows.prefix_cache import PrefixCache
from icl_lens.edits.one_token_rows.score_rows import score_rows
from icl_lens.edits.patch import Align, HeadActivation, Patch
from icl_lens.edits.read import Read, checked_read, read_labels
from icl_lens.edits.restarts import score_restarted
from icl_lens.edits.whole_passes import editing
from icl_lens.errors import InputError, check_at_least, short_repr
from icl_lens.models.active_edits import OPEN_EDITS, edits_of_rows, rows_per_pass
from icl_lens.models.head import AnyHead
from icl_lens.models.passes.locking import model_lock
from icl_lens.models.passes.memory import PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, require_labels
from icl_lens.reading.answer_spacing import warn_of_answer_spacing
from icl_lens.reading.label_scores import LabelScores
from icl_lens.reading.last_logits import last_log_probs, log_probs_in_passes
from icl_lens.runs.progress import progress_switch, steps

Sets = Sequence[Iterable[Edit]]


@contextmanager
def edited(model: Any, *edits: Edit, batch: PromptBatch | None = None) -> Iterator[None]:
    """Edit the model while the block runs.

    Edits apply in a fixed order, however they are given and blocks are nested: queries and keys,
    then scores, then patterns, then values, then z, then ablation of heads, then sites (the
    residual stream, attention and FFN outputs, neurons); within one of these stages, in the order
    given, and those of an inner block after those of an outer one. `batch` are the prompts that passes in
    the block must run; edits that belong to particular prompts need them (`Reweight`, `AddVector`,
    `WithoutEdges`, `PatchSite`, `Patch(align="labels")`, `Ablate` and `AblateSite` with
    `mode="resample"` or `positions="labels"`; see `Edit.needs_batch`).

    In `model.generate`, edits of some positions or of attention need `use_past_kv_cache=False`.

    Warn once if a head does not reach the logits. Raise InputError for invalid edits, a missing
    `batch`, passes over other prompts, and while another thread edits the model.

    Example:
        >>> with il.edited(model, il.Ablate(["L2H0"]), il.RemovePosition(["L3H1"])):
        ...     scores = il.score(model, batch)
        >>> scores.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    if batch is not None:
        check_batch(batch)
    for edit in edits:
        _check_edit(edit)
        if edit.needs_batch and batch is None:
            raise InputError(
                f"batch must be the prompts run in the block for {type(edit).__name__}, got None"
            )
    (edit_set,) = prepare_sets(view, [edits], batch)
    _check_heads_for_whole_passes(view, [edits])
    with editing(view, *edit_set):
        yield


def ablate_heads(
    model: Any,
    heads: Iterable[AnyHead],
    *,
    mode: Mode = "zero",
    reference: Reference = None,
    positions: Positions | Literal["labels"] | Sequence[int] = "all",
    batch: PromptBatch | None = None,
) -> AbstractContextManager[None]:
    """Ablate heads while the block runs: `il.edited(model, il.Ablate(heads, ...), batch=batch)`.

    Example:
        >>> with il.ablate_heads(model, [il.Head(2, 0), il.Head(3, 1)]):
        ...     ablated = il.score(model, batch)
        >>> ablated.shape
        torch.Size([1, 2])
    """
    edit = Ablate(heads, mode=mode, reference=reference, positions=positions)
    return edited(model, edit, batch=batch)


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
    """Patch heads while the block runs: `il.edited(model, il.Patch(heads, ...), batch=batch)`.

    Example:
        >>> donor = il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :")
        >>> donors = il.tokenize(model, donor)
        >>> with il.patch_heads(model, [il.Head(2, 0)], donors, activation="q", positions="last"):
        ...     patched = il.score(model, batch)
        >>> patched.shape
        torch.Size([1, 2])
    """
    edit = Patch(heads, source, activation=activation, positions=positions, align=align)
    return edited(model, edit, batch=batch)


@overload
def score(
    model: Any,
    batch: PromptBatch,
    sets: Sets | None = None,
    *,
    read: None = None,
    progress: bool | None = None,
) -> LabelScores: ...
@overload
def score(
    model: Any,
    batch: PromptBatch,
    sets: Sets | None = None,
    *,
    read: Read,
    progress: bool | None = None,
) -> Tensor: ...
def score(
    model: Any,
    batch: PromptBatch,
    sets: Sets | None = None,
    *,
    read: Read | None = None,
    progress: bool | None = None,
) -> Tensor:
    """Return what is read after each prompt, and under each set of edits if there are sets.

    The axes are [batch ...] or, with sets, [batch set ...]. By default, that is the log-probability
    of each label's token, nats, as `LabelScores` [batch label] or [batch set label]: the columns
    are `batch.labels`, and `batch.label_mask` tells which of them are choices of a prompt. `read`
    is any other function of the log-probabilities over the vocabulary: it gets them [row d_vocab],
    with the index of each row's prompt in the batch [row], and returns a tensor [row ...]. An empty
    set, like no sets, adds nothing to the edits of the block that is open, if any.

    Without sets, this is one forward pass, with logits at the last position only, or several over
    some of the prompts, to bound memory, unless edits or hooks are active. With sets, it takes the
    fastest exact way: for each set, the result equals that in a block of `il.edited`, up to
    rounding. If only the last position changes (see each edit), every prompt runs once, and each
    set re-runs one token per prompt. If only z or sites change, each set re-runs the prompts from
    its first edited layer; otherwise, one whole pass per set. The passes that edits need of their
    own (a mean, a source) run once for all sets.

    If this takes longer than two seconds, a terminal or notebook shows a progress bar, unless
    `progress` is False.

    Raise InputError for sets that are empty or not lists of edits and, without `read`, for prompts
    without labels or with two labels scored by the same token.

    Example:
        >>> il.score(model, batch).shape, il.score(model, batch).labels
        (torch.Size([1, 2]), ('bar', 'foo'))
        >>> sets = [[], [il.Ablate(["L5H0"])], [il.Ablate(["L5H0", "L4H1"])]]
        >>> scores = il.score(model, batch, sets)
        >>> scores.shape, (scores[:, 0] - il.score(model, batch)).abs().max() < 1e-4
        (torch.Size([1, 3, 2]), tensor(True))
        >>> entropy = lambda log_probs, prompt: -(log_probs.exp() * log_probs).sum(-1)
        >>> il.score(model, batch, [[], [il.Ablate(["L5H0"])]], read=entropy).shape
        torch.Size([1, 2])
    """
    check_batch(batch)
    if read is None:
        require_labels(batch, "label to score")
        label_log_probs = score(model, batch, sets, read=read_labels(batch), progress=progress)
        return LabelScores.from_tensor(label_log_probs, batch.labels)
    if sets is None:
        with progress_switch(progress):
            log_probs = log_probs_in_passes(model, batch)
        warn_of_answer_spacing(
            model.tokenizer, batch, lambda ids: log_probs.gather(1, ids[:, None])[:, 0]
        )
        return checked_read(read)(log_probs, torch.arange(len(batch)))
    with progress_switch(progress):
        return score_sets(ModelView.of(model), batch, sets, read)[0]


def score_sets(
    view: ModelView,
    batch: PromptBatch,
    sets: Sets,
    read: Read,
    *,
    pass_tokens: int = PASS_TOKENS,
    cached: PrefixCache | None = None,
) -> tuple[Float[Tensor, "batch set *n"], str]:
    """Return `score`, and why sets that change only the last position did not run as rows.

    The reason is "" if they did. `cached` is a cache of the whole batch that exists already, with
    the tokens of `read` if it is a `ReadAmong`.
    """
    check_at_least(1, pass_tokens=pass_tokens)
    checked, read = check_sets(sets), checked_read(read)
    prepared = prepare_sets(view, checked, batch)
    with steps("scoring", len(batch) * len(checked)) as advance:
        return _score_prepared(view, batch, checked, prepared, read, pass_tokens, cached, advance)


def _score_prepared(
    view: ModelView,
    batch: PromptBatch,
    checked: Sequence[tuple[Edit, ...]],
    prepared: Sequence[Sequence[EditAtLayers]],
    read: Read,
    pass_tokens: int,
    cached: PrefixCache | None,
    advance: Callable[[int], None],
) -> tuple[Float[Tensor, "batch set *n"], str]:
    """Return `score_sets` of edits that are ready to write.

    `advance` is called with the number of scores that each pass adds.
    """
    in_rows: dict[int, Sequence[EditAtLayers]] = {}
    for number, edits in enumerate(checked):
        if all(edit.changes_only_last(batch) for edit in edits):
            in_rows[number] = prepared[number]
    scores: dict[int, Tensor] = {}
    reason = ""
    if any(in_rows.values()):
        sets = list(in_rows.values())
        by_rows, reason = score_rows(view, batch, sets, read, pass_tokens, cached, advance)
        if by_rows is not None:
            scores |= dict(zip(in_rows, by_rows.unbind(1), strict=True))
            _check_user_edits(view, batch, in_rows, scores, read, BEYOND_THE_LAST)
    not_scored = [number for number in range(len(checked)) if number not in scores]
    _check_heads_for_whole_passes(view, [checked[number] for number in not_scored])
    restarted = [number for number in not_scored if _may_restart(view, prepared[number])]
    if restarted:
        sets = [prepared[number] for number in restarted]
        by_restarts = score_restarted(
            view, batch, sets, read, pass_tokens=pass_tokens, advance=advance
        )
        scores |= dict(zip(restarted, by_restarts.unbind(1), strict=True))
        restarted_sets = {number: prepared[number] for number in restarted}
        _check_user_edits(view, batch, restarted_sets, scores, read, BEFORE_THE_FIRST)
    for number in not_scored:
        if number not in scores:
            scores[number] = _read_whole(view, batch, prepared[number], read)
            advance(len(batch))
    return torch.stack([scores[number] for number in range(len(checked))], dim=1), reason


def _may_restart(view: ModelView, edits: Sequence[EditAtLayers]) -> bool:
    """Return whether a set of edits can be scored from its first edited layer on."""
    # Restarts write after the edits of open blocks, which is the order of stages only for ablation.
    allowed = {*Z_STAGES, *SITE_STAGES} if view.model not in OPEN_EDITS else {Stage.removal}
    return all({*edit_at.edit.stages} <= allowed for edit_at in edits)


def _read_whole(
    view: ModelView, batch: PromptBatch, edits: Sequence[EditAtLayers], read: Read
) -> Tensor:
    """Return what is read in passes over whole prompts, as many at a time as `rows_per_pass`
    allows.
    """
    size = rows_per_pass(view, batch)
    if len(batch) <= size:
        with model_lock(view.model), editing(view, *edits):
            return read(last_log_probs(view.model, batch), torch.arange(len(batch)))
    pieces = []
    for rows in torch.arange(len(batch)).split(size):
        edits_of_some_rows = [edit_at.select(rows.tolist()) for edit_at in edits]
        with (
            model_lock(view.model),
            edits_of_rows(view, rows.tolist()),
            editing(view, *edits_of_some_rows),
        ):
            pieces.append(read(last_log_probs(view.model, batch[rows]), rows))
    return torch.cat(pieces)


def check_sets(sets: Sets) -> list[tuple[Edit, ...]]:
    """Return sets of edits as tuples; raise InputError for anything else."""
    form = "sets must be a list of lists of edits"
    if isinstance(sets, Edit) or not isinstance(sets, Iterable):
        raise InputError(f"{form}, got {short_repr(sets)}; write [[{short_repr(sets)}]]")
    checked = []
    for edits in sets:
        if isinstance(edits, Edit) or not isinstance(edits, Iterable) or isinstance(edits, str):
            edit_in_words = repr(edits) if isinstance(edits, Edit) else f"il.Ablate([{edits!r}])"
            raise InputError(
                f"{form}, got {short_repr(edits)} as a set; write [[{edit_in_words}], ...], with "
                "one list per set"
            )
        checked.append(tuple(edits))
        for edit in checked[-1]:
            _check_edit(edit)
    if not checked:
        raise InputError("sets must contain at least one set, got none; a set may be empty")
    return checked


def _check_edit(edit: object) -> None:
    if not isinstance(edit, Edit):
        hint = "; write il.edited(model, *edits)" if isinstance(edit, (list, tuple)) else ""
        raise InputError(
            f"edits must be values such as il.Ablate(heads), got {short_repr(edit)}{hint}"
        )
    if not isinstance(edit.stages, tuple):
        raise InputError(
            f"stages of {type(edit).__name__} must be a tuple of names, got "
            f"{short_repr(edit.stages)}; e.g. ('pattern',)"
        )


def prepare_sets(
    view: ModelView, sets: Sequence[Sequence[Edit]], batch: PromptBatch | None
) -> list[list[EditAtLayers]]:
    """Return sets of edits ready to write.

    Edits of one type are prepared together, so that they share passes.
    """
    by_type: dict[type[Edit], dict[int, Edit]] = {}
    for edits in sets:
        for edit in edits:
            by_type.setdefault(type(edit), {})[id(edit)] = edit
    ready: dict[int, EditAtLayers] = {}
    for kind, edits_by_id in by_type.items():
        edits = list(edits_by_id.values())
        if kind.write_rows is None:
            _check_heads(view, edits)
        for edit, prepared in zip(edits, kind.prepare(view, edits, batch), strict=True):
            ready[id(edit)] = EditAtLayers(prepared, prepared.by_layer(view), batch)
    prepared_sets = []
    for edits in sets:
        prepared_sets.append([ready[id(edit)] for edit in edits])
    return prepared_sets


def _check_heads_for_whole_passes(view: ModelView, sets: Sequence[Sequence[Edit]]) -> None:
    """Check the heads of edits that write rows themselves, which need it only for whole passes."""
    edits_that_write_rows = []
    for edits in sets:
        edits_that_write_rows += [edit for edit in edits if type(edit).write_rows is not None]
    _check_heads(view, edits_that_write_rows)


def _check_heads(view: ModelView, edits: Sequence[Edit]) -> None:
    attention = any({*edit.stages} & {*ATTENTION_STAGES} for edit in edits)
    heads: list[AnyHead] = []
    for edit in edits:
        heads += edit.heads
    checked_heads(view, heads, attention=attention)


BEYOND_THE_LAST = (
    "must change and read only the last position, as positions='last' says, but passes over whole "
    "prompts give other scores; omit positions, or write at at.last only"
)
BEFORE_THE_FIRST = (
    "must change and read no position before the first of first_changes, but passes over whole "
    "prompts give other scores; return an earlier position there, or omit first_changes"
)
"""What a user's edit did not do, and the remedy."""


def _check_user_edits(
    view: ModelView,
    batch: PromptBatch,
    sets: Mapping[int, Sequence[EditAtLayers]],
    scores: Mapping[int, Tensor],
    read: Read,
    broken_promise: str,
) -> None:
    """Raise InputError if a user's edit changes or reads positions that it says it does not.

    The first set with an edit of each type that icl_lens does not define is run whole.
    """
    seen: set[type[Edit]] = set()
    for number, edits in sets.items():
        kinds = {type(edit_at.edit) for edit_at in edits} - seen
        user_kinds = {kind for kind in kinds if not kind.__module__.startswith("icl_lens.")}
        if not user_kinds:
            continue
        seen |= user_kinds
        whole = _read_whole(view, batch, edits, read).to(scores[number])
        tolerance = unedited_tolerance(view)
        if not torch.allclose(
            whole, scores[number], atol=tolerance, rtol=tolerance, equal_nan=True
        ):
            names = ", ".join(sorted(kind.__name__ for kind in user_kinds))
            raise InputError(f"{names} {broken_promise}")
