"""All findings, in the order of their pages, and the models and tasks that the documentation shows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from experiments.framework.finding import Finding
from experiments.framework.models import QWEN, REAL_MODELS, SMOLLM2
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
    "text-to-label",
)
"""One module each: "label-attention" is experiments/findings/label_attention.py, whose FINDING describes it."""

LEADING = ("behavior", "two-towers", "ablation", "circuit", "location")
"""The findings that are measured on every real model, and on small models of other training seeds."""
ON_REAL = (*LEADING, "text-to-label")
"""The findings that are measured on every real model."""

AB, FOO_BAR = ("A", "B"), ("foo", "bar")
WORD_TASKS = {
    SMOLLM2: (
        Task("animal-country, A/B", "animal-country", AB, 4, LINES),
        Task("joy-number, foo/bar", "joy-number", FOO_BAR, 4, LINES, str(WORDS)),
        Task("animal-country, animal/country", "animal-country", ("animal", "country"), 2, LINES),
    ),
    QWEN: (
        Task("sentiment-number, foo/bar", "sentiment-number", FOO_BAR, 4, LINES),
        Task("animal-country, foo/bar", "animal-country", FOO_BAR, 4, LINES),
    ),
}
"""Tasks that each real model does, chosen by accuracy alone from the tables in docs/bundled.md."""
SENTENCE_TASKS = {QWEN: (Task("TREC, A/B", "trec", AB, 4, LINES),)}
SENTENCE_FINDINGS = ("behavior", "two-towers", "ablation")
"""The findings on sentences, whose prompts are several times as long."""
N_REAL, N_SMALL = 100, 200
"""Prompts per half, of real and of small models."""
SHARED, N_SHARED = "shared-heads", 40
"""A finding on many tasks at once, which is measured with each real model's first task, and its prompts per half."""
SMALL_MODELS = ("icl-mini", "icl-mini-llama", "icl-mini-gptj")


def find(finding_id: str) -> Finding:
    """Return the finding with this id; raise InputError if there is none."""
    if finding_id not in IDS:
        raise InputError(f"finding must be one of {', '.join(map(repr, IDS))}, got {finding_id!r}")
    return import_module(f"experiments.findings.{finding_id.replace('-', '_')}").FINDING


def published_cells(findings: Sequence[Finding], *, data: Path | None = None) -> Iterator[Cell]:
    """Return every cell that the documentation shows, model by model so that each is loaded once.

    `data` is a folder with copies of the sentence datasets; without it, they come from the Hub.
    """
    for name, source in REAL_MODELS.items():
        chosen = [one for one in findings if one.id != SHARED and (name == SMOLLM2 or one.id in ON_REAL)]
        yield from (Cell(one, source, WORD_TASKS[name][0], N_SHARED, name) for one in findings if one.id == SHARED)
        tasks = [(task, chosen) for task in WORD_TASKS[name]]
        on_sentences = [one for one in findings if one.id in SENTENCE_FINDINGS]
        path = None if data is None else str(data)
        tasks += [(replace(task, path=path), on_sentences) for task in SENTENCE_TASKS.get(name, ())]
        yield from (Cell(one, source, task, N_REAL, name) for task, some in tasks for one in some)
    for model in SMALL_MODELS:
        for task in PAPER_TASKS:
            yield from (Cell(finding, model, task, N_SMALL, model) for finding in findings)
