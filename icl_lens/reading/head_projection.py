"""The map from a layer's input to one head's query, key or value, split by what earlier components
wrote.

`AttentionRow` turns queries and keys into the head's attention.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models import attention_scores
from icl_lens.models.head import Head
from icl_lens.models.passes.memory import ROTATED_BYTES, WRITER_BYTES
from icl_lens.models.readout import norm_scale
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import require_demonstrations
from icl_lens.prompts.token_ids import TokenPositions, padded_ids, resolve_positions
from icl_lens.reading.activations import TOLERANCE, Activations
from icl_lens.reading.queries_keys_values import head_slice, normed, project, projection_weights
from icl_lens.reading.writers import Writers, vector_bytes


def require_writers(acts: Activations) -> Writers:
    """Return the writers of the activations; raise InputError if they were captured without."""
    if acts.writers is None:
        raise InputError(
            "activations must hold writers; capture them with il.capture(model, batch, "
            "writers=True)"
        )
    return acts.writers


def key_positions(
    acts: Activations, keys: TokenPositions | None, of_labels: Int[Tensor, "batch n"]
) -> Int[Tensor, "batch key"]:
    """Return positions of keys, padded with -1; by default `of_labels`, or all without
    demonstrations.
    """
    if keys is None and acts.batch.has_demonstrations:
        return of_labels.to(acts.view.unembed_device)
    lengths = (acts.batch.last + 1).tolist()
    return padded_ids(resolve_positions("all" if keys is None else keys, lengths)).to(
        acts.view.unembed_device
    )


def keys_of_label(
    batch: PromptBatch, positions: Int[Tensor, "batch key"], label: Int[Tensor, " batch"]
) -> Bool[Tensor, "batch key"]:
    """Return which keys are tokens of labels equal to `label` (an index into `batch.labels`, one
    per prompt).

    Raise InputError unless all keys are tokens of labels.
    """
    require_demonstrations(batch, "label to select", "pass masks of keys to `contrast`")
    start, end = batch.label_ranges.to(positions.device)[..., None].unbind(2)
    in_label = (start <= positions[:, None]) & (positions[:, None] < end)  # [batch demo key]
    if not bool((in_label.any(1) | (positions < 0)).all()):
        raise InputError(
            "keys must be tokens of labels, got others; omit keys= or select keys by a mask"
        )
    is_equal = batch.label_index == label.to(batch.label_index)[:, None]
    return (in_label & is_equal.to(positions.device)[..., None]).any(1)


def rotation_angles(
    acts: Activations, layer: int, positions: Int[Tensor, "batch n"]
) -> tuple[Tensor, Tensor] | None:
    """Return a layer's cosines and sines [batch n d_rotary] at positions; None for a layer without
    rotation.
    """
    view, writers = acts.view, require_writers(acts)
    if attention_scores.attention_scoring(view, layer).position != "rotary":
        return None
    at = positions.clamp(min=0)
    if layer in writers.angles:
        return writers.angles_at(layer, at)
    if attention_scores.rotation_hooks(view, layer) is not None:
        return None  # the hooks did not fire
    return attention_scores.rotation_table(view, layer, at)


class HeadProjection:
    """The map from a layer's input to a head's query, key or value at some positions, with all
    norms' scales frozen.

    For queries, positions must be prompts' last ones. Vectors are [batch n …] for n positions;
    those at missing positions (-1) are undefined.
    """

    def __init__(
        self,
        acts: Activations,
        head: Head,
        kind: Literal["q", "k", "v"],
        positions: Int[Tensor, "batch n"],
    ) -> None:
        view, layer = acts.view, head.layer
        self.acts, self.view, self.head, self.kind, self.writers = (
            acts,
            view,
            head,
            kind,
            require_writers(acts),
        )
        self.positions, self.norm = positions, view.attn_input_norm(layer)
        self.scoring = attention_scores.attention_scoring(view, layer)
        self.rows = self.writers.rows_at(positions).clamp(min=0)
        self.index = head.head if kind == "q" else view.kv_head(head.head)
        weight, bias, self.own_norm = projection_weights(view, layer, kind)
        dtype = view.compute_dtype
        weight = weight[self.index].to(dtype)
        matrix = self.norm.gain_as(dtype).to(weight.device)[..., None] * weight
        self.matrix = matrix - matrix.mean(0, keepdim=True) if self.norm.center else matrix
        """The linear part of the map without scales: centering, the norm's gain, and W_Q, W_K or
        W_V.
        """
        # The constant part: the bias, and the norm's shift times the weights.
        self.shift = torch.zeros_like(weight[0]) if bias is None else bias[self.index].to(dtype)
        if self.norm.shift is not None:
            self.shift = self.shift + self.norm.shift.to(weight) @ weight
        x = self.writers.inputs(layer).to(dtype)
        self.scale = x.new_ones(len(x))
        if self.norm.normalize:
            self.scale = norm_scale(x, eps=self.norm.eps, center=self.norm.center)
        # HunYuan norms queries and keys after rotation. A rotation changes no scale, so only the
        # gain, which `rotate` applies, comes after it.
        self.norms_rotated = self.own_norm is not None and self.scoring.norms_rotated
        # The scale of the norm of queries or keys.
        self.own_scale = torch.ones_like(self.scale)
        if self.own_norm is not None and self.own_norm.normalize:
            raw = self._without_norm(positions)
            raw = raw[..., self.index, :] if self.own_norm.width == view.d_head else raw.flatten(-2)
            scale, is_kept = (
                norm_scale(raw, eps=self.own_norm.eps, center=self.own_norm.center),
                positions >= 0,
            )
            self.own_scale[self.rows[is_kept]] = scale[is_kept]

    def _without_norm(
        self, positions: Int[Tensor, "batch n"]
    ) -> Float[Tensor, "batch n head d_head"]:
        """Return the queries, keys or values of all heads before their norm."""
        if self.kind == "q":
            q = self.acts.q[:, None, self.head.layer].to(self.view.compute_dtype)
            return q.expand(-1, positions.shape[1], -1, -1)
        keys = self.writers.keys(self.head.layer)[self.writers.passes]
        keys = (keys if self.kind == "k" else self.acts.values.of_layer(self.head.layer)).to(
            self.view.compute_dtype
        )
        return keys[torch.arange(len(keys), device=keys.device)[:, None], positions.clamp(min=0)]

    def vectors_at(self, positions: Int[Tensor, "batch n"]) -> Float[Tensor, "batch n d_head"]:
        """Return the model's own queries, keys or values at positions, normed, as `rotate` takes
        them.
        """
        raw = self._without_norm(positions)
        if self.own_norm is None or self.own_norm.width == self.view.d_head:
            return normed(raw[..., self.index, :], self.own_norm, self.scoring, rotates_later=True)
        flat = normed(raw.flatten(-2), self.own_norm, self.scoring, rotates_later=True)
        return flat.unflatten(-1, raw.shape[-2:])[..., self.index, :]

    def project(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_head"]:
        """Return queries, keys or values of inputs of the layer, normed, as `rotate` takes them."""
        return project(self.view, self.head, self.kind, self.norm(x), rotates_later=True)

    def at_zero(self, x: Float[Tensor, "*n d_head"]) -> Float[Tensor, "*n d_head"]:
        """Return (parts of) queries or keys without rotation, as if at position 0."""
        return x * self._late_gain(x) if self.norms_rotated else x

    def _late_gain(self, x: Tensor) -> Tensor:
        """Return the gain of a norm after rotation."""
        assert self.own_norm is not None
        return self.own_norm.gain_as(x.dtype).to(x.device)

    def rotate(
        self,
        x: Float[Tensor, "batch n *m d_head"],
        positions: Int[Tensor, "batch n"],
        *,
        back: bool = False,
    ) -> Float[Tensor, "batch n *m d_head"]:
        """Rotate (parts of) queries or keys for their positions; values, and layers without
        rotation, stay.
        """
        if self.norms_rotated:
            turned = self._turn(x * self._late_gain(x) if back else x, positions, back=back)
            return turned if back else turned * self._late_gain(x)
        return self._turn(x, positions, back=back)

    def _turn(
        self,
        x: Float[Tensor, "batch n *m d_head"],
        positions: Int[Tensor, "batch n"],
        *,
        back: bool,
    ) -> Float[Tensor, "batch n *m d_head"]:
        angles = (
            None if self.kind == "v" else rotation_angles(self.acts, self.head.layer, positions)
        )
        if angles is None:
            return x
        cos, sin = angles
        cos, sin, flat = (
            cos.to(x),
            (-sin if back else sin).to(x),
            x.reshape(*x.shape[:2], -1, x.shape[-1]),
        )
        rotated = torch.empty_like(flat)
        step = max(
            1, ROTATED_BYTES // max(1, 4 * flat[:, 0].numel())
        )  # rotations need several times their memory
        for start in range(0, flat.shape[1], step):
            piece = slice(start, start + step)
            rotated[:, piece] = attention_scores.rotate(
                flat[:, piece], cos[:, piece], sin[:, piece], self.scoring
            )
        return rotated.reshape(x.shape)

    def parts(self, writer: str | None = None) -> Float[Tensor, "batch n writer d_head"]:
        """Return every writer's part, or only `writer`'s, before rotation; the part of "bias" holds
        all constants.
        """
        rows, layer = self.rows.flatten(), self.head.layer
        if writer is None:
            parts = self.writers.split(rows, layer, self.matrix)
        else:
            parts = self.writers.written(rows, layer, writer)[:, None] @ self.matrix
        parts *= self.scale[rows, None, None]
        has_constants = writer in (None, "bias")
        if has_constants:
            parts[:, -1] += self.shift
        if self.own_norm is not None:
            parts = parts - parts.mean(-1, keepdim=True) if self.own_norm.center else parts
            parts = parts * self.own_scale[rows, None, None]
            if not self.norms_rotated:
                parts = parts * head_slice(
                    self.own_norm.gain_as(parts.dtype), self.index, self.view
                ).to(parts)
            if has_constants and self.own_norm.shift is not None:
                parts[:, -1] += head_slice(self.own_norm.shift.to(parts), self.index, self.view)
        return parts.unflatten(0, self.rows.shape)

    def pull_back(
        self, direction: Float[Tensor, "batch n d_head"]
    ) -> Float[Tensor, "batch n d_model"]:
        """Return g such that written · g = part · `direction`, for what a writer wrote and its part
        before rotation.
        """
        if self.own_norm is not None:
            if not self.norms_rotated:
                gain = head_slice(self.own_norm.gain_as(direction.dtype), self.index, self.view)
                direction = direction * gain.to(direction)
            direction = direction * self.own_scale[self.rows][..., None]
            direction = (
                direction - direction.mean(-1, keepdim=True) if self.own_norm.center else direction
            )
        return direction @ self.matrix.T * self.scale[self.rows][..., None]

    def without_each(self) -> Float[Tensor, "batch n writer d_head"]:
        """Return rotated and scaled queries, or rotated keys, without each writer, with all norms
        recomputed.
        """
        projected = []
        for rows in self.rows.flatten().split(max(1, WRITER_BYTES // vector_bytes(self.view))):
            u = self.writers.vectors(rows, self.head.layer)
            remaining = self.writers.inputs(self.head.layer)[rows, None].to(u) - u
            projected.append(self.project(remaining))
        rotated = self.rotate(torch.cat(projected).unflatten(0, self.rows.shape), self.positions)
        return rotated * self.scoring.scale if self.kind == "q" else rotated

    def by_position(
        self, writer: Head, direction: Float[Tensor, "batch n d_head"]
    ) -> Float[Tensor, "batch n pos"]:
        """Split the dot product of an earlier head's rotated part and `direction` by the positions
        that it read.

        Raise InputError unless the writer is a head of an earlier layer.
        """
        writer = self.view.check_head(writer)
        if writer.layer >= self.head.layer:
            raise InputError(f"writer must be a head in a layer before {self.head}, got {writer}")
        g = self.pull_back(self.rotate(direction, self.positions, back=True))
        through_W_O = g @ self.view.W_O(writer.layer)[writer.head].to(g).T
        values = self.acts.values.of_layer(writer.layer)[:, :, self.view.kv_head(writer.head)].to(g)
        _, scale = self.writers.z_and_norm_scale(self.rows.flatten(), writer.layer)
        moved = einsum(
            values, through_W_O, "batch pos d, batch n d -> batch n pos"
        ) * scale.reshape(*self.rows.shape, 1)
        return moved * attention_from(self.acts, writer, self.positions)


@dataclass(frozen=True)
class AttentionRow:
    """One head's scores from some positions to all positions, and how the model turns them into
    attention.
    """

    scores: Float[Tensor, "batch n pos"]
    keys: Float[Tensor, "batch pos d_head"]
    """Keys, rotated."""
    bias: Float[Tensor, "batch n pos"]
    """ALiBi's bias; -inf at masked positions."""
    scoring: attention_scores.AttentionScoring
    sink: float | None = None
    """The head's logit of attention to nothing."""

    @classmethod
    def from_queries(
        cls,
        keys: HeadProjection,
        queries: Float[Tensor, "batch n d_head"],
        positions: Int[Tensor, "batch n"],
    ) -> "AttentionRow":
        """Score rotated and scaled queries at `positions` against all keys; `keys` is the head's
        projection to keys.
        """
        acts, view, scoring = keys.acts, keys.view, keys.scoring
        key_positions = torch.arange(acts.pattern.shape[-1], device=positions.device).expand(
            len(positions), -1
        )
        rotated = keys.rotate(keys.vectors_at(key_positions), key_positions)
        bias = queries.new_zeros(*positions.shape, key_positions.shape[1])
        if scoring.position == "alibi":
            last = acts.batch.last.to(positions)[:, None]
            bias += attention_scores.alibi(view, keys.head.layer, key_positions <= last)[
                :, keys.head.head, None
            ].to(bias)
        at, key_positions = positions.clamp(min=0)[..., None], key_positions[:, None]
        masked = (
            key_positions > at
            if scoring.window is None
            else (key_positions > at) | (key_positions <= at - scoring.window)
        )
        scores = einsum(queries, rotated, "batch n d, batch pos d -> batch n pos")
        sink = None if scoring.sinks is None else float(scoring.sinks[keys.head.head])
        return cls(scores, rotated, bias.masked_fill(masked, -torch.inf), scoring, sink)

    def pattern(
        self, change: Float[Tensor, "batch *m n pos"] | float = 0.0
    ) -> Float[Tensor, "batch *m n pos"]:
        """Return the attention to all positions when `change` is added to the scores."""
        n_more = change.ndim - self.scores.ndim if isinstance(change, Tensor) else 0
        scores, bias = (
            x.reshape(len(x), *[1] * n_more, *x.shape[1:]) for x in (self.scores, self.bias)
        )
        scores = self.scoring.capped(scores + change)
        return attention_scores.attention(scores + bias, self.sink)


def attention_row(acts: Activations, head: Head, positions: Int[Tensor, "batch n"]) -> AttentionRow:
    """Recompute a head's scores from positions whose writers were kept, and from the last one.

    Raise InputError if the recomputed attention from the last position differs from the model's.
    """
    writers = require_writers(acts)
    positions = torch.cat([positions, acts.batch.last.to(positions)[:, None]], dim=1)
    x = writers.inputs(head.layer)[writers.rows_at(positions).clamp(min=0)].to(
        acts.view.compute_dtype
    )
    queries = HeadProjection(acts, head, "q", acts.batch.last[:, None].to(positions))
    q = queries.rotate(queries.project(x), positions) * queries.scoring.scale
    row = AttentionRow.from_queries(HeadProjection(acts, head, "k", positions[:, :0]), q, positions)
    check_attention(acts, head, row, row.pattern()[:, -1])
    return row


def attention_from(
    acts: Activations, head: Head, positions: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch n pos"]:
    """Recompute a head's attention from positions whose writers were kept.

    Raise InputError if the recomputed attention from the last position differs from the model's.
    """
    return attention_row(acts, head, positions).pattern()[:, :-1]


# Allowed difference of log-attention per unit of the scores.
LOG_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.bfloat16: 3e-2,
    torch.float16: 1e-2,
}


def check_attention(
    acts: Activations, head: Head, row: AttentionRow, pattern: Float[Tensor, "batch pos"]
) -> None:
    """Raise InputError unless the model's attention from the last position is `pattern`, which
    follows from `row`.
    """
    what, expected, dtype = (
        "attention does not follow from the scores",
        acts.pattern[:, *head],
        acts.z.dtype,
    )
    check_parts(acts, head, what, pattern - expected)
    error = pattern.clamp(min=1e-38).log() - expected.to(pattern).clamp(min=1e-38).log()
    error = error.masked_fill(expected < torch.finfo(dtype).tiny, 0)  # masked keys, and rounding
    unit = LOG_TOLERANCE.get(dtype, 1e-4) / TOLERANCE.get(dtype, 1e-3)
    check_parts(acts, head, what, error / (unit * (1 + row.scores.abs().max())))


def check_parts(acts: Activations, head: Head, what: str, error: Tensor) -> None:
    """Raise InputError if an identity that parts rely on does not hold within the precision of the
    activations.
    """
    worst, allowed = float(error.abs().max()), TOLERANCE.get(acts.z.dtype, 1e-3)
    if not worst <= allowed:
        raise InputError(
            f"attention scores of {acts.view.architecture} are not supported: in {head}, {what} "
            f"(error {worst:.1e}, allowed {allowed:.0e}); use acts.attention_to_labels and "
            "il.head_effects, which read the model's own"
        )
