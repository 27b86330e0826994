"""Run findings on models and tasks: one file per cell, so that an interrupted run resumes where it stopped.

A cell is one finding on one model and task. Its file is written when it is complete, and the same command computes only
what is missing. Several processes started on the same folder, on any number of machines that share it, divide the cells
among themselves: each takes a lock on the cell it computes.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import icl_lens as il
from experiments.framework.finding import Finding, Measured, Row, to_json
from experiments.framework.study import Study
from experiments.framework.tasks import Task
from icl_lens.digest import json_digest
from icl_lens.errors import InputError
from icl_lens.files import write_text

PACKAGES = ("torch", "transformers", "transformer-lens")


@dataclass(frozen=True)
class Cell:
    """A finding on a model and a task, with `n` prompts per half. `model` is the name or folder that is loaded."""

    finding: Finding
    model: str
    task: Task
    n: int
    name: str
    """The model's name in tables and folders."""
    training_seed: int = 0
    """Distinguishes models of one recipe."""
    n_heads: int | None = None
    """How many heads are located; see `Study`."""

    def path(self, folder: Path) -> Path:
        model = self.name if not self.training_seed else f"{self.name}-seed-{self.training_seed}"
        return folder / _slug(model) / _slug(self.task.name) / f"{self.finding.id}.json"

    def configuration(self) -> dict[str, Any]:
        """Return what determines the cell's numbers; a file with another configuration is computed again."""
        return {
            "finding": self.finding.id,
            "model": self.name,
            "training_seed": self.training_seed,
            "task": asdict(self.task) | {"path": _word_list_name(self.task)},
            "prompts": _drawn_digest(self.task, self.n),
            "n": self.n,
            **({} if self.n_heads is None else {"n_heads": self.n_heads}),
        }

    def is_done(self, folder: Path) -> bool:
        """Return whether the cell's file exists and has this configuration."""
        try:
            stored = json.loads(self.path(folder).read_text(encoding="utf-8"))["configuration"]
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: it is computed again
            return False
        return stored == json.loads(json.dumps(self.configuration()))


def _word_list_name(task: Task) -> str | None:
    """Return the file name of a word list; None for datasets, which the prompts' digest identifies."""
    return Path(task.path).name if task.path is not None and task.path.endswith(".json") else None


@cache
def _drawn_digest(task: Task, n: int) -> str:
    """Return a digest of the prompts that a study draws: their texts, labels, order and answers."""
    prompts = task.prompts(3 * n)
    return json_digest([[[*map(astuple, one.demonstrations)], one.query, one.answer, one.labels] for one in prompts])


def run(
    cells: Iterable[Cell],
    folder: Path,
    *,
    load: Callable[[str], Any] = il.load_model,
    report: Callable[[str], None] = print,
) -> int:
    """Compute the cells that are missing in `folder`, in order; return how many were computed.

    A model is loaded once for consecutive cells that share it, and what its findings share is computed once per task. A
    finding that a model or task does not allow is stored as not applicable, with the reason.
    """
    done = 0
    model: tuple[str, Any] | None = None
    study: Study | None = None
    for cell in cells:
        with _claimed(cell, folder) as mine:
            if not mine:
                continue
            if model is None or model[0] != cell.model:
                model, study = (cell.model, load(cell.model)), None
            if study is None or (study.task, study.n, study.n_heads) != (cell.task, cell.n, cell.n_heads):
                study = Study(model[1], cell.task, cell.n, n_heads=cell.n_heads)
            started = time.perf_counter()
            measured = measure(cell.finding, study)
            seconds = time.perf_counter() - started
            store(cell, study, measured, folder, seconds)
            done += 1
            report(f"{cell.path(folder).relative_to(folder)}  {seconds:.0f} s  {summary(cell.finding, measured)}")
    return done


def measure(finding: Finding, study: Study) -> Measured:
    """Measure a finding; what the model or task does not allow becomes a row with the reason."""
    try:
        if reason := finding.reason_not_applicable(study):
            raise InputError(reason)
        return finding.measure(study)
    except InputError as error:
        logging.getLogger("icl_lens").info("%s does not apply: %s", finding.id, error)
        return Measured([Row.from_result(finding.main.name, str(error))])


def store(cell: Cell, study: Study, measured: Measured, folder: Path, seconds: float) -> None:
    """Write the cell's file: its configuration, rows and details, the located heads, and versions."""
    path = cell.path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "configuration": cell.configuration(),
        "quantization": study.view.quantization,
        "located": {ranked.ranking: list(map(str, ranked.located)) for ranked in study.by_ranking()},
        "seconds": round(seconds, 1),
        "versions": {name: version(name) for name in PACKAGES},
        **to_json(measured),
    }
    write_text(path, json.dumps(content, indent=1) + "\n")


def summary(finding: Finding, measured: Measured) -> str:
    """Return the main measure's first row in a few words."""
    main = finding.main
    for row in measured.rows:
        if row.measure == main.name:
            if row.quantity != row.quantity:
                return f"not applicable: {row.note}"
            numbers = (row.quantity, row.control, row.low, row.high)
            quantity, control, low, high = (f"{number * main.scale:.{main.digits}f}" for number in numbers)
            return f"{quantity} vs. {control}, difference {low} … {high} {main.unit}"
    return ""


@contextmanager
def _claimed(cell: Cell, folder: Path) -> Iterator[bool]:
    """Lock a cell that is still to be computed; yield False if it is done or another process is computing it."""
    path = cell.path(folder).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, timeout=0)
    with suppress(Timeout):
        if not cell.is_done(folder):
            lock.acquire()
    try:
        yield lock.is_locked and not cell.is_done(folder)
    finally:
        if lock.is_locked:
            lock.release()
            path.unlink(missing_ok=True)


def load_cells(folder: Path, findings: Sequence[Finding]) -> Iterator[tuple[Finding, dict[str, Any]]]:
    """Return every stored cell of the findings, in the order of the findings and of the folder's names."""
    for finding in findings:
        for path in sorted(folder.glob(f"*/*/{finding.id}.json")):
            yield finding, json.loads(path.read_text(encoding="utf-8"))


def _slug(name: str) -> str:
    """Return a name that is valid as a folder's name."""
    clean = "".join(c if c.isalnum() or c in "-_." else "-" for c in name.strip("/").replace("/", "--"))
    return clean.strip(".-") or "model"
