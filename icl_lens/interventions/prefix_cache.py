"""Edit heads at the last position only, in single-token rows that share each prompt's cached keys and values.

An edit at the last position does not change earlier positions. So one pass over the prompts caches each layer's keys
and values, and edits then run as single-token rows in one batch. A row starts at the layer of its first edit, as a copy
of the last position's residual stream there, and continues through the later layers. `kv_cache` computes the attention
of rows; all other modules are the model's own. The unedited row of every pass is compared with the pass that filled the
cache. PrefixCacheUnsupported is raised if they differ, as in families with another kind of attention, or if the model
already has hooks or edits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.activations import last_logits
from icl_lens.interventions.edit_checks import PATTERN_TOLERANCE
from icl_lens.interventions.editor import ATTENTION_STAGES, Z_STAGES, Edit, edited_attention, edits_at
from icl_lens.interventions.kv_cache import LayerKVCache, per_kv_head
from icl_lens.interventions.partial_forward import BlockInputs, Replacement, has_active_hooks, replace_residual
from icl_lens.interventions.pattern import LayerValues, recording_hooks
from icl_lens.models.inference import log_probs_of
from icl_lens.models.locking import model_lock
from icl_lens.models.memory import KEY_BYTES, ROW_BYTES
from icl_lens.models.readout import Readout
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


class PrefixCacheUnsupported(Exception):
    """Raised when the prefix cache cannot reproduce a full forward pass; the message is the reason."""


LayerTensors = Mapping[int, Tensor]
"""Layer -> one tensor."""


@dataclass(frozen=True)
class LayerRows:
    """One layer's single-token rows before attention, and the keys and values that they share."""

    cache: LayerKVCache
    q: Float[Tensor, "batch row head d_head"]
    """Before rotation, like `k`."""
    k: Float[Tensor, "batch row kv_head d_head"]
    v: Float[Tensor, "batch row kv_head d_head"]
    resid: Float[Tensor, "batch row d_model"]

    def values(self, row: int) -> LayerValues:
        """Return the layer's activations with a row's at the last position."""
        return self.cache.with_row(self.q[:, row], self.k[:, row], self.v[:, row], self.resid[:, row])


TokenTensors = tuple[Int[Tensor, "batch token"], LayerTensors]
"""Positions of some tokens, -1 for none, and layer -> their keys or values [batch token kv_head d_head]."""


@dataclass(frozen=True)
class Exchange:
    """What heads use at the last position instead of their own query, or keys and values at some tokens.

    `q` is layer -> [batch head d_head]; `q` and `k` are before rotation. None keeps the heads' own.
    """

    heads: Mapping[int, Sequence[int]]
    """Layer -> heads."""
    q: LayerTensors | None = None
    k: TokenTensors | None = None
    v: TokenTensors | None = None


@dataclass(frozen=True)
class RowEdits:
    """Edits at the last position; each set of them is one single-token row per prompt.

    The functions get the layer, the set of each row after the unedited row 0, and what they edit in place; `edit_z`
    also gets the rows before attention.
    """

    marks: Int[Tensor, "set layer mark"]
    """Identifiers of each set's edits by layer, 0 for none; sets share a row until their marks differ."""
    edit_z: Callable[[int, list[int], Float[Tensor, "batch row head d_head"], LayerRows], None] | None = None
    edit_resid: Callable[[int, list[int], Float[Tensor, "batch row d_model"]], None] | None = None
    """Edits the residual stream after a layer."""

    @classmethod
    def ablating(cls, removed: Bool[Tensor, "set layer head"], replacement: Replacement = None) -> "RowEdits":
        """Return edits that set the z of each set's heads to zero or to `replacement`."""

        def edit_z(layer: int, sets: list[int], z: Tensor, rows: LayerRows) -> None:
            where, heads = (index.to(z.device) for index in removed[sets, layer].nonzero(as_tuple=True))
            z[:, 1 + where, heads] = 0.0 if replacement is None else replacement[layer].to(z)[heads]

        return cls(removed.long(), edit_z)

    @classmethod
    def applying(cls, view: ModelView, edit_sets: Sequence[Sequence[Edit]]) -> "RowEdits":
        """Return row edits that apply sets of `Edit`s, which must fit rows with a single query."""
        marks = torch.zeros(len(edit_sets), view.n_layers, 1, dtype=torch.long)
        layers = [{layer for edit in edits for layer in edit.heads} for edits in edit_sets]
        for index, edited in enumerate(layers):
            marks[index, list(edited)] = 1 + index

        def edit_z(layer: int, sets: list[int], z: Tensor, rows: LayerRows) -> None:
            last = torch.zeros(len(z), dtype=torch.long, device=z.device)  # the index of a row's only query
            for row, index in enumerate(sets, start=1):
                if layer not in layers[index]:
                    continue
                if edits := edits_at(edit_sets[index], layer, ATTENTION_STAGES):
                    chosen, pattern, v = edited_attention(rows.values(row), edits, last)
                    z[:, row, chosen] = torch.einsum("bhqk,bkhd->bhd", pattern.to(z.dtype), v.to(z.dtype))
                for edit, heads in edits_at(edit_sets[index], layer, Z_STAGES):
                    edit.apply(z[:, row, None], heads, layer, last)

        return cls(marks, edit_z)

    @classmethod
    def exchanging(cls, view: ModelView, exchanges: Sequence[Exchange]) -> "RowEdits":
        """Return row edits that make exchanges, one per set.

        All rows in which a head has the same keys and values, which must be the same objects, attend together.
        """
        marks = torch.zeros(len(exchanges), view.n_layers, 1, dtype=torch.long)
        for index, one in enumerate(exchanges):
            marks[index, list(one.heads)] = 1 + index

        def edit_z(layer: int, sets: list[int], z: Tensor, rows: LayerRows) -> None:
            groups: dict[tuple[int, int, int], list[tuple[int, Exchange]]] = {}
            for row, index in enumerate(sets, start=1):
                one = exchanges[index]
                for head in one.heads.get(layer, ()):
                    groups.setdefault((head, id(one.k), id(one.v)), []).append((row, one))
            for (head, _, _), members in groups.items():
                group = view.kv_head(head)
                first = members[0][1]
                cache = rows.cache.of_head(head, view.n_heads)
                for name, tokens in (("k", first.k), ("v", first.v)):
                    if tokens is not None:
                        positions, by_layer = tokens
                        replaced = by_layer[layer][:, :, group, None].to(z.device)
                        cache = cache.with_tokens(positions.to(z.device), **{name: replaced})
                own = [row for row, _ in members]
                q = rows.q[:, own, head].clone()
                for place, (_, one) in enumerate(members):
                    if one.q is not None:
                        q[:, place] = one.q[layer][:, head].to(q)
                key, value = (per_kv_head(x, view.n_kv_heads)[:, own, group, None] for x in (rows.k, rows.v))
                z[:, own, head] = cache.attend(q[:, :, None], key, value)[:, :, 0].to(z)

        return cls(marks, edit_z)


@dataclass(frozen=True)
class PrefixCache:
    """Cached keys and values of prompts, for single-token rows with edits at the last position."""

    view: ModelView
    batch: PromptBatch
    log_probs: Float[Tensor, "batch d_vocab"]
    """Log-probabilities of the unedited model, nats."""
    keys: dict[int, LayerKVCache]
    """Layer -> keys and values."""
    inputs: BlockInputs
    """Each layer's input at the last position."""
    z: dict[int, Float[Tensor, "batch head d_head"]]
    """Layer -> the unedited model's z at the last position."""
    columns: Readout | None = None
    """The unembedding of the tokens to which `run` restricts logits; None for the whole vocabulary."""

    @classmethod
    def of(
        cls,
        view: ModelView,
        batch: PromptBatch,
        *,
        attention: bool = False,
        tokens: Int[Tensor, " token"] | None = None,
        past: Any = None,
    ) -> "PrefixCache":
        """Run one pass over the batch and record what rows need, including edits of attention if `attention`.

        With `tokens`, `run` computes logits of these tokens only, if they can be computed from the unembedding. The
        pass also fills `past`, an empty cache of Hugging Face.
        """
        if has_active_hooks(view):
            raise PrefixCacheUnsupported("other hooks or interventions are active on the model")
        values = {layer: LayerValues(view, layer) for layer in range(view.n_layers)}
        keys, z, inputs = {}, {}, BlockInputs(view)
        unembedded: list[Tensor] = []

        def at_last(x: Tensor) -> Tensor:
            return x.detach()[torch.arange(len(x), device=x.device), batch.last.to(x.device)].clone()

        def keep(layer: int) -> Any:
            def hook_fn(value: Tensor, hook: Any) -> None:
                keys[layer] = LayerKVCache.of(values[layer], batch, editable=attention)
                values[layer].seen.clear()
                z[layer] = at_last(value)

            return hook_fn

        hooks: list[tuple[str, Any]] = []
        names = ("q", "k", "v", "cos", "sin", *(("position", "resid") if attention else ()))
        for layer in values:
            hooks += recording_hooks(values[layer], *names)
            hooks.append((view.hook(layer, "attn.hook_z"), keep(layer)))
        if tokens is not None:
            hooks.append((view.last_logits_hook, lambda x, hook: unembedded.append(at_last(x))))
        with model_lock(view.model), inputs.recorded(values, at_last), view.model.hooks(fwd_hooks=hooks):
            logits = last_logits(view.model, batch, past=past)
        log_probs = log_probs_of(logits)
        columns = None if tokens is None else _columns(view, tokens, unembedded[0], log_probs)
        return cls(view, batch, log_probs, keys, inputs, z, columns)

    def select(self, prompts: Sequence[int]) -> "PrefixCache":
        """Return the cache of some of the prompts, for edits that do not change attention."""
        rows = list(prompts)
        return PrefixCache(
            self.view,
            self.batch[rows],
            self.log_probs[rows],
            {layer: cache.select(rows) for layer, cache in self.keys.items()},
            replace(self.inputs, resid={layer: x[rows] for layer, x in self.inputs.resid.items()}),
            {layer: x[rows] for layer, x in self.z.items()},
            self.columns,
        )

    def run(self, edits: RowEdits, sets: range) -> tuple[Float[Tensor, "batch row d_vocab"], list[int]]:
        """Return logits of an unedited row 0 and of rows with the edits of `sets`, and the row of each set.

        With `columns`, these are the logits of its tokens. Blocks before the first edit are not run. Raise
        PrefixCacheUnsupported if row 0 does not match the model's pass.
        """
        view, n = self.view, len(self.batch)
        marks = edits.marks[sets.start : sets.stop]
        edited = marks.any(2).any(0).nonzero().flatten().tolist()
        first = edited[0] if edited else view.n_layers - 1
        tree = list(_branches(marks))
        sets_of_rows = [[sets.start + index for index in one.example] for one in tree]
        resid: dict[int, Tensor] = {}

        def join(layer: int) -> Any:
            """Return a hook that resets row 0 to the model's own residual stream and adds the layer's new rows."""

            def joined(x: Float[Tensor, "row 1 d_model"]) -> Tensor:
                x = x[:, 0].unflatten(0, (n, -1))
                clean = self.inputs.resid[layer].to(x.device)
                self._check("the residual stream of single-token rows", layer, x[:, 0], clean)
                parents = tree[layer].parents
                x = x.clone() if parents == list(range(x.shape[1])) else x[:, parents]
                x[:, [row for row, parent in enumerate(parents) if not parent]] = clean[:, None]
                if layer in edited:
                    resid[layer] = x.clone()  # because blocks of some families add to it in place
                return x.flatten(0, 1)[:, None]

            def hook_fn(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
                args, kwargs = replace_residual(args, kwargs, joined)
                if isinstance(alibi := kwargs.get("alibi"), Tensor):
                    # Bloom, Falcon: built for the model's single input row; only its shape matters here.
                    many = alibi[: view.n_heads].repeat(n * len(tree[layer].parents), *[1] * (alibi.ndim - 1))
                    kwargs = {**kwargs, "alibi": many}
                return args, kwargs

            return hook_fn

        values = {layer: LayerValues(view, layer) for layer in range(first, view.n_layers)}

        def attend(layer: int) -> Any:
            def hook_fn(z: Tensor, hook: Any) -> Tensor:
                q, k, v = (values[layer].seen[name][:, 0].unflatten(0, (n, -1)) for name in "qkv")
                values[layer].seen.clear()
                cache = self.keys[layer]
                shared_k, shared_v = (per_kv_head(one, view.n_kv_heads) for one in (k, v))
                ours = cache.attend(q, shared_k, shared_v).to(z)
                self._check("attention over cached keys", layer, ours[:, 0], self.z[layer])
                if edits.edit_z is not None and layer in edited:
                    edits.edit_z(layer, sets_of_rows[layer], ours, LayerRows(cache, q, k, v, resid.pop(layer)))
                return ours.flatten(0, 1)[:, None]

            return hook_fn

        def write(layer: int) -> Any:
            def hook_fn(x: Tensor, hook: Any) -> Tensor:
                x = x.clone()
                assert edits.edit_resid is not None
                edits.edit_resid(layer, sets_of_rows[layer], x[:, 0].unflatten(0, (n, -1)))  # a view: written in place
                return x

            return hook_fn

        hooks: list[tuple[str, Any]] = []
        for layer in values:
            hooks += recording_hooks(values[layer], "q", "k", "v")
            hooks.append((view.hook(layer, "attn.hook_z"), attend(layer)))
            if edits.edit_resid is not None:
                hooks.append((view.hook(layer, "hook_resid_post"), write(layer)))
        found: list[Tensor] = []

        def read_columns(x: Tensor, hook: Any) -> Tensor:
            assert self.columns is not None
            found.append(self.columns.unembed(x[:, :1]))
            return x[:1]  # the model's own logits are not used

        if self.columns is not None:
            hooks.append((view.last_logits_hook, read_columns))
        token = self.batch.tokens[:1, int(self.batch.last[0])][:, None]
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            kwargs = stack.enter_context(view.inference_pass())
            stack.enter_context(self.inputs.resumed_at(first, self.inputs.resid[first][:, None]))
            stack.enter_context(view.model.hooks(fwd_hooks=hooks))
            for layer in values:
                handle = view.model.blocks[layer].register_forward_pre_hook(join(layer), with_kwargs=True)
                stack.callback(handle.remove)
            found.append(view.model(token, return_type="logits", **kwargs))
        logits = found[0]
        if logits.shape[:2] != (n * len(tree[-1].parents), 1):
            raise PrefixCacheUnsupported("the model's passes do not keep one row per row of the residual stream")
        return logits[:, 0].unflatten(0, (n, -1)), tree[-1].row_of

    def _check(self, what: str, layer: int, ours: Tensor, theirs: Tensor) -> None:
        """Raise PrefixCacheUnsupported if the unedited row (`ours`) differs from the model's last position."""
        ours, theirs = ours.float(), theirs.float().to(ours.device)
        error = float((ours - theirs).abs().max() / (theirs.abs().max() + 1e-30))
        if not error <= PATTERN_TOLERANCE.get(self.view.model.W_U.dtype, 1e-4):
            raise PrefixCacheUnsupported(
                f"{what} differs from the model's in layer {layer} of {self.view.architecture} (relative error "
                f"{error:.1e})"
            )


def _columns(
    view: ModelView,
    tokens: Int[Tensor, " token"],
    x: Float[Tensor, "batch d_model"],
    log_probs: Float[Tensor, "batch d_vocab"],
) -> Readout | None:
    """Return the unembedding of some tokens; None if it does not give the model's own logits, up to a constant."""
    readout = view.readout(x)
    if x.shape[-1] != readout.W_U.shape[0]:
        return None
    columns = readout.select_tokens(tokens.to(readout.W_U.device))
    ours, theirs = (torch.log_softmax(y.float(), dim=-1) for y in (columns.unembed(x), log_probs[:, tokens]))
    close = float((ours - theirs.to(ours.device)).abs().max()) <= PATTERN_TOLERANCE.get(view.model.W_U.dtype, 1e-4)
    return columns if close else None


@dataclass(frozen=True)
class _Branches:
    """Rows of one layer: row 0 has no edits, every other row has the edits of some sets up to this layer."""

    parents: list[int]
    """For each row, its row in the layer before."""
    example: list[int]
    """For each row after row 0, one of its sets."""
    row_of: list[int]
    """For each set, its row."""


def _branches(marks: Int[Tensor, "set layer mark"]) -> Iterator[_Branches]:
    """Yield the rows of each layer: sets share a row until their marks differ."""
    marks = torch.cat([torch.zeros_like(marks[:1]), marks])
    row_of = torch.zeros(len(marks), dtype=torch.long)
    for layer in range(marks.shape[1]):
        # Sorted, so that the row without edits is the first.
        rows, row_of = torch.cat([row_of[:, None], marks[:, layer]], dim=1).unique(dim=0, return_inverse=True)
        example = torch.zeros(len(rows), dtype=torch.long).scatter(0, row_of, torch.arange(len(marks)))
        yield _Branches(rows[:, 0].tolist(), (example[1:] - 1).tolist(), row_of[1:].tolist())


def max_prompts(
    view: ModelView, batch: PromptBatch, *, pass_tokens: int, n_rows: int, attention: bool, n_logits: int | None = None
) -> int:
    """Return how many prompts, with `n_rows` rows each, fit `KEY_BYTES`, `max_rows` and `pass_tokens`; at least one."""
    width, size = batch.tokens.shape[1], 4 if view.compute_dtype == torch.float32 else 8
    keys = (5 if attention else 2) * view.n_layers * view.n_kv_heads * view.d_head * width * size
    return max(1, min(KEY_BYTES // keys, max_rows(view, n_logits) // (1 + n_rows), pass_tokens // width))


def max_rows(view: ModelView, n_logits: int | None = None) -> int:
    """Return the number of rows that fit `ROW_BYTES`; at least one per head of a layer and the unedited row.

    `n_logits` is the number of logits per row, by default those of the whole vocabulary.
    """
    size = 4 if view.compute_dtype == torch.float32 else 8
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * view.d_model)
    return max(1 + view.n_heads, ROW_BYTES // (size * max(n_logits or view.model.W_U.shape[1], 3 * d_mlp)))
