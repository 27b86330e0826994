"""Loading models, and every difference between model classes, families and TransformerLens versions.

`ModelView` is the one place that knows where weights live and what blocks do to a head's output; everything
else reads weights through it. Nothing here is cached: weights are views of the model's own parameters.
"""

import math
import os
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.readout import Readout, norm_scale


class Head(NamedTuple):
    """An attention head; prints as `L22H0`.

    Example:
        >>> str(il.Head(22, 0)), il.Head.parse("L22H0").layer
        ('L22H0', 22)
    """

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def parse(cls, text: str) -> "Head":
        """Reads `L22H0`; raises InputError for anything else."""
        layer, sep, head = text.strip().upper().removeprefix("L").partition("H")
        if not sep or not layer.isdigit() or not head.isdigit():
            raise InputError(f"{text!r} names no head; write a layer and a head like L22H0")
        return cls(int(layer), int(head))


def bundled_models() -> list[str]:
    """Names of the models that come with the package and load without a network.

    Example:
        >>> "icl-mini" in il.bundled_models()
        True
    """
    folder = files("icl_lens") / "bundled"
    return sorted(entry.name for entry in folder.iterdir() if (entry / "config.json").is_file())


def tl_version() -> tuple[int, int]:
    """Major and minor version of the installed TransformerLens."""
    major, minor, *_ = version("transformer-lens").split(".")
    return int(major), int(minor)


def load_model(
    name: str = "icl-mini",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    revision: str | None = None,
    device_map: str | dict[str, str | int] | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Any:
    """A `TransformerBridge` with raw weights and eager attention, in eval mode, gradients off.

    `name` is a bundled model (`bundled_models()`), a local Hugging Face folder, or a Hub name such as
    "gpt2-large", "EleutherAI/gpt-j-6b", "huggyllama/llama-7b". Other keywords go to
    `TransformerBridge.boot_transformers` (`n_devices`, `max_memory`, `tokenizer`, `hf_model`, …).
    Raises InputError, with the reason and the remedy, if the model cannot be had.

    Example:
        >>> model = il.load_model("icl-mini")
        >>> model.cfg.n_layers, model.cfg.n_heads
        (6, 8)
    """
    from transformer_lens.model_bridge import TransformerBridge

    source = _source(name, local_only="hf_model" not in kwargs)
    where: dict[str, Any] = {"device_map": device_map} if device_map is not None else {"device": device or _device()}
    try:
        model = TransformerBridge.boot_transformers(
            source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, **where, **kwargs
        )
    except (OSError, ValueError, ImportError, RuntimeError, NotImplementedError) as error:
        raise InputError(_why_not(name, error)) from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.eval()
    return model


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _source(name: str, *, local_only: bool) -> str:
    """The folder of a bundled or local model, else the name itself for the Hub."""
    if name in bundled_models():
        return str(files("icl_lens") / "bundled" / name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"the folder {name!r} holds no Hugging Face model: there is no config.json in it")
        return str(path)
    if local_only and (path.is_absolute() or name.startswith((".", "~"))):
        raise InputError(f"there is no folder {name!r}; give an existing Hugging Face folder or a Hub name")
    return name


def _why_not(name: str, error: BaseException) -> str:
    chain, text = error, ""
    while chain is not None:
        text += f" {type(chain).__name__} {chain}"
        chain = chain.__cause__ or chain.__context__
    lower = text.lower()
    names = ", ".join(bundled_models())
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "gated" in lower or "401 client" in lower or "403 client" in lower or "awaiting a review" in lower:
        return (
            f"model {name!r} is gated on the Hugging Face Hub; accept its licence on its page, then log in with "
            f"`hf auth login` or set HF_TOKEN (bundled models need neither: {names})"
        )
    if "repositorynotfound" in lower or "404 client" in lower or "is not a valid model identifier" in lower:
        return (
            f"the Hugging Face Hub knows no model {name!r}; check the name (bundled: {names}), "
            "or log in if it is private"
        )
    offline = any(
        os.environ.get(v, "").lower() in ("1", "true", "yes", "on") for v in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    if offline or any(
        sign in lower
        for sign in (
            "connect",
            "resolve",
            "offline",
            "proxy",
            "timed out",
            "network",
            "localentrynotfound",
            "couldn't reach",
        )
    ):
        how = "unset HF_HUB_OFFLINE to go online" if offline else "check the network to the Hugging Face Hub"
        return (
            f"model {name!r} is neither bundled ({names}) nor a local folder, and it could not be fetched; "
            f"{how}, or pass the folder of a downloaded model"
        )
    return f"model {name!r} could not be loaded: {reason} (bundled models: {names})"


@dataclass(frozen=True)
class ModelView:
    """What the rest of the package needs to know of a model: sizes, hook names, weights, the final readout.

    Works on `TransformerBridge` (TransformerLens 3.9 and 4.x) and `HookedTransformer` (3.9), raw or processed.
    Weight accessors return views in TransformerLens' axis order and the model's dtype, without gradients.
    """

    model: Any

    @classmethod
    def of(cls, model: Any) -> "ModelView":
        """The view of a model; raises InputError for what is no decoder with attention + FFN blocks."""
        cfg = getattr(model, "cfg", None)
        if cfg is None or not hasattr(model, "blocks") or not hasattr(model, "hook_dict"):
            raise InputError(
                f"{type(model).__name__} is no TransformerLens model; load it with icl_lens.load_model or "
                "TransformerBridge.boot_transformers"
            )
        missing = [part for part in ("ln_final", "unembed") if not hasattr(model, part)]
        if missing:
            raise InputError(
                f"{type(getattr(model, 'original_model', model)).__name__} is not supported in this configuration: it "
                f"has no {' and no '.join(missing)}, so there is no final norm and unembedding to read vectors out with"
            )
        name = type(getattr(model, "original_model", model)).__name__
        if name.startswith("Cohere") and tl_version() < (4, 0):
            raise InputError(
                f"{name} is not supported on TransformerLens 3, whose logits for it differ from the model's; "
                "install transformer-lens>=4"
            )
        _check_weights(model, name)
        return cls(model)

    @property
    def cfg(self) -> Any:
        return self.model.cfg

    @property
    def name(self) -> str:
        name = str(self.cfg.model_name)
        return Path(name).name if os.path.isdir(name) else name

    @property
    def architecture(self) -> str:
        """The Hugging Face class the model is of, such as `GPT2LMHeadModel`."""
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
        """Attention and FFN read the same input (GPT-J, Pythia)."""
        return bool(self.cfg.parallel_attn_mlp)

    @property
    def home(self) -> torch.device:
        """Where recorded activations are kept: the unembedding's device."""
        return self.model.W_U.device

    def attn(self, layer: int) -> Any:
        return self.model.blocks[layer].attn

    def kv_head(self, head: int) -> int:
        """The key-value group a query head reads."""
        return head // (self.n_heads // self.n_kv_heads)

    def check_head(self, head: "Head | tuple[int, int]") -> Head:
        """The head as a `Head`; raises InputError if the model has no such head."""
        layer, index = int(head[0]), int(head[1])
        if not (0 <= layer < self.n_layers and 0 <= index < self.n_heads):
            raise InputError(
                f"{Head(layer, index)} does not exist: {self.name} has layers 0–{self.n_layers - 1} with heads "
                f"0–{self.n_heads - 1}"
            )
        return Head(layer, index)

    # Weights ---------------------------------------------------------------------------------------------
    #
    # Output matrices are given as they act on the residual stream: times the gain of a norm that follows the
    # sublayer (its data-dependent scale is `Activations.attn_scale`), times Granite's residual multiplier.

    def W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        """From a head's z to the residual stream."""
        return self.outward(self.raw_W_O(layer), self.attn_post_norm(layer))

    def b_O(self, layer: int) -> Float[Tensor, " d_model"] | None:
        """The attention output's bias, which belongs to no head; None if the model has none."""
        b_O = self.raw_b_O(layer)
        return None if b_O is None else self.outward(b_O, self.attn_post_norm(layer))

    def raw_W_O(self, layer: int) -> Float[Tensor, "head d_head d_model"]:
        return self.attn(layer).W_O.detach().to(self.home)

    def raw_b_O(self, layer: int) -> Float[Tensor, " d_model"] | None:
        b_O = _optional(self.attn(layer), "b_O")
        return None if b_O is None else b_O.detach().to(self.home)

    def outward(self, weight: Tensor, post: "NormView | None") -> Tensor:
        """A raw output matrix or bias as it acts on the residual stream."""
        if post is not None:
            weight = weight.to(self.compute_dtype) * post.gain_as(self.compute_dtype)
        return weight if self.residual_multiplier == 1.0 else weight * self.residual_multiplier

    @property
    def residual_multiplier(self) -> float:
        """What Granite multiplies every sublayer's output with; 1 elsewhere."""
        return float(self._setting("residual_multiplier", 1.0))

    @property
    def logit_scale(self) -> float:
        """What Cohere multiplies, and Granite divides, the logits by; 1 elsewhere.

        Weight processing moves Cohere's into W_U: the model's own attribute says so, the configuration does not.
        """
        own = _optional(getattr(self.model, "original_model", None), "logit_scale")
        scale = own if isinstance(own, (int, float)) else self._setting("logit_scale", 1.0)
        return float(scale) / float(self._setting("logits_scaling", 1.0))

    def _setting(self, name: str, default: Any) -> Any:
        """A setting that only some families have, from the Hugging Face configuration."""
        config = getattr(getattr(self.model, "original_model", None), "config", None)
        return getattr(config, name, default)

    def W_V(self, layer: int) -> Float[Tensor, "kv_head d_model d_head"]:
        return self._grouped(self.attn(layer).W_V.detach().to(self.home))

    def W_K(self, layer: int) -> Float[Tensor, "kv_head d_model d_head"]:
        return self._grouped(self.attn(layer).W_K.detach().to(self.home))

    def W_Q(self, layer: int) -> Float[Tensor, "head d_model d_head"]:
        return self.attn(layer).W_Q.detach().to(self.home)

    def _grouped(self, weight: Tensor) -> Tensor:
        """One matrix a key-value group, also where TransformerLens repeats it for every query head."""
        return weight if weight.shape[0] == self.n_kv_heads else weight[:: self.n_heads // self.n_kv_heads]

    def W_out(self, layer: int) -> Float[Tensor, "neuron d_model"]:
        """From FFN coefficients to the residual stream; raises InputError for a mixture of experts."""
        return self.outward(self.raw_W_out(layer), self.mlp_post_norm(layer))

    def raw_W_out(self, layer: int) -> Float[Tensor, "neuron d_model"]:
        weight = _optional(self.model.blocks[layer].mlp, "W_out")
        if weight is None or weight.ndim != 2:
            raise InputError(
                f"layer {layer} of {self.name} has no single FFN output matrix (a mixture of experts?): "
                "neurons cannot be told apart; layer and head increases still work"
            )
        return weight.detach().to(self.home)

    def raw_b_out(self, layer: int) -> Float[Tensor, " d_model"] | None:
        b_out = _optional(self.model.blocks[layer].mlp, "b_out")
        return None if b_out is None else b_out.detach().to(self.home)

    # Norms -----------------------------------------------------------------------------------------------

    def attn_post_norm(self, layer: int) -> "NormView | None":
        """The norm between attention's output and the residual stream (Gemma-2/3, OLMo-2), if there is one."""
        return self._post_norm(layer, "ln1_post", "post_attention_layernorm")

    def mlp_post_norm(self, layer: int) -> "NormView | None":
        """The norm between the FFN's output and the residual stream, if there is one."""
        return self._post_norm(layer, "ln2_post", "post_feedforward_layernorm")

    def _post_norm(self, layer: int, name: str, hf_name: str) -> "NormView | None":
        block = self.model.blocks[layer]
        module = _optional(block, name)
        if module is None and self.architecture.startswith("Olmo2"):
            # TransformerLens 3.9 calls OLMo-2's post-norms ln1 and ln2, as if they came before the sublayers.
            component = _optional(block, "original_component")
            module = getattr(block, name.removesuffix("_post")) if component is None else _optional(component, hf_name)
        return None if module is None else probe_norm(module, self.d_model, self.home, default_eps=self._eps)

    def q_norm(self, layer: int) -> "NormView | None":
        """The norm of queries before rotation (Qwen3, Gemma-3, OLMo-2): over d_head, or over all heads' together."""
        return self._qk_norm(layer, "q_norm", self.n_heads)

    def k_norm(self, layer: int) -> "NormView | None":
        """The norm of keys before rotation, if there is one: over d_head, or over all key-value groups' together."""
        return self._qk_norm(layer, "k_norm", self.n_kv_heads)

    def _qk_norm(self, layer: int, name: str, n_heads: int) -> "NormView | None":
        module = _optional(self.attn(layer), name)
        if module is None:
            return None
        shapes = [tuple(parameter.shape) for parameter in module.parameters()]
        width = math.prod(shapes[0]) if shapes else 0
        norm = None
        if width in (self.d_head, n_heads * self.d_head) and len(shapes) <= 2 and set(shapes) == {(width,)}:
            norm = probe_norm(module, width, self.home, default_eps=self._eps)
        if norm is None or (norm.centre and width != self.d_head):
            raise InputError(
                f"{self.architecture} normalises queries and keys in a way icl_lens does not know (weights {shapes} in "
                f"layer {layer}): queries cannot be carried to the keys' side; everything else works"
            )
        return norm

    def query_for_keys(self, layer: int, q: Float[Tensor, "batch head d_head"]) -> Float[Tensor, "batch head d_head"]:
        """Queries as they meet the keys' projections: after their norm, times the gain of the keys' norm.

        Only each key's own scale is missing. Unchanged where nothing is normalised.
        """
        q_norm, k_norm = self.q_norm(layer), self.k_norm(layer)
        if q_norm is not None:
            q = q_norm(q) if q_norm.width == self.d_head else q_norm(q.flatten(1)).unflatten(1, q.shape[1:])
        if k_norm is None:
            return q
        gain = k_norm.gain_as(q.dtype).expand(k_norm.width)
        if k_norm.width != self.d_head:  # one norm over all key-value groups
            gain = gain.unflatten(0, (self.n_kv_heads, self.d_head))
            gain = gain.repeat_interleave(self.n_heads // self.n_kv_heads, dim=0)
        q = q * gain
        return q - q.mean(-1, keepdim=True) if k_norm.centre else q

    @property
    def _eps(self) -> float:
        return float(getattr(self.cfg, "eps", 1e-5) or 1e-5)

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.model.W_U.dtype == torch.float64 else torch.float32

    def readout(self, final_resid: Float[Tensor, "batch d_model"]) -> Readout:
        """The readout with the scale frozen at each prompt's final residual."""
        dtype = self.compute_dtype
        norm = probe_norm(self.model.ln_final, self.d_model, self.home, default_eps=self._eps)
        final = final_resid.to(self.home, dtype)
        scale = norm_scale(final, eps=norm.eps, centre=norm.centre) if norm.normalize else final.new_ones(len(final))
        b_U = _optional(self.model, "b_U")
        b_U = None if b_U is None else b_U.detach().to(self.home, dtype)
        cap = getattr(self.cfg, "output_logits_soft_cap", None)
        tokenizer = getattr(self.model, "tokenizer", None)
        return Readout(
            W_U=self.model.W_U.detach(),
            b_U=b_U if b_U is not None and bool(b_U.any()) else None,
            gain=None if norm.gain is None else norm.gain.to(dtype),
            shift=None if norm.shift is None else norm.shift.to(dtype),
            scale=scale,
            eps=norm.eps,
            centre=norm.centre,
            normalize=norm.normalize,
            logit_scale=self.logit_scale,
            soft_cap=float(cap) if cap and cap > 0 else None,
            decode=None if tokenizer is None else lambda token: tokenizer.decode([token]),
        )

    # Attention scores ------------------------------------------------------------------------------------

    def score_view(self, layer: int) -> "ScoreView":
        """How a layer turns queries and keys into attention scores."""
        attn, cfg = self.attn(layer), self.cfg
        inner = getattr(attn, "original_component", None)
        position = str(getattr(cfg, "positional_embedding_type", "standard"))
        if inner is None:  # HookedTransformer says everything itself
            local = bool(getattr(cfg, "use_local_attn", False)) and cfg.attn_types[layer] == "local"
            cap = float(getattr(cfg, "attn_scores_soft_cap", -1.0))
            scale = 1.0 / float(attn.attn_scale)
            interleaved = bool(getattr(cfg, "rotary_adjacent_pairs", False))
            return ScoreView(scale, cap if cap > 0 else None, cfg.window_size if local else None, position, interleaved)
        cap = getattr(inner, "attn_logit_softcapping", None)
        interleaved = self.architecture.startswith(("GPTJ", "Cohere"))
        return ScoreView(_score_scale(inner), cap or None, self._window(layer, inner), position, interleaved)

    def _window(self, layer: int, inner: Any) -> int | None:
        """How many keys back a layer's queries see, themselves included; None for all."""
        kind = getattr(inner, "attention_type", None)  # GPT-Neo
        if kind is not None:
            return int(self._setting("window_size", 0)) if kind == "local" else None
        window = getattr(inner, "sliding_window", None)
        if window is None and self._setting("layer_types", None) is None:
            window = self._setting("sliding_window", None)
        return int(window) if window else None

    def normed_hooks(self, layer: int) -> dict[str, str]:
        """Where queries and keys can be read after a norm of their own, before rotation; fires where there is one."""
        names = {f"{name}_normed": f"blocks.{layer}.attn.hook_{name}_normed" for name in "qk"}
        return {name: hook for name, hook in names.items() if hook in self.model.hook_dict}

    def rotation_hooks(self, layer: int) -> tuple[str, str] | None:
        """Where a layer's cosines and sines can be read [batch pos d_rotary]; None where they are in a table."""
        names = f"blocks.{layer}.attn.hook_cos", f"blocks.{layer}.attn.hook_sin"
        return names if names[0] in self.model.hook_dict else None

    def rotation_table(self, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at positions [batch pos], for families that keep them in a table."""
        attn = self.attn(layer)
        inner = getattr(attn, "original_component", None)
        if inner is None:
            return attn.rotary_cos[positions], attn.rotary_sin[positions]
        table = getattr(inner, "embed_positions", None)
        if table is None:
            raise InputError(
                f"{self.architecture} shows no rotation angles, so its attention scores cannot be recomputed"
            )
        sin, cos = table.to(positions.device)[positions].chunk(2, dim=-1)
        return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)

    def alibi(self, layer: int, key_mask: Tensor) -> Float[Tensor, "batch head key"]:
        """What ALiBi adds to the scores of each key, up to a constant for each query."""
        attn = self.attn(layer)
        inner = getattr(attn, "original_component", None)
        if inner is None:
            n_keys = key_mask.shape[1]
            return attn.create_alibi_bias(self.n_heads, n_keys, key_mask.device)[None, :, -1].expand(
                len(key_mask), -1, -1
            )
        build = sys.modules[type(inner).__module__].build_alibi_tensor
        bias = build(key_mask.long(), self.n_heads, self.compute_dtype)
        # Falcon's eager attention adds it twice: to the scores before they are scaled, and to the mask.
        times = 2.0 * float(inner.inv_norm_factor) if self.architecture.startswith("Falcon") else float(inner.beta)
        return bias.reshape(len(key_mask), self.n_heads, -1) * times

    def first_norm(self, layer: int) -> "NormView":
        """The norm that queries and keys are made from."""
        return probe_norm(self.model.blocks[layer].ln1, self.d_model, self.home, default_eps=self._eps)

    # Hook names ------------------------------------------------------------------------------------------

    def hook(self, layer: int, *names: str) -> str:
        """The first of a layer's hooks, by TransformerLens name, that the model has."""
        for name in names:
            full = f"blocks.{layer}.{name}"
            if full in self.model.hook_dict:
                return full
        raise InputError(
            f"{self.name} has no hook blocks.{layer}.{names[0]}: only decoders of attention + FFN blocks are supported"
        )

    @property
    def last_logits_hook(self) -> str:
        """Where the stream can be cut down to the rows whose logits are wanted, so that no others are computed."""
        return "unembed.hook_in" if "unembed.hook_in" in self.model.hook_dict else "ln_final.hook_normalized"


class ScoreView(NamedTuple):
    """How one attention layer scores keys: `soft_cap(scale · q·k)`, what carries position, and how far back it sees."""

    scale: float
    soft_cap: float | None
    window: int | None
    position: str
    interleaved: bool


def _score_scale(inner: Any) -> float:
    """What a Hugging Face attention module multiplies q·k with; modules without a word on it do not scale."""
    for name in ("scaling", "inv_norm_factor"):
        if hasattr(inner, name):
            return float(getattr(inner, name))
    return 1.0 / float(inner.scale_attn) if hasattr(inner, "scale_attn") else 1.0


class NormView(NamedTuple):
    """A norm as an affine map with a data-dependent scale: gain, shift, eps, whether it centres, its width."""

    gain: Tensor | None
    shift: Tensor | None
    eps: float
    centre: bool
    normalize: bool
    width: int

    def gain_as(self, dtype: torch.dtype) -> Tensor:
        return torch.ones((), dtype=dtype) if self.gain is None else self.gain.to(dtype)

    def __call__(self, x: Float[Tensor, "*rest d"]) -> Float[Tensor, "*rest d"]:
        """What the module gives for `x`, in the dtype of `x`."""
        if not self.normalize:
            return x
        y = x - x.mean(-1, keepdim=True) if self.centre else x
        y = y * norm_scale(x, eps=self.eps, centre=self.centre)[..., None] * self.gain_as(x.dtype)
        return y if self.shift is None else y + self.shift.to(x.dtype)


def probe_norm(module: Any, d_model: int, device: torch.device, *, default_eps: float) -> NormView:
    """Finds out what a norm module does by asking it.

    Families disagree on where gains live and whether they are stored as `w` or `1 + w`; the module's answers
    to a few vectors do not. The vectors are long enough that eps does not show, then short enough that it does.
    """
    weight = next((p for p in module.parameters()), None)
    # The module's own dtype: probing in it is exact for half precision, whose gains round the same way.
    dtype = torch.float32 if weight is None else weight.dtype
    where = device if weight is None else weight.device
    signs = torch.ones(1, 1, d_model, dtype=torch.float64)
    signs[..., 1::2] = -1
    long = 2.0**10
    with torch.no_grad():

        def ask(x: Tensor) -> Tensor:
            return module(x.to(where, dtype))[0, 0].to(device, torch.float64).cpu()

        zero, ones, alternating = (
            ask(torch.zeros_like(signs)),
            ask(torch.ones_like(signs) * long),
            ask(signs * long),
        )
        if torch.equal(alternating, (signs * long)[0, 0]):
            return NormView(None, None, default_eps, False, False, d_model)
        shift = zero
        centre = bool(torch.allclose(ones, shift, atol=1e-3) and not torch.allclose(alternating, shift, atol=1e-3))
        gain = (alternating - shift) * signs[0, 0]
        eps = _eps_of(module, default_eps)
        expected = shift + gain * signs[0, 0] / math.sqrt(2)
        if not torch.allclose(ask(signs * math.sqrt(eps)), expected, rtol=2e-2, atol=2e-2):
            raise InputError(
                f"{type(module).__name__} is neither a LayerNorm nor an RMSNorm with eps={eps}: this family's "
                "norm is not supported"
            )
    # Odd widths leave the alternating vector with a mean; LayerNorm then answers for a centred one.
    if centre and d_model % 2:
        raise InputError(f"d_model={d_model} is odd, which no supported family has")
    keep_shift = shift.to(device) if bool(shift.any()) else None
    keep_gain = None if bool((gain == 1).all()) else gain.to(device)
    return NormView(keep_gain, keep_shift, eps, centre, True, d_model)


# Dtypes whose weights can be read and multiplied with as they are.
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_weights(model: Any, name: str) -> None:
    """Raises InputError for weights that cannot be read: quantised, or not in memory."""
    quantised = getattr(getattr(model, "original_model", None), "hf_quantizer", None) is not None
    away = False
    dtypes: set[torch.dtype] = set()
    for parameter in model.parameters():
        dtypes.add(parameter.dtype)
        away = away or parameter.is_meta
    packed = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in READABLE)
    if quantised or packed:
        raise InputError(
            f"the weights of {name} are quantised{' (' + ', '.join(packed) + ')' if packed else ''}, and heads cannot "
            "be read out of packed weights; load the model unquantised, in dtype=torch.bfloat16 where memory is short"
        )
    if away:
        raise InputError(
            f"some weights of {name} are not in memory (offloaded, or on the meta device); load the model where it "
            "fits whole: dtype=torch.bfloat16, several GPUs with device_map, or device='cpu'"
        )


def _eps_of(module: Any, default: float) -> float:
    for owner in (module, getattr(module, "original_component", None)):
        for name in ("eps", "variance_epsilon", "epsilon"):
            value = getattr(owner, name, None) if owner is not None else None
            if isinstance(value, (int, float)):
                return float(value)
    return default


def _optional(owner: Any, name: str) -> Any:
    """An attribute that some families lack; TransformerBridge raises AttributeError for missing biases."""
    try:
        return getattr(owner, name)
    except AttributeError:
        return None
