"""Attention of single-token rows to one layer's cached keys and values.

Keys and values are cached once per prompt and never copied per row. Attention is computed as in the
model, from activations that its hooks expose in one pass over the prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.recomputed_patterns import LayerValues, rotation
from icl_lens.models import attention_scores
from icl_lens.models.attention_scores import AttentionScoring, rotate
from icl_lens.models.passes.memory import SCORE_BYTES
from icl_lens.prompts.batch import PromptBatch


class HiddenKeys(NamedTuple):
    """Keys that rows do not attend to, and by what."""

    keys: Bool[Tensor, "batch row key"]
    by_weight: Bool[Tensor, " row"]
    """Whether the other keys get these keys' share of attention."""
    by_value: Bool[Tensor, " row"]
    """Whether z lacks these keys' values, at the weights that they have."""

    def change(
        self, pattern: Float[Tensor, "batch *row key"], without: Float[Tensor, "batch *row key"]
    ) -> Float[Tensor, "batch *row key"]:
        """Return the rows' pattern; `without` is the pattern in which the keys were never there.

        All but the first and last axes are broadcast: callers give `keys` and both flags the axes
        of `pattern`.
        """
        other_keys = torch.where(self.by_weight, without, pattern).masked_fill(self.keys, 0.0)
        return other_keys + pattern.masked_fill(~self.keys | self.by_value, 0.0)


@dataclass(frozen=True)
class LayerKVCache:
    """Rotated keys, and values, of one layer, stored once per prompt and attended to by all of the
    prompt's rows.
    """

    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_head"]
    visible_keys: Bool[Tensor, "batch key"]
    """Keys that a prompt's last query attends to, its own included."""
    alibi: Float[Tensor, "batch head key"] | None
    """ALiBi's bias of the scores; None for other models."""
    rotation: tuple[Tensor, Tensor] | None
    """Cosines and sines of all positions, [batch key d_rotary]; None for models without
    rotation.
    """
    last: Int[Tensor, " batch"]
    """Position of each prompt's last token, where the rows are."""
    scoring: AttentionScoring
    values: LayerValues | None = None
    """The prompts' activations, from which edited attention is recomputed; None if no edit changes
    attention.
    """

    @classmethod
    def of(
        cls, values: LayerValues, batch: PromptBatch, *, editable: bool = False
    ) -> "LayerKVCache":
        """Build from a layer's recorded activations; with `editable`, keep these for edits of
        attention.
        """
        view, layer = values.view, values.layer
        scoring = attention_scores.attention_scoring(view, layer)
        k, v = (per_kv_head(values.seen[name], view.n_kv_heads) for name in "kv")
        device, dtype = k.device, torch.promote_types(k.dtype, torch.float32)
        mask, last = batch.attention_mask.bool().to(device), batch.last.to(device)
        angles, alibi = None, None
        k = k.to(dtype)
        if scoring.position == "rotary":
            cos, sin = (x.to(device, dtype).expand(len(k), -1, -1) for x in rotation(values, mask))
            angles = cos, sin
            k = rotate(k, cos, sin, scoring)
        elif scoring.position == "alibi":
            alibi = attention_scores.alibi(view, layer, mask).to(device, dtype)
        distance = last[:, None] - torch.arange(k.shape[1], device=device)
        visible = mask & (distance >= 0)
        if scoring.window is not None:
            visible = visible & (distance < scoring.window)
        k, v = (
            x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in (k, v.to(dtype))
        )
        editable_values = (
            LayerValues(view, layer, mask, dict(values.seen), last[:, None]) if editable else None
        )
        return cls(k, v, visible, alibi, angles, last, scoring, editable_values)

    def select(self, prompts: Sequence[int]) -> "LayerKVCache":
        """Return the cache of some of the prompts, without activations for edits of attention."""
        rows = list(prompts)
        alibi = None if self.alibi is None else self.alibi[rows]
        angles = None if self.rotation is None else (self.rotation[0][rows], self.rotation[1][rows])
        return LayerKVCache(
            self.k[rows],
            self.v[rows],
            self.visible_keys[rows],
            alibi,
            angles,
            self.last[rows],
            self.scoring,
        )

    def of_head(self, head: int, n_heads: int) -> "LayerKVCache":
        """Return the cache of one query head, with the keys and values of its group only."""
        group = head // (n_heads // self.k.shape[1])
        alibi = None if self.alibi is None else self.alibi[:, head, None]
        sinks = self.scoring.sinks
        scoring = self.scoring if sinks is None else self.scoring._replace(sinks=sinks[head, None])
        return replace(
            self, k=self.k[:, group, None], v=self.v[:, group, None], alibi=alibi, scoring=scoring
        )

    def with_tokens(
        self,
        positions: Int[Tensor, "batch token"],
        k: Float[Tensor, "batch token kv_head d_head"] | None = None,
        v: Float[Tensor, "batch token kv_head d_head"] | None = None,
    ) -> "LayerKVCache":
        """Return the cache with other keys (before rotation) or values at some tokens; a position
        of -1 is skipped.
        """
        rows, tokens = (positions >= 0).nonzero(as_tuple=True)
        at = rows, slice(None), positions[rows, tokens]
        cache = self
        if k is not None:
            k = k[rows, tokens, None].to(self.k)  # token 1 kv_head d_head
            if self.rotation is not None:
                cos, sin = (x[rows, positions[rows, tokens], None] for x in self.rotation)
                k = rotate(k, cos, sin, self.scoring)
            replaced = self.k.clone()
            replaced[at] = k[:, 0]
            cache = replace(cache, k=replaced)
        if v is not None:
            replaced = self.v.clone()
            replaced[at] = v[rows, tokens].to(replaced)
            cache = replace(cache, v=replaced)
        return cache

    @cached_property
    def last_rotation(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of the last position, [batch 1 d_rotary]; None for models without
        rotation.
        """
        if self.rotation is None:
            return None
        cos, sin = (
            x[torch.arange(len(x), device=x.device), self.last, None] for x in self.rotation
        )
        return cos, sin

    def attend(
        self,
        q: Float[Tensor, "batch row head d_head"],
        k: Float[Tensor, "batch row kv_head d_head"],
        v: Float[Tensor, "batch row kv_head d_head"],
        hidden: HiddenKeys | None = None,
    ) -> Float[Tensor, "batch row head d_head"]:
        """Return z of rows at their prompt's last position, each with its own query, key and
        value.
        """
        q, k, v = (self.scoring.clipped(x.to(self.k.dtype)) for x in (q, k, v))
        if self.last_rotation is not None:
            q, k = (rotate(x, *self.last_rotation, self.scoring) for x in (q, k))
        bytes_per_row = q.shape[0] * q.shape[2] * self.k.shape[2] * q.element_size()
        step = max(1, SCORE_BYTES // bytes_per_row)
        pieces = [*zip(*(x.split(step, dim=1) for x in (q, k, v)), strict=True)]
        parts: list[HiddenKeys | None] = [None] * len(pieces)
        if hidden is not None:
            split = (
                hidden.keys.split(step, dim=1),
                hidden.by_weight.split(step),
                hidden.by_value.split(step),
            )
            parts = [HiddenKeys(*part) for part in zip(*split, strict=True)]
        return torch.cat(
            [self._attend(q, k, v, part) for (q, k, v), part in zip(pieces, parts, strict=True)],
            dim=1,
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, hidden: HiddenKeys | None) -> Tensor:
        n_rows, n_groups = q.shape[1], self.k.shape[1]
        q = q.unflatten(2, (n_groups, -1)).transpose(1, 2)  # batch group row member d_head
        own_score = torch.einsum("bgrmd,brgd->bgrm", q, k)[..., None]
        scores = (q.flatten(2, 3) @ self.k.transpose(-1, -2)).unflatten(2, (n_rows, -1))
        # At the last position each row uses its own key and value instead of its prompt's.
        last_key = self.last[:, None, None, None, None].expand(own_score.shape)
        scores = self.scoring.scale * scores.scatter(-1, last_key, own_score)
        if self.alibi is not None:
            scores = scores + self.alibi.unflatten(1, (n_groups, 1, -1))
        scores = self.scoring.capped(scores)
        scores = scores.masked_fill(~self.visible_keys[:, None, None, None], -torch.inf)
        sinks = None if self.scoring.sinks is None else self.scoring.sinks.reshape(n_groups, 1, -1)
        sinks = None if sinks is None else sinks.expand(scores.shape[:-1])
        pattern = attention_scores.attention(scores, sinks)
        if hidden is not None:
            keys = hidden.keys[:, None, :, None]  # batch group row member key
            by_weight, by_value = hidden.by_weight[:, None, None], hidden.by_value[:, None, None]
            without = attention_scores.attention(scores.masked_fill(keys, -torch.inf), sinks)
            pattern = HiddenKeys(keys, by_weight, by_value).change(pattern, without)
        to_own, to_others = pattern.gather(-1, last_key), pattern.scatter(-1, last_key, 0.0)
        z = (to_others.flatten(2, 3) @ self.v).unflatten(2, (n_rows, -1)) + to_own * v.transpose(
            1, 2
        )[:, :, :, None]
        return z.transpose(1, 2).flatten(2, 3)

    def with_row(
        self, q: Tensor, k: Tensor, v: Tensor, resid: Float[Tensor, "batch d_model"]
    ) -> LayerValues:
        """Return the layer's activations with one row's q, k, v and `resid` in place of each
        prompt's last position.

        `q`, `k` and `v` are [batch head d_head]. The result has no other queries than this row's.
        """
        assert self.values is not None
        seen = dict(self.values.seen)
        q, k, v = (self.scoring.clipped(x) for x in (q, k, v))
        at = torch.arange(len(q), device=q.device), self.last.to(q.device)
        for name, row_value in (("k", k), ("v", v), ("resid", resid)):
            if name in seen:
                seen[name] = seen[name].index_put(at, row_value.to(seen[name]))
        seen["q"] = q[:, None]
        return LayerValues(
            self.values.view, self.values.layer, self.values.key_mask, seen, self.values.queries
        )


@dataclass(frozen=True)
class LayerRows:
    """One layer's single-token rows before attention, and the keys and values that they share."""

    cache: LayerKVCache
    q: Float[Tensor, "batch row head d_head"]
    """Before rotation, like `k`."""
    k: Float[Tensor, "batch row kv_head d_head"]
    v: Float[Tensor, "batch row kv_head d_head"]
    resid: Float[Tensor, "batch row d_model"]
    prompt: Int[Tensor, " batch"]
    """Index of each prompt in the batch that is scored."""

    def values(self, row: int) -> LayerValues:
        """Return the layer's activations with a row's at the last position."""
        return self.cache.with_row(
            self.q[:, row], self.k[:, row], self.v[:, row], self.resid[:, row]
        )


def per_kv_head(
    x: Float[Tensor, "batch pos head d_head"], n_groups: int
) -> Float[Tensor, "batch pos kv_head d_head"]:
    """Return keys or values once per key-value group, even if TransformerLens repeats them for
    every query head.
    """
    return x if x.shape[2] == n_groups else x[:, :, :: x.shape[2] // n_groups]
