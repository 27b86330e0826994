"""The documentation's pages of results, written from stored cells: one page per finding.

1. A finding's answer is a sentence of its own, with numbers taken from the rows.
2. One figure and one table of the main measure follow: a line per task of the real models, one for the small models.
3. Other measures, method, caveats and located heads are folded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.framework import markdown
from experiments.framework.finding import Finding, Measure, Outcome, Row, rows_from_json
from experiments.framework.models import REAL_MODELS
from experiments.framework.plotting import STYLE
from experiments.framework.run import load_cells
from experiments.framework.sentences import applicable, extent, number
from icl_lens.files import atomic_write, write_text

OUTCOMES: dict[Outcome, str] = {
    "above": "above the control",
    "below": "below the control",
    "includes": "not distinguishable from the control",
}


@dataclass(frozen=True)
class Stored:
    """A stored cell: a finding's rows on one model and task."""

    finding: Finding
    model: str
    training_seed: int
    task: str
    options: str
    """The task as options of the command line."""
    n: int
    rows: Sequence[Row]
    details: pd.DataFrame
    located: Mapping[str, Sequence[str]]

    @classmethod
    def from_json(cls, finding: Finding, cell: Mapping[str, Any]) -> "Stored":
        """Return the cell from what `run.store` wrote."""
        about = cell["configuration"]
        model, seed, task = about["model"], about["training_seed"], about["task"]["name"]
        details = pd.DataFrame(cell["details"]).assign(model=model, task=task, training_seed=seed)
        rows = rows_from_json(cell)
        return cls(finding, model, seed, task, _options(about), about["n"], rows, details, cell["located"])

    def all_rows(self, measure: str) -> list[Row]:
        """Return the rows of a measure, by every ranking."""
        return [row for row in self.rows if row.measure == measure]

    def row(self, measure: str, ranking: str = "contrast") -> Row | None:
        """Return the row of a measure, by `ranking` if heads are ranked; None if there is none."""
        return next((row for row in self.all_rows(measure) if row.ranking in ("", ranking)), None)


Rows = Sequence[tuple[Stored, Row]]
"""Rows of one measure, with their cells."""


def write_pages(results: Path, docs: Path, findings: Sequence[Finding]) -> list[tuple[Finding, list[Stored]]]:
    """Write the pages and figures of all findings that have stored cells into `docs`; return these cells."""
    for name in ("figures", "data"):
        (docs / name).mkdir(parents=True, exist_ok=True)
    every = [Stored.from_json(finding, cell) for finding, cell in load_cells(results, findings)]
    numbered = [(finding, [one for one in every if one.finding is finding]) for finding in findings]
    numbered = [(finding, cells) for finding, cells in numbered if cells]
    for index, (finding, cells) in enumerate(numbered, start=1):
        draw(finding, cells, docs / "figures" / f"{finding.id}.svg")
        table_text = every_row(finding, cells).to_csv(index=False, float_format="%.6g", lineterminator="\n")
        write_text(docs / "data" / f"{finding.id}.csv", table_text)
        write_text(docs / f"{finding.id}.md", page(index, finding, cells))
    return numbered


def _options(about: Mapping[str, Any]) -> str:
    """Return the command-line options that would compute a stored cell."""
    task = about["task"]
    separator = task["template"]["separator"].replace("\n", "\\n")
    options = {"model": about["model"], "task": task["data"], "labels": ",".join(task["labels"])}
    options |= {"demonstrations": task["demonstrations"], "n": about["n"]}
    options |= {"separator": f"'{separator}'"} if separator != " " else {}
    options |= {"path": f"experiments/framework/{task['path']}"} if task["path"] else {}
    natural = " --natural" if set(task["labels"]) == set(task["data"].split("-")) else ""
    return " ".join(f"--{name} {word}" for name, word in options.items()) + natural


# Numbers and sentences


def groups(cells: Iterable[Stored]) -> tuple[list[Stored], list[Stored], list[Stored]]:
    """Return the cells of the real models, of the small models that ship, and of their other training seeds."""
    found: tuple[list[Stored], list[Stored], list[Stored]] = ([], [], [])
    for cell in cells:
        found[0 if cell.model in REAL_MODELS else 2 if cell.training_seed else 1].append(cell)
    order = list(REAL_MODELS)
    found[0].sort(key=lambda cell: order.index(cell.model))
    return found


def shipped(cells: Iterable[Stored]) -> list[Stored]:
    """Return the cells of the models that users have, the real one first."""
    real, small, _ = groups(cells)
    return real + small


def count(rows: Rows, kind: Outcome) -> int:
    """Return how many rows have an outcome."""
    return sum(row.outcome == kind for _, row in rows)


def _counted(rows: Rows, nouns: str) -> str:
    """Return how many rows have each outcome: "above the control in 2 of 3 tasks, below the control in 1"."""
    first, *others = [(words, n) for kind, words in OUTCOMES.items() if (n := count(rows, kind))]
    total = f"{first[0]} in {first[1]} of {len(rows)} {nouns}"
    return ", ".join([total, *(f"{words} in {n}" for words, n in others)])


def number_text(value: float, measure: Measure) -> str:
    """Return a stored number as shown on the page."""
    return number(value, scale=float(measure.scale), digits=measure.digits)


def span(values: Iterable[float], measure: Measure) -> str:
    """Return the displayed range of some numbers, such as "0.20–0.43"."""
    return extent(list(values), scale=float(measure.scale), digits=measure.digits)


def row_cells(row: Row, measure: Measure) -> list[str]:
    """Return quantity, control, and the difference with its interval as shown on the page."""
    values = (row.quantity, row.control, row.quantity - row.control, row.low, row.high)
    quantity, control, difference, low, high = (number_text(value, measure) for value in values)
    return [quantity, control, f"{difference} [{low}, {high}]"]


# Tables


def table(measure: Measure, cells: Sequence[Stored]) -> str:
    """Return a measure's table in one unit: a line per task of the real models, and ranges of the small models."""
    real, small, seeds = groups(cells)
    lines, notes = [], []
    for cell in real:
        for row in cell.all_rows(measure.name):
            if row.applies:
                lines.append([cell.model + _by(row), cell.task, *row_cells(row, measure), str(row.n_prompts or "–")])
            else:
                notes.append(f"{cell.model} on {cell.task}: {row.note}")
    for name, some in (("small models", small), ("small models, other training seeds", seeds)):
        if rows := applicable(some, measure.name):
            ranges = (span((getattr(row, what) for _, row in rows), measure) for what in ("quantity", "control"))
            lines.append([name, f"{len(rows)} pairs", *ranges, _counted(rows, "pairs"), str(rows[0][1].n_prompts)])
    for who, value in measure.paper.items():
        lines.append(["the paper", who, f"{value:.{measure.digits}f}", *[""] * 3])
    columns = ["model", "task", measure.quantity, measure.control, "difference [95%]", "prompts"]
    parts = [f"Unit: {measure.unit}.\n", markdown.table(columns, lines, align="ll")] if lines else []
    return "\n".join([*parts, *_not_applicable(notes)])


def other_measures(finding: Finding, cells: Sequence[Stored]) -> str:
    """Return one table of all measures but the main one: the real model by task, the small models as a range.

    Controls and units are named where they differ from those of the main measure.
    """
    main = finding.main
    real, small, _ = groups(cells)
    lines, notes = [], []
    for measure in (one for one in finding.measures[1:] if not one.tabled):
        control = f", vs. {measure.control}" if measure.control != main.control else ""
        said = f"{measure.quantity}{control}" + (f" ({measure.unit})" if measure.unit != main.unit else "")
        for cell in real:
            for row in cell.all_rows(measure.name):
                if not row.applies:
                    notes.append(f"{measure.quantity} on {cell.model}, {cell.task}: {row.note}")
                    continue
                lines.append([said, f"{cell.model}, {cell.task}{_by(row)}", *row_cells(row, measure)])
                said = ""
        if rows := applicable(small, measure.name):
            ranges = (span((getattr(row, name) for _, row in rows), measure) for name in ("quantity", "control"))
            lines.append([said, "small models", *ranges, _counted(rows, "pairs of model and task")])
        for who, value in measure.paper.items():
            lines.append(["", f"the paper, {who}", f"{value:.{measure.digits}f}", "", ""])
    if not lines:
        return ""
    columns = ["measure", "model, task", "quantity", "control", "difference [95%]"]
    return "\n".join([markdown.table(columns, lines, align="lllll"), *_not_applicable(notes)])


def _by(row: Row) -> str:
    """Return the ranking as a suffix of the model's name; none for contrast."""
    return "" if row.ranking in ("", "contrast") else f", by {row.ranking}"


def _not_applicable(notes: Sequence[str]) -> list[str]:
    return [f"\nNot applicable: {'; '.join(dict.fromkeys(notes)).rstrip('.')}."] * bool(notes)


def every_row(finding: Finding, cells: Sequence[Stored]) -> pd.DataFrame:
    """Return all rows of a finding, unscaled, with the measures' words, for use outside the pages."""
    words = {one.name: (one.quantity, one.control, one.unit, one.scale) for one in finding.measures}
    columns = ["measure", "quantity is", "control is", "unit", "shown times", "model", "training_seed", "task"]
    found = [
        dict(zip(columns, [row.measure, *words[row.measure], cell.model, cell.training_seed, cell.task], strict=True))
        | asdict(row)
        for cell in cells
        for row in cell.rows
    ]
    return pd.DataFrame(found)


# Figures and pages


def draw(finding: Finding, cells: Sequence[Stored], path: Path) -> None:
    """Write the finding's figure: the details of the real models, or of all models that ship if there are none."""
    shown = groups(cells)[0] or shipped(cells)
    details = [cell.details for cell in shown if len(cell.details)]
    if details:
        with rc_context(STYLE):
            save_figure(finding.draw(pd.concat(details, ignore_index=True)), path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same figure."""
    with atomic_write(path) as temp_path:
        figure.savefig(temp_path, format="svg", metadata={"Date": None})


def page(number: int, finding: Finding, cells: Sequence[Stored]) -> str:
    """Return a finding's page in Markdown."""
    real = groups(cells)[0] or shipped(cells)
    located = [f"{cell.model}, {cell.task}: {', '.join(cell.located['contrast'])}" for cell in real]
    parts = [
        f"# {number}. {finding.title}",
        f"**{finding.answer(cells)}**",
        f"![{finding.title}](figures/{finding.id}.svg)",
        f"*{finding.look_for}*",
        *([] if finding.tables is None else [finding.tables(cells)]),
        table(finding.main, cells),
        f"**The paper** ({finding.covers}). {finding.claim}",
        *_folded("Other measures", other_measures(finding, cells)),
        *_folded(
            "Method, limits, and how to compute it",
            "\n\n".join(
                [
                    finding.method,
                    markdown.bullets([*finding.caveats, *filter(None, [finding.post_hoc])]),
                    f"```bash\npython -m experiments run {finding.id} {real[0].options}\n```",
                    f"Every number, by model, seed, task and ranking: [{finding.id}.csv](data/{finding.id}.csv).",
                    "Located heads (by contrast, best first):",
                    markdown.bullets(located),
                ]
            ),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _folded(title: str, text: str) -> list[str]:
    """Return Markdown that is shown when the reader opens it; nothing if there is no text."""
    return [f"<details><summary>{title}</summary>", text, "</details>"] * bool(text)
