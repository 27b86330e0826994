"""Compute attention scores from queries and keys: scale, soft cap, window, rotation, ALiBi."""

import sys
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.norms import NormView
from icl_lens.models.view import ModelView


class RotaryAnglesUnavailable(InputError):
    """Raised when a model does not expose its rotary angles."""


class AttentionScoring(NamedTuple):
    """The scoring of one attention layer: `soft_cap(scale · q·k)` within an attention window (None: all keys).

    `position` is the type of positional embedding; `interleaved` tells whether rotation pairs adjacent dimensions.
    """

    scale: float
    soft_cap: float | None
    window: int | None
    position: str
    interleaved: bool


def attention_scoring(view: ModelView, layer: int) -> AttentionScoring:
    """Return how a layer computes attention scores."""
    attn, cfg = view.attn(layer), view.cfg
    hf_attn = getattr(attn, "original_component", None)
    position = str(getattr(cfg, "positional_embedding_type", "standard"))
    if hf_attn is None:  # HookedTransformer has all settings in cfg
        local = bool(getattr(cfg, "use_local_attn", False)) and cfg.attn_types[layer] == "local"
        cap = float(getattr(cfg, "attn_scores_soft_cap", -1.0))
        scale = 1.0 / float(attn.attn_scale)
        interleaved = bool(getattr(cfg, "rotary_adjacent_pairs", False))
        return AttentionScoring(
            scale, cap if cap > 0 else None, cfg.window_size if local else None, position, interleaved
        )
    cap = getattr(hf_attn, "attn_logit_softcapping", None)
    interleaved = view.architecture.startswith(("GPTJ", "Cohere"))
    return AttentionScoring(_score_scale(hf_attn), cap or None, _window(view, hf_attn), position, interleaved)


def _window(view: ModelView, hf_attn: Any) -> int | None:
    """Return how many keys each query of a layer sees, including its own position; None for all."""
    kind = getattr(hf_attn, "attention_type", None)  # GPT-Neo
    if kind is not None:
        return int(view.hf_config_value("window_size", 0)) if kind == "local" else None
    window = getattr(hf_attn, "sliding_window", None)
    if window is None and view.hf_config_value("layer_types", None) is None:
        window = view.hf_config_value("sliding_window", None)
    return int(window) if window else None


def normed_hooks(view: ModelView, layer: int) -> dict[str, str]:
    """Return the model's hooks of normed queries and keys before rotation; they fire only in layers with such norms."""
    names = {f"{name}_normed": f"blocks.{layer}.attn.hook_{name}_normed" for name in "qk"}
    return {name: hook for name, hook in names.items() if hook in view.hook_names}


def unhooked_qk_norm(view: ModelView, layer: int, name: str) -> NormView | None:
    """Return the norm of queries ("q") or keys ("k") if no hook has its output (HookedTransformer), else None."""
    if getattr(view.attn(layer), "original_component", None) is not None or normed_hooks(view, layer):
        return None
    return view.q_norm(layer) if name == "q" else view.k_norm(layer)


def rotation_hooks(view: ModelView, layer: int) -> tuple[str, str] | None:
    """Return the hooks of a layer's cosines and sines [batch pos d_rotary]; None if they are in a table.

    In a layer that does not rotate (Cohere 2, SmolLM3), the hooks exist but never fire; see `no_rotation`.
    """
    names = f"blocks.{layer}.attn.hook_cos", f"blocks.{layer}.attn.hook_sin"
    return names if names[0] in view.hook_names else None


def rotation_table(view: ModelView, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines at positions [batch pos] from a table, or raise RotaryAnglesUnavailable."""
    attn = view.attn(layer)
    hf_attn = getattr(attn, "original_component", None)
    if hf_attn is None:
        return attn.rotary_cos[positions], attn.rotary_sin[positions]
    table = getattr(hf_attn, "embed_positions", None)
    if table is None:
        raise RotaryAnglesUnavailable(
            f"{view.architecture} does not expose its rotary angles, so its attention scores cannot be recomputed"
        )
    sin, cos = table.to(positions.device)[positions].chunk(2, dim=-1)
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)


def no_rotation(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [1 1 0] of a layer that does not rotate: `rotate` with them changes nothing."""
    angles = like.new_empty(1, 1, 0)
    return angles, angles


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [batch pos head d_head] by angles [batch pos d_rotary]; dimensions after d_rotary are unchanged."""
    n = cos.shape[-1]
    part, rest = x[..., :n], x[..., n:]
    if interleaved:
        flipped = torch.stack([-part[..., 1::2], part[..., ::2]], dim=-1).flatten(-2)
    else:
        flipped = torch.cat([-part[..., n // 2 :], part[..., : n // 2]], dim=-1)
    return torch.cat([part * cos[:, :, None] + flipped * sin[:, :, None], rest], dim=-1)


def alibi(view: ModelView, layer: int, key_mask: Tensor) -> Float[Tensor, "batch head key"]:
    """Return ALiBi's bias for the scores of each key, up to a constant per query."""
    attn = view.attn(layer)
    hf_attn = getattr(attn, "original_component", None)
    if hf_attn is None:
        n_keys = key_mask.shape[1]
        return attn.create_alibi_bias(view.n_heads, n_keys, key_mask.device)[None, :, -1].expand(len(key_mask), -1, -1)
    functions = sys.modules[type(hf_attn).__module__]
    if not hasattr(functions, "build_alibi_tensor"):  # MPT adds it to the scaled scores
        bias = functions.build_mpt_alibi_tensor(view.n_heads, key_mask.shape[1], device=key_mask.device)
        return bias.to(view.compute_dtype).squeeze(1).expand(len(key_mask), -1, -1)
    bias = functions.build_alibi_tensor(key_mask.long(), view.n_heads, view.compute_dtype)
    # Falcon's eager attention adds the bias twice: to the unscaled scores and to the mask.
    times = 2.0 * float(hf_attn.inv_norm_factor) if view.architecture.startswith("Falcon") else float(hf_attn.beta)
    return bias.reshape(len(key_mask), view.n_heads, -1) * times


def _score_scale(hf_attn: Any) -> float:
    """Return the factor of q·k in a Hugging Face attention module; modules without such an attribute do not scale."""
    for name in ("scaling", "inv_norm_factor", "softmax_scale"):
        if hasattr(hf_attn, name):
            return float(getattr(hf_attn, name))
    return 1.0 / float(hf_attn.scale_attn) if hasattr(hf_attn, "scale_attn") else 1.0
