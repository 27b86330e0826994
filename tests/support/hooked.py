"""HookedTransformers of the tiny families, built from Hugging Face models as TransformerLens 3.9
converts them.

`HookedTransformer.from_pretrained` accepts official names only; `hooked` calls the same converters
on a tiny model. Import only where `transformer_lens.HookedTransformer` exists (TransformerLens 3).
"""

from pathlib import Path
from typing import Any

from transformer_lens import HookedTransformer
from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig
from transformer_lens.loading_from_pretrained import (
    get_pretrained_model_config,
    get_pretrained_state_dict,
)
from transformers import PreTrainedModel, PreTrainedTokenizerFast

BY_OFFICIAL_NAME = {"gemma", "gemma2", "gemma3_text", "olmo2", "phi"}
"""Model types whose configuration TransformerLens looks up by official names, or misreads on
transformers 5.
"""
ASSUMES_D_MLP = {"gpt2", "gptj", "gpt_neo"}
"""Model types for which TransformerLens takes 4 d_model for the FFN's width, whatever the
configuration says.
"""


def _config(hf: PreTrainedModel) -> dict[str, Any]:
    """What TransformerLens' tables hold for the published models of these families, at the tiny
    model's sizes.
    """
    c = hf.config
    rope = c.rope_parameters
    plain_rope = rope.get("full_attention", rope)
    config: dict[str, Any] = {
        "act_fn": getattr(c, "hidden_activation", None) or c.hidden_act,
        "d_head": getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        "d_mlp": c.intermediate_size,
        "d_model": c.hidden_size,
        "d_vocab": c.vocab_size,
        "device": "cpu",
        "eps": c.layer_norm_eps if c.model_type == "phi" else c.rms_norm_eps,
        "model_name": "tiny",
        "n_ctx": c.max_position_embeddings,
        "n_heads": c.num_attention_heads,
        "n_layers": c.num_hidden_layers,
        "normalization_type": "LN" if c.model_type == "phi" else "RMS",
        "original_architecture": type(hf).__name__,
        "positional_embedding_type": "rotary",
        "rotary_base": plain_rope["rope_theta"],
        "use_attn_scale": True,
    }
    if c.model_type == "phi":
        rotary_dim = round(rope["partial_rotary_factor"] * config["d_head"])
        return config | {"parallel_attn_mlp": True, "rotary_dim": rotary_dim}
    config |= {"final_rms": True, "gated_mlp": True, "n_key_value_heads": c.num_key_value_heads}
    if c.model_type == "olmo2":
        if c.num_key_value_heads == c.num_attention_heads:
            config["n_key_value_heads"] = None
        return config
    config["rotary_dim"] = config["d_head"]
    if c.model_type == "gemma":
        return config
    config |= {
        "attn_scale": c.query_pre_attn_scalar**0.5,
        "attn_types": [
            "local" if kind == "sliding_attention" else "global" for kind in c.layer_types
        ],
        "use_local_attn": True,
        "use_normalization_before_and_after": True,
        "window_size": c.sliding_window,
    }
    if c.model_type == "gemma2":
        caps = {
            "attn_scores_soft_cap": c.attn_logit_softcapping,
            "output_logits_soft_cap": c.final_logit_softcapping,
        }
        return config | caps
    return config | {
        "rotary_base_local": rope["sliding_attention"]["rope_theta"],
        "use_qk_norm": True,
    }


def hooked(
    hf: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast, *, processed: bool
) -> HookedTransformer:
    """`from_pretrained_no_processing`, or with `processed` `from_pretrained`, of a model saved in
    `folder`.

    The folder's path may contain neither "llama" nor "gemma", which TransformerLens takes for
    official names. `tokenizer` must be a fresh one.
    """
    kind = hf.config.model_type
    fold_norms = processed and kind != "olmo2"  # OLMo 2's norms come after the matrices
    if kind in BY_OFFICIAL_NAME:
        config = _config(hf)
        if fold_norms:
            config["normalization_type"] += "Pre"
        cfg = HookedTransformerConfig.from_dict(config)
    else:
        cfg = get_pretrained_model_config(
            str(folder), hf_cfg=hf.config.to_dict(), fold_ln=processed, device="cpu"
        )
        if kind in ASSUMES_D_MLP:
            cfg.d_mlp = getattr(hf.config, "n_inner", None) or hf.config.intermediate_size
    model = HookedTransformer(cfg, tokenizer, move_to_device=False)
    model.load_and_process_state_dict(
        get_pretrained_state_dict(str(folder), cfg, hf),
        fold_ln=fold_norms,
        center_writing_weights=processed and not str(cfg.normalization_type).startswith("RMS"),
        center_unembed=processed and cfg.output_logits_soft_cap <= 0,
        fold_value_biases=processed,
        refactor_factored_attn_matrices=False,
    )
    return model.eval()
