"""Zero and mean ablation of heads."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.edit_checks import checked_heads
from icl_lens.interventions.editor import Edit, Positions, Stage, editing, edits_disabled, head_mask
from icl_lens.models.head import AnyHead
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_batch, check_vocabulary

Mode = Literal["zero", "mean"]


@contextmanager
def ablate_heads(
    model: Any,
    heads: Iterable[AnyHead],
    *,
    mode: Mode = "zero",
    reference: PromptBatch | Iterable[PromptBatch] | None = None,
    positions: Positions = "all",
) -> Iterator[None]:
    """Ablate heads while the block runs.

    `mode="zero"` sets the heads' z to zero, so that they write nothing; b_O is kept. `mode="mean"` sets z to its mean
    over all tokens of the `reference` prompts or, with `positions="last"`, over their last tokens; no edits are active
    in the passes for this mean. `positions="last"` edits only each prompt's last position.

    In `model.generate`, `positions="last"` edits the last token of every pass, so it needs `use_past_kv_cache=False`.

    Blocks nest. Warn once if a head does not reach the logits. Raise InputError for an unknown head, mode or positions,
    a mean without `reference` or with non-finite values, and a `reference` without `mode="mean"`.

    Example:
        >>> with il.ablate_heads(model, [il.Head(2, 0), il.Head(3, 1)]):
        ...     ablated = il.label_log_probs(model, batch)
        >>> ablated.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    check_ablation(positions, mode, reference)
    by_layer = checked_heads(view, heads)
    means = None if reference is None else mean_z(view, by_layer, reference, positions)

    def remove(z: Tensor, indices: list[int], layer: int, last: Tensor) -> None:
        value = 0.0 if means is None else means[layer].to(z)
        if positions == "all":
            z[:, :, indices] = value
        else:
            z[torch.arange(len(z), device=z.device)[:, None], last[:, None], torch.tensor(indices)[None]] = value

    what = ("zeroed" if means is None else "set to their mean") + " at the last position" * (positions == "last")
    with editing(view, Edit(Stage.removal, by_layer, remove, what=what, supports_cache=positions == "all")):
        yield


@contextmanager
def ablate_heads_per_row(model: Any, heads: Sequence[Iterable[AnyHead]]) -> Iterator[None]:
    """Zero-ablate different heads in each row of the batch: `heads[i]` in row i.

    One pass over copies of a prompt can thus test many ablations. Raise InputError for an unknown head, and for a pass
    with another number of rows.

    Example:
        >>> with il.ablate_heads_per_row(model, [[il.Head(2, 0)], [il.Head(3, 1)]]):
        ...     one_by_one = il.label_log_probs(model, batch[[0, 0]])
        >>> one_by_one.shape
        torch.Size([2, 2])
    """
    view = ModelView.of(model)
    removed = head_mask(view, heads)
    by_layer = checked_heads(view, map(tuple, removed.any(0).nonzero().tolist()))

    def remove(z: Tensor, indices: list[int], layer: int, last: Tensor) -> None:
        if len(z) != len(removed):
            raise InputError(f"heads must have one set per row of the pass, {len(z)}, got {len(removed)} sets")
        z.masked_fill_(removed[:, None, layer, :, None].to(z.device), 0.0)

    with editing(
        view, Edit(Stage.removal, by_layer, remove, what="zeroed, different ones in each row", supports_cache=True)
    ):
        yield


def ablation_means(
    view: ModelView, mode: Mode, reference: PromptBatch | Iterable[PromptBatch] | None, positions: Positions
) -> dict[int, Tensor] | None:
    """Return layer -> the mean z of all its heads [head d_head] over `reference`; None for `mode="zero"`."""
    check_ablation(positions, mode, reference)
    all_heads = {layer: list(range(view.n_heads)) for layer in range(view.n_layers)}
    return None if reference is None else mean_z(view, all_heads, reference, positions)


def check_ablation(positions: Positions, mode: Mode, reference: PromptBatch | Iterable[PromptBatch] | None) -> None:
    """Raise InputError for unknown positions or mode, a mean without reference, or a reference without a mean."""
    check_choice("positions", positions, ("all", "last"))
    check_choice("mode", mode, ("zero", "mean"))
    if (mode == "mean") != (reference is not None):
        raise InputError(
            f"reference must be {'given for' if mode == 'mean' else 'omitted for'} mode={mode!r}, got "
            f"{'None' if reference is None else type(reference).__name__}"
        )


def reference_batches(reference: PromptBatch | Iterable[PromptBatch]) -> list[PromptBatch]:
    """Return the batches of a reference; raise InputError if there are none."""
    batches = [reference] if isinstance(reference, PromptBatch) else list(reference)
    if not batches:
        raise InputError("reference must contain at least one batch, got none")
    for batch in batches:
        check_batch(batch)
    return batches


def mean_z(
    view: ModelView,
    by_layer: dict[int, list[int]],
    reference: PromptBatch | Iterable[PromptBatch],
    positions: Positions,
) -> dict[int, Tensor]:
    """Return layer -> float64 mean of its chosen heads' z [chosen d_head], over all tokens or each prompt's last."""
    batches = reference_batches(reference)
    sums: dict[int, Tensor] = {}
    count = 0

    def adder(layer: int, batch: PromptBatch) -> Callable[..., None]:
        def hook_fn(z: Tensor, hook: Any) -> None:
            z = z[:, :, by_layer[layer]].double()
            if positions == "last":
                total = z[torch.arange(len(z)), batch.last.to(z.device)].sum(0)
            else:
                total = (z * batch.attention_mask.to(z)[:, :, None, None]).sum((0, 1))
            sums[layer] = sums.get(layer, 0.0) + total

        return hook_fn

    for batch in batches:
        check_vocabulary(view.model, batch, "reference")
        count += len(batch) if positions == "last" else int(batch.attention_mask.sum())
        hooks: list[tuple[str, Any]] = [(view.last_logits_hook, lambda x, hook: x[:, :1])]  # logits are not used
        hooks += [(view.hook(layer, "attn.hook_z"), adder(layer, batch)) for layer in by_layer]
        with torch.no_grad(), view.inference_pass() as kwargs, edits_disabled(view), view.model.hooks(fwd_hooks=hooks):
            view.model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits", **kwargs)
    means = {layer: total / count for layer, total in sums.items()}
    if not all(bool(mean.isfinite().all()) for mean in means.values()):
        raise InputError("the mean over reference must be finite, got NaN or infinite values; pass other prompts")
    return means
