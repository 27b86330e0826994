"""Check that weights match the config and are finite."""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from icl_lens.errors import InputError
from icl_lens.models.checkpoints.resolve import weight_files
from icl_lens.models.loading.bridge_comparison import Probe, probe

_BUFFERS = re.compile(
    r"(^|\.)(inv_freq|masked_bias|position_ids|causal_mask|cos_cached|sin_cached)$"
    r"|(^|\.)(embed_positions|alibi|rope\.freqs)$"
    r"|(attn|attention|self_attn|self_attention)\.bias$"  # a causal mask
)
_INTEGER = re.compile(r"BOOL|[IU]\d+")


class StrictLoader:
    """A model class for `boot_transformers(model_class=)` that rejects weights that do not match
    the configuration.

    transformers itself initializes missing weights at random and drops unexpected ones. `inner` is
    the class to load with; None lets TransformerLens choose. With `is_probed`, the new model runs
    on a few tokens.
    """

    def __init__(
        self,
        name: str,
        inner: Any = None,
        device: torch.device | str | None = None,
        *,
        is_probed: bool = False,
    ) -> None:
        self._name, self._inner, self._device, self._is_probed = name, inner, device, is_probed
        self.probe: Probe | None = None
        """What the model computes before TransformerLens changes it, if it is probed."""

    def from_pretrained(self, folder: Any, **kwargs: Any) -> Any:
        """Load with `inner`; raise InputError for weights that are missing, unexpected, misshapen
        or not finite.
        """
        inner = self._inner or _class_for(kwargs["config"])
        check_headers(self._name, Path(folder), kwargs["config"], inner)
        model, info = inner.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
        check_keys(self._name, model, info)
        check_finite(self._name, model, kwargs.get("torch_dtype"))
        if self._device is not None:
            model = model.to(self._device)
        if self._is_probed:
            self.probe = probe(model)
        return model

    def from_config(self, config: Any, **kwargs: Any) -> Any:
        """Create a model with random weights."""
        return (self._inner or _class_for(config)).from_config(config, **kwargs)


def check_headers(name: str, folder: Path, config: Any, inner: Any) -> None:
    """Raise InputError if the headers of safetensors show that weights are packed integers or of
    another model.

    transformers would use packed integers as weights; integer masks and positions are allowed. A
    configuration that needs more than twice the stored parameters belongs to another model, and
    loading would create the rest at random.
    """
    files = weight_files(folder)
    if getattr(config, "quantization_config", None) is not None or any(
        f.suffix != ".safetensors" for f in files
    ):
        return
    stored, packed = 0, []
    try:
        for file in files:
            with safe_open(file, framework="pt") as weights:
                for key in weights.keys():  # noqa: SIM118
                    header = weights.get_slice(key)
                    stored += math.prod(header.get_shape())
                    if _INTEGER.fullmatch(str(header.get_dtype())) and not _is_buffer(key):
                        packed.append(key)
        with torch.device("meta"):
            expected = sum(
                parameter.numel() for parameter in inner.from_config(config).parameters()
            )
    except Exception:  # loading reports the fault of the file or the configuration
        expected = 0
    if packed:
        raise InputError(
            f"weights of {name!r} are integers in {_few(packed)}, but config.json has no "
            "quantization_config; use the unquantized model"
        )
    if files and expected > 2 * stored:
        raise InputError(
            f"weights of {name!r} hold {stored:,} parameters, config.json expects {expected:,}; "
            "use the config.json that was saved with these weights"
        )


def check_keys(name: str, model: nn.Module, info: dict[str, Any]) -> None:
    """Raise InputError unless the checkpoint has every weight in its shape, and every weight of the
    checkpoint is used.

    Buffers, such as rotary frequencies and causal masks, and extra heads, such as a classifier, are
    not checked. `info` is transformers' `output_loading_info`.
    """
    buffers = {key for key, _ in model.named_buffers()}
    faults = {
        "missing": [key for key in info["missing_keys"] if key not in buffers],
        "unexpected": [key for key in info["unexpected_keys"] if _belongs(key, model)],
        "wrong shape": [
            f"{key} ({_size(stored)}, expected {_size(expected)})"
            for key, stored, expected in info["mismatched_keys"]
        ],
    }
    listed = "; ".join(f"{fault} {_few(keys)}" for fault, keys in faults.items() if keys)
    if listed:
        raise InputError(
            f"weights of {name!r} do not match config.json ({listed}); use the config.json that "
            "was saved with these weights, or save the model again"
        )


def check_finite(name: str, model: nn.Module, dtype: torch.dtype | None) -> None:
    """Raise InputError if a parameter contains NaN or infinity; offloaded and 8-bit parameters are
    not checked.
    """
    bad: dict[str, str] = {}
    for key, parameter in model.named_parameters():
        if (
            parameter.is_meta
            or not parameter.is_floating_point()
            or not parameter.numel()
            or parameter.itemsize < 2
        ):
            continue
        # aminmax is NaN if any value is; it makes no copy.
        extremes = [float(x) for x in torch.aminmax(parameter.detach())]
        if not all(map(math.isfinite, extremes)):
            bad[key] = "NaN" if any(map(math.isnan, extremes)) else "infinity"
    if bad:
        kinds = sorted(set(bad.values()))
        remedy = (
            "use --dtype float32 or bfloat16 (dtype= in Python), which have a larger range"
            if dtype == torch.float16 and kinds == ["infinity"]
            else "use another checkpoint, since this one is corrupt or its training diverged"
        )
        raise InputError(
            f"weights of {name!r} contain {' and '.join(kinds)} in {_few(bad)}; {remedy}"
        )


def _size(shape: Iterable[int]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def _belongs(key: str, model: nn.Module) -> bool:
    """Return whether a checkpoint key is in a part of the model, rather than in an additional head
    or a buffer.
    """
    parts = {
        name
        for root in (model, getattr(model, "base_model", model))
        for name, _ in root.named_children()
    }
    return key.partition(".")[0] in parts and not _is_buffer(key)


def _is_buffer(key: str) -> bool:
    return bool(_BUFFERS.search(key))


def _few(keys: Iterable[str]) -> str:
    ordered = sorted(
        keys, key=lambda key: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", key)]
    )
    more = f" and {len(ordered) - 2} more" if len(ordered) > 2 else ""
    return f"{', '.join(ordered[:2])}{more}"


def _class_for(config: Any) -> Any:
    """Return the transformers class that TransformerLens would load with."""
    from transformer_lens.model_bridge.sources.transformers import (
        determine_architecture_from_hf_config,
        get_hf_model_class_for_architecture,
    )

    return get_hf_model_class_for_architecture(determine_architecture_from_hf_config(config))
