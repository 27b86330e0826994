"""Edit heads at the last position only, in single-token rows that share each prompt's cached keys and values.

An edit at the last position does not change earlier positions. So one pass over the prompts caches each layer's keys
and values, and edits then run as single-token rows in one batch. A row starts at the layer of its first edited head, as
a copy of the last position's residual stream there, and continues through the later layers. `kv_cache` computes the
attention of rows; all other modules are the model's own. Every pass is checked against the pass that filled the cache;
for families whose attention differs, and models with active edits, PrefixCacheUnsupported is raised.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from icl_lens.activations.activations import last_log_probs
from icl_lens.interventions.edit_checks import PATTERN_TOLERANCE
from icl_lens.interventions.edit_tree import EditTree
from icl_lens.interventions.kv_cache import (
    TURNS,
    AttentionEdits,
    LayerKVCache,
    Patches,
    key_hooks,
    per_kv_head,
    position_hooks,
)
from icl_lens.interventions.layer_ranges import Returns, record_arity, replace_residual, run_layers
from icl_lens.interventions.memory_budget import stages
from icl_lens.interventions.pattern import LayerValues
from icl_lens.models.readout import norm_scale
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


class PrefixCacheUnsupported(Exception):
    """Raised when the prefix cache cannot reproduce a full forward pass; the message is the reason."""


@dataclass(frozen=True)
class PrefixCache:
    """Cached keys and values of prompts, for single-token rows with edits at the last position.

    Methods raise PrefixCacheUnsupported if the cache does not reproduce the model's own pass.
    """

    view: ModelView
    batch: PromptBatch
    layers: range
    """Consecutive layers whose keys and values are cached; passes over rows run these."""
    log_probs: Float[Tensor, "batch d_vocab"]
    """Log-probabilities of the unedited model, nats; undefined unless `layers` include the last one."""
    keys: dict[int, LayerKVCache]
    resid_pre: dict[int, Float[Tensor, "batch d_model"]]
    z: dict[int, Float[Tensor, "batch head d_head"]]
    block_returns: Returns
    resid_after: Float[Tensor, "batch pos d_model"] | None
    """Residual stream after `layers`; None if they include the last one."""

    @classmethod
    def of(cls, view: ModelView, batch: PromptBatch, *, position_free: bool = False) -> "PrefixCache":
        """Run one pass over the batch; cache keys and values at all positions, and residual stream and z at the last.

        If `position_free`, also cache keys without the position term.
        """
        return cls._of(view, batch, range(view.n_layers), None, position_free=position_free)

    @classmethod
    def by_layer_stage(cls, view: ModelView, batch: PromptBatch) -> Iterator["PrefixCache"]:
        """Yield caches of some layers at a time; each one's keys and values are freed when the next is requested."""
        stage: PrefixCache | None = None
        for layers in stages(view, batch):
            stage = cls._of(view, batch, layers, stage)
            yield stage
            stage.keys.clear()

    @classmethod
    def _of(
        cls,
        view: ModelView,
        batch: PromptBatch,
        layers: range,
        before: "PrefixCache | None",
        *,
        position_free: bool = False,
    ) -> "PrefixCache":
        """Run a pass through some layers, from the residual stream after those of `before`."""
        check_no_hooks(view)
        values = {layer: LayerValues(view, layer) for layer in layers}
        keys, resid, z = {}, {}, {}
        returns: Returns = [] if before is None else before.block_returns

        def at_last(x: Tensor) -> Tensor:
            return x.detach()[torch.arange(len(x), device=x.device), batch.last.to(x.device)].clone()

        def record(layer: int, name: str) -> Any:
            return lambda value, hook: values[layer].record(name, value.detach())

        def keep(layer: int) -> Any:
            def hook_fn(value: Tensor, hook: Any) -> None:
                keys[layer] = LayerKVCache.of(values[layer], batch, position_free=position_free)
                values[layer].seen.clear()
                z[layer] = at_last(value)

            return hook_fn

        def keep_resid(layer: int) -> Any:
            return lambda value, hook: resid.__setitem__(layer, at_last(value))

        hooks: list[tuple[str, Any]] = []
        for layer in layers:
            hooks.append((view.hook(layer, "hook_resid_pre"), keep_resid(layer)))
            needed = key_hooks(view, layer) | (position_hooks(view, layer) if position_free else {})
            hooks += [(hook, record(layer, name)) for name, hook in needed.items()]
            hooks.append((view.hook(layer, "attn.hook_z"), keep(layer)))
        begin = None if before is None else before.resid_after
        with (
            view.exclusive_pass(),
            record_arity(view, layers, returns),
            run_layers(view, layers, returns, resid_in=begin) as left,
            view.model.hooks(fwd_hooks=hooks),
        ):
            log_probs = last_log_probs(view.model, batch)
        return cls(view, batch, layers, log_probs, keys, resid, z, returns, left[0] if left else None)

    def ablate_each_head(
        self,
        layers: Sequence[int],
        replacement: Mapping[int, Float[Tensor, "head d_head"]] | None = None,
        resume_from: Float[Tensor, "batch begun d_model"] | None = None,
    ) -> Float[Tensor, "batch row d"]:
        """Return logits after each prompt with each head of some consecutive layers ablated, in order, in one pass.

        Row 0 is unedited. Blocks before the first layer are not run. The head's z is set to 0 or to `replacement`. In a
        stage before the last, return the rows' residual stream after it, to be passed as `resume_from` to the next.
        """
        n_heads = self.view.n_heads

        def remove(layer: int, z: Float[Tensor, "batch row head d_head"]) -> None:
            if layer in layers:
                every = torch.arange(n_heads, device=z.device)
                z[:, z.shape[1] - n_heads + every, every] = 0.0 if replacement is None else replacement[layer].to(z)

        here = [layer for layer in layers if layer in self.layers]
        return self._pass(dict.fromkeys(here, [0] * n_heads), remove, resume_from=resume_from)

    def ablate_sets(
        self,
        removed: Bool[Tensor, "set layer head"],
        replacement: Mapping[int, Float[Tensor, "*batch head d_head"]] | None = None,
    ) -> Float[Tensor, "batch row d_vocab"]:
        """Return logits after each prompt with each set of heads ablated, in one pass; row 0 is unedited.

        A head's z is set to 0 or to `replacement`, which may differ per prompt. Sets with the same heads up to some
        layer share a row up to there.
        """
        tree = EditTree.of(removed, mergeable=True)

        def remove(layer: int, z: Float[Tensor, "batch row head d_head"]) -> None:
            here = removed[tree.sets_at_layer(layer), layer]
            rows, heads = (place.to(z.device) for place in here.nonzero(as_tuple=True))
            z[:, 1 + rows, heads] = 0.0 if replacement is None else replacement[layer].to(z)[..., heads, :]

        return self._pass(tree.entering, remove, order=[0, *tree.row_of])

    def with_attention_edited(
        self,
        chosen: Bool[Tensor, "set layer head"],
        position: Float[Tensor, " set"],
        factor: Float[Tensor, "batch set key"] | None,
    ) -> Float[Tensor, "batch row d_vocab"]:
        """Return logits after each prompt with each set of heads edited, in one pass; row 0 is unedited.

        See `AttentionEdits`; `position` below 1 requires a cache made with `position_free`.
        """

        def edits(rows: Bool[Tensor, "row head"], layer: int, sets: list[int]) -> AttentionEdits:
            factors = None
            if factor is not None:
                factors = torch.cat([torch.ones_like(factor[:, :1]), factor[:, sets]], dim=1)
            return AttentionEdits(rows, torch.cat([position.new_ones(1), position[sets]]), factors)

        return self._edited(chosen, edits)

    def with_patches(
        self, chosen: Bool[Tensor, "set layer head"], patches: Mapping[int, Patches]
    ) -> Float[Tensor, "batch row d_vocab"]:
        """Return logits after each prompt with each set of heads patched, in one pass; row 0 is not patched."""
        return self._edited(
            chosen,
            lambda rows, layer, sets: AttentionEdits(rows, torch.ones(len(rows)), patches=patches[layer]),
        )

    def _edited(
        self,
        chosen: Bool[Tensor, "set layer head"],
        edits_of: Callable[[Bool[Tensor, "row head"], int, list[int]], AttentionEdits],
    ) -> Float[Tensor, "batch row d_vocab"]:
        """Return logits with the attention of each set of heads edited, after an unedited row 0.

        `edits_of` gets the heads that are edited in each row of a layer, the layer, and the sets of the rows after
        row 0.
        """
        tree = EditTree.of(chosen, mergeable=False)

        def edits(layer: int) -> AttentionEdits | None:
            sets = tree.sets_at_layer(layer)
            here = chosen[sets, layer]
            return edits_of(torch.cat([torch.zeros_like(chosen[:1, layer]), here]), layer, sets) if here.any() else None

        return self._pass(tree.entering, lambda layer, z: None, edits, order=[0, *tree.row_of])

    def add_vectors(
        self, vectors: Float[Tensor, "case d_model"], layers: Sequence[int]
    ) -> Float[Tensor, "batch row d_vocab"]:
        """Return logits after each prompt with each vector added to the residual stream after its layer, in one pass.

        `layers` must be in non-decreasing order. Row 0 is unedited. Blocks before the first layer are not run.
        """
        new_rows = {layer: [0] * layers.count(layer) for layer in dict.fromkeys(layers)}

        def add(layer: int, x: Float[Tensor, "batch row d_model"]) -> None:
            first = layers.index(layer)
            own = vectors[first : first + len(new_rows[layer])]
            x[:, x.shape[1] - len(own) :] += own.to(x)

        return self._pass(new_rows, lambda layer, z: None, add=add)

    def _pass(
        self,
        new_rows: Mapping[int, Sequence[int]],
        remove: Callable[[int, Tensor], None],
        edits: Callable[[int], AttentionEdits | None] = lambda layer: None,
        add: Callable[[int, Tensor], None] | None = None,
        order: Sequence[int] | None = None,
        resume_from: Float[Tensor, "batch begun d_model"] | None = None,
    ) -> Float[Tensor, "batch row d"]:
        """Return logits of an unedited row 0 per prompt, and of rows that start at some layers as copies of others.

        `remove` edits a layer's z [batch row head d_head] in place, `edits` its attention, `add` the residual stream
        [batch row d_model] after a layer where rows start. `order` selects the returned rows, by default all.
        `resume_from`: rows from the previous stage. Unedited copies of row 0 must attend as the model does. In a stage
        before the last, return the residual stream instead of logits.
        """
        view, n, stop = self.view, len(self.batch), self.layers.stop
        first = min(new_rows, default=stop - 1) if resume_from is None else self.layers.start
        # A copy, because blocks of some families add to it in place.
        begin = (self.resid_pre[first].clone() if resume_from is None else resume_from.flatten(0, 1))[:, None]
        state: dict[str, Any] = {"rows": 0}

        def arranged(x: Float[Tensor, "row 1 d_model"], rows: Sequence[int]) -> Float[Tensor, "wanted 1 d_model"]:
            return x.unflatten(0, (n, -1))[:, torch.tensor(rows, device=x.device)].flatten(0, 1)

        def join(layer: int) -> Any:
            """Append a layer's new rows after the existing rows of each prompt."""

            def joined(x: Float[Tensor, "row 1 d_model"]) -> Tensor:
                there, copied = len(x) // n, new_rows.get(layer, ())
                clean = self.resid_pre[layer].to(x.device)[:, None]
                if copied:  # copies of row 0 use the model's own residual stream
                    x = torch.cat([x.unflatten(0, (n, -1)), clean[:, None]], dim=1).flatten(0, 1)
                    x = arranged(x, [*range(there), *(row or there for row in copied)])
                state["rows"], state["x"] = there + len(copied), x[:, 0].unflatten(0, (n, -1))
                state["clean"] = 0 if layer == first else there + copied.index(0) if 0 in copied else None
                return x

            def hook_fn(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
                args, kwargs = replace_residual(args, kwargs, joined)
                if isinstance(alibi := kwargs.get("alibi"), Tensor):
                    # Bloom, Falcon: built for the model's single input row; only its shape matters here.
                    many = alibi[: view.n_heads].repeat(n * state["rows"], *[1] * (alibi.ndim - 1))
                    kwargs = {**kwargs, "alibi": many}
                return args, kwargs

            return hook_fn

        values = {layer: LayerValues(view, layer) for layer in range(first, stop)}

        def record(layer: int, name: str) -> Any:
            return lambda value, hook: values[layer].record(name, value)

        def attend(layer: int) -> Any:
            def hook_fn(z: Tensor, hook: Any) -> Tensor:
                seen = values[layer].seen
                q, k, v = (seen[name][:, 0].unflatten(0, (n, -1)) for name in "qkv")
                seen.clear()
                k, v = (per_kv_head(x, view.n_kv_heads) for x in (k, v))
                edited = edits(layer)
                norm = self._norm_scale(layer, state["x"]) if edited is not None else None
                ours = self.keys[layer].attend(q, k, v, edited, norm).to(z)
                clean = state["clean"]
                if clean == 0 or (clean is not None and edited is None):
                    self._check_z(layer, ours[:, clean])
                remove(layer, ours)
                return ours.flatten(0, 1)[:, None]

            return hook_fn

        def write(layer: int) -> Any:
            def hook_fn(x: Tensor, hook: Any) -> Tensor:
                x = x.clone()
                assert add is not None
                add(layer, x[:, 0].unflatten(0, (n, -1)))  # a view: written in place
                return x

            return hook_fn

        hooks: list[tuple[str, Any]] = []
        for layer in values:
            hooks += [(hook, record(layer, name)) for name, hook in key_hooks(view, layer).items() if name not in TURNS]
            hooks.append((view.hook(layer, "attn.hook_z"), attend(layer)))
            if add is not None and layer in new_rows:
                hooks.append((view.hook(layer, "hook_resid_post"), write(layer)))
        token = self.batch.tokens[:1, int(self.batch.last[0])][:, None]

        def choose(module: Any, args: Any, output: Any) -> Any:
            assert order is not None
            state["rows"] = len(order)
            if isinstance(output, tuple):
                return (arranged(output[0], order), *output[1:])
            return arranged(output, order)

        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            lean = stack.enter_context(view.inference_pass())
            here = run_layers(view, range(first, stop), self.block_returns, resid_in=begin, goes_on=slice(1))
            left = stack.enter_context(here)
            stack.enter_context(view.model.hooks(fwd_hooks=hooks))
            for layer in values:
                handle = view.model.blocks[layer].register_forward_pre_hook(join(layer), with_kwargs=True)
                stack.callback(handle.remove)
            if order is not None:
                stack.callback(view.model.blocks[-1].register_forward_hook(choose).remove)
            logits = view.model(token, return_type="logits", **lean)
        found = left[0] if left else logits
        if found.shape[0] != n * state["rows"] or found.shape[1] != 1:
            raise PrefixCacheUnsupported("the model's passes do not keep one row per row of the residual stream")
        return found[:, 0].unflatten(0, (n, -1))

    def _norm_scale(self, layer: int, x: Float[Tensor, "batch row d_model"]) -> Float[Tensor, "batch row"] | None:
        """Return each row's norm scale if edits of learned positions need it, else None."""
        position_free = self.keys[layer].position_free
        if position_free is None or position_free.q_share is None:
            return None
        norm = self.view.attn_input_norm(layer)
        if not norm.normalize:
            return None
        return norm_scale(x.to(position_free.q_share.dtype), eps=norm.eps, center=norm.center)

    def _check_z(self, layer: int, ours: Tensor) -> None:
        """Raise PrefixCacheUnsupported unless an unedited row attends like the model's last position."""
        theirs = self.z[layer]
        error = float((ours.float() - theirs.float()).abs().max() / (theirs.float().abs().max() + 1e-30))
        if not error <= PATTERN_TOLERANCE.get(theirs.dtype, 1e-4):
            raise PrefixCacheUnsupported(
                f"attention over cached keys differs from the model's in layer {layer} of {self.view.architecture} "
                f"(relative error {error:.1e})"
            )


def check_no_hooks(view: ModelView) -> None:
    """Raise PrefixCacheUnsupported if hooks are active on the model, since they may edit earlier positions."""
    # Permanent hooks belong to the model, such as TransformerLens' own in OPT's FFN.
    hooks = (hook for point in view.model.hook_dict.values() for hook in point.fwd_hooks)
    if not all(getattr(hook, "is_permanent", False) for hook in hooks):
        raise PrefixCacheUnsupported("other hooks or interventions are active on the model")
