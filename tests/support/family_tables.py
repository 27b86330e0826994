"""Which tiny families are exact, and why the others are refused: tests check this, and docs/families.md shows it."""

import families

from icl_lens.models.view import tl_version


def refused(version: tuple[int, int]) -> dict[str, tuple[str, str]]:
    """Return {family: (words of the error, the reason in one clause)} for a TransformerLens version."""
    reasons = {
        "opt_post_norm": ("got OPTForCausalLM without", "no final norm before the unembedding"),
        "falcon_new": ("could not load", "TransformerLens cannot load it"),
    }
    if version < (4, 0):
        reasons["cohere"] = (
            "CohereForCausalLM is not supported with TransformerLens 3",
            "TransformerLens 3 computes other logits than the model",
        )
    return reasons


REFUSED = refused(tl_version())
EXACT = sorted(set(families.CONFIGS) - set(REFUSED))
SOFT_CAPPED = {"gemma2"}

# Families that HookedTransformer does not support: TransformerLens' converters refuse them or change the model.
_NO_CONVERTER = ("falcon", "falcon_new", "falcon_alibi", "granite", "cohere", "stablelm", "starcoder2", "opt_post_norm")
NOT_HOOKED = {
    **dict.fromkeys(_NO_CONVERTER, "TransformerLens has no converter for it"),
    "llama_bias": "TransformerLens sets the biases to zero, which makes it another model",
    "olmo2": "TransformerLens cannot convert grouped queries (exact for models without them)",
}
HOOKED_EXACT = sorted(set(families.CONFIGS) - set(NOT_HOOKED))
