"""Compute attention scores from queries and keys: clipping, scale, soft cap, window, rotation,
ALiBi, sinks.
"""

import sys
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.norms import NormView
from icl_lens.models.view import ModelView


class RotaryAnglesUnavailable(InputError):
    """Raised when a model does not expose its rotary angles."""


RotaryPairs = Literal["halves", "adjacent", "adjacent, angles in halves"]
"""The dimensions of a head that rotate together: i and i + d_rotary/2, or 2i and 2i + 1.

Angles have the order of the dimensions, except in "adjacent, angles in halves" (GLM, ERNIE).
"""


class AttentionScoring(NamedTuple):
    """The scoring of one attention layer: `soft_cap(scale · q·k)` within an attention window (None:
    all keys).

    `position` is the type of positional embedding. `clip` bounds the entries of queries, keys and
    values (OLMo); `norms_rotated` tells whether queries and keys are normed after their rotation
    (HunYuan) instead of before; `sinks` holds each head's logit of attention to nothing (gpt-oss).
    """

    scale: float
    soft_cap: float | None
    window: int | None
    position: str
    pairs: RotaryPairs
    rotates_whole_heads: bool = False
    """Whether angles for half a head's width are those of all its pairs (gpt-oss), not of a part of
    the head.
    """
    clip: float | None = None
    norms_rotated: bool = False
    sinks: Float[Tensor, " head"] | None = None

    def clipped(self, x: Tensor) -> Tensor:
        """Return queries, keys or values with their entries clipped as in the model."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)

    def capped(self, scores: Tensor) -> Tensor:
        """Return scores with the model's soft cap, which bounds them before masks and softmax.

        Every path that computes scores calls this: whole passes (`edits.recomputed_patterns`), rows
        of one token (`edits.one_token_rows.layer_attention`) and score parts
        (`reading.head_projection`).
        """
        return (
            scores if self.soft_cap is None else self.soft_cap * torch.tanh(scores / self.soft_cap)
        )


def position_kind(view: ModelView) -> str:
    """Return how the model encodes positions, such as "standard" (learned embeddings) or
    "rotary".
    """
    return str(getattr(view.cfg, "positional_embedding_type", "standard"))


def attention_scoring(view: ModelView, layer: int) -> AttentionScoring:
    """Return how a layer computes attention scores."""
    attn, cfg = view.attn(layer), view.cfg
    hf_attn = getattr(attn, "original_component", None)
    position = position_kind(view)
    if hf_attn is None:  # HookedTransformer has all settings in cfg
        local = bool(getattr(cfg, "use_local_attn", False)) and cfg.attn_types[layer] == "local"
        cap = float(getattr(cfg, "attn_scores_soft_cap", -1.0))
        scale = 1.0 / float(attn.attn_scale)
        pairs: RotaryPairs = (
            "adjacent" if getattr(cfg, "rotary_adjacent_pairs", False) else "halves"
        )
        return AttentionScoring(
            scale, cap if cap > 0 else None, cfg.window_size if local else None, position, pairs
        )
    sinks = getattr(hf_attn, "sinks", None)
    return AttentionScoring(
        scale=_score_scale(hf_attn),
        soft_cap=getattr(hf_attn, "attn_logit_softcapping", None) or None,
        window=_window(view, hf_attn),
        position=position,
        pairs=_pairs(cfg, hf_attn),
        rotates_whole_heads=not hasattr(hf_attn, "embed_positions") and _rotates_whole_heads(cfg),
        clip=_clip(hf_attn),
        norms_rotated=bool(getattr(cfg, "qk_norm_after_rope", False)),
        sinks=sinks.detach().to(view.unembed_device) if isinstance(sinks, Tensor) else None,
    )


def _pairs(cfg: Any, hf_attn: Any) -> RotaryPairs:
    """Return which dimensions rotate together, as TransformerLens states it, or in tables of sines
    (GPT-J, CodeGen).
    """
    if getattr(cfg, "rotary_interleaved_cos_sin", False) or hasattr(hf_attn, "embed_positions"):
        return "adjacent"
    return (
        "adjacent, angles in halves" if getattr(cfg, "rotary_adjacent_pairs", False) else "halves"
    )


def _rotates_whole_heads(cfg: Any) -> bool:
    """Return whether the configuration rotates all dimensions of a head, as TransformerLens reads
    it.
    """
    parameters = getattr(cfg, "rope_parameters", None)
    factor = parameters.get("partial_rotary_factor", 1.0) if isinstance(parameters, dict) else 1.0
    return float(getattr(cfg, "rotary_pct", factor)) == 1.0


def _clip(hf_attn: Any) -> float | None:
    """Return the bound on entries of queries, keys and values, which is the module's or its
    configuration's.
    """
    if hasattr(hf_attn, "clip_qkv"):  # MPT does not clip if it is 0
        return float(hf_attn.clip_qkv) if hf_attn.clip_qkv else None
    clip = getattr(getattr(hf_attn, "config", None), "clip_qkv", None)
    return None if clip is None else float(clip)


def _window(view: ModelView, hf_attn: Any) -> int | None:
    """Return how many keys each query of a layer sees, including its own position; None for all."""
    kind = getattr(hf_attn, "attention_type", None)  # GPT-Neo
    if kind in ("local", "global"):
        return int(view.hf_config_value("window_size", 0)) if kind == "local" else None
    window = getattr(hf_attn, "sliding_window", None)
    if not getattr(
        hf_attn, "is_sliding", True
    ):  # EXAONE 4 states a window in layers that do not use it
        return None
    if window is None and view.hf_config_value("layer_types", None) is None:
        window = view.hf_config_value("sliding_window", None)
    return int(window) if window else None


def normed_hooks(view: ModelView, layer: int) -> dict[str, str]:
    """Return the model's hooks of normed queries and keys before rotation; they fire only in layers
    with such norms.
    """
    names = {f"{name}_normed": f"blocks.{layer}.attn.hook_{name}_normed" for name in "qk"}
    return {name: hook for name, hook in names.items() if hook in view.hook_names}


def unhooked_qk_norm(view: ModelView, layer: int, name: str) -> NormView | None:
    """Return the norm of queries ("q") or keys ("k") if no hook has its output (HookedTransformer),
    else None.
    """
    if getattr(view.attn(layer), "original_component", None) is not None or normed_hooks(
        view, layer
    ):
        return None
    return view.q_norm(layer) if name == "q" else view.k_norm(layer)


def rotation_hooks(view: ModelView, layer: int) -> tuple[str, str] | None:
    """Return the hooks of a layer's cosines and sines [batch pos d_rotary]; None if they are in a
    table.

    In a layer that does not rotate (Cohere 2, SmolLM3), the hooks exist but never fire; see
    `no_rotation`.
    """
    names = f"blocks.{layer}.attn.hook_cos", f"blocks.{layer}.attn.hook_sin"
    return names if names[0] in view.hook_names else None


def rotation_table(view: ModelView, layer: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines at positions [batch pos] from a table, or raise
    RotaryAnglesUnavailable.
    """
    attn = view.attn(layer)
    hf_attn = getattr(attn, "original_component", None)
    if hf_attn is None:
        return attn.rotary_cos[positions], attn.rotary_sin[positions]
    table = getattr(hf_attn, "embed_positions", None)
    if table is None:
        raise RotaryAnglesUnavailable(
            f"{view.architecture} does not expose its rotary angles, so its attention scores "
            "cannot be recomputed"
        )
    sin, cos = table.to(positions.device)[positions].chunk(2, dim=-1)
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)


def no_rotation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines [1 1 0] of a layer that does not rotate: `rotate` with them
    changes nothing.
    """
    angles = x.new_empty(1, 1, 0)
    return angles, angles


def rotate(x: Tensor, cos: Tensor, sin: Tensor, scoring: AttentionScoring) -> Tensor:
    """Rotate x [batch pos head d_head] by angles [batch pos d_rotary]; dimensions after d_rotary
    are unchanged.
    """
    if scoring.rotates_whole_heads and 2 * cos.shape[-1] == x.shape[-1]:
        cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)
    n = cos.shape[-1]
    part, unrotated = x[..., :n], x[..., n:]
    if scoring.pairs == "halves":
        flipped = torch.cat([-part[..., n // 2 :], part[..., : n // 2]], dim=-1)
    else:
        flipped = torch.stack([-part[..., 1::2], part[..., ::2]], dim=-1).flatten(-2)
    if scoring.pairs == "adjacent, angles in halves":
        cos, sin = (angle[..., : n // 2].repeat_interleave(2, dim=-1) for angle in (cos, sin))
    return torch.cat([part * cos[:, :, None] + flipped * sin[:, :, None], unrotated], dim=-1)


def attention(
    scores: Float[Tensor, "*rest key"], sink: Float[Tensor, "*rest"] | float | None
) -> Tensor:
    """Return the softmax of scores over keys, with a head's sink as one more key that has no
    value.
    """
    if sink is None:
        return torch.softmax(scores, dim=-1)
    sink = torch.as_tensor(sink).to(scores)[..., None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]


def alibi(view: ModelView, layer: int, key_mask: Tensor) -> Float[Tensor, "batch head key"]:
    """Return ALiBi's bias for the scores of each key, up to a constant per query."""
    attn = view.attn(layer)
    hf_attn = getattr(attn, "original_component", None)
    if hf_attn is None:
        n_keys = key_mask.shape[1]
        return attn.create_alibi_bias(view.n_heads, n_keys, key_mask.device)[None, :, -1].expand(
            len(key_mask), -1, -1
        )
    functions = sys.modules[type(hf_attn).__module__]
    if not hasattr(functions, "build_alibi_tensor"):  # MPT adds it to the scaled scores
        bias = functions.build_mpt_alibi_tensor(
            view.n_heads, key_mask.shape[1], device=key_mask.device
        )
        return bias.to(view.compute_dtype).squeeze(1).expand(len(key_mask), -1, -1)
    bias = functions.build_alibi_tensor(key_mask.long(), view.n_heads, view.compute_dtype)
    # Falcon's eager attention adds the bias twice: to the unscaled scores and to the mask.
    times = (
        2.0 * float(hf_attn.inv_norm_factor)
        if view.architecture.startswith("Falcon")
        else float(hf_attn.beta)
    )
    return bias.reshape(len(key_mask), view.n_heads, -1) * times


def _score_scale(hf_attn: Any) -> float:
    """Return the factor of q·k in a Hugging Face attention module; modules without such an
    attribute do not scale.
    """
    for name in ("scaling", "inv_norm_factor", "softmax_scale"):
        if hasattr(hf_attn, name):
            return float(getattr(hf_attn, name))
    return 1.0 / float(hf_attn.scale_attn) if hasattr(hf_attn, "scale_attn") else 1.0
