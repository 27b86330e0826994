"""Capture activations: run forward passes and keep what the analyses read."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from einops import einsum
from jaxtyping import Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.active_edits import active_edits, edits_of_rows, rows_per_pass
from icl_lens.models.passes.independent_rows import rotations_by_length
from icl_lens.models.passes.locking import reserves_model
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.prompts.token_ids import TokenPositions
from icl_lens.reading.activations import TOLERANCE, Activations, check_sums
from icl_lens.reading.last_logits import last_logits
from icl_lens.reading.recorder import ReadPlan, Recorder
from icl_lens.runs.progress import steps


def capture(
    model: Any,
    batch: PromptBatch,
    *,
    positions: TokenPositions | None = None,
    writers: bool | TokenPositions = False,
    check: bool = True,
) -> Activations:
    """Run each prompt once and keep only what the analysis reads.

    Passes run as many prompts at a time as fit in little memory. Logits are computed at each
    prompt's last position only. Memory: per prompt and layer, the values at every position plus a
    few vectors at the last position and at labels.

    `positions` selects positions other than the last. All positions of a prompt are read from one
    pass, and the result has one row per prompt and position; its batch is `batch.at(positions)`. A
    batch made by `at` or `PromptBatch.at` also runs each prompt once. If hooks are active on the
    model, it runs each row separately instead, because a hook may depend on where the row ends.

    A prompt of n tokens takes layers · n · key-value heads · d_head numbers for its values, and for
    each selected position layers · (3 d_model + 2 heads · d_head + d_mlp + heads · n) numbers, plus
    layers · 2 d_model per label. For 50 positions of 1,000 tokens without labels in GPT-2 large,
    these are 0.4 GB in float32. Capture larger inputs in pieces (`batch.split`).

    `writers=True` also keeps what each component wrote at all tokens of labels and at the last
    position (for prompts without labels, at all positions). `attention_score_parts` and
    `value_parts` need this. `writers=positions` keeps it at these positions and at the last one.
    With p positions, this takes layers · (p · (2 d_model + heads · d_head) + n · key-value heads ·
    d_head) numbers per prompt.

    `check` (cheap) verifies that Σ heads + b_O = attention output, that x + attn + ffn = next x,
    that z = attention · values (unless hooks are active, which may edit it), and that the readout
    gives the model's logits. It raises InputError for a model family where one of these does not
    hold. Turn it off inside blocks that edit the residual stream itself.

    Example:
        >>> acts = il.capture(model, batch)
        >>> acts.head_outputs(2).shape
        torch.Size([1, 6, 96])
    """
    return capture_with_hooks(model, batch, [], positions=positions, writers=writers, check=check)


@reserves_model
def capture_with_hooks(
    model: Any,
    batch: PromptBatch,
    hooks: Sequence[tuple[str, Callable[..., Any]]],
    *,
    positions: TokenPositions | None = None,
    writers: bool | TokenPositions = False,
    readers: Sequence[int] | None = None,
    check: bool = True,
) -> Activations:
    """Return `capture`, from a pass in which `hooks`, which must not change anything, read more.

    With `readers`, only the writers that these layers' heads and FFNs read are kept.
    """
    check_batch(batch)
    view = ModelView.of(model)
    plan = ReadPlan(batch, batch)
    if positions is not None:
        plan = ReadPlan.at(view, batch, positions)
    elif batch.prompt_index is not None and not view.has_hooks:
        plan = ReadPlan.shared(view, batch)
    is_edited = view.has_hooks  # edits may give heads another z than attention times values
    recorder = Recorder(view, plan, writers, readers)
    logits = []
    pieces = _passes(view, plan, is_divisible=not hooks)
    with steps("capturing", len(plan.run)) as advance:
        for rows, run, context in pieces:
            recorder.start_pass(rows)
            with context:
                logits.append(last_logits(model, run, [*recorder.hooks(), *hooks]))
            advance(len(rows))
    acts = Activations(**recorder.fields(), edits=active_edits(view))
    if check:
        check_sums(acts)
        if not is_edited:
            _check_values(acts)
        _check_logits(acts, plan, torch.cat(logits))
    return acts


class _Pass(NamedTuple):
    """A pass over some rows of a plan's batch."""

    rows: Int[Tensor, " row"]
    batch: PromptBatch
    context: AbstractContextManager[None]
    """In which the pass has the open edits of these rows."""


def _passes(view: ModelView, plan: ReadPlan, *, is_divisible: bool) -> Iterator[_Pass]:
    """Yield passes over as many rows as `rows_per_pass` allows, or one over all.

    Rows whose rotations differ, as they depend on the length, run together.
    """
    all_rows = torch.arange(len(plan.run))
    size = len(plan.run)
    lengths = (plan.run.last + 1).tolist()
    if is_divisible and len(set(rotations_by_length(view.model, lengths))) == 1:
        size = rows_per_pass(view, plan.run)
    if size >= len(plan.run):
        yield _Pass(all_rows, plan.run, nullcontext())
        return
    for rows in all_rows.split(size):
        yield _Pass(rows, plan.run[rows], edits_of_rows(view, rows.tolist()))


def _check_values(acts: Activations) -> None:
    """Raise InputError if heads do more than add up values by attention, such as multiplying the
    sum by a gate.
    """
    view, index = acts.view, acts.values.pass_index
    rows = torch.arange(len(acts.z), device=acts.z.device)
    if index is not None:  # one row of each pass is enough
        rows = torch.zeros(len(acts.values.pass_v), dtype=torch.long, device=index.device).scatter(
            0, index, rows
        )
    tolerance = TOLERANCE.get(acts.z.dtype, 1e-3)
    for layer in range(view.n_layers):
        v = acts.values.pass_v[:, layer].to(acts.readout.dtype)
        z = acts.z[rows, layer].to(acts.readout.dtype)
        # Query heads in groups of those that share keys and values.
        pattern = acts.pattern[rows, layer].to(v).unflatten(1, (view.n_kv_heads, -1))
        mixed = einsum(pattern, v, "row kv member key, row key kv d -> row kv member d")
        ours = mixed.flatten(1, 2)
        size = z.norm(dim=-1) + ours.norm(dim=-1) + 1e-30
        error = float(((ours - z).norm(dim=-1) / size).max())
        if not error <= tolerance:
            raise InputError(
                f"{view.architecture} is not supported: in layer {layer} the heads' outputs are "
                f"not the sum of their values, weighted by attention (relative error {error:.1e}, "
                f"allowed {tolerance:.0e}), so values are clipped or outputs are gated or normed "
                "before W_O; in capture, check=False turns this check off"
            )


def _check_logits(acts: Activations, plan: ReadPlan, logits: Tensor) -> None:
    """Raise InputError if the readout does not give the model's logits, for rows that end where
    their pass ends.

    Other rows have no logits.
    """
    device, last = logits.device, plan.rows.last
    passes = plan.pass_index
    if passes is None:
        passes = torch.arange(len(logits), device=last.device)
    rows = (last == plan.run.last[passes]).nonzero()[:, 0].to(device)
    if not len(rows):
        return
    ours = acts.readout.select_prompts(rows).logits(acts.resid_final[rows])
    theirs = logits[passes.to(device)[rows]].to(ours.device, ours.dtype)
    error = float((ours - theirs).abs().max() / (ours.abs().max() + 1e-30))
    tolerance = TOLERANCE.get(acts.z.dtype, 1e-3)
    if not error <= tolerance:
        raise InputError(
            f"{acts.view.architecture} is not supported: final norm and unembedding do not "
            f"reproduce the model's logits (relative error {error:.1e}, allowed {tolerance:.0e})"
        )
