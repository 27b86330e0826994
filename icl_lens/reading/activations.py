"""Activations of prompts: vectors at the last position and at labels, the last query's attention,
and all values.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.metrics import most_probable
from icl_lens.models.active_edits import edits_suffix
from icl_lens.models.head import AnyHead
from icl_lens.models.readout import Readout
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, selected_rows, size_in_words
from icl_lens.prompts.batch_checks import require_demonstrations, require_labels
from icl_lens.prompts.token_ids import TokenPositions
from icl_lens.reading.cache_checks import check_same_rotations, check_same_tokens
from icl_lens.reading.decompose import head_outputs, scaled_rows
from icl_lens.reading.label_scores import LabelScores
from icl_lens.reading.pass_values import PassValues
from icl_lens.reading.recorder import ReadPlan, Recorder, at_positions
from icl_lens.reading.saved_activations import read_activations, write_activations
from icl_lens.reading.writers import Writers

# Relative tolerance of the checked sums, by dtype. Float64 allows more than its own rounding,
# because the RMSNorm of some families always computes in float32.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Activations:
    """Activations of one forward pass; made by `capture` or `Activations.from_cache`.

    Tensors without a `key` or `demo` axis are at each row's last position. Vectors are in
    residual-stream units and the model's dtype (`readout` computes in float32, or float64 for
    float64 models). For families with a norm after attention or FFN (Gemma-2/3), `attn_out` and
    `mlp_out` are the normed outputs that reach the residual stream, and `attn_scale`, `mlp_scale`
    hold that norm's scale at the last position.

    Weights are those that the model has when a function reads them: capture again after changing
    them.

    Example:
        >>> acts.resid_pre.shape, acts.pattern.shape
        (torch.Size([1, 8, 96]), torch.Size([1, 8, 6, 19]))
        >>> acts.label_log_probs.shape
        torch.Size([1, 2])
    """

    batch: PromptBatch
    """The prompts."""
    view: ModelView
    """The model and its weights."""
    readout: Readout
    """The final norm and the unembedding, which turn vectors into logits."""
    resid_pre: Float[Tensor, "batch layer d_model"]
    """The residual stream before each layer."""
    attn_out: Float[Tensor, "batch layer d_model"]
    """What each layer's attention writes."""
    mlp_out: Float[Tensor, "batch layer d_model"]
    """What each layer's FFN writes."""
    resid_final: Float[Tensor, "batch d_model"]
    """The residual stream after the last layer, before the final norm."""
    z: Float[Tensor, "batch layer head d_head"]
    """Each head's attention-weighted sum of values, before W_O."""
    pattern: Float[Tensor, "batch layer head key"]
    """Attention probabilities of the last query."""
    values: PassValues
    """Each key-value head's values at every position, before W_O; b_V included where the model's
    values have it.
    """
    q: Float[Tensor, "batch layer head d_head"]
    """Queries before rotation and before their norm, if they have one."""
    mlp_post: Float[Tensor, "batch layer neuron"] | None
    """Neuron activations; None if the model does not expose them."""
    label_resid_pre: Float[Tensor, "batch layer demo d_model"]
    """`resid_pre` at the labels' scored tokens."""
    label_attn_out: Float[Tensor, "batch layer demo d_model"]
    """`attn_out` at the labels' scored tokens."""
    attn_scale: Float[Tensor, "batch layer"] | None = None
    mlp_scale: Float[Tensor, "batch layer"] | None = None
    """Scales at the last position of norms after attention and FFN; None without such norms."""
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
            f"Activations({self.view.name}: {size_in_words(self.batch)}, "
            f"{size}){edits_suffix(self.edits)}"
        )

    def token_log_probs(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Return the model's log-probability of one token per row, such as `batch.answer_tokens`,
        nats.

        All biases are included, regardless of `readout.bias`.
        """
        check_device(self)
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
        require_labels(self.batch, "label to score")
        check_device(self)
        log_probs = self.readout.using(final_norm="frozen", bias=True).log_probs(self.resid_final)
        tokens = self.batch.label_tokens.to(log_probs.device)
        return LabelScores.from_tensor(log_probs[:, tokens], self.batch.labels)

    @property
    def predicted(self) -> Int[Tensor, " batch"]:
        """Each prompt's most probable label, as an index into `batch.labels`."""
        return most_probable(self.label_log_probs, self.batch.label_mask)

    def head_outputs(self, layer: int) -> Float[Tensor, "batch head d_model"]:
        """Return what each head of a layer writes into the residual stream at the last position."""
        scale = None if self.attn_scale is None else self.attn_scale[:, layer]
        z = scaled_rows(self.z[:, layer].to(self.readout.dtype), scale)
        return head_outputs(z, self.view.W_O(layer))

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
        require_demonstrations(
            self.batch,
            "label to attend to",
            "use acts.pattern [batch layer head key], the attention to all positions",
        )
        positions = self.batch.all_label_positions.to(self.pattern.device)
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
        `values` has them before W_O at all positions. Contains b_V where the model's values do (raw
        weights). Zero where a prompt has fewer demonstrations. Raise InputError for an unknown head
        or a batch without demonstrations. Source: the paper, section 3.2; docs/howto/numbers.md.

        Example:
            >>> acts.label_values("L2H0").shape
            torch.Size([1, 4, 96])
        """
        layer, index = self.view.check_head(head)
        require_demonstrations(
            self.batch,
            "label position to read",
            "use acts.values.of_layer(layer), the values at all positions",
        )
        kv = self.view.kv_head(index)
        v = self.values.of_layer(layer)[:, :, kv].to(self.readout.dtype)
        v = at_positions(v, self.batch.label_positions.to(v.device))
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
        require_demonstrations(
            self.batch,
            "label position to read",
            "use last_query, which needs no labels",
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
        require_demonstrations(
            self.batch, "label to rank", "use acts.readout.ranks, which ranks any token"
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
            self,
            batch=self.batch.to(device),
            readout=readout,
            values=self.values.to(device),
            writers=writers,
            **tensors,
        )

    def _tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

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
        write_activations(path, vars(self))

    @classmethod
    def load(cls, path: str | Path, model: Any) -> "Activations":
        """Read activations that `save` wrote, onto the model's device.

        Raise InputError for any other file, for one that is damaged, and for activations of another
        model or other weights (another dtype, processed weights, further training).
        """
        return cls(**read_activations(path, ModelView.of(model), cls))

    def __getitem__(self, index: Any) -> "Activations":
        """Select rows like `batch[index]`; tensors of a slice are views."""
        batch = self.batch[index]
        is_slice = isinstance(index, slice) and (index.step or 1) > 0
        if not is_slice:  # PyTorch has no slices with a negative step
            index = selected_rows(len(self.batch), index)
        width = batch.tokens.shape[1]
        tensors = {name: value[index] for name, value in self._tensors().items()}
        tensors["pattern"] = tensors["pattern"][..., :width]
        writers = None if self.writers is None else self.writers.select(index)
        return replace(
            self,
            batch=batch,
            readout=self.readout.select_prompts(index),
            values=self.values.select(index, width),
            writers=writers,
            **tensors,
        )


def check_device(acts: Activations) -> None:
    """Raise InputError unless the activations are on the model's device."""
    device, needed = acts.z.device, acts.view.unembed_device
    if device != needed:
        raise InputError(
            f"activations must be on the model's device {needed}, got {device}; use "
            f"acts.to({str(needed)!r})"
        )


def check_sums(acts: Activations) -> None:
    """Raise InputError if the outputs of the model's layers do not add up as the formulas
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
            f"error {error:.1e}, allowed {tolerance:.0e}), so its layers transform outputs "
            "in an unknown way"
        )
