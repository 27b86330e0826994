"""Whether a model's weights are the ones its configuration asks for, and numbers."""

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from icl_lens.errors import InputError
from icl_lens.models.resolve import weight_files

_BUFFERS = re.compile(
    r"(^|\.)(inv_freq|masked_bias|position_ids|causal_mask|cos_cached|sin_cached|embed_positions|alibi|rope\.freqs)$"
)
_WHOLE = re.compile(r"BOOL|[IU]\d+")
_MASK = re.compile(r"(attn|attention|self_attn|self_attention)\.bias$")


class StrictLoader:
    """A model class for `boot_transformers(model_class=)` that refuses weights which do not fit the configuration.

    transformers would give random numbers to weights that the checkpoint lacks, and drop those it has too many of.
    `inner` is the class to load with, None to let TransformerLens choose.
    """

    def __init__(self, name: str, inner: Any = None) -> None:
        self._name, self._inner = name, inner

    def from_pretrained(self, folder: Any, **kwargs: Any) -> Any:
        """What `inner` gives; raises InputError for weights missing, left over, misshapen or not finite."""
        inner = self._inner or _class_for(kwargs["config"])
        check_parameter_count(self._name, Path(folder), kwargs["config"], inner)
        check_not_quantized(self._name, Path(folder), kwargs["config"])
        model, info = inner.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
        check_keys(self._name, model, info)
        check_finite(self._name, model, kwargs.get("torch_dtype"))
        return model

    def from_config(self, config: Any, **kwargs: Any) -> Any:
        """A model with random weights, as `inner` makes it."""
        return (self._inner or _class_for(config)).from_config(config, **kwargs)


def check_parameter_count(name: str, folder: Path, config: Any, inner: Any) -> None:
    """Raises InputError if the configuration asks for more than twice the numbers that the weights hold.

    It is then of another model, and room for billions of random numbers would be made before that is seen. Only the
    headers of safetensors are read; packed weights, and classes that cannot be made without memory, pass.
    """
    files = weight_files(folder)
    plain = files and all(file.suffix == ".safetensors" for file in files)
    if not plain or getattr(config, "quantization_config", None) is not None:
        return
    try:
        held = 0
        for file in files:
            with safe_open(file, framework="pt") as stored:
                held += sum(prod(stored.get_slice(key).get_shape()) for key in stored.keys())  # noqa: SIM118
        with torch.device("meta"):
            wanted = sum(parameter.numel() for parameter in inner.from_config(config).parameters())
    except Exception:  # whatever it is, loading will say it of the file or the configuration itself
        return
    if wanted > 2 * held:
        raise InputError(
            f"the weights of {name!r} do not fit its config.json: they hold {held:,} numbers, and it asks for "
            f"{wanted:,}; use the config.json these weights were saved with"
        )


def check_not_quantized(name: str, folder: Path, config: Any) -> None:
    """Raises InputError if weights are stored as whole numbers and the configuration names no quantizer.

    transformers would take quantized weights for the numbers they are packed into. Masks and positions are no weights.
    """
    files = weight_files(folder)
    if getattr(config, "quantization_config", None) is not None or any(f.suffix != ".safetensors" for f in files):
        return
    packed = []
    try:
        for file in files:
            with safe_open(file, framework="pt") as stored:
                kinds = {key: str(stored.get_slice(key).get_dtype()) for key in stored.keys()}  # noqa: SIM118
            packed += [key for key, kind in kinds.items() if _WHOLE.fullmatch(kind) and not _is_buffer(key)]
    except Exception:  # whatever it is, loading will say it of the file
        return
    if packed:
        raise InputError(
            f"the weights of {name!r} are whole numbers in {_few(packed)}: they are quantized, and its config.json "
            "does not say how; use the unquantized model"
        )


def check_keys(name: str, model: nn.Module, info: dict[str, Any]) -> None:
    """Raises InputError unless every weight came from the checkpoint and every one of the checkpoint is used.

    Buffers, such as rotary frequencies and causal masks, and heads beside the model, such as a classifier, are no
    weights of the model: they may be missing or left over. `info` is transformers' `output_loading_info`.
    """
    buffers = {key for key, _ in model.named_buffers()}
    missing = [key for key in info["missing_keys"] if key not in buffers]
    extra = [key for key in info["unexpected_keys"] if _belongs(key, model)]
    shapes = [_Mismatch(*mismatched[:3]) for mismatched in info["mismatched_keys"]]
    parts = []
    if missing:
        parts.append(f"missing are {_few(missing)}")
    if extra:
        parts.append(f"left over are {_few(extra)}")
    if shapes:
        parts.append(f"of another shape are {_few(map(str, shapes))}")
    if parts:
        raise InputError(
            f"the weights of {name!r} do not fit its config.json: {'; '.join(parts)}; they would be random or "
            "dropped: use the config.json these weights were saved with, or save the model anew"
        )


def check_finite(name: str, model: nn.Module, dtype: torch.dtype | None) -> None:
    """Raises InputError if a parameter holds NaN or infinity: one pass over the weights, no copy of them."""
    bad: list[str] = []
    kinds: set[str] = set()
    for key, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point() or not parameter.numel() or parameter.itemsize < 2:
            continue
        low, high = (float(x) for x in torch.aminmax(parameter.detach()))
        if low != low or high != high:
            kinds.add("NaN")
        elif abs(low) == float("inf") or abs(high) == float("inf"):
            kinds.add("infinity")
        else:
            continue
        bad.append(key)
    if bad:
        how = (
            "use --dtype float32 or bfloat16 (dtype= in Python), which hold larger numbers"
            if dtype == torch.float16 and kinds == {"infinity"}
            else "the checkpoint is damaged or its training diverged: use another"
        )
        raise InputError(f"weights of {name!r} hold {' and '.join(sorted(kinds))} in {_few(bad)}; {how}")


class _Mismatch:
    def __init__(self, key: str, found: Any, wanted: Any) -> None:
        self._key, self._found, self._wanted = key, tuple(found), tuple(wanted)

    def __str__(self) -> str:
        return f"{self._key} ({_size(self._found)}, by the configuration {_size(self._wanted)})"


def _size(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a scalar"


def _belongs(key: str, model: nn.Module) -> bool:
    """Whether a key of the checkpoint speaks of a part the model has, or of a layer it should have."""
    if _is_buffer(key):
        return False
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    roots = [*{name.rpartition(".")[0] for name in lists}, getattr(model, "base_model_prefix", "")]
    names = {key, *(f"{root}.{key}" for root in roots if root)}
    modules = {name for name, _ in model.named_modules() if name}
    for name in names:
        if re.match(r"(.*)\.\d+\.", name) and any(name.startswith(f"{one}.") for one in lists):
            return True
        if name.rpartition(".")[0] in modules:
            return True
    return False


def _is_buffer(key: str) -> bool:
    return bool(_BUFFERS.search(key) or _MASK.search(key))


def _few(keys: Iterable[str]) -> str:
    ordered = sorted(keys, key=lambda key: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", key)])
    more = f" and {len(ordered) - 2} more" if len(ordered) > 2 else ""
    return f"{', '.join(ordered[:2])}{more}"


def _class_for(config: Any) -> Any:
    """The transformers class that TransformerLens would load with."""
    from transformer_lens.model_bridge.sources.transformers import (
        determine_architecture_from_hf_config,
        get_hf_model_class_for_architecture,
    )

    return get_hf_model_class_for_architecture(determine_architecture_from_hf_config(config))
