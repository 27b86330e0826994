"""Tiny random models of every decoder family, built offline from configurations.

Every parameter is drawn afresh: biases are never zero and norm gains never one (around zero where
the family stores gain - 1), and the weights are large enough that attention patterns and logits are
far from uniform. A mistake that zeros, ones or a uniform pattern would hide therefore shows as a
wrong number.

This module imports neither the package nor TransformerLens, so that references built on it stay
independent.
"""

import zlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB_SIZE = 97
N_LAYERS = 3
N_HEADS = 4
D_MODEL = 32
D_MLP = 48
N_CTX = 64
WINDOW = 4  # shorter than every prompt used, so that sliding windows really cut

_KNOWN = (
    "<pad> <unk> : foo bar love like eight two one hate nine three happy sad good bad cat dog France Spain "
    "red blue the a and of yes no"
)
WORDS = _KNOWN.split()
"""The words the tokenizer knows, by id; fillers `w29`, `w30`, ... complete the vocabulary."""

PROMPT = "love : bar like : bar eight : foo two : foo one :"
PROMPT_IDS = [WORDS.index(word) for word in PROMPT.split()]

_WEIGHT_STD = 0.3
_BIAS_STD = 0.2
_GAIN_STD = 0.2


def _sizes(*, mlp: str = "intermediate_size") -> dict[str, Any]:
    """The shared sizes under the names most Hugging Face configurations use."""
    return {
        "hidden_size": D_MODEL,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        mlp: D_MLP,
        "max_position_embeddings": N_CTX,
    }


def _rope(**parameters: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **parameters}


_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_GPT2_SIZES = {
    "n_positions": N_CTX,
    "n_ctx": N_CTX,  # in the configurations of the published models, and read by HookedTransformer
    "n_embd": D_MODEL,
    "n_layer": N_LAYERS,
    "n_head": N_HEADS,
    "n_inner": D_MLP,
}
_GROUPED = {"num_key_value_heads": 2}
_BIASED = {"attention_bias": True}
_WIDE_HEADS = {"head_dim": 12}  # 4 x 12 != 32, as in Qwen3 and Gemma
_GEMMA = _sizes() | _GROUPED | _WIDE_HEADS
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_HEAD_SIZE = {"head_dim": 8}  # their default is another than d_model / heads
_MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.5,
    "logits_scaling": 1.5,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_FALCON = _sizes(mlp="ffn_hidden_size")

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", _GPT2_SIZES),
    "gptj": ("gptj", _GPT2_SIZES | {"rotary_dim": 4}),
    "gpt_neo": (
        "gpt_neo",
        _sizes()
        | {"attention_types": [[["global", "local"], 1], [["global"], 1]], "window_size": WINDOW},
    ),
    "neox": ("gpt_neox", _sizes() | {"rope_parameters": _rope(partial_rotary_factor=0.5)}),
    "neox_sequential": (
        "gpt_neox",
        _sizes()
        | {"use_parallel_residual": False, "rope_parameters": _rope(partial_rotary_factor=0.25)},
    ),
    "opt": ("opt", _sizes(mlp="ffn_dim")),
    "opt_post_norm": (
        "opt",
        _sizes(mlp="ffn_dim") | {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    ),
    "llama": ("llama", _sizes()),
    "llama_gqa": ("llama", _sizes() | _GROUPED),
    "llama_bias": ("llama", _sizes() | _GROUPED | _BIASED | {"mlp_bias": True}),
    "llama3": (
        "llama",
        _sizes() | _GROUPED | {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "mistral": ("mistral", _sizes() | _GROUPED | {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", _sizes() | _GROUPED),
    "qwen3": ("qwen3", _sizes() | _GROUPED | _WIDE_HEADS),
    "gemma1": ("gemma", _sizes() | {"num_key_value_heads": 1} | _WIDE_HEADS),
    "gemma2": (
        "gemma2",
        _GEMMA
        | {
            "layer_types": _ALTERNATING,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        _GEMMA
        | {"layer_types": _ALTERNATING, "sliding_window": WINDOW, "query_pre_attn_scalar": 20},
    ),
    "phi": ("phi", _sizes() | {"rope_parameters": _rope(partial_rotary_factor=0.5)}),
    "phi3": ("phi3", _sizes() | _GROUPED),
    "olmo2": ("olmo2", _sizes() | _GROUPED),
    "falcon": ("falcon", _FALCON | {"multi_query": True, "parallel_attn": True, "bias": True}),
    "falcon_new": (
        "falcon",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "falcon_alibi": (
        "falcon",
        _FALCON | {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    ),
    "bloom": ("bloom", {"hidden_size": D_MODEL, "n_layer": N_LAYERS, "n_head": N_HEADS}),
    "granite": (
        "granite",
        _sizes() | _GROUPED | _BIASED | _MULTIPLIERS | {"mlp_bias": True},
    ),
    "cohere": ("cohere", _sizes() | _GROUPED | {"logit_scale": 0.6}),
    "stablelm": (
        "stablelm",
        _sizes()
        | _GROUPED
        | {"use_qkv_bias": True, "rope_parameters": _rope(partial_rotary_factor=0.5)},
    ),
    "starcoder2": ("starcoder2", _sizes() | _GROUPED | {"use_bias": True}),
    "cohere2": (
        "cohere2",
        _sizes()
        | _GROUPED
        | {"logit_scale": 0.9, "layer_types": _ALTERNATING, "sliding_window": WINDOW},
    ),
    "smollm3": ("smollm3", _sizes() | _GROUPED | {"no_rope_layers": [1, 0, 1]}),
    "olmo3": (
        "olmo3",
        _sizes() | _GROUPED | {"layer_types": _ALTERNATING, "sliding_window": WINDOW},
    ),
    "mpt": (
        "mpt",
        {"d_model": D_MODEL, "n_layers": N_LAYERS, "n_heads": N_HEADS, "max_seq_len": N_CTX},
    ),
    "codegen": ("codegen", _GPT2_SIZES | {"rotary_dim": 4}),
    "glm": ("glm", _sizes() | _GROUPED | _HEAD_SIZE | _BIASED),
    "glm4": ("glm4", _sizes() | _GROUPED | _HEAD_SIZE | {"attention_bias": False}),
    "apertus": ("apertus", _sizes() | _GROUPED),
    "seed_oss": (
        "seed_oss",
        _sizes() | _GROUPED | _WIDE_HEADS | _BIASED | {"attention_out_bias": True},
    ),
    "nemotron": ("nemotron", _sizes() | _GROUPED),
    "arcee": ("arcee", _sizes() | _GROUPED | _BIASED | {"mlp_bias": True}),
    "hunyuan": ("hunyuan_v1_dense", _sizes() | _GROUPED | _HEAD_SIZE),
    "qwen2_moe": (
        "qwen2_moe",
        _sizes() | _GROUPED | _EXPERTS | {"shared_expert_intermediate_size": 24},
    ),
    "qwen3_moe": ("qwen3_moe", _sizes() | _GROUPED | _WIDE_HEADS | _EXPERTS),
    "mixtral": ("mixtral", _sizes() | _GROUPED | _LOCAL_EXPERTS | {"sliding_window": WINDOW}),
    "olmoe": ("olmoe", _sizes() | _GROUPED | _EXPERTS),
    "granite_moe": ("granitemoe", _sizes() | _GROUPED | _LOCAL_EXPERTS | _MULTIPLIERS),
    "gpt_oss": (
        "gpt_oss",
        _sizes()
        | _GROUPED
        | _HEAD_SIZE
        | _LOCAL_EXPERTS
        | {"layer_types": _ALTERNATING, "sliding_window": WINDOW},
    ),
    "gemma3n": (
        "gemma3n_text",
        _GEMMA
        | {
            "intermediate_size": [D_MLP] * N_LAYERS,
            "num_kv_shared_layers": 0,
            "layer_types": _ALTERNATING,
            "sliding_window": WINDOW,
            "activation_sparsity_pattern": [0.0] * N_LAYERS,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 8,
        },
    ),
    "gemma4": (
        "gemma4_text",
        _GEMMA
        | {
            "global_head_dim": 16,
            "num_kv_shared_layers": 0,
            "layer_types": [*_ALTERNATING[:2], "full_attention"],
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "lfm2": ("lfm2", _sizes() | _GROUPED | {"layer_types": ["conv", "full_attention", "conv"]}),
    "qwen3_5": ("qwen3_5_text", _sizes() | _GROUPED | _WIDE_HEADS | _LINEAR),
    "deepseek_v3": (
        "deepseek_v3",
        _sizes()
        | _EXPERTS
        | {
            "num_key_value_heads": N_HEADS,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "mamba": ("mamba", {"hidden_size": D_MODEL, "num_hidden_layers": N_LAYERS, "state_size": 4}),
}
"""Name -> (Hugging Face model type, configuration other than vocabulary and special tokens)."""

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""How references compute: attention weights are returned, and mixtures of experts run in
float64.
"""

MIXTURES = {"qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granite_moe", "gpt_oss"}
"""Families whose FFN is a mixture of experts, so that neurons cannot be separated."""

OTHER_LAYOUTS = {"gemma3n", "gemma4", "lfm2", "qwen3_5", "deepseek_v3", "mamba"}
"""Families whose layers are not all attention and FFN, of one size, on one residual stream; no
reference reads them.
"""

KINDS = {
    "learned positions": ("gpt2", "opt", "opt_post_norm"),
    "bias by distance": ("bloom", "falcon_alibi", "mpt"),
    "rotation of neighbors": ("gptj", "codegen", "cohere", "glm", "glm4"),
    "rotation of a part": ("neox", "neox_sequential", "phi", "stablelm", "nemotron"),
    "rotation": ("llama", "llama3", "phi3", "granite"),
    "biases": ("qwen2", "llama_bias", "starcoder2", "arcee", "seed_oss"),
    "few keys": ("llama_gqa", "falcon", "falcon_new", "gemma1"),
    "norms of queries and keys": ("qwen3", "olmo2", "apertus", "hunyuan", "gemma3"),
    "windows": ("mistral", "gpt_neo", "cohere2", "olmo3"),
    "layers without positions": ("smollm3",),
    "soft caps": ("gemma2",),
    "sinks": ("gpt_oss",),
    "mixtures of experts": ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granite_moe"),
    "other layouts": tuple(sorted(OTHER_LAYOUTS)),
}
"""Families by what is special about their attention or, if nothing is, about their other layers;
each has one kind.
"""


def in_turn(number: int, among: Collection[str]) -> list[str]:
    """Return one family of each kind, the next ones for the next number; all of them after five
    numbers.
    """
    families_by_kind = [[family for family in kind if family in among] for kind in KINDS.values()]
    return [kind[number % len(kind)] for kind in families_by_kind if kind]


SLOW = {
    *("apertus", "arcee", "codegen", "cohere2", "deepseek_v3", "gemma3n", "gemma4", "glm", "glm4"),
    *("gpt_oss", "granite_moe", "hunyuan", "lfm2", "mamba", "mixtral", "mpt", "nemotron", "olmo3"),
    *("olmoe", "qwen2_moe", "qwen3_5", "qwen3_moe", "seed_oss", "smollm3"),
}
"""Families whose tests are all slow, since each differs in a detail from a family that is not here;
their place in `CONFIGS` does not matter.
"""


def randomize(model: PreTrainedModel, *, seed: int) -> None:
    """Draw every parameter of `model` afresh, in place; the same seed gives the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied weights
                continue
            seen.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator)
            if name == "bias":
                values = _BIAS_STD * noise
            elif "norm" in type(module).__name__.lower():  # Gemma's norms multiply by 1 + weight
                values = _GAIN_STD * noise + (
                    0.0 if type(module).__name__.startswith("Gemma") else 1.0
                )
            else:
                values = _WEIGHT_STD * noise
            with torch.no_grad():
                parameter.copy_(values)


def build(name: str, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The tiny model of family `name`: eager attention, evaluation mode, always the same
    weights.
    """
    model_type, options = CONFIGS[name]
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(model_type, vocab_size=VOCAB_SIZE, **special, **options)
    with torch.random.fork_rng(devices=[]):  # the library's own initialization, overwritten below
        model = AutoModelForCausalLM.from_config(config, **EAGER)
    randomize(model, seed=zlib.crc32(name.encode()))
    return (model if dtype is None else model.to(dtype)).eval()


def tokenizer(known: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer over `known` words and fillers; it splits at blanks and adds no
    special token.
    """
    words = [*known, *(f"w{i}" for i in range(len(known), VOCAB_SIZE))]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", pad_token="<pad>")


def save(name: str, folder: str | Path) -> PreTrainedModel:
    """Write family `name` to `folder` as `save_pretrained` does, with `tokenizer()`.

    Returns the float32 model that was written. Load "qwen2" with `tokenizer()` given explicitly:
    AutoTokenizer takes every Qwen2 folder for byte-level BPE and would read the words as bytes.
    """
    model = build(name)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model
