"""Loading models: bundled ones, folders, the Hub; and saying why one cannot be loaded."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from icl_lens.errors import InputError, check_choice


def bundled_models() -> list[str]:
    """Names of the models that come with the package and load without a network.

    Example:
        >>> "icl-mini" in il.bundled_models()
        True
    """
    folder = files("icl_lens") / "bundled"
    return sorted(entry.name for entry in folder.iterdir() if (entry / "config.json").is_file())


def load_model(
    name: str = "icl-mini",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str = torch.float32,
    revision: str | None = None,
    device_map: str | dict[str, str | int] | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Any:
    """A `TransformerBridge` with raw weights and eager attention, in eval mode, gradients off.

    `name` is a bundled model (`bundled_models()`), a local Hugging Face folder, or a Hub name such as
    "gpt2-large", "EleutherAI/gpt-j-6b", "huggyllama/llama-7b"; `dtype` a torch dtype or its name. Other keywords go to
    `TransformerBridge.boot_transformers` (`n_devices`, `max_memory`, `tokenizer`, `hf_model`, …).
    Raises InputError, with the reason and the remedy, if the model cannot be loaded.

    Example:
        >>> model = il.load_model("icl-mini")
        >>> model.cfg.n_layers, model.cfg.n_heads
        (6, 8)
    """
    from transformer_lens.model_bridge import TransformerBridge

    if isinstance(dtype, str):
        found: Any = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            check_choice("dtype", dtype, ("float32", "bfloat16", "float16", "float64"))
        dtype = found
    if kwargs.get("hf_model") is not None and kwargs.get("tokenizer") is None:
        raise InputError(
            "hf_model= needs its tokenizer beside it: load_model(name, hf_model=model, tokenizer=tokenizer)"
        )
    if isinstance(init := getattr(kwargs.get("tokenizer"), "init_kwargs", None), dict):
        init.setdefault("name_or_path", "")  # TransformerLens reads it, and tokenizers built in memory have none
    source = _source(name, local_only="hf_model" not in kwargs)
    where: dict[str, Any] = {"device_map": device_map} if device_map is not None else {"device": device or _device()}
    try:
        with _without_bars() if name in bundled_models() else nullcontext():
            model = TransformerBridge.boot_transformers(
                source, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code, **where, **kwargs
            )
    except (OSError, ValueError, ImportError, RuntimeError, NotImplementedError) as error:
        raise InputError(_why_not(name, error)) from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.eval()
    return model


@contextmanager
def _without_bars() -> Iterator[None]:
    """No progress bars of the loader, which would tell of a load that takes no time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _source(name: str, *, local_only: bool) -> str:
    """The folder of a bundled or local model, else the name itself for the Hub."""
    if name in bundled_models():
        return str(files("icl_lens") / "bundled" / name)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError(f"the folder {name!r} holds no Hugging Face model: there is no config.json in it")
        return str(path)
    if local_only and (path.is_absolute() or name.startswith((".", "~"))):
        raise InputError(f"there is no folder {name!r}; give an existing Hugging Face folder or a Hub name")
    return name


def _why_not(name: str, error: BaseException) -> str:
    chain, text = error, ""
    while chain is not None:
        text += f" {type(chain).__name__} {chain}"
        chain = chain.__cause__ or chain.__context__
    lower = text.lower()
    names = ", ".join(bundled_models())
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "gated" in lower or "401 client" in lower or "403 client" in lower or "awaiting a review" in lower:
        return (
            f"model {name!r} is gated on the Hugging Face Hub; accept its licence on its page, then log in with "
            f"`hf auth login` or set HF_TOKEN (bundled models need neither: {names})"
        )
    if "repositorynotfound" in lower or "404 client" in lower or "is not a valid model identifier" in lower:
        return (
            f"the Hugging Face Hub knows no model {name!r}; check the name (bundled: {names}), "
            "or log in if it is private"
        )
    offline = any(
        os.environ.get(v, "").lower() in ("1", "true", "yes", "on") for v in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    if any(
        sign in lower
        for sign in (
            "connect",
            "resolve",
            "offline",
            "proxy",
            "timed out",
            "network",
            "localentrynotfound",
            "couldn't reach",
            "outgoing traffic",
        )
    ):
        how = "unset HF_HUB_OFFLINE to go online" if offline else "check the network to the Hugging Face Hub"
        return (
            f"model {name!r} is neither bundled ({names}) nor a local folder, and it could not be fetched; "
            f"{how}, or pass the folder of a downloaded model"
        )
    return f"model {name!r} could not be loaded: {reason} (bundled models: {names})"
