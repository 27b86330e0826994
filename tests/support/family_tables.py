"""Which tiny families are exact, and why the others are refused: tests check this, and
docs/families.md shows it.
"""

import families

from icl_lens.models.loading.supported import tl_version


def refused(version: tuple[int, int]) -> dict[str, tuple[str, str]]:
    """Return {family: (words of the error, the reason in one clause)} for a TransformerLens
    version.
    """
    reasons = {
        "opt_post_norm": (
            "OPTForCausalLM is not supported: it has no ln_final",
            "no final norm before the unembedding",
        ),
        "falcon_new": ("could not load", "TransformerLens cannot load it"),
        "lfm2": ("layers without attention \\(layers 0, 2\\)", "layers without attention"),
        "qwen3_5": ("layers without attention \\(layers 0, 2\\)", "layers without attention"),
        "mamba": ("it has no attention", "no attention"),
        "deepseek_v3": (
            "latent attention",
            "latent attention has no key and value matrices per head",
        ),
        "gemma3n": ("could not load", "TransformerLens cannot load the text model"),
        "gemma4": (
            "W_Q in layer 0 does not have the size 4×32×16",
            "heads and FFNs of other sizes in some layers",
        ),
    }
    if version < (4, 0):
        for family, model_class in [
            ("cohere", "Cohere"),
            ("cohere2", "Cohere2"),
            ("hunyuan", "HunYuanDenseV1"),
        ]:
            reasons[family] = (
                f"{model_class}ForCausalLM is not supported with TransformerLens 3",
                "TransformerLens 3 computes other logits than the model",
            )
    return reasons


REFUSED = refused(tl_version())
EXACT = sorted(set(families.CONFIGS) - set(REFUSED))
PROCESSED_EXACT = sorted(set(EXACT) - {"gpt_oss"})
"""Families whose processed weights are the same model. TransformerLens folds value biases into b_O as if attention
summed to one, which it does not in gpt-oss."""
SOFT_CAPPED = {"gemma2"}

_NO_CONVERTER = (
    *("falcon", "falcon_new", "falcon_alibi", "granite", "cohere", "stablelm", "starcoder2"),
    *("opt_post_norm", "arcee", "codegen", "cohere2", "deepseek_v3", "gemma3n", "gemma4", "glm"),
    *("glm4", "gpt_oss", "granite_moe", "hunyuan", "lfm2", "mamba", "mpt", "nemotron", "olmo3"),
    *("qwen2_moe", "qwen3_5", "qwen3_moe", "seed_oss", "smollm3"),
)
NOT_HOOKED = {
    **dict.fromkeys(_NO_CONVERTER, "TransformerLens has no converter for it"),
    "llama_bias": "TransformerLens sets the biases to zero, which makes it another model",
    **dict.fromkeys(
        ("olmo3", "gpt_oss"),
        "TransformerLens' weight processing makes it another model (exact with raw weights)",
    ),
    "olmo2": "TransformerLens cannot convert grouped queries (exact for models without them)",
}
"""Families that HookedTransformer does not support, and why: TransformerLens' converters refuse them
or change the model.
"""
HOOKED_EXACT = sorted(set(families.CONFIGS) - set(NOT_HOOKED))

OTHER_TYPES = {
    *(
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "flex_olmo",
        "glm4_moe",
        "gpt-sw3",
        "gpt_bigcode",
        "internlm3",
    ),
    *(
        "iquestcoder",
        "jais2",
        "llama4",
        "llama4_text",
        "minimax_m2",
        "ministral3",
        "nanochat",
        "olmo",
    ),
    "vaultgemma",
}
"""Model types that no family above has, and that agree with Hugging Face on one prompt
(TransformerLens 4.x).
"""


def listed_types() -> set[str]:
    """Return the model types of all families that have a row, refused ones included."""
    return {model_type for model_type, _ in families.CONFIGS.values()}


_RECOMPUTING = (
    *(
        "Block",
        "Reweight",
        "RemovePosition",
        "patch_heads",
        "Patch",
        "edited",
        "score",
        "debias_edits",
    ),
    "two_towers",
    "locate.exchange",
)
PARTLY_REFUSED: dict[str, dict[str, str]] = {
    **{name: {"hunyuan": "recomputed attention differs"} for name in _RECOMPUTING},
    "value_parts": dict.fromkeys(SOFT_CAPPED, "affine"),
    "neuron_log_prob_increase": dict.fromkeys(families.MIXTURES, "none that can be separated"),
}
"""Functions that families which are otherwise exact do not have, with words of the error; see
docs/families.md.
"""

NOT_HALF = {"codegen"}
"""Families whose own passes with a KV cache fail in half precision in TransformerLens; see
docs/families.md.
"""
