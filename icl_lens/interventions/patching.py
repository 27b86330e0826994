"""Giving chosen heads the queries, keys, values, patterns or z that they have on another prompt."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import label_log_probs
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.edit_checks import check_pattern_recomputable, warn_if_inert
from icl_lens.interventions.editor import AttentionState, Edit, Stage, editing, edits_disabled
from icl_lens.interventions.head_sets import head_mask, labels_by_rows
from icl_lens.interventions.kv_cache import Patches
from icl_lens.interventions.pattern import LayerValues, ScoreInputs, layer_hooks, score_inputs
from icl_lens.interventions.prefix_cache import PrefixCache, PrefixCacheUnsupported, check_no_hooks
from icl_lens.interventions.selection import Positions, flatten_heads, group_by_layer
from icl_lens.models.head import Head
from icl_lens.models.locking import locks_model
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
    """Gives chosen heads what they have on other prompts, position by position or label by label.

    `"q"`, `"k"`: queries or keys, after their norm where a family has one, before rotation; `"v"`: values; the pattern
    follows from the patched ones. `"pattern"`: attention probabilities. `"z"`: the weighted sum of values. With grouped
    queries only the chosen heads see the patched keys or values. Row i of a pass gets row i of `source`; one source
    prompt serves all rows. `source` is run once, on entering, as if no other block were there.

    `align="positions"`: source and prompt must have the same number of tokens. `align="labels"`: only label positions
    and the last one are patched, the i-th label's from the i-th label's, in prompts of any length with equally many
    demonstrations; `into` is the batch that is run in the block. Of a pattern, the attention to labels and the last
    position is patched then, and the other positions share what is left as they did before. With learned positions,
    keys and queries bring their position's share along. `positions="last"` patches the last position only (queries,
    pattern rows, z); queries and z may then come from prompts of another length.

    `query_positions="last"`, for keys and values aligned by labels: only the last query sees them, at label positions, as if
    the heads of all other positions had what they have without a patch (in a pass of `into` with no other block). So
    what moves is what the last position reads from labels, and not what else is made of the patched ones on the way.

    Warns once if a head does not reach the logits. Raises InputError for a head the model does not have, what does not
    fit (naming the first row that differs), and families whose attention cannot be recomputed.

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


@locks_model
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
    """Log-probability of each label after each prompt when the heads of each set are patched, nats.

    The same numbers as `label_log_probs` within `patch_heads(model, heads, source, …)`, a set at a time, within
    rounding, but `source` is run once for all of them. Where only the last position is touched (its queries or z, or
    keys and values of labels with `query_positions="last"`), the batch is run once as well, and each set is a row of one token;
    a pass for each set otherwise, and where keys cannot be shared (see `head_effects`). Raises InputError as
    `patch_heads` does, and for no sets.

    Example:
        >>> other = il.tokenize(model, il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :"))
        >>> sets = [[il.Head(2, 0)], [il.Head(2, 0), il.Head(3, 1)]]
        >>> il.label_log_probs_patched(model, batch, sets, other, activation="q", positions="last").shape
        torch.Size([1, 2, 2])
    """
    view = ModelView.of(model)
    if not len(head_sets):
        raise InputError("there is no set of heads to patch; give at least one")
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
    """Patches that only the last position sees: a row of one token for each set and prompt. Raises NotShared."""
    check_no_hooks(view)
    if len(source) not in (1, len(batch)):
        raise PrefixCacheUnsupported("the source has other rows")
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
    """What a layer's heads have on the source: at its last positions, or at its labels."""
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
    """Return what a layer's heads have at the source's last positions, one row per prompt; zero for other heads."""
    n, device = len(batch), value.device
    full = value.new_zeros(n, view.n_heads, value.shape[-1])
    rows = torch.arange(n, device=device)
    full[:, heads] = value.expand(n, *value.shape[1:])[rows, source.last.to(device).expand(n)]
    return full


def _check(
    activation: HeadActivation, positions: Positions, align: Align, into: PromptBatch | None, query_positions: Positions
) -> None:
    """Raises InputError for what cannot be patched so."""
    check_choice("what", activation, ("q", "k", "v", "pattern", "z"))
    check_choice("positions", positions, ("all", "last"))
    if positions == "last" and activation in ("k", "v"):
        raise InputError(f"activation={activation!r} is read at every position; patch it with positions='all'")
    check_choice("align", align, ("positions", "labels"))
    if (align == "labels") != (into is not None):
        needs = "needs batch=, the batch that is run in the block" if into is None else "takes no batch="
        raise InputError(f"align={align!r} {needs}")
    check_choice("query_positions", query_positions, ("all", "last"))
    if query_positions == "last" and (into is None or activation not in ("k", "v")):
        raise InputError(
            "query_positions='last' is for keys and values that are aligned by labels: give activation='k' or 'v', align='labels' "
            "and batch="
        )


Kept = dict[int, dict[str, Tensor]]
"""Layer -> what its chosen heads have in some pass, by name."""


def _recorded(
    view: ModelView,
    by_layer: dict[int, list[int]],
    source: PromptBatch,
    activation: HeadActivation,
    own: PromptBatch | None,
) -> tuple[Kept, Kept]:
    """What the heads have on the source, and their z on prompts of which earlier positions are to stay as they are."""
    if activation != "z":
        check_pattern_recomputable(view, by_layer)
    kept = _record(view, by_layer, source, activation), {} if own is None else _record(view, by_layer, own, "z")
    warn_if_inert(view, flatten_heads(by_layer))
    return kept


def _of_heads(kept: Kept, every: dict[int, list[int]], some: dict[int, list[int]]) -> Kept:
    """The same of fewer heads."""
    found: Kept = {}
    for layer in [layer for layer in kept if layer in some]:
        places = [every[layer].index(head) for head in some[layer]]
        found[layer] = {
            name: value[:, places] if name == "pattern" else value[:, :, places] for name, value in kept[layer].items()
        }
    return found


@contextmanager
def _patching(view: ModelView, by_layer: dict[int, list[int]], patch: "_Patch") -> Iterator[None]:
    """A patch at work."""
    stage = {"pattern": Stage.pattern, "z": Stage.z}.get(patch.activation, Stage.inputs)
    with ExitStack() as stack:
        edit = patch.in_z if patch.activation == "z" else patch.in_attention
        stack.enter_context(editing(view, Edit(stage, by_layer, edit, only=patch.into)))
        if patch.clean_z:
            stack.enter_context(editing(view, Edit(Stage.z, by_layer, patch.restore, only=patch.into)))
        yield


class _Patch:
    """What heads have on the source prompts, and how it is written over what they have in a forward pass."""

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
        # Layer -> what the heads have on the source, and, where only the last query is to see it, their own z.
        self.recorded, self.clean_z = recorded, own
        self.places = None if into is None else _aligned(source, into, ends=not own)
        # One position stands for one: prompts may then differ in length.
        self.any_length = into is not None or (positions == "last" and activation in ("q", "z"))

    def in_attention(self, work: AttentionState, indices: list[int], layer: int) -> None:
        """Patches queries, keys, values or the pattern of a layer's heads."""
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
        """Patches the weighted sums of values of a layer's heads."""
        self._write(z, self.recorded[layer]["z"], indices, last)

    def restore(self, z: Tensor, indices: list[int], layer: int, last: Tensor) -> None:
        """z [batch pos head d_head] as it was without the patch, at all positions but each row's last."""
        self._check_rows(len(z), last)
        earlier = torch.arange(z.shape[1], device=z.device) != last[:, None]
        z[:, :, indices] = torch.where(earlier[..., None, None], self.clean_z[layer]["z"].to(z), z[:, :, indices])

    def _write(self, target: Tensor, value: Tensor, heads: list[int], last: Tensor) -> None:
        """target [batch pos head …] gets value [source pos chosen …] for the heads at the places `heads`."""
        rows, device = len(target), target.device
        self._check_rows(rows, last)
        if not self.any_length and value.shape[1] != target.shape[1]:
            raise InputError(
                f"the source is padded to {value.shape[1]} tokens and the forward pass to {target.shape[1]}; "
                "run batches of the same shape"
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
        """target [batch head query key] gets value [source chosen query key], between aligned positions if any."""
        if self.places is None:
            self._write(target.transpose(1, 2), value.transpose(1, 2), heads, last)
            return
        self._check_rows(len(target), last)
        asked = slice(-1, None) if self.positions == "last" else slice(None)
        for row in range(len(target)):
            ours, theirs = (place[self.places[0] == row].to(target.device) for place in self.places[1:])
            new = value[row if len(self.source) > 1 else 0][:, theirs[asked]][:, :, theirs].to(target)
            old = target[row, heads][:, ours[asked]]
            old[:, :, ours] = 0
            left = (1 - new.sum(-1, keepdim=True)).clamp(min=0)
            old = old / old.sum(-1, keepdim=True).clamp(min=torch.finfo(old.dtype).tiny) * left
            old[:, :, ours] = new
            target[row, torch.tensor(heads, device=target.device)[:, None], ours[asked]] = old

    def _check_rows(self, rows: int, last: Tensor) -> None:
        """The pass must have rows for the source's, and where positions correspond, as many tokens in each."""
        source, into = self.source, self.into
        if len(source) not in (1, rows):
            raise InputError(f"the source has {len(source)} prompts, and the forward pass {rows} rows; give as many")
        if into is not None and not (len(into) == rows and torch.equal(into.last.to(last.device), last)):
            raise InputError("the forward pass is not over the batch given as batch=; run the same batch")
        end = source.last.to(last.device).expand(rows)
        if self.any_length or torch.equal(end, last):
            return
        row = int((end != last).nonzero()[0])
        raise InputError(
            f"source and prompt differ in their number of tokens, first in row {row} ({int(end[row]) + 1} and "
            f"{int(last[row]) + 1}), so that positions do not correspond; use prompts of the same length, or "
            "align='labels'" + (", or positions='last'" if self.activation in ("q", "z") else "")
        )


def _aligned(source: PromptBatch, into: PromptBatch, *, ends: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Row, its position, and the source's, for every label and, with `ends` and last in each row, the last position.

    Raises InputError where a row has not as many demonstrations as its source.
    """
    if len(source) not in (1, len(into)):
        raise InputError(f"the source has {len(source)} prompts, and into {len(into)}; give as many, or one")
    into.require_labels("label to align at", "use positions='last', or prompts of the same length")
    found = []
    for row in range(len(into)):
        of = row if len(source) > 1 else 0
        both = into.label_positions[row].tolist(), source.label_positions[of].tolist()
        ours, theirs = ([at for at in one if at >= 0] for one in both)
        if len(ours) != len(theirs):
            raise InputError(
                f"row {row} has {len(ours)} demonstrations and its source {len(theirs)}, so labels do not correspond; "
                "use prompts with equally many"
            )
        last = [(int(into.last[row]), int(source.last[of]))] if ends else []
        found += [(row, *pair) for pair in [*zip(ours, theirs, strict=True), *last]]
    rows, ours, theirs = torch.tensor(found).unbind(-1)
    return rows, ours, theirs


def _record(view: ModelView, by_layer: dict[int, list[int]], source: PromptBatch, activation: HeadActivation) -> Kept:
    """Layer -> what its chosen heads have on the source prompts, by name."""
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
