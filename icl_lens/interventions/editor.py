"""The active edits of a model, and the hooks that apply them in a fixed order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from numbers import Integral
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.interventions.pattern import (
    LayerValues,
    ScoreInputs,
    check_no_cache,
    layer_hooks,
    recompute_pattern,
    score_inputs,
)
from icl_lens.models.active_edits import DESCRIBE, Described, some_of
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.independent_rows import independent_rows
from icl_lens.models.locking import check_thread, model_lock
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

Positions = Literal["all", "last"]


class Stage(IntEnum):
    """Stage at which an edit applies; the nesting order of `with` blocks matters only within a stage."""

    inputs = 0
    """Queries, keys and values."""
    scores = 1
    """The position term of attention scores."""
    pattern = 2
    z = 3
    removal = 4
    """Ablation, which sets z after all other edits."""


@dataclass
class AttentionState:
    """One layer's attention in one pass, for the edited heads, before z is computed."""

    edited_heads: list[int]
    inputs: ScoreInputs | None
    """Inputs of the attention scores; None if only patterns are edited and the model's own pattern was recorded."""
    v: Tensor
    """[batch key head d_head] values, with key-value groups repeated."""
    weight: Tensor
    """[batch head query] factor by which the scores' position term is multiplied; 1 is unedited."""
    last: Tensor
    """[batch] index of the last real query."""
    rescored: set[int] = field(default_factory=set)
    """Heads, by index in `edited_heads`, whose pattern must be recomputed."""
    pattern: Tensor | None = None
    """[batch head query key] attention probabilities; None before the pattern stage."""

    def indices_of(self, heads: Sequence[int]) -> list[int]:
        return [self.edited_heads.index(head) for head in heads]


@dataclass(frozen=True, eq=False)
class Edit:
    """The edit of a `with` block."""

    stage: Stage
    heads: dict[int, list[int]]
    """Layer -> edited heads."""
    apply: Callable[..., None]
    """In-place edit: `apply(attention, heads, layer)` up to the pattern stage, then `apply(z, heads, layer, last)`."""
    required_batch: PromptBatch | None = None
    """If given, every forward pass inside the `with` block must run these prompts; extra tokens may follow each one."""
    what: str = "edited"
    """What is done to the heads, such as "zeroed"; see `active_edits`."""
    supports_cache: bool = False
    """Whether passes that continue a KV cache are edited like whole passes: all positions are edited alike."""


@dataclass
class Editor:
    """All active edits of one model."""

    view: ModelView
    edits: list[Edit] = field(default_factory=list)
    hooked: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Hook name -> hook point and handle, kept as long as any edit needs the hook."""
    key_mask: Tensor | None = None
    """[batch key] which keys of the current pass are tokens; None without an attention mask."""
    values: dict[int, LayerValues] = field(default_factory=dict)
    """Layer -> activations recorded in the current pass."""
    patterns: dict[int, tuple[list[int], Tensor, Tensor]] = field(default_factory=dict)
    """Layer -> edited heads, their edited patterns and values in the current pass."""
    start_handle: Any = None
    """Handle of the hook that calls `start`."""

    def describe(self) -> Described:
        """Return the active edits in words, and the ids of the editor's hook handles; see `active_edits`."""
        own = {id(handle) for _, handle in self.hooked.values()}
        found = []
        for edit in [] if are_edits_disabled(self.view) else self.edits:
            heads = [str(Head(layer, head)) for layer, indices in sorted(edit.heads.items()) for head in indices]
            found.append(f"{some_of(heads, 'heads')} {edit.what}")
        return found, own

    def enter(self, edit: Edit) -> None:
        """Activate an edit and add the hooks that no other edit has added."""
        self.edits.append(edit)
        for name, (layer, activation) in _hook_names(self.view, edit).items():
            if name not in self.hooked:
                point = self.view.model.hook_dict[name]
                point.add_hook(_hook_fn(self, layer, activation))
                self.hooked[name] = point, point.fwd_hooks[-1]

    def leave(self, edit: Edit) -> None:
        """Remove an edit and the hooks that no other edit needs; edits may be removed in any order."""
        self.edits = [active for active in self.edits if active is not edit]
        needed = {name for active in self.edits for name in _hook_names(self.view, active)}
        for name in [name for name in self.hooked if name not in needed]:
            point, handle = self.hooked.pop(name)
            handle.hook.remove()
            point.fwd_hooks = [hook for hook in point.fwd_hooks if hook is not handle]

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the inputs of a forward pass and reset the state of the previous one."""
        if not are_edits_disabled(self.view):
            check_thread(self.view.model)
            if cached_length(kwargs) and not all(edit.supports_cache for edit in self.edits):
                raise InputError(
                    "edits of some positions, or of attention, do not support a KV cache of earlier passes, whose keys "
                    "differ from those of a whole pass; generate with use_past_kv_cache=False"
                )
            tokens = pass_tokens(args, kwargs)
            for edit in self.edits:
                if edit.required_batch is not None and tokens is not None:
                    check_same_prompts(edit.required_batch, tokens)
        mask = kwargs.get("attention_mask")
        self.key_mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self.values.clear()
        self.patterns.clear()

    def last(self, batch: int, n_queries: int, device: torch.device) -> Tensor:
        """Return [batch] the index of each row's last real query."""
        positions = torch.arange(n_queries, device=device)
        if self.key_mask is None:
            return positions[-1].expand(batch)
        mask = self.key_mask[:, -n_queries:].to(device)  # with a KV cache, queries are the last keys
        return torch.where(mask, positions, 0).max(-1).values

    def record(self, layer: int, name: str, value: Tensor) -> None:
        if layer not in self.values:
            self.values[layer] = LayerValues(self.view, layer, self.key_mask)
        self.values[layer].record(name, value)

    def on_pattern(self, layer: int, value: Tensor) -> Tensor:
        """Write the edited pattern, so that other hooks read the pattern that the model used."""
        if not edits_at(self.edits, layer, ATTENTION_STAGES):
            return value
        if layer not in self.patterns:
            self.record(layer, "pattern", value)
            self._attend(layer)
            value = value.clone()
        elif value.requires_grad:
            return value  # cannot be edited in place
        # If the hook of z has already run, TransformerLens ignores a returned tensor: edit the original in place.
        edited_heads, pattern, _ = self.patterns[layer]
        value[:, edited_heads] = pattern
        return value

    def on_z(self, layer: int, z: Tensor) -> Tensor:
        z = z.clone()
        if edits_at(self.edits, layer, ATTENTION_STAGES):
            if layer not in self.patterns:
                self._attend(layer)
            edited_heads, pattern, v = self.patterns[layer]
            equation = "batch head query key, batch key head d_head -> batch query head d_head"
            z[:, :, edited_heads] = einsum(pattern.to(z.dtype), v.to(z.dtype), equation)
        last = self.last(len(z), z.shape[1], z.device)
        for edit, heads in edits_at(self.edits, layer, Z_STAGES):
            edit.apply(z, heads, layer, last)
        return z

    def _attend(self, layer: int) -> None:
        values = self.values[layer]
        check_no_cache(values)
        q = values.seen["q"]
        last = self.last(len(q), q.shape[1], q.device)
        self.patterns[layer] = edited_attention(values, edits_at(self.edits, layer, ATTENTION_STAGES), last)


ATTENTION_STAGES = (Stage.inputs, Stage.scores, Stage.pattern)
Z_STAGES = (Stage.z, Stage.removal)
LayerEdits = list[tuple[Edit, list[int]]]
"""Edits of a layer, each with its heads, in the order in which they apply."""


def edits_at(edits: Sequence[Edit], layer: int, stages: Sequence[Stage]) -> LayerEdits:
    """Return the edits of a layer at some stages, in the order of the stages."""
    pairs = [(edit, edit.heads[layer]) for edit in edits if edit.stage in stages and layer in edit.heads]
    return sorted(pairs, key=lambda pair: pair[0].stage)


def edited_attention(
    values: LayerValues, edits: LayerEdits, last: Int[Tensor, " batch"]
) -> tuple[list[int], Float[Tensor, "batch head query key"], Float[Tensor, "batch key head d_head"]]:
    """Return the heads edited at the inputs, scores or pattern stage, with their edited patterns and values.

    `last` is the index of each prompt's last query. A pattern is recomputed from queries and keys if an edit changes
    its scores or if the model's own was not recorded.
    """
    edited_heads = sorted({head for _, heads in edits for head in heads})
    before_pattern = [(edit, heads) for edit, heads in edits if edit.stage < Stage.pattern]
    recorded = values.seen.get("pattern")
    inputs = None
    if before_pattern or recorded is None:
        position_share = any(edit.stage == Stage.scores for edit, _ in before_pattern)
        inputs = score_inputs(values, edited_heads, position_share=position_share)
    v = values.heads("v", edited_heads)
    weight = torch.ones(len(v), len(edited_heads), values.seen["q"].shape[1], device=v.device)
    attention = AttentionState(edited_heads, inputs, v, weight, last)
    for edit, heads in before_pattern:
        edit.apply(attention, heads, values.layer)
    if attention.inputs is None or (recorded is not None and not attention.rescored):
        assert recorded is not None
        pattern = recorded[:, edited_heads].clone()
    else:
        pattern = recompute_pattern(values, attention.inputs, edited_heads, attention.weight)
        if recorded is not None:
            kept = [index for index in range(len(edited_heads)) if index not in attention.rescored]
            pattern[:, kept] = recorded[:, [edited_heads[index] for index in kept]].to(pattern)
    attention.pattern = pattern
    for edit, heads in edits[len(before_pattern) :]:
        edit.apply(attention, heads, values.layer)
    return edited_heads, pattern, attention.v


_EDITORS: "WeakKeyDictionary[Any, Editor]" = WeakKeyDictionary()
# Models inside `edits_disabled`.
_DISABLED: "WeakSet[Any]" = WeakSet()


@contextmanager
def editing(view: ModelView, *edits: Edit) -> Iterator[None]:
    """Activate edits inside the `with` block, in addition to other active ones; blocks may end in any order.

    Raise InputError if another thread has such a block open or runs the model inside this one.
    """
    with model_lock(view.model, block=True), independent_rows(view.model):
        editor = _EDITORS.get(view.model)
        if editor is None:
            editor = _EDITORS[view.model] = Editor(view)
            DESCRIBE[view.model] = editor.describe
            module = getattr(view.model, "original_model", view.model)
            editor.start_handle = module.register_forward_pre_hook(
                lambda _, args, kwargs: editor.start(args, kwargs), with_kwargs=True
            )
        try:
            for edit in edits:
                editor.enter(edit)
            yield
        finally:
            for edit in edits:
                editor.leave(edit)
            if not editor.edits and _EDITORS.get(view.model) is editor:
                del _EDITORS[view.model], DESCRIBE[view.model]
                editor.start_handle.remove()


def pass_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tokens among the arguments of a pass; None if there are only embeddings."""
    named = kwargs.get("input_ids", kwargs.get("input"))
    values = (named, *args, *kwargs.values())
    is_tokens = (isinstance(x, Tensor) and x.ndim == 2 and x.dtype in (torch.int64, torch.int32) for x in values)
    return next((x for x, found in zip(values, is_tokens, strict=True) if found), None)


def cached_length(kwargs: dict[str, Any]) -> int:
    """Return the number of tokens in the KV cache that a pass continues; 0 without a cache."""
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
    length = getattr(cache, "get_seq_length", None)
    return int(length()) if length is not None else 0


def check_same_prompts(batch: PromptBatch, tokens: Tensor) -> None:
    """Raise InputError if a row of a pass does not begin with its prompt in the batch, or continues its padding."""
    rows, width = tokens.shape
    if len(batch) not in (1, rows) or width < batch.tokens.shape[1]:
        return  # shapes differ: the edit raises its own error
    if width > batch.tokens.shape[1]:
        check_no_ragged_generation(batch)
    real = batch.attention_mask.bool().to(tokens.device).expand(rows, -1)
    other = ((tokens[:, : real.shape[1]] != batch.tokens.to(tokens.device)) & real).any(-1)
    if bool(other.any()):
        row = int(other.nonzero()[0])
        raise InputError(
            "the forward pass must run the batch that the `with` block was created for; "
            f"row {row} is a different prompt"
        )


def check_no_ragged_generation(batch: PromptBatch) -> None:
    """Raise InputError if prompts have several lengths, so that generated tokens follow padding."""
    if bool((batch.last != batch.last[0]).any()):
        raise InputError(
            "prompts must have the same length for tokens to follow them, got "
            f"{int(batch.last.min()) + 1} to {int(batch.last.max()) + 1} tokens; generate for one prompt at a time"
        )


@contextmanager
def edits_disabled(view: ModelView) -> Iterator[None]:
    """Disable all edits inside the `with` block."""
    is_nested = are_edits_disabled(view)
    _DISABLED.add(view.model)
    try:
        yield
    finally:
        if not is_nested:
            _DISABLED.discard(view.model)


def are_edits_disabled(view: ModelView) -> bool:
    """Return whether a block of `edits_disabled` is open."""
    return view.model in _DISABLED


def _hook_names(view: ModelView, edit: Edit) -> dict[str, tuple[int | None, str]]:
    """Return hook name -> layer and activation; layer None for position embeddings, which serve all layers."""
    names: dict[str, tuple[int | None, str]] = {}
    for layer in edit.heads:
        if edit.stage in ATTENTION_STAGES:
            for name, hook in layer_hooks(view, layer).items():
                names[hook] = (None if name == "position" else layer, name)
        names[view.hook(layer, "attn.hook_z")] = (layer, "z")
    return names


def _hook_fn(editor: Editor, layer: int | None, name: str) -> Callable[..., Tensor | None]:
    def hook_fn(value: Tensor, hook: Any) -> Tensor | None:
        if are_edits_disabled(editor.view):
            return None
        if layer is None:
            for edited in {layer for edit in editor.edits if edit.stage in ATTENTION_STAGES for layer in edit.heads}:
                editor.record(edited, name, value)
            return None
        if name == "pattern":
            return editor.on_pattern(layer, value)
        if name == "z":
            return editor.on_z(layer, value)
        editor.record(layer, name, value)
        return None

    return hook_fn


def group_by_layer(view: ModelView, heads: Iterable[AnyHead]) -> dict[int, list[int]]:
    """Return layer -> its chosen heads, without duplicates; raise InputError for an unknown head."""
    by_layer: dict[int, list[int]] = {}
    for layer, index in sorted(view.check_heads(heads)):
        by_layer.setdefault(layer, []).append(index)
    return by_layer


def check_head_sets(sets: object) -> None:
    """Raise InputError for a flat list of heads where a list of sets of heads is expected."""
    for one in sets if isinstance(sets, Sequence) and not isinstance(sets, str) else [sets]:
        is_pair = isinstance(one, (tuple, list)) and len(one) == 2 and all(isinstance(index, Integral) for index in one)
        if is_pair or not isinstance(one, Iterable) or isinstance(one, str):
            head = repr(tuple(one) if isinstance(one, list) else one)
            raise InputError(
                f"head_sets must be a list of sets of heads, got {head} as a set; write [[{head}, …], …], with one "
                "list per set"
            )


def head_mask(view: ModelView, sets: Sequence[Iterable[AnyHead]]) -> Bool[Tensor, "set layer head"]:
    """Return which heads each set contains; raise InputError for unknown heads and for a flat list of heads."""
    check_head_sets(sets)
    mask = torch.zeros(len(sets), view.n_layers, view.n_heads, dtype=torch.bool)
    for row, heads in enumerate(sets):
        for layer, indices in group_by_layer(view, heads).items():
            mask[row, layer, indices] = True
    return mask
