"""Cache what rows of one token after each prompt need: keys, values and last activations.

An edit at the last position does not change earlier positions. So one pass over the prompts fills
the cache, and edits then run as single-token rows in one batch (`run_rows`).
PrefixCacheUnsupported is raised if the model already has hooks or edits, and where a row without
edits differs from the pass that filled the cache, as in families with another kind of attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.edit_checks import PATTERN_TOLERANCE
from icl_lens.edits.one_token_rows.layer_attention import LayerKVCache
from icl_lens.edits.recomputed_patterns import LayerValues, recording_hooks
from icl_lens.models.loading.bridge_comparison import reads_only_earlier_tokens
from icl_lens.models.passes.inference import log_probs_of
from icl_lens.models.passes.locking import model_lock
from icl_lens.models.passes.memory import KEY_BYTES, ROW_BYTES
from icl_lens.models.readout import Readout
from icl_lens.models.sizes import key_bytes, rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.last_logits import last_logits
from icl_lens.reading.layer_inputs import LayerInputs

# Keys of two caches that differ by no more than this are equal.
ROUNDING = 1e-5


class PrefixCacheUnsupported(Exception):
    """Raised, with the reason, when the cache cannot reproduce a full forward pass."""


@dataclass(frozen=True)
class PrefixCache:
    """Cached keys and values of prompts, for single-token rows with edits at the last position."""

    view: ModelView
    batch: PromptBatch
    log_probs: Float[Tensor, "batch d_vocab"]
    """Log-probabilities of the unedited model, nats."""
    keys: dict[int, LayerKVCache]
    """Layer -> keys and values."""
    inputs: LayerInputs
    """Each layer's input at the last position."""
    z: dict[int, Float[Tensor, "batch head d_head"]]
    """Layer -> the unedited model's z at the last position."""
    columns: Readout | None = None
    """The unembedding of the tokens that rows have logits of; None for the whole vocabulary."""

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
        """Run one pass over the batch and record what rows need.

        With `attention`, rows may have edits of attention. With `tokens`, they have logits of these
        tokens only, if they can be computed from the unembedding. The pass also fills `past`, an
        empty cache of Hugging Face, which shares our keys and values from layer to layer.
        """
        if view.has_hooks:
            raise PrefixCacheUnsupported("other hooks or edits are active on the model")
        if not reads_only_earlier_tokens(view.model):
            raise PrefixCacheUnsupported(
                "earlier tokens read later ones, so a prefix is another one in a longer text"
            )
        values = {layer: LayerValues(view, layer) for layer in range(view.n_layers)}
        keys, z, inputs = {}, {}, LayerInputs(view)
        unembedded: list[Tensor] = []

        def at_last(x: Tensor) -> Tensor:
            rows = torch.arange(len(x), device=x.device)
            return x.detach()[rows, batch.last.to(x.device)].clone()

        def keep(layer: int) -> Any:
            def hook_fn(value: Tensor, hook: Any) -> None:
                keys[layer] = LayerKVCache.of(values[layer], batch, editable=attention)
                values[layer].seen.clear()
                if past is not None:
                    _share_memory(past.layers[layer], keys[layer])
                z[layer] = at_last(value)

            return hook_fn

        hooks: list[tuple[str, Any]] = []
        names = ["q", "k", "v", "cos", "sin"]
        if attention:
            names += ["position", "resid"]
        for layer in values:
            hooks += recording_hooks(values[layer], *names)
            hooks.append((view.hook(layer, "attn.hook_z"), keep(layer)))
        if tokens is not None:
            hooks.append((view.last_logits_hook, lambda x, hook: unembedded.append(at_last(x))))
        with (
            model_lock(view.model),
            inputs.recorded(values, at_last),
            view.model.hooks(fwd_hooks=hooks),
        ):
            logits = last_logits(view.model, batch, past=past)
        log_probs = log_probs_of(logits)
        columns = None
        if tokens is not None:
            columns = _columns(view, tokens, unembedded[0], log_probs)
        return cls(view, batch, log_probs, keys, inputs, z, columns)

    def select(self, prompts: Sequence[int]) -> "PrefixCache":
        """Return the cache of some of the prompts, for edits that do not change attention.

        The cache of all prompts is not copied.
        """
        rows = list(prompts)
        if rows == list(range(len(self.batch))):
            return self
        return PrefixCache(
            self.view,
            self.batch[rows],
            self.log_probs[rows],
            {layer: cache.select(rows) for layer, cache in self.keys.items()},
            replace(self.inputs, resid={layer: x[rows] for layer, x in self.inputs.resid.items()}),
            {layer: x[rows] for layer, x in self.z.items()},
            self.columns,
        )

    def check(self, what: str, layer: int, ours: Tensor, theirs: Tensor) -> None:
        """Raise PrefixCacheUnsupported if the unedited row (`ours`) differs from the model's."""
        ours, theirs = ours.float(), theirs.float().to(ours.device)
        error = float((ours - theirs).abs().max() / (theirs.abs().max() + 1e-30))
        if not error <= PATTERN_TOLERANCE.get(self.view.model.W_U.dtype, 1e-4):
            raise PrefixCacheUnsupported(
                f"{what} differs from the model's in layer {layer} of {self.view.architecture} "
                f"(relative error {error:.1e})"
            )


def _share_memory(theirs: Any, ours: LayerKVCache) -> None:
    """Let a layer of Hugging Face's cache have our keys and values where they are equal."""
    for name, x in (("keys", ours.k), ("values", ours.v)):
        stored = getattr(theirs, name)
        is_same_kind = stored.shape == x.shape and stored.dtype == x.dtype
        if is_same_kind and torch.allclose(stored, x, rtol=ROUNDING, atol=ROUNDING):
            setattr(theirs, name, x)


def _columns(
    view: ModelView,
    tokens: Int[Tensor, " token"],
    x: Float[Tensor, "batch d_model"],
    log_probs: Float[Tensor, "batch d_vocab"],
) -> Readout | None:
    """Return the unembedding of some tokens; None if its log-probabilities are not the model's."""
    readout = view.readout(x)
    if x.shape[-1] != readout.W_U.shape[0]:
        return None
    columns = readout.select_tokens(tokens.to(readout.W_U.device))
    ours = torch.log_softmax(columns.unembed(x).float(), dim=-1)
    theirs = torch.log_softmax(log_probs[:, tokens].float(), dim=-1)
    error = float((ours - theirs.to(ours.device)).abs().max())
    is_close = error <= PATTERN_TOLERANCE.get(view.model.W_U.dtype, 1e-4)
    return columns if is_close else None


def max_prompts(
    view: ModelView,
    batch: PromptBatch,
    *,
    pass_tokens: int,
    n_rows: int,
    attention: bool,
    n_logits: int | None = None,
    memory: int | None = None,
) -> int:
    """Return how many prompts, with `n_rows` rows each, run at a time; at least one.

    Their keys and values fit in `memory` (default: `KEY_BYTES`), their pass in `PASS_BYTES` and
    `pass_tokens`, and their rows in `max_rows`.
    """
    memory = KEY_BYTES if memory is None else memory
    width = batch.tokens.shape[1]
    keys = key_bytes(view, width) * (5 if attention else 2) // 2
    limits = (
        memory // keys,
        rows_at_once(view, width),
        max_rows(view, n_logits) // (1 + n_rows),
        pass_tokens // width,
    )
    return max(1, min(limits))


def max_rows(view: ModelView, n_logits: int | None = None) -> int:
    """Return the number of rows that fit `ROW_BYTES`.

    It is at least that of a layer's heads and the unedited row. `n_logits` is the number of logits
    per row, by default those of the whole vocabulary.
    """
    size = 4 if view.compute_dtype == torch.float32 else 8
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * view.d_model)
    numbers_per_row = max(n_logits or view.model.W_U.shape[1], 3 * d_mlp)
    return max(1 + view.n_heads, ROW_BYTES // (size * numbers_per_row))
