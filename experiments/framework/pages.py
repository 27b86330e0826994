"""The documentation's pages of results, written from stored cells: one page per finding, and what we found.

Every sentence with a number is put together from the rows, so that a page cannot say what its table does not.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.framework.finding import Finding, Measure, Row, rows_from_json
from experiments.framework.plotting import STYLE, forest
from experiments.framework.run import load_cells
from icl_lens.files import atomic_write, write_text

REAL = "smollm2-135m"
REAL_NOTE = (
    f"`{REAL}` is SmolLM2-135M-Instruct, a pretrained and instruction-tuned Llama with 4-bit weights. `icl-mini`, "
    "`icl-mini-llama` and `icl-mini-gptj` have about a million parameters and were trained on tasks like these."
)
Outcome = Literal["above", "below", "includes", "not applicable"]
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
    quantization: str
    seconds: float
    rows: tuple[Row, ...]
    details: pd.DataFrame
    located: Mapping[str, Sequence[str]]

    @classmethod
    def from_json(cls, finding: Finding, cell: Mapping[str, Any]) -> "Stored":
        """Return what `run.store` wrote."""
        about = cell["configuration"]
        details = pd.DataFrame(cell["details"]).assign(
            model=about["model"], task=about["task"]["name"], training_seed=about["training_seed"]
        )
        return cls(
            finding,
            about["model"],
            about["training_seed"],
            about["task"]["name"],
            _options(about),
            about["n"],
            cell["quantization"],
            cell["seconds"],
            tuple(rows_from_json(cell)),
            details,
            cell["located"],
        )

    def row(self, measure: str, ranking: str = "") -> Row | None:
        """Return the row of a measure; by the first ranking it has unless one is named."""
        for row in self.rows:
            if row.measure == measure and ranking in ("", row.ranking):
                return row
        return None


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
    """Return the options that measure a stored cell again."""
    task = about["task"]
    template = {name: value.replace("\n", "\\n") for name, value in task["template"].items()}
    natural = set(task["labels"]) == set(task["data"].split("-"))
    words = {"model": about["model"], "task": task["data"], "labels": ",".join(task["labels"])}
    words |= {"demonstrations": task["demonstrations"], "n": about["n"]}
    words |= {"separator": f"'{template['separator']}'"} if template["separator"] != " " else {}
    words |= {"path": f"experiments/framework/{task['path']}"} if task["path"] else {}
    return " ".join([*(f"--{name} {word}" for name, word in words.items()), *(["--natural"] if natural else [])])


# Numbers and sentences


def outcome(row: Row) -> Outcome:
    """Whether the interval of the difference is above zero, below it, or includes it."""
    if math.isnan(row.quantity) or math.isnan(row.low):
        return "not applicable"
    return "above" if row.low > 0 else "below" if row.high < 0 else "includes"


def main_rows(cells: Sequence[Stored]) -> list[tuple[Stored, Row]]:
    """Return each cell's row of the main measure, by the main ranking, where it applies."""
    found = [(cell, row) for cell in cells if (row := cell.row(cell.finding.main.name)) is not None]
    return [(cell, row) for cell, row in found if outcome(row) != "not applicable"]


def sentence(finding: Finding, cells: Sequence[Stored]) -> str:
    """Return the result in two or three sentences, from the main measure's rows."""
    main, said = finding.main, []
    real, small, seeds = groups(cells)
    if rows := main_rows(real):
        numbers = [(number_text(row.quantity, main), number_text(row.control, main), cell.task) for cell, row in rows]
        (quantity, control, task), *others = numbers
        more = "".join(f"; {quantity} and {control} on {task}" for quantity, control, task in others)
        said.append(f"{REAL}: {main.quantity}: {quantity}; {main.control}: {control} on {task}{more} ({main.unit}).")
        said.append(f"The first is {_counted(rows, 'tasks')}.")
    elif real:
        said.append(f"On {REAL}, this does not apply: {real[0].rows[0].note}.")
    if rows := main_rows(small):
        said.append(f"On the small models, it is {_counted(rows, 'pairs of model and task')}.")
        if found := main_rows(seeds):
            said.append(f"With other training seeds, it is {_counted(found, 'pairs')}.")
    return " ".join(said)


def groups(cells: Sequence[Stored]) -> tuple[list[Stored], list[Stored], list[Stored]]:
    """Return the cells of the real model, of the small models that ship, and of their other training seeds."""
    real = [cell for cell in cells if cell.model == REAL]
    small = [cell for cell in cells if cell.model != REAL]
    return real, [cell for cell in small if not cell.training_seed], [cell for cell in small if cell.training_seed]


def _counted(rows: Sequence[tuple[Stored, Row]], nouns: str) -> str:
    """Return how many rows have each outcome: "above the control in 2 of 3 tasks, below the control in 1"."""
    found = [outcome(row) for _, row in rows]
    first, *others = [(words, found.count(kind)) for kind, words in OUTCOMES.items() if kind in found]
    total = f"{first[0]} in {first[1]} of {len(found)} {nouns}"
    return ", ".join([total, *(f"{words} in {number}" for words, number in others)])


def number_text(value: float, measure: Measure) -> str:
    """Return a stored number as it is shown."""
    # z: no minus in front of a rounded zero.
    return "–" if math.isnan(value) else f"{value * measure.scale:z.{measure.digits}f}".replace("-", "−")


def _interval(row: Row, measure: Measure) -> str:
    if math.isnan(row.low):
        return "–"
    difference = number_text(row.quantity - row.control, measure)
    return f"{difference} [{number_text(row.low, measure)}, {number_text(row.high, measure)}]"


# Tables


def table(measure: Measure, cells: Sequence[Stored]) -> str:
    """Return a measure's table in one unit: a line per model, task and ranking, the real model first."""
    lines, notes = [], []
    with_seeds = any(cell.training_seed for cell in cells)
    for cell in shipped(cells):
        for row in (row for row in cell.rows if row.measure == measure.name):
            name = cell.model if row.ranking in ("", "contrast") else f"{cell.model}, by {row.ranking}"
            if outcome(row) == "not applicable":
                notes.append(f"{cell.model} on {cell.task}: {row.note}")
                continue
            numbers = (number_text(row.quantity, measure), number_text(row.control, measure), _interval(row, measure))
            seeds = _other_seeds(cells, cell, row)
            ends = [number_text(end(seeds), measure) for end in (min, max)] if seeds else []
            spread = [f"{' … '.join(ends)} ({len(seeds)})" if seeds else ""] if with_seeds else []
            lines.append(line(name, cell.task, *numbers, *spread, str(row.n_prompts or "–")))
    for who, value in measure.paper.items():
        lines.append(line("the paper", who, f"{value:.{measure.digits}f}", *[""] * (4 if with_seeds else 3)))
    if lines:
        names = ["difference [95 %]", *(["other seeds: range (number)"] if with_seeds else []), "prompts"]
        head = line("model", "task", measure.quantity, measure.control, *names)
        lines = [f"Unit: {measure.unit}.\n", head, line("---", "---", *["---:"] * (2 + len(names))), *lines]
    if notes:
        lines.append(f"\nNot applicable: {'; '.join(dict.fromkeys(notes))}.")
    return "\n".join(lines)


def other_measures(finding: Finding, cells: Sequence[Stored]) -> str:
    """Return one table of all measures but the main one: the real model by task, the small models as a range."""
    real, small, _ = groups(cells)
    lines, notes = [], []
    for measure in finding.measures[1:]:
        said = f"{measure.quantity}, against {measure.control} ({measure.unit})"
        for cell in real:
            for row in (row for row in cell.rows if row.measure == measure.name):
                if outcome(row) == "not applicable":
                    notes.append(f"{measure.quantity} on {cell.model}, {cell.task}: {row.note}")
                    continue
                where = cell.task if row.ranking in ("", "contrast") else f"{cell.task}, by {row.ranking}"
                numbers = (number_text(row.quantity, measure), number_text(row.control, measure))
                lines.append(line(said, f"{cell.model}, {where}", *numbers, _interval(row, measure)))
                said = ""
        rows = [row for cell in small if (row := cell.row(measure.name)) and outcome(row) != "not applicable"]
        if rows:
            ranges = (span((getattr(row, name) for row in rows), measure) for name in ("quantity", "control"))
            counts = _counted([(small[0], row) for row in rows], "pairs of model and task")
            lines.append(line(said, "small models", *ranges, counts))
        for who, value in measure.paper.items():
            lines.append(line("", f"the paper, {who}", f"{value:.{measure.digits}f}", "", ""))
    if not lines:
        return ""
    head = [line("measure", "model, task", "quantity", "control", "difference [95 %]"), line(*["---"] * 5)]
    told = [f"\nNot applicable: {'; '.join(dict.fromkeys(notes))}."] if notes else []
    return "\n".join([*head, *lines, *told])


def span(values: Iterable[float], measure: Measure) -> str:
    """Return the range of some numbers as it is shown, such as "0.20 … 0.43"."""
    some = list(values)
    low, high = number_text(min(some), measure), number_text(max(some), measure)
    return low if low == high else f"{low} … {high}"


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


def line(*cells: str) -> str:
    """Return a line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def shipped(cells: Sequence[Stored]) -> list[Stored]:
    """Return the cells of the models that users have, the real one first."""
    real, small, _ = groups(cells)
    return real + small


def _other_seeds(cells: Sequence[Stored], cell: Stored, row: Row) -> list[float]:
    """The quantity on models of the same recipe with other training seeds."""
    same = [one for one in cells if one.training_seed and (one.model, one.task) == (cell.model, cell.task)]
    found = [other for one in same if (other := one.row(row.measure, row.ranking)) is not None]
    return [other.quantity for other in found if not math.isnan(other.quantity)]


# Figures


def write_figures(folder: Path, finding: Finding, cells: Sequence[Stored]) -> None:
    """Write <id>.svg with the main measure, and <id>-details.svg if the finding draws its details."""
    with rc_context(STYLE):
        save_figure(forest_figure(finding, cells), folder / f"{finding.id}.svg")
        details = [cell.details for cell in shipped(cells) if len(cell.details)]
        if finding.draw is not None and details:
            save_figure(finding.draw(pd.concat(details, ignore_index=True)), folder / f"{finding.id}-details.svg")


def forest_figure(finding: Finding, cells: Sequence[Stored]) -> Figure:
    """Draw the main measure: one line per model and task of the models that ship, other seeds as small dots."""
    main, lines = finding.main, []
    for cell in shipped(cells):
        row = cell.row(main.name)
        if row is None or outcome(row) == "not applicable":
            continue
        scaled = {name: getattr(row, name) * main.scale for name in ("quantity", "control", "low", "high")}
        seeds = [value * main.scale for value in _other_seeds(cells, cell, row)]
        lines.append({"label": f"{cell.model}, {cell.task}", **scaled, "seeds": seeds})
    columns = ["label", "quantity", "control", "low", "high", "seeds"]
    return forest(pd.DataFrame(lines, columns=columns), f"{main.quantity} — {main.unit}", dict(main.paper))


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, the same bytes for the same figure."""
    with atomic_write(path) as beside:
        figure.savefig(beside, format="svg", metadata={"Date": None})


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
    located = [f"- {cell.model}, {cell.task}: {', '.join(cell.located['contrast'])}" for cell in shipped(cells)]
    parts += [
        "## Caveats",
        "\n".join(f"- {caveat}" for caveat in (*finding.caveats, *filter(None, [finding.post_hoc]), REAL_NOTE)),
        f"Every number, by model, training seed, task and ranking: [{finding.id}.csv](data/{finding.id}.csv).",
        "## How it was measured",
        f"```bash\n{command} {finding.id} {shipped(cells)[0].options}\n```",
        "<details><summary>Method, and the located heads</summary>",
        finding.method,
        "Located heads (by contrast, best first):",
        "\n".join(located),
        "</details>",
    ]
    return "\n\n".join(parts) + "\n"
