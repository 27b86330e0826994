"""Replace queries, keys, values, patterns or z of some heads with those from other prompts (activation patching)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.activations.activations import NO_LABELS_HINT
from icl_lens.activations.label_scores import LabelScores
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.edit_checks import checked_heads
from icl_lens.interventions.edited_scores import read_labels, score_passes, score_rows
from icl_lens.interventions.editor import (
    AttentionState,
    Edit,
    Positions,
    Stage,
    check_head_sets,
    editing,
    edits_disabled,
    group_by_layer,
)
from icl_lens.interventions.pattern import LayerValues, recording_hooks, score_inputs
from icl_lens.interventions.prefix_cache import RowEdits
from icl_lens.models.head import AnyHead
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_vocabulary

HeadActivation = Literal["q", "k", "v", "pattern", "z"]
Align = Literal["positions", "labels"]


@contextmanager
def patch_heads(
    model: Any,
    heads: Iterable[AnyHead],
    source: PromptBatch,
    *,
    activation: HeadActivation,
    positions: Positions = "all",
    align: Align = "positions",
    batch: PromptBatch | None = None,
) -> Iterator[None]:
    """Patch the given heads with their activations on other prompts, position by position or label by label.

    `activation` selects what is patched. `"q"` and `"k"` are queries and keys before rotation (after their norm, in
    families that have one), from which the pattern is recomputed. The other choices are values (`"v"`), attention
    probabilities (`"pattern"`), and the weighted sum of values (`"z"`). With grouped-query attention, only the given
    heads use the patched keys or values. Row i of a pass is patched from row i of `source`; a single source prompt is
    used for all rows. `source` is run once, on entry, without other edits.

    With `align="positions"`, source and prompt must have the same number of tokens. With `align="labels"`, the i-th
    label is patched from the i-th label, token by token, and the last position from the last position; prompts may
    differ in length, but not in their number of demonstrations or in the number of tokens of any label. `batch` must
    then be the batch that is run in the block. In a pattern, the attention to labels and to the last position is
    patched, and the remaining attention is divided among the other positions in proportion to their unpatched
    attention. In models with learned positions, patched queries and keys include the contribution of the source's
    position embeddings.

    `positions="last"` patches only what the last position reads: its query, its row of the pattern, its z, or, with
    `align="labels"`, the keys or values of the labels as its query sees them; at all other positions, the heads then
    keep their unpatched z, from a pass over `batch` without other edits. This isolates the direct label → last-position
    path. Queries and z may come from prompts of another length.

    Warn once about a head whose output does not change the logits. Raise InputError for an unknown head, for prompts
    that do not match (naming the first row that differs), and for families whose attention cannot be recomputed.

    Example:
        >>> other = il.tokenize(model, il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :"))
        >>> with il.patch_heads(model, [il.Head(2, 0)], other, activation="q", positions="last"):
        ...     patched = il.label_log_probs(model, batch)
        >>> patched.shape
        torch.Size([1, 2])
    """
    view = ModelView.of(model)
    _check_options(activation, positions, align, batch)
    patch = _Patch.record(view, heads, source, activation, positions, batch)
    if patch.is_for_last_query:
        patch = patch.with_clean_z(view)
    with editing(view, *patch.edits(patch.heads)):
        yield


def label_log_probs_patched(
    model: Any,
    batch: PromptBatch,
    head_sets: Sequence[Iterable[AnyHead]],
    source: PromptBatch,
    *,
    activation: HeadActivation,
    positions: Positions = "all",
    align: Align = "positions",
) -> LabelScores:
    """Return each label's log-probability [batch set label] when the heads of each set are patched, nats.

    For each set, the result equals that of `label_log_probs` within `patch_heads(model, heads, source, …)`, up to
    rounding, but `source` is run only once. If only the last position is edited (its queries or z, with
    `align="positions"`, or keys and values, with `align="labels"`), the batch is run once as well, and each set re-runs
    one token per prompt. Otherwise, or if the prefix cache is not supported (see `head_effects`), each set takes one
    full forward pass. Raise InputError in the same cases as `patch_heads`, and for empty `head_sets`.

    Example:
        >>> other = il.tokenize(model, il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :"))
        >>> sets = [[il.Head(2, 0)], [il.Head(2, 0), il.Head(3, 1)]]
        >>> il.label_log_probs_patched(model, batch, sets, other, activation="q", positions="last").shape
        torch.Size([1, 2, 2])
    """
    view = ModelView.of(model)
    if not len(head_sets):
        raise InputError("head_sets must contain at least one set, got none")
    check_head_sets(head_sets)
    sets = [list(heads) for heads in head_sets]
    sets_by_layer = [group_by_layer(view, heads) for heads in sets]
    required_batch = batch if align == "labels" else None
    _check_options(activation, positions, align, required_batch)
    batch.require_labels("label to score", NO_LABELS_HINT)
    all_heads = [head for heads in sets for head in heads]
    patch = _Patch.record(view, all_heads, source, activation, positions, required_batch)
    read = read_labels(batch)

    def run_full_passes() -> Tensor:
        full_patch = patch.with_clean_z(view) if patch.is_for_last_query else patch
        return score_passes(
            view, batch, (editing(view, *full_patch.edits(by_layer)) for by_layer in sets_by_layer), read
        )

    def edits_of(prompts: list[int]) -> RowEdits:
        row_patch = patch.for_rows(prompts)
        return RowEdits.applying(view, [row_patch.edits(by_layer) for by_layer in sets_by_layer])

    only_last = patch.is_for_last_query or (activation in ("q", "z") and positions == "last" and align == "positions")
    if not only_last or len(source) not in (1, len(batch)):
        return LabelScores.from_tensor(run_full_passes(), batch.labels)
    scores, _ = score_rows(
        view, batch, edits_of, read, run_full_passes, n_sets=len(sets_by_layer), attention=activation != "z"
    )
    return LabelScores.from_tensor(scores, batch.labels)


def _check_options(
    activation: HeadActivation,
    positions: Positions,
    align: Align,
    batch: PromptBatch | None,
) -> None:
    """Raise InputError for an unsupported combination of options."""
    check_choice("activation", activation, ("q", "k", "v", "pattern", "z"))
    check_choice("positions", positions, ("all", "last"))
    check_choice("align", align, ("positions", "labels"))
    if positions == "last" and activation in ("k", "v") and align == "positions":
        raise InputError(
            f"positions must be 'all' for activation={activation!r} with align='positions', got 'last'; pass "
            "align='labels'"
        )
    if (align == "labels") != (batch is not None):
        raise InputError(
            f"batch must be {'the batch run in the block' if batch is None else 'None'} for align={align!r}, got "
            f"{'None' if batch is None else type(batch).__name__}"
        )


HeadActivations = dict[int, dict[str, Tensor]]
"""Layer -> activations of some of its heads in one pass, by name."""
AlignedPositions = tuple[Int[Tensor, " n"], Int[Tensor, " n"], Int[Tensor, " n"]]
"""For every patched position: its row, its position in the row, and the position in the source it is patched from."""


@dataclass(frozen=True)
class _Patch:
    """Source activations of some heads, and the edits that write them into a forward pass."""

    source: PromptBatch
    activation: HeadActivation
    positions: Positions
    required_batch: PromptBatch | None
    """The batch that passes must run, for `align="labels"`."""
    heads: dict[int, list[int]]
    recorded: HeadActivations
    """The heads' activations on the source."""
    aligned: AlignedPositions | None
    """Aligned labels, and the last position if it is patched; None for `align="positions"`."""
    clean_z: HeadActivations = field(default_factory=dict)
    """The heads' z on the required batch without the patch, if only the last query uses the source."""

    @classmethod
    def record(
        cls,
        view: ModelView,
        heads: Iterable[AnyHead],
        source: PromptBatch,
        activation: HeadActivation,
        positions: Positions,
        required_batch: PromptBatch | None,
    ) -> "_Patch":
        """Run the source prompts and record the heads' activations."""
        by_layer = checked_heads(view, heads, attention=activation != "z")
        aligned = None
        if required_batch is not None:
            only_labels = positions == "last" and activation in ("k", "v")
            aligned = _align_labels(source, required_batch, include_last=not only_labels)
        recorded = _record(view, by_layer, source, activation)
        return cls(source, activation, positions, required_batch, by_layer, recorded, aligned)

    @property
    def is_for_last_query(self) -> bool:
        """Whether the last query alone reads the patched keys or values."""
        return self.positions == "last" and self.activation in ("k", "v")

    def with_clean_z(self, view: ModelView) -> "_Patch":
        """Also record the heads' z on the required batch, which they keep at all positions except the last."""
        assert self.required_batch is not None
        return replace(self, clean_z=_record(view, self.heads, self.required_batch, "z"))

    def for_rows(self, prompts: list[int]) -> "_Patch":
        """Return the patch for passes that re-run only the last token of some prompts."""
        source, recorded = self.source, self.recorded
        if len(source) > 1:
            source = source[prompts]
            recorded = {layer: {name: x[prompts] for name, x in named.items()} for layer, named in recorded.items()}
        aligned = None
        if self.required_batch is not None:
            aligned = _align_labels(source, self.required_batch[prompts], include_last=False)
        return replace(self, source=source, required_batch=None, recorded=recorded, aligned=aligned)

    def edits(self, by_layer: dict[int, list[int]]) -> list[Edit]:
        """Return the edits that patch the given heads, which must be among the recorded ones."""
        stage = {"pattern": Stage.pattern, "z": Stage.z}.get(self.activation, Stage.inputs)
        apply = self.patch_z if self.activation == "z" else self.patch_attention
        what = f"patched ({self.activation})"
        edits = [Edit(stage, by_layer, apply, self.required_batch, what)]
        return [*edits, Edit(Stage.z, by_layer, self.restore_z, self.required_batch, what)] if self.clean_z else edits

    def _select_heads(self, recorded: HeadActivations, layer: int, heads: list[int]) -> dict[str, Tensor]:
        """Return the recorded activations of some of a layer's heads."""
        indices = [self.heads[layer].index(head) for head in heads]
        return {name: x[:, indices] if name == "pattern" else x[:, :, indices] for name, x in recorded[layer].items()}

    def patch_attention(self, attention: AttentionState, heads: list[int], layer: int) -> None:
        """Patch queries, keys, values or the pattern of a layer's heads."""
        indices, recorded = attention.indices_of(heads), self._select_heads(self.recorded, layer, heads)
        if self.activation == "v":
            attention.v = attention.v.clone()
            self._write(attention.v, recorded["v"], indices, attention.last)
        elif self.activation == "pattern":
            assert attention.pattern is not None
            self._write_pattern(attention.pattern, recorded["pattern"], indices, attention.last)
        else:
            attention.rescored.update(indices)
            for name in (self.activation, f"{self.activation}_share"):
                old = getattr(attention.inputs, name)
                if old is not None:
                    new = old.clone()
                    self._write(new, recorded[name], indices, attention.last)
                    setattr(attention.inputs, name, new)

    def patch_z(self, z: Tensor, heads: list[int], layer: int, last: Tensor) -> None:
        """Patch z of a layer's heads."""
        self._write(z, self._select_heads(self.recorded, layer, heads)["z"], heads, last)

    def restore_z(self, z: Tensor, heads: list[int], layer: int, last: Tensor) -> None:
        """Restore the unpatched z [batch pos head d_head] at all positions except the last of each row."""
        self._check_rows(len(z), last)
        earlier = torch.arange(z.shape[1], device=z.device) != last[:, None]
        clean = self._select_heads(self.clean_z, layer, heads)["z"].to(z)
        z[:, :, heads] = torch.where(earlier[..., None, None], clean, z[:, :, heads])

    def _write(self, target: Tensor, value: Tensor, heads: list[int], last: Tensor) -> None:
        """Write value [source pos chosen …] into target [batch pos head …] at the head indices `heads`."""
        rows, device = len(target), target.device
        self._check_rows(rows, last)
        if self.positions == "last" and not self.is_for_last_query:
            aligned = torch.arange(rows), last, self.source.last.expand(rows)
        elif self.aligned is not None:
            aligned = self.aligned
        else:
            row, to_positions = (torch.arange(target.shape[1], device=device) <= last[:, None]).nonzero(as_tuple=True)
            aligned = row, to_positions, to_positions
        row, to_positions, from_positions = (indices.to(device)[:, None] for indices in aligned)
        source_row = row if len(self.source) > 1 else torch.zeros_like(row)
        value = value.to(target)[source_row, from_positions, torch.arange(len(heads), device=device)]
        target[row, to_positions, torch.tensor(heads, device=device)] = value

    def _write_pattern(self, target: Tensor, value: Tensor, heads: list[int], last: Tensor) -> None:
        """Write value [source chosen query key] into target [batch head query key], at aligned positions if any."""
        if self.aligned is None:
            # A negative width crops padding, which is 0.
            value = torch.nn.functional.pad(value, (0, target.shape[-1] - value.shape[-1]))
            self._write(target.transpose(1, 2), value.transpose(1, 2), heads, last)
            return
        self._check_rows(len(target), last)
        queries = slice(-1, None) if self.positions == "last" else slice(None)
        for row in range(len(target)):
            to_positions, from_positions = (
                positions[self.aligned[0] == row].to(target.device) for positions in self.aligned[1:]
            )
            new = value[row if len(self.source) > 1 else 0][:, from_positions[queries]][:, :, from_positions].to(target)
            old = target[row, heads][:, to_positions[queries]]
            old[:, :, to_positions] = 0
            # The other positions share what the patched attention leaves, in proportion to their own.
            remaining = (1 - new.sum(-1, keepdim=True)).clamp(min=0)
            old = old / old.sum(-1, keepdim=True).clamp(min=torch.finfo(old.dtype).tiny) * remaining
            old[:, :, to_positions] = new
            target[row, torch.tensor(heads, device=target.device)[:, None], to_positions[queries]] = old

    def _check_rows(self, rows: int, last: Tensor) -> None:
        """Raise InputError unless source and pass match in rows and, for `align="positions"`, in length."""
        source, batch = self.source, self.required_batch
        if len(source) not in (1, rows):
            raise InputError(f"source must have one prompt or one per row of the pass, {rows}, got {len(source)}")
        if batch is not None and not (len(batch) == rows and torch.equal(batch.last.to(last.device), last)):
            raise InputError("the forward pass must run `batch`, got prompts of other lengths; run the same batch")
        source_last = source.last.to(last.device).expand(rows)
        # Lengths may differ if labels are aligned, or if only the last query or z is patched.
        only_last = self.positions == "last" and self.activation in ("q", "z")
        if self.aligned is not None or only_last or torch.equal(source_last, last):
            return
        row = int((source_last != last).nonzero()[0])
        raise InputError(
            f"source and prompt must have the same number of tokens, got {int(source_last[row]) + 1} and "
            f"{int(last[row]) + 1} in row {row}; use prompts of the same length or align='labels'"
            + (" or positions='last'" if self.activation in ("q", "z") else "")
        )


def _align_labels(source: PromptBatch, batch: PromptBatch, *, include_last: bool) -> AlignedPositions:
    """Align the i-th label of each row with the i-th of its source, token by token; with `include_last`, also the ends.

    Raise InputError if a row and its source differ in the number of demonstrations or of tokens of a label.
    """
    if len(source) not in (1, len(batch)):
        raise InputError(f"source must have one prompt, or the {len(batch)} of batch, got {len(source)}")
    batch.require_demonstrations("label to align", "use positions='last' or prompts of the same length")
    aligned = []
    for row in range(len(batch)):
        source_row = row if len(source) > 1 else 0
        both = batch.label_ranges[row].tolist(), source.label_ranges[source_row].tolist()
        ours, theirs = ([range(*tokens) for tokens in ranges if tokens[0] >= 0] for ranges in both)
        if len(ours) != len(theirs):
            raise InputError(
                f"source and prompt must have the same number of demonstrations, got {len(theirs)} and {len(ours)} in "
                f"row {row}"
            )
        for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if len(our) != len(their):
                names = [
                    f"{one.labels[int(one.label_index[at, i])]!r} ({len(tokens)})"
                    for one, at, tokens in ((source, source_row, their), (batch, row, our))
                ]
                raise InputError(
                    "labels of source and prompt must have the same number of tokens, got "
                    f"{' and '.join(names)} for demonstration {i} of row {row}; choose other labels"
                )
        to_positions, from_positions = ([at for tokens in ranges for at in tokens] for ranges in (ours, theirs))
        last = [(int(batch.last[row]), int(source.last[source_row]))] if include_last else []
        aligned += [(row, *pair) for pair in [*zip(to_positions, from_positions, strict=True), *last]]
    rows, to_positions, from_positions = torch.tensor(aligned).unbind(-1)
    return rows, to_positions, from_positions


def _record(
    view: ModelView, by_layer: dict[int, list[int]], source: PromptBatch, activation: HeadActivation
) -> HeadActivations:
    """Run the source prompts and return the activations of the given heads."""
    check_vocabulary(view.model, source, "source")
    recorded = {layer: LayerValues(view, layer, source.attention_mask.bool()) for layer in by_layer}
    hooks = []
    for layer, values in recorded.items():
        if activation == "z":
            name = view.hook(layer, "attn.hook_z")
            hooks.append((name, lambda z, hook, values=values: values.record("z", z.detach())))
        else:
            hooks += recording_hooks(values)
    with torch.no_grad(), view.exclusive_pass(), edits_disabled(view), view.model.hooks(fwd_hooks=hooks):
        view.model(source.tokens, attention_mask=source.attention_mask, return_type="logits")
    found: HeadActivations = {}
    for layer, chosen in by_layer.items():
        values = recorded[layer]
        if activation == "pattern":
            found[layer] = {"pattern": values.seen["pattern"][:, chosen]}
        elif activation in ("v", "z"):
            found[layer] = {activation: values.heads(activation, chosen)}
        else:
            inputs = score_inputs(values, chosen)
            parts = {name: getattr(inputs, name) for name in (activation, f"{activation}_share")}
            found[layer] = {name: part for name, part in parts.items() if part is not None}
    return found
