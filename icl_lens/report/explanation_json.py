"""Save and load explanations as versioned JSON."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from icl_lens.errors import InputError
from icl_lens.files import write_text
from icl_lens.models.head import Head
from icl_lens.report.findings import Findings

FORMAT, VERSION = "icl-lens explanation", 3
"""Header of a file; the version increases when files of earlier versions can no longer be read correctly."""

Kind = TypeVar("Kind", bound=Findings)


def save(explanation: Findings, path: str | Path) -> None:
    """Write an explanation as JSON atomically. Raise InputError if the folder is not writable."""
    state = {"format": FORMAT, "version": VERSION, **explanation.to_dict()}
    write_text(path, json.dumps(state, indent=1) + "\n")


def load(kind: type[Kind], path: str | Path) -> Kind:
    """Load an explanation. Raise InputError for a file that is missing, damaged, or of another kind or version."""
    path = Path(path)
    remedy = "pass a file written by Explanation.save or icl-lens explain --json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}; {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(f"{str(path)!r} is not a saved explanation; {remedy}")
    if state.get("version") != VERSION:
        raise InputError(
            f"version of {str(path)!r} must be {VERSION}, got {state.get('version')}; load it with the icl-lens "
            "version that it lists under versions, or rerun explain"
        )
    try:
        state["versions"] = list((state.get("versions") or {}).items())
        found = _restored(kind, state)
        _check_lengths(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{str(path)!r} is damaged ({type(error).__name__}: {error}); {remedy}") from error
    return found


def _check_lengths(found: Findings) -> None:
    """Raise ValueError if lists have inconsistent lengths."""
    layers, contrasts = len(found.layer_attn), len(found.layer_attn_contrast)
    for name, wanted in {
        "layer_ffn": layers,
        "head_increases": layers,
        "layer_attn_contrast": layers if contrasts else 0,
        "layer_ffn_contrast": contrasts,
        "label_log_probs": len(found.labels),
        "demonstration_labels": len(found.label_positions),
        "label_ranges": len(found.label_positions),
    }.items():
        if len(getattr(found, name)) != wanted:
            raise ValueError(f"{name} must have {wanted} entries, got {len(getattr(found, name))}")
    demos = len(found.label_positions)
    for report in found.heads:
        list(found.words_of(report))  # raises ValueError for inconsistent lengths
        sizes = [len(row) for row in report.similarity]
        if sizes and (sizes != [demos] * (demos + 1) or len(found.prediction_positions) != demos):
            raise ValueError(f"similarity of {report.head} does not match {demos} demonstrations")
    last = max((*found.label_at, *found.label_positions, *found.attended_positions), default=-1)
    if last >= len(found.tokens):
        raise ValueError(f"position {last} is out of range for {len(found.tokens)} tokens")


def _restored(kind: Any, value: Any) -> Any:
    """Convert a JSON value to a type: lists to tuples, names to heads, objects to dataclasses."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Head:
        return Head.parse(value)
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{value!r} is not one of {inner}")
        return value
    if origin in (Union, UnionType):
        if value is None and type(None) in inner:
            return None
        composed = [one for one in inner if is_dataclass(one) or get_origin(one) in (tuple, Mapping)]
        simple = [one for one in inner if one not in composed]
        return value if isinstance(value, tuple(simple)) and not composed else _restored((composed or simple)[0], value)
    if origin is tuple:
        of_each = [inner[0]] * len(value) if inner[1:] == (Ellipsis,) else inner
        return tuple(_restored(one, entry) for one, entry in zip(of_each, value, strict=True))
    if origin is Mapping:
        return {_restored(inner[0], key): _restored(inner[1], entry) for key, entry in value.items()}
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [one.name for one in fields(kind) if one.name in value]
        build: Any = kind
        return build(**{name: _restored(hints[name], value[name]) for name in names})
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value
