"""Compute what the documentation shows, and put the tables and figures where its pages read them.

    python experiments/publish.py                  # all studies
    python experiments/publish.py run ablation --models smollm2-135m
    python experiments/publish.py collect          # tables and figures for docs/results

`run` computes published studies again; a new one is run by its script. Runs resume. `collect`
replaces the rows of the studies that were computed and keeps all others.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
from common import save_figure

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs" / "results"
LINES = ["--demonstrations", "4", "--separator", r"\n"]
PAIRS = ["--labels", "", *LINES, "-n", "26"]

QUESTIONS = (
    "behavior",
    "two-towers",
    "ablation",
    "circuit",
    "location",
    "which-score",
    "values",
    "label-attention",
    "shared-heads",
    "text-to-label",
    "majority-bias",
    "recency-bias",
)
"""In the order of the pages. The script of "two-towers" is two_towers.py."""
SMOLLM2, QWEN, QWEN_LARGE = "smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
SOURCES = {
    QWEN: "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    QWEN_LARGE: "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
}
"""What is loaded for models that are not installed; `--source` names files instead."""
SMALL_MODELS = ("icl-mini", "icl-mini-llama", "icl-mini-gptj")

TASKS: dict[str, dict[str, list[str]]] = {
    SMOLLM2: {
        "animal-country, A/B": ["--task", "animal-country", "--labels", "B,A", *LINES],
        "joy-number, foo/bar": ["--task", "joy-number", "--path", str(HERE / "words.json"), *LINES],
        "animal-country, animal/country": [
            "--task",
            "animal-country",
            "--labels",
            "animal,country",
            "--separator",
            r"\n",
        ],
        "country-capital": ["--task", "country-capital", *PAIRS],
        "present-past": ["--task", "present-past", *PAIRS],
    },
    QWEN: {
        "sentiment-number, foo/bar": ["--task", "sentiment-number", *LINES],
        "animal-country, foo/bar": ["--task", "animal-country", *LINES],
        "TREC, A/B": ["--task", "trec", "--labels", "B,A", *LINES, "-n", "50"],
        "country-capital": ["--task", "country-capital", *PAIRS],
    },
    QWEN_LARGE: {
        "sentiment-number, foo/bar": ["--task", "sentiment-number", *LINES],
        "animal-country, foo/bar": ["--task", "animal-country", *LINES],
        "TREC, A/B, 8 per class": [
            "--task",
            "trec",
            "--labels",
            "B,A",
            "--demonstrations",
            "8",
            "--separator",
            r"\n",
        ],
        "country-capital": ["--task", "country-capital", *PAIRS],
    },
}
for small_model in SMALL_MODELS:
    TASKS[small_model] = {
        "sentiment-number, foo/bar": ["--task", "sentiment-number"],
        "animal-country, foo/bar": ["--task", "animal-country"],
    }
"""The tasks that each model does, chosen by accuracy alone, and their options."""
N_PROMPTS = {SMOLLM2: 100, QWEN: 100, QWEN_LARGE: 40} | dict.fromkeys(SMALL_MODELS, 200)
"""Prompts per half, unless a task's options or `N_PROMPTS_OF` say otherwise."""
N_PROMPTS_OF = {
    ("which-score", SMOLLM2): 40,
    ("which-score", QWEN): 30,
    ("which-score", "icl-mini"): 100,
    ("lu2022", QWEN): 16,  # which runs 24 orders of each prompt
    ("lu2022", QWEN_LARGE): 8,
}
"""Prompts per half of single questions and claims."""

CLAIMS = {
    "olsson2022": ("classes",),
    "feucht2025": ("pairs",),
    "mcdougall2023": ("classes", "pairs"),
    "min2022": ("classes",),
    "zhao2021": ("classes",),
    "lu2022": ("classes", "pairs"),
    "wang2023": ("classes",),
    "bakalova2025": ("classes", "pairs"),
    "cho2024": ("classes",),
    "hendel2023": ("classes", "pairs"),
    "todd2024": ("pairs",),
    "yin2025": ("pairs",),
    "yang2025": ("classes",),
    "halawi2023": ("classes",),
}
"""The scripts of `literature/` in the order of their page, and the kinds of tasks that each measures.
"""
CLAIM_TASKS = {
    SMOLLM2: {"classes": "animal-country, A/B", "pairs": "country-capital"},
    QWEN: {"classes": "animal-country, foo/bar", "pairs": "country-capital"},
    QWEN_LARGE: {"classes": "animal-country, foo/bar", "pairs": "country-capital"},
}
"""The task of each kind, by model."""
OF_RANDOM_TOKENS = ("gain lost without induction heads", "gain of a first", "random tokens copied")
"""How the names of the measures begin that are taken on random tokens, not on the task."""
N_PROMPTS_OF_CLAIMS = {
    SMOLLM2: {"classes": 60, "pairs": 60},
    QWEN: {"classes": 40, "pairs": 40},
    QWEN_LARGE: {"classes": 16, "pairs": 24},
}
"""Prompts per half, by model and kind of task, unless `N_PROMPTS_OF` says otherwise."""


def run(
    question: str, models: list[str], sources: dict[str, str], data: str | None, out: Path
) -> None:
    """Run a question's script on the published studies of some models."""
    script = import_module(question.replace("-", "_"))
    for model, task_name in published_studies(question):
        if model not in models:
            continue
        task_options = TASKS[model][task_name]
        n_prompts = N_PROMPTS_OF.get((question, model), N_PROMPTS[model])
        source = sources.get(model, SOURCES.get(model, model))
        options = ["--model", source, "--name", model, "--task-name", task_name]
        options += ["-n", str(n_prompts), "--out", str(out), *task_options]
        if data is not None and "trec" in task_options:
            options += ["--path", data]
        script.main(options)


def run_claims(models: list[str], sources: dict[str, str], out: Path) -> None:
    """Run the scripts of `literature/` on each model's tasks."""
    sys.path.insert(0, str(HERE / "literature"))
    for claim, kinds in CLAIMS.items():
        script = import_module(claim)
        for model in (model for model in CLAIM_TASKS if model in models):
            for kind in kinds:
                task_name = CLAIM_TASKS[model][kind]
                options = ["--model", sources.get(model, SOURCES.get(model, model))]
                options += ["--name", model, "--task-name", task_name, "--out", str(out)]
                n_prompts = N_PROMPTS_OF.get((claim, model), N_PROMPTS_OF_CLAIMS[model][kind])
                options += [*TASKS[model][task_name], "-n", str(n_prompts)]
                script.main(options)


def published_studies(question: str) -> list[tuple[str, str]]:
    """Return the model and the task of each study of a question, in the order of its table."""
    return list(dict.fromkeys(studies_of(read(DOCS / "data" / f"{question}.csv"))))


def list_studies() -> None:
    """Print every published study, and on how many prompts of each half it ran."""
    for question in QUESTIONS:
        settings = json.loads((DOCS / "data" / f"{question}.json").read_text(encoding="utf-8"))
        for model, task in published_studies(question):
            n_prompts = settings[f"{model}: {task}"]["n"]
            print(f"{question:16} {model:20} {task:32} n {n_prompts}")


def collect(out: Path, questions: Sequence[str] = QUESTIONS, docs: Path = DOCS) -> None:
    """Merge the tables of all studies into one per question, and draw its figure."""
    for question in questions:
        path = docs / "data" / f"{question}.csv"
        table = merged([read(file) for file in sorted(out.glob(f"*/*/{question}.csv"))], path)
        if table is None:
            continue
        table.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
        drawn_rows = table.query("model not in @SMALL_MODELS")
        if drawn_rows.empty:
            drawn_rows = table
        script = import_module(question.replace("-", "_"))
        save_figure(script.draw(drawn_rows), docs / "figures" / f"{question}.svg")
        collect_settings(question, out, docs)


def collect_claims(out: Path, docs: Path = DOCS) -> None:
    """Merge the tables of all claims into one, and what they depend on into one file.

    The table's column `script` says which claim a row belongs to.
    """
    path = docs / "data" / "claims.csv"
    earlier = read(path) if path.exists() else pd.DataFrame(columns=["script", "model", "task"])
    tables = []
    for script in CLAIMS:
        of_script = earlier.query("script == @script").drop(columns="script")
        computed = [read(file) for file in sorted(out.glob(f"*/*/{script}.csv"))]
        claim_tables = in_order(without_studies(of_script, computed))
        claim_tables.insert(0, "script", script)
        tables.append(claim_tables)
    table = pd.concat(tables, ignore_index=True)
    kinds = []
    for measure, task in zip(table["measure"], table["task"], strict=True):
        kinds.append(kind_of_prompts(measure, task))
    table["kind"] = kinds
    table.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    settings_path = path.with_suffix(".json")
    settings: dict[str, Any] = {}
    if settings_path.exists():
        settings = json.loads(settings_path.read_text(encoding="utf-8"))
    for script in CLAIMS:
        for file in sorted(out.glob(f"*/*/{script}.json")):
            about = json.loads(file.read_text(encoding="utf-8"))
            settings[f"{script}, {about['model_name']}: {about['task_name']}"] = about
    text = json.dumps(settings, indent=1, sort_keys=True) + "\n"
    settings_path.write_text(text, encoding="utf-8")


def collect_ground_truth(out: Path, docs: Path = DOCS) -> None:
    """Copy the tables of `ground_truth.py`, where it has run."""
    for file in sorted(out.glob("ground-truth*.csv")):
        shutil.copyfile(file, docs / "data" / file.name)


def kind_of_prompts(measure: str, task: str) -> str:
    """Return "random tokens", "pairs" or "classes": what a measure of a claim was taken on."""
    if measure.startswith(OF_RANDOM_TOKENS):
        return "random tokens"
    of_pairs = {kinds["pairs"] for kinds in CLAIM_TASKS.values()}
    return "pairs" if task in of_pairs else "classes"


def merged(tables: list[pd.DataFrame], published: Path) -> pd.DataFrame | None:
    """Return computed tables, with the rows of all other studies that have been published."""
    if not published.exists():
        return in_order(pd.concat(tables, ignore_index=True)) if tables else None
    return in_order(without_studies(read(published), tables))


def without_studies(earlier: pd.DataFrame, tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Return computed tables, and the earlier rows of studies that these do not contain."""
    studies: set[tuple[str, str]] = set()
    for table in tables:
        studies.update(studies_of(table))
    is_kept = pd.Series([study not in studies for study in studies_of(earlier)], dtype=bool)
    return pd.concat([*tables, earlier.loc[is_kept.to_numpy()]], ignore_index=True)


def collect_settings(question: str, out: Path, docs: Path) -> None:
    """Merge what the studies depend on into one file, by model and task."""
    path = docs / "data" / f"{question}.json"
    settings: dict[str, Any] = {}
    if path.exists():
        settings = json.loads(path.read_text(encoding="utf-8"))
    for file in sorted(out.glob(f"*/*/{question}.json")):
        about = json.loads(file.read_text(encoding="utf-8"))
        settings[f"{about['model_name']}: {about['task_name']}"] = about
    path.write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows by model and task, in the order of `TASKS`."""
    places: dict[tuple[str, str], int] = {}
    for model, tasks in TASKS.items():
        for task in tasks:
            places[model, task] = len(places)
    order = [places.get(study, len(places)) for study in studies_of(table)]
    return table.assign(order=order).sort_values("order", kind="stable").drop(columns="order")


def studies_of(table: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the model and the task of each row."""
    return list(zip(table["model"], table["task"], strict=True))


def read(path: Path) -> pd.DataFrame:
    """Read a table; empty texts stay texts, and empty numbers are NaN."""
    numbers = ("quantity", "control", "low", "high")
    return pd.read_csv(path, keep_default_na=False, na_values={name: [""] for name in numbers})


def main() -> None:
    """List the published studies, run some of them, or collect what has been computed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("list", "run", "collect"), default="list")
    parser.add_argument(
        "questions",
        nargs="*",
        choices=[*QUESTIONS, "claims", []],
        help="all by default; claims are the scripts of literature/",
    )
    parser.add_argument("--models", nargs="*", default=list(TASKS))
    parser.add_argument(
        "--source", nargs="*", default=[], metavar="NAME=FILE", help="files of models"
    )
    parser.add_argument("--data", help="folder with copies of the sentence datasets")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()
    if options.what == "list":
        list_studies()
        return
    questions = options.questions or [*QUESTIONS, "claims"]
    if options.what == "collect":
        collect(options.out, [question for question in questions if question != "claims"])
        if "claims" in questions:
            collect_claims(options.out)
        collect_ground_truth(options.out)
        return
    sources = dict(text.split("=", 1) for text in options.source)
    for question in questions:
        if question == "claims":
            run_claims(options.models, sources, options.out)
        else:
            run(question, options.models, sources, options.data, options.out)


if __name__ == "__main__":
    main()
