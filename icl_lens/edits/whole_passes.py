"""Run edits in passes over whole prompts: the active edits of a model, and the hooks that apply
them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

import torch
from einops import einsum
from jaxtyping import Int
from torch import Tensor

from icl_lens.edits.edit import (
    ATTENTION_STAGES,
    SITE_STAGES,
    Z_STAGES,
    EditAtLayers,
    Places,
    Stage,
    edits_at,
)
from icl_lens.edits.edited_attention import edited_attention
from icl_lens.edits.recomputed_patterns import LayerValues, check_no_cache, layer_hooks
from icl_lens.edits.site_hooks import SiteWriter, site_hooks
from icl_lens.errors import InputError
from icl_lens.models.active_edits import OPEN_EDITS, are_edits_disabled
from icl_lens.models.passes.independent_rows import independent_rows
from icl_lens.models.passes.locking import check_thread, model_lock
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


@dataclass
class Editor:
    """All active edits of one model."""

    view: ModelView
    edits: list[EditAtLayers] = field(default_factory=list)
    hooked: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Hook name -> hook point and handle, kept as long as any edit needs the hook."""
    key_mask: Tensor | None = None
    """[batch key] which keys of the current pass are tokens; None without an attention mask."""
    values: dict[int, LayerValues] = field(default_factory=dict)
    """Layer -> activations recorded in the current pass."""
    patterns: dict[int, tuple[list[int], Tensor, Tensor]] = field(default_factory=dict)
    """Layer -> edited heads, their edited patterns and values in the current pass."""
    at_other_queries: dict[int, tuple[list[int], Tensor, Tensor] | None] = field(
        default_factory=dict
    )
    """Layer with edits of the last query -> the edited heads, patterns and values of all other
    queries, which such edits do not change; None if there are no edits of all queries."""
    sites: dict[int, SiteWriter] = field(default_factory=dict)
    """Layer -> what writes at its sites in the current pass."""
    n_cached: int = 0
    """Number of tokens in the KV cache that the current pass continues."""
    start_handle: Any = None
    """Handle of the hook that calls `start`."""

    def descriptions(self) -> list[str]:
        """Return the active edits in words; none if they are disabled in this thread."""
        if are_edits_disabled(self.view):
            return []
        return [edit_at.description for edit_at in self.edits]

    def handle_ids(self) -> set[int]:
        """Return the ids of the handles of all hooks of edits."""
        return {id(handle) for _, handle in self.hooked.values()}

    def enter(self, edit: EditAtLayers) -> None:
        """Activate an edit and add the hooks that no other edit has added."""
        self.edits.append(edit)
        for name, (layer, activation) in _hook_names(self.view, edit).items():
            if name not in self.hooked:
                point = self.view.model.hook_dict[name]
                point.add_hook(_hook_fn(self, layer, activation))
                self.hooked[name] = point, point.fwd_hooks[-1]

    def leave(self, edit: EditAtLayers) -> None:
        """Remove an edit and the hooks that only it needs; edits may be removed in any order."""
        self.edits = [active for active in self.edits if active is not edit]
        needed: set[str] = set()
        for active in self.edits:
            needed |= _hook_names(self.view, active).keys()
        for name in [name for name in self.hooked if name not in needed]:
            point, handle = self.hooked.pop(name)
            handle.hook.remove()
            point.fwd_hooks = [hook for hook in point.fwd_hooks if hook is not handle]

    def can_select(self, batch: PromptBatch) -> bool:
        """Return whether all edits were made for these prompts, so that passes may run some of
        them.
        """
        tokens = batch.tokens.cpu()
        for edit_at in self.edits:
            if edit_at.batch is None or not torch.equal(edit_at.batch.tokens.cpu(), tokens):
                return False
        return True

    @contextmanager
    def selected(self, prompts: Sequence[int]) -> Iterator[None]:
        """Edit passes over some of the prompts inside the `with` block."""
        edits_of_all = self.edits
        self.edits = [edit_at.select(prompts) for edit_at in edits_of_all]
        try:
            yield
        finally:
            self.edits = edits_of_all

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the inputs of a forward pass and reset the state of the previous one."""
        if not are_edits_disabled(self.view):
            check_thread(self.view.model)
            self.n_cached = cached_length(kwargs)
            if self.n_cached and not all(edit_at.edit.supports_cache for edit_at in self.edits):
                raise InputError(
                    "edits of some positions, or of attention, do not support a KV cache of "
                    "earlier passes, whose keys differ from those of a whole pass; generate with "
                    "use_past_kv_cache=False"
                )
            tokens = pass_tokens(args, kwargs)
            for edit_at in self.edits:
                if edit_at.batch is not None and tokens is not None:
                    check_same_prompts(edit_at.batch, tokens)
        mask = kwargs.get("attention_mask")
        self.key_mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self.values.clear()
        self.patterns.clear()
        self.at_other_queries.clear()
        self.sites.clear()

    def last(self, batch: int, n_queries: int, device: torch.device) -> Tensor:
        """Return [batch] the index of each row's last real query."""
        positions = torch.arange(n_queries, device=device)
        if self.key_mask is None:
            return positions[-1].expand(batch)
        mask = self.key_mask[:, -n_queries:].to(
            device
        )  # with a KV cache, queries are the last keys
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
        # If the hook of z has already run, TransformerLens ignores a returned tensor: edit the
        # original in place.
        edited_heads, pattern, _ = self.patterns[layer]
        if layer in self.at_other_queries:
            other_pattern = value  # copied only if edits change it: it may be the largest tensor
            if (at_others := self.at_other_queries[layer]) is not None:
                other_heads, patterns, _ = at_others
                other_pattern = value.clone()
                other_pattern[:, other_heads] = patterns
            is_last = self._is_last(value.transpose(1, 2))[:, None, :, None]
            pattern = torch.where(is_last, pattern, other_pattern[:, edited_heads])
        value[:, edited_heads] = pattern
        return value

    def on_z(self, layer: int, z: Tensor) -> Tensor:
        z = z.clone()
        if edits_at(self.edits, layer, ATTENTION_STAGES):
            if layer not in self.patterns:
                self._attend(layer)
            other_z = z.clone()
            heads = _attended(z, self.patterns[layer])
            if layer in self.at_other_queries:
                if (at_others := self.at_other_queries[layer]) is not None:
                    _attended(other_z, at_others)
                is_last = self._is_last(z)[..., None, None]
                z[:, :, heads] = torch.where(is_last, z[:, :, heads], other_z[:, :, heads])
        last = self.last(len(z), z.shape[1], z.device)
        for _, edit_at, heads in edits_at(self.edits, layer, Z_STAGES):
            prompt = _prompts(edit_at, len(z), z.device)
            at = Places.of([(0, heads)], torch.zeros_like(prompt), prompt, _end(edit_at, last))
            edit_at.edit.write_z(z, at, layer)
        return z

    def on_site(self, layer: int, site: Stage, x: Tensor) -> Tensor:
        """Return what is at a site with the edits there."""
        if layer not in self.sites:
            self.sites[layer] = SiteWriter(
                partial(self._edited_site, layer),
                lambda edited_site: bool(edits_at(self.edits, layer, (edited_site,))),
            )
        return self.sites[layer].write(site, x)

    def _edited_site(self, layer: int, site: Stage, x: Tensor) -> Tensor:
        """Write edits at a site in place."""
        for _, edit_at, heads in edits_at(self.edits, layer, (site,)):
            prompt = _prompts(edit_at, len(x), x.device)
            if edit_at.batch is not None and edit_at.edit.at_prompt_end:
                if self.n_cached >= edit_at.batch.tokens.shape[1]:
                    # The pass continues the prompts, which were edited.
                    check_no_ragged_generation(edit_at.batch)
                    continue
                if x.shape[1] < edit_at.batch.tokens.shape[1]:
                    raise InputError(
                        f"the forward pass must have shape {tuple(edit_at.batch.tokens.shape)} like "
                        f"batch, got {tuple(x.shape[:2])}; run the same batch"
                    )
            last = _end(edit_at, self.last(len(x), x.shape[1], x.device))
            at = Places.of([(0, heads)], torch.zeros_like(prompt), prompt, last)
            edit_at.edit.write_site(x, at, layer)
        return x

    def _attend(self, layer: int) -> None:
        """Compute the edited patterns and values of a layer, and forget those of earlier layers."""
        self.patterns.clear()
        self.at_other_queries.clear()
        values = self.values.pop(layer)
        check_no_cache(values)
        q = values.seen["q"]
        last = self.last(len(q), q.shape[1], q.device)
        edits = edits_at(self.edits, layer, ATTENTION_STAGES)
        prompts = [_prompts(edit_at, len(q), q.device) for _, edit_at, _ in edits]
        self.patterns[layer] = edited_attention(values, edits, last, prompts)
        is_of_all_queries = [edit_at.edit.positions != "last" for _, edit_at, _ in edits]
        if not all(is_of_all_queries):
            edits_of_all = list(compress(edits, is_of_all_queries))
            prompts_of_all = list(compress(prompts, is_of_all_queries))
            self.at_other_queries[layer] = None
            if edits_of_all:
                self.at_other_queries[layer] = edited_attention(
                    values, edits_of_all, last, prompts_of_all
                )

    def _is_last(self, x: Tensor) -> Tensor:
        """Return [batch query] which of the positions on the second axis are last queries."""
        last = self.last(len(x), x.shape[1], x.device)
        return torch.arange(x.shape[1], device=x.device) == last[:, None]


def _attended(z: Tensor, edited: tuple[list[int], Tensor, Tensor]) -> list[int]:
    """Write z [batch query head d_head] of edited heads, and return these heads."""
    heads, pattern, v = edited
    equation = "batch head query key, batch key head d_head -> batch query head d_head"
    z[:, :, heads] = einsum(pattern.to(z.dtype), v.to(z.dtype), equation)
    return heads


def _end(edit_at: EditAtLayers, last: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
    """Return each row's last position, or its prompt's for edits at the prompt's end."""
    if edit_at.batch is None or not edit_at.edit.at_prompt_end:
        return last
    return edit_at.batch.last.to(last.device).expand(len(last))


def _prompts(edit_at: EditAtLayers, n_rows: int, device: torch.device) -> Int[Tensor, " row"]:
    """Return the index of each row's prompt in the edit's batch.

    Raise InputError for another number of rows.
    """
    rows = torch.arange(n_rows, device=device)
    if edit_at.prompt is not None and len(edit_at.prompt) == n_rows:
        return edit_at.prompt.to(device)
    if edit_at.batch is None or len(edit_at.batch) == n_rows:
        return rows
    if len(edit_at.batch) > 1:
        raise InputError(
            f"the forward pass must have {len(edit_at.batch)} rows like batch, got {n_rows}; run "
            "the same batch"
        )
    return torch.zeros_like(rows)


@contextmanager
def editing(view: ModelView, *edits: EditAtLayers) -> Iterator[None]:
    """Activate edits inside the `with` block, in addition to other active ones.

    Blocks may end in any order. Raise InputError if another thread has such a block open or runs
    the model inside this one.
    """
    with model_lock(view.model, block=True), independent_rows(view.model):
        editor = OPEN_EDITS.get(view.model)
        if editor is None:
            editor = OPEN_EDITS[view.model] = Editor(view)
            module = getattr(view.model, "original_model", view.model)
            editor.start_handle = module.register_forward_pre_hook(
                lambda _, args, kwargs: editor.start(args, kwargs), with_kwargs=True
            )
        assert isinstance(editor, Editor)
        try:
            for edit in edits:
                editor.enter(edit)
            yield
        finally:
            for edit in edits:
                editor.leave(edit)
            if not editor.edits and OPEN_EDITS.get(view.model) is editor:
                del OPEN_EDITS[view.model]
                editor.start_handle.remove()


def pass_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tokens among the arguments of a pass; None if there are only embeddings."""
    # Other arguments by name may hold integers too, such as an attention mask beside embeddings.
    for argument in (kwargs.get("input_ids"), kwargs.get("input"), *args):
        is_tensor = isinstance(argument, Tensor)
        if is_tensor and argument.ndim == 2 and argument.dtype in (torch.int64, torch.int32):
            return argument
    return None


def cached_length(kwargs: dict[str, Any]) -> int:
    """Return the number of tokens in the KV cache that a pass continues; 0 without a cache."""
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
    length = getattr(cache, "get_seq_length", None)
    return int(length()) if length is not None else 0


def check_same_prompts(batch: PromptBatch, tokens: Tensor) -> None:
    """Raise InputError if a row of a pass does not begin with its prompt, or continues padding."""
    rows, width = tokens.shape
    if len(batch) not in (1, rows) or width < batch.tokens.shape[1]:
        return  # shapes differ: the edit raises its own error
    if width > batch.tokens.shape[1]:
        check_no_ragged_generation(batch)
    real = batch.attention_mask.bool().to(tokens.device).expand(rows, -1)
    is_different = tokens[:, : real.shape[1]] != batch.tokens.to(tokens.device)
    differs = (is_different & real).any(-1)
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise InputError(
            "the forward pass must run the batch that the `with` block was created for; "
            f"row {row} is a different prompt"
        )


def check_no_ragged_generation(batch: PromptBatch) -> None:
    """Raise InputError if prompts have several lengths, so that generated tokens follow padding."""
    if bool((batch.last != batch.last[0]).any()):
        raise InputError(
            "prompts must have the same length for tokens to follow them, got "
            f"{int(batch.last.min()) + 1} to {int(batch.last.max()) + 1} tokens; generate for one "
            "prompt at a time"
        )


def _hook_names(view: ModelView, edit_at: EditAtLayers) -> dict[str, tuple[int | None, str]]:
    """Return hook name -> (layer, activation); layer None for positions, which serve all layers."""
    names: dict[str, tuple[int | None, str]] = {}
    stages = edit_at.edit.stages
    for layer in edit_at.heads:
        if {*stages} & {*ATTENTION_STAGES}:
            for name, hook in layer_hooks(view, layer).items():
                names[hook] = (None if name == "position" else layer, name)
        if {*stages} & {*SITE_STAGES}:
            for name, site in site_hooks(view, layer, stages).items():
                names[name] = (layer, site.name)
        if {*stages} - {*SITE_STAGES}:
            names[view.hook(layer, "attn.hook_z")] = (layer, "z")
    return names


def _layers_with_edited_attention(edits: Iterable[EditAtLayers]) -> set[int]:
    layers: set[int] = set()
    for edit_at in edits:
        if {*edit_at.edit.stages} & {*ATTENTION_STAGES}:
            layers |= edit_at.heads.keys()
    return layers


def _hook_fn(editor: Editor, layer: int | None, name: str) -> Callable[..., Tensor | None]:
    def hook_fn(value: Tensor, hook: Any) -> Tensor | None:
        if are_edits_disabled(editor.view):
            return None
        if layer is None:
            for layer_with_edits in _layers_with_edited_attention(editor.edits):
                editor.record(layer_with_edits, name, value)
            return None
        if name == "pattern":
            return editor.on_pattern(layer, value)
        if name == "z":
            return editor.on_z(layer, value)
        # One hook serves edits at a layer's input and edits of attention, which record it.
        is_input = name in ("resid", Stage.resid_pre.name)
        if is_input or name in Stage.__members__:
            site = Stage.resid_pre if is_input else Stage[name]
            value = editor.on_site(layer, site, value)
            if is_input and edits_at(editor.edits, layer, ATTENTION_STAGES):
                editor.record(layer, "resid", value)
            return value
        editor.record(layer, name, value)
        return None

    return hook_fn
