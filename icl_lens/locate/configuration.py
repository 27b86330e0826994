"""Configuration of a locate run: its options and all other inputs that its numbers depend on."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from icl_lens.attribution.search import check_k
from icl_lens.digest import json_digest, weights_digest
from icl_lens.locate.run_folder import RunFolder
from icl_lens.locate.stream import plan_batches
from icl_lens.models.active_edits import active_edits
from icl_lens.models.offload import ParameterMap
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, prompts_digest

PACKAGES = ("icl-lens", "transformer-lens", "transformers", "torch", "pyarrow")


def configuration(
    model: Any, batch: PromptBatch, options: Mapping[str, Any], request: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything that a run's chunks and results depend on, in manifest order.

    `request` holds the model and prompt options as given by the user, `options` the keyword arguments of the run's
    function that determine its numbers. The result also holds digests of the weights, the prompts' tokens and answers,
    and the batch plan; the labels; the device type; and package versions. Raise InputError for invalid batch sizes.
    """
    view = ModelView.of(model)
    batch_options = {name: options[name] for name in ("batch_size", "byte_budget") if name in options}
    plan = plan_batches(view, batch, **batch_options)
    # Stored only if they differ from the default, so that older folders stay valid.
    defaults = {"shared_prefix": "error"}
    return {
        **{name: value for name, value in request.items() if defaults.get(name, ...) != value},
        "weights": weights_digest(ParameterMap(model)),
        "labels": list(batch.labels),
        "prompts": prompts_digest(batch),
        # Without batch options, because chunks depend on them only through the plan below.
        **{name: value for name, value in options.items() if name not in batch_options},
        "device": view.unembed_device.type,
        "batches": len(plan),
        "plan": json_digest(plan),
        "versions": {name: version(name) for name in PACKAGES},
        **({"quantization": view.quantization} if view.quantization else {}),
        # Chunks of older versions hold what such labels have at their last tokens only.
        **({"labels_are": "all their tokens"} if _has_labels_of_several_tokens(batch) else {}),
        **({"edits": list(edits)} if (edits := active_edits(view)) else {}),
    }


def _has_labels_of_several_tokens(batch: PromptBatch) -> bool:
    return bool(batch.labels) and batch.label_token_positions.shape[-1] > 1


def prepare_run_folder(
    path: Path, model: Any, batch: PromptBatch, options: Mapping[str, Any], request: Mapping[str, Any]
) -> RunFolder:
    """Initialize the run's folder with its `configuration`; call it inside `locked_folder(path)`.

    Raise InputError if the folder holds another configuration or files without a manifest, for invalid batch sizes, and
    if `k` exceeds the number of heads.
    """
    if "k" in options:
        check_k(options["k"], len(ModelView.of(model).heads()), "heads")  # before the folder is initialized
    folder = RunFolder(path, configuration(model, batch, options, request))
    folder.initialize()
    return folder
