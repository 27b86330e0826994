"""Find what is wrong with a model's configuration, weights or tokenizer.

1. `check_config` refuses, before loading, models that would load wrongly or not at all.
2. `diagnose_load_error` turns an error of loading into one sentence, after checking which file
   causes it.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from icl_lens.errors import InputError, first_line
from icl_lens.models.checkpoints.resolve import ModelSource, weight_files

PROMPT_LEARNING = ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT")
"""Types of peft's adapters that put positions before a text."""


def check_config(source: ModelSource, *, trust_remote_code: bool) -> None:
    """Raise InputError if a folder's configuration is unreadable or not that of a supported
    decoder-only model.
    """
    from transformer_lens.utilities.architectures import classify_architecture
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    try:
        raw, _ = PretrainedConfig.get_config_dict(source.folder)
        if (
            "auto_map" in raw
            and not trust_remote_code
            and raw.get("model_type") not in CONFIG_MAPPING_NAMES
        ):
            raise InputError(
                f"model {source.name!r} contains custom Python code; review it, and if you trust "
                "it, load it with il.load_model(..., trust_remote_code=True)"
            )
        config = AutoConfig.from_pretrained(str(source.folder), trust_remote_code=trust_remote_code)
    except InputError:
        raise
    except Exception as error:  # configuration classes raise many types; the file is at fault
        raise InputError(
            f"cannot use the config.json of model {source.name!r} ({type(error).__name__}: "
            f"{first_line(error)}); fix it, or {_remedy(source)}"
        ) from error
    if (source.folder / "adapter_config.json").is_file():
        _check_adapter(source)
    if getattr(config, "scale_attn_weights", True) is False:
        raise InputError(
            f"config.json of model {source.name!r} must not have scale_attn_weights=false, since "
            "TransformerLens always scales attention scores; choose a model with scaled attention"
        )
    if architectures := getattr(config, "architectures", None):
        is_decoder = classify_architecture(str(architectures[0])) == "causal_lm"
    else:
        is_decoder = all(
            getattr(config, part, None) is None for part in ("vision_config", "audio_config")
        )
    if getattr(config, "is_encoder_decoder", False) or not is_decoder:
        raise InputError(
            f"model {source.name!r} ({(architectures or [config.model_type])[0]}) is not a "
            "decoder-only language model; use one, such as GPT-2, GPT-J, Pythia or Llama"
        )


def _check_adapter(source: ModelSource) -> None:
    """Raise InputError unless transformers will load the adapter beside a model, and it shifts no
    positions.
    """
    kind = str(_read_json(source.folder / "adapter_config.json", source).get("peft_type"))
    if kind in PROMPT_LEARNING:
        raise InputError(
            f"model {source.name!r} has an adapter of kind {kind}, which puts learned positions "
            "before every text; remove adapter_config.json to explain the base model, or use an "
            "adapter such as LoRA"
        )
    if find_spec("peft") is None:
        raise InputError(
            f"model {source.name!r} has an adapter (adapter_config.json), which cannot be loaded "
            "without peft; run `pip install peft`, or merge the adapter into the model "
            "(merge_and_unload) and save that"
        )


def diagnose_load_error(source: ModelSource, error: BaseException, *, weights: bool) -> str:
    """Return one sentence with the cause of a failed load, after checking the folder's files."""
    try:
        for path in sorted(source.folder.glob("*.json")):
            _read_json(path, source)
        if weights:
            _check_weight_files(source)
    except InputError as fault:
        return str(fault)
    cause = first_line(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return (
            f"not enough memory for model {source.name!r} ({cause}); use --dtype bfloat16 (dtype= "
            "in Python) or a smaller model"
        )
    if isinstance(error, ImportError):
        return (
            f"model {source.name!r} needs a package that is not installed: {cause}; install it and "
            "retry"
        )
    if "supported architecture" in cause:  # followed by a list of some hundred names
        config = _read_json(source.folder / "config.json", source)
        architecture = (config.get("architectures") or [config.get("model_type")])[0]
        return (
            f"could not load model {source.name!r}: TransformerLens does not support "
            f"{architecture}; use a family that docs/families.md lists as exact"
        )
    if isinstance(error, KeyError | AttributeError | TypeError):
        cause = f"{type(error).__name__} {cause}"
    return (
        f"could not load model {source.name!r}: {cause}; check that TransformerLens supports its "
        "architecture and that its config.json and tokenizer belong to its weights, or "
        f"{_remedy(source)}"
    )


def _check_weight_files(source: ModelSource) -> None:
    """Raise InputError if a weight file is missing, damaged or contains more than weights."""
    paths = weight_files(source.folder)
    if not paths:
        raise InputError(
            f"folder {str(source.folder)!r} contains no weights (model.safetensors or "
            f"pytorch_model.bin); {_remedy(source)}"
        )
    for path in paths:
        if not path.is_file():
            raise InputError(
                f"the weights of model {source.name!r} lack the file {path.name!r}; "
                f"{_remedy(source)}"
            )
        _check_no_pointer(path, source)
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt"):
                    pass
            else:
                torch.load(path, map_location="meta", weights_only=True, mmap=False)
        except Exception as error:  # many types for damaged files
            if "weights_only" in str(error).lower():
                raise InputError(
                    f"{path.name!r} of model {source.name!r} contains more than weights, and "
                    "reading it would execute code (weights_only); use a model with safetensors"
                ) from error
            what = f"is corrupt or truncated ({path.stat().st_size:,} bytes; {first_line(error)})"
            raise _file_error(path.name, source, what) from error


def _read_json(path: Path, source: ModelSource) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        _check_no_pointer(path, source)
        raise _file_error(path.name, source, f"is not valid JSON ({first_line(error)})") from error


def _check_no_pointer(path: Path, source: ModelSource) -> None:
    if path.is_file() and path.open("rb").read(24).startswith(b"version https://git-lfs"):
        raise InputError(
            f"{path.name!r} of model {source.name!r} is a Git LFS pointer, not the file; run `git "
            "lfs pull` in its folder, or download it with `hf download`"
        )


def _file_error(file: str, source: ModelSource, fault: str) -> InputError:
    return InputError(f"{file!r} of model {source.name!r} {fault}; {_remedy(source)}")


def _remedy(source: ModelSource) -> str:
    """Return the remedy for damaged files: how to obtain them again."""
    if source.kind == "gguf":
        return f"delete the folder {str(source.folder)!r} and retry to reconvert it"
    if source.kind == "hub":
        return (
            f"delete the folder {str(source.folder.parent.parent)!r} and retry to download it again"
        )
    return "copy or save it again"
