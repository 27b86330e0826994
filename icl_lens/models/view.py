"""A uniform view of model classes, families and TransformerLens versions.

Only `ModelView` knows where a model's weights are and what its blocks do to a head's output; all
other modules read weights through it. Weights are read from the model at each access, never cached.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError, not_a_model_error, short_repr
from icl_lens.models.checkpoints.gguf import ORIGIN, UNQUANTIZED
from icl_lens.models.checkpoints.installed import INSTALLED_MODELS
from icl_lens.models.head import (
    FFN,
    AnyComponent,
    AnyHead,
    Component,
    Head,
    as_component,
    head_tuple,
    is_ffn_name,
)
from icl_lens.models.loading.bridge_comparison import compare_deferred, comparison_postponed
from icl_lens.models.loading.supported import check_supported
from icl_lens.models.module_checks import adapter_parameters, check_weight
from icl_lens.models.norms import NormView, infer_norm
from icl_lens.models.passes.independent_rows import independent_rows
from icl_lens.models.passes.inference import inference_kwargs
from icl_lens.models.passes.locking import model_lock
from icl_lens.models.passes.module_hooks import hooked_modules
from icl_lens.models.passes.modules import all_modules
from icl_lens.models.passes.offload import execution_device, weights_loaded_if_offloaded
from icl_lens.models.readout import Readout, norm_scale


@dataclass(frozen=True)
class _InferredNorm:
    """A norm as it was inferred from a module, with copies of the weights that the module had."""

    norm: NormView
    weights: list[Tensor]

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Return whether a module still has these weights; offloaded ones do not change."""
        if len(weights) != len(self.weights):
            return False
        for before, now in zip(self.weights, weights, strict=True):
            is_offloaded = before.is_meta or now.is_meta
            if not is_offloaded and not torch.equal(before, now):
                return False
        return True


@dataclass(frozen=True)
class ModelView:
    """A uniform view of a model: sizes, hook names, weights, and the final readout.

    Works on `TransformerBridge` (TransformerLens 3.9 and 4.x) and `HookedTransformer` (3.9), raw or
    processed. Weights have TransformerLens' axis order and no gradients.
    """

    model: Any

    @classmethod
    def of(cls, model: Any) -> "ModelView":
        """Return the view of a model. Raise InputError unless it is a decoder of attention + FFN
        blocks.
        """
        if getattr(model, "cfg", None) is None or not hasattr(model, "hook_dict"):
            raise not_a_model_error(model)
        check_supported(model)
        return cls(model)

    @property
    def cfg(self) -> Any:
        return self.model.cfg

    @property
    def name(self) -> str:
        """The display name, followed by the training of installed models and the quantization of
        the weights.
        """
        name = str(self.cfg.model_name)
        name = Path(name).name if os.path.exists(name) else name
        notes = [INSTALLED_MODELS[name].training] if name in INSTALLED_MODELS else []
        notes += [f"{self.quantization} weights"] if self.quantization else []
        return f"{name} ({', '.join(notes)})" if notes else name

    @property
    def source(self) -> str:
        """The name that reloads the model with `load_model`: a model name, a path, or a Hub
        repository.
        """
        name = str(self.cfg.model_name)
        return (
            Path(name).name if Path(name).parent == Path(__file__).parents[1] / "bundled" else name
        )

    @property
    def quantization(self) -> str:
        """The quantization of the weights, such as "Q4_1"; empty if there is none."""
        # Set for GGUF files, whose weights are dequantized on loading.
        gguf = self.hf_config_value(ORIGIN, None)
        if gguf is not None:
            return str(gguf["quantization"]) if gguf["quantization"] not in UNQUANTIZED else ""
        method = getattr(self.hf_config_value("quantization_config", None), "quant_method", "")
        return str(getattr(method, "value", method))

    @property
    def architecture(self) -> str:
        """The model's Hugging Face class, such as `GPT2LMHeadModel`."""
        original = getattr(self.model, "original_model", None)
        if original is not None:
            return type(original).__name__
        return str(getattr(self.cfg, "original_architecture", None) or type(self.model).__name__)

    @property
    def n_layers(self) -> int:
        return int(self.cfg.n_layers)

    @property
    def n_heads(self) -> int:
        return int(self.cfg.n_heads)

    @property
    def n_kv_heads(self) -> int:
        return int(getattr(self.cfg, "n_key_value_heads", None) or self.n_heads)

    @property
    def d_head(self) -> int:
        return int(self.cfg.d_head)

    @property
    def d_model(self) -> int:
        return int(self.cfg.d_model)

    @property
    def parallel(self) -> bool:
        """Whether attention and FFN read the same input (GPT-J, Pythia)."""
        return bool(self.cfg.parallel_attn_mlp)

    @property
    def unembed_device(self) -> torch.device:
        """The device of the unembedding, on which recorded activations are kept."""
        device = self.model.W_U.device
        return (
            device
            if device.type != "meta"
            else execution_device(self.model.unembed) or torch.device("cpu")
        )

    @property
    def has_hooks(self) -> bool:
        """Whether edits, or forward hooks of the user on hook points or modules, are active on the
        model.
        """
        with model_lock(self.model):  # or the hooks of another thread's pass would count
            # Permanent hooks belong to the model, such as TransformerLens' own in OPT's FFN.
            hooks = [hook for point in self.model.hook_dict.values() for hook in point.fwd_hooks]
            is_any_temporary = not all(getattr(hook, "is_permanent", False) for hook in hooks)
            return is_any_temporary or bool(hooked_modules(self.model))

    def fingerprint(self) -> str:
        """Return a digest of evenly spaced entries of the embedding, unembedding and all attention
        matrices.

        The digest depends on weights, dtype and weight processing, but not on device or
        TransformerLens version.
        """
        digest = hashlib.sha256()
        for matrix in self._matrices():
            sample = matrix.detach()
            for axis, size in enumerate(matrix.shape):
                indices = (
                    torch.linspace(0, size - 1, min(size, 16)).round().long().to(sample.device)
                )
                sample = sample.index_select(axis, indices)
            digest.update(f"{tuple(matrix.shape)} {matrix.dtype}".encode())
            digest.update(sample.double().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _matrices(self) -> Iterator[Tensor]:
        """Yield the stored embedding, unembedding and attention matrices, and what adapters add to
        them.
        """
        owners = [
            (self.model, "W_E", getattr(self.model, "embed", None)),
            (self.model, "W_U", self.model.unembed),
        ]
        for layer in range(self.n_layers):
            owners += [
                (self.attn(layer), name, self.attn(layer)) for name in ("W_Q", "W_K", "W_V", "W_O")
            ]
        for owner, name, offloaded_in in owners:
            with weights_loaded_if_offloaded(self.model, offloaded_in):
                matrix = getattr(owner, name, None)
                if matrix is None:
                    continue
                yield self._grouped(matrix) if name in ("W_K", "W_V") else matrix
                yield from adapter_parameters(self.model, owner, name)

    def attn(self, layer: int) -> Any:
        return self.model.blocks[layer].attn

    def kv_head(self, head: int) -> int:
        """Return the index of the key-value head that a query head uses."""
        return head // (self.n_heads // self.n_kv_heads)

    def heads(self) -> list[Head]:
        """Return all heads, layer by layer."""
        return [
            Head.from_index(index, self.n_heads) for index in range(self.n_layers * self.n_heads)
        ]

    def check_head(self, head: AnyHead) -> Head:
        """Return a `Head` from a head, pair or name. Raise InputError if the model has no such
        head.
        """
        if isinstance(head, str):
            head = Head.parse(head)
        try:
            layer, index = map(int, head)
            if (layer, index) != tuple(map(float, head)):  # such as 1.5
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise InputError(
                f"invalid head {short_repr(head)}; pass Head(layer, head), (layer, head) or 'L2H0'"
            ) from None
        if not (0 <= layer < self.n_layers and 0 <= index < self.n_heads):
            raise InputError(
                f"head must be in layers 0–{self.n_layers - 1} and heads 0–{self.n_heads - 1} of "
                f"{self.name}, got {Head(layer, index)}"
            )
        return Head(layer, index)

    def check_heads(self, heads: Iterable[AnyHead]) -> tuple[Head, ...]:
        """Return distinct heads in their first order. Raise InputError if there is a single head or
        an unknown one.
        """
        return tuple(dict.fromkeys(map(self.check_head, head_tuple(heads))))

    def check_component(self, component: AnyComponent) -> Component:
        """Return a `Head` or an `FFN`. Raise InputError if the model has no such component."""
        if not isinstance(component, FFN) and not is_ffn_name(component):
            return self.check_head(component)
        ffn = as_component(component)
        if not 0 <= ffn.layer < self.n_layers:
            raise InputError(
                f"FFN must be in layers 0–{self.n_layers - 1} of {self.name}, got {ffn}"
            )
        return ffn

    def check_components(self, components: Iterable[AnyComponent]) -> tuple[Component, ...]:
        """Return distinct heads and FFNs in their first order. Raise InputError if there is a
        single one or an unknown one.
        """
        return tuple(dict.fromkeys(map(self.check_component, head_tuple(components))))

    # Weights --------------------------------------------------------------------------------------
    #
    # Output matrices include everything up to the residual stream: Granite's residual multiplier,
    # and the gain of a
    # norm after the sublayer. That norm's data-dependent scale is `Activations.attn_scale`.

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """Return the map from a head's z to the residual stream."""
        return self.to_residual(self.raw_W_O(layer), self.attn_post_norm(layer))

    def b_O(self, layer: int) -> Float[Tensor, " d_model"] | None:
        """Return the attention output's bias, which belongs to no head; None if the model has
        none.
        """
        b_O = self.raw_b_O(layer)
        return None if b_O is None else self.to_residual(b_O, self.attn_post_norm(layer))

    def raw_W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """Return W_O before the norm after attention and the residual multiplier, as the model
        stores it.
        """
        return self._weight(self.attn(layer), "W_O")

    def raw_b_O(self, layer: int) -> Float[Tensor, " d_model"] | None:
        return self._weight(self.attn(layer), "b_O")

    def to_residual(self, weight: Tensor, post: NormView | None) -> Tensor:
        """Convert a raw output matrix or bias to its effect on the residual stream."""
        if post is not None:
            weight = weight.to(self.compute_dtype) * post.gain_as(self.compute_dtype)
        return weight if self.residual_multiplier == 1.0 else weight * self.residual_multiplier

    @property
    def residual_multiplier(self) -> float:
        """The factor by which Granite multiplies every sublayer's output; 1 in other families."""
        return float(self.hf_config_value("residual_multiplier", 1.0))

    @property
    def logit_scale(self) -> float:
        """The factor by which Cohere multiplies logits, or one over Granite's divisor; 1 in other
        families.

        Cohere's is the model's attribute, which weight processing updates when it folds the factor
        into W_U. Its value in the configuration is also in families that ignore it (MPT).
        """
        attribute = getattr(getattr(self.model, "original_model", None), "logit_scale", None)
        scale = attribute if isinstance(attribute, (int, float)) else 1.0
        return float(scale) / float(self.hf_config_value("logits_scaling", 1.0))

    def hf_config_value(self, name: str, default: Any) -> Any:
        """Return a value of the Hugging Face configuration, or `default` for families that do not
        have it.
        """
        config = getattr(getattr(self.model, "original_model", None), "config", None)
        return getattr(config, name, default)

    def W_V(self, layer: int) -> Float[Tensor, "kv_head d_model d_head"]:
        return self._grouped(self._weight(self.attn(layer), "W_V"))

    def W_K(self, layer: int) -> Float[Tensor, "kv_head d_model d_head"]:
        return self._grouped(self._weight(self.attn(layer), "W_K"))

    def W_Q(self, layer: int) -> Float[Tensor, "head d_model d_head"]:
        return self._weight(self.attn(layer), "W_Q")

    def _weight(self, owner: Any, name: str, *, offloaded_in: Any = None) -> Any:
        """Return a weight on `unembed_device`, loading it if it is offloaded; None if the model
        lacks it.

        Raise InputError if its module computes something else, as with an adapter.
        """
        compare_deferred(self.model)
        with weights_loaded_if_offloaded(
            self.model, owner if offloaded_in is None else offloaded_in
        ):
            check_weight(self.model, owner, name)
            weight = getattr(owner, name, None)
            return None if weight is None else weight.detach().to(self.unembed_device)

    def b_Q(self, layer: int) -> Float[Tensor, "head d_head"] | None:
        """Return the queries' bias; None if the model has none."""
        b_Q = self._weight(self.attn(layer), "b_Q")
        return None if b_Q is None else b_Q.reshape(self.n_heads, self.d_head)

    def b_K(self, layer: int) -> Float[Tensor, "kv_head d_head"] | None:
        """Return the keys' bias; None if the model has none."""
        b_K = self._weight(self.attn(layer), "b_K")
        return None if b_K is None else self._grouped(b_K.reshape(-1, self.d_head))

    def b_V(self, layer: int) -> Float[Tensor, "kv_head d_head"] | None:
        """Return the values' bias; None if the model has none."""
        b_V = self._weight(self.attn(layer), "b_V")
        return None if b_V is None else self._grouped(b_V.reshape(-1, self.d_head))

    def _grouped(self, weight: Tensor) -> Tensor:
        """Return one matrix per key-value head; TransformerLens may repeat them for every query
        head.
        """
        return (
            weight
            if weight.shape[0] == self.n_kv_heads
            else weight[:: self.n_heads // self.n_kv_heads]
        )

    def W_out(self, layer: int) -> Float[Tensor, "neuron d_model"]:
        """Return the map from neuron activations to the residual stream. Raise InputError for a
        mixture of experts.
        """
        return self.to_residual(self.raw_W_out(layer), self.mlp_post_norm(layer))

    @property
    def n_neurons(self) -> int | None:
        """The number of neurons in every layer's FFN.

        None if neurons cannot be separated, in mixtures of experts, or if layers have different
        numbers.
        """
        if self.model not in _N_NEURONS:
            shapes = set()
            for block in self.model.blocks:
                with weights_loaded_if_offloaded(self.model, block.mlp):
                    W_out = getattr(block.mlp, "W_out", None)
                    shapes.add(None if W_out is None else tuple(W_out.shape))
            shape = shapes.pop() if len(shapes) == 1 else None
            _N_NEURONS[self.model] = None if shape is None or len(shape) != 2 else shape[0]
        return _N_NEURONS[self.model]

    def raw_W_out(self, layer: int) -> Float[Tensor, "neuron d_model"]:
        weight = self._weight(self.model.blocks[layer].mlp, "W_out")
        if weight is None or weight.ndim != 2:
            raise InputError(
                f"layer {layer} of {self.name} must have a single FFN output matrix to separate "
                "neurons, got none (a mixture of experts?); use layer and head increases instead"
            )
        return weight

    def raw_b_out(self, layer: int) -> Float[Tensor, " d_model"] | None:
        return self._weight(self.model.blocks[layer].mlp, "b_out")

    # Norms ----------------------------------------------------------------------------------------

    def attn_post_norm(self, layer: int) -> NormView | None:
        """Return the norm between attention's output and the residual stream (Gemma-2/3, OLMo-2),
        if there is one.
        """
        return self._post_norm(layer, "ln1_post", "post_attention_layernorm")

    def mlp_post_norm(self, layer: int) -> NormView | None:
        """Return the norm between the FFN's output and the residual stream, if there is one."""
        return self._post_norm(layer, "ln2_post", "post_feedforward_layernorm")

    def _post_norm(self, layer: int, name: str, hf_name: str) -> NormView | None:
        block = self.model.blocks[layer]
        module = getattr(block, name, None)
        if module is None and self._norms_only_after_sublayers(layer):
            # TransformerLens 3.9 calls these norms ln1 and ln2, as if they came before the
            # sublayers.
            component = getattr(block, "original_component", None)
            module = (
                getattr(block, name.removesuffix("_post"))
                if component is None
                else getattr(component, hf_name, None)
            )
        return (
            None
            if module is None
            else infer_norm(module, self.d_model, self.unembed_device, default_eps=self._eps)
        )

    def _norms_only_after_sublayers(self, layer: int) -> bool:
        """Whether attention and FFN read the residual stream directly and only their outputs are
        normed (OLMo 2, 3).
        """
        component = getattr(self.model.blocks[layer], "original_component", None)
        if component is None:
            return self.architecture.startswith(("Olmo2", "Olmo3"))
        return hasattr(component, "post_feedforward_layernorm") and not hasattr(
            component, "input_layernorm"
        )

    def q_norm(self, layer: int) -> NormView | None:
        """Return the norm of queries before rotation (Qwen3, Gemma-3, OLMo-2), over d_head or all
        heads jointly.
        """
        return self._qk_norm(layer, "q_norm", self.n_heads)

    def k_norm(self, layer: int) -> NormView | None:
        """Return the norm of keys before rotation, if any, over d_head or all key-value heads
        jointly.
        """
        return self._qk_norm(layer, "k_norm", self.n_kv_heads)

    def _qk_norm(self, layer: int, name: str, n_heads: int) -> NormView | None:
        module = getattr(self.attn(layer), name, None)
        if module is None:
            return None
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        width = math.prod(shapes[0]) if shapes else 0
        norm = None
        if (
            width in (self.d_head, n_heads * self.d_head)
            and len(shapes) <= 2
            and set(shapes) == {(width,)}
        ):
            norm = infer_norm(module, width, self.unembed_device, default_eps=self._eps)
        if norm is None or (norm.center and width != self.d_head):
            raise InputError(
                f"the query and key norm of {self.architecture} is not supported (weights {shapes} "
                f"in layer {layer}), so query vectors cannot be computed in key space; other "
                "analyses work"
            )
        return norm

    def query_in_key_space(
        self, layer: int, q: Float[Tensor, "batch head d_head"]
    ) -> Float[Tensor, "batch head d_head"]:
        """Return queries after their own norm, times the gain of the keys' norm; unchanged without
        such norms.

        Their dot products with keys that are not yet normed lack only each key's own scale.
        """
        q_norm, k_norm = self.q_norm(layer), self.k_norm(layer)
        if q_norm is not None:
            q = (
                q_norm(q)
                if q_norm.width == self.d_head
                else q_norm(q.flatten(1)).unflatten(1, q.shape[1:])
            )
        if k_norm is None:
            return q
        gain = k_norm.gain_as(q.dtype).expand(k_norm.width)
        if k_norm.width != self.d_head:  # one norm over all key-value heads
            gain = gain.unflatten(0, (self.n_kv_heads, self.d_head))
            gain = gain.repeat_interleave(self.n_heads // self.n_kv_heads, dim=0)
        q = q * gain
        return q - q.mean(-1, keepdim=True) if k_norm.center else q

    def attn_input_norm(self, layer: int) -> NormView:
        """Return the norm before attention; the identity if attention reads the residual stream
        directly.

        It is inferred once for a view, because that takes several calls of the module, and again
        if the norm's weights have changed since.
        """
        weights = []
        if not self._norms_only_after_sublayers(layer):
            weights = [weight.detach() for weight in self.model.blocks[layer].ln1.parameters()]
        inferred = self._attn_input_norms.get(layer)
        if inferred is None or not inferred.is_of(weights):
            copies = [weight.clone() for weight in weights]
            inferred = _InferredNorm(self._inferred_attn_input_norm(layer), copies)
            self._attn_input_norms[layer] = inferred
        return inferred.norm

    @cached_property
    def _attn_input_norms(self) -> dict[int, _InferredNorm]:
        return {}

    def _inferred_attn_input_norm(self, layer: int) -> NormView:
        if self._norms_only_after_sublayers(layer):
            return NormView(
                gain=None,
                shift=None,
                eps=self._eps,
                center=False,
                normalize=False,
                width=self.d_model,
            )
        return infer_norm(
            self.model.blocks[layer].ln1, self.d_model, self.unembed_device, default_eps=self._eps
        )

    @property
    def _eps(self) -> float:
        return float(getattr(self.cfg, "eps", 1e-5) or 1e-5)

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.model.W_U.dtype == torch.float64 else torch.float32

    def readout(self, final_resid: Float[Tensor, "batch d_model"]) -> Readout:
        """Return the readout with the final norm's scale frozen at that of each prompt's final
        residual.
        """
        dtype = self.compute_dtype
        norm = infer_norm(
            self.model.ln_final, self.d_model, self.unembed_device, default_eps=self._eps
        )
        final = final_resid.to(self.unembed_device, dtype)
        scale = (
            norm_scale(final, eps=norm.eps, center=norm.center)
            if norm.normalize
            else final.new_ones(len(final))
        )
        W_U, b_U = (
            self._weight(self.model, name, offloaded_in=self.model.unembed)
            for name in ("W_U", "b_U")
        )
        cap = getattr(self.cfg, "output_logits_soft_cap", None)
        tokenizer = getattr(self.model, "tokenizer", None)
        return Readout(
            W_U=W_U,
            b_U=b_U.to(dtype) if b_U is not None and bool(b_U.any()) else None,
            gain=None if norm.gain is None else norm.gain.to(dtype),
            shift=None if norm.shift is None else norm.shift.to(dtype),
            scale=scale,
            eps=norm.eps,
            center=norm.center,
            normalize=norm.normalize,
            logit_scale=self.logit_scale,
            soft_cap=float(cap) if cap and cap > 0 else None,
            decode=None if tokenizer is None else cache(lambda token: tokenizer.decode([token])),
        )

    # Passes ---------------------------------------------------------------------------------------

    @contextmanager
    def inference_pass(self, *, is_compared: bool = False) -> Iterator[dict[str, Any]]:
        """Yield keyword arguments with which forward passes in the block keep in memory only what
        hooks record.

        Without them, Hugging Face models collect a KV cache and every layer's attention weights
        (heads · pos² values), and bridges store the attention weights. In float32 and float64, a
        tanh GELU that consists of several operations is replaced by a single kernel, which gives
        the same result within rounding.

        `is_compared` says that the logits will be compared with those of the Hugging Face model.
        """
        with (
            self.exclusive_pass(is_compared=is_compared),
            inference_kwargs(self.model) as arguments,
        ):
            yield arguments

    @contextmanager
    def exclusive_pass(self, *, is_compared: bool = False) -> Iterator[None]:
        """Lock the model for this thread, in evaluation mode and with independent rows; undo both
        afterwards.
        """
        if not is_compared:
            compare_deferred(self.model)
        with model_lock(self.model), comparison_postponed(self.model), independent_rows(self.model):
            training = [module for module in all_modules(self.model) if module.training]
            for module in training:
                module.training = False
            try:
                yield
            finally:
                for module in training:
                    module.training = True

    @contextmanager
    def hooks_disabled(self) -> Iterator[None]:
        """Disable all forward hooks, and thereby all edits, inside the `with` block."""
        with self.exclusive_pass():
            points = {
                id(point): point for point in self.model.hook_dict.values() if point.fwd_hooks
            }.values()
            hooks = [(point, dict(point._forward_hooks)) for point in points]
            try:
                for point, _ in hooks:
                    point._forward_hooks.clear()
                yield
            finally:
                for point, hooks_before in hooks:
                    point._forward_hooks.update(hooks_before)

    # Hook names -----------------------------------------------------------------------------------

    @cached_property
    def hook_names(self) -> frozenset[str]:
        """The names of all hooks, cached because a bridge rebuilds its dictionary at each
        access.
        """
        return frozenset(self.model.hook_dict)

    def hook(self, layer: int, name: str) -> str:
        """Return the full name of a layer's hook. Raise InputError if the model does not have
        it.
        """
        full = f"blocks.{layer}.{name}"
        if full not in self.hook_names:
            raise InputError(
                f"model must be a decoder of attention + FFN layers, got {self.name} without hook "
                f"{full}"
            )
        return full

    @property
    def last_logits_hook(self) -> str:
        """The hook at which to select positions so that logits are computed only there."""
        return (
            "unembed.hook_in"
            if "unembed.hook_in" in self.hook_names
            else "ln_final.hook_normalized"
        )


# Sizes of FFNs, which are read once per model, since offloaded weights are loaded for that.
_N_NEURONS: "WeakKeyDictionary[Any, int | None]" = WeakKeyDictionary()
