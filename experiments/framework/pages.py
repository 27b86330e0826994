"""The documentation's pages of results, written from stored cells: one page per finding, and what we found.

Every sentence with a number is put together from the rows, so that a page cannot claim what its table does not show.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.framework import markdown
from experiments.framework.finding import Finding, Measure, Outcome, Row, rows_from_json
from experiments.framework.plotting import STYLE, forest
from experiments.framework.run import load_cells
from icl_lens.files import atomic_write, write_text

REAL = "smollm2-135m"
REAL_NOTE = (
    f"`{REAL}` is SmolLM2-135M-Instruct, a pretrained and instruction-tuned Llama with 4-bit weights. `icl-mini`, "
    "`icl-mini-llama` and `icl-mini-gptj` have about a million parameters and were trained on tasks like these."
)
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

    def row(self, measure: str, ranking: str = "") -> Row | None:
        """Return the row of a measure by `ranking`, or its first row; None if there is none."""
        return next((row for row in self.all_rows(measure) if ranking in ("", row.ranking)), None)


Rows = Sequence[tuple[Stored, Row]]
"""Rows of one measure, with their cells."""


def write_pages(
    results: Path, docs: Path, findings: Sequence[Finding], *, command: str
) -> list[tuple[Finding, list[Stored]]]:
    """Write the pages and figures of all findings that have stored cells into `docs`; return these cells."""
    for name in ("figures", "data"):
        (docs / name).mkdir(parents=True, exist_ok=True)
    every = [Stored.from_json(finding, cell) for finding, cell in load_cells(results, findings)]
    numbered = [(finding, [one for one in every if one.finding is finding]) for finding in findings]
    numbered = [(finding, cells) for finding, cells in numbered if cells]
    for number, (finding, cells) in enumerate(numbered, start=1):
        write_figures(docs / "figures", finding, cells)
        table_text = every_row(finding, cells).to_csv(index=False, float_format="%.6g", lineterminator="\n")
        write_text(docs / "data" / f"{finding.id}.csv", table_text)
        write_text(docs / f"{finding.id}.md", page(number, finding, cells, command=command))
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


def applicable(cells: Iterable[Stored], measure: str, ranking: str = "") -> Rows:
    """Return each cell's row of a measure where it applies, by `ranking` or else the first row."""
    found = [(cell, cell.row(measure, ranking)) for cell in cells]
    return [(cell, row) for cell, row in found if row is not None and row.applies]


def sentence(finding: Finding, cells: Sequence[Stored]) -> str:
    """Return the result in two or three sentences, from the main measure's rows."""
    main, said = finding.main, []
    real, small, seeds = groups(cells)
    if rows := applicable(real, main.name):
        numbers = [(number_text(row.quantity, main), number_text(row.control, main), cell.task) for cell, row in rows]
        (quantity, control, task), *others = numbers
        more = "".join(f"; {quantity} vs. {control} on {task}" for quantity, control, task in others)
        first = f"{quantity} ({main.quantity}) vs. {control} (control: {main.control}) on {task}"
        said.append(f"{REAL}: {first}{more} ({main.unit}).")
        said.append(f"The first number is {_counted(rows, 'tasks')}.")
    elif real:
        said.append(f"On {REAL}, this does not apply: {real[0].rows[0].note}.")
    if rows := applicable(small, main.name):
        said.append(f"On the small models, it is {_counted(rows, 'pairs of model and task')}.")
        if found := applicable(seeds, main.name):
            said.append(f"With other training seeds, it is {_counted(found, 'pairs')}.")
    return " ".join(said)


def groups(cells: Iterable[Stored]) -> tuple[list[Stored], list[Stored], list[Stored]]:
    """Return the cells of the real model, of the small models that ship, and of their other training seeds."""
    found: tuple[list[Stored], list[Stored], list[Stored]] = ([], [], [])
    for cell in cells:
        found[0 if cell.model == REAL else 2 if cell.training_seed else 1].append(cell)
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
    # z: no minus in front of a rounded zero.
    return "–" if math.isnan(value) else f"{value * measure.scale:z.{measure.digits}f}".replace("-", "−")


def span(values: Iterable[float], measure: Measure) -> str:
    """Return the displayed range of some numbers, such as "0.20 … 0.43"."""
    some = list(values)
    low, high = number_text(min(some), measure), number_text(max(some), measure)
    return low if low == high else f"{low} … {high}"


def row_cells(row: Row, measure: Measure) -> list[str]:
    """Return quantity, control, and the difference with its interval as shown on the page."""
    values = (row.quantity, row.control, row.quantity - row.control, row.low, row.high)
    quantity, control, difference, low, high = (number_text(value, measure) for value in values)
    return [quantity, control, f"{difference} [{low}, {high}]"]


# Tables


def table(measure: Measure, cells: Sequence[Stored]) -> str:
    """Return a measure's table in one unit: a line per model, task and ranking, the real model first."""
    lines, notes = [], []
    with_seeds = any(cell.training_seed for cell in cells)
    for cell in shipped(cells):
        for row in cell.all_rows(measure.name):
            if not row.applies:
                notes.append(f"{cell.model} on {cell.task}: {row.note}")
                continue
            seeds = _other_seeds(cells, cell, row)
            ends = " … ".join(number_text(end(seeds), measure) for end in (min, max)) if seeds else ""
            spread = [f"{ends} ({len(seeds)})" if seeds else ""] * with_seeds
            name, prompts = cell.model + _by(row), str(row.n_prompts or "–")
            lines.append([name, cell.task, *row_cells(row, measure), *spread, prompts])
    for who, value in measure.paper.items():
        lines.append(["the paper", who, f"{value:.{measure.digits}f}", *[""] * (3 + with_seeds)])
    names = ["difference [95%]", *["other seeds: range (number)"] * with_seeds, "prompts"]
    columns = ["model", "task", measure.quantity, measure.control, *names]
    parts = [f"Unit: {measure.unit}.\n", markdown.table(columns, lines, align="ll")] if lines else []
    return "\n".join([*parts, *_not_applicable(notes)])


def other_measures(finding: Finding, cells: Sequence[Stored]) -> str:
    """Return one table of all measures but the main one: the real model by task, the small models as a range."""
    real, small, _ = groups(cells)
    lines, notes = [], []
    for measure in finding.measures[1:]:
        said = f"{measure.quantity}, vs. {measure.control} ({measure.unit})"
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
    return [f"\nNot applicable: {'; '.join(dict.fromkeys(notes))}."] * bool(notes)


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


def _other_seeds(cells: Sequence[Stored], cell: Stored, row: Row) -> list[float]:
    """Return the row's quantity on models of the same recipe with other training seeds."""
    same = [one for one in cells if one.training_seed and (one.model, one.task) == (cell.model, cell.task)]
    found = [other.quantity for one in same if (other := one.row(row.measure, row.ranking)) is not None]
    return [quantity for quantity in found if not math.isnan(quantity)]


# Figures


def write_figures(folder: Path, finding: Finding, cells: Sequence[Stored]) -> None:
    """Write <id>.svg with the main measure, and <id>-details.svg if the finding draws its details."""
    main, lines = finding.main, []
    for cell, row in applicable(shipped(cells), main.name):  # other training seeds are small dots
        scaled = {name: getattr(row, name) * main.scale for name in ("quantity", "control", "low", "high")}
        seeds = [value * main.scale for value in _other_seeds(cells, cell, row)]
        lines.append({"label": f"{cell.model}, {cell.task}", **scaled, "seeds": seeds})
    points = pd.DataFrame(lines, columns=["label", "quantity", "control", "low", "high", "seeds"])
    with rc_context(STYLE):
        figure = forest(points, f"{main.quantity} — {main.unit}", dict(main.paper))
        save_figure(figure, folder / f"{finding.id}.svg")
        details = [cell.details for cell in shipped(cells) if len(cell.details)]
        if finding.draw is not None and details:
            save_figure(finding.draw(pd.concat(details, ignore_index=True)), folder / f"{finding.id}-details.svg")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same figure."""
    with atomic_write(path) as temp_path:
        figure.savefig(temp_path, format="svg", metadata={"Date": None})


# Pages


def page(number: int, finding: Finding, cells: Sequence[Stored], *, command: str) -> str:
    """Return a finding's page in Markdown."""
    parts = [
        f"# {number}. {finding.title}",
        f"**{sentence(finding, cells)}**",
        finding.question,
        table(finding.main, cells),
        f"![{finding.title}](figures/{finding.id}.svg)",
        f"*Filled dots: {finding.main.quantity}. Hollow dots: {finding.main.control}. {finding.look_for}*",
        f"**What the paper says** ({finding.covers}). {finding.claim}",
    ]
    if finding.draw is not None and any(len(cell.details) for cell in shipped(cells)):
        parts.append(f"![Details](figures/{finding.id}-details.svg)")
    if others := other_measures(finding, cells):
        parts += ["## Other measures", others]
    located = [f"{cell.model}, {cell.task}: {', '.join(cell.located['contrast'])}" for cell in shipped(cells)]
    parts += [
        "## Caveats",
        markdown.bullets([*finding.caveats, *filter(None, [finding.post_hoc]), REAL_NOTE]),
        f"Every number, by model, training seed, task and ranking: [{finding.id}.csv](data/{finding.id}.csv).",
        "## How it was measured",
        f"```bash\n{command} {finding.id} {shipped(cells)[0].options}\n```",
        "<details><summary>Method, and the located heads</summary>",
        finding.method,
        "Located heads (by contrast, best first):",
        markdown.bullets(located),
        "</details>",
    ]
    return "\n\n".join(parts) + "\n"
