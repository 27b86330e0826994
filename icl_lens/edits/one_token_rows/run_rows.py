"""Run sets of edits as single-token rows that share each prompt's cached keys and values.

1. Every prompt has an unedited row 0 and one row per set of edits. Sets share a row until their
   edits differ; a row starts at the layer of its first edit, as a copy of the last position's
   residual stream there.
2. Blocks run with all rows as one batch: all modules are the model's own but attention, which
   `layer_attention` computes, and hooks write the edits.
3. In every layer, row 0 is compared with the pass that filled the cache, and then reset to it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.edit import (
    ATTENTION_STAGES,
    SITE_STAGES,
    Z_STAGES,
    Edit,
    EditAtLayers,
    Places,
    Stage,
    edits_at,
    writes_at,
)
from icl_lens.edits.edited_attention import edited_attention
from icl_lens.edits.one_token_rows.layer_attention import LayerRows, per_kv_head
from icl_lens.edits.one_token_rows.prefix_cache import PrefixCache, PrefixCacheUnsupported
from icl_lens.edits.recomputed_patterns import LayerValues, recording_hooks
from icl_lens.edits.site_hooks import SiteWriter
from icl_lens.models.view import ModelView
from icl_lens.reading.layer_inputs import replace_residual


class RowEdits:
    """Sets of edits at the last position; each set is one single-token row per prompt."""

    def __init__(self, view: ModelView, sets: Sequence[Sequence[EditAtLayers]]) -> None:
        self.sets = sets
        self.marks = torch.zeros(len(sets), view.n_layers, dtype=torch.long)
        """[set layer] what each set edits, as a number; 0 for nothing.

        Sets share a row until their marks differ.
        """
        known: dict[object, int] = {}
        for number, edits in enumerate(sets):
            by_layer: dict[int, list[tuple[object, ...]]] = {}
            for edit_at in edits:
                for layer, heads in edit_at.heads.items():
                    edited = type(edit_at.edit), edit_at.edit.write_key, *heads
                    by_layer.setdefault(layer, []).append(edited)
            for layer in sorted(by_layer):
                key = layer, tuple(by_layer[layer])
                self.marks[number, layer] = known.setdefault(key, len(known) + 1)

    def write_z(
        self,
        layer: int,
        sets: Sequence[int],
        z: Float[Tensor, "row 1 head d_head"],
        rows: LayerRows,
    ) -> None:
        """Write z of rows in place; each prompt has an unedited row and one per entry of `sets`."""
        by_prompt = z[:, 0].unflatten(0, (len(rows.prompt), -1))  # a view
        edits_of_rows = [self.sets[number] for number in sets]
        together: dict[type[Edit], list[tuple[int, Edit, list[int]]]] = {}
        # A row has one query, whose index is 0.
        last = torch.zeros(len(by_prompt), dtype=torch.long, device=z.device)
        for row, edit_set in enumerate(edits_of_rows, start=1):
            edits = edits_at(edit_set, layer, ATTENTION_STAGES)
            if len(edits) == 1 and type(edits[0][1].edit).write_rows is not None:
                _, edit_at, heads = edits[0]
                together.setdefault(type(edit_at.edit), []).append((row, edit_at.edit, heads))
            elif edits:
                prompts = [rows.prompt] * len(edits)
                heads, pattern, v = edited_attention(rows.values(row), edits, last, prompts)
                by_prompt[:, row, heads] = torch.einsum(
                    "bhqk,bkhd->bhd", pattern.to(z.dtype), v.to(z.dtype)
                )
        for kind, members in together.items():
            assert kind.write_rows is not None
            kind.write_rows(by_prompt, members, layer, rows)
        for edit, members in writes_at(edits_of_rows, layer, Z_STAGES):
            edit.write_z(z, self._places(members, sets, rows.prompt.to(z.device)), layer)

    def write_site(
        self,
        layer: int,
        site: Stage,
        sets: Sequence[int],
        x: Float[Tensor, "row 1 width"],
        prompt: Int[Tensor, " batch"],
    ) -> None:
        """Write what rows have at a site of a layer in place."""
        edits_of_rows = [self.sets[number] for number in sets]
        for edit, members in writes_at(edits_of_rows, layer, (site,)):
            edit.write_site(x, self._places(members, sets, prompt.to(x.device)), layer)

    def sites(self, layer: int) -> set[Stage]:
        """Return the sites of a layer at which edits write."""
        sites: set[Stage] = set()
        for edits in self.sets:
            sites |= {stage for stage, _, _ in edits_at(edits, layer, SITE_STAGES)}
        return sites

    def _places(self, members: Any, sets: Sequence[int], prompt: Int[Tensor, " batch"]) -> Places:
        # The number of the unedited row is -1.
        numbers = torch.arange(-1, len(sets), device=prompt.device).repeat(len(prompt))
        prompts = prompt.repeat_interleave(1 + len(sets))
        return Places.of(members, numbers, prompts, torch.zeros_like(prompts))


@dataclass(frozen=True)
class _Branches:
    """Rows of one layer: row 0 has no edits; others have those of some sets up to this layer."""

    parents: list[int]
    """For each row, its row in the layer before."""
    example: list[int]
    """For each row after row 0, one of its sets."""
    row_of: list[int]
    """For each set, its row."""


def _branches(marks: Int[Tensor, "set layer"]) -> Iterator[_Branches]:
    """Yield the rows of each layer: sets share a row until their marks differ."""
    marks = torch.cat([torch.zeros_like(marks[:1]), marks])
    row_of = torch.zeros(len(marks), dtype=torch.long)
    for layer in range(marks.shape[1]):
        # Sorted, so that the row without edits is the first.
        parent_and_mark = torch.stack([row_of, marks[:, layer]], dim=1)
        rows, row_of = parent_and_mark.unique(dim=0, return_inverse=True)
        example = torch.zeros(len(rows), dtype=torch.long)
        example = example.scatter(0, row_of, torch.arange(len(marks)))
        yield _Branches(rows[:, 0].tolist(), (example[1:] - 1).tolist(), row_of[1:].tolist())


def run_rows(
    cache: PrefixCache, edits: RowEdits, sets: range, prompts: Sequence[int]
) -> tuple[Float[Tensor, "batch row d_vocab"], list[int]]:
    """Return logits of rows with the edits of `sets`, and the row of each set; row 0 is unedited.

    `prompts` are the indices of the cached prompts in the batch to which the edits belong. With the
    cache's `columns`, the logits are those of its tokens. Blocks before the first edit are not run.
    Raise PrefixCacheUnsupported if row 0 does not match the model's pass.
    """
    view, n = cache.view, len(cache.batch)
    marks = edits.marks[sets.start : sets.stop]
    edited = marks.any(0).nonzero().flatten().tolist()
    first = edited[0] if edited else view.n_layers - 1
    tree = list(_branches(marks))
    rows = _Rows(cache, edits, torch.tensor(prompts), sets.start, tree, frozenset(edited))
    layers = range(first, view.n_layers)
    token = cache.batch.tokens[:1, int(cache.batch.last[0])][:, None]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        kwargs = stack.enter_context(view.inference_pass())
        stack.enter_context(cache.inputs.resumed_at(first, cache.inputs.resid[first][:, None]))
        stack.enter_context(view.model.hooks(fwd_hooks=rows.hooks(layers)))
        for layer in layers:
            join = partial(rows.join, layer)
            handle = view.model.blocks[layer].register_forward_pre_hook(join, with_kwargs=True)
            stack.callback(handle.remove)
        logits = view.model(token, return_type="logits", **kwargs)
    if cache.columns is not None:
        (logits,) = rows.of_columns
    if logits.shape[:2] != (n * len(rows.tree[-1].parents), 1):
        raise PrefixCacheUnsupported(
            "the model's passes do not keep one row per row of the residual stream"
        )
    return logits[:, 0].unflatten(0, (n, -1)), rows.tree[-1].row_of


@dataclass(frozen=True, repr=False)
class _Rows:
    """The rows of one pass, and the hooks through which they run.

    They have no `repr`, by which TransformerLens names hooks, because it would print all tensors.
    """

    cache: PrefixCache
    edits: RowEdits
    prompts: Int[Tensor, " batch"]
    first_set: int
    tree: list[_Branches]
    """The rows of each layer."""
    edited: frozenset[int]
    """The layers with edits."""
    values: dict[int, LayerValues] = field(default_factory=dict)
    """Layer -> the rows' queries, keys and values."""
    resid: dict[int, Float[Tensor, "batch row d_model"]] = field(default_factory=dict)
    """Edited layer -> the rows' input, until its attention has read it."""
    of_columns: list[Tensor] = field(default_factory=list)
    """The rows' logits of the cache's `columns`."""

    def hooks(self, layers: range) -> list[tuple[str, Any]]:
        """Return the hooks of these layers and of the unembedding."""
        view = self.cache.view
        hooks: list[tuple[str, Any]] = []
        for layer in layers:
            self.values[layer] = LayerValues(view, layer)
            hooks += recording_hooks(self.values[layer], "q", "k", "v")
            hooks.append((view.hook(layer, "attn.hook_z"), partial(self.attend, layer)))
            if layer in self.edited and (sites := self.edits.sites(layer)):
                writer = SiteWriter(partial(self.write_site, layer), sites.__contains__)
                hooks += writer.hooks(view, layer, sites)
        if self.cache.columns is not None:
            hooks.append((view.last_logits_hook, self.read_columns))
        return hooks

    def sets(self, layer: int) -> list[int]:
        """Return the number of a set of each row of a layer, without row 0."""
        return [self.first_set + number for number in self.tree[layer].example]

    def join(self, layer: int, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Reset row 0 of a block's input to the model's own stream, and add the layer's rows."""
        parents = self.tree[layer].parents
        n = len(self.cache.batch)

        def joined(x: Float[Tensor, "row 1 d_model"]) -> Tensor:
            x = x[:, 0].unflatten(0, (n, -1))
            clean = self.cache.inputs.resid[layer].to(x.device)
            self.cache.check("the residual stream of single-token rows", layer, x[:, 0], clean)
            x = x.clone() if parents == list(range(x.shape[1])) else x[:, parents]
            x[:, [row for row, parent in enumerate(parents) if not parent]] = clean[:, None]
            if layer in self.edited:
                self.resid[layer] = x.clone()  # because blocks of some families add to it in place
            return x.flatten(0, 1)[:, None]

        args, kwargs = replace_residual(args, kwargs, joined)
        if isinstance(alibi := kwargs.get("alibi"), Tensor):
            # Bloom, Falcon: built for the model's single input row; only its shape matters here.
            repeats = n * len(parents), *[1] * (alibi.ndim - 1)
            kwargs = {**kwargs, "alibi": alibi[: self.cache.view.n_heads].repeat(repeats)}
        return args, kwargs

    def attend(self, layer: int, z: Tensor, hook: Any) -> Float[Tensor, "row 1 head d_head"]:
        """Return the rows' z from cached and their own keys and values, with the layer's edits."""
        seen, keys = self.values[layer].seen, self.cache.keys[layer]
        n, n_kv_heads = len(self.cache.batch), self.cache.view.n_kv_heads
        q, k, v = (seen[name][:, 0].unflatten(0, (n, -1)) for name in "qkv")
        seen.clear()
        ours = keys.attend(q, per_kv_head(k, n_kv_heads), per_kv_head(v, n_kv_heads)).to(z)
        self.cache.check("attention over cached keys", layer, ours[:, 0], self.cache.z[layer])
        flat = ours.flatten(0, 1)[:, None]
        if layer in self.edited:
            rows = LayerRows(keys, q, k, v, self.resid.pop(layer), self.prompts)
            self.edits.write_z(layer, self.sets(layer), flat, rows)
        return flat

    def write_site(self, layer: int, site: Stage, x: Tensor) -> Float[Tensor, "row 1 width"]:
        """Write what rows have at a site of a layer in place."""
        self.edits.write_site(layer, site, self.sets(layer), x, self.prompts)
        if site == Stage.resid_pre and layer in self.resid:
            self.resid[layer] = x[:, 0].unflatten(0, self.resid[layer].shape[:2]).clone()
        return x

    def read_columns(self, x: Tensor, hook: Any) -> Tensor:
        """Keep the logits of the cache's columns; the model's own logits are not used."""
        assert self.cache.columns is not None
        self.of_columns.append(self.cache.columns.unembed(x[:, :1]))
        return x[:1]
