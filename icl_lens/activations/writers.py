"""Record what each component wrote to the residual stream at chosen positions, and every layer's keys.

A layer's input is the sum of what earlier writers added to the residual stream: the embedding, every head, every FFN
and the attention biases. `Writers` keeps each head's z and each FFN's output at a few positions, so that any linear map
of the layer's input can be split by writer without storing anything of shape [layer, head, pos, d_model].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.decompose import head_outputs
from icl_lens.errors import InputError
from icl_lens.models import attention_scores
from icl_lens.models.head import Head
from icl_lens.models.readout import norm_scale
from icl_lens.models.view import ModelView

# Memory limit of the vectors [row, writer, d_model]; larger ones are computed in pieces of about this size.
WRITER_BYTES = 128 * 2**20

LinearMap = Callable[[Float[Tensor, "row n d_model"], Int[Tensor, " row"]], Float[Tensor, "row n d_out"]]
"""A map of vectors in the residual stream at some rows of `Writers`; the rows select frozen norm scales."""


@dataclass(frozen=True)
class Writers:
    """What components wrote at chosen positions, and the keys of all positions; made by `capture(writers=…)`.

    A row is one position of one forward pass. Vectors are in residual-stream units and the model's dtype.
    """

    view: ModelView
    row: Int[Tensor, "batch pos"]
    """The row of each prompt's positions; -1 where nothing was kept."""
    passes: Int[Tensor, " batch"]
    """Each prompt's index into the first axis of `k`."""
    resid_pre: Float[Tensor, "row layer d_model"]
    z: Float[Tensor, "row layer head d_head"]
    mlp_out: Float[Tensor, "row layer d_model"]
    pattern: Float[Tensor, "row layer head key"]
    pos_embed: Float[Tensor, "row d_model"] | None
    k: Float[Tensor, "pass layer key kv_head d_head"]
    """Keys before their norm and rotation, b_K included."""
    angles: dict[int, tuple[Tensor, Tensor]]
    """Cosines and sines by layer, [key d_rotary] each, for models that expose them to hooks."""

    def select(self, index: Any) -> "Writers":
        """Return the writers at the selected prompts; rows and keys are shared, not copied."""
        return replace(self, row=self.row[index], passes=self.passes[index])

    def to(self, device: torch.device | str) -> "Writers":
        """Return a copy with all tensors on `device`."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        angles = {layer: (cos.to(device), sin.to(device)) for layer, (cos, sin) in self.angles.items()}
        return replace(self, angles=angles, **tensors)

    def names(self, layer: int) -> tuple[str, ...]:
        """Return the writers of a layer's input: "embed", "pos_embed", "L0H0", …, "F0", …, "bias"."""
        first = ("embed",) if self.pos_embed is None else ("embed", "pos_embed")
        blocks = [(*(str(Head(lower, h)) for h in range(self.view.n_heads)), f"F{lower}") for lower in range(layer)]
        return (*first, *(name for block in blocks for name in block), "bias")

    def rows_at(self, positions: Int[Tensor, "batch n"]) -> Int[Tensor, "batch n"]:
        """Return the rows of these positions, -1 where a position is -1; raise InputError if one was not kept."""
        positions = positions.to(self.row.device)
        rows = self.row.gather(1, positions.clamp(min=0))
        is_missing = (rows < 0) & (positions >= 0)
        if bool(is_missing.any()):
            raise InputError(
                f"activations must hold writers at position {int(positions[is_missing][0])}; capture them with "
                "writers= set to the positions you need, or 'all'"
            )
        return rows.masked_fill(positions < 0, -1)

    def split(self, rows: Int[Tensor, " row"], layer: int, linear: LinearMap) -> Float[Tensor, "row writer d_out"]:
        """Apply `linear` to what each writer added to a layer's input, in the order of `names`.

        Vectors of all writers are kept for the next call if they fit in `WRITER_BYTES`; otherwise they are recomputed.
        """
        n_writers = len(self.names(layer)) - 1
        if len(self.z) * (self.n_writers + self.view.n_layers) <= self._max_rows * (self.view.n_heads + 1):
            vectors, bias = self._vectors
            return linear(torch.cat([vectors[rows, :n_writers], bias[rows, layer, None]], dim=1), rows)
        pieces = []
        for piece in rows.split(self._max_rows):
            written = [(linear(u, piece), bias) for u, bias in self._vectors_by_layer(piece, layer)]
            pieces.append(torch.cat([*(part for part, _ in written), linear(written[-1][1], piece)], dim=1))
        return torch.cat(pieces)

    @property
    def n_writers(self) -> int:
        """Number of writers to the last layer's output, without biases."""
        return len(self.names(self.view.n_layers)) - 1

    @property
    def _max_rows(self) -> int:
        return max(1, WRITER_BYTES // (4 * (self.view.n_heads + 1) * self.view.d_model))

    @cached_property
    def _vectors(self) -> tuple[Float[Tensor, "row writer d_model"], Float[Tensor, "row layer d_model"]]:
        """What every writer except the biases wrote at all rows, and the sum of b_O before each layer."""
        all_rows = torch.arange(len(self.z), device=self.z.device)
        written = list(self._vectors_by_layer(all_rows, self.view.n_layers))
        return torch.cat([u for u, _ in written], dim=1), torch.cat([bias for _, bias in written], dim=1)

    def _vectors_by_layer(
        self, rows: Int[Tensor, " row"], layer: int
    ) -> Iterator[tuple[Float[Tensor, "row n d_model"], Float[Tensor, "row 1 d_model"]]]:
        """Yield the embeddings, then the heads and FFN of each layer before `layer`, with the sum of b_O so far."""
        dtype = self.view.compute_dtype
        first = self.resid_pre[rows, :1].to(dtype)
        bias = torch.zeros_like(first)
        if self.pos_embed is not None:
            position = self.pos_embed[rows, None].to(dtype)
            first = torch.cat([first - position, position], dim=1)
        yield first, bias
        for lower in range(layer):
            heads, scale = self.head_outputs(rows, lower)
            if (b_O := self.view.b_O(lower)) is not None:
                bias = bias + b_O.to(dtype) * scale
            yield torch.cat([heads, self.mlp_out[rows, lower, None].to(dtype)], dim=1), bias

    def head_outputs(
        self, rows: Int[Tensor, " row"], layer: int
    ) -> tuple[Float[Tensor, "row head d_model"], Float[Tensor, "row 1 1"]]:
        """Return what each head of a layer wrote, and the scale of the norm after attention (1 if there is none)."""
        z, view = self.z[rows, layer].to(self.view.compute_dtype), self.view
        scale = z.new_ones(len(z), 1, 1)
        if (post := view.attn_post_norm(layer)) is not None:
            raw = einsum(z, view.raw_W_O(layer).to(z), "row head d, head d model -> row model")
            raw = raw if (b_O := view.raw_b_O(layer)) is None else raw + b_O
            scale = norm_scale(raw, eps=post.eps, center=post.center)[:, None, None]
        return head_outputs(z * scale, view.W_O(layer)), scale

    def split_by_position(
        self, rows: Int[Tensor, " row"], writer: Head, values: Float[Tensor, "row key d_head"], linear: LinearMap
    ) -> Float[Tensor, "row key d_out"]:
        """Apply `linear` to what one head wrote at each row, split by the position it read.

        `values` are that head's values at all positions of each row's pass; the sum over `key` is its entry of `split`.
        """
        layer, head = writer
        _, scale = self.head_outputs(rows, layer)
        pattern = self.pattern[rows, layer, head][..., None].to(values)
        return linear(pattern * scale * values @ self.view.W_O(layer)[head].to(values), rows)


class WriterRecorder:
    """Hooks that record `Writers` during one forward pass."""

    def __init__(self, view: ModelView, passes: Int[Tensor, " batch"], positions: Sequence[Sequence[int]], width: int):
        """Record `positions` of each prompt; `passes` holds its row in the pass, and `width` is the pass's length."""
        self.view, self.device, self.passes, self.width = view, view.unembed_device, passes, width
        recorded = sorted({(index, at) for index, row in zip(passes.tolist(), positions, strict=True) for at in row})
        self.pass_index, self.positions = torch.tensor(recorded, device=self.device).unbind(-1)
        row_of = {pair: i for i, pair in enumerate(recorded)}
        self.row = torch.full((len(passes), width), -1, dtype=torch.long)
        for prompt, (index, row) in enumerate(zip(passes.tolist(), positions, strict=True)):
            for at in row:
                self.row[prompt, at] = row_of[index, at]
        self.store: dict[str, list[Tensor]] = {name: [] for name in ("resid_pre", "z", "mlp_out", "pattern", "k")}
        self.angles: dict[int, list[Tensor]] = {}
        self.pos_embed: Tensor | None = None

    def hooks(self) -> list[tuple[str, Callable[..., None]]]:
        """Return (hook name, callback) pairs, layer by layer."""
        view, hooks = self.view, []
        if attention_scores.attention_scoring(view, 0).position == "standard":
            hooks.append(("hook_pos_embed", self._record_pos_embed))
        for layer in range(view.n_layers):
            for name, hook in (
                ("resid_pre", "hook_resid_pre"),
                ("k", "attn.hook_k"),
                ("pattern", "attn.hook_pattern"),
                ("z", "attn.hook_z"),
                ("mlp_out", "hook_mlp_out"),
            ):
                hooks.append((view.hook(layer, hook), self._recording_hook(name)))
            hooks += [(hook, self._angle_hook(layer)) for hook in attention_scores.rotation_hooks(view, layer) or ()]
        return hooks

    def _at_rows(self, x: Tensor) -> Tensor:
        rows = self.pass_index.to(x.device) if len(x) > 1 else 0
        return x[rows, self.positions.to(x.device)].to(self.device)

    def _record_pos_embed(self, value: Tensor, hook: Any = None) -> None:
        self.pos_embed = self._at_rows(value.detach())

    def _recording_hook(self, name: str) -> Callable[..., None]:
        def record(value: Tensor, hook: Any = None) -> None:
            value = value.detach()
            if name == "k":
                groups = value.shape[2] // self.view.n_kv_heads  # may be repeated for grouped-query attention
                value = value[:, : self.width, ::groups].to(self.device)
            elif name == "pattern":
                value = self._at_rows(value.transpose(1, 2))[..., : self.width]
            else:
                value = self._at_rows(value)
            self.store[name].append(value)

        return record

    def _angle_hook(self, layer: int) -> Callable[..., None]:
        def record(value: Tensor, hook: Any = None) -> None:
            # Prompts begin at position 0, so the angles of the longest one include those of all others.
            longest = int(self.pass_index[self.positions.argmax()]) if len(value) > 1 else 0
            self.angles.setdefault(layer, []).append(value.detach()[longest, : self.width].to(self.device))

        return record

    def finish(self) -> Writers:
        """Return what was recorded."""
        stacked = {name: torch.stack(layers, dim=1) for name, layers in self.store.items()}
        return Writers(
            view=self.view,
            row=self.row.to(self.device),
            passes=self.passes.to(self.device),
            pos_embed=self.pos_embed,
            angles={layer: (cos, sin) for layer, (cos, sin) in self.angles.items()},
            **stacked,
        )
