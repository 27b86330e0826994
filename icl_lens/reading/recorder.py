"""Read the activations of a pass from its hooks, one layer at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models import attention_scores
from icl_lens.models.loading.bridge_comparison import reads_only_earlier_tokens
from icl_lens.models.passes.independent_rows import rotations_by_length
from icl_lens.models.readout import norm_scale
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.token_ids import TokenPositions, resolve_positions
from icl_lens.reading.pass_values import PassValues
from icl_lens.reading.writers import Writers, has_pos_embed


@dataclass(frozen=True)
class ReadPlan:
    """A forward pass: the batch to run, and the rows to read, which may be several positions of
    each prompt.
    """

    run: PromptBatch
    rows: PromptBatch
    pass_index: Int[Tensor, " batch"] | None = None
    """Row of `run` that each row is read from; None if `rows` is `run`."""

    @classmethod
    def at(cls, view: ModelView, batch: PromptBatch, positions: TokenPositions) -> "ReadPlan":
        """Run the batch once; read one row per prompt and position.

        Rows whose rotation differs from their prompt's, as it depends on the length, have passes of
        their own, and so have all rows of a model whose tokens read later ones. Raise InputError if
        hooks, which expect the batch, are active then.
        """
        rows = replace(batch, prompt_index=None).at(positions)
        assert rows.prompt_index is not None
        index, prompt_index = rows.prompt_index, batch.prompt_index
        read_rows = (
            rows if prompt_index is None else replace(rows, prompt_index=prompt_index[index])
        )
        if not view.has_hooks and not reads_only_earlier_tokens(view.model):
            return cls(read_rows, read_rows)
        lengths = [*(rows.last + 1).tolist(), *(batch.last[index] + 1).tolist()]
        rotations = torch.tensor(rotations_by_length(view.model, lengths)).unflatten(0, (2, -1))
        if torch.equal(*rotations):
            return cls(batch, read_rows, index)
        if view.has_hooks:
            raise InputError(
                f"positions must be 'last' while hooks are active on {view.name}, whose rotation "
                "depends on the length of the text; tokenize the text up to each position"
            )
        return cls._longest_of(read_rows, torch.stack([index.cpu(), rotations[0]], dim=1))

    @classmethod
    def shared(cls, view: ModelView, batch: PromptBatch) -> "ReadPlan":
        """Run only the longest row of each prompt, and of each rotation; the other rows are
        prefixes of it.
        """
        assert batch.prompt_index is not None
        if not reads_only_earlier_tokens(view.model):
            return cls(batch, batch)
        rotations = torch.tensor(rotations_by_length(view.model, (batch.last + 1).tolist()))
        return cls._longest_of(batch, torch.stack([batch.prompt_index.cpu(), rotations], dim=1))

    @classmethod
    def _longest_of(cls, batch: PromptBatch, groups: Int[Tensor, "batch key"]) -> "ReadPlan":
        """Run only the longest row of each group of rows, which are prefixes of it."""
        distinct, index = groups.unique(dim=0, return_inverse=True)
        index = index.to(batch.last.device)
        last = torch.where(
            index[None] == torch.arange(len(distinct), device=index.device)[:, None], batch.last, -1
        )
        return cls(batch[last.argmax(1)], batch, index)


class RowValues(NamedTuple):
    """What one pass gives of a stored tensor: some of its rows."""

    values: Tensor
    rows: Int[Tensor, " n"]
    """The rows of the stored tensor that `values` are."""
    n_rows: int
    """The number of rows of the stored tensor."""


class Recorder:
    """Fills preallocated tensors from hook values of passes, each over some rows of the plan's
    batch; `start_pass` says which.
    """

    def __init__(
        self,
        view: ModelView,
        plan: ReadPlan,
        writers: bool | TokenPositions = False,
        readers: Sequence[int] | None = None,
    ):
        """Record what is read of a pass, with `Writers` at some positions: those that the layers
        `readers` read, or all.
        """
        self.view, self.batch, self.device = view, plan.rows, view.unembed_device
        self.n_passes = len(plan.run)
        self.pass_index = None if plan.pass_index is None else plan.pass_index.to(self.device)
        if self.pass_index is None:
            self.passes = torch.arange(len(self.batch), device=self.device)
        else:
            self.passes = self.pass_index
        self.store: dict[str, Tensor] = {}
        self.keeps_writers = writers is not False
        self.readers = None if readers is None else tuple(sorted({0, *readers}))
        if self.keeps_writers:
            self._choose_writer_rows(writers)
        self.start_pass(torch.arange(self.n_passes))

    def start_pass(self, passed: Int[Tensor, " pass"]) -> None:
        """Expect values of a pass over these rows of the plan's batch, in this order."""
        self.passed = passed.to(self.device)
        row_in_pass = torch.full((self.n_passes,), -1, device=self.device)
        row_in_pass[self.passed] = torch.arange(len(passed), device=self.device)
        self.read_rows = (row_in_pass[self.passes] >= 0).nonzero()[:, 0]
        self.read_in_pass = row_in_pass[self.passes[self.read_rows]]
        if self.keeps_writers:
            self.writer_rows = (row_in_pass[self.row_pass] >= 0).nonzero()[:, 0]
            self.written_in_pass = row_in_pass[self.row_pass[self.writer_rows]]

    def _choose_writer_rows(self, positions: bool | TokenPositions) -> None:
        """Choose the rows of `Writers`: these positions (True: labels' tokens, or all without any)
        and the last.
        """
        batch = self.batch
        if isinstance(positions, bool):
            positions = "all"
            if batch.has_demonstrations:
                positions = [row[row >= 0].tolist() or [-1] for row in batch.all_label_positions]
        lengths = (batch.last + 1).tolist()
        resolved = resolve_positions(positions, lengths)
        places: list[tuple[int, int, int]] = []  # prompt, pass, position
        for prompt, (pass_number, prompt_positions, length) in enumerate(
            zip(self.passes.tolist(), resolved, lengths, strict=True)
        ):
            for position in (*prompt_positions, length - 1):
                places.append((prompt, pass_number, position))
        distinct = sorted({(pass_number, position) for _, pass_number, position in places})
        row_of = {place: row for row, place in enumerate(distinct)}
        self.row_pass, self.row_position = torch.tensor(distinct, device=self.device).unbind(-1)
        self.writer_row = torch.full(batch.tokens.shape, -1, dtype=torch.long)
        for prompt, pass_number, position in places:
            self.writer_row[prompt, position] = row_of[pass_number, position]

    def hooks(self) -> list[tuple[str, Callable[..., None]]]:
        """Return (hook name, callback) pairs for all values; those of `Writers` are stored under
        names with a dot.
        """
        view, named_hooks = self.view, []
        if self.keeps_writers and has_pos_embed(view):
            named_hooks.append(
                ("hook_pos_embed", self._keep(None, {"writers.pos_embed": self._at_writer_rows}))
            )
        for layer in range(view.n_layers):
            clipped = attention_scores.attention_scoring(view, layer).clipped
            hooks: dict[str, dict[str, Callable[[Tensor], RowValues]]] = {
                "hook_resid_pre": {"resid_pre": self._at_last, "label_resid_pre": self._at_labels},
                "attn.hook_q": {"q": self._at_last},
                "attn.hook_v": {"pass_v": lambda v, clipped=clipped: self._everywhere(clipped(v))},
                "attn.hook_pattern": {"pattern": self._pattern_of_last_query},
                "attn.hook_z": {"z": self._at_last},
                "hook_attn_out": {"attn_out": self._at_last, "label_attn_out": self._at_labels},
                "hook_mlp_out": {"mlp_out": self._at_last},
            }
            if view.n_neurons is None and view.mlp_post_norm(layer) is not None:
                hooks["mlp.hook_out"] = {"ffn.raw": self._at_last}
            if self.keeps_writers:
                if layer in self._layers_of("writers.k"):
                    hooks["attn.hook_k"] = {"writers.k": self._everywhere}
                for name, hook in (
                    ("resid_pre", "hook_resid_pre"),
                    ("z", "attn.hook_z"),
                    ("mlp_out", "hook_mlp_out"),
                ):
                    if layer in self._layers_of(f"writers.{name}"):
                        hooks[hook][f"writers.{name}"] = self._at_writer_rows
                for hook in attention_scores.rotation_hooks(view, layer) or ():
                    named_hooks.append((hook, self._keep_angles(hook)))
            named_hooks += [
                (view.hook(layer, hook), self._keep(layer, reads)) for hook, reads in hooks.items()
            ]
            if view.n_neurons is not None and f"blocks.{layer}.mlp.hook_post" in view.hook_names:
                named_hooks.append(
                    (
                        f"blocks.{layer}.mlp.hook_post",
                        self._keep(layer, {"mlp_post": self._at_last}),
                    )
                )
        last = view.hook(view.n_layers - 1, "hook_resid_post")
        return [*named_hooks, (last, self._keep(None, {"resid_final": self._at_last}))]

    def _keep(
        self, layer: int | None, reads: dict[str, Callable[[Tensor], RowValues]]
    ) -> Callable[..., None]:
        """Return a hook that stores what each function reads from its value."""

        def keep(value: Tensor, hook: Any = None) -> None:
            for name, read in reads.items():
                values, rows, n_rows = read(value.detach())
                values = values.to(self.device)
                if layer is None:
                    if name not in self.store:
                        self.store[name] = values.new_zeros((n_rows, *values.shape[1:]))
                    self.store[name][rows] = values
                    continue
                layers = self._layers_of(name)
                if name not in self.store:
                    shape = (n_rows, len(layers), *values.shape[1:])
                    self.store[name] = values.new_zeros(shape)
                self.store[name][rows, layers.index(layer)] = values

        return keep

    def _keep_angles(self, name: str) -> Callable[..., None]:
        """Return a hook that stores the angles of the longest pass, which may depend on its length;
        all layers share one tensor.
        """

        def keep(angles: Tensor, hook: Any = None) -> None:
            angles = angles.detach()[:, : self.batch.tokens.shape[1]].to(self.device)
            if name not in self.store or self.store[name].shape[1] < angles.shape[1]:
                self.store[name] = angles

        return keep

    def _layers_of(self, name: str) -> Sequence[int]:
        """Return the layers of which a value is stored, see `Writers.readers`."""
        if self.readers is None or not name.startswith("writers."):
            return range(self.view.n_layers)
        if name in ("writers.resid_pre", "writers.k"):
            return self.readers
        return range(self.readers[-1] + 1)

    def _of_rows(self, values: Tensor) -> RowValues:
        return RowValues(values, self.read_rows, len(self.batch))

    def _at_last(self, value: Tensor) -> RowValues:
        last = self.batch.last.to(value.device)[self.read_rows.to(value.device)]
        return self._of_rows(value[self.read_in_pass.to(value.device), last])

    def _at_labels(self, value: Tensor) -> RowValues:
        positions = self.batch.label_positions.to(value.device)[self.read_rows.to(value.device)]
        return self._of_rows(at_positions(value, positions, self.read_in_pass.to(value.device)))

    def _pattern_of_last_query(self, pattern: Tensor) -> RowValues:
        rows = self.read_in_pass.to(pattern.device)
        last = self.batch.last.to(pattern.device)[self.read_rows.to(pattern.device)]
        return self._of_rows(self._at_width(pattern[rows, :, last], dim=-1))

    def _at_writer_rows(self, value: Tensor) -> RowValues:
        rows = self.written_in_pass.to(value.device) if len(value) > 1 else 0
        positions = self.row_position[self.writer_rows].to(value.device)
        return RowValues(value[rows, positions], self.writer_rows, len(self.row_pass))

    def _everywhere(self, v: Tensor) -> RowValues:
        """Return keys or values at all positions, once per key-value group."""
        repeated = v.shape[2] // self.view.n_kv_heads  # TransformerLens may repeat key-value groups
        values = self._at_width(v[:, :, ::repeated], dim=1)
        return RowValues(values, self.passed, self.n_passes)

    def _at_width(self, x: Tensor, dim: int) -> Tensor:
        """Return x with as many keys as the batch has tokens: those of a pass over shorter prompts
        are followed by zeros.
        """
        width = self.batch.tokens.shape[1]
        if x.shape[dim] >= width:
            return x.narrow(dim, 0, width)
        shape = list(x.shape)
        shape[dim] = width
        wide = x.new_zeros(shape)
        wide.narrow(dim, 0, x.shape[dim]).copy_(x)
        return wide

    def fields(self) -> dict[str, Any]:
        """Return the fields of the `Activations`, including the scales of norms after attention and
        FFN.
        """
        view, layers = self.view, range(self.view.n_layers)
        readout = view.readout(self.store["resid_final"])
        recorded = {name: value for name, value in self.store.items() if "." not in name}
        values = PassValues(recorded.pop("pass_v"), self.pass_index)
        fields = {
            "mlp_post": None,
            **recorded,
            "batch": self.batch,
            "view": view,
            "readout": readout,
            "values": values,
            "writers": self._writers() if self.keeps_writers else None,
        }
        if any(view.attn_post_norm(layer) is not None for layer in layers):
            for part in ("attn", "mlp"):
                scales = [self._post_norm_scale(layer, part, readout.dtype) for layer in layers]
                fields[f"{part}_scale"] = torch.stack(scales, dim=1)
        return fields

    def _writers(self) -> Writers:
        names = ("resid_pre", "z", "mlp_out", "k")
        angles = {}
        for layer in range(self.view.n_layers):
            if (hooks := attention_scores.rotation_hooks(self.view, layer)) is not None and hooks[
                0
            ] in self.store:
                angles[layer] = self.store[hooks[0]], self.store[hooks[1]]
        return Writers(
            view=self.view,
            row=self.writer_row.to(self.device),
            passes=self.passes,
            pos_embed=self.store.get("writers.pos_embed"),
            angles=angles,
            readers=self.readers,
            **{name: self.store[f"writers.{name}"] for name in names},
        )

    def _post_norm_scale(self, layer: int, part: str, dtype: torch.dtype) -> Tensor:
        """Return the scale of the norm after attention or the FFN; 1 if there is none."""
        view = self.view
        norm = view.attn_post_norm(layer) if part == "attn" else view.mlp_post_norm(layer)
        z = self.store["z"][:, layer]
        if norm is None:
            return z.new_ones(len(z), dtype=dtype)
        if part == "attn":
            x, weight, bias = z.flatten(1), view.raw_W_O(layer).flatten(0, 1), view.raw_b_O(layer)
        elif "mlp_post" in self.store:
            x, weight, bias = (
                self.store["mlp_post"][:, layer],
                view.raw_W_out(layer),
                view.raw_b_out(layer),
            )
        else:  # a mixture of experts
            return norm_scale(
                self.store["ffn.raw"][:, layer].to(dtype), eps=norm.eps, center=norm.center
            )
        raw = x.to(dtype) @ weight.to(dtype)
        return norm_scale(raw if bias is None else raw + bias, eps=norm.eps, center=norm.center)


def at_positions(x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return x [batch pos …] at [batch n] positions, zero where the position is -1; `rows` defaults
    to all rows.
    """
    rows = torch.arange(len(x), device=x.device) if rows is None else rows
    picked = x[rows[:, None], positions.clamp(min=0)]
    missing = (positions < 0).reshape(*positions.shape, *[1] * (picked.ndim - 2))
    return picked.masked_fill(missing, 0)
