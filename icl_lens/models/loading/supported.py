"""Refuse models that no function can explain, whatever it is asked."""

from importlib.metadata import version
from typing import Any

import torch

from icl_lens.errors import InputError
from icl_lens.models.loading.layout import check_layout
from icl_lens.models.passes.offload import has_missing_weights, mark_offloaded

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes whose weights can be read and multiplied directly."""


def tl_version() -> tuple[int, int]:
    """Return the major and minor version of the installed TransformerLens."""
    major, minor, *_ = version("transformer-lens").split(".")
    return int(major), int(minor)


def check_supported(model: Any) -> None:
    """Raise InputError unless a model is a decoder of attention + FFN layers whose weights can be
    read.
    """
    name = type(getattr(model, "original_model", model)).__name__
    if name.startswith(("Cohere", "HunYuan")) and tl_version() < (4, 0):
        raise InputError(
            f"{name} is not supported with TransformerLens 3, which computes different logits; "
            "install transformer-lens>=4"
        )
    _check_weights(model, name)
    check_layout(model, name)


def _has_unpacked(quantizer: Any) -> bool:
    """Return whether a quantizer of transformers has unpacked all weights while loading, as it does
    with GGUF files without kernels that multiply by packed ones, and of architectures for which it
    has none: it then lists no module that keeps packed weights.
    """
    configuration = getattr(quantizer, "quantization_config", None)
    is_unpacked_on_request = bool(getattr(configuration, "dequantize", False))
    packed_modules = getattr(quantizer, "packed_modules", None)
    has_no_packed_modules = packed_modules is not None and len(packed_modules) == 0
    return is_unpacked_on_request or has_no_packed_modules


def _check_weights(model: Any, name: str) -> None:
    """Raise InputError for weights that cannot be read because they are quantized or not loaded."""
    quantizer = getattr(getattr(model, "original_model", None), "hf_quantizer", None)
    quantized = quantizer is not None and not _has_unpacked(quantizer)
    parameters = list(model.parameters())
    offloaded = any(parameter.is_meta for parameter in parameters)
    mark_offloaded(model, offloaded=offloaded)
    dtypes = {parameter.dtype for parameter in parameters}.difference(SUPPORTED_DTYPES)
    packed = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if quantized or packed:
        raise InputError(
            f"weights of {name} must not be quantized, got "
            f"{', '.join(packed) or 'packed weights'}; load the model unquantized, with "
            "dtype=torch.bfloat16 to save memory"
        )
    if offloaded and has_missing_weights(model):
        raise InputError(
            f"some weights of {name} are not loaded (on the meta device), and no accelerate hook "
            "loads them; load the model with its weights, with dtype=torch.bfloat16 or device_map= "
            "and offload_folder= to save memory"
        )
