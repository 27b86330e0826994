"""Tiny random models of every model type that transformers can load as a causal language model.

`small_config` reduces the default configuration of a type by the names of its sizes, so it needs no
list of families: a type that a new version of transformers adds is tried too. Types whose
configuration cannot be reduced in this way raise `NotTried` with the reason.
"""

from typing import Any

import families
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MAX_PARAMETERS = 5_000_000

_SIZES = {
    32: "hidden_size d_model n_embd emb_dim attention_hidden_size embedding_size embedding_dim dim lru_width",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
    "num_decoder_layers num_blocks depth "
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads attention_heads swa_num_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts "
    "qk_rope_head_dim rotary_dim linear_num_value_heads linear_num_heads sliding_window window_size "
    "sliding_window_size",
    2: "num_key_value_heads swa_num_key_value_heads num_query_groups num_experts_per_tok num_experts_per_token "
    "moe_topk moe_k n_group num_expert_group linear_num_key_heads type_vocab_size",
    1: "topk_group n_shared_experts num_shared_experts first_k_dense_replace moe_num_shared_experts",
    48: "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dff dim_ff ffn_hidden_size "
    "intermediate_size_mlp dense_intermediate_size shared_intermediate_size",
    24: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    families.N_CTX: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length",
    8: "head_dim swa_head_dim dim_head qk_nope_head_dim v_head_dim d_head kv_channels attention_head_dim "
    "attention_head_size linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_headdim "
    "index_head_dim hidden_size_per_layer_input laurel_rank mamba_n_heads mamba_num_heads n_mamba_heads mamba_head_dim "
    "time_step_rank mamba_dt_rank ple_embed_dim",
    16: "q_lora_rank kv_lora_rank o_lora_rank mamba_d_ssm",
    families.VOCAB_SIZE: "vocab_size vocab_size_per_layer_input decoder_vocab_size pronunciation_vocab_size "
    "shape_vocab_size unpadded_vocab_size",
}
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}

_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_HYBRID = {"mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}
_GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_GEMMA4 = {
    "num_kv_shared_layers": 0,
    "layer_types": _GEMMA_LAYERS,
    "head_dim": 8,
    "global_head_dim": 16,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": _HYBRID | {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": _HYBRID | {"layer_types": ["mamba", "attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": _GEMMA_LAYERS,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "gemma4_text": _GEMMA4 | {"hidden_size_per_layer_input": 8},
    "gemma4_unified_text": _GEMMA4,
    "falcon_h1": {"mamba_d_ssm": 64},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
    },
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4},
    "zaya": {"num_experts_per_tok": 1},
}
"""What types need beyond small sizes."""


class NotTried(Exception):
    """Raised for a model type whose tiny model cannot be built; the message is the reason."""


def small_config(kind: str, ids: dict[str, int | None]) -> PreTrainedConfig:
    """Return a tiny configuration of a model type with these special tokens; its parts are small
    too.
    """
    return AutoConfig.for_model(
        kind, **_small(AutoConfig.for_model(kind), ids) | OPTIONS.get(kind, {})
    )


def _small(config: PreTrainedConfig, ids: dict[str, int | None]) -> dict[str, Any]:
    values = config.to_dict()
    small = {
        name: SIZES[name]
        for name in values
        if name in SIZES and isinstance(values[name], int | None)
    }
    if "kv_lora_rank" in values:  # latent attention has as many keys as queries
        small |= {name: 4 for name in ("num_key_value_heads", "head_dim") if name in values}
    for name, value in values.items():
        part = getattr(config, name, None) if isinstance(value, dict) else None
        if isinstance(part, PreTrainedConfig) and (sizes := _small(part, ids)).keys() - _IDS.keys():
            small[name] = sizes
    return small | {name: value for name, value in ids.items() if name in values}


def build(kind: str) -> PreTrainedModel:
    """Return a tiny random model of a type, with eager attention, in evaluation mode; raise
    NotTried if impossible.
    """
    try:
        return _build(small_config(kind, dict.fromkeys(_IDS)))
    except NotTried:
        raise
    except (
        Exception
    ):  # types that need special tokens, for instance to number positions, fail in different ways
        try:
            return _build(small_config(kind, _IDS))
        except Exception as error:
            raise NotTried(
                f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            ) from error


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, **families.EAGER)
    n_parameters = sum(parameter.numel() for parameter in empty.parameters())
    if n_parameters > MAX_PARAMETERS:
        raise NotTried(f"{n_parameters:,} parameters with small sizes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # some types keep what their library draws, in buffers
        model = AutoModelForCausalLM.from_config(config, **families.EAGER).eval()
    families.randomize(model, seed=1)
    log_probs(model)
    return model


def log_probs(model: PreTrainedModel) -> torch.Tensor:
    """Return Hugging Face's log-probabilities [vocab] after `families.PROMPT`."""
    with torch.no_grad():
        logits = model(torch.tensor([families.PROMPT_IDS]), use_cache=False).logits[0, -1]
    return torch.log_softmax(logits.float(), dim=-1)
