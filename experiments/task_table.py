"""Which tasks a model can do: accuracy by task, template, number of demonstrations, and layout.

`python experiments/task_table.py --model smollm2-135m` measures the table in docs/bundled.md, from
which experiments choose their tasks. Rows are
stored as they are measured, so that an interrupted run resumes.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from markdown_table import table as markdown_table

import icl_lens as il

ROWS = Path(__file__).with_suffix(".jsonl")
PAPER, LINES = il.Template(), il.Template(separator="\n")
ARROWS = il.Template("{text} -> {label}", "{text} ->", "\n")
QUESTIONS = il.Template("Input: {text}\nLabel: {label}", "Input: {text}\nLabel:", "\n\n")
TEMPLATES = {"lines": LINES, "paper": PAPER, "arrows": ARROWS, "questions": QUESTIONS}
"""Lines: "cat : foo", one per line. Paper: the same in one line. Arrows: "cat -> foo". Questions:
"Input: cat"."""
DEMONSTRATIONS = (1, 2, 4, 8, 16)
PASS_PROMPTS = 20
"""Prompts per forward pass."""
_WORDS = str(Path(__file__).with_name("words.json"))


@dataclass(frozen=True)
class Task:
    """Two classes of texts and their labels, with the way prompts show them."""

    name: str
    data: str
    labels: tuple[str, str] = ("foo", "bar")
    demonstrations: int = 2
    template: il.Template = PAPER
    path: str | None = None


TASKS = (
    Task("animal-country, foo/bar", "animal-country"),
    Task("animal-country, yes/no", "animal-country", ("yes", "no")),
    Task("animal-country, A/B", "animal-country", ("A", "B")),
    Task("animal-country, animal/country", "animal-country", ("animal", "country")),
    Task("sentiment-number, foo/bar", "sentiment-number"),
    Task("sentiment-number, sentiment/number", "sentiment-number", ("sentiment", "number")),
    Task("joy-number, foo/bar", "joy-number", path=_WORDS),
    Task("positive-negative, foo/bar", "positive-negative", path=_WORDS),
    Task(
        "positive-negative, positive/negative",
        "positive-negative",
        ("positive", "negative"),
        path=_WORDS,
    ),
    Task("fruit-vehicle, foo/bar", "fruit-vehicle"),
    Task("fruit-vehicle, fruit/vehicle", "fruit-vehicle", ("fruit", "vehicle")),
    Task("color-job, foo/bar", "color-job"),
    Task("city-instrument, foo/bar", "city-instrument"),
    Task("sport-disease, foo/bar", "sport-disease"),
)


def _common() -> Iterator[Task]:
    """Yield the tasks of the table that compares models: the paper's words and sentences, one
    example a line."""
    for data, path in (
        ("sentiment-number", None),
        ("animal-country", None),
        ("joy-number", _WORDS),
    ):
        for labels in (("foo", "bar"), ("A", "B")):
            yield Task(f"{data}, {'/'.join(labels)}", data, labels, 4, LINES, path)
    for name, data, counts in SENTENCES:
        for labels in (("foo", "bar"), ("A", "B")):
            for count in counts:
                yield Task(f"{name}, {'/'.join(labels)}", data, labels, count, LINES)


SENTENCES = (
    ("TREC", "trec", (4, 8)),
    ("SST-2", "sst2", (4,)),
    ("AG News", "agnews", (1, 4)),
    ("ETHOS", "ethos", (4,)),
)
"""Name, name for `load_task`, and numbers of demonstrations per class."""
COMMON = tuple(_common())


@dataclass(frozen=True)
class Setting:
    """One row of the table: a task as it is written, in one layout or with labels exchanged."""

    task: Task
    template: str
    layout: Literal["random", "order", "reorder", "exchanged"] = "random"

    @property
    def key(self) -> str:
        return f"{self.task.name}, {self.template}, {self.task.demonstrations}, {self.layout}"


def settings() -> Iterator[Setting]:
    """Yield the common tasks, then each task at 1 to 16 demonstrations per class, and at 4 by
    layout and template."""
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
    """Return accuracy between the labels with its interval, and how often the last demonstration's
    label is chosen.

    `data` is a folder with copies of the sentence datasets; without it, they come from the Hub.
    """
    task = setting.task
    if data is not None and task.data in [name for _, name, _ in SENTENCES]:
        task = replace(task, path=data)
    # Balanced, unlike the paper's layouts of the same name.
    layouts: dict[str, Literal["last", "first"]] = {"order": "last", "reorder": "first"}
    prompts = il.load_task(
        task.data,
        task.path,
        n=n,
        layout=layouts.get(setting.layout, "random"),
        labels=task.labels[::-1],
        demonstrations=task.demonstrations,
    )
    if setting.layout == "exchanged":
        prompts = il.donor_prompts(prompts)["labels"]
    batch = il.tokenize(model, prompts, template=task.template, labels=task.labels)
    log_probs = torch.cat([il.score(model, piece).cpu() for piece in batch.split(PASS_PROMPTS)])
    correct = il.metrics.is_correct(log_probs, batch.answer).double()
    accuracy = il.metrics.bootstrap_interval(correct, clusters=batch.queries, bounds=(0.0, 1.0))
    return {
        "task": task.name,
        "template": setting.template,
        "demonstrations": task.demonstrations,
        "layout": setting.layout,
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
        "says_last_label": float(
            (log_probs.argmax(-1) == il.metrics.recent_label(batch.label_index)).double().mean()
        ),
        "n": n,
    }


def run(
    model: Any,
    name: str,
    path: Path,
    n: int,
    report: Callable[[str], None] = print,
    *,
    data: str | None = None,
) -> None:
    """Measure every setting that `path` lacks for the model of this name."""
    rows = read(path)
    done = {_key(row) for row in rows if row["model"] == name}
    for setting in settings():
        if setting.key in done:
            continue
        rows.append({"model": name} | measure(model, setting, n, data=data))
        done.add(setting.key)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        report(f"{setting.key}: {rows[-1]['accuracy']:.0%}")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows measured so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _key(row: Mapping[str, Any]) -> str:
    return f"{row['task']}, {row['template']}, {row['demonstrations']}, {row['layout']}"


def tables(rows: Sequence[Mapping[str, Any]], model: str) -> str:
    """Return two tables of one model, a line per task: accuracy (%) by demonstrations, and by
    layout and template."""
    row_of = {_key(row): row for row in rows if row["model"] == model}

    def table(columns: Mapping[str, str]) -> str:
        lines = []
        for task in TASKS:
            cells = [_accuracy(row_of.get(f"{task.name}, {key}")) for key in columns.values()]
            lines.append([task.name, *cells])
        return markdown_table(["task", *columns], lines)

    counts = {f"{count} per class": f"lines, {count}, random" for count in DEMONSTRATIONS}
    conditions = {
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

{table(conditions)}
"""


def comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a line per common task and a column per model: accuracy in balanced
    random order, %."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    row_of = {(row["model"], _key(row)): row for row in rows}
    lines = []
    for task in COMMON:
        of_models = [row_of.get((name, Setting(task, "lines").key)) for name in models]
        if any(of_models):
            lines.append([task.name, str(task.demonstrations), *map(_accuracy, of_models)])
    return markdown_table(["task", "per class", *models], lines) + "\n"


def _accuracy(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    percent = (100 * min(1.0, max(0.0, row[key])) for key in ("accuracy", "low", "high"))
    return "{:.0f} ({:.0f}–{:.0f})".format(*percent)


def main() -> None:
    """Measure the rows that a model lacks, and write the tables."""
    parser = argparse.ArgumentParser(description="Which tasks can a model do?")
    parser.add_argument(
        "--model", default="smollm2-135m", help="model name, path or Hub repository"
    )
    parser.add_argument("-n", type=int, default=60, help="prompts per setting")
    parser.add_argument("--name", default=None, help="model's name in the table")
    parser.add_argument("--data", default=None, help="folder with copies of the sentence datasets")
    parser.add_argument(
        "--rows", type=Path, default=ROWS, help="file of rows; the tables are written next to it"
    )
    options = parser.parse_args()
    name = options.name or options.model
    run(il.load_model(options.model), name, options.rows, options.n, data=options.data)
    rows = read(options.rows)
    options.rows.with_suffix(".md").write_text(tables(rows, "smollm2-135m"), encoding="utf-8")
    options.rows.with_name("task_comparison.md").write_text(comparison(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
