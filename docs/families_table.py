"""Write the table of docs/families.md from the tables that the tests use: `python docs/families_table.py`.

`tests/sweep/` and `tests/models/test_hooked_transformer.py` check each row, `tests/sweep/test_other_families.py`
each type in the list below it; a test fails if the page and these tables differ.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
TYPES_BEGIN, TYPES_END = "<!-- types: begin -->", "<!-- types: end -->"

NAMES = {
    "gpt2": "GPT-2",
    "gptj": "GPT-J (parallel block, biased unembedding)",
    "gpt_neo": "GPT-Neo (local attention)",
    "neox": "GPT-NeoX, Pythia (parallel block, partial rotary)",
    "neox_sequential": "GPT-NeoX with sequential blocks",
    "opt": "OPT",
    "opt_post_norm": "OPT 350m (norms after the sublayers)",
    "llama": "Llama 1, 2",
    "llama_gqa": "Llama 2 70B (grouped queries)",
    "llama_bias": "Llama with biases",
    "llama3": "Llama 3 (scaled rotary, tied unembedding)",
    "mistral": "Mistral (sliding window)",
    "qwen2": "Qwen 2 (biased queries, keys, values)",
    "qwen3": "Qwen 3 (normed queries and keys)",
    "gemma1": "Gemma 1 (one key-value head)",
    "gemma2": "Gemma 2 (post-norms, soft-caps)",
    "gemma3": "Gemma 3 (post-norms, normed queries and keys)",
    "phi": "Phi 1, 2 (parallel block, biased unembedding)",
    "phi3": "Phi 3",
    "olmo2": "OLMo 2 (norms after the sublayers only)",
    "falcon": "Falcon 7B (parallel block, one key-value head)",
    "falcon_new": "Falcon 40B (new decoder architecture)",
    "falcon_alibi": "Falcon RW (ALiBi)",
    "bloom": "BLOOM (ALiBi)",
    "granite": "Granite (multipliers)",
    "cohere": "Cohere Command (scaled logits)",
    "stablelm": "StableLM",
    "starcoder2": "StarCoder 2",
    "cohere2": "Cohere 2, Command A (rotation in some layers)",
    "smollm3": "SmolLM 3 (rotation in some layers)",
    "olmo3": "OLMo 3 (norms after the sublayers only, sliding windows)",
    "mpt": "MPT (ALiBi)",
    "codegen": "CodeGen (parallel block)",
    "glm": "GLM 4 9B (`glm`: partial rotary)",
    "glm4": "GLM 4 0414 (`glm4`: norms before and after the sublayers)",
    "apertus": "Apertus (normed queries and keys)",
    "seed_oss": "Seed-OSS",
    "nemotron": "Nemotron",
    "arcee": "Arcee",
    "hunyuan": "HunYuan dense (queries and keys normed after rotation)",
    "qwen2_moe": "Qwen 2 MoE (mixture of experts)",
    "qwen3_moe": "Qwen 3 MoE (mixture of experts)",
    "mixtral": "Mixtral (mixture of experts)",
    "olmoe": "OLMoE (mixture of experts)",
    "granite_moe": "Granite MoE (mixture of experts, multipliers)",
    "gpt_oss": "gpt-oss (mixture of experts, attention sinks)",
    "gemma3n": "Gemma 3n",
    "gemma4": "Gemma 4",
    "lfm2": "LFM2",
    "qwen3_5": "Qwen 3.5",
    "deepseek_v3": "DeepSeek V2, V3",
    "mamba": "Mamba",
}


def table() -> str:
    """Return the table as Markdown."""
    from family_tables import NOT_HOOKED, refused  # pyright: ignore[reportMissingImports]

    columns = [refused((4, 0)), refused((3, 9)), {name: ("", why) for name, why in NOT_HOOKED.items()}]
    lines = [
        "| family | TransformerBridge, TransformerLens 4.x | TransformerBridge, TransformerLens 3.9 "
        "| HookedTransformer, TransformerLens 3.9 |",
        "|---|---|---|---|",
    ]
    for family, name in NAMES.items():
        bridge = [f"refused: {column[family][1]}" if family in column else "exact" for column in columns[:2]]
        hooked = f"no: {columns[2][family][1]}" if family in columns[2] else "exact"
        lines.append(f"| {name} | {bridge[0]} | {bridge[1]} | {hooked} |")
    return "\n".join(lines)


def types() -> str:
    """Return the other model types that agree with Hugging Face, in one line."""
    from family_tables import OTHER_TYPES  # pyright: ignore[reportMissingImports]

    return ", ".join(f"`{model_type}`" for model_type in sorted(OTHER_TYPES)) + "."


def page(text: str) -> str:
    """Return the page with its table and its list replaced; raise ValueError if a marker is missing."""
    for begin, end, content in ((BEGIN, END, table()), (TYPES_BEGIN, TYPES_END, types())):
        before, _, rest = text.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise ValueError(f"{PAGE.name} has no {begin} … {end}; add the two markers where the content belongs")
        text = f"{before}{begin}\n\n{content}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    sys.path.append(str(ROOT / "tests" / "support"))
    PAGE.write_text(page(PAGE.read_text()))
