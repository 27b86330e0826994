"""Store results as JSON and load them: one format for all dataclasses of numbers, texts, tensors
and tables.

1. `encode` turns a value into JSON. Dataclasses and named tuples become objects, and heads texts.
   Tensors, arrays and columns of tables become objects of dtype, shape and values. Missing numbers
   (NaN) become null, and infinite ones "Infinity" or "-Infinity".
2. `decode` restores a value of the type that a field is annotated with: files name no types.
3. `dumps` and `load` add and check a header: the format, its version, the versions of the packages
   that wrote it, and a digest of the fields.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.foundation.digest import json_digest
from icl_lens.foundation.files import parse_json
from icl_lens.foundation.shapes import check_shapes

PACKAGES = ("icl-lens", "torch", "transformers", "transformer-lens")
HEADER = ("format", "version", "versions", "digest", "summary")
"""Entries of a file beside the fields of the result."""
NOT_FINITE = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan, None: math.nan}
"""What files have in place of numbers that JSON lacks; earlier versions wrote "NaN" for null."""

Kind = TypeVar("Kind")


def dumps(result: Any, format_name: str, number: int, summary: Mapping[str, Any]) -> str:
    """Return a dataclass as JSON; `summary` is for readers without icl-lens, and `load` ignores it."""
    header = {
        "format": format_name,
        "version": number,
        "versions": {name: version(name) for name in PACKAGES},
    }
    encoded = encode(result)
    header["digest"] = json_digest(encoded)
    state = header | ({"summary": encode(summary)} if summary else {}) | encoded
    return json.dumps(state, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def load(kind: type[Kind], path: str | Path, format_name: str, number: int) -> Kind:
    """Load a dataclass. Raise InputError for a file that is missing, damaged, or of another kind or
    version.
    """
    remedy = f"pass a file written by {kind.__name__}.save"
    state = read(path, remedy)
    if state.get("format") != format_name:
        raise InputError(f"{str(path)!r} is not a saved {kind.__name__}; {remedy}")
    if state.get("version") != number:
        raise InputError(
            f"version of {str(path)!r} must be {number}, got {state.get('version')}; load it with the icl-lens version "
            "that it lists under versions, or compute it again"
        )
    encoded = {name: value for name, value in state.items() if name not in HEADER}
    try:
        has_digest = "digest" in state
        if has_digest and state["digest"] != json_digest(encoded):
            raise ValueError("its values are not those that were written")
        loaded: Any = decode(kind, encoded)
        if (
            not has_digest
        ):  # of an earlier version, or written by hand: values must be such as can be shown
            repr(loaded)
            loaded.to_html()
    except Exception as error:  # values of any kind may stand where others belong
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{str(path)!r} is damaged ({reason:.300}); {remedy}") from error
    return loaded


def read(path: str | Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object; raise InputError, which ends in `remedy`, for a file that is missing or
    is not one.
    """
    try:
        state = parse_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"cannot read {str(path)!r}: {error.strerror or error}; {remedy}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is not valid JSON ({error}); {remedy}") from error
    return state if isinstance(state, dict) else {}


def encode(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor | np.ndarray | pd.DataFrame):
        return _encode_numbers(value)
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _encode_named_tuple(value)
    if isinstance(value, Mapping):
        return {str(name): encode(entry) for name, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [encode(entry) for entry in value]
    return _finite([value])[0]


def _encode_numbers(value: Tensor | np.ndarray | pd.DataFrame) -> dict[str, Any]:
    """Return a tensor, an array or the columns of a table as objects of dtype and values."""
    if isinstance(value, pd.DataFrame):
        columns = {}
        for name in value:
            column = value[name]
            columns[str(name)] = {
                "dtype": str(column.dtype),
                "values": _finite(column.tolist()),
            }
        return columns
    array = value.detach().cpu() if isinstance(value, Tensor) else value
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "values": _finite(array.flatten().tolist()),
    }


def _encode_named_tuple(value: Any) -> Any:
    """Return a named tuple as an object, or as the text that its type parses, such as a head."""
    if hasattr(type(value), "parse"):
        return str(value)
    return encode(dict(zip(value._fields, value, strict=True)))


def decode(kind: Any, value: Any) -> Any:
    """Return a JSON value as one of a type.

    Raise ValueError, TypeError or KeyError for a value that does not fit the type.
    """
    origin = get_origin(kind)
    # The second is that of a jaxtyping annotation, such as Float[Tensor, "batch k"].
    if kind is pd.DataFrame or getattr(kind, "array_type", kind) in (Tensor, np.ndarray):
        return _decode_numbers(kind, value)
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{value!r} is not one of {get_args(kind)}")
        return value
    if origin in (Union, UnionType):
        return _decode_union(get_args(kind), value)
    if origin in (tuple, list, Sequence):
        return _decode_sequence(kind, value)
    if origin is not None and issubclass(origin, Mapping):
        name_kind, entry_kind = get_args(kind)
        return {decode(name_kind, name): decode(entry_kind, value[name]) for name in value}
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return _decode_fields(kind, value)
    return _decode_simple(kind, value)


def _decode_numbers(kind: Any, value: Any) -> Tensor | np.ndarray | pd.DataFrame:
    if kind is pd.DataFrame:
        columns = {}
        for name, column in value.items():
            numbers = _numbers(column["values"], column["dtype"])
            columns[name] = pd.Series(numbers, dtype=column["dtype"])
        return pd.DataFrame(columns)
    numbers, shape = _numbers(value["values"], value["dtype"]), value["shape"]
    if getattr(kind, "array_type", kind) is Tensor:
        return torch.tensor(numbers, dtype=getattr(torch, value["dtype"])).reshape(shape)
    return np.array(numbers, dtype=value["dtype"]).reshape(shape)


def _decode_union(kinds: Sequence[Any], value: Any) -> Any:
    """Return a value of one of some types; there is at most one among them that is not simple."""
    if value is None and type(None) in kinds:
        return None
    simple = tuple(kind for kind in kinds if kind in (str, int, float, bool))
    if type(value) in simple:
        return value
    composed = [kind for kind in kinds if kind not in simple and kind is not type(None)]
    return decode((composed or simple)[0], value)


def _decode_sequence(kind: Any, value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is not tuple or kinds[1:] == (Ellipsis,):
        kinds = [kinds[0]] * len(value)
    entries = [decode(kind, entry) for kind, entry in zip(kinds, value, strict=True)]
    return entries if origin is list else tuple(entries)


def _decode_fields(kind: Any, value: Any) -> Any:
    """Return a dataclass or a named tuple; fields that the file lacks have their defaults."""
    if hasattr(kind, "_fields") and hasattr(kind, "parse"):
        return kind.parse(value)
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in fields(kind)]
    kinds = get_type_hints(kind)
    decoded = {name: decode(kinds[name], value[name]) for name in names if name in value}
    if isinstance(kind, type) and is_dataclass(kind):
        check_shapes(kind, decoded)
    build: Any = kind
    return build(**decoded)


def _decode_simple(kind: Any, value: Any) -> Any:
    if kind is float and (value is None or isinstance(value, str)):
        value = NOT_FINITE.get(value, value)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and is_integer:
        value = float(value)
    if not isinstance(value, kind) or (kind is int and not is_integer):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _finite(values: Sequence[Any]) -> list[Any]:
    """Return numbers with None for those that are missing, and infinite ones as texts."""
    texts = {math.inf: "Infinity", -math.inf: "-Infinity"}
    finite = []
    for value in values:
        is_lacking = isinstance(value, float) and not math.isfinite(value)
        finite.append(texts.get(value) if is_lacking else value)
    return finite


def _numbers(values: Sequence[Any], dtype: str) -> Sequence[Any]:
    """Return what `_finite` was called with; only numbers with a fraction may be infinite or none."""
    if "float" not in dtype:
        return values
    numbers = []
    for value in values:
        is_replaced = value is None or isinstance(value, str)
        numbers.append(NOT_FINITE.get(value, value) if is_replaced else value)
    return numbers
