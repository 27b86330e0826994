"""A located run in a folder: what it was asked, and everything else that its numbers depend on."""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from icl_lens.attribution.search import check_k
from icl_lens.digest import json_digest, weights_digest
from icl_lens.interventions.effects import Method
from icl_lens.interventions.selection import Positions
from icl_lens.locate.locate import BYTE_BUDGET, plan_batches
from icl_lens.locate.run_folder import RunFolder
from icl_lens.models.offload import ParameterMap
from icl_lens.models.readout import FinalNorm
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, prompts_digest

PACKAGES = ("icl-lens", "transformer-lens", "transformers", "torch", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How prompts are planned into batches."""

    batch_size: int | None = None
    byte_budget: int = BYTE_BUDGET


@dataclass(frozen=True, kw_only=True)
class LocateOptions(BatchOptions):
    """The options of `locate_heads` that decide its numbers, by its names."""

    k: int = 20
    final_norm: FinalNorm = "frozen"
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class EffectOptions(BatchOptions):
    """The options of `locate_effects` that decide its numbers, by its names."""

    positions: Positions = "last"
    method: Method = "exact"


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What a run's model and prompts were asked for by: names, not contents. Kept in the manifest word by word."""

    model: str
    revision: str | None = None
    dtype: str = "float32"
    task: str
    n: int
    seed: int = 0
    layout: str = "order"
    demonstrations: int = 2
    path: str | None = None
    columns: str = "text,label"
    split: str = "test"
    max_words: int | None = None
    classes: str = "binary"
    template: str = "{text} : {label}"
    separator: str = " "
    prefix: str = ""
    bos: bool | None = None
    shared_prefix: str = "error"
    by: str = "increase"


def configuration(model: Any, batch: PromptBatch, options: BatchOptions, asked: RunRequest) -> dict[str, Any]:
    """Everything a run's chunks and results depend on, in the order of the manifest.

    Beside what was asked for: digests of the weights, of the prompts' tokens and answers, and of the plan of batches;
    the labels, the kind of device, and the versions of the packages that compute and write. Raises InputError for
    bad batch sizes.
    """
    view = ModelView.of(model)
    plan = plan_batches(view, batch, batch_size=options.batch_size, byte_budget=options.byte_budget)
    return {
        "model": asked.model,
        "revision": asked.revision,
        "weights": weights_digest(ParameterMap(model)),
        "task": asked.task,
        "n": asked.n,
        "seed": asked.seed,
        "layout": asked.layout,
        "demonstrations": asked.demonstrations,
        "path": asked.path,
        "columns": asked.columns,
        "split": asked.split,
        "max_words": asked.max_words,
        "classes": asked.classes,
        "labels": list(batch.labels),
        "template": asked.template,
        "separator": asked.separator,
        "prefix": asked.prefix,
        "prepend_bos": asked.bos,
        "prompts": prompts_digest(batch),
        # Batches are told by the plan that they make.
        **{name: value for name, value in asdict(options).items() if name not in asdict(BatchOptions())},
        "dtype": asked.dtype,
        "device": view.unembed_device.type,
        "batches": len(plan),
        "plan": json_digest(plan),
        "versions": {name: version(name) for name in PACKAGES},
        # Only where they differ from the default, so that folders written before they were there stay valid.
        **({"quantization": view.quantization} if view.quantization else {}),
        **({} if asked.shared_prefix == "error" else {"shared_prefix": asked.shared_prefix}),
        **({} if asked.by == "increase" else {"by": asked.by}),
        **({"against": "the other labels"} if asked.by == "contrast" else {}),
    }


def prepare_run_folder(
    path: Path, model: Any, batch: PromptBatch, options: BatchOptions, asked: RunRequest
) -> RunFolder:
    """The folder of this run, taken: give it to `locate_heads` or `locate_effects` inside `folder.opened(path)`.

    Raises InputError if the folder holds another configuration, or files without a manifest, and for a `k` that the
    model has not as many heads for.
    """
    view = ModelView.of(model)
    if isinstance(options, LocateOptions):
        check_k(options.k, view.n_layers * view.n_heads, "heads")  # before the folder is this run's
    folder = RunFolder(path, configuration(model, batch, options, asked))
    folder.initialize()
    return folder
