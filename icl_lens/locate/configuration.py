"""Configuration of a locate run: its options and all other inputs that its numbers depend on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from icl_lens.attribution.search import check_k
from icl_lens.digest import json_digest, weights_digest
from icl_lens.interventions.editor import Positions
from icl_lens.interventions.effects import Method
from icl_lens.locate.run_folder import RunFolder
from icl_lens.locate.stream import BYTE_BUDGET, plan_batches
from icl_lens.models.offload import ParameterMap
from icl_lens.models.readout import FinalNorm
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, prompts_digest

PACKAGES = ("icl-lens", "transformer-lens", "transformers", "torch", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Options of batch planning."""

    batch_size: int | None = None
    byte_budget: int = BYTE_BUDGET


@dataclass(frozen=True, kw_only=True)
class LocateOptions(BatchOptions):
    """Arguments of `locate_heads` that determine its numbers."""

    k: int = 20
    final_norm: FinalNorm = "frozen"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class EffectOptions(BatchOptions):
    """Arguments of `locate_effects` that determine its numbers."""

    positions: Positions = "all"
    method: Method = "exact"


@dataclass(frozen=True, kw_only=True)
class ScorePartsOptions(BatchOptions):
    """Arguments of `mean_score_parts` that determine its numbers."""

    heads: tuple[str, ...]
    n_strongest: int = 6


@dataclass(frozen=True, kw_only=True)
class CircuitOptions(BatchOptions):
    """Arguments of `locate_circuit` that determine its numbers; its folder's `batch` has the prompts of both halves."""

    heads: tuple[str, ...]
    n_edges: int = 30
    n_random: int = 20
    seed: int = 0


def configuration(model: Any, batch: PromptBatch, options: BatchOptions, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that a run's chunks and results depend on, in manifest order.

    In addition to `request`, the model and prompt options as given by the user: digests of the weights, of the prompts'
    tokens and answers, and of the batch plan; the labels; the device type; and package versions. Raise InputError for
    invalid batch sizes.
    """
    view = ModelView.of(model)
    plan = plan_batches(view, batch, batch_size=options.batch_size, byte_budget=options.byte_budget)
    # Stored only if they differ from the default, so that older folders stay valid.
    defaults = {"shared_prefix": "error", "by": "increase"}
    return {
        **{name: value for name, value in request.items() if defaults.get(name, ...) != value},
        "weights": weights_digest(ParameterMap(model)),
        "labels": list(batch.labels),
        "prompts": prompts_digest(batch),
        # The plan below represents the batch options.
        **{name: value for name, value in asdict(options).items() if name not in asdict(BatchOptions())},
        "device": view.unembed_device.type,
        "batches": len(plan),
        "plan": json_digest(plan),
        "versions": {name: version(name) for name in PACKAGES},
        **({"quantization": view.quantization} if view.quantization else {}),
        **({"against": "the other labels"} if request["by"] == "contrast" else {}),
    }


def prepare_run_folder(
    path: Path, model: Any, batch: PromptBatch, options: BatchOptions, request: Mapping[str, Any]
) -> RunFolder:
    """Initialize the run's folder for `locate_heads` or `locate_effects`; call it inside `locked_folder(path)`.

    Raise InputError if the folder holds another configuration or files without a manifest, and if `k` exceeds the
    number of heads.
    """
    view = ModelView.of(model)
    if isinstance(options, LocateOptions):
        check_k(options.k, view.n_layers * view.n_heads, "heads")  # before the folder is initialized
    folder = RunFolder(path, configuration(model, batch, options, request))
    folder.initialize()
    return folder
