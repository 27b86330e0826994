"""Activations of prompts: vectors at the last position and at labels, the last query's attention,
and all values.
"""

from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.metrics import most_probable
from icl_lens.models.active_edits import edits_suffix
from icl_lens.models.head import AnyHead
from icl_lens.models.readout import Readout
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_vocabulary
from icl_lens.prompts.batch_state import batch_from_state, batch_state
from icl_lens.prompts.token_ids import TokenPositions
from icl_lens.reading.cache_checks import check_same_rotations, check_same_tokens
from icl_lens.reading.decompose import head_outputs, repeat_kv
from icl_lens.reading.label_scores import LabelScores
from icl_lens.reading.passes import NO_LABELS_HINT
from icl_lens.reading.recorder import ReadPlan, Recorder, at_positions
from icl_lens.reading.serialization import (
    damaged_error,
    read_metadata,
    read_tensors,
    write_tensors,
)
from icl_lens.reading.writers import Writers
from icl_lens.shapes import check_shapes

# Relative tolerance of the checked sums, by dtype. Float64 allows more than its own rounding,
# because the RMSNorm of some families always computes in float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}

KIND, VERSION = "activations", 3
"""Kind and version of the files that `Activations.save` writes; the version increases when a field
changes meaning.
"""


@dataclass(frozen=True)
class Activations:
    """Activations of one forward pass; made by `capture` or `Activations.from_cache`.

    Tensors without a `key` or `demo` axis are at each row's last position. Vectors are in
    residual-stream units and the model's dtype (`readout` computes in float32, or float64 for
    float64 models). For families with a norm after attention or FFN (Gemma-2/3), `attn_out` and
    `mlp_out` are the normed outputs that reach the residual stream, and `attn_scale`, `mlp_scale`
    hold that norm's scale at the last position.

    Rows that end at different positions of one prompt come from one pass and share its values: row
    i has `pass_v[pass_index[i]]`. `v` and `values` return them for every row.

    Weights are those that the model has when a function reads them: capture again after changing
    them.

    Example:
        >>> acts.resid_pre.shape, acts.pattern.shape
        (torch.Size([1, 8, 96]), torch.Size([1, 8, 6, 19]))
        >>> acts.label_log_probs.shape
        torch.Size([1, 2])
    """

    batch: PromptBatch
    view: ModelView
    readout: Readout
    resid_pre: Float[Tensor, "batch layer d_model"]
    """The residual stream before each layer."""
    attn_out: Float[Tensor, "batch layer d_model"]
    mlp_out: Float[Tensor, "batch layer d_model"]
    resid_final: Float[Tensor, "batch d_model"]
    """The residual stream after the last layer, before the final norm."""
    z: Float[Tensor, "batch layer head d_head"]
    """Each head's attention-weighted sum of values, before W_O."""
    pattern: Float[Tensor, "batch layer head key"]
    """Attention probabilities of the last query."""
    pass_v: Float[Tensor, "pass layer key kv_head d_head"]
    q: Float[Tensor, "batch layer head d_head"]
    """Queries before rotation and before their norm, if they have one."""
    mlp_post: Float[Tensor, "batch layer neuron"] | None
    """Neuron activations; None if the model does not expose them."""
    label_resid_pre: Float[Tensor, "batch layer demo d_model"]
    """`resid_pre` at the labels' scored tokens."""
    label_attn_out: Float[Tensor, "batch layer demo d_model"]
    attn_scale: Float[Tensor, "batch layer"] | None = None
    mlp_scale: Float[Tensor, "batch layer"] | None = None
    pass_index: Int[Tensor, " batch"] | None = None
    """Each row's index into `pass_v`; None if row i has `pass_v[i]`."""

    writers: Writers | None = None
    """What earlier components wrote at some positions; None unless captured with `writers`. `save`
    omits it.
    """
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks. Empty if nothing
    edits it.
    """

    @classmethod
    def from_cache(
        cls,
        model: Any,
        cache: Any,
        batch: PromptBatch,
        *,
        positions: TokenPositions | None = None,
        writers: bool | TokenPositions = False,
        check: bool = True,
    ) -> "Activations":
        """Build activations from an existing TransformerLens cache
        (`model.run_with_cache(batch.tokens, …)`).

        `positions`, `writers` and `check` are those of `capture`, but there are no logits to check.
        The cache must come from these tokens, have a batch axis, and hold all hooks of an
        unfiltered `run_with_cache`. Raise InputError if a hook is missing (the message names the
        first), if shapes do not match the batch, or if the cached embeddings or rotations are not
        those of the batch's tokens.
        """
        if (
            not isinstance(batch, PromptBatch)
            or isinstance(cache, PromptBatch)
            or not hasattr(model, "hook_dict")
        ):
            types = ", ".join(type(argument).__name__ for argument in (model, cache, batch))
            raise InputError(
                f"from_cache takes the model, the cache and the batch in this order, got {types}; "
                "write il.Activations.from_cache(model, cache, batch)"
            )
        check_same_tokens(model, cache, batch)
        view = ModelView.of(model)
        check_same_rotations(view, cache, batch)
        plan = ReadPlan(batch, batch) if positions is None else ReadPlan.at(view, batch, positions)
        if plan.run is not batch:
            raise InputError(
                f"positions must be those of rows as long as their prompts for {view.name}, whose "
                f"rotation depends on the length of the text, got {short_repr(positions)}; use "
                "il.capture(model, batch, positions=…)"
            )
        recorder = Recorder(view, plan, writers)
        for name, record in recorder.hooks():
            try:
                value = cache[name]
            except KeyError:
                raise InputError(
                    f"cache must contain {name!r}; create it with "
                    "model.run_with_cache(batch.tokens, attention_mask=batch.attention_mask) and "
                    "no names_filter"
                ) from None
            if value.ndim < 3 or value.shape[0] != len(batch):
                raise InputError(
                    f"cache[{name!r}] must have {len(batch)} rows, one per prompt, got shape "
                    f"{tuple(value.shape)}; keep the batch axis and cache batch.tokens itself"
                )
            record(value)
        acts = cls(**recorder.fields())
        if check:
            check_sums(acts)
        return acts

    def __repr__(self) -> str:
        size = f"{self.view.n_layers} layers × {self.view.n_heads} heads"
        return (
            f"Activations({self.view.name}: {self.batch.size_summary}, "
            f"{size}){edits_suffix(self.edits)}"
        )

    @property
    def v(self) -> Float[Tensor, "batch layer key kv_head d_head"]:
        """Values at every position of every row, b_V included.

        If rows share passes, these are copies; `values` copies only one layer.
        """
        return self.pass_v if self.pass_index is None else self.pass_v[self.pass_index]

    def values(self, layer: int) -> Float[Tensor, "batch key kv_head d_head"]:
        """Return one layer's values at every position, b_V included."""
        if self.pass_index is None:
            return self.pass_v[:, layer]
        return self.pass_v[self.pass_index, layer]

    def token_log_probs(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Return the model's log-probability of one token per row, such as `batch.answer_tokens`,
        nats.

        All biases are included, regardless of `readout.bias`.
        """
        self.check_device()
        readout = self.readout.using(final_norm="frozen", bias=True)
        return readout.token_log_probs(
            self.resid_final[:, None], tokens.to(self.resid_final.device)
        )[:, 0]

    @property
    def label_log_probs(self) -> LabelScores:
        """Log-probability [batch label] of each label's token after the prompt, nats.

        All biases are included, regardless of `readout.bias`. Raise InputError for prompts without
        labels, and if two labels of a prompt are scored by the same token.
        """
        self.batch.require_labels("label to score", NO_LABELS_HINT)
        self.check_device()
        log_probs = self.readout.using(final_norm="frozen", bias=True).log_probs(self.resid_final)
        tokens = self.batch.label_tokens.to(log_probs.device)
        return LabelScores.from_tensor(log_probs[:, tokens], self.batch.labels)

    @property
    def predicted(self) -> Int[Tensor, " batch"]:
        """Each prompt's most probable label, as an index into `batch.labels`."""
        return most_probable(self.label_log_probs, self.batch.label_mask)

    @property
    def padding(self) -> Bool[Tensor, "batch key"]:
        """Which positions of `pattern` are after the last token."""
        keys = torch.arange(self.pattern.shape[-1], device=self.pattern.device)
        return keys > self.batch.last.to(keys.device)[:, None]

    @property
    def scaled_z(self) -> Float[Tensor, "batch layer head d_head"]:
        """Each head's z times the scale of a norm after attention, if there is one: `scaled_z` ·
        W_O is its output.
        """
        z = self.z.to(self.readout.dtype)
        return z if self.attn_scale is None else z * self.attn_scale[..., None, None]

    def head_outputs(self, layer: int) -> Float[Tensor, "batch head d_model"]:
        """Return what each head of a layer writes into the residual stream at the last position."""
        return head_outputs(self._scaled(self.z, layer), self.view.W_O(layer))

    def scaled_pattern(self, layer: int) -> Float[Tensor, "batch head key"]:
        """Return the last query's attention, times the scale of a norm after attention, if there is
        one.

        `scaled_pattern` · `head_values` · W_O is the head's output.
        """
        return self._scaled(self.pattern, layer)

    def _scaled(
        self, x: Float[Tensor, "batch layer head d"], layer: int
    ) -> Float[Tensor, "batch head d"]:
        x = x[:, layer].to(self.readout.dtype)
        return x if self.attn_scale is None else x * self.attn_scale[:, layer, None, None]

    def head_values(self, layer: int) -> Float[Tensor, "batch key head d_head"]:
        """Return values at every position, key-value groups repeated for their query heads, b_V
        included.
        """
        return repeat_kv(self.values(layer).to(self.readout.dtype), self.view.n_heads)

    def at_labels(self, x: Float[Tensor, "batch key *rest"]) -> Float[Tensor, "batch demo *rest"]:
        """Return `x` at the labels' scored tokens; zero where a prompt has fewer demonstrations."""
        return at_positions(x, self.batch.label_positions.to(x.device))

    # What the labels and the last query hold
    # -----------------------------------------------------------------

    def attention_to_labels(self) -> Float[Tensor, "batch layer head demo"]:
        """Return the attention probability from the last position to each label, summed over the
        label's tokens.

        Zero where a prompt has fewer demonstrations. Rows sum to less than one because other
        positions are attended too; `pattern` is the attention to every position. Raise InputError
        for prompts without demonstrations.

        Example:
            >>> acts.attention_to_labels().shape
            torch.Size([1, 8, 6, 4])
        """
        self.batch.require_demonstrations(
            "label to attend to",
            "use acts.pattern [batch layer head key], the attention to all positions",
        )
        positions = self.batch.label_token_positions.to(self.pattern.device)
        index = positions.flatten(1)[:, None, None].expand(-1, *self.pattern.shape[1:3], -1)
        picked = self.pattern.gather(-1, index.clamp(min=0)).masked_fill(index < 0, 0.0)
        return picked.unflatten(-1, positions.shape[1:]).sum(-1)

    def attention_by_label(self) -> Float[Tensor, "batch layer head label"]:
        """Return attention from the last position, summed over all tokens of the same label (axis:
        `batch.labels`).

        Example:
            >>> acts.attention_by_label().shape
            torch.Size([1, 8, 6, 2])
        """
        attention = self.attention_to_labels()
        index = self.batch.label_index.to(attention.device)
        is_label = torch.nn.functional.one_hot(index.clamp(min=0), len(self.batch.labels))
        is_label = (is_label * (index >= 0)[..., None]).to(attention.dtype)
        return einsum(
            attention, is_label, "batch layer head demo, batch demo label -> batch layer head label"
        )

    def label_values(self, head: AnyHead) -> Float[Tensor, "batch demo d_model"]:
        """Return a head's value at each label times W_O, in residual-stream units, not weighted by
        attention.

        A label of several tokens is read at the token it is scored by (`batch.label_positions`);
        `head_values` has the values at all positions. Contains b_V where the model's values do (raw
        weights). Zero where a prompt has fewer demonstrations. Raise InputError for an unknown head
        or a batch without demonstrations. Source: the paper, section 3.2; docs/howto/numbers.md.

        Example:
            >>> acts.label_values("L2H0").shape
            torch.Size([1, 4, 96])
        """
        layer, index = self.view.check_head(head)
        self.batch.require_demonstrations(
            "label position to read", "use acts.head_values(layer), the values at all positions"
        )
        kv = self.view.kv_head(index)
        v = self.at_labels(self.values(layer)[:, :, kv].to(self.readout.dtype))
        return head_outputs(v[..., None, :], self.view.W_O(layer)[index : index + 1])[..., 0, :]

    def label_keys(
        self, head: AnyHead, *, source: Literal["resid", "attn"] = "resid"
    ) -> Float[Tensor, "batch demo d_model"]:
        """Return the input of a head's keys at each label's scored token, before the norm and the
        key matrix.

        `"resid"`: the residual stream entering the head's layer, as in the paper. `"attn"`: only
        what earlier attention layers wrote into it (no embedding, no FFN), as in the authors' code.
        The result is the same for all heads of a layer. Zero where a prompt has fewer
        demonstrations. Raise InputError for an unknown head or source, and for prompts without
        demonstrations.

        Example:
            >>> acts.label_keys("L2H0", source="attn").shape
            torch.Size([1, 4, 96])
        """
        layer, _ = self.view.check_head(head)
        self.batch.require_demonstrations(
            "label position to read", "use last_query or top_tokens, which need no labels"
        )
        check_choice("source", source, ("resid", "attn"))
        if source == "resid":
            return self.label_resid_pre[:, layer].to(self.readout.dtype)
        return self.label_attn_out[:, :layer].to(self.readout.dtype).sum(1)

    def last_query(self, head: AnyHead) -> Float[Tensor, "batch d_model"]:
        """Return the last position's query mapped through the head's key matrix into d_model: `q
        W_Kᵀ`.

        Its dot product with the normed input of a key position is the head's score there before
        division by √d_head, without the b_K term (the same for every key) and, for rotary models,
        before rotation: content only, no position. With grouped-query attention, the head's own
        key-value group is used.

        For models that normalize queries and keys (Qwen3, Gemma-3, OLMo-2), `q` is the query after
        its norm, times the gain of the keys' norm. Each key's own scale is omitted, because no
        direction in d_model can represent it: the score is this dot product times 1/√(mean square
        of that key), so keys of different norms may be ordered differently. Processed weights fold
        the gain of the norm before attention into W_K; raw weights do not.

        Raise InputError for an unknown head or an unsupported query norm.
        Source: the paper, section 3.2.

        Example:
            >>> query = acts.last_query("L2H0")
            >>> query.shape, len(acts.readout.top_tokens(query, k=5)[0])
            (torch.Size([1, 96]), 5)
        """
        layer, index = self.view.check_head(head)
        kv = self.view.kv_head(index)
        q = self.view.query_in_key_space(layer, self.q[:, layer].to(self.readout.dtype))[:, index]
        W_K = self.view.W_K(layer)[kv].to(q.dtype)
        return einsum(q, W_K, "batch d_head, d_model d_head -> batch d_model")

    def own_label_ranks(self, head: AnyHead) -> Int[Tensor, "batch demo"]:
        """Return the rank of each demonstration's label token in the vocabulary by its label value;
        1 is top.

        Zero where a prompt has fewer demonstrations.

        Example:
            >>> acts.own_label_ranks("L2H0").shape
            torch.Size([1, 4])
        """
        self.batch.require_demonstrations(
            "label to rank", "use acts.readout.ranks, which ranks any token"
        )
        index = self.batch.label_index.to(self.readout.W_U.device)
        tokens = self.batch.label_tokens.to(index.device)[index.clamp(min=0)]
        ranks = self.readout.ranks(self.label_values(head), tokens)
        return torch.where(index >= 0, ranks, torch.zeros_like(ranks))

    # Devices, files, rows
    # ---------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> "Activations":
        """Return a copy with all recorded tensors on `device`, for instance to keep many captures
        off the GPU.

        Weights stay with the model. Methods that use weights raise InputError unless the
        activations are on the model's device (`acts.view.unembed_device`).
        """
        tensors = {name: value.to(device) for name, value in self._tensors().items()}
        readout = replace(self.readout, scale=self.readout.scale.to(device))
        writers = None if self.writers is None else self.writers.to(device)
        return replace(
            self, batch=self.batch.to(device), readout=readout, writers=writers, **tensors
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def check_device(self) -> None:
        """Raise InputError unless the activations are on the model's device."""
        device, needed = self.z.device, self.view.unembed_device
        if device != needed:
            raise InputError(
                f"activations must be on the model's device {needed}, got {device}; use "
                f"acts.to({str(needed)!r})"
            )

    def save(self, path: str | Path) -> None:
        """Write all recorded tensors to one safetensors file, which `load` reads with the same
        model.

        Raise InputError if the folder does not exist or is not writable.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     acts.save(f"{folder}/acts.safetensors")
            ...     again = il.Activations.load(f"{folder}/acts.safetensors", model)
            >>> again
            Activations(icl-mini: 1 prompt × 19 tokens, 8 layers × 6 heads)
        """
        batch_tensors, batch_values = batch_state(self.batch)
        metadata = {
            **_model_facts(self.view),
            "model": self.view.name,
            "weights": self.view.fingerprint(),
            "final_norm": self.readout.final_norm,
            "bias": self.readout.bias,
            "batch": batch_values,
        }
        if self.edits:
            metadata["edits"] = list(self.edits)
        tensors = self._tensors() | {
            f"batch.{name}": value for name, value in batch_tensors.items()
        }
        write_tensors(path, KIND, VERSION, tensors, metadata)

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "Activations":
        """Read activations that `save` wrote, onto the model's device.

        Raise InputError for any other file, for one that is damaged, and for activations of another
        model or other weights (another dtype, processed weights, further training).
        """
        view = ModelView.of(model)
        metadata = read_metadata(path, KIND, VERSION)
        facts = _model_facts(view)
        recorded = {name: metadata.get(name) for name in facts}
        if recorded != facts or metadata.get("weights") != view.fingerprint():
            text = "{architecture} of {layers} layers × {heads} heads in {dtype}"
            what = text.format(**facts)
            if recorded == facts:
                what = "with other weights (training or processing)"
            raise InputError(
                f"{str(path)!r} was recorded from {metadata.get('model')} "
                f"({text.format(**recorded)}), got model {view.name} ({what}); load the recorded "
                "model or capture again"
            )
        tensors = read_tensors(path, KIND, view.unembed_device)
        try:
            return cls._from_file(view, tensors, metadata)
        except InputError as error:  # of the prompts' own checks
            raise damaged_error(path, KIND, error) from error
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
            IndexError,
            ArithmeticError,
        ) as error:
            raise damaged_error(path, KIND, f"{type(error).__name__}: {error}") from error

    @classmethod
    def _from_file(
        cls, view: ModelView, tensors: dict[str, Tensor], metadata: dict[str, Any]
    ) -> "Activations":
        """Return activations of a file's tensors and metadata; raise an error if they do not fit
        each other.
        """
        batch_tensors, recorded = {}, {}
        for name, value in tensors.items():
            if name.startswith("batch."):
                batch_tensors[name.removeprefix("batch.")] = value
            else:
                recorded[name] = value
        batch = batch_from_state(batch_tensors, metadata["batch"])
        required = {field.name for field in fields(cls) if field.default is MISSING}
        required -= {"batch", "view", "readout", "mlp_post"}
        unknown = recorded.keys() - {field.name for field in fields(cls)}
        missing = required - recorded.keys()
        if unknown or missing:
            raise ValueError(f"it lacks {sorted(missing)} and has {sorted(unknown)}")
        check_shapes(cls, recorded, _sizes(view, batch))
        _check_values_fit(recorded, batch)
        check_vocabulary(view.model, batch, "batch")
        final_norm, bias = metadata["final_norm"], metadata["bias"]
        check_choice("final_norm", final_norm, ("frozen", "own"))
        readout = view.readout(recorded["resid_final"]).using(
            final_norm=final_norm, bias=bool(bias)
        )
        edits = metadata.get("edits", [])
        if not isinstance(edits, list) or not all(isinstance(words, str) for words in edits):
            raise TypeError(f"edits are {edits!r}")
        return cls(
            **{"mlp_post": None, **recorded},
            batch=batch,
            view=view,
            readout=readout,
            edits=tuple(edits),
        )

    def __getitem__(self, index: Any) -> "Activations":
        """Select rows like `batch[index]`; tensors of a slice are views."""
        batch = self.batch[index]
        is_slice = isinstance(index, slice) and (index.step or 1) > 0
        if not is_slice:  # PyTorch has no slices with a negative step
            index = self.batch.selected_rows(index)
        width = batch.tokens.shape[1]
        tensors = {
            name: value[index] for name, value in self._tensors().items() if name != "pass_v"
        }
        tensors["pattern"] = tensors["pattern"][..., :width]
        passes = index
        if "pass_index" in tensors:  # keep only the passes of the selected rows, and renumber them
            passes, tensors["pass_index"] = tensors["pass_index"].unique(return_inverse=True)
        tensors["pass_v"] = self.pass_v[:, :, :width][passes]
        writers = None if self.writers is None else self.writers.select(index)
        return replace(
            self,
            batch=batch,
            readout=self.readout.select_prompts(index),
            writers=writers,
            **tensors,
        )


def _sizes(view: ModelView, batch: PromptBatch) -> dict[str, int]:
    """Return the sizes of the axes of recorded tensors, by name."""
    return {
        "batch": len(batch),
        "demo": batch.label_positions.shape[1],
        "layer": view.n_layers,
        "head": view.n_heads,
        "kv_head": view.n_kv_heads,
        "d_head": view.d_head,
        "d_model": view.d_model,
    }


def _check_values_fit(tensors: dict[str, Tensor], batch: PromptBatch) -> None:
    """Raise ValueError for recorded tensors that are not finite or do not belong to the batch."""
    for name in ("resid_pre", "attn_out", "mlp_out", "resid_final", "z", "q", "pattern"):
        if not bool(tensors[name].isfinite().all()):
            raise ValueError(f"{name} is not finite")
    if tensors["pattern"].shape[-1] <= int(batch.last.max()):
        raise ValueError(f"pattern has {tensors['pattern'].shape[-1]} keys")
    n_passes, pass_index = len(tensors["pass_v"]), tensors.get("pass_index")
    if pass_index is None and n_passes != len(batch):
        raise ValueError(f"pass_v has {n_passes} passes")
    if pass_index is not None and not bool(((pass_index >= 0) & (pass_index < n_passes)).all()):
        raise ValueError("pass_index is out of range")


def _model_facts(view: ModelView) -> dict[str, str | int]:
    """Return what a file of activations records about the model, in addition to its name and
    weights.
    """
    dtype = str(view.model.W_U.dtype).removeprefix("torch.")
    return {
        "architecture": view.architecture,
        "layers": view.n_layers,
        "heads": view.n_heads,
        "dtype": dtype,
    }


def check_sums(acts: Activations) -> None:
    """Raise InputError if the outputs of the model's blocks do not add up as the formulas
    assume.
    """
    x = acts.resid_pre.to(acts.readout.dtype)
    following = torch.cat([x[:, 1:], acts.resid_final[:, None].to(x.dtype)], dim=1)
    sums = x + acts.attn_out.to(x.dtype) + acts.mlp_out.to(x.dtype)
    for layer in range(acts.view.n_layers):
        heads = acts.head_outputs(layer).sum(1)
        b_O = acts.view.b_O(layer)
        if b_O is not None and acts.attn_scale is not None:
            b_O = b_O * acts.attn_scale[:, layer, None]
        if b_O is not None:
            heads = heads + b_O
        attn_out, next_x = acts.attn_out[:, layer].to(x.dtype), following[:, layer]
        size = next_x.norm(dim=-1)
        what = "the heads' outputs do not sum to the attention output"
        _check_sum(acts, layer, what, heads, attn_out, size)
        what = "attention and FFN outputs do not add up to the residual stream"
        _check_sum(acts, layer, what, sums[:, layer], next_x, size)


def _check_sum(
    acts: Activations,
    layer: int,
    what: str,
    ours: Float[Tensor, "batch d_model"],
    theirs: Float[Tensor, "batch d_model"],
    size: Float[Tensor, " batch"],
) -> None:
    """Raise InputError that says `what` if two vectors differ; `size` is the residual stream's."""
    tolerance = TOLERANCE.get(acts.z.dtype, 1e-3)
    difference = (ours - theirs).norm(dim=-1)
    error = float((difference / (size + theirs.norm(dim=-1) + 1e-30)).max())
    if not error <= tolerance:
        raise InputError(
            f"{acts.view.architecture} is not supported: in layer {layer} {what} (relative "
            f"error {error:.1e}, allowed {tolerance:.0e}), so its blocks transform outputs "
            "in an unknown way"
        )
