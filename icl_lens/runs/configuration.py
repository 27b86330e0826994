"""Configuration of a run: its options and all other inputs that its numbers depend on."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from icl_lens.foundation.digest import json_digest, weights_digest
from icl_lens.models.active_edits import active_edits
from icl_lens.models.passes.offload import ParameterMap
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, prompts_digest
from icl_lens.runs.folder import FORMAT, FORMAT_NAME

PACKAGES = ("icl-lens", "transformer-lens", "transformers", "torch", "pyarrow")


def configuration(
    model: Any,
    batch: PromptBatch,
    plan: list[list[int]],
    options: Mapping[str, Any],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Return everything that a run's chunks and results depend on, in manifest order.

    `about` is what the user says about the run, such as the names of model and task; `options`
    determine its numbers. The result also holds the format of chunks; digests of the weights, the
    prompts' tokens and answers, and the batch plan; the labels; the device type; and package
    versions.
    """
    view = ModelView.of(model)
    optional: dict[str, Any] = {}
    if view.quantization:
        optional["quantization"] = view.quantization
    if batch.labels and batch.all_label_positions.shape[-1] > 1:
        # Chunks of older versions hold what such labels have at their last tokens only.
        optional["labels_are"] = "all their tokens"
    if edits := active_edits(view):
        optional["edits"] = list(edits)
    return {
        FORMAT_NAME: FORMAT,
        **about,
        "weights": weights_digest(ParameterMap(model)),
        "labels": list(batch.labels),
        "prompts": prompts_digest(batch),
        **options,
        "device": view.unembed_device.type,
        "batches": len(plan),
        "plan": json_digest(plan),
        "versions": {name: version(name) for name in PACKAGES},
        **optional,
    }


def tensors_digest(**tensors: Tensor | None) -> dict[str, str]:
    """Return name -> digest of the tensors that are not None, as options of a configuration."""
    digests = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            digests[name] = json_digest(torch.as_tensor(tensor).tolist())
    return digests
