"""Which tasks a model can do: accuracy by task, template, number of demonstrations, and layout.

`python -m experiments tasks` measures the table in docs/bundled.md, from which experiments choose their tasks. Rows are
stored as they are measured, so that an interrupted run resumes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

import icl_lens as il
from experiments.framework import markdown
from experiments.framework.estimate import compare
from experiments.framework.study import clusters_of
from experiments.framework.tasks import ARROWS, LINES, PAPER, QUESTIONS, WORDS, Layout, Task
from icl_lens.files import write_text
from icl_lens.metrics import is_correct, recent_label

TEMPLATES = {"lines": LINES, "paper": PAPER, "arrows": ARROWS, "questions": QUESTIONS}
"""Lines: "cat : foo", one per line. Paper: the same in one line. Arrows: "cat -> foo". Questions: "Input: cat"."""
DEMONSTRATIONS = (1, 2, 4, 8, 16)
PASS_PROMPTS = 20
"""Prompts per forward pass."""
_WORDS = str(WORDS)

TASKS = (
    Task("animal-country, foo/bar", "animal-country"),
    Task("animal-country, yes/no", "animal-country", ("yes", "no")),
    Task("animal-country, A/B", "animal-country", ("A", "B")),
    Task("animal-country, animal/country", "animal-country", ("animal", "country")),
    Task("sentiment-number, foo/bar", "sentiment-number"),
    Task("sentiment-number, sentiment/number", "sentiment-number", ("sentiment", "number")),
    Task("joy-number, foo/bar", "joy-number", path=_WORDS),
    Task("positive-negative, foo/bar", "positive-negative", path=_WORDS),
    Task("positive-negative, positive/negative", "positive-negative", ("positive", "negative"), path=_WORDS),
    Task("fruit-vehicle, foo/bar", "fruit-vehicle"),
    Task("fruit-vehicle, fruit/vehicle", "fruit-vehicle", ("fruit", "vehicle")),
    Task("color-job, foo/bar", "color-job"),
    Task("city-instrument, foo/bar", "city-instrument"),
    Task("sport-disease, foo/bar", "sport-disease"),
)


def _common() -> Iterator[Task]:
    """Yield the tasks of the table that compares models: the paper's words and sentences, one example a line."""
    for data, path in (("sentiment-number", None), ("animal-country", None), ("joy-number", _WORDS)):
        for labels in (("foo", "bar"), ("A", "B")):
            yield Task(f"{data}, {'/'.join(labels)}", data, labels, 4, LINES, path)
    for name, data, counts in SENTENCES:
        for labels in (("foo", "bar"), ("A", "B")):
            for count in counts:
                yield Task(f"{name}, {'/'.join(labels)}", data, labels, count, LINES)


SENTENCES = (("TREC", "trec", (4, 8)), ("SST-2", "sst2", (4,)), ("AG News", "agnews", (1, 4)), ("ETHOS", "ethos", (4,)))
"""Name, name for `load_task`, and numbers of demonstrations per class."""
COMMON = tuple(_common())


@dataclass(frozen=True)
class Setting:
    """One row of the table: a task as it is written, in one layout or with labels exchanged."""

    task: Task
    template: str
    layout: Layout | Literal["exchanged"] = "random"

    @property
    def key(self) -> str:
        return f"{self.task.name}, {self.template}, {self.task.demonstrations}, {self.layout}"


def settings() -> Iterator[Setting]:
    """Yield the common tasks, then each task at 1 to 16 demonstrations per class, and at 4 by layout and template."""
    for task in COMMON:
        yield Setting(task, "lines")
    for task in TASKS:
        for count in DEMONSTRATIONS:
            yield Setting(replace(task, demonstrations=count, template=LINES), "lines")
        four = replace(task, demonstrations=4, template=LINES)
        for layout in ("order", "reorder", "exchanged"):
            yield Setting(four, "lines", layout)
        for name in ("paper", "arrows", "questions"):
            yield Setting(replace(four, template=TEMPLATES[name]), name)


def measure(model: Any, setting: Setting, n: int, *, data: str | None = None) -> dict[str, Any]:
    """Return accuracy between the labels with its interval, and how often the last demonstration's label is chosen.

    `data` is a folder with copies of the sentence datasets; without it, they come from the Hub.
    """
    task = setting.task
    if data is not None and task.data in [name for _, name, _ in SENTENCES]:
        task = replace(task, path=data)
    exchanged = setting.layout == "exchanged"
    prompts = task.prompts(n, layout="random" if setting.layout == "exchanged" else setting.layout, exchanged=exchanged)
    batch = il.tokenize(model, prompts, template=task.template, labels=task.labels)
    log_probs = torch.cat([il.score(model, piece).cpu() for piece in batch.split(PASS_PROMPTS)])
    correct = is_correct(log_probs, batch.answer).double().numpy()
    found = compare(correct, 0.5, clusters_of(batch), bounds=(0, 1))
    return {
        "task": task.name,
        "template": setting.template,
        "demonstrations": task.demonstrations,
        "layout": setting.layout,
        "accuracy": found.quantity,
        "low": 0.5 + found.low,
        "high": 0.5 + found.high,
        "says_last_label": float((log_probs.argmax(-1) == recent_label(batch.label_index)).double().mean()),
        "n": n,
    }


def run(
    model: Any, name: str, path: Path, n: int, report: Callable[[str], None] = print, *, data: str | None = None
) -> None:
    """Measure every setting that `path` lacks for the model of this name."""
    rows = read(path)
    done = {_key(row) for row in rows if row["model"] == name}
    for setting in settings():
        if setting.key in done:
            continue
        rows.append({"model": name} | measure(model, setting, n, data=data))
        done.add(setting.key)
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        report(f"{setting.key}: {rows[-1]['accuracy']:.0%}")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows measured so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _key(row: Mapping[str, Any]) -> str:
    return f"{row['task']}, {row['template']}, {row['demonstrations']}, {row['layout']}"


def tables(rows: Sequence[Mapping[str, Any]], model: str) -> str:
    """Return two tables of one model, a line per task: accuracy (%) by demonstrations, and by layout and template."""
    found = {_key(row): row for row in rows if row["model"] == model}

    def table(columns: Mapping[str, str]) -> str:
        lines = [
            [task.name, *(_accuracy(found.get(f"{task.name}, {key}")) for key in columns.values())] for task in TASKS
        ]
        return markdown.table(["task", *columns], lines)

    counts = {f"{count} per class": f"lines, {count}, random" for count in DEMONSTRATIONS}
    others = {
        "random order": "lines, 4, random",
        "query's class last": "lines, 4, order",
        "query's class first": "lines, 4, reorder",
        "labels exchanged": "lines, 4, exchanged",
        "in one line": "paper, 4, random",
        "arrows": "arrows, 4, random",
        "questions": "questions, 4, random",
    }
    return f"""\
Accuracy (%) by the number of demonstrations, in balanced random order, one demonstration per line:

{table(counts)}

With four demonstrations per class, by layout and template:

{table(others)}
"""


def comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a line per common task and a column per model: accuracy in balanced random order, %."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    found = {(row["model"], _key(row)): row for row in rows}
    lines = []
    for task in COMMON:
        of_models = [found.get((name, Setting(task, "lines").key)) for name in models]
        if any(of_models):
            lines.append([task.name, str(task.demonstrations), *map(_accuracy, of_models)])
    return markdown.table(["task", "per class", *models], lines) + "\n"


def _accuracy(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    percent = (100 * min(1.0, max(0.0, row[key])) for key in ("accuracy", "low", "high"))
    return "{:.0f} ({:.0f}–{:.0f})".format(*percent)
