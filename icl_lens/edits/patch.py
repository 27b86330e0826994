"""Replace queries, keys, values, patterns or z of some heads with those from other prompts
(activation patching).
"""

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.edits.edit import (
    Attention,
    Edit,
    Places,
    Positions,
    Stage,
    group_by_layer,
    of_prompts,
)
from icl_lens.edits.recomputed_patterns import LayerValues, recording_hooks, score_inputs
from icl_lens.errors import InputError, check_choice
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.head import AnyHead
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, check_vocabulary, require_demonstrations
from icl_lens.reading.last_logits import last_logits

HeadActivation = Literal["q", "k", "v", "pattern", "z"]
Align = Literal["positions", "labels"]
HeadActivations = dict[int, dict[str, Tensor]]
"""Layer -> activations of some of its heads in one pass, by name."""
AlignedPositions = tuple[Int[Tensor, " n"], Int[Tensor, " n"], Int[Tensor, " n"]]
"""For every patched position: its prompt, its position in it, and the position in the source it is
patched from.
"""


@dataclass(frozen=True, eq=False)
class Patch(Edit):
    """Activations of heads on other prompts, written position by position or label by label.

    `activation` selects what is patched. `"q"` and `"k"` are queries and keys before rotation
    (after their norm, in families that have one), from which the pattern is recomputed. The other
    choices are values (`"v"`), attention probabilities (`"pattern"`), and the weighted sum of
    values (`"z"`). With grouped-query attention, only the given heads use the patched keys or
    values. Row i of a pass is patched from row i of `source`; a single source prompt is used for
    all rows. `source` is run once, without other edits.

    With `align="positions"`, source and prompt must have the same number of tokens. With
    `align="labels"`, the i-th label is patched from the i-th label, token by token, and the last
    position from the last position; prompts may differ in length, but not in their number of
    demonstrations or in the number of tokens of any label. It then needs the prompts that are run,
    as `Reweight` does. In a pattern, the attention to labels and to the last position is patched,
    and the remaining attention is divided among the other positions in proportion to their
    unpatched attention. In models with learned positions, patched queries and keys include the
    contribution of the source's position embeddings.

    `positions="last"` patches only what the last position reads: its query, its row of the pattern,
    its z, or, with `align="labels"`, the keys or values of the labels as its query sees them; at
    all other positions, the heads then keep the z that they have without this edit. This isolates
    the direct label → last-position path. Queries and z may come from prompts of another length.
    `PatchSite` patches the residual stream, attention and FFN outputs, and neurons.

    Raise InputError for an unknown head, for prompts that do not match (naming the first row that
    differs), and for families whose attention cannot be recomputed.

    Example:
        >>> donor = il.Prompt.parse("love : bar like : bar eight : foo two : foo sad :")
        >>> query = {"activation": "q", "positions": "last"}
        >>> patches = [
        ...     il.Patch([head], il.tokenize(model, donor), **query) for head in ("L2H0", "L3H1")
        ... ]
        >>> il.score(model, batch, [patches[:1], patches]).shape
        torch.Size([1, 2, 2])
    """

    heads: Iterable[AnyHead]
    source: PromptBatch
    _: KW_ONLY
    activation: HeadActivation
    positions: Positions = "all"
    align: Align = "positions"
    _recorded: HeadActivations | None = field(default=None, repr=False)
    """The heads' activations on the source."""
    _heads: dict[int, list[int]] = field(default_factory=dict, repr=False)
    """Layer -> the heads of `_recorded`."""
    _aligned: AlignedPositions | None = field(default=None, repr=False)
    """Aligned labels, and the last position if it is patched; None for `align="positions"`."""
    _batch: PromptBatch | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_batch(self.source, "source")
        check_choice("activation", self.activation, ("q", "k", "v", "pattern", "z"))
        check_choice("positions", self.positions, ("all", "last"))
        check_choice("align", self.align, ("positions", "labels"))
        if self.positions == "last" and self.activation in ("k", "v") and self.align == "positions":
            raise InputError(
                f"positions must be 'all' for activation={self.activation!r} with "
                "align='positions', got 'last'; pass align='labels'"
            )

    @property
    def stages(self) -> tuple[Stage, ...]:
        stages = {"pattern": Stage.pattern, "v": Stage.values, "z": Stage.z}
        return (stages.get(self.activation, Stage.inputs),)

    @property
    def description(self) -> str:
        return f"patched ({self.activation})"

    @property
    def needs_batch(self) -> bool:
        return self.align == "labels"

    @property
    def write_key(self) -> object:
        if type(self) is not Patch:
            return id(self)
        return self.positions, self.align, id(self._recorded), id(self._aligned)

    @property
    def _is_for_last_query(self) -> bool:
        """Whether the last query alone reads patched keys or values."""
        return self.positions == "last" and self.activation in ("k", "v")

    def changes_only_last(self, batch: PromptBatch) -> bool:
        is_row = self._is_for_last_query or (
            self.activation in ("q", "z") and self.align == "positions"
        )
        return self.positions == "last" and is_row and len(self.source) in (1, len(batch))

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        groups: dict[tuple[object, ...], list[Patch]] = {}
        for edit in edits:
            if edit._recorded is None:
                key = (id(edit.source), edit.activation, edit.positions, edit.align)
                groups.setdefault(key, []).append(edit)
        prepared: dict[int, Any] = {}
        for group in groups.values():
            recording = cls._recording(view, group, batch)
            for edit in group:
                prepared[id(edit)] = replace(edit, **recording, _batch=batch)
        return [prepared.get(id(edit), edit) for edit in edits]

    @classmethod
    def _recording(
        cls, view: ModelView, group: Sequence["Patch"], batch: PromptBatch | None
    ) -> dict[str, Any]:
        """Return the fields that patches with the same source, activation and positions share."""
        patch = group[0]
        if batch is not None:
            _check_number(patch.source, len(batch))
        heads = chain.from_iterable(edit.heads for edit in group)
        by_layer = group_by_layer(view, heads)
        aligned = None
        if patch.align == "labels":
            assert batch is not None
            aligned = _align_labels(patch.source, batch, include_last=not patch._is_for_last_query)
        recorded = _record(view, by_layer, patch.source, patch.activation)
        return {"_recorded": recorded, "_heads": by_layer, "_aligned": aligned}

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        rows, last = attention.last_queries
        if attention.queries is None:  # whole prompts
            self._check(len(rows), rows, attention.prompt, last)
        at = rows, *self._positions(attention.prompt.to(last.device), last, attention.v.shape[1])
        indices, recorded = attention.indices_of(heads), self._select(layer, heads)
        if self.activation == "v":
            attention.v = attention.v.clone()
            self._write(attention.v, recorded["v"], indices, *at)
        elif self.activation == "pattern":
            assert attention.pattern is not None
            self._write_pattern(attention.pattern, recorded["pattern"], indices, *at)
        else:
            for name in (self.activation, f"{self.activation}_share"):
                old = getattr(attention.inputs, name)
                if old is not None:
                    new = old.clone()
                    self._write(new, recorded[name], indices, *at)
                    setattr(attention.inputs, name, new)

    def write_z(self, z: Tensor, at: Places, layer: int) -> None:
        if self.positions == "all" or self.align == "labels":
            self._check(len(z), at.row, at.prompt, at.last)
        entry, to_positions, source, from_positions = self._positions(
            at.prompt, at.last, z.shape[1]
        )
        value = self._select(layer, self._heads[layer])["z"].to(z)
        index = torch.tensor(
            [self._heads[layer].index(head) for head in at.head[entry].tolist()], device=z.device
        )
        z[at.row[entry], to_positions, at.head[entry]] = value[source, from_positions, index]

    def _select(self, layer: int, heads: list[int]) -> dict[str, Tensor]:
        """Return the recorded activations of some of a layer's heads."""
        assert self._recorded is not None
        indices = [self._heads[layer].index(head) for head in heads]
        selected = {}
        for name, x in self._recorded[layer].items():
            selected[name] = x[:, indices] if name == "pattern" else x[:, :, indices]
        return selected

    def _positions(
        self, prompt: Int[Tensor, " n"], last: Int[Tensor, " n"], width: int
    ) -> tuple[Tensor, ...]:
        """Return for every patched position its entry of `prompt`, itself, its source prompt and
        its position there.
        """
        device = last.device
        source = prompt if len(self.source) > 1 else torch.zeros_like(prompt)
        aligns_pattern = self.activation == "pattern" and self._aligned is not None
        if self.positions == "last" and not self._is_for_last_query and not aligns_pattern:
            entry = torch.arange(len(last), device=device)
            return entry, last, source, self.source.last.to(device)[source]
        if self._aligned is not None:
            prompts, to_positions, from_positions = (x.to(device) for x in self._aligned)
            entry, pair = (prompt[:, None] == prompts).nonzero(as_tuple=True)
            return entry, to_positions[pair], source[entry], from_positions[pair]
        is_token = torch.arange(width, device=device) <= last[:, None]
        entry, position = is_token.nonzero(as_tuple=True)
        return entry, position, source[entry], position

    def _write(
        self,
        target: Tensor,
        value: Tensor,
        heads: list[int],
        rows: Int[Tensor, " row"],
        entry: Int[Tensor, " n"],
        to_positions: Int[Tensor, " n"],
        source: Int[Tensor, " n"],
        from_positions: Int[Tensor, " n"],
    ) -> None:
        """Write value [source pos edited_head …] into target [row pos head …] at the head indices
        `heads`.
        """
        edited_head = torch.arange(len(heads), device=target.device)
        head = torch.tensor(heads, device=target.device)
        value = value.to(target)[source[:, None], from_positions[:, None], edited_head]
        target[rows[entry][:, None], to_positions[:, None], head] = value

    def _write_pattern(
        self, target: Tensor, value: Tensor, heads: list[int], rows: Tensor, *at: Tensor
    ) -> None:
        """Write value [source chosen query key] into target [row head query key], at aligned
        positions if any.
        """
        if self._aligned is None:
            # A negative width crops padding, which is 0.
            value = torch.nn.functional.pad(value, (0, target.shape[-1] - value.shape[-1]))
            self._write(target.transpose(1, 2), value.transpose(1, 2), heads, rows, *at)
            return
        entry, to_all, source, from_all = at
        for row in range(len(target)):
            of_row = entry == row
            to_positions, from_positions = to_all[of_row], from_all[of_row]
            queries = slice(-1, None) if self.positions == "last" else slice(None)
            new = value[int(source[of_row][0])][:, from_positions[queries]][
                :, :, from_positions
            ].to(target)
            old = target[row, heads][:, to_positions[queries]]
            old[:, :, to_positions] = 0
            # The other positions share what the patched attention leaves, in proportion to their
            # own.
            remaining = (1 - new.sum(-1, keepdim=True)).clamp(min=0)
            old = old / old.sum(-1, keepdim=True).clamp(min=torch.finfo(old.dtype).tiny) * remaining
            old[:, :, to_positions] = new
            target[
                row, torch.tensor(heads, device=target.device)[:, None], to_positions[queries]
            ] = old

    def _check(self, n_rows: int, row: Tensor, prompt: Tensor, last: Tensor) -> None:
        """Raise InputError unless source and pass match in rows and, for `align="positions"`, in
        length.
        """
        source, batch = self.source, self._batch
        if batch is None:
            _check_number(source, n_rows)
        if batch is not None and self.align == "labels":
            if bool(
                (of_prompts(batch.last.to(last.device), prompt) > last).any()
            ):  # tokens may follow the prompts
                raise InputError(
                    "the forward pass must run `batch`, got prompts of other lengths; run the same "
                    "batch"
                )
            return
        source_last = of_prompts(source.last.to(last.device), prompt)
        # Lengths may differ if only the last query or z is patched.
        if (self.positions == "last" and self.activation in ("q", "z")) or torch.equal(
            source_last, last
        ):
            return
        at = int((source_last != last).nonzero()[0])
        raise InputError(
            "source and prompt must have the same number of tokens, got "
            f"{int(source_last[at]) + 1} and {int(last[at]) + 1} in row {int(row[at])}; use "
            "prompts of the same length or "
            "align='labels'" + (" or positions='last'" if self.activation in ("q", "z") else "")
        )


def _check_number(source: PromptBatch, n_rows: int) -> None:
    """Raise InputError unless there is one source prompt, or one per row."""
    if len(source) not in (1, n_rows):
        raise InputError(
            f"source must have one prompt or one per row of the pass, {n_rows}, got {len(source)}"
        )


def _align_labels(
    source: PromptBatch, batch: PromptBatch, *, include_last: bool
) -> AlignedPositions:
    """Align the i-th label of each row with the i-th of its source, token by token; with
    `include_last`, also their last positions. A single source belongs to all rows.

    Return rows, their positions, and those of the source. Raise InputError if a row and its source
    differ in the number of demonstrations or of tokens of a label.
    """
    require_demonstrations(
        batch, "label to align", "use positions='last' or prompts of the same length"
    )
    aligned: list[tuple[int, int, int]] = []
    for row in range(len(batch)):
        source_row = row if len(source) > 1 else 0
        to_labels, from_labels = _label_tokens(batch, row), _label_tokens(source, source_row)
        if len(to_labels) != len(from_labels):
            raise InputError(
                "source and prompt must have the same number of demonstrations, got "
                f"{len(from_labels)} and {len(to_labels)} in row {row}"
            )
        for i, (to_tokens, from_tokens) in enumerate(zip(to_labels, from_labels, strict=True)):
            if len(to_tokens) != len(from_tokens):
                from_label = source.labels[int(source.label_index[source_row, i])]
                to_label = batch.labels[int(batch.label_index[row, i])]
                raise InputError(
                    "labels of source and prompt must have the same number of tokens, got "
                    f"{from_label!r} ({len(from_tokens)}) and {to_label!r} ({len(to_tokens)}) for "
                    f"demonstration {i} of row {row}; choose other labels"
                )
            for to_position, from_position in zip(to_tokens, from_tokens, strict=True):
                aligned.append((row, to_position, from_position))
        if include_last:
            aligned.append((row, int(batch.last[row]), int(source.last[source_row])))
    rows, to_positions, from_positions = torch.tensor(aligned).unbind(-1)
    return rows, to_positions, from_positions


def _label_tokens(batch: PromptBatch, row: int) -> list[range]:
    """Return the token positions of each label of a prompt."""
    ranges = batch.label_ranges[row].tolist()
    return [range(start, end) for start, end in ranges if start >= 0]


def _record(
    view: ModelView, by_layer: dict[int, list[int]], source: PromptBatch, activation: HeadActivation
) -> HeadActivations:
    """Run the source prompts, a few at a time, and return the activations of the given heads."""
    check_vocabulary(view.model, source, "source")
    pieces: list[HeadActivations] = []
    with edits_disabled(view):
        for prompts in source.split(rows_at_once(view, source.tokens.shape[1])):
            pieces.append(_record_pass(view, by_layer, prompts, activation))
    recorded: HeadActivations = {}
    for layer in by_layer:
        recorded[layer] = {}
        for name in pieces[0][layer]:
            of_pieces = [piece[layer][name] for piece in pieces]
            n_axes = 2 if activation == "pattern" else 1
            recorded[layer][name] = _joined(of_pieces, source.tokens.shape[1], n_axes)
    return recorded


def _record_pass(
    view: ModelView, by_layer: dict[int, list[int]], source: PromptBatch, activation: HeadActivation
) -> HeadActivations:
    """Run source prompts in one pass and return the activations of the given heads."""
    recorded: HeadActivations = {}

    def keep_pattern(pattern: Tensor, hook: Any, layer: int) -> None:
        recorded[layer] = {"pattern": pattern.detach()[:, by_layer[layer]]}

    values_of = {
        layer: LayerValues(view, layer, source.attention_mask.bool()) for layer in by_layer
    }
    hooks: list[tuple[str, Any]] = []
    for layer, values in values_of.items():
        if activation == "z":
            name = view.hook(layer, "attn.hook_z")
            hooks.append((name, lambda z, hook, values=values: values.record("z", z.detach())))
        elif activation == "pattern":
            name = view.hook(layer, "attn.hook_pattern")
            hooks.append((name, partial(keep_pattern, layer=layer)))
        elif activation == "v":
            hooks += recording_hooks(values, "v")
        else:
            hooks += recording_hooks(values, "q", "k", "position", "resid")
    last_logits(view.model, source, hooks)
    if activation == "pattern":
        return recorded
    for layer, heads in by_layer.items():
        values = values_of[layer]
        if activation in ("v", "z"):
            recorded[layer] = {activation: values.heads(activation, heads)}
            continue
        inputs = score_inputs(values, heads)
        parts = {name: getattr(inputs, name) for name in (activation, f"{activation}_share")}
        recorded[layer] = {name: part for name, part in parts.items() if part is not None}
    return recorded


def _joined(pieces: Sequence[Tensor], width: int, n_axes: int) -> Tensor:
    """Return activations of the prompts of several passes, with zeros up to `width` positions.

    They are [prompt pos head d_head] with one axis of positions, or [prompt head query key] with
    two.
    """
    padded = []
    for piece in pieces:
        if n_axes == 2:
            n_missing = width - piece.shape[3]
            padded.append(torch.nn.functional.pad(piece, (0, n_missing, 0, n_missing)))
        else:
            n_missing = width - piece.shape[1]
            padded.append(torch.nn.functional.pad(piece, (0, 0, 0, 0, 0, n_missing)))
    return torch.cat(padded)
