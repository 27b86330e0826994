"""Why the files of a model cannot be used: what is wrong with its configuration, weights or tokenizer."""

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

_LFS = "run `git lfs pull` beside it, or fetch it with `hf download`"
_KINDS = {
    "seq2seq": "is an encoder-decoder",
    "masked_lm": "is a masked language model, which reads both ways",
    "multimodal": "reads images or sound beside text",
    "audio": "reads sound",
    "vision": "reads images",
}


def check_config(source: ModelSource, *, trust_remote_code: bool) -> Any:
    """The configuration in the folder; raises InputError where it is unreadable or that of no decoder-only model."""
    path = source.folder / "config.json"
    raw = _json(path, source)
    if not isinstance(raw, dict):
        raise InputError(f"{_file(path, source)} holds no configuration but {type(raw).__name__}; {_again(source)}")
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
            f"the config.json of model {source.name!r} has scale_attn_weights=false, and TransformerLens would divide "
            "attention scores by the root of a head's width all the same; choose a model with scaled attention"
        )
    if "auto_map" in raw and not trust_remote_code:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        if raw.get("model_type") not in CONFIG_MAPPING_NAMES:
            raise InputError(
                f"model {source.name!r} brings its own Python code; read it, and if you trust it load it with "
                "il.load_model(..., trust_remote_code=True)"
            )
    from transformer_lens.utilities.architectures import classify_architecture
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(source.folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever the configuration classes raise: it is the file that is wrong
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
                f"the config.json of model {source.name!r} says {field}={size}, which must be at least 1; "
                f"{_again(source)}"
            )
    return config


def diagnose_load_error(source: ModelSource, error: BaseException, *, weights: bool) -> str:
    """One sentence about a folder that could not be loaded: its files are looked at for the cause."""
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
                f"the folder {str(folder)!r} holds no weights (model.safetensors or pytorch_model.bin); "
                f"{_again(source)}"
            )
        for path in found:
            if sentence := _weight_fault(path, source):
                return sentence
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return (
            f"there is not enough memory for model {name!r} ({first_line(error)}); choose --dtype bfloat16 (dtype= in "
            "Python) or a smaller model"
        )
    text = first_line(error)
    lower = text.lower()
    if isinstance(error, KeyError | AttributeError | TypeError):
        text = f"{type(error).__name__} {text}"
    if any("tokenization_" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        return f"the tokenizer of model {name!r} cannot be read: {text}; {_again(source)}"
    if "unsupported architecture" in lower or "not supported" in lower:
        return f"model {name!r} is of a family that TransformerLens does not know: {text}; choose another model"
    if isinstance(error, ImportError):
        return f"model {name!r} needs a package that is not installed: {text}; install it and try again"
    return f"model {name!r} could not be loaded: {text}; check its config.json against its weights, or {_again(source)}"


def _no_decoder(name: str, raw: dict[str, Any], kind: str) -> str:
    named = (raw.get("architectures") or [raw.get("model_type")])[0]
    return (
        f"model {name!r} ({named}) {_KINDS.get(kind, 'is no decoder-only model')}; what is computed here needs a "
        "decoder-only language model, such as GPT-2, GPT-J, Pythia or Llama"
    )


def _config_fault(source: ModelSource, raw: dict[str, Any], error: Exception) -> str:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind = raw.get("model_type")
    if not isinstance(kind, str):
        return f'{_file(source.folder / "config.json", source)} names no model_type; add it, such as "gpt2"'
    if kind not in CONFIG_MAPPING_NAMES and "auto_map" not in raw:
        near = get_close_matches(kind, CONFIG_MAPPING_NAMES, n=1)
        meant = f" (did you mean {near[0]!r}?)" if near else ""
        return (
            f"transformers {transformers.__version__} knows no architecture {kind!r}, which the config.json of model "
            f"{source.name!r} names{meant}; mend it, or install a transformers that does"
        )
    return (
        f"the config.json of model {source.name!r} cannot be used: {type(error).__name__}: {_told(error)}; mend it, or "
        f"{_again(source)}"
    )


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200].rstrip(".") or type(error).__name__


def _check_activation(source: ModelSource, field: str, value: Any) -> None:
    from transformers.activations import ACT2FN

    if value is None or (isinstance(value, str) and value in ACT2FN):
        return
    known = sorted(ACT2FN)
    near = get_close_matches(str(value), known, n=2) or ["gelu_new", "silu"]
    raise InputError(
        f"the config.json of model {source.name!r} asks for {field}={value!r}, and transformers knows no such "
        f"activation; write the one the model was trained with, such as {' or '.join(map(repr, near))}"
    )


def _check_dtype(source: ModelSource, field: str, value: Any) -> None:
    if value is None or value == "auto" or isinstance(value, dict):
        return
    if not isinstance(value, str) or not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
        raise InputError(
            f"the config.json of model {source.name!r} names {field}={value!r}, which is no dtype of torch; write "
            "'float32', 'float16' or 'bfloat16'"
        )


def _check_rope(source: ModelSource, field: str, value: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if value is None:
        return
    if not isinstance(value, dict):
        raise InputError(
            f"the config.json of model {source.name!r} has {field}={value!r}; write an object such as "
            '{"rope_type": "default", "rope_theta": 10000.0}'
        )
    kind = value.get("rope_type", value.get("type", "default"))
    # linear, dynamic and others are listed; older names of the same are kept by transformers
    if isinstance(kind, str) and kind not in {*ROPE_INIT_FUNCTIONS, "default", "su", "mrope"}:
        raise InputError(
            f"the config.json of model {source.name!r} asks for {field} of type {kind!r}, which transformers does not "
            f"know; it knows 'default', {', '.join(map(repr, sorted(ROPE_INIT_FUNCTIONS)))}"
        )


def _weight_fault(path: Path, source: ModelSource) -> str | None:
    if not path.is_file():
        return f"the weights of model {source.name!r} lack {path.name!r}; {_again(source)}"
    with path.open("rb") as stream:
        start = stream.read(256)
    length = path.stat().st_size
    file = _file(path, source)
    if start.startswith(b"version https://git-lfs"):
        return f"{file} is a pointer of Git LFS, not the weights; {_LFS}"
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
            return f"{file} is damaged or cut short ({length:,} bytes; {first_line(error)}); {_again(source)}"
    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=False)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error).lower() or "unsupported" in str(error).lower():
            return (
                f"{file} holds more than weights: to read it, code in it would have to be run, which is refused "
                "(weights_only); use a model with safetensors"
            )
        return f"{file} is damaged ({first_line(error)}); {_again(source)}"
    except Exception as error:  # EOFError, RuntimeError, whatever a broken archive raises
        return f"{file} is damaged or cut short ({length:,} bytes; {first_line(error)}); {_again(source)}"
    return None


def _json(path: Path, source: ModelSource) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{_file(path, source)} cannot be read ({error.strerror}); {_again(source)}") from error
    except (ValueError, RecursionError) as error:
        if path.open("rb").read(24).startswith(b"version https://git-lfs"):
            raise InputError(f"{_file(path, source)} is a pointer of Git LFS, not the file; {_LFS}") from error
        raise InputError(f"{_file(path, source)} is no JSON ({first_line(error)}); {_again(source)}") from error


def _file(path: Path, source: ModelSource) -> str:
    return f"{path.name!r} of model {source.name!r}"


def _again(source: ModelSource) -> str:
    if source.kind == "gguf":
        return f"delete the folder {str(source.folder)!r} and try again: it is converted anew"
    if source.kind == "hub":
        return f"delete the folder {str(source.folder.parent.parent)!r} and try again: it is fetched anew"
    return "copy or save it anew"
