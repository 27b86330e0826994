"""The findings on models whose circuit is known, and how well each location method recovers it.

A finding may only be believed if it finds two towers where they are planted and none where the same task is solved
otherwise. `python -m experiments ground-truth` builds the planted models, measures every finding on them, and writes
docs/results/ground-truth.md.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import icl_lens as il
from experiments.framework.finding import Finding, Measure, rows_from_json
from experiments.framework.locating import METHODS, best_heads
from experiments.framework.pages import outcome
from experiments.framework.run import Cell, load_cells
from experiments.framework.study import Study
from experiments.framework.tasks import Task
from experiments.planted import Kind, Planted, build
from icl_lens.files import write_text

KINDS: dict[Kind, str] = {
    "two-tower": "four heads compare the query's category with those stored at labels, and copy the label",
    "compare-copy": "one head compares, three others copy the label that it picked",
    "last-label": "four heads copy the label shown last",
    "majority": "four heads copy all labels alike",
    "lookup": "an FFN says the name of the query's category; no label is read",
    "untrained": "random weights",
}
ANSWERING = ("two-tower", "comparer", "copier")
"""Roles of heads that find the answer among the labels."""
SEEDS = range(3)
DATA = "animal-country"


def planted_models(folder: Path, seeds: Sequence[int] = SEEDS) -> dict[tuple[Kind, int], Planted]:
    """Build every kind of model, with each seed, in folders below `folder`."""
    return {(kind, seed): build(kind, folder / f"{kind}-{seed}", seed=seed) for kind in KINDS for seed in seeds}


def task_of(planted: Planted) -> Task:
    """Return the task that a planted model's words are of."""
    return Task(f"{DATA}, foo/bar", DATA, path=str(planted.words))


def cells(models: Mapping[tuple[Kind, int], Planted], findings: Sequence[Finding], n: int) -> Iterator[Cell]:
    """Return every finding on every kind of model, with seed 0."""
    for (kind, seed), planted in models.items():
        if seed == 0:
            task = task_of(planted)
            yield from (Cell(one, str(planted.folder), task, n, f"planted-{kind}") for one in findings)


def recovery(planted: Planted, n: int, load: Callable[[str], Any] = il.load_model) -> dict[str, float]:
    """Return, for each location method, the share of the planted heads among as many found ones.

    As many heads are asked for as were planted, so precision and recall are the same number.
    """
    truth = {head for role in ANSWERING for head in planted.heads.get(role, ())}  # pyright: ignore[reportArgumentType]
    study = Study(load(str(planted.folder)), task_of(planted), n)
    locating = study.halves()[0]
    found = {name: best_heads(method.score(study, locating), len(truth)) for name, method in METHODS.items()}
    return {name: len(truth & set(heads)) / len(truth) for name, heads in found.items()}


def write_page(path: Path, results: Path, findings: Sequence[Finding], recovered: Mapping[str, Any]) -> None:
    """Write the page from stored cells and the recovery of every method."""
    write_text(path, page(results, findings, recovered))


def page(results: Path, findings: Sequence[Finding], recovered: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    stored: dict[tuple[str, str], str] = {}
    for finding, cell in load_cells(results, findings):
        kind = cell["configuration"]["model"].removeprefix("planted-")
        row = next((row for row in rows_from_json(cell) if row.measure == finding.main.name), None)
        if kind in KINDS and row is not None:
            stored[finding.id, kind] = _cell(row, finding.main)
    kinds = list(KINDS)
    lines = [f"| finding | {' | '.join(kinds)} |", f"| --- |{' --- |' * len(kinds)}"]
    for finding in findings:
        values = [stored.get((finding.id, kind), "") for kind in kinds]
        lines.append(f"| [{finding.title}]({finding.id}.md) ({finding.main.unit}) | {' | '.join(values)} |")
    methods = [f"| method | {' | '.join(recovered)} |", f"| --- |{' ---: |' * len(recovered)}"]
    for name, method in METHODS.items():
        shares = [f"{sum(one[name] for one in some) / len(some):.2f}" for some in recovered.values()]
        methods.append(f"| {method.name} | {' | '.join(shares)} |")
    parts = [
        "# Ground truth: models whose circuit is planted",
        "The weights of these models are written by hand, among noise heads that write at random and two decoys that "
        "raise every label alike. The first two kinds solve the task with two towers; the others answer without "
        "comparing anything, and must not show them. **Bold**: the interval is above the control.",
        "\n".join(f"- `{kind}`: {words}." for kind, words in KINDS.items()),
        "## Does each finding see what was planted?",
        "Quantity against control of each finding's main measure, with the 95 % interval of their difference.",
        "\n".join(lines),
        "## Does each location method recover the planted heads?",
        "Share of the planted heads among as many found ones: precision and recall at the planted number, mean of "
        f"{len(next(iter(recovered.values())))} seeds. Decoys fool the paper's ranking by increase.",
        "\n".join(methods),
        "Made by `python -m experiments ground-truth`.",
    ]
    return "\n\n".join(parts) + "\n"


def _cell(row: Any, measure: Measure) -> str:
    if outcome(row) == "not applicable":
        return "not applicable"
    numbers = (value * measure.scale for value in (row.quantity, row.control, row.low, row.high))
    quantity, control, low, high = (f"{value:.{measure.digits}f}".replace("-", "−") for value in numbers)
    text = f"{quantity} / {control} [{low}, {high}]"
    return f"**{text}**" if outcome(row) == "above" else text


def measure_recovery(
    models: Mapping[tuple[Kind, int], Planted], path: Path, n: int, report: Callable[[str], None]
) -> dict[str, list[dict[str, float]]]:
    """Return the recovery of all methods by kind, from `path` where it has been measured."""
    found: dict[str, list[dict[str, float]]] = {}
    kept = json.loads(path.read_text()) if path.is_file() else {}
    for (kind, seed), planted in models.items():
        if not any(role in planted.heads for role in ANSWERING):
            continue
        key = f"{kind}, seed {seed}, n {n}"
        if key not in kept:
            kept[key] = recovery(planted, n)
            write_text(path, json.dumps(kept, indent=1) + "\n")
            report(f"{key}: {kept[key]}")
        found.setdefault(kind, []).append(kept[key])
    return found
