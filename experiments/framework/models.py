"""The pretrained models that the documentation shows."""

SMOLLM2 = "smollm2-135m"
QWEN = "qwen2.5-coder-0.5b"
REAL_MODELS = {
    SMOLLM2: SMOLLM2,
    QWEN: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
}
"""Name in tables -> what `load_model` loads."""
