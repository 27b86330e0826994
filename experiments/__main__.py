"""`python -m experiments list | run FINDING… | docs | tasks | vectors | ground-truth`: the findings on any model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from icl_lens.cli.console import PlainConsole, report_error
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import DemonstrationsOption, ModelOptions, PathOption, TokenOptions
from icl_lens.cli.program import new_app, run_program

if TYPE_CHECKING:
    from collections.abc import Iterable

    from experiments.framework.run import Cell

ROOT = Path(__file__).parent.parent
TASK_ROWS = Path(__file__).parent / "task_table.jsonl"
VECTOR_ROWS = Path(__file__).parent / "vectors.jsonl"
COMMAND = "python -m experiments run"
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder of results.")]
HalvesOption = Annotated[
    int, typer.Option("--n", "-n", min=1, help="Prompts to locate heads on, and held-out prompts.")
]

DataOption = Annotated[Path | None, typer.Option("--data", help="Folder with copies of the sentence datasets.")]

app = new_app(
    help="The findings: each one a question, a measurement with its control, and a page.", no_args_is_help=True
)


@app.command("list")
def list_() -> None:
    """List the findings: id, question, and the paper's figures that they cover."""
    from experiments.catalogue import IDS, find

    table = Table(box=None, pad_edge=False)
    for column in ("finding", "question", "in the paper"):
        table.add_column(column, overflow="fold")
    for finding in map(find, IDS):
        table.add_row(finding.id, finding.question, finding.covers)
    PlainConsole().print(table)


@app.command()
@grouped
def run(
    model: ModelOptions,
    tokens: TokenOptions,
    ids: Annotated[list[str] | None, typer.Argument(metavar="FINDING…", help="Findings, see `list`.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every finding.")] = False,
    task: Annotated[str, typer.Option("--task", "-t", help="Word task or sentence dataset.")] = "animal-country",
    n: HalvesOption = 200,
    demonstrations: DemonstrationsOption = 2,
    labels: Annotated[str, typer.Option(help="The classes' label words.")] = "foo,bar",
    natural: Annotated[
        bool, typer.Option("--natural", help="Labels name the classes of --task, in this order.")
    ] = False,
    path: PathOption = None,
    out: OutOption = Path("results"),
) -> None:
    """Measure findings on a model and a task.

    One file per finding is written to OUT/MODEL/TASK. A finding that is there already is not computed again, so an
    interrupted run resumes; several processes started on the same folder divide the findings among themselves.
    """
    from experiments.catalogue import IDS, find
    from experiments.framework.run import Cell
    from experiments.framework.tasks import Task
    from icl_lens.errors import InputError

    if everything == bool(ids):
        raise InputError("name the findings to measure (see `python -m experiments list`), or pass --all")
    words = tuple(word.strip() for word in labels.split(","))
    if len(words) != 2 or not all(words):
        raise InputError(f"--labels must be two words with a comma between them, got {labels!r}")
    file = None if path is None else str(path)
    chosen = Task(
        f"{task}, {'/'.join(words)}", task, (words[0], words[1]), demonstrations, tokens.prompt_template(), file
    )
    cells = [Cell(find(name), model.model, chosen, n, model.model) for name in (ids or IDS)]
    _run(cells, out, model)


@app.command()
def docs(
    out: OutOption = ROOT / "docs" / "results" / "data",
    pages: Annotated[Path, typer.Option(help="Folder of the pages.")] = ROOT / "docs" / "results",
    compute: Annotated[bool, typer.Option(help="Compute what is missing first.")] = True,
    only: Annotated[list[str] | None, typer.Option(help="Findings or models to compute.")] = None,
    data: DataOption = None,
    local: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="Model to load from a path.")] = None,
) -> None:
    """Measure every finding on the models that the documentation shows, and write its pages of results."""
    from dataclasses import replace

    from experiments.catalogue import IDS, find, published_cells
    from experiments.framework import overview
    from experiments.framework.pages import write_pages
    from icl_lens.files import write_text

    findings = list(map(find, IDS))
    paths = dict(text.split("=", 1) for text in local or ())
    if compute:
        cells = (replace(cell, model=paths.get(cell.name, cell.model)) for cell in published_cells(findings, data=data))
        _run((cell for cell in cells if not only or {cell.name, cell.finding.id} & {*only}), out, ModelOptions())
    numbered = write_pages(out, pages, findings)
    overview.save(numbered, pages / "figures" / "overview.svg")
    write_text(pages / "index.md", overview.text(numbered))


@app.command()
@grouped
def tasks(
    model: ModelOptions,
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts per setting.")] = 60,
    name: Annotated[str | None, typer.Option(help="Model name in the table.")] = None,
    data: DataOption = None,
    rows: Annotated[
        Path, typer.Option(help="File of measured rows; the tables are written to its folder.")
    ] = TASK_ROWS,
) -> None:
    """Measure which tasks a model can do, by template, number of demonstrations and layout."""
    from experiments import task_table
    from experiments.framework.models import SMOLLM2
    from icl_lens.files import write_text

    folder = None if data is None else str(data)
    task_table.run(model.load(), name or model.model, rows, n, report=PlainConsole().print, data=folder)
    measured = task_table.read(rows)
    write_text(rows.with_suffix(".md"), task_table.tables(measured, SMOLLM2))
    write_text(rows.with_name("task_comparison.md"), task_table.comparison(measured))


@app.command("vectors")
@grouped
def vectors_(
    model: ModelOptions,
    rows: Annotated[Path, typer.Option(help="File of measured rows; the tables are written next to it.")] = VECTOR_ROWS,
) -> None:
    """Measure what function vectors and task vectors add without demonstrations, beside controls."""
    from experiments import vectors
    from icl_lens.files import write_text

    found = vectors.run(model.load(), rows, report=PlainConsole().print)
    write_text(rows.with_suffix(".md"), vectors.page(found))


@app.command("ground-truth")
def ground_truth(
    n: HalvesOption = 60,
    out: OutOption = Path("results"),
    page: Annotated[Path, typer.Option(help="Page to write.")] = ROOT / "docs" / "results" / "ground-truth.md",
) -> None:
    """Measure every finding, and every location method, on models whose circuit is known by construction."""
    from experiments import ground_truth as truth
    from experiments.catalogue import IDS, find
    from icl_lens.files import write_text

    findings = list(map(find, IDS))
    models = truth.planted_models(out / "planted-models")
    _run(truth.cells(models, findings, n), out / "planted", ModelOptions())
    console = PlainConsole(soft_wrap=True, highlight=False)
    recovered = truth.measure_recovery(models, out / "planted" / "recovery.json", n, console.print)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_text(page, truth.page(out / "planted", findings, recovered, n))


def _run(cells: "Iterable[Cell]", out: Path, model: ModelOptions) -> None:
    from dataclasses import replace

    from experiments.framework.run import run as run_cells

    console = PlainConsole(soft_wrap=True, highlight=False)
    run_cells(cells, out, load=lambda name: replace(model, model=name).load(), report=console.print)


def main() -> None:
    """Report an InputError, or a missing package, in one line on stderr, with exit code 2."""
    try:
        run_program(app, "python -m experiments")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "scipy":
            raise
        report_error("python -m experiments", "scipy is not installed; run: pip install -e '.[experiments]'")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
