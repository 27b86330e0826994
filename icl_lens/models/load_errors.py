"""Diagnose faults in a model's configuration, weights or tokenizer."""

import json
import pickle
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from icl_lens.errors import InputError
from icl_lens.hub import first_line
from icl_lens.models.resolve import ModelSource, weight_files

_LFS = "run `git lfs pull` in its folder, or download it with `hf download`"
_KINDS = {
    "seq2seq": "is an encoder-decoder",
    "masked_lm": "is a bidirectional masked language model",
    "multimodal": "is multimodal",
    "audio": "is an audio model",
    "vision": "is a vision model",
}


def check_config(source: ModelSource, *, trust_remote_code: bool) -> Any:
    """Return the folder's configuration; raise InputError if it is unreadable or not of a decoder-only model."""
    path = source.folder / "config.json"
    raw = _json(path, source)
    if not isinstance(raw, dict):
        raise InputError(f"{_file(path, source)} must be a JSON object, got {type(raw).__name__}; {_again(source)}")
    if raw.get("is_encoder_decoder"):
        raise InputError(_no_decoder(source.name, raw, "seq2seq"))
    for field in ("hidden_act", "activation_function", "hidden_activation", "activation"):
        _check_activation(source, field, raw.get(field))
    for field in ("torch_dtype", "dtype"):
        _check_dtype(source, field, raw.get(field))
    for field in ("rope_scaling", "rope_parameters"):
        _check_rope(source, field, raw.get(field))
    if raw.get("scale_attn_weights") is False:
        raise InputError(
            f"config.json of model {source.name!r} must not have scale_attn_weights=false, since TransformerLens "
            "always scales attention scores; choose a model with scaled attention"
        )
    if "auto_map" in raw and not trust_remote_code:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if raw.get("model_type") not in CONFIG_MAPPING_NAMES:
            raise InputError(
                f"model {source.name!r} contains custom Python code; review it, and if you trust it, load it with "
                "il.load_model(..., trust_remote_code=True)"
            )
    from transformer_lens.utilities.architectures import classify_architecture
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(source.folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # configuration classes raise many types; the file is at fault
        raise InputError(_config_fault(source, raw, error)) from error
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(_no_decoder(source.name, raw, "seq2seq"))
    kinds = [classify_architecture(str(name)) for name in getattr(config, "architectures", None) or ()]
    if kinds and kinds[0] != "causal_lm":
        raise InputError(_no_decoder(source.name, raw, kinds[0]))
    if not kinds and any(getattr(config, part, None) is not None for part in ("vision_config", "audio_config")):
        raise InputError(_no_decoder(source.name, raw, "multimodal"))
    for field in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        size = getattr(config, field, None)
        if isinstance(size, int) and size < 1:
            raise InputError(
                f"{field} in the config.json of model {source.name!r} must be at least 1, got {size}; {_again(source)}"
            )
    return config


def diagnose_load_error(source: ModelSource, error: BaseException, *, weights: bool) -> str:
    """Return one sentence with the cause of a failed load, found by checking the folder's files."""
    folder, name = source.folder, source.name
    for path in sorted(folder.glob("*.json")):
        try:
            _json(path, source)
        except InputError as found:
            return str(found)
    if weights:
        found = weight_files(folder)
        if not found:
            return (
                f"folder {str(folder)!r} contains no weights (model.safetensors or pytorch_model.bin); {_again(source)}"
            )
        for path in found:
            if sentence := _weight_fault(path, source):
                return sentence
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return (
            f"not enough memory for model {name!r} ({first_line(error)}); use --dtype bfloat16 (dtype= in Python) or a "
            "smaller model"
        )
    text = first_line(error)
    lower = text.lower()
    if isinstance(error, KeyError | AttributeError | TypeError):
        text = f"{type(error).__name__} {text}"
    if any("tokenization_" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        return f"cannot read the tokenizer of model {name!r}: {text}; {_again(source)}"
    if "unsupported architecture" in lower or "not supported" in lower:
        return f"the architecture of model {name!r} is not supported by TransformerLens: {text}; choose another model"
    if isinstance(error, ImportError):
        return f"model {name!r} needs a package that is not installed: {text}; install it and retry"
    return f"could not load model {name!r}: {text}; check that its config.json matches its weights, or {_again(source)}"


def _no_decoder(name: str, raw: dict[str, Any], kind: str) -> str:
    architecture = (raw.get("architectures") or [raw.get("model_type")])[0]
    return (
        f"model {name!r} ({architecture}) {_KINDS.get(kind, 'is not a decoder-only model')}; use a decoder-only "
        "language model, such as GPT-2, GPT-J, Pythia or Llama"
    )


def _config_fault(source: ModelSource, raw: dict[str, Any], error: Exception) -> str:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = raw.get("model_type")
    if not isinstance(kind, str):
        return f'{_file(source.folder / "config.json", source)} has no model_type; add it, e.g. "gpt2"'
    if kind not in CONFIG_MAPPING_NAMES and "auto_map" not in raw:
        near = get_close_matches(kind, CONFIG_MAPPING_NAMES, n=1)
        suggestion = f" (did you mean {near[0]!r}?)" if near else ""
        return (
            f"transformers {transformers.__version__} does not support model_type {kind!r} in the config.json of model "
            f"{source.name!r}{suggestion}; fix it, or install a version of transformers that does"
        )
    return (
        f"cannot use the config.json of model {source.name!r}: {type(error).__name__}: {_first_lines(error)}; fix it, "
        f"or {_again(source)}"
    )


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200].rstrip(".") or type(error).__name__


def _check_activation(source: ModelSource, field: str, value: Any) -> None:
    from transformers.activations import ACT2FN

    if value is None or (isinstance(value, str) and value in ACT2FN):
        return
    known = sorted(ACT2FN)
    near = get_close_matches(str(value), known, n=2) or ["gelu_new", "silu"]
    raise InputError(
        f"{field} in the config.json of model {source.name!r} must be an activation of transformers, got {value!r}; "
        f"use the one of its training, e.g. {' or '.join(map(repr, near))}"
    )


def _check_dtype(source: ModelSource, field: str, value: Any) -> None:
    if value is None or value == "auto" or isinstance(value, dict):
        return
    if not isinstance(value, str) or not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
        raise InputError(
            f"{field} in the config.json of model {source.name!r} must be a torch dtype, got {value!r}; use 'float32', "
            "'float16' or 'bfloat16'"
        )


def _check_rope(source: ModelSource, field: str, value: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if value is None:
        return
    if not isinstance(value, dict):
        raise InputError(
            f"{field} in the config.json of model {source.name!r} must be an object, got {value!r}; write e.g. "
            '{"rope_type": "default", "rope_theta": 10000.0}'
        )
    kind = value.get("rope_type", value.get("type", "default"))
    # transformers also accepts older names of the listed types
    if isinstance(kind, str) and kind not in {*ROPE_INIT_FUNCTIONS, "default", "su", "mrope"}:
        raise InputError(
            f"the type of {field} in the config.json of model {source.name!r} must be one of 'default', "
            f"{', '.join(map(repr, sorted(ROPE_INIT_FUNCTIONS)))}, got {kind!r}"
        )


def _weight_fault(path: Path, source: ModelSource) -> str | None:
    if not path.is_file():
        return f"the weights of model {source.name!r} lack the file {path.name!r}; {_again(source)}"
    with path.open("rb") as stream:
        start = stream.read(256)
    length = path.stat().st_size
    file = _file(path, source)
    if start.startswith(b"version https://git-lfs"):
        return f"{file} is a Git LFS pointer, not the weights; {_LFS}"
    if not start:
        return f"{file} is empty; {_again(source)}"
    if start.lstrip()[:1] == b"<":
        return f"{file} is a web page, not weights; {_again(source)}"
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt"):
                return None
        except (SafetensorError, OSError, ValueError) as error:
            return f"{file} is corrupt or truncated ({length:,} bytes; {first_line(error)}); {_again(source)}"
    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error).lower() or "unsupported" in str(error).lower():
            return (
                f"{file} contains more than weights, and reading it would execute code (weights_only); use a model "
                "with safetensors"
            )
        return f"{file} is corrupt ({first_line(error)}); {_again(source)}"
    except Exception as error:  # EOFError, RuntimeError and others for a corrupt archive
        return f"{file} is corrupt or truncated ({length:,} bytes; {first_line(error)}); {_again(source)}"
    return None


def _json(path: Path, source: ModelSource) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {_file(path, source)} ({error.strerror}); {_again(source)}") from error
    except (ValueError, RecursionError) as error:
        if path.open("rb").read(24).startswith(b"version https://git-lfs"):
            raise InputError(f"{_file(path, source)} is a Git LFS pointer, not the file; {_LFS}") from error
        raise InputError(f"{_file(path, source)} is not valid JSON ({first_line(error)}); {_again(source)}") from error


def _file(path: Path, source: ModelSource) -> str:
    return f"{path.name!r} of model {source.name!r}"


def _again(source: ModelSource) -> str:
    if source.kind == "gguf":
        return f"delete the folder {str(source.folder)!r} and retry to reconvert it"
    if source.kind == "hub":
        return f"delete the folder {str(source.folder.parent.parent)!r} and retry to download it again"
    return "copy or save it again"
