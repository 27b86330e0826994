"""Tiny GGUF files of several architectures, written the way llama.cpp's converter writes them.

A tiny random Hugging Face model goes in, its weights come out under GGUF names and in GGUF's layout: Llama's queries
and keys permuted, GPT-2's projections transposed, one added to Gemma's norm gains. `restored` reads a file back into a
Hugging Face model with the gguf package alone. Nothing here uses transformers' GGUF code or the package's.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import families
import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

N_LAYERS, N_HEADS, N_KV, D_MODEL, D_MLP, N_CTX = 3, 4, 2, 64, 96, 128
TEXT = (
    "love : bar like : bar eight : foo two : foo one :",
    "happy : bar sad : bar three : foo nine :",
    "cat : foo the red : bar a blue :",
)
UNUSUAL = "Ünïcode, 2 emoji 🙂 and  two spaces"


@dataclass(frozen=True)
class Architecture:
    """How one architecture is built and stored; `own` are settings that only it has, as GGUF keys and values."""

    model_type: str
    arch: str
    vocabulary: str
    options: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    eps: str = "rms_norm_eps"


_SIZES = {
    "hidden_size": D_MODEL,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_KV,
    "intermediate_size": D_MLP,
    "max_position_embeddings": N_CTX,
    "rms_norm_eps": 1e-3,  # far from the default, so that a loader that ignores it is found out
}


def _rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


_GEMMA = _SIZES | {"head_dim": 256}  # llama.cpp stores no attention scale: it is one over the root of the width
_GEMMA_OWN = {"attention.key_length": 256, "attention.value_length": 256, "attention.sliding_window": 4}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

ARCHITECTURES = {
    "llama": Architecture("llama", "llama", "bytes", _SIZES | _rope(500.0), {"rope.dimension_count": 16}),
    "llama_pieces": Architecture("llama", "llama", "pieces", _SIZES | _rope(500.0), {"rope.dimension_count": 16}),
    "llama3": Architecture(
        "llama",
        "llama",
        "bytes",
        _SIZES | _rope(500.0, **_LLAMA3, rope_type="llama3") | {"tie_word_embeddings": True},
        {"rope.dimension_count": 16},
    ),
    "qwen2": Architecture("qwen2", "qwen2", "bytes", _SIZES | _rope(500.0)),
    "qwen3": Architecture(
        "qwen3",
        "qwen3",
        "bytes",
        _SIZES | _rope(500.0) | {"head_dim": 32},
        {"attention.key_length": 32, "attention.value_length": 32},
    ),
    "gemma2": Architecture(
        "gemma2",
        "gemma2",
        "pieces",
        _GEMMA | {"sliding_window": 4, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        _GEMMA_OWN | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "gemma3",
        "pieces",
        _GEMMA
        | {"num_hidden_layers": 7, "sliding_window": 4}  # the sixth layer is the first without a window
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
        _GEMMA_OWN,
    ),
    "gemma3_scaled": Architecture(
        "gemma3_text",
        "gemma3",
        "pieces",
        _GEMMA
        | {"num_hidden_layers": 7, "sliding_window": 4}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
        _GEMMA_OWN | {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "gpt2": Architecture(
        "gpt2",
        "gpt2",
        "bytes",
        {
            "n_positions": 1024,
            "n_ctx": 1024,
            "n_embd": D_MODEL,
            "n_layer": N_LAYERS,
            "n_head": N_HEADS,
            "layer_norm_epsilon": 1e-3,
        },
        eps="layer_norm_epsilon",
    ),
    "phi3": Architecture(
        "phi3", "phi3", "pieces", _SIZES | _rope(500.0) | {"sliding_window": 4}, {"attention.sliding_window": 4}
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "starcoder2",
        "bytes",
        {k: v for k, v in _SIZES.items() if k != "rms_norm_eps"} | _rope(500.0) | {"use_bias": True},
        eps="norm_epsilon",
    ),
}


@cache
def tokenizer(vocabulary: str) -> PreTrainedTokenizerFast:
    """A small tokenizer in which the words of `TEXT` are single tokens: of bytes (GPT-2) or of pieces (Llama)."""
    if vocabulary == "bytes":
        fast = Tokenizer(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        special = ["<|endoftext|>"]
        names = {"eos_token": special[0], "bos_token": special[0]}
    else:
        fast = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        fast.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = sorted({*"".join(TEXT).replace(" ", "▁")})
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet) + 90,
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    fast.train_from_iterator([f" {text}" for text in TEXT for _ in range(3)], trainer)
    if vocabulary == "pieces":
        fast.pre_tokenizer = None
    return PreTrainedTokenizerFast(tokenizer_object=fast, **names)


def build(name: str) -> PreTrainedModel:
    """The tiny random model of an architecture in float32: always the same weights, eager attention."""
    one = ARCHITECTURES[name]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(one.model_type, vocab_size=len(tokenizer(one.vocabulary)), **special, **one.options)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    families.randomise(model, seed=zlib.crc32(name.encode()))
    return model.float().eval()


def write(
    name: str,
    path: Path,
    quantization: str = "F32",
    *,
    model: PreTrainedModel | None = None,
    with_tokenizer: bool = True,
    architecture: str = "",
    settings: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
) -> PreTrainedModel:
    """Write a tiny GGUF file with matrices in `quantization`; return the model whose weights it holds.

    `architecture` replaces general.architecture, `settings` are added to the architecture's own, and `change` may edit
    the tensors before they are stored.
    """
    one = ARCHITECTURES[name]
    model = build(name) if model is None else model
    writer = gguf.GGUFWriter(path, architecture or one.arch)
    _write_settings(writer, one, model, settings or {})
    if with_tokenizer:
        _write_tokenizer(writer, one.vocabulary)
    kind = gguf.GGMLQuantizationType[quantization]
    tensors = {gguf_name: _stored(name, gguf_name, weight) for gguf_name, weight in _named(name, model)}
    if name == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(model.config)
    change(tensors)
    for gguf_name, weight in tensors.items():
        matrix = weight.ndim == 2 and gguf_name != "position_embd.weight"
        if quantization == "F32" or not matrix:
            writer.add_tensor(gguf_name, weight)
        else:
            writer.add_tensor(gguf_name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def restored(name: str, path: Path) -> PreTrainedModel:
    """The tiny model with the weights that a file holds, dequantized by the gguf package."""
    model = build(name)
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for gguf_name, weight in _named(name, model):
            weight.copy_(torch.tensor(_original(name, gguf_name, stored[gguf_name])))
    return model


def edited(path: Path, offset: int, replacement: bytes) -> Path:
    """Overwrite some bytes of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(replacement)
    return path


def _named(name: str, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == ARCHITECTURES[name].arch)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for hf_name, parameter in model.named_parameters():  # tied weights once, as in a file
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        yield gguf_name, parameter.detach()


_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def _heads(gguf_name: str) -> int:
    return N_HEADS if ".attn_q." in gguf_name else N_KV


def _stored(name: str, gguf_name: str, weight: torch.Tensor) -> np.ndarray:
    """A weight as llama.cpp's converter stores it."""
    value = weight.float().numpy()
    arch = ARCHITECTURES[name].arch
    if arch == "llama" and (".attn_q." in gguf_name or ".attn_k." in gguf_name):
        halves = value.reshape(_heads(gguf_name), 2, -1, *value.shape[1:])
        value = halves.swapaxes(1, 2).reshape(value.shape)
    if arch in ("gemma2", "gemma3") and gguf_name.endswith("norm.weight"):
        value = value + 1
    if arch == "gpt2" and gguf_name.endswith(_TRANSPOSED):
        value = value.T
    return np.ascontiguousarray(value)


def _original(name: str, gguf_name: str, value: np.ndarray) -> np.ndarray:
    """The inverse of `_stored`."""
    arch = ARCHITECTURES[name].arch
    if arch == "llama" and (".attn_q." in gguf_name or ".attn_k." in gguf_name):
        pairs = value.reshape(_heads(gguf_name), -1, 2, *value.shape[1:])
        value = pairs.swapaxes(1, 2).reshape(value.shape)
    if arch in ("gemma2", "gemma3") and gguf_name.endswith("norm.weight"):
        value = value - 1
    if arch == "gpt2" and gguf_name.endswith(_TRANSPOSED):
        value = value.T
    return np.ascontiguousarray(value)


def _llama3_factors(config: Any) -> np.ndarray:
    """By how much each frequency is divided, which llama.cpp stores instead of Llama 3's four settings."""
    rope = config.rope_parameters
    d_head = config.hidden_size // config.num_attention_heads
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, d_head, 2) / d_head)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    return (1 / (np.clip(1 - smooth, 0, 1) / factor + np.clip(smooth, 0, 1))).astype(np.float32)


def _write_settings(writer: gguf.GGUFWriter, one: Architecture, model: Any, settings: Mapping[str, Any]) -> None:
    config = model.config
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if one.arch != "gpt2":
        writer.add_head_count_kv(config.num_key_value_heads)
        rope = config.rope_parameters
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    eps = getattr(config, one.eps)
    (writer.add_layer_norm_rms_eps if one.eps == "rms_norm_eps" else writer.add_layer_norm_eps)(eps)
    for key, value in {**one.own, **settings}.items():
        key = key if key.startswith(("split.", "general.")) else f"{one.arch}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)


def _write_tokenizer(writer: gguf.GGUFWriter, vocabulary: str) -> None:
    fast = tokenizer(vocabulary)
    tokens = [token for token, _ in sorted(fast.get_vocab().items(), key=lambda entry: entry[1])]
    special = set(fast.all_special_tokens)
    kinds = [
        gguf.TokenType.BYTE
        if token.startswith("<0x")
        else gguf.TokenType.CONTROL
        if token in special
        else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2" if vocabulary == "bytes" else "llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if vocabulary == "bytes":
        merges = json.loads(fast.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
        writer.add_add_bos_token(False)
    else:
        writer.add_token_scores([float(-index) for index in range(len(tokens))])
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
    writer.add_bos_token_id(fast.bos_token_id)
    writer.add_eos_token_id(fast.eos_token_id)
