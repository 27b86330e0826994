"""Files of activations: what they store of the model and the batch, and the checks of what is read.

1. A file has every recorded tensor, those of the batch under names that begin with "batch.", and
   in its metadata the batch's texts, the model and the digest of its weights.
2. A file loads only with the model and the weights that it was recorded from, and if its tensors
   have the axes of their annotations and fit each other.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from icl_lens.errors import InputError, check_choice
from icl_lens.foundation.shapes import check_shapes
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_vocabulary
from icl_lens.prompts.batch_state import batch_from_state, batch_state
from icl_lens.reading.pass_values import PassValues
from icl_lens.reading.serialization import (
    damaged_error,
    read_metadata,
    read_tensors,
    write_tensors,
)

KIND, VERSION = "activations", 3
"""Kind and version of the files; the version increases when a field changes meaning."""

VALUES = tuple(field.name for field in fields(PassValues))
NOT_RECORDED = {"batch", "view", "readout", "values"}
"""Fields of activations that are restored from other entries of a file."""


def write_activations(path: str | Path, acts: dict[str, Any]) -> None:
    """Write activations, given as their fields; see `Activations.save`."""
    view, readout, batch = acts["view"], acts["readout"], acts["batch"]
    batch_tensors, batch_values = batch_state(batch)
    metadata = {
        **_model_facts(view),
        "model": view.name,
        "weights": view.fingerprint(),
        "final_norm": readout.final_norm,
        "bias": readout.bias,
        "batch": batch_values,
    }
    if acts["edits"]:
        metadata["edits"] = list(acts["edits"])
    recorded = acts | vars(acts["values"])
    tensors = {name: value for name, value in recorded.items() if isinstance(value, Tensor)}
    tensors |= {f"batch.{name}": value for name, value in batch_tensors.items()}
    write_tensors(path, KIND, VERSION, tensors, metadata)


def read_activations(path: str | Path, view: ModelView, kind: Any) -> dict[str, Any]:
    """Return the fields of the activations in a file, on the model's device; see
    `Activations.load`.

    `kind` is the class whose annotations have the axes of the tensors.
    """
    metadata = read_metadata(path, KIND, VERSION)
    facts = _model_facts(view)
    recorded = {name: metadata.get(name) for name in facts}
    if recorded != facts or metadata.get("weights") != view.fingerprint():
        text = "{architecture} of {layers} layers × {heads} heads in {dtype}"
        what = text.format(**facts)
        if recorded == facts:
            what = "with other weights (training or processing)"
        raise InputError(
            f"{str(path)!r} was recorded from {metadata.get('model')} "
            f"({text.format(**recorded)}), got model {view.name} ({what}); load the recorded "
            "model or capture again"
        )
    tensors = read_tensors(path, KIND, view.unembed_device)
    try:
        return _checked_fields(view, tensors, metadata, kind)
    except InputError as error:  # of the prompts' own checks
        raise damaged_error(path, KIND, error) from error
    except (
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        IndexError,
        ArithmeticError,
    ) as error:
        raise damaged_error(path, KIND, f"{type(error).__name__}: {error}") from error


def _checked_fields(
    view: ModelView, tensors: dict[str, Tensor], metadata: dict[str, Any], kind: Any
) -> dict[str, Any]:
    """Return the fields of a file's tensors and metadata; raise an error if they do not fit each
    other.
    """
    batch_tensors, recorded, of_values = {}, {}, {}
    for name, value in tensors.items():
        if name.startswith("batch."):
            batch_tensors[name.removeprefix("batch.")] = value
        elif name in VALUES:
            of_values[name] = value
        else:
            recorded[name] = value
    batch = batch_from_state(batch_tensors, metadata["batch"])
    sizes = _sizes(view, batch)
    _check_names(recorded, kind)
    check_shapes(kind, recorded, sizes)
    check_shapes(PassValues, of_values, sizes | {"key": recorded["pattern"].shape[-1]})
    values = PassValues(**of_values)
    _check_tensors_fit(recorded, values, batch)
    check_vocabulary(view.model, batch, "batch")
    final_norm, bias = metadata["final_norm"], metadata["bias"]
    check_choice("final_norm", final_norm, ("frozen", "own"))
    readout = view.readout(recorded["resid_final"]).using(final_norm=final_norm, bias=bool(bias))
    edits = metadata.get("edits", [])
    if not isinstance(edits, list) or not all(isinstance(words, str) for words in edits):
        raise TypeError(f"edits are {edits!r}")
    return {
        "mlp_post": None,
        **recorded,
        "values": values,
        "batch": batch,
        "view": view,
        "readout": readout,
        "edits": tuple(edits),
    }


def _check_names(recorded: Mapping[str, Tensor], kind: Any) -> None:
    """Raise ValueError for tensors that are missing or no fields."""
    names = {field.name for field in fields(kind)} - NOT_RECORDED
    required = {field.name for field in fields(kind) if field.default is MISSING}
    missing = required - NOT_RECORDED - {"mlp_post"} - recorded.keys()
    unknown = recorded.keys() - names
    if unknown or missing:
        raise ValueError(f"it lacks {sorted(missing)} and has {sorted(unknown)}")


def _sizes(view: ModelView, batch: PromptBatch) -> dict[str, int]:
    """Return the sizes of the axes of recorded tensors, by name."""
    return {
        "batch": len(batch),
        "demo": batch.label_positions.shape[1],
        "layer": view.n_layers,
        "head": view.n_heads,
        "kv_head": view.n_kv_heads,
        "d_head": view.d_head,
        "d_model": view.d_model,
    }


def _check_tensors_fit(
    tensors: Mapping[str, Tensor], values: PassValues, batch: PromptBatch
) -> None:
    """Raise ValueError for recorded tensors that are not finite or do not belong to the batch."""
    for name in ("resid_pre", "attn_out", "mlp_out", "resid_final", "z", "q", "pattern"):
        if not bool(tensors[name].isfinite().all()):
            raise ValueError(f"{name} is not finite")
    if tensors["pattern"].shape[-1] <= int(batch.last.max()):
        raise ValueError(f"pattern has {tensors['pattern'].shape[-1]} keys")
    n_passes, pass_index = len(values.pass_v), values.pass_index
    if pass_index is None and n_passes != len(batch):
        raise ValueError(f"pass_v has {n_passes} passes")
    if pass_index is not None and not bool(((pass_index >= 0) & (pass_index < n_passes)).all()):
        raise ValueError("pass_index is out of range")


def _model_facts(view: ModelView) -> dict[str, str | int]:
    """Return what a file records about the model, in addition to its name and weights."""
    dtype = str(view.model.W_U.dtype).removeprefix("torch.")
    return {
        "architecture": view.architecture,
        "layers": view.n_layers,
        "heads": view.n_heads,
        "dtype": dtype,
    }
