"""Which tasks a model can do: accuracy by task, template, number of demonstrations, and layout.

`python experiments/task_table.py --model smollm2-135m` measures the tables in docs/bundled.md, from
which experiments choose their tasks. Rows are stored as they are measured, so that an interrupted
run resumes.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from markdown_table import table as markdown_table

import icl_lens as il

ROWS = Path(__file__).with_suffix(".jsonl")
WORDS = Path(__file__).with_name("words.json")
TEMPLATES = {
    "lines": il.Template(separator="\n"),  # "cat : foo", one per line
    "paper": il.Template(),  # the same in one line
    "arrows": il.Template("{text} -> {label}", "{text} ->", "\n"),
    "questions": il.Template("Input: {text}\nLabel: {label}", "Input: {text}\nLabel:", "\n\n"),
}
LAYOUTS = {
    "random": "random order",
    "order": "query's class last",
    "reorder": "query's class first",
    "exchanged": "labels exchanged",
}
"""Layout -> column of the table. All are balanced, unlike the paper's layouts of the same name."""
Layout = Literal["random", "order", "reorder", "exchanged"]
DEMONSTRATIONS = (1, 2, 4, 8, 16)
"""Demonstrations per class."""
ARBITRARY, LETTERS = ("foo", "bar"), ("A", "B")
TASKS = (
    ("animal-country", ARBITRARY),
    ("animal-country", ("yes", "no")),
    ("animal-country", LETTERS),
    ("animal-country", ("animal", "country")),
    ("sentiment-number", ARBITRARY),
    ("sentiment-number", ("sentiment", "number")),
    ("joy-number", ARBITRARY),
    ("positive-negative", ARBITRARY),
    ("positive-negative", ("positive", "negative")),
    ("fruit-vehicle", ARBITRARY),
    ("fruit-vehicle", ("fruit", "vehicle")),
    ("color-job", ARBITRARY),
    ("city-instrument", ARBITRARY),
    ("sport-disease", ARBITRARY),
)
"""Data and labels of the tables of one model."""
COMMON = (
    ("sentiment-number", "sentiment-number", (4,)),
    ("animal-country", "animal-country", (4,)),
    ("joy-number", "joy-number", (4,)),
    ("TREC", "trec", (4, 8)),
    ("SST-2", "sst2", (4,)),
    ("AG News", "agnews", (1, 4)),
    ("ETHOS", "ethos", (4,)),
)
"""Name, data and demonstrations of the table that compares models, with foo/bar and with A/B."""
IN_FILE = ("joy-number", "positive-negative")
"""Tasks whose words are in words.json."""
PASS_PROMPTS = 20
"""Prompts per forward pass."""


@dataclass(frozen=True)
class Setting:
    """A task in one template and layout, with a number of demonstrations per class."""

    name: str
    data: str
    labels: tuple[str, str]
    demonstrations: int
    template: str = "lines"
    layout: Layout = "random"

    @property
    def task(self) -> str:
        return f"{self.name}, {'/'.join(self.labels)}"

    @property
    def key(self) -> str:
        return f"{self.task}, {self.template}, {self.demonstrations}, {self.layout}"


def common_settings() -> Iterator[Setting]:
    """Yield the settings of the table that compares models."""
    for name, data, counts in COMMON:
        for labels in (ARBITRARY, LETTERS):
            for count in counts:
                yield Setting(name, data, labels, count)


def settings() -> Iterator[Setting]:
    """Yield common settings, each task by demonstrations, and by layout and template at four."""
    yield from common_settings()
    for data, labels in TASKS:
        for count in DEMONSTRATIONS:
            yield Setting(data, data, labels, count)
        for layout in ("order", "reorder", "exchanged"):
            yield Setting(data, data, labels, 4, layout=layout)
        for template in ("paper", "arrows", "questions"):
            yield Setting(data, data, labels, 4, template)


def measure(model: Any, setting: Setting, n: int, folder: str | None = None) -> dict[str, Any]:
    """Return accuracy between the labels, and how often the last demonstration's label is chosen.

    `folder` has copies of the sentence datasets; without it, they come from the Hub.
    """
    path = None
    if setting.data in IN_FILE:
        path = str(WORDS)
    elif "-" not in setting.data:
        path = folder
    layouts: dict[str, Literal["last", "first"]] = {"order": "last", "reorder": "first"}
    prompts = il.load_task(
        setting.data,
        path,
        n=n,
        layout=layouts.get(setting.layout, "random"),
        labels=setting.labels[::-1],
        demonstrations=setting.demonstrations,
    )
    if setting.layout == "exchanged":
        prompts = il.donor_prompts(prompts)["labels"]
    template = TEMPLATES[setting.template]
    batch = il.tokenize(model, prompts, template=template, labels=setting.labels)
    log_probs = torch.cat([il.score(model, part).cpu() for part in batch.split(PASS_PROMPTS)])
    correct = il.metrics.is_correct(log_probs, batch.answer).double()
    accuracy = il.metrics.bootstrap_interval(correct, clusters=batch.queries, bounds=(0.0, 1.0))
    says_last = log_probs.argmax(-1) == il.metrics.recent_label(batch.label_index)
    return {
        "task": setting.task,
        "template": setting.template,
        "demonstrations": setting.demonstrations,
        "layout": setting.layout,
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
        "says_last_label": float(says_last.double().mean()),
        "n": n,
    }


def run(model: Any, name: str, path: Path, n: int, folder: str | None = None) -> None:
    """Measure every setting that `path` lacks for the model of this name."""
    rows = read(path)
    measured = {key_of(row) for row in rows if row["model"] == name}
    for setting in settings():
        if setting.key not in measured:
            rows.append({"model": name} | measure(model, setting, n, folder))
            measured.add(setting.key)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            print(f"{setting.key}: {rows[-1]['accuracy']:.0%}", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows measured so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def key_of(row: Mapping[str, Any]) -> str:
    return f"{row['task']}, {row['template']}, {row['demonstrations']}, {row['layout']}"


def tables(rows: Sequence[Mapping[str, Any]], model: str) -> str:
    """Return two tables of one model: accuracy by demonstrations, and by layout and template."""
    cells = {key_of(row): with_interval(row) for row in rows if row["model"] == model}

    def table(columns: Mapping[str, str]) -> str:
        lines = []
        for data, labels in TASKS:
            task = f"{data}, {'/'.join(labels)}"
            lines.append([task, *(cells.get(f"{task}, {key}", "") for key in columns.values())])
        return markdown_table(["task", *columns], lines)

    counts = {f"{count} per class": f"lines, {count}, random" for count in DEMONSTRATIONS}
    conditions = {name: f"lines, 4, {layout}" for layout, name in LAYOUTS.items()}
    conditions["in one line"] = "paper, 4, random"
    conditions |= {name: f"{name}, 4, random" for name in ("arrows", "questions")}
    return f"""\
Accuracy (%) by the number of demonstrations, in balanced random order, one demonstration per line:

{table(counts)}

With four demonstrations per class, by layout and template:

{table(conditions)}
"""


def comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a line per common setting and a column per model: accuracy, %."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {(row["model"], key_of(row)): with_interval(row) for row in rows}
    lines = []
    for setting in common_settings():
        of_models = [cells.get((name, setting.key), "") for name in models]
        if any(of_models):
            lines.append([setting.task, str(setting.demonstrations), *of_models])
    return markdown_table(["task", "per class", *models], lines) + "\n"


def with_interval(row: Mapping[str, Any]) -> str:
    percent = [100 * min(1.0, max(0.0, row[key])) for key in ("accuracy", "low", "high")]
    return "{:.0f} ({:.0f}–{:.0f})".format(*percent)


def main() -> None:
    """Measure the rows that a model lacks, and write the tables."""
    parser = argparse.ArgumentParser(description="Which tasks can a model do?")
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="model name, path or Hub repository")
    add("-n", type=int, default=60, help="prompts per setting")
    add("--name", default=None, help="model's name in the table")
    add("--data", default=None, help="folder with copies of the sentence datasets")
    add("--rows", type=Path, default=ROWS, help="file of rows; tables are written next to it")
    options = parser.parse_args()
    name = options.name or options.model
    run(il.load_model(options.model), name, options.rows, options.n, options.data)
    rows = read(options.rows)
    options.rows.with_suffix(".md").write_text(tables(rows, "smollm2-135m"), encoding="utf-8")
    options.rows.with_name("task_comparison.md").write_text(comparison(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
