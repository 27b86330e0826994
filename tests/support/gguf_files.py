"""Tiny GGUF files of several architectures, written the way llama.cpp's converter writes them.

A tiny random Hugging Face model's weights are stored under GGUF names and in GGUF's layout: Llama's
queries and keys permuted, GPT-2's projections transposed, one added to Gemma's norm gains.
`restored` reads a file back into a Hugging Face model with the gguf package alone. This module uses
neither transformers' GGUF code nor the package's.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import families
import gguf
import numpy as np
import small_tokenizers
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

N_HEADS, N_KV = 4, 2
TEXT = (
    "love : bar like : bar eight : foo two : foo one :",
    "happy : bar sad : bar three : foo nine :",
    "cat : foo the red : bar a blue :",
)
UNUSUAL = "Ünïcode, 2 emoji 🙂 and  two spaces"

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_KV,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,  # far from the default, so that a loader that ignores it is found out
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
_GPT2 = {
    "n_positions": 1024,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": N_HEADS,
    "layer_norm_epsilon": 1e-3,
}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
# Files hold no attention scale: loaders take 1/√head_dim, which is Gemma's default scale if
# head_dim is 256
_GEMMA = _SIZES | {"head_dim": 256, "sliding_window": 4}
_LLAMA3 = families._LLAMA3_ROPE | {"rope_theta": 500.0}


def _gemma3(**rope: Any) -> dict[str, Any]:
    """Return a configuration whose sixth layer is the first without a window, and has rotary angles
    of its own.
    """
    ropes = {"full_attention": {"rope_theta": 500.0, **rope}, "sliding_attention": families._rope()}
    return _GEMMA | {"num_hidden_layers": 7, "rope_parameters": ropes}


ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "bytes", _SIZES),
    "llama_pieces": ("llama", "pieces", _SIZES),
    "llama3": (
        "llama",
        "bytes",
        _SIZES | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True},
    ),
    "qwen2": ("qwen2", "bytes", _SIZES),
    "qwen3": ("qwen3", "bytes", _SIZES | {"head_dim": 32}),
    "gemma2": ("gemma2", "pieces", _GEMMA | _CAPS),
    "gemma3": ("gemma3_text", "pieces", _gemma3(rope_type="default")),
    "gemma3_scaled": ("gemma3_text", "pieces", _gemma3(rope_type="linear", factor=8.0)),
    "gpt2": ("gpt2", "bytes", _GPT2),
    "phi3": ("phi3", "pieces", _SIZES | {"sliding_window": 4}),
    "starcoder2": ("starcoder2", "bytes", _SIZES | {"use_bias": True}),
}
"""Name -> (Hugging Face model type, vocabulary, configuration other than vocabulary and special
tokens).
"""


def arch_of(name: str) -> str:
    return ARCHITECTURES[name][0].removesuffix("_text")


@cache
def tokenizer(vocabulary: str) -> PreTrainedTokenizerFast:
    """Return a small tokenizer of "bytes" (as GPT-2's) or "pieces" (as Llama's); words of `TEXT`
    are single tokens.
    """
    if vocabulary == "bytes":
        return small_tokenizers.tokenizer_of("byte", " ".join(TEXT))
    fast = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    fast.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    alphabet = sorted({*"".join(TEXT).replace(" ", "▁")})
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + len(alphabet) + 90,
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    fast.train_from_iterator([f" {text}" for text in TEXT for _ in range(3)], trainer)
    fast.pre_tokenizer = None
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def build(name: str) -> PreTrainedModel:
    """The tiny random model of an architecture in float32: always the same weights, eager
    attention.
    """
    model_type, vocabulary, options = ARCHITECTURES[name]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(
        model_type, vocab_size=len(tokenizer(vocabulary)), **special, **options
    )
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    families.randomize(model, seed=zlib.crc32(name.encode()))
    return model.float().eval()


def write(
    name: str,
    path: Path,
    quantization: str = "F32",
    *,
    model: PreTrainedModel | None = None,
    with_tokenizer: bool = True,
    own_tokenizer: PreTrainedTokenizerFast | None = None,
    pre: str | None = "gpt-2",
    add_space_prefix: bool | None = None,
    architecture: str = "",
    settings: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
) -> PreTrainedModel:
    """Write a tiny GGUF file with matrices in `quantization`; return the model that was written.

    `own_tokenizer` replaces that of the architecture; `pre` and `add_space_prefix` are settings of
    the tokenizer. `architecture` replaces general.architecture, `settings` are added to the
    architecture's own, and `change` may edit the tensors before they are stored.
    """
    model = build(name) if model is None else model
    writer = gguf.GGUFWriter(path, architecture or arch_of(name))
    _write_settings(writer, name, model.config, settings or {})
    if with_tokenizer:
        vocabulary = ARCHITECTURES[name][1]
        fast = tokenizer(vocabulary) if own_tokenizer is None else own_tokenizer
        _write_tokenizer(writer, vocabulary, fast, pre, add_space_prefix)
    kind = gguf.GGMLQuantizationType[quantization]
    tensors = {
        gguf_name: _converted(name, gguf_name, weight.numpy())
        for gguf_name, weight in _named(name, model)
    }
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
    stored = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    with torch.no_grad():
        for gguf_name, weight in _named(name, model):
            weight.copy_(torch.tensor(_converted(name, gguf_name, stored[gguf_name], back=True)))
    return model


def _named(name: str, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch_of(name))
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for hf_name, parameter in model.named_parameters():  # tied weights once, as in a file
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        yield gguf_name, parameter.detach().float()


_TRANSPOSED = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")


def _converted(name: str, gguf_name: str, value: np.ndarray, *, back: bool = False) -> np.ndarray:
    """A weight as llama.cpp's converter stores it, or with `back` as Hugging Face's model has
    it.
    """
    arch = arch_of(name)
    if arch == "llama" and (".attn_q." in gguf_name or ".attn_k." in gguf_name):
        heads = N_HEADS if ".attn_q." in gguf_name else N_KV
        split = value.reshape(heads, *((-1, 2) if back else (2, -1)), *value.shape[1:])
        value = split.swapaxes(1, 2).reshape(value.shape)
    if arch in ("gemma2", "gemma3") and gguf_name.endswith("norm.weight"):
        value = value - 1 if back else value + 1
    if arch == "gpt2" and gguf_name.endswith(_TRANSPOSED):
        value = value.T
    return np.ascontiguousarray(value)


def _llama3_factors(config: Any) -> np.ndarray:
    """Return what each rotary frequency is divided by: llama.cpp stores this instead of Llama 3's
    four settings.
    """
    rope = config.rope_parameters
    d_head = config.hidden_size // config.num_attention_heads
    wavelength = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, d_head, 2) / d_head)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    return (1 / (np.clip(1 - smooth, 0, 1) / factor + np.clip(smooth, 0, 1))).astype(np.float32)


def _write_settings(
    writer: gguf.GGUFWriter, name: str, config: Any, settings: Mapping[str, Any]
) -> None:
    arch, (_, _, options) = arch_of(name), ARCHITECTURES[name]
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(
        getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    )
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        writer.add_rope_freq_base(rope["rope_theta"])
        if arch == "starcoder2":
            writer.add_layer_norm_eps(config.norm_epsilon)
        else:
            writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if rope["rope_type"] == "linear":
            settings = {
                "rope.scaling.type": "linear",
                "rope.scaling.factor": rope["factor"],
                **settings,
            }
    key_names = {
        "head_dim": ("attention.key_length", "attention.value_length"),
        "sliding_window": ("attention.sliding_window",),
        **{cap: (cap,) for cap in _CAPS},
    }
    stored = {}
    for option, keys in key_names.items():
        if option in options:
            stored |= dict.fromkeys(keys, options[option])
    if arch == "llama":
        stored["rope.dimension_count"] = config.hidden_size // N_HEADS
    for key, value in {**stored, **settings}.items():
        key = key if key.startswith(("split.", "general.")) else f"{arch}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
            type(value)
        ]
        add(key, value)


def _write_tokenizer(
    writer: gguf.GGUFWriter,
    vocabulary: str,
    fast: PreTrainedTokenizerFast,
    pre: str | None,
    add_space_prefix: bool | None,
) -> None:
    tokens = [token for token, _ in sorted(fast.get_vocab().items(), key=lambda entry: entry[1])]
    special, kind = {*fast.all_special_tokens}, gguf.TokenType
    kinds = [
        kind.BYTE if token.startswith("<0x") else kind.CONTROL if token in special else kind.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2" if vocabulary == "bytes" else "llama")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if add_space_prefix is not None:
        writer.add_add_space_prefix(add_space_prefix)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if vocabulary == "bytes":
        merges = json.loads(fast.backend_tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges(
            [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
        )
        writer.add_add_bos_token(False)
    else:
        writer.add_token_scores([float(-index) for index in range(len(tokens))])
        writer.add_unk_token_id(0)
        writer.add_add_bos_token(True)
    writer.add_bos_token_id(fast.bos_token_id)
    writer.add_eos_token_id(fast.eos_token_id)
