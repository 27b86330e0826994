"""`python -m experiments list | run ID… | report`: the paper's figures and tables, with verdicts."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from icl_lens.cli import hush
from icl_lens.cli.console import PlainConsole, report_error, tolerant_output
from icl_lens.cli.messages import spoken
from icl_lens.cli.options import DeviceOption, DtypeChoice, DtypeOption, ModelOption, RevisionOption
from icl_lens.cli.options import load as load_model
from icl_lens.errors import InputError
from icl_lens.report.palette import GREEN, ORANGE, SKY

T = TypeVar("T")
UNTUNED = ("animal-country", "fruit-instrument")
"""Tasks on which no choice of any experiment was made."""
DOCS = Path(__file__).parent.parent / "docs" / "results"
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder of results.")]
STYLES = {"supported": f"bold {GREEN}", "not supported": f"bold {ORANGE}", "undecided": f"bold {SKY}"}

app = typer.Typer(
    help="The paper's figures and tables: one command each, with a verdict.",
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("list")
def list_() -> None:
    """List the experiments: id, place in the paper, claim."""
    from experiments.catalogue import IDS, find

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("id", "in the paper", "claim"):
        table.add_column(column, overflow="fold")
    for experiment_id in IDS:
        experiment = find(experiment_id)
        table.add_row(Text(experiment.id), Text(experiment.source), Text(experiment.claim))
    PlainConsole().print(table)


@app.command()
def run(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID…", help="Experiments, see `list`.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every experiment.")] = False,
    model: ModelOption = "icl-mini",
    task: Annotated[
        str, typer.Option("--task", "-t", help="Word task (FALSE-TRUE categories) or sentence dataset.")
    ] = "sentiment-number",
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts; half choose heads, half test them.")] = 1000,
    seed: Annotated[int, typer.Option(help="Which prompts, halves and random heads.")] = 0,
    path: Annotated[str | None, typer.Option(help="Local files of a sentence dataset.")] = None,
    out: OutOption = Path("results"),
    overwrite: Annotated[bool, typer.Option(help="Replace results of another configuration.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeChoice.float32,
    revision: RevisionOption = None,
) -> None:
    """Run experiments; results go to OUT/MODEL/TASK/ID. What is done already is not computed again."""
    from experiments.catalogue import IDS
    from experiments.lab.study import StudySettings

    if everything == bool(ids):
        raise InputError("name the experiments to run (see `python -m experiments list`), or give --all")
    _run(
        list(dict.fromkeys(ids or ())) if not everything else list(IDS),
        StudySettings(model=model, task=task, n=n, seed=seed, path=path),
        out,
        overwrite=overwrite,
        load=lambda name: load_model(name, device=device, dtype=dtype, revision=revision),
    )


def _run(
    ids: list[str],
    settings: Any,
    out: Path,
    *,
    overwrite: bool,
    load: Callable[[str], Any] = lambda name: load_model(name, device=None, dtype=DtypeChoice.float32, revision=None),
) -> None:
    """Runs experiments with progress shown; raises InputError, after all others, for those that cannot be run."""
    from experiments.catalogue import find
    from experiments.lab.runner import run as run_all

    experiments = [find(name) for name in ids]
    console = PlainConsole(soft_wrap=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        ran = run_all(
            experiments,
            settings,
            load=load,
            out=out,
            overwrite=overwrite,
            track=_Tracker(progress),
            say=lambda line: console.print(_coloured(line)),
        )
    if ran.failed:
        raise InputError(
            f"{len(ran.failed)} of {len(experiments)} experiments could not be run: {', '.join(ran.failed)}"
        )


@app.command()
def docs(
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts of each model.")] = 1000,
    out: OutOption = Path("results"),
    pages: Annotated[Path, typer.Option(help="Folder of the pages; what it holds is replaced.")] = DOCS,
    overwrite: Annotated[bool, typer.Option(help="Replace results of another configuration.")] = False,
) -> None:
    """Run everything on the bundled models, and write the documentation's pages of results."""
    from experiments.catalogue import IDS
    from experiments.lab.pages import write_pages
    from experiments.lab.study import StudySettings
    from icl_lens.models.load import bundled_models

    main_task = StudySettings.task
    for model in bundled_models():
        _run(list(IDS), StudySettings(model=model, n=n), out, overwrite=overwrite)
        # How many heads are removed was settled on the main task: others are the test of that.
        for task in UNTUNED:
            _run(["ablation"], StudySettings(model=model, task=task, n=n), out, overwrite=overwrite)
    write_pages(out, pages, task=main_task, order=IDS)


@app.command()
def report(
    out: OutOption = Path("results"),
    page: Annotated[Path | None, typer.Option(help="Where to write it.", show_default="OUT/report.html")] = None,
) -> None:
    """Write one self-contained page of all results under OUT."""
    from experiments.catalogue import IDS
    from experiments.lab.report import write_report

    written = write_report(out, page or out / "report.html", order=IDS)
    PlainConsole(soft_wrap=True, highlight=False).print(str(written))


class _Tracker:
    """Progress bars for passes; where nobody watches a terminal, one line each."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def __call__(self, things: Iterable[T], total: int, what: str) -> Iterator[T]:
        if not self.progress.console.is_terminal:
            self.progress.console.print(f"  {what} …")
        bar: Any = self.progress.add_task(what, total=total)
        for thing in things:
            yield thing
            self.progress.advance(bar)
        self.progress.remove_task(bar)


def _coloured(line: str) -> Text:
    text = Text(line)
    for outcome, style in STYLES.items():
        if f": {outcome}:" in line:
            start = line.index(f": {outcome}:") + 2
            text.stylize(style, start, start + len(outcome))
    return text


def main() -> None:
    """InputError becomes one line on stderr and exit code 2."""
    try:
        tolerant_output()
        if not {"-h", "--help"} & set(sys.argv[1:]):
            hush()
        app(prog_name="python -m experiments")
    except InputError as error:
        report_error("experiments", spoken(str(error)))
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
