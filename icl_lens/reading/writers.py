"""Record what each component wrote to the residual stream at chosen positions, and every layer's
keys.

A layer's input is the sum of what earlier writers added to the residual stream: the embedding,
every head, every FFN and the attention biases. `Writers` keeps each head's z and each FFN's output
at a few positions, so that any linear map of the layer's input can be split by writer without
storing anything of shape [layer, head, pos, d_model].
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models import attention_scores
from icl_lens.models.head import Head
from icl_lens.models.passes.memory import WRITER_BYTES
from icl_lens.models.readout import norm_scale
from icl_lens.models.view import ModelView
from icl_lens.reading.decompose import head_outputs


def writer_names(view: ModelView, layer: int) -> tuple[str, ...]:
    """Return the writers of a layer's input: "embed", "pos_embed", "L0H0", …, "F0", …, "bias"."""
    return _names(view.n_heads, layer, has_pos_embed(view))


def names_before_ffn(view: ModelView, layer: int) -> tuple[str, ...]:
    """Return the writers of what a layer's FFN reads, without biases: those of the layer's input
    and, unless attention and FFN read the same input, the layer's heads.
    """
    if view.parallel:
        return writer_names(view, layer)[:-1]
    return writer_names(view, layer + 1)[:-2]  # the last two are the FFN itself and the biases


@cache
def _names(n_heads: int, layer: int, has_pos: bool) -> tuple[str, ...]:
    names = ["embed", "pos_embed"] if has_pos else ["embed"]
    for lower in range(layer):
        names += [str(Head(lower, head)) for head in range(n_heads)]
        names.append(f"F{lower}")
    return (*names, "bias")


def vector_bytes(view: ModelView) -> int:
    """Return the bytes of one row of all writers' vectors in float32, with the sum of biases at
    every layer.
    """
    return 4 * (len(writer_names(view, view.n_layers)) + view.n_layers) * view.d_model


def has_pos_embed(view: ModelView) -> bool:
    """Return whether the model adds learned position embeddings to the residual stream."""
    return attention_scores.position_kind(view) == "standard"


@dataclass(frozen=True)
class Writers:
    """What components wrote at chosen positions, and the keys of all positions; made by
    `capture(writers=…)`.

    A row is one position of one forward pass. Vectors are in residual-stream units and the model's
    dtype.
    """

    view: ModelView
    row: Int[Tensor, "batch pos"]
    """The row in which each position of each prompt is stored; -1 where nothing was kept."""
    passes: Int[Tensor, " batch"]
    """Each prompt's index into the first axis of `k`."""
    resid_pre: Float[Tensor, "row reader d_model"]
    """Inputs of the layers `readers`."""
    z: Float[Tensor, "row layer head d_head"]
    mlp_out: Float[Tensor, "row layer d_model"]
    pos_embed: Float[Tensor, "row d_model"] | None
    k: Float[Tensor, "pass reader key kv_head d_head"]
    """Keys of the layers `readers` before their norm and rotation, b_K included."""
    angles: dict[int, tuple[Tensor, Tensor]]
    """Cosines and sines by layer, [pass or 1, key, d_rotary] each, for models that expose them to
    hooks.
    """
    readers: tuple[int, ...] | None = None
    """The layers that `resid_pre` and `k` have, in order: the first, and those whose inputs are
    read; `z` and `mlp_out` end with the last of them. None for all layers of the model.
    """

    def select(self, index: Any) -> "Writers":
        """Return the writers at the selected prompts; rows and keys are shared, not copied."""
        return replace(self, row=self.row[index], passes=self.passes[index])

    def to(self, device: torch.device | str) -> "Writers":
        """Return a copy with all tensors on `device`."""
        tensors = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        angles = {
            layer: (cos.to(device), sin.to(device)) for layer, (cos, sin) in self.angles.items()
        }
        return replace(self, angles=angles, **tensors)

    def angles_at(self, layer: int, positions: Int[Tensor, "batch n"]) -> tuple[Tensor, Tensor]:
        """Return a layer's cosines and sines [batch n d_rotary] at positions of each prompt."""
        cos, sin = self.angles[layer]
        at = (self.passes[:, None] if len(cos) > 1 else 0), positions.to(self.passes.device)
        return cos[at], sin[at]

    def inputs(self, layer: int) -> Float[Tensor, "row d_model"]:
        """Return a layer's input at all rows."""
        return self.resid_pre[:, self._index(layer)]

    def keys(self, layer: int) -> Float[Tensor, "pass key kv_head d_head"]:
        """Return a layer's keys before their norm and rotation."""
        return self.k[:, self._index(layer)]

    def _index(self, layer: int) -> int:
        return layer if self.readers is None else self.readers.index(layer)

    def names(self, layer: int) -> tuple[str, ...]:
        """Return the writers of a layer's input, see `writer_names`."""
        return writer_names(self.view, layer)

    def rows_at(self, positions: Int[Tensor, "batch n"]) -> Int[Tensor, "batch n"]:
        """Return the rows of these positions, -1 where a position is -1; raise InputError if one
        was not kept.
        """
        positions = positions.to(self.row.device)
        rows = self.row.gather(1, positions.clamp(min=0))
        is_missing = (rows < 0) & (positions >= 0)
        if bool(is_missing.any()):
            raise InputError(
                f"activations must hold writers at position {int(positions[is_missing][0])}; "
                "capture them with writers= set to the positions you need, or 'all'"
            )
        return rows.masked_fill(positions < 0, -1)

    def vectors(self, rows: Int[Tensor, " row"], layer: int) -> Float[Tensor, "row writer d_model"]:
        """Return what each writer added to a layer's input, in the order of `names`.

        If those of all rows fit in `WRITER_BYTES`, they are computed once.
        """
        if len(self.z) <= WRITER_BYTES // vector_bytes(self.view):
            vectors, bias = self._vectors
            return torch.cat(
                [vectors[rows, : len(self.names(layer)) - 1], bias[rows, layer, None]], dim=1
            )
        vectors, _ = self._joined(rows, layer)
        return vectors

    def ffn_input(self, rows: Int[Tensor, " row"], layer: int) -> Float[Tensor, "row d_model"]:
        """Return what a layer's FFN reads, before its norm."""
        resid_pre = self.inputs(layer)[rows].to(self.view.compute_dtype)
        if self.view.parallel:
            return resid_pre
        z, scale = self.z_and_norm_scale(rows, layer)
        attn_out = einsum(z, self.view.W_O(layer).to(z), "row head d, head d model -> row model")
        return resid_pre + self._add_b_O(attn_out[:, None], layer, scale)[:, 0]

    def ffn_vectors(
        self, rows: Int[Tensor, " row"], layer: int
    ) -> Float[Tensor, "row writer d_model"]:
        """Return what each writer of a layer's FFN added to what it reads, in the order of
        `names_before_ffn`.
        """
        if self.view.parallel:
            return self.vectors(rows, layer)[:, :-1]
        return self.vectors(rows, layer + 1)[:, :-2]

    def split(
        self, rows: Int[Tensor, " row"], layer: int, matrix: Float[Tensor, "d_model d_out"]
    ) -> Float[Tensor, "row writer d_out"]:
        """Multiply what each writer added to a layer's input by a matrix; writers are in the order
        of `names`.

        For few rows, this multiplies `vectors`. For many, each W_O is multiplied by the matrix
        first, which is cheaper and needs no vectors [row, writer, d_model].
        """
        if min(len(self.z), len(rows)) <= self._few_rows:
            return self.vectors(rows, layer) @ matrix
        products = matrix.new_empty(len(rows), len(self.names(layer)), matrix.shape[1])
        embeddings, bias = self._embeddings(rows)
        start = embeddings.shape[1]
        products[:, :start] = embeddings @ matrix
        for lower in range(layer):
            # The heads of the layer, then its FFN.
            ffn = start + self.view.n_heads
            z, scale = self.z_and_norm_scale(rows, lower)
            output_matrix = self.view.W_O(lower).to(z) @ matrix
            heads = einsum(z, output_matrix, "row head d, head d out -> row head out")
            products[:, start:ffn] = heads
            products[:, ffn] = self.mlp_out[rows, lower].to(matrix) @ matrix
            bias = self._add_b_O(bias, lower, scale)
            start = ffn + 1
        products[:, -1:] = bias @ matrix
        return products

    def written(
        self, rows: Int[Tensor, " row"], layer: int, writer: str
    ) -> Float[Tensor, "row d_model"]:
        """Return what one writer, one of `names`, added to a layer's input."""
        if writer in ("embed", "pos_embed", "bias"):
            embeddings, bias = self._embeddings(rows)
            for lower in range(layer if writer == "bias" else 0):
                bias = self._add_b_O(bias, lower, self.z_and_norm_scale(rows, lower)[1])
            return bias[:, 0] if writer == "bias" else embeddings[:, self.names(0).index(writer)]
        if writer.startswith("F"):
            return self.mlp_out[rows, int(writer[1:])].to(self.view.compute_dtype)
        head = Head.parse(writer)
        z, _ = self.z_and_norm_scale(rows, head.layer)
        return z[:, head.head] @ self.view.W_O(head.layer)[head.head].to(z)

    @property
    def _few_rows(self) -> int:
        """Largest number of rows for which `vectors` takes fewer operations than products of W_O
        and fits in memory.
        """
        return min(
            self.view.d_model // (self.view.n_heads + 1), WRITER_BYTES // vector_bytes(self.view)
        )

    @cached_property
    def _vectors(
        self,
    ) -> tuple[Float[Tensor, "row writer d_model"], Float[Tensor, "row layer d_model"]]:
        """What every writer except the biases wrote at all rows, and the sum of b_O before each
        layer.
        """
        all_rows = torch.arange(len(self.z), device=self.z.device)
        vectors, bias = self._joined(all_rows, self.z.shape[1])
        return vectors[:, :-1], bias

    def _joined(
        self, rows: Int[Tensor, " row"], layer: int
    ) -> tuple[Float[Tensor, "row writer d_model"], Float[Tensor, "row layer d_model"]]:
        """Return what `by_layer` yields as one tensor each, of which only one layer is kept twice.

        The last writer is the sum of all biases.
        """
        n_writers, start = len(self.names(layer)), 0
        vectors = self.z.new_empty(
            len(rows), n_writers, self.view.d_model, dtype=self.view.compute_dtype
        )
        biases = []
        for of_layer, bias in self.by_layer(rows, layer):
            vectors[:, start : start + of_layer.shape[1]] = of_layer
            start += of_layer.shape[1]
            biases.append(bias)
        vectors[:, -1:] = biases[-1]
        return vectors, torch.cat(biases, dim=1)

    def by_layer(
        self, rows: Int[Tensor, " row"], layer: int
    ) -> Iterator[tuple[Float[Tensor, "row n d_model"], Float[Tensor, "row 1 d_model"]]]:
        """Yield what the embeddings wrote, then the heads and FFN of each layer before `layer`, with
        the sum of b_O so far.
        """
        embeddings, bias = self._embeddings(rows)
        yield embeddings, bias
        for lower in range(layer):
            z, scale = self.z_and_norm_scale(rows, lower)
            bias = self._add_b_O(bias, lower, scale)
            heads = head_outputs(z, self.view.W_O(lower))
            yield torch.cat([heads, self.mlp_out[rows, lower, None].to(heads)], dim=1), bias

    def _embeddings(
        self, rows: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, "row n d_model"], Float[Tensor, "row 1 d_model"]]:
        """Return the embeddings of tokens and positions, and zeros to add biases to."""
        embeddings = self.resid_pre[rows, :1].to(self.view.compute_dtype)
        bias = torch.zeros_like(embeddings)
        if self.pos_embed is not None:
            position = self.pos_embed[rows, None].to(embeddings)
            embeddings = torch.cat([embeddings - position, position], dim=1)
        return embeddings, bias

    def _add_b_O(self, bias: Tensor, layer: int, scale: Tensor) -> Float[Tensor, "row 1 d_model"]:
        b_O = self.view.b_O(layer)
        return bias if b_O is None else bias + b_O.to(bias) * scale

    def z_and_norm_scale(
        self, rows: Int[Tensor, " row"], layer: int
    ) -> tuple[Float[Tensor, "row head d_head"], Float[Tensor, "row 1 1"]]:
        """Return each head's z times the scale of the norm after attention, and that scale (1 if
        there is none).
        """
        return z_and_norm_scale(self.view, layer, self.z[rows, layer])


def z_and_norm_scale(
    view: ModelView, layer: int, z: Float[Tensor, "row head d_head"]
) -> tuple[Float[Tensor, "row head d_head"], Float[Tensor, "row 1 1"]]:
    """Return z times the scale of the norm after attention, and that scale (1 if there is none)."""
    z = z.to(view.compute_dtype)
    scale = z.new_ones(len(z), 1, 1)
    if (post := view.attn_post_norm(layer)) is not None:
        raw = einsum(z, view.raw_W_O(layer).to(z), "row head d, head d model -> row model")
        raw = raw if (b_O := view.raw_b_O(layer)) is None else raw + b_O
        scale = norm_scale(raw, eps=post.eps, center=post.center)[:, None, None]
    return z * scale, scale
