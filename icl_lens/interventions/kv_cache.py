"""Attention of single-token rows to one layer's cached keys and values, optionally edited.

Keys and values are cached once per prompt and never copied per row. Attention is computed as in the model, from
activations that its hooks expose in one pass over the prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.interventions.pattern import LayerValues, position_direction, rotation, score_inputs, without_rotation
from icl_lens.models import attention_scores
from icl_lens.models.attention_scores import AttentionScoring, rotate
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Attention scores of rows are computed in pieces of about this size.
SCORE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Patches:
    """One layer's activations from source prompts: last queries, or keys or values at some positions.

    Queries and keys are before rotation.
    """

    q: Float[Tensor, "batch head d_head"] | None = None
    k: Float[Tensor, "batch place head d_head"] | None = None
    v: Float[Tensor, "batch place head d_head"] | None = None
    places: Int[Tensor, "batch place"] | None = None
    """Positions of the keys or values; -1 where a prompt has fewer."""

    def of(self, prompts: Sequence[int]) -> "Patches":
        every = (self.q, self.k, self.v, self.places)
        return Patches(*(None if one is None else one[list(prompts)] for one in every))


@dataclass(frozen=True)
class AttentionEdits:
    """Edits of one layer's attention in rows at their prompts' last positions, in chosen heads only."""

    chosen: Bool[Tensor, "row head"]
    position: Float[Tensor, " row"]
    """Share of the position term that remains in the scores: 1 all, 0 none."""
    factor: Float[Tensor, "batch row key"] | None = None
    """Factors of the attention probabilities, which are then renormalized."""
    patches: Patches | None = None

    def of(self, rows: slice) -> "AttentionEdits":
        factor = None if self.factor is None else self.factor[:, rows]
        return AttentionEdits(self.chosen[rows], self.position[rows], factor, self.patches)

    def by_group(self, n_groups: int, device: torch.device) -> Bool[Tensor, "1 group row member 1"]:
        """Return which heads of which rows are edited, in the axes of the attention scores."""
        return self.chosen.to(device).unflatten(1, (n_groups, -1)).transpose(0, 1)[None, ..., None]

    def queries(self, q: Float[Tensor, "batch row head d_head"]) -> Float[Tensor, "batch row head d_head"]:
        """Return the queries, patched in the chosen heads."""
        if self.patches is None or self.patches.q is None:
            return q
        return torch.where(self.chosen.to(q.device)[None, ..., None], self.patches.q.to(q)[:, None], q)

    @property
    def weight(self) -> Float[Tensor, "row head"]:
        """Share of the position term that remains, per head."""
        return torch.where(self.chosen, self.position[:, None], 1.0)

    def scaled(self, pattern: Float[Tensor, "batch group row member key"]) -> Tensor:
        """Return the attention pattern with the factors applied."""
        if self.factor is None or not bool(self.chosen.any()):
            return pattern
        chosen = self.by_group(pattern.shape[1], pattern.device)
        own = pattern * self.factor.to(pattern)[:, None, :, None]
        own = own / own.sum(-1, keepdim=True).clamp(min=torch.finfo(own.dtype).tiny)
        return torch.where(chosen, own, pattern)


@dataclass(frozen=True)
class PositionFreeKeys:
    """Keys of one layer without the position term, and the share of learned positions in the last query and key."""

    k: Float[Tensor, "batch kv_head key d_head"] | None
    """None if position does not enter keys (ALiBi)."""
    q_share: Float[Tensor, "batch head d_head"] | None
    """Before the norm's scale, which differs per row; None if positions are not learned."""
    k_share: Float[Tensor, "batch kv_head d_head"] | None

    @classmethod
    def of(
        cls,
        values: LayerValues,
        k: Float[Tensor, "batch key kv_head d_head"],
        cos_sin: tuple[Tensor, Tensor] | None,
        last: Int[Tensor, " batch"],
        how: AttentionScoring,
    ) -> "PositionFreeKeys":
        """Build from a layer's recorded activations and its keys before rotation."""
        if how.position == "alibi":
            return cls(None, None, None)
        view, layer = values.view, values.layer
        q_share, k_share = None, None
        if cos_sin is not None:
            k = without_rotation(k, *cos_sin, how.interleaved)
        else:
            share = score_inputs(values, range(view.n_heads)).k_share
            assert share is not None
            k = k - per_kv_head(share, view.n_kv_heads).to(k)
            direction = position_direction(values, k.dtype).to(k.device).expand(len(k), -1, -1)
            there = direction[torch.arange(len(k), device=k.device), last]
            W_Q, W_K = (weights.to(there) for weights in (view.W_Q(layer), view.W_K(layer)))
            q_share, k_share = (torch.einsum("bm,hmd->bhd", there, weights) for weights in (W_Q, W_K))
        return cls(k.transpose(1, 2).clone(memory_format=torch.contiguous_format), q_share, k_share)


@dataclass(frozen=True)
class LayerKVCache:
    """Keys (rotated) and values of one layer, once per prompt, for the last-position queries of all its rows."""

    k: Float[Tensor, "batch kv_head key d_head"]
    v: Float[Tensor, "batch kv_head key d_head"]
    visible_keys: Bool[Tensor, "batch key"]
    """Keys that a prompt's last query attends to, its own included."""
    alibi: Float[Tensor, "batch head key"] | None
    cos_sin: tuple[Tensor, Tensor] | None
    """Cosines and sines of every position, [batch key d_rotary]."""
    last: Int[Tensor, " batch"]
    how: AttentionScoring
    position_free: PositionFreeKeys | None = None
    """Keys without the position term, for edits of it."""

    @classmethod
    def of(cls, values: LayerValues, batch: PromptBatch, *, position_free: bool = False) -> "LayerKVCache":
        """Build from a layer's recorded activations; with `position_free`, also keep keys without the position term."""
        view, layer = values.view, values.layer
        how = attention_scores.attention_scoring(view, layer)
        k, v = (per_kv_head(values.seen[name], view.n_kv_heads) for name in "kv")
        device, dtype = k.device, torch.promote_types(k.dtype, torch.float32)
        mask, last = batch.attention_mask.bool().to(device), batch.last.to(device)
        cos_sin, alibi = None, None
        k = before = k.to(dtype)
        if how.position == "rotary":
            cos, sin = (x.to(device, dtype).expand(len(k), -1, -1) for x in rotation(values, mask))
            cos_sin = cos, sin
            k = rotate(k, cos, sin, how.interleaved)
        elif how.position == "alibi":
            alibi = attention_scores.alibi(view, layer, mask).to(device, dtype)
        back = last[:, None] - torch.arange(k.shape[1], device=device)
        seen = mask & (back >= 0)
        if how.window is not None:
            seen = seen & (back < how.window)
        k, v = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in (k, v.to(dtype)))
        without = PositionFreeKeys.of(values, before, cos_sin, last, how) if position_free else None
        return cls(k, v, seen, alibi, cos_sin, last, how, without)

    def attend(
        self,
        q: Float[Tensor, "batch row head d_head"],
        k: Float[Tensor, "batch row kv_head d_head"],
        v: Float[Tensor, "batch row kv_head d_head"],
        edits: AttentionEdits | None = None,
        norm: Float[Tensor, "batch row"] | None = None,
    ) -> Float[Tensor, "batch row head d_head"]:
        """Return z of rows at their prompt's last position, each with its own query, key and value.

        `norm`: the scale of each row's norm, for edits of learned positions.
        """
        q, k, v = (x.to(self.k.dtype) for x in (q, k, v))
        each = q.shape[0] * q.shape[2] * self.k.shape[2] * q.element_size()
        step = max(1, SCORE_BYTES // each)
        pieces = [slice(start, start + step) for start in range(0, q.shape[1], step)]
        found = [
            self._attend(
                q[:, rows],
                k[:, rows],
                v[:, rows],
                None if edits is None else edits.of(rows),
                None if norm is None else norm[:, rows],
            )
            for rows in pieces
        ]
        return torch.cat(found, dim=1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, edits: AttentionEdits | None, norm: Tensor | None) -> Tensor:
        batch, n_rows, n_heads, d_head = q.shape
        n_groups = self.k.shape[1]
        if edits is not None:
            q = edits.queries(q)
        turned = self._turned(q, self.last[:, None])
        products = self._products(turned, self._turned(k, self.last[:, None]), self.k)
        if edits is not None:
            products = self._with_keys(products, turned, edits)
        weight = None
        if edits is not None and self.position_free is not None:
            weight = edits.weight.to(products).unflatten(1, (n_groups, -1)).transpose(0, 1)[None, ..., None]
            if self.position_free.k is not None:
                products = weight * products + (1 - weight) * self._products(
                    *self._plain(q, k, norm), self.position_free.k
                )
        products = products * self.how.scale
        if self.alibi is not None:
            bias = self.alibi.unflatten(1, (n_groups, 1, -1))
            products = products + (bias if weight is None else weight * bias)
        if self.how.soft_cap is not None:
            products = self.how.soft_cap * torch.tanh(products / self.how.soft_cap)
        pattern = products.masked_fill(~self.visible_keys[:, None, None, None], -torch.inf).softmax(dim=-1)
        if edits is not None:
            pattern = edits.scaled(pattern)
        place = self.last[:, None, None, None, None].expand(*pattern.shape[:-1], 1)
        at_own = pattern.gather(-1, place)
        others = pattern.scatter(-1, place, 0.0)
        z = (others.flatten(2, 3) @ self.v).unflatten(2, (n_rows, -1)) + at_own * v.transpose(1, 2)[:, :, :, None]
        if edits is not None:
            z = self._with_values(z, pattern, edits)
        return z.transpose(1, 2).reshape(batch, n_rows, n_heads, d_head)

    def _products(self, q: Tensor, k: Tensor, kept: Tensor) -> Float[Tensor, "batch group row member key"]:
        """Return queries times keys; at the last position each row uses its own key instead of its prompt's."""
        q = q.unflatten(2, (kept.shape[1], -1)).transpose(1, 2)  # batch group row member d_head
        own = torch.einsum("bgrmd,brgd->bgrm", q, k)
        products = (q.flatten(2, 3) @ kept.transpose(-1, -2)).unflatten(2, (q.shape[2], -1))
        return products.scatter(-1, self.last[:, None, None, None, None].expand(*own.shape, 1), own[..., None])

    def _turned(
        self, x: Float[Tensor, "batch pos head d_head"], places: Int[Tensor, "batch #pos"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """Return queries or keys rotated as at the given positions; unchanged for models without rotation."""
        if self.cos_sin is None:
            return x
        rows = torch.arange(len(places), device=places.device)[:, None]
        cos, sin = (turn[rows, places] for turn in self.cos_sin)
        return rotate(x, cos, sin, self.how.interleaved)

    def _with_keys(
        self,
        products: Float[Tensor, "batch group row member key"],
        q: Float[Tensor, "batch row head d_head"],
        edits: AttentionEdits,
    ) -> Float[Tensor, "batch group row member key"]:
        """Return products with patched keys in the chosen heads; `q` is rotated."""
        patches = edits.patches
        if patches is None or patches.k is None or patches.places is None:
            return products
        n_groups = products.shape[1]
        places = patches.places.to(q.device)
        k = self._turned(patches.k.to(q), places.clamp(min=0))
        new = torch.einsum("brhd,bphd->brhp", q, k).unflatten(2, (n_groups, -1)).transpose(1, 2)
        there = (places >= 0)[:, None, None, None]
        at = places.clamp(min=0)[:, None, None, None].expand(new.shape)
        # Missing positions are scattered into an extra column after the last key, which is dropped.
        at = at.masked_fill(~there, products.shape[-1])
        padded = torch.cat([products, products.new_zeros(*products.shape[:-1], 1)], dim=-1)
        patched = padded.scatter(-1, at, new)[..., :-1]
        return torch.where(edits.by_group(n_groups, q.device), patched, products)

    def _with_values(
        self,
        z: Float[Tensor, "batch group row member d_head"],
        pattern: Float[Tensor, "batch group row member key"],
        edits: AttentionEdits,
    ) -> Float[Tensor, "batch group row member d_head"]:
        """Return z with patched values in the chosen heads."""
        patches = edits.patches
        if patches is None or patches.v is None or patches.places is None:
            return z
        n_groups = z.shape[1]
        places = patches.places.to(z.device)
        at = places.clamp(min=0)
        weight = pattern.gather(-1, at[:, None, None, None].expand(*pattern.shape[:-1], -1))
        weight = weight.masked_fill((places < 0)[:, None, None, None], 0.0)
        new = patches.v.to(z).unflatten(2, (n_groups, -1)).permute(0, 2, 3, 1, 4)  # batch group member place d_head
        old = self.v.gather(2, at[:, None, :, None].expand(-1, n_groups, -1, z.shape[-1]))
        moved = torch.einsum("bgrmp,bgmpd->bgrmd", weight, new - old[:, :, None])
        return torch.where(edits.by_group(n_groups, z.device), z + moved, z)

    def _plain(self, q: Tensor, k: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the rows' own queries and keys without the position term."""
        assert self.position_free is not None
        if self.cos_sin is not None:
            rows = torch.arange(len(q), device=q.device)
            cos, sin = (turn[rows, self.last, None] for turn in self.cos_sin)
            return without_rotation(q, cos, sin, self.how.interleaved), without_rotation(
                k, cos, sin, self.how.interleaved
            )
        if self.position_free.q_share is None or self.position_free.k_share is None:
            return q, k
        size = 1.0 if norm is None else norm.to(q)[:, :, None, None]
        return q - size * self.position_free.q_share[:, None], k - size * self.position_free.k_share[:, None]


def per_kv_head(x: Float[Tensor, "batch pos head d_head"], n_groups: int) -> Float[Tensor, "batch pos kv_head d_head"]:
    """Return keys or values once per key-value group, even if TransformerLens repeats them for every query head."""
    return x if x.shape[2] == n_groups else x[:, :, :: x.shape[2] // n_groups]


TURNS = ("cos", "sin")


def key_hooks(view: ModelView, layer: int) -> dict[str, str]:
    """Return short name -> hook name of the activations that attention over cached keys needs."""
    hooks = {name: view.hook(layer, f"attn.hook_{name}") for name in "qkv"} | attention_scores.normed_hooks(view, layer)
    if attention_scores.attention_scoring(view, layer).position == "rotary" and (
        cos_sin := attention_scores.rotation_hooks(view, layer)
    ):
        hooks |= dict(zip(TURNS, cos_sin, strict=True))
    return hooks


def position_hooks(view: ModelView, layer: int) -> dict[str, str]:
    """Return short name -> hook name of the activations that position-free keys need, for learned positions."""
    if attention_scores.attention_scoring(view, layer).position != "standard":
        return {}
    return {"position": "hook_pos_embed", "resid": view.hook(layer, "hook_resid_pre")}
