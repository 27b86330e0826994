"""Read the activations of a pass from its hooks, one layer at a time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.activations.writers import WriterRecorder
from icl_lens.errors import InputError
from icl_lens.models.norms import NormView
from icl_lens.models.readout import norm_scale
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.token_ids import TokenPositions, resolve_positions


@dataclass(frozen=True)
class ReadPlan:
    """A forward pass: the batch to run, and the rows to read, which may be several positions of each prompt."""

    run: PromptBatch
    rows: PromptBatch
    pass_index: Int[Tensor, " batch"] | None = None
    """Row of `run` that each row is read from; None if they are the same."""

    @classmethod
    def at(cls, batch: PromptBatch, positions: TokenPositions) -> "ReadPlan":
        rows = replace(batch, prompt_index=None).at(positions)
        assert rows.prompt_index is not None
        index, prompt_index = rows.prompt_index, batch.prompt_index
        return cls(batch, rows if prompt_index is None else replace(rows, prompt_index=prompt_index[index]), index)

    @classmethod
    def shared(cls, batch: PromptBatch) -> "ReadPlan":
        """Run only the longest row of each prompt; the other rows are prefixes of it."""
        assert batch.prompt_index is not None
        prompts, index = batch.prompt_index.unique(return_inverse=True)
        last = torch.where(index[None] == torch.arange(len(prompts), device=index.device)[:, None], batch.last, -1)
        return cls(batch[last.argmax(1)], batch, index)


class Recorder:
    """Fills preallocated tensors from hook values."""

    def __init__(self, view: ModelView, plan: ReadPlan, writers: bool | TokenPositions = False):
        self.view, self.batch, self.device = view, plan.rows, view.unembed_device
        self.pass_index = None if plan.pass_index is None else plan.pass_index.to(self.device)
        self.store: dict[str, Tensor] = {}
        self.writers = None if writers is False else self._writer_recorder(writers)

    def _writer_recorder(self, positions: bool | TokenPositions) -> WriterRecorder:
        """Return a recorder of what was written at these positions (True: the labels) and the last one."""
        batch = self.batch
        if isinstance(positions, bool):
            positions = [row[row >= 0].tolist() or [-1] for row in batch.label_positions] if batch.labels else "all"
        lengths = (batch.last + 1).tolist()
        kept = [[*row, n - 1] for row, n in zip(resolve_positions(positions, lengths), lengths, strict=True)]
        passes = torch.arange(len(batch), device=self.device) if self.pass_index is None else self.pass_index
        return WriterRecorder(self.view, passes, kept, batch.tokens.shape[1])

    def hooks(self) -> list[tuple[str, Callable[..., None]]]:
        """Return (hook name, callback) pairs for all recorded values."""
        view, hooks = self.view, []
        for layer in range(view.n_layers):
            hooks += [
                (
                    view.hook(layer, "hook_resid_pre"),
                    self._keep(layer, resid_pre=self._at_last, label_resid_pre=self._at_labels),
                ),
                (view.hook(layer, "attn.hook_q"), self._keep(layer, q=self._at_last)),
                (view.hook(layer, "attn.hook_v"), self._keep(layer, pass_v=self._everywhere)),
                (view.hook(layer, "attn.hook_pattern"), self._keep(layer, pattern=self._last_query)),
                (view.hook(layer, "attn.hook_z"), self._keep(layer, z=self._at_last)),
                (
                    view.hook(layer, "hook_attn_out"),
                    self._keep(layer, attn_out=self._at_last, label_attn_out=self._at_labels),
                ),
                (view.hook(layer, "hook_mlp_out"), self._keep(layer, mlp_out=self._at_last)),
            ]
            if f"blocks.{layer}.mlp.hook_post" in view.hook_names:
                hooks.append((f"blocks.{layer}.mlp.hook_post", self._keep(layer, mlp_post=self._at_last)))
        hooks.append((view.hook(view.n_layers - 1, "hook_resid_post"), self._keep(None, resid_final=self._at_last)))
        return hooks if self.writers is None else [*hooks, *self.writers.hooks()]

    def _keep(self, layer: int | None, **reads: Callable[[Tensor], Tensor]) -> Callable[..., None]:
        """Return a hook that stores what each function reads from its value."""

        def keep(value: Tensor, hook: Any = None) -> None:
            if "mlp_post" in reads and value.ndim != 3:  # a mixture of experts
                return
            for name, read in reads.items():
                part = read(value.detach()).to(self.device)
                if layer is None:
                    self.store[name] = part
                    continue
                if name not in self.store:
                    self.store[name] = part.new_empty((len(part), self.view.n_layers, *part.shape[1:]))
                self.store[name][:, layer] = part

        return keep

    def _rows(self, value: Tensor) -> Tensor:
        """Return the row of the pass that each row is read from."""
        return (
            torch.arange(len(value), device=value.device)
            if self.pass_index is None
            else self.pass_index.to(value.device)
        )

    def _at_last(self, value: Tensor) -> Tensor:
        return value[self._rows(value), self.batch.last.to(value.device)]

    def _at_labels(self, value: Tensor) -> Tensor:
        return at_positions(value, self.batch.label_positions.to(value.device), self._rows(value))

    def _last_query(self, pattern: Tensor) -> Tensor:
        width = self.batch.tokens.shape[1]
        return pattern[self._rows(pattern), :, self.batch.last.to(pattern.device), :width]

    def _everywhere(self, v: Tensor) -> Tensor:
        repeated = v.shape[2] // self.view.n_kv_heads  # TransformerLens may repeat key-value groups
        return v[:, : self.batch.tokens.shape[1], ::repeated]

    def fields(self) -> dict[str, Any]:
        """Return the fields of the `Activations`, including the scales of norms after attention and FFN."""
        view, layers = self.view, range(self.view.n_layers)
        readout = view.readout(self.store["resid_final"])
        fields = {"mlp_post": None, **self.store, "batch": self.batch, "view": view, "readout": readout}
        posts = [view.attn_post_norm(layer) for layer in layers]
        if any(post is not None for post in posts):
            attn = [self._raw_output(layer, "attn", readout.dtype) for layer in layers]
            mlp = [self._raw_output(layer, "mlp", readout.dtype) for layer in layers]
            fields["attn_scale"] = _post_scales(posts, attn)
            fields["mlp_scale"] = _post_scales([view.mlp_post_norm(layer) for layer in layers], mlp)
        writers = None if self.writers is None else self.writers.finish()
        return {**fields, "pass_index": self.pass_index, "writers": writers}

    def _raw_output(self, layer: int, part: str, dtype: torch.dtype) -> Tensor:
        """Return the attention or FFN output before the norm that follows it."""
        if part == "attn":
            x = self.store["z"][:, layer].flatten(1)
            weight, bias = self.view.raw_W_O(layer).flatten(0, 1), self.view.raw_b_O(layer)
        elif "mlp_post" not in self.store:
            raise InputError(f"{self.view.name} is not supported: it has a norm after its FFN but no mlp.hook_post")
        else:
            x = self.store["mlp_post"][:, layer]
            weight, bias = self.view.raw_W_out(layer), self.view.raw_b_out(layer)
        out = x.to(dtype) @ weight.to(dtype)
        return out if bias is None else out + bias


def at_positions(x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return x [batch pos …] at [batch n] positions, zero where the position is -1; `rows` defaults to all rows."""
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    picked = x[rows[:, None], positions.clamp(min=0)]
    missing = (positions < 0).reshape(*positions.shape, *[1] * (picked.ndim - 2))
    return picked.masked_fill(missing, 0)


def _post_scales(posts: list[NormView | None], raw: list[Tensor]) -> Tensor:
    columns = [
        x.new_ones(len(x)) if post is None else norm_scale(x, eps=post.eps, center=post.center)
        for post, x in zip(posts, raw, strict=True)
    ]
    return torch.stack(columns, dim=1)
