"""Store results as JSON and load them: one format for all dataclasses of numbers, texts, tensors and tables.

1. `encode` turns a value into JSON. Dataclasses and named tuples become objects, and heads texts. Tensors, arrays and
   columns of tables become objects of dtype, shape and values. Numbers that JSON lacks become "NaN", "Infinity" or
   "-Infinity".
2. `decode` restores a value of the type that a field is annotated with: files name no types.
3. `dumps` and `load` add and check a header: the format, its version, the versions of the packages that wrote it, and a
   digest of the fields.
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

from icl_lens.digest import json_digest
from icl_lens.errors import InputError
from icl_lens.shapes import check_shapes

PACKAGES = ("icl-lens", "torch", "transformers", "transformer-lens")
HEADER = ("format", "version", "versions", "digest", "summary")
"""Entries of a file beside the fields of the result."""
NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Kind = TypeVar("Kind")


def dumps(result: Any, format_name: str, number: int, summary: Mapping[str, Any]) -> str:
    """Return a dataclass as JSON; `summary` is for readers without icl-lens, and `load` ignores it."""
    header = {"format": format_name, "version": number, "versions": {name: version(name) for name in PACKAGES}}
    encoded = encode(result)
    header["digest"] = json_digest(encoded)
    state = header | ({"summary": encode(summary)} if summary else {}) | encoded
    return json.dumps(state, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def load(kind: type[Kind], path: str | Path, format_name: str, number: int) -> Kind:
    """Load a dataclass. Raise InputError for a file that is missing, damaged, or of another kind or version."""
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
        if not has_digest:  # of an earlier version, or written by hand: values must be such as can be shown
            repr(loaded)
            loaded.to_html()
    except Exception as error:  # values of any kind may stand where others belong
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{str(path)!r} is damaged ({reason:.300}); {remedy}") from error
    return loaded


def read(path: str | Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object; raise InputError, which ends in `remedy`, for a file that is missing or is not one."""
    try:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}; {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is not valid JSON ({error}); {remedy}") from error
    return state if isinstance(state, dict) else {}


def encode(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        values = _finite(value.detach().cpu().flatten().tolist())
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "values": values}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": _finite(value.flatten().tolist())}
    if isinstance(value, pd.DataFrame):
        columns = {str(name): value[name] for name in value}
        return {
            name: {"dtype": str(column.dtype), "values": _finite(column.tolist())} for name, column in columns.items()
        }
    if is_dataclass(value):
        return {one.name: encode(getattr(value, one.name)) for one in fields(value)}
    named: Any = value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return str(value) if hasattr(type(value), "parse") else encode(dict(zip(named._fields, named, strict=True)))
    if isinstance(value, Mapping):
        return {str(name): encode(entry) for name, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [encode(entry) for entry in value]
    return _finite([value])[0]


def decode(kind: Any, value: Any) -> Any:
    """Return a JSON value as one of a type; raise ValueError, TypeError or KeyError for one that does not fit it."""
    origin, inner = get_origin(kind), get_args(kind)
    array = getattr(kind, "array_type", kind)  # of a jaxtyping annotation, such as Float[Tensor, "batch k"]
    if array is Tensor:
        values = _numbers(value["values"], value["dtype"])
        return torch.tensor(values, dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    if array is np.ndarray:
        return np.array(_numbers(value["values"], value["dtype"]), dtype=value["dtype"]).reshape(value["shape"])
    if kind is pd.DataFrame:
        columns = value.items()
        return pd.DataFrame(
            {name: pd.Series(_numbers(one["values"], one["dtype"]), dtype=one["dtype"]) for name, one in columns}
        )
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{value!r} is not one of {inner}")
        return value
    if origin in (Union, UnionType):
        if value is None and type(None) in inner:
            return None
        simple = tuple(one for one in inner if one in (str, int, float, bool))
        composed = [one for one in inner if one not in simple and one is not type(None)]
        if isinstance(value, simple) and type(value) in simple:
            return value
        return decode((composed or simple)[0], value)
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list):
            raise TypeError(f"{value!r} is not a list")
        of_each = [inner[0]] * len(value) if origin is not tuple or inner[1:] == (Ellipsis,) else inner
        entries = (decode(one, entry) for one, entry in zip(of_each, value, strict=True))
        return list(entries) if origin is list else tuple(entries)
    if origin is not None and issubclass(origin, Mapping):
        return {decode(inner[0], name): decode(inner[1], entry) for name, entry in value.items()}
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        build: Any = kind
        if hasattr(kind, "_fields") and hasattr(kind, "parse"):
            return build.parse(value)
        hints = get_type_hints(kind)
        names = [one.name for one in fields(kind)] if is_dataclass(kind) else build._fields
        decoded = {name: decode(hints[name], value[name]) for name in names if name in value}
        if isinstance(kind, type) and is_dataclass(kind):
            check_shapes(kind, decoded)
        return build(**decoded)
    if kind is float:
        value = NOT_FINITE.get(value, value) if isinstance(value, str) else value
        value = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _finite(values: Sequence[Any]) -> list[Any]:
    """Return numbers with those that JSON lacks as texts."""
    if all(not isinstance(value, float) or math.isfinite(value) for value in values):
        return list(values)
    names = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return [
        names.get(value, "NaN") if isinstance(value, float) and not math.isfinite(value) else value for value in values
    ]


def _numbers(values: Sequence[Any], dtype: str) -> Sequence[Any]:
    """Return what `_finite` was called with; only numbers with a fraction may be infinite or none."""
    if "float" not in dtype:
        return values
    return [NOT_FINITE.get(value, value) if isinstance(value, str) else value for value in values]
