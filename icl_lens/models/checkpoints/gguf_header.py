"""Read a GGUF file's header, including the settings that transformers' loader ignores.

Files of `ARCHITECTURES` are tested against the original models. Other architectures are rejected,
since transformers silently drops some of their settings and weights, which gives wrong results.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from icl_lens.errors import InputError, first_line, short_repr

ARCHITECTURES = ("gemma2", "gemma3", "gpt2", "llama", "phi3", "qwen2", "qwen3", "starcoder2")
_COPIED = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Settings that transformers ignores for some of the architectures: GGUF key and name in a
configuration.
"""
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
_ROPE_FACTORS = "rope_freqs.weight"
_ORIGINAL = "pass the folder or the Hub name of the original model"


class Header:
    """The metadata of a GGUF file and the names, types and sizes of its tensors."""

    def __init__(self, file: Path) -> None:
        """Read a file's header; raise InputError if it is damaged or cannot be loaded correctly."""
        import gguf

        self.name = file.name
        try:
            reader = gguf.GGUFReader(str(file))
            if not reader.tensors:
                raise ValueError("it contains no weights")
        except Exception as error:  # numpy raises many types for truncated files
            raise InputError(
                f"{file.name!r} must be a complete GGUF file, got a corrupt or truncated one "
                f"({file.stat().st_size:,} bytes; {first_line(error)}); download it again"
            ) from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._architecture: str = self._field("general.architecture")
        if self._architecture not in ARCHITECTURES:
            raise InputError(
                f"{file.name!r} must be of an architecture whose GGUF files load correctly "
                f"({', '.join(ARCHITECTURES)}), got {short_repr(self._architecture)}; {_ORIGINAL}"
            )
        if (parts := self._field("split.count", 1)) > 1:
            raise InputError(
                f"{file.name!r} must be a complete model, got one of {parts} parts; join them with "
                "llama-gguf-split --merge"
            )

    @property
    def quantization(self) -> str:
        """The types of the weights, most frequent first, such as "Q4_1 and Q8_0"."""
        weights = Counter[str]()
        for tensor in self._tensors.values():
            if len(tensor.shape) > 1:  # norms and biases are never quantized
                weights[tensor.tensor_type.name] += int(tensor.n_elements)
        return " and ".join(kind for kind, _ in weights.most_common())

    @property
    def dtype(self) -> torch.dtype:
        """The precision of most weights, if they are not quantized; float32 otherwise."""
        return _DTYPES.get(self.quantization.split(" and ")[0], torch.float32)

    @property
    def n_parameters(self) -> int:
        """The number of weights in the file, without the factors of frequencies."""
        return sum(
            int(tensor.n_elements)
            for name, tensor in self._tensors.items()
            if name != _ROPE_FACTORS
        )

    @property
    def has_tokenizer(self) -> bool:
        return "tokenizer.ggml.tokens" in self._fields

    @property
    def architecture(self) -> str:
        return self._architecture

    @property
    def tokenizer(self) -> dict[str, Any]:
        """The settings of the tokenizer by name, without "tokenizer.ggml." and without lists of
        tokens.
        """
        names = ("model", "pre", "add_space_prefix")
        return {name: self._field(f"tokenizer.ggml.{name}") for name in names}

    def complete_config(self, config: Any) -> None:
        """Add to a configuration what transformers' loader ignores; raise InputError for settings
        it cannot hold.
        """
        for key, name in _COPIED.items():
            value = self._setting(key)
            if value is not None and hasattr(config, name):
                setattr(config, name, value)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            setattr(config, f"{name}_token_id", self._field(f"tokenizer.ggml.{key}_token_id"))
        if self._architecture == "gpt2":
            return  # its positions are learned
        rope = config.rope_parameters
        # Gemma 3 has other parameters in layers with a sliding window.
        rope = rope.get("full_attention", rope)
        if (theta := self._setting("rope.freq_base")) is not None:
            rope["rope_theta"] = theta
        scaling = self._setting("rope.scaling.type", "none")
        if scaling == "linear":
            rope |= {"rope_type": "linear", "factor": self._setting("rope.scaling.factor")}
        elif scaling != "none":
            self._raise_unsupported(
                f"whose positions are scaled linearly or not at all, got {short_repr(scaling)}"
            )
        if (
            _ROPE_FACTORS in self._tensors
        ):  # of Llama 3.1 and later: each frequency is divided by a factor
            factors = self._tensors[_ROPE_FACTORS].data.tolist()
            rope |= {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
            }
            rope["original_max_position_embeddings"] = config.max_position_embeddings
        d_head = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        if (rotated := self._setting("rope.dimension_count", d_head)) != d_head:
            self._raise_unsupported(
                f"that rotates all {d_head} dimensions of its heads, got {rotated}"
            )
        # Not in the file; it differs in 27B models.
        scalar = getattr(config, "query_pre_attn_scalar", d_head)
        if scalar != d_head:
            self._raise_unsupported(f"with heads of width {scalar}, got {d_head}")

    def check_weights_used(
        self, model: Any, missing_keys: Any, mismatched_keys: Any, **_: Any
    ) -> None:
        """Raise InputError if a model loaded from the file has missing, mismatched or unused
        weights.
        """
        stored = self.n_parameters
        used = sum(parameter.numel() for parameter in model.parameters())
        if missing_keys:
            self._raise_unsupported(
                f"with all weights of its architecture, got none for {min(missing_keys)}"
            )
        if mismatched_keys:
            name, stored_shape, shape = min(mismatched_keys)
            self._raise_unsupported(
                f"with {name} of shape {tuple(shape)}, got {tuple(stored_shape)}"
            )
        if stored != used:
            self._raise_unsupported(
                f"whose {stored:,} parameters transformers reads completely, got {used:,} of them"
            )

    def _field(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default

    def _setting(self, key: str, default: Any = None) -> Any:
        """Return a field whose key begins with the architecture, such as "llama.rope.freq_base"."""
        return self._field(f"{self._architecture}.{key}", default)

    def _raise_unsupported(self, condition: str) -> None:
        raise InputError(
            f"{self.name!r} must be a {self._architecture} model {condition}; {_ORIGINAL}"
        )


@contextmanager
def cached_parser(name: str) -> Iterator[None]:
    """Cache the gguf package's parser, since transformers parses the same header several times,
    each taking seconds.

    Raise InputError if the gguf package is missing.
    """
    try:
        import gguf
    except ImportError as error:
        raise InputError(
            f"the gguf package must be installed to read {name!r}; install it with: pip install "
            "gguf"
        ) from error
    slow = {function: getattr(gguf, function) for function in ("GGUFReader", "get_tensor_name_map")}
    try:
        for function, original in slow.items():
            setattr(gguf, function, cache(original))
        yield
    finally:
        for function, original in slow.items():
            setattr(gguf, function, original)
