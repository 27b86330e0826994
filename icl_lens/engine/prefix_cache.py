"""Edit heads at the last position only, in single-token rows that share each prompt's cached keys and values.

An edit at the last position does not change earlier positions. So one pass over the prompts caches each layer's keys
and values, and edits then run as single-token rows in one batch. A row starts at the layer of its first edit, as a copy
of the last position's residual stream there, and continues through the later layers. `kv_cache` computes the attention
of rows; all other modules are the model's own. The unedited row of every pass is compared with the pass that filled the
cache. PrefixCacheUnsupported is raised if they differ, as in families with another kind of attention, or if the model
already has hooks or edits.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.passes import last_logits
from icl_lens.edits.edit import (
    ATTENTION_STAGES,
    Z_STAGES,
    Edit,
    Placed,
    Places,
    Stage,
    edited_attention,
    edits_at,
    writes_at,
)
from icl_lens.edits.kv_cache import LayerKVCache, LayerRows, per_kv_head
from icl_lens.edits.pattern import LayerValues, recording_hooks
from icl_lens.engine.edit_checks import PATTERN_TOLERANCE
from icl_lens.engine.restart import BlockInputs, replace_residual
from icl_lens.models.inference import log_probs_of
from icl_lens.models.locking import model_lock
from icl_lens.models.memory import KEY_BYTES, ROW_BYTES
from icl_lens.models.readout import Readout
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


class PrefixCacheUnsupported(Exception):
    """Raised when the prefix cache cannot reproduce a full forward pass; the message is the reason."""


class RowEdits:
    """Sets of edits at the last position; each set is one single-token row per prompt."""

    def __init__(self, view: ModelView, sets: Sequence[Sequence[Placed]]) -> None:
        self.sets = sets
        self.marks = torch.zeros(len(sets), view.n_layers, dtype=torch.long)
        """[set layer] identifiers of what each set edits, 0 for nothing; sets share a row until their marks differ."""
        known: dict[object, int] = {}
        for number, placed in enumerate(sets):
            for layer in {layer for one in placed for layer in one.heads}:
                edits = [one for one in placed if layer in one.heads]
                key = layer, tuple((type(one.edit), one.edit.shared, *one.heads[layer]) for one in edits)
                self.marks[number, layer] = known.setdefault(key, len(known) + 1)

    def write_z(self, layer: int, sets: Sequence[int], z: Float[Tensor, "row 1 head d_head"], rows: LayerRows) -> None:
        """Write z of rows in place: of each prompt, an unedited row and one per entry of `sets`."""
        by_prompt = z[:, 0].unflatten(0, (len(rows.prompt), -1))  # a view
        chosen = [self.sets[one] for one in sets]
        together: dict[type[Edit], list[tuple[int, Edit, list[int]]]] = {}
        for row, placed in enumerate(chosen, start=1):
            edits = edits_at(placed, layer, ATTENTION_STAGES)
            if len(edits) == 1 and type(edits[0][1].edit).write_rows is not None:
                _, one, heads = edits[0]
                together.setdefault(type(one.edit), []).append((row, one.edit, heads))
            elif edits:
                only = torch.zeros(len(by_prompt), dtype=torch.long, device=z.device)  # index of a row's only query
                heads, pattern, v = edited_attention(rows.values(row), edits, only, [rows.prompt] * len(edits))
                by_prompt[:, row, heads] = torch.einsum("bhqk,bkhd->bhd", pattern.to(z.dtype), v.to(z.dtype))
        for kind, members in together.items():
            assert kind.write_rows is not None
            kind.write_rows(by_prompt, members, layer, rows)
        for edit, members in writes_at(chosen, layer, Z_STAGES):
            edit.write_z(z, self._places(members, sets, rows.prompt.to(z.device)), layer)

    def write_resid(
        self, layer: int, sets: Sequence[int], x: Float[Tensor, "row 1 d_model"], prompt: Int[Tensor, " batch"]
    ) -> None:
        """Write the residual stream of rows after a layer in place."""
        for edit, members in writes_at([self.sets[one] for one in sets], layer, (Stage.resid,)):
            edit.write_resid(x, self._places(members, sets, prompt.to(x.device)), layer)

    def edits_resid(self, layer: int) -> bool:
        """Return whether an edit writes the residual stream after a layer."""
        return any(edits_at(placed, layer, (Stage.resid,)) for placed in self.sets)

    def _places(self, members: Any, sets: Sequence[int], prompt: Int[Tensor, " batch"]) -> Places:
        numbers = torch.arange(-1, len(sets), device=prompt.device).repeat(len(prompt))  # -1 is the unedited row
        prompts = prompt.repeat_interleave(1 + len(sets))
        return Places.of(members, numbers, prompts, torch.zeros_like(prompts))


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
        if view.has_hooks:
            raise PrefixCacheUnsupported("other hooks or edits are active on the model")
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

    def run(
        self, edits: RowEdits, sets: range, prompts: Sequence[int]
    ) -> tuple[Float[Tensor, "batch row d_vocab"], list[int]]:
        """Return logits of an unedited row 0 and of rows with the edits of `sets`, and the row of each set.

        `prompts` are the indices of the cached prompts in the batch to which the edits belong. With `columns`, the
        logits are those of its tokens. Blocks before the first edit are not run. Raise PrefixCacheUnsupported if row 0
        does not match the model's pass.
        """
        view, n = self.view, len(self.batch)
        marks = edits.marks[sets.start : sets.stop]
        edited = marks.any(0).nonzero().flatten().tolist()
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
                flat = ours.flatten(0, 1)[:, None]
                if layer in edited:
                    rows = LayerRows(cache, q, k, v, resid.pop(layer), torch.tensor(prompts))
                    edits.write_z(layer, sets_of_rows[layer], flat, rows)
                return flat

            return hook_fn

        def write(layer: int) -> Any:
            def hook_fn(x: Tensor, hook: Any) -> Tensor:
                x = x.clone()
                edits.write_resid(layer, sets_of_rows[layer], x, torch.tensor(prompts))
                return x

            return hook_fn

        hooks: list[tuple[str, Any]] = []
        for layer in values:
            hooks += recording_hooks(values[layer], "q", "k", "v")
            hooks.append((view.hook(layer, "attn.hook_z"), attend(layer)))
            if layer in edited and edits.edits_resid(layer):
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


def _branches(marks: Int[Tensor, "set layer"]) -> Iterator[_Branches]:
    """Yield the rows of each layer: sets share a row until their marks differ."""
    marks = torch.cat([torch.zeros_like(marks[:1]), marks])
    row_of = torch.zeros(len(marks), dtype=torch.long)
    for layer in range(marks.shape[1]):
        # Sorted, so that the row without edits is the first.
        rows, row_of = torch.stack([row_of, marks[:, layer]], dim=1).unique(dim=0, return_inverse=True)
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
