"""The documentation's pages of results: `python -m experiments docs`."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path

from PIL import Image

from experiments.lab.report import MARKS, in_order
from experiments.lab.results import Result, read_all
from experiments.lab.verdict import Verdict
from icl_lens.files import replacing, write_text

COLOURS = 64
"""Of a figure in the documentation, which makes it a quarter of its size."""


def write_pages(out: Path, folder: Path, *, task: str, order: Sequence[str]) -> None:
    """Writes index.md (verdicts on `task` by model), a page for each experiment, its figures, and results.json.

    Experiments come in this order of their ids. What `folder` held before is removed. Raises InputError if there are
    no results under `out`.
    """
    results = read_all(out)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "figures").mkdir(parents=True)
    by_id: dict[str, list[Result]] = {}
    for path, result in results:
        by_id.setdefault(result.id, []).append(result)
        with replacing(folder / "figures" / _figure(result)) as beside:
            beside.write_bytes(_small((path / "figure.png").read_bytes()))
    ids = in_order(by_id, order)
    write_text(folder / "index.md", _index([by_id[name] for name in ids], task))
    for name in ids:
        write_text(folder / f"{name}.md", _page(by_id[name]))
    rows = [
        {**asdict(result.verdict), "id": result.id, "model": result.model, "task": result.task} for _, result in results
    ]
    write_text(folder / "results.json", json.dumps(_rounded(rows), indent=1, ensure_ascii=False) + "\n")


def _figure(result: Result) -> str:
    return f"{result.id}-{result.model}-{result.task}.png"


def _small(png: bytes) -> bytes:
    """A figure with few colours."""
    buffer = BytesIO()
    Image.open(BytesIO(png)).convert("RGB").quantize(COLOURS).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _rounded(rows: list[dict]) -> list[dict]:
    """Effects with four digits, and null for what is not finite."""

    def short(value: object) -> object:
        return (float(f"{value:.4g}") if abs(value) < float("inf") else None) if isinstance(value, float) else value

    return [{key: short(value) for key, value in row.items()} for row in rows]


def _said(verdict: Verdict) -> str:
    return f"{MARKS[verdict.outcome]} {verdict.outcome}"


def _number(verdict: Verdict) -> str:
    return f"{verdict.effect:.3g} [{verdict.low:.3g}, {verdict.high:.3g}] {verdict.unit}"


def _index(experiments: list[list[Result]], task: str) -> str:
    results = [result for same_id in experiments for result in same_id if result.task == task]
    models = list(dict.fromkeys(result.model for result in results))
    first = results[0]
    able = [next(result.competence for result in results if result.model == model) for model in models]
    lines = [
        "# Results of the bundled models",
        "",
        "Made by `python -m experiments docs`. Every claim of the paper, and those beyond it, tried on the bundled "
        f"models: {first.configuration['n']:,} prompts of {task}, heads chosen on one half and tested on the other. "
        "An effect stands with its 95 % bootstrap interval over prompts; a verdict compares that with the smallest "
        "effect worth the claim. These are small models trained from nothing, with heads made few by a penalty; where "
        "they contradict the paper, they contradict it as a claim about every model, not about the models it studied.",
        "",
        "| experiment | in the paper | " + " | ".join(models) + " |",
        "|---|---|" + "---|" * len(models),
        "| accuracy, both labels and orders | | " + " | ".join(f"{measured.accuracy:.1%}" for measured in able) + " |",
    ]
    for same_id in experiments:
        cells = []
        for model in models:
            verdict = next((result.verdict for result in same_id if (result.model, result.task) == (model, task)), None)
            cells.append("–" if verdict is None else f"{_said(verdict)}<br>{_number(verdict)}")
        lines.append(f"| [{same_id[0].id}]({same_id[0].id}.md) | {same_id[0].source} | " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    return "\n".join(
        [
            *lines,
            "",
            f"Made with {versions}. The numbers as a file: {{download}}`results.json`.",
            "",
            "```{toctree}",
            ":hidden:",
            "",
            *(same_id[0].id for same_id in experiments),
            "```",
            "",
        ]
    )


def _page(results: list[Result]) -> str:
    caption = results[0]
    lines = [
        f"# {caption.id}: {caption.title[0].lower()}{caption.title[1:]}",
        "",
        f"*{caption.source}*",
        "",
        f"Claim\n: {caption.claim}",
        "",
        f"Supported if\n: {caption.criterion}",
        "",
        f"In the paper\n: {caption.paper or 'no number'}",
        "",
        "Again\n: `" + f"python -m experiments run {caption.id}`",
        "",
    ]
    for result in results:
        lines += [
            f"## {result.model}, {result.task}",
            "",
            f"**{_said(result.verdict)}**: {_number(result.verdict)}. {_sentence(result.verdict.reason)}",
            "",
            f"```{{image}} figures/{_figure(result)}",
            f":alt: {caption.title}: {result.model} on {result.task}",
            ":class: figure",
            "```",
            "",
        ]
    return "\n".join(lines)


def _sentence(reason: str) -> str:
    text = reason[0].upper() + reason[1:]
    return text if text.endswith(".") else text + "."
