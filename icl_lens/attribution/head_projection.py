"""The map from a layer's input to one head's query, key or value, split by what earlier components wrote."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.activations.writers import LinearMap, Writers
from icl_lens.attribution.qk_metric import query_key_metric
from icl_lens.errors import InputError
from icl_lens.models import attention_scores
from icl_lens.models.head import Head
from icl_lens.models.readout import norm_scale
from icl_lens.models.view import ModelView
from icl_lens.prompts.token_ids import TokenPositions, padded_ids, resolve_positions


def require_writers(acts: Activations) -> Writers:
    """Return the writers of the activations; raise InputError if they were captured without."""
    if acts.writers is None:
        raise InputError("activations must hold writers; capture them with il.capture(model, batch, writers=True)")
    return acts.writers


def key_positions(acts: Activations, keys: TokenPositions | None) -> Int[Tensor, "batch key"]:
    """Return the positions of keys, padded with -1; by default the labels, or all positions if there are none."""
    if keys is None and acts.batch.labels:
        return acts.batch.label_positions.to(acts.view.unembed_device)
    lengths = (acts.batch.last + 1).tolist()
    return padded_ids(resolve_positions("all" if keys is None else keys, lengths)).to(acts.view.unembed_device)


def head_slice(gain: Tensor, index: int, view: ModelView) -> Tensor:
    """Return one head's entries of the gain or shift of a query or key norm (over one head, or all jointly)."""
    return gain.reshape(-1, view.d_head)[index] if gain.numel() > view.d_head else gain


class HeadProjection:
    """The map from a layer's input to a head's query, key or value at some positions, with all norms' scales frozen.

    Queries are at the last positions. Vectors are [batch n …] for n positions; those at missing positions (-1) are
    undefined.
    """

    def __init__(
        self, acts: Activations, head: Head, kind: Literal["q", "k", "v"], positions: Int[Tensor, "batch n"]
    ) -> None:
        view, layer = acts.view, head.layer
        self.acts, self.view, self.head, self.kind, self.writers = acts, view, head, kind, require_writers(acts)
        self.positions, self.norm = positions, view.attn_input_norm(layer)
        self.scoring = attention_scores.attention_scoring(view, layer)
        self.rows = self.writers.rows_at(positions).clamp(min=0)
        self.index = head.head if kind == "q" else view.kv_head(head.head)
        weight, bias, self.own_norm = {
            "q": lambda: (view.W_Q(layer), view.b_Q(layer), view.q_norm(layer)),
            "k": lambda: (view.W_K(layer), view.b_K(layer), view.k_norm(layer)),
            "v": lambda: (view.W_V(layer), view.b_V(layer), None),
        }[kind]()
        dtype = view.compute_dtype
        self.weight = weight[self.index].to(dtype)
        self.bias = torch.zeros_like(self.weight[0]) if bias is None else bias[self.index].to(dtype)
        x = self.writers.resid_pre[:, layer].to(dtype)
        self.scale = x.new_ones(len(x))
        if self.norm.normalize:
            self.scale = norm_scale(x, eps=self.norm.eps, center=self.norm.center)
        self.own_scale = torch.ones_like(self.scale)
        if self.own_norm is not None and self.own_norm.normalize:
            raw = self._without_norm(positions)
            raw = raw[..., self.index, :] if self.own_norm.width == view.d_head else raw.flatten(-2)
            scale, is_kept = norm_scale(raw, eps=self.own_norm.eps, center=self.own_norm.center), positions >= 0
            self.own_scale[self.rows[is_kept]] = scale[is_kept]

    def _without_norm(self, positions: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n head d_head"]:
        """Return the queries, keys or values of all heads before their norm."""
        if self.kind == "q":
            return self.acts.q[:, None, self.head.layer].to(self.view.compute_dtype)
        keys = self.writers.k[self.writers.passes, self.head.layer]
        keys = (keys if self.kind == "k" else self.acts.values(self.head.layer)).to(self.view.compute_dtype)
        return keys[torch.arange(len(keys), device=keys.device)[:, None], positions.clamp(min=0)]

    def vectors_at(self, positions: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n d_head"]:
        """Return the model's own queries, keys or values at positions, normed, before rotation."""
        raw = self._without_norm(positions)
        if self.own_norm is None or self.own_norm.width == self.view.d_head:
            own = raw[..., self.index, :]
            return own if self.own_norm is None else self.own_norm(own)
        return self.own_norm(raw.flatten(-2)).unflatten(-1, raw.shape[-2:])[..., self.index, :]

    def rotate(
        self, x: Float[Tensor, "batch n *m d_head"], positions: Int[Tensor, "batch n"]
    ) -> Float[Tensor, "batch n *m d_head"]:
        """Rotate (parts of) queries or keys for their positions; values and non-rotary models' keys are unchanged."""
        if self.scoring.position != "rotary" or self.kind == "v":
            return x
        at = positions.clamp(min=0)
        if self.head.layer in self.writers.angles:
            cos, sin = (angle[at] for angle in self.writers.angles[self.head.layer])
        else:
            cos, sin = attention_scores.rotation_table(self.view, self.head.layer, at)
        shape = x.shape
        x = x.reshape(*shape[:2], -1, shape[-1])
        return attention_scores.rotate(x, cos.to(x), sin.to(x), self.scoring.interleaved).reshape(shape)

    def linear(self, u: Float[Tensor, "row n d_model"], rows: Int[Tensor, " row"]) -> Float[Tensor, "row n d_head"]:
        """Apply the linear part of the map, with the norm scales of these rows."""
        u = u - u.mean(-1, keepdim=True) if self.norm.center else u
        u = u * self.scale[rows, None, None] * self.norm.gain_as(u.dtype).to(u.device)
        return self._scaled(u @ self.weight, rows)

    def _scaled(self, y: Tensor, rows: Tensor) -> Tensor:
        """Apply the linear part of the norm of queries or keys."""
        if self.own_norm is None:
            return y
        y = y - y.mean(-1, keepdim=True) if self.own_norm.center else y
        gain = head_slice(self.own_norm.gain_as(y.dtype), self.index, self.view).to(y)
        return y * self.own_scale[rows, None, None] * gain

    def split(self, linear: LinearMap) -> Float[Tensor, "batch n writer d_out"]:
        """Apply a linear map to what each writer added at the positions."""
        found = self.writers.split(self.rows.flatten(), self.head.layer, linear)
        return found.unflatten(0, self.rows.shape)

    def parts(self) -> Float[Tensor, "batch n writer d_head"]:
        """Return each writer's part of the queries, keys or values, before rotation; "bias" holds all constants."""
        parts = self.split(self.linear)
        shift = self.bias if self.norm.shift is None else self.bias + self.norm.shift.to(self.weight) @ self.weight
        constant = self._scaled(shift.expand(self.rows.numel(), 1, -1), self.rows.flatten())
        constant = constant.reshape(*self.rows.shape, -1)
        if self.own_norm is not None and self.own_norm.shift is not None:
            constant = constant + head_slice(self.own_norm.shift.to(constant), self.index, self.view)
        parts[:, :, -1] += constant
        return parts

    def without_each(self) -> Float[Tensor, "batch n writer d_head"]:
        """Return the queries or keys without each writer, with all norms recomputed, rotated and scaled."""
        metric, side = query_key_metric(self.view, self.head), "q" if self.kind == "q" else "k"

        def project_rest(u: Tensor, rows: Tensor) -> Tensor:
            return metric.project(side, self.writers.resid_pre[rows, self.head.layer, None].to(u) - u)

        rotated = self.rotate(self.split(project_rest), self.positions)
        return rotated * self.scoring.scale if self.kind == "q" else rotated

    def by_position(self, writer: Head) -> Float[Tensor, "batch n pos d_head"]:
        """Return what one head wrote, mapped and split by the position that it read, rotated and scaled."""
        values = self.acts.values(writer.layer)[:, :, self.view.kv_head(writer.head)].to(self.view.compute_dtype)
        values = values.repeat_interleave(self.rows.shape[1], dim=0)
        found = self.writers.split_by_position(self.rows.flatten(), writer, values, self.linear)
        rotated = self.rotate(found.unflatten(0, self.rows.shape), self.positions)
        return rotated * self.scoring.scale if self.kind == "q" else rotated
