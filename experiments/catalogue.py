"""All findings, in the order of their pages, and the models and tasks that the documentation shows."""

from collections.abc import Iterator, Sequence
from importlib import import_module

from experiments.bundled_models import SEEDS
from experiments.framework.finding import Finding
from experiments.framework.run import Cell
from experiments.framework.tasks import LINES, PAPER_TASKS, WORDS, Task
from icl_lens.errors import InputError

IDS = (
    "behavior",
    "two-towers",
    "ablation",
    "circuit",
    "location",
    "values",
    "label-attention",
    "shared-heads",
    "majority-bias",
    "recency-bias",
    "information-flow",
)
"""One module each: "label-attention" is experiments/findings/label_attention.py, whose FINDING describes it."""

REAL_MODEL = "smollm2-135m"
REAL_TASKS = (
    Task("animal-country, A/B", "animal-country", ("A", "B"), 4, LINES),
    Task("joy-number, foo/bar", "joy-number", demonstrations=4, template=LINES, path=str(WORDS)),
    Task("animal-country, animal/country", "animal-country", ("animal", "country"), 2, LINES),
)
"""Tasks that the real model does, chosen by accuracy alone from the table of tasks in docs/bundled.md."""
SMALL_MODELS = ("icl-mini", "icl-mini-llama", "icl-mini-gptj")


def find(finding_id: str) -> Finding:
    """Return the finding with this id; raise InputError if there is none."""
    if finding_id not in IDS:
        raise InputError(f"finding must be one of {', '.join(map(repr, IDS))}, got {finding_id!r}")
    return import_module(f"experiments.findings.{finding_id.replace('-', '_')}").FINDING


def published_cells(findings: Sequence[Finding]) -> Iterator[Cell]:
    """Return every cell that the documentation shows, model by model so that each is loaded once."""
    for task in REAL_TASKS:
        yield from (Cell(finding, REAL_MODEL, task, 200, REAL_MODEL) for finding in findings)
    for model in SMALL_MODELS:
        for task in PAPER_TASKS:
            yield from (Cell(finding, model, task, 1000, model) for finding in findings)
        for folder in sorted(SEEDS.glob(f"{model}-[0-9]")):
            seed = int(folder.name.rpartition("-")[2])
            for task in PAPER_TASKS:
                yield from (Cell(finding, str(folder), task, 300, model, training_seed=seed) for finding in findings)
