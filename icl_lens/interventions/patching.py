"""Patch queries, keys, values, patterns or z of chosen heads with those from another prompt (activation patching)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import label_log_probs
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.edit_checks import check_pattern_recomputable, warn_if_inert
from icl_lens.interventions.editor import (
    AttentionState,
    Edit,
    Positions,
    Stage,
    editing,
    edits_disabled,
    flatten_heads,
    group_by_layer,
)
from icl_lens.interventions.head_sets import head_mask, labels_by_rows
from icl_lens.interventions.kv_cache import Patches
from icl_lens.interventions.pattern import LayerValues, ScoreInputs, layer_hooks, score_inputs
from icl_lens.interventions.prefix_cache import PrefixCache, PrefixCacheUnsupported, check_no_hooks
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_vocabulary

HeadActivation = Literal["q", "k", "v", "pattern", "z"]
Align = Literal["positions", "labels"]


@contextmanager
def patch_heads(
    model: Any,
    heads: Iterable[Head | tuple[int, int]],
    source: PromptBatch,
    *,
    activation: HeadActivation,
    positions: Positions = "all",
    align: Align = "positions",
    batch: PromptBatch | None = None,
    query_positions: Positions = "all",
) -> Iterator[None]:
    """Patch chosen heads with their activations on other prompts, position by position or label by label.

    `"q"`, `"k"`: queries or keys, after their norm where a family has one, before rotation; `"v"`: values; the pattern
    is recomputed from patched queries and keys. `"pattern"`: attention probabilities. `"z"`: weighted sum of values.
    With grouped-query attention, only the chosen heads use the patched keys or values. Row i of a pass is patched from
    row i of `source`; a single source prompt is used for all rows. `source` is run once, on entry, without other edits.

    `align="positions"`: source and prompt must have the same number of tokens. `align="labels"`: only label positions
    and the last position are patched, the i-th label from the i-th label, in prompts of any length with the same number
    of demonstrations; `batch` is the batch that is run in the block. Of a pattern, the attention to labels and to the
    last position is patched, and the remaining attention is distributed over the other positions in proportion. With
    learned positions, patched queries and keys include their position's share. `positions="last"` patches only the last
    position (queries, pattern rows, z); queries and z may then come from prompts of another length.

    `query_positions="last"`, for keys and values aligned by labels: only the last query uses the patched ones, and the
    heads keep their unpatched z (from a pass over `batch` without other blocks) at all other positions. This isolates
    the direct label → last-position path.

    Warn once if a head does not reach the logits. Raise InputError for an unknown head, prompts that do not match
    (naming the first row that differs), and families whose attention cannot be recomputed.

    Example:
        >>> other = il.tokenize(model, il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :"))
        >>> with il.patch_heads(model, [il.Head(2, 0)], other, activation="q", positions="last"):
        ...     patched = il.label_log_probs(model, batch)
        >>> patched.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    by_layer = group_by_layer(view, heads)
    _check(activation, positions, align, batch, query_positions)
    recorded, own = _recorded(view, by_layer, source, activation, batch if query_positions == "last" else None)
    with _patching(view, by_layer, _Patch(source, activation, positions, batch, recorded, own)):
        yield


def label_log_probs_patched(
    model: Any,
    batch: PromptBatch,
    head_sets: Sequence[Iterable[Head | tuple[int, int]]],
    source: PromptBatch,
    *,
    activation: HeadActivation,
    positions: Positions = "all",
    align: Align = "positions",
    query_positions: Positions = "all",
) -> Float[Tensor, "batch set label"]:
    """Return the log-probability of each label after each prompt when the heads of each set are patched, nats.

    Equals `label_log_probs` within `patch_heads(model, heads, source, …)` for each set, up to rounding, but `source` is
    run only once. If only the last position is edited (its queries or z, or keys and values of labels with
    `query_positions="last"`), the batch is run once as well, and each set is a single-token row. Otherwise, and where
    the prefix cache is not supported (see `head_effects`), each set takes one pass. Raise InputError like
    `patch_heads`, and for empty `head_sets`.

    Example:
        >>> other = il.tokenize(model, il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :"))
        >>> sets = [[il.Head(2, 0)], [il.Head(2, 0), il.Head(3, 1)]]
        >>> il.label_log_probs_patched(model, batch, sets, other, activation="q", positions="last").shape
        torch.Size([1, 2, 2])
    """
    view = ModelView.of(model)
    if not len(head_sets):
        raise InputError("head_sets must contain at least one set, got none")
    each = [group_by_layer(view, heads) for heads in head_sets]
    every = group_by_layer(view, {head for by_layer in each for head in flatten_heads(by_layer)})
    into = batch if align == "labels" else None
    _check(activation, positions, align, into, query_positions)
    if query_positions == "last" or (activation in ("q", "z") and positions == "last" and align == "positions"):
        with suppress(PrefixCacheUnsupported):
            return _patch_cached(view, batch, each, every, source, activation)
    recorded, own = _recorded(view, every, source, activation, into if query_positions == "last" else None)
    found = []
    for by_layer in each:
        some, theirs = (_of_heads(kept, every, by_layer) for kept in (recorded, own))
        with _patching(view, by_layer, _Patch(source, activation, positions, into, some, theirs)):
            found.append(label_log_probs(model, batch))
    return torch.stack(found, dim=1)


def _patch_cached(
    view: ModelView,
    batch: PromptBatch,
    each: Sequence[dict[int, list[int]]],
    every: dict[int, list[int]],
    source: PromptBatch,
    activation: HeadActivation,
) -> Float[Tensor, "batch set label"]:
    """Apply last-position patches in one single-token row per set and prompt; raise PrefixCacheUnsupported."""
    check_no_hooks(view)
    if len(source) not in (1, len(batch)):
        raise PrefixCacheUnsupported(f"source has {len(source)} rows and the batch {len(batch)}")
    aligned = None if activation in ("q", "z") else _aligned(source, batch, ends=False)
    recorded, _ = _recorded(view, every, source, activation, None)
    chosen = head_mask(view, [flatten_heads(by_layer) for by_layer in each])
    if activation == "z":
        replacement = {
            layer: _at_last(view, batch, source, kept["z"], every[layer]) for layer, kept in recorded.items()
        }
        return labels_by_rows(
            view,
            batch,
            len(each),
            lambda kept, sets, prompts: kept.ablate_sets(
                chosen[sets], {layer: z[prompts] for layer, z in replacement.items()}
            ),
        )
    patches = {
        layer: _patches(view, batch, source, activation, kept[activation], every[layer], aligned)
        for layer, kept in recorded.items()
    }

    def rows_of(kept: PrefixCache, sets: slice, prompts: list[int]) -> Tensor:
        return kept.with_patches(chosen[sets], {layer: one.of(prompts) for layer, one in patches.items()})

    return labels_by_rows(view, batch, len(each), rows_of)


def _patches(
    view: ModelView,
    batch: PromptBatch,
    source: PromptBatch,
    activation: HeadActivation,
    value: Float[Tensor, "source pos chosen d_head"],
    heads: list[int],
    aligned: tuple[Tensor, Tensor, Tensor] | None,
) -> Patches:
    """Return a layer's patches from the source: of its last positions, or of its labels."""
    if aligned is None:
        return Patches(q=_at_last(view, batch, source, value, heads))
    n, device = len(batch), value.device
    value = value.expand(n, *value.shape[1:])
    rows, ours, theirs = (place.to(device) for place in aligned)
    slots = torch.cat([torch.arange(int(count), device=device) for count in rows.bincount(minlength=n)])
    places = torch.full((n, int(slots.max()) + 1), -1, device=device)
    places[rows, slots] = ours
    full = value.new_zeros(*places.shape, view.n_heads, value.shape[-1])
    full[rows[:, None], slots[:, None], torch.tensor(heads, device=device)] = value[rows, theirs]
    return Patches(places=places, k=full if activation == "k" else None, v=full if activation == "v" else None)


def _at_last(
    view: ModelView,
    batch: PromptBatch,
    source: PromptBatch,
    value: Float[Tensor, "source pos chosen d_head"],
    heads: list[int],
) -> Float[Tensor, "batch head d_head"]:
    """Return a layer's activations at the source's last positions, one row per prompt; zero for other heads."""
    n, device = len(batch), value.device
    full = value.new_zeros(n, view.n_heads, value.shape[-1])
    rows = torch.arange(n, device=device)
    full[:, heads] = value.expand(n, *value.shape[1:])[rows, source.last.to(device).expand(n)]
    return full


def _check(
    activation: HeadActivation, positions: Positions, align: Align, into: PromptBatch | None, query_positions: Positions
) -> None:
    """Raise InputError for an unsupported combination of options."""
    check_choice("activation", activation, ("q", "k", "v", "pattern", "z"))
    check_choice("positions", positions, ("all", "last"))
    if positions == "last" and activation in ("k", "v"):
        raise InputError(f"positions must be 'all' for activation={activation!r}, got 'last'")
    check_choice("align", align, ("positions", "labels"))
    if (align == "labels") != (into is not None):
        raise InputError(
            f"batch must be {'the batch run in the block' if into is None else 'None'} for align={align!r}, got "
            f"{'None' if into is None else type(into).__name__}"
        )
    check_choice("query_positions", query_positions, ("all", "last"))
    if query_positions == "last" and (into is None or activation not in ("k", "v")):
        raise InputError(
            f"query_positions must be 'all' unless activation is 'k' or 'v' and align='labels', got 'last' with "
            f"activation={activation!r} and align={align!r}"
        )


Kept = dict[int, dict[str, Tensor]]
"""Layer -> activations of its chosen heads in one pass, by name."""


def _recorded(
    view: ModelView,
    by_layer: dict[int, list[int]],
    source: PromptBatch,
    activation: HeadActivation,
    own: PromptBatch | None,
) -> tuple[Kept, Kept]:
    """Return the heads' activations on the source, and their z on `own`, whose earlier positions stay unpatched."""
    if activation != "z":
        check_pattern_recomputable(view, by_layer)
    kept = _record(view, by_layer, source, activation), {} if own is None else _record(view, by_layer, own, "z")
    warn_if_inert(view, flatten_heads(by_layer))
    return kept


def _of_heads(kept: Kept, every: dict[int, list[int]], some: dict[int, list[int]]) -> Kept:
    """Select a subset of the heads."""
    found: Kept = {}
    for layer in [layer for layer in kept if layer in some]:
        places = [every[layer].index(head) for head in some[layer]]
        found[layer] = {
            name: value[:, places] if name == "pattern" else value[:, :, places] for name, value in kept[layer].items()
        }
    return found


@contextmanager
def _patching(view: ModelView, by_layer: dict[int, list[int]], patch: "_Patch") -> Iterator[None]:
    """Apply a patch inside the block."""
    stage = {"pattern": Stage.pattern, "z": Stage.z}.get(patch.activation, Stage.inputs)
    with ExitStack() as stack:
        edit = patch.in_z if patch.activation == "z" else patch.in_attention
        stack.enter_context(editing(view, Edit(stage, by_layer, edit, only=patch.into)))
        if patch.clean_z:
            stack.enter_context(editing(view, Edit(Stage.z, by_layer, patch.restore, only=patch.into)))
        yield


class _Patch:
    """Recorded source activations, and the edits that write them into a forward pass."""

    def __init__(
        self,
        source: PromptBatch,
        activation: HeadActivation,
        positions: Positions,
        into: PromptBatch | None,
        recorded: "Kept",
        own: "Kept",
    ):
        self.source, self.activation, self.positions, self.into = source, activation, positions, into
        # Layer -> source activations and, if only the last query uses them, the heads' unpatched z.
        self.recorded, self.clean_z = recorded, own
        self.places = None if into is None else _aligned(source, into, ends=not own)
        # Positions are matched one to one, so prompts may differ in length.
        self.any_length = into is not None or (positions == "last" and activation in ("q", "z"))

    def in_attention(self, work: AttentionState, indices: list[int], layer: int) -> None:
        """Patch queries, keys, values or the pattern of a layer's heads."""
        heads, recorded = work.indices_of(indices), self.recorded[layer]
        if self.activation == "v":
            work.v = work.v.clone()
            self._write(work.v, recorded["v"], heads, work.last)
        elif self.activation == "pattern":
            assert work.pattern is not None
            self._write_pattern(work.pattern, recorded["pattern"], heads, work.last)
        else:
            work.rescored.update(heads)
            for name in (self.activation, f"{self.activation}_share"):
                old = getattr(work.inputs, name)
                if old is not None:
                    new = old.clone()
                    self._write(new, recorded[name], heads, work.last)
                    setattr(work.inputs, name, new)

    def in_z(self, z: Tensor, indices: list[int], layer: int, last: Tensor) -> None:
        """Patch z of a layer's heads."""
        self._write(z, self.recorded[layer]["z"], indices, last)

    def restore(self, z: Tensor, indices: list[int], layer: int, last: Tensor) -> None:
        """Restore the unpatched z [batch pos head d_head] at all positions except each row's last."""
        self._check_rows(len(z), last)
        earlier = torch.arange(z.shape[1], device=z.device) != last[:, None]
        z[:, :, indices] = torch.where(earlier[..., None, None], self.clean_z[layer]["z"].to(z), z[:, :, indices])

    def _write(self, target: Tensor, value: Tensor, heads: list[int], last: Tensor) -> None:
        """Write value [source pos chosen …] into target [batch pos head …] at the head indices `heads`."""
        rows, device = len(target), target.device
        self._check_rows(rows, last)
        if not self.any_length and value.shape[1] != target.shape[1]:
            raise InputError(
                f"source must be padded to {target.shape[1]} tokens like the forward pass, got {value.shape[1]}; run "
                "batches of the same shape"
            )
        value = value.expand(rows, *value.shape[1:]).to(target)
        every, at = torch.arange(rows, device=device)[:, None], torch.tensor(heads, device=device)
        if self.positions == "last":
            end = self.source.last.to(device).expand(rows)
            target[every, last[:, None], at] = value[every, end[:, None], torch.arange(len(heads), device=device)]
        elif self.places is None:
            target[:, :, heads] = value
        else:
            row, ours, theirs = (place.to(device)[:, None] for place in self.places)
            target[row, ours, at] = value[row, theirs, torch.arange(len(heads), device=device)]

    def _write_pattern(self, target: Tensor, value: Tensor, heads: list[int], last: Tensor) -> None:
        """Write value [source chosen query key] into target [batch head query key], at aligned positions if given."""
        if self.places is None:
            self._write(target.transpose(1, 2), value.transpose(1, 2), heads, last)
            return
        self._check_rows(len(target), last)
        queries = slice(-1, None) if self.positions == "last" else slice(None)
        for row in range(len(target)):
            ours, theirs = (place[self.places[0] == row].to(target.device) for place in self.places[1:])
            new = value[row if len(self.source) > 1 else 0][:, theirs[queries]][:, :, theirs].to(target)
            old = target[row, heads][:, ours[queries]]
            old[:, :, ours] = 0
            left = (1 - new.sum(-1, keepdim=True)).clamp(min=0)
            old = old / old.sum(-1, keepdim=True).clamp(min=torch.finfo(old.dtype).tiny) * left
            old[:, :, ours] = new
            target[row, torch.tensor(heads, device=target.device)[:, None], ours[queries]] = old

    def _check_rows(self, rows: int, last: Tensor) -> None:
        """Raise InputError unless source and pass have matching rows and, for `align="positions"`, equal lengths."""
        source, into = self.source, self.into
        if len(source) not in (1, rows):
            raise InputError(f"source must have one prompt or one per row of the pass, {rows}, got {len(source)}")
        if into is not None and not (len(into) == rows and torch.equal(into.last.to(last.device), last)):
            raise InputError(f"the forward pass must be over batch, got {rows} other rows; run the same batch")
        end = source.last.to(last.device).expand(rows)
        if self.any_length or torch.equal(end, last):
            return
        row = int((end != last).nonzero()[0])
        raise InputError(
            f"source and prompt must have the same number of tokens, got {int(end[row]) + 1} and {int(last[row]) + 1} "
            f"in row {row}; use prompts of the same length or align='labels'"
            + (" or positions='last'" if self.activation in ("q", "z") else "")
        )


def _aligned(source: PromptBatch, into: PromptBatch, *, ends: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, position in the row and in its source, for every label and, with `ends`, then the last position.

    Raise InputError if a row and its source have different numbers of demonstrations.
    """
    if len(source) not in (1, len(into)):
        raise InputError(f"source must have one prompt or as many as batch, {len(into)}, got {len(source)}")
    into.require_labels("label to align", "use positions='last' or prompts of the same length")
    found = []
    for row in range(len(into)):
        of = row if len(source) > 1 else 0
        both = into.label_positions[row].tolist(), source.label_positions[of].tolist()
        ours, theirs = ([at for at in one if at >= 0] for one in both)
        if len(ours) != len(theirs):
            raise InputError(
                f"source and prompt must have the same number of demonstrations, got {len(theirs)} and {len(ours)} in "
                f"row {row}"
            )
        last = [(int(into.last[row]), int(source.last[of]))] if ends else []
        found += [(row, *pair) for pair in [*zip(ours, theirs, strict=True), *last]]
    rows, ours, theirs = torch.tensor(found).unbind(-1)
    return rows, ours, theirs


def _record(view: ModelView, by_layer: dict[int, list[int]], source: PromptBatch, activation: HeadActivation) -> Kept:
    """Return layer -> activations of its chosen heads on the source prompts, by name."""
    values = {layer: LayerValues(view, layer, source.attention_mask.bool()) for layer in by_layer}

    def keeper(layer: int, name: str) -> Callable[..., None]:
        def hook_fn(value: Tensor, hook: Any) -> None:
            values[layer].record(name, value.detach())

        return hook_fn

    hooks = []
    for layer in by_layer:
        names = {"z": view.hook(layer, "attn.hook_z")} if activation == "z" else layer_hooks(view, layer)
        hooks += [(hook, keeper(layer, name)) for name, hook in names.items()]
    check_vocabulary(view.model, source, "source")
    with torch.no_grad(), view.exclusive_pass(), edits_disabled(view), view.model.hooks(fwd_hooks=hooks):
        view.model(source.tokens, attention_mask=source.attention_mask, return_type="logits")
    found = {}
    for layer, chosen in by_layer.items():
        seen = values[layer].seen
        if activation == "z":
            found[layer] = {"z": seen["z"][:, :, chosen]}
        elif activation == "v":
            found[layer] = {"v": values[layer].heads("v", chosen)}
        elif activation == "pattern":
            found[layer] = {"pattern": seen["pattern"][:, chosen]}
        else:
            inputs: ScoreInputs = score_inputs(values[layer], chosen)
            names = (activation, f"{activation}_share")
            found[layer] = {name: getattr(inputs, name) for name in names if getattr(inputs, name) is not None}
    return found
