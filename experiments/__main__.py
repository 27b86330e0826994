"""`python -m experiments list | run ID… | report`: the paper's figures and tables, with verdicts."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from icl_lens.cli import hush, in_one_sentence
from icl_lens.cli.console import PlainConsole, report_error, tolerant_output
from icl_lens.cli.groups import grouped
from icl_lens.cli.launched import interruptible, together
from icl_lens.cli.messages import spoken
from icl_lens.cli.options import (
    DEFAULT_TEMPLATE,
    ClassesChoice,
    DeviceOption,
    DtypeChoice,
    DtypeOption,
    ModelOption,
    RevisionOption,
    TokenOptions,
)
from icl_lens.cli.options import load as load_model
from icl_lens.errors import InputError
from icl_lens.report.palette import GREEN, ORANGE, SKY

if TYPE_CHECKING:
    from experiments.lab.study import StudySettings
    from experiments.lab.work import Work
    from icl_lens.locate.processes import Processes

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


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """A task, and how its prompts are drawn and written."""

    panel: ClassVar[str] = "Task"

    task: Annotated[
        str, typer.Option("--task", "-t", help="Word task (FALSE-TRUE categories) or sentence dataset.")
    ] = "sentiment-number"
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts; half choose heads, half test them.")] = 1000
    seed: Annotated[int, typer.Option(help="Which prompts, halves and random heads.")] = 0
    path: Annotated[str | None, typer.Option(help="Word list (.json), or local files of a sentence dataset.")] = None
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="TASK[=PATH]", help="Another task that claims about several tasks look at; repeatable."),
    ] = None
    demonstrations: Annotated[int, typer.Option(help="Demonstrations of each class.")] = 2
    labels: Annotated[
        str | None,
        typer.Option(
            help="Label words, the true class's first; with --classes all in order of the classes' names.",
            show_default="foo,bar",
        ),
    ] = None
    classes: Annotated[ClassesChoice, typer.Option(help="Two classes per prompt, or all of a sentence dataset's.")] = (
        ClassesChoice.binary
    )
    columns: Annotated[str, typer.Option(help="The columns of texts and labels in your own sentences.")] = "text,label"
    split: Annotated[str, typer.Option(help="The split that queries are from.")] = "test"
    max_words: Annotated[int | None, typer.Option(help="Leave out longer texts.")] = None
    template: Annotated[
        str, typer.Option(help="How a demonstration is written; \\n and \\t are a line break and a tab.")
    ] = DEFAULT_TEMPLATE
    separator: Annotated[
        str | None, typer.Option(help="What stands between demonstrations.", show_default="a blank")
    ] = None
    prefix: Annotated[str, typer.Option(help="What stands before the first demonstration.")] = ""

    def settings(self, model: str) -> "StudySettings":
        """These for one model; raises InputError for a template that no prompt can be written by."""
        from experiments.lab.study import StudySettings

        text, _, label = (part.strip() for part in self.columns.partition(","))
        if not (text and label) or "," in label:
            raise InputError(
                f"--columns {self.columns!r} must name two columns, texts and labels, such as review,stars"
            )
        return StudySettings(
            model=model,
            task=self.task,
            n=self.n,
            seed=self.seed,
            path=self.path,
            compared=tuple(self.compare or ()),
            demonstrations=self.demonstrations,
            labels=None if self.labels is None else tuple(word.strip() for word in self.labels.split(",")),
            classes=self.classes.value,
            columns=(text, label),
            split=self.split,
            max_words=self.max_words,
            template=TokenOptions(template=self.template, separator=self.separator, prefix=self.prefix).written(),
        )


@app.command()
@grouped
def run(
    drawn: StudyOptions,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID…", help="Experiments, see `list`.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every experiment.")] = False,
    model: ModelOption = "icl-mini",
    out: OutOption = Path("results"),
    overwrite: Annotated[bool, typer.Option(help="Replace results of another configuration.")] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeChoice.float32,
    revision: RevisionOption = None,
) -> None:
    """Run experiments; results go to OUT/MODEL/TASK/ID. What is done already is not computed again.

    Every pass leaves chunks in OUT/MODEL/TASK/passes: killed at any moment and started again with the same settings, a
    run goes on where it was and ends with the same files. `torchrun --nproc_per_node 2 -m experiments run --all` shares
    the passes out among processes.
    """
    from experiments.catalogue import IDS

    if everything == bool(ids):
        raise InputError("name the experiments to run (see `python -m experiments list`), or give --all")
    _run(
        list(dict.fromkeys(ids or ())) if not everything else list(IDS),
        drawn.settings(model),
        out,
        overwrite=overwrite,
        load=lambda name, own: load_model(name, device=device or own, dtype=dtype, revision=revision),
    )


def _run(ids: list[str], settings: "StudySettings", out: Path, **options: Any) -> None:
    """Runs experiments on one model with progress shown; raises InputError in the end for those that cannot be run."""
    failed = _run_several(ids, [settings], out, **options)
    if failed is not None:
        raise failed


def _run_several(
    ids: list[str],
    several: "Sequence[StudySettings]",
    out: Path,
    *,
    overwrite: bool,
    load: Callable[[str, str | None], Any] = lambda name, own: load_model(
        name, device=own, dtype=DtypeChoice.float32, revision=None
    ),
    processes: "Processes | None" = None,
) -> InputError | None:
    """Runs experiments on one model after the other, with one bar; the error to end with if some cannot be run."""
    from experiments.catalogue import find
    from experiments.lab.runner import run as run_all
    from icl_lens.locate.processes import Processes

    experiments = [find(name) for name in ids]
    processes = processes or Processes.launched()
    console = PlainConsole(soft_wrap=True, highlight=False, quiet=not processes.first)
    warnings = PlainConsole(stderr=True, soft_wrap=True, highlight=False, quiet=not processes.first)
    own = None if processes.device is None else str(processes.device)
    failed: list[str] = []
    with interruptible(out, warnings, program="experiments"), together(processes), _bar(console) as work:
        for place, settings in enumerate(several, start=1):
            work.later = len(several) - place
            if len(several) > 1:
                console.print(f"{settings.model} ({place} of {len(several)})")
            ran = run_all(
                experiments,
                settings,
                load=lambda name: load(name, own),
                out=out,
                overwrite=overwrite,
                processes=processes,
                work=work,
                say=lambda line: console.print(_coloured(spoken(line) if ": cannot be run: " in line else line)),
                warn=lambda line: warnings.print(f"experiments: {line}"),
            )
            failed += ran.failed
        if failed and not processes.first:
            # The first says so, and ends with 2 once it has written the others' results; a 2 here would stop it.
            raise SystemExit(0)
    if not failed:
        return None
    named = ", ".join(dict.fromkeys(failed))
    return InputError(f"{len(failed)} of {len(experiments) * len(several)} experiments could not be run: {named}")


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
    from icl_lens.locate.processes import Processes
    from icl_lens.models.load import bundled_models

    main_task, processes = StudySettings.task, Processes.launched()
    for model in bundled_models():
        _run(list(IDS), StudySettings(model=model, n=n), out, overwrite=overwrite, processes=processes)
        # How many heads are removed was settled on the main task: others are the test of that.
        for task in UNTUNED:
            other = StudySettings(model=model, task=task, n=n)
            _run(["ablation"], other, out, overwrite=overwrite, processes=processes)
    if processes.first:
        write_pages(out, pages, task=main_task, order=IDS, models=bundled_models())


@app.command()
def rejudge(
    out: OutOption = Path("results"),
    figures: Annotated[bool, typer.Option(help="Draw the figures anew as well.")] = True,
) -> None:
    """Judge results anew from their tables, by the rules and with the captions of this version; no model is loaded."""
    from experiments.catalogue import find
    from experiments.lab.rejudge import rejudge as judge_again

    console, failed = PlainConsole(soft_wrap=True, highlight=False), 0
    for one in judge_again(out, find=find, figures=figures):
        failed += bool(one.failed)
        told = f"stays as it is: {one.failed}; run it anew" if one.failed else ", ".join(one.changes)
        if told:
            console.print(f"{one.folder}: {told}")
    if failed:
        raise typer.Exit(1)


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


@app.command()
def seeds(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=FOLDER,FOLDER…", help="An architecture, and its models, one a seed: folders or bundled ones."
        ),
    ],
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts of each model.")] = 1000,
    task: Annotated[str, typer.Option("--task", "-t", help="Word task (FALSE-TRUE categories).")] = "sentiment-number",
    only: Annotated[list[str] | None, typer.Option(help="Only this experiment; may be given again.")] = None,
    out: OutOption = Path("results"),
    page: Annotated[Path, typer.Option(help="Where to write the page.")] = DOCS / "seeds.md",
    overwrite: Annotated[bool, typer.Option(help="Replace results of another configuration.")] = False,
) -> None:
    """Run everything on models trained with different seeds, and write the page of which verdicts change with it.

    What is done is not computed again, as with `run`: killed at any moment and started again, it goes on.
    """
    from experiments.catalogue import IDS, find
    from experiments.lab.seeds import trained, write_seeds
    from icl_lens.locate.processes import Processes

    ids = list(dict.fromkeys(only or IDS))
    for name in ids:
        find(name)
    named, processes = trained(models), Processes.launched()
    several = [settings for one in named for settings in one.settings(n=n, task=task)]
    failed = _run_several(ids, several, out, overwrite=overwrite, processes=processes)
    if processes.first:
        write_seeds(named, out, page, n=n, task=task, order=ids)
    if failed is not None:
        raise failed


@app.command("compare-verdicts")
def compare_verdicts(
    old: Annotated[Path, typer.Argument(help="results.json of one run of `docs`.")],
    new: Annotated[Path, typer.Argument(help="results.json of another one.")],
) -> None:
    """Print the verdicts of two runs side by side, as a Markdown table; other verdicts than the old ones are bold."""
    from experiments.catalogue import IDS
    from experiments.lab.old_models import changes, old_beside_new, read_verdicts

    before, now = read_verdicts(old), read_verdicts(new)
    console = PlainConsole(soft_wrap=True, highlight=False)
    console.print("\n".join([changes(before, now), "", *old_beside_new(before, now, order=IDS)]))


@app.command("keep-verdicts")
def keep_verdicts(
    results: Annotated[Path, typer.Argument(help="results.json that `docs` wrote.")] = DOCS / "results.json",
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to keep them.")] = DOCS / "old-models.json",
) -> None:
    """Keep the verdicts on today's models, so that `docs` shows them beside those on other models of these names."""
    from experiments.lab.old_models import keep_verdicts as keep

    keep(results, out)


@contextmanager
def _bar(console: PlainConsole) -> "Iterator[Work]":
    """The run's work, shown as one bar with rate and time left; where nobody watches a terminal, a line a pass."""
    from experiments.lab.work import Work

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=None, rate="", left="", visible=False)
        said = ""

        def changed(work: Work) -> None:
            nonlocal said
            if not console.is_terminal:
                if work.what != said:
                    said = work.what
                    console.print(f"  {said} …")
                return
            rate = "" if work.rate is None else f"{work.rate:.1f} prompts/s"
            left = "" if work.left is None else f"about {timedelta(seconds=round(work.left))} left"
            progress.update(
                bar, description=work.what, completed=work.done, total=work.total, rate=rate, left=left, visible=True
            )

        yield Work(changed)


def _coloured(line: str) -> Text:
    text = Text(line)
    for outcome, style in STYLES.items():
        if f": {outcome}:" in line:
            start = line.index(f": {outcome}:") + 2
            text.stylize(style, start, start + len(outcome))
    return text


def main() -> None:
    """InputError, and a missing package, become one line on stderr and exit code 2."""
    try:
        with in_one_sentence("experiments"):
            tolerant_output()
            if not {"-h", "--help"} & set(sys.argv[1:]):
                hush()
            app(prog_name="python -m experiments")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "scipy":
            raise
        report_error("experiments", "scipy is not installed, which verdicts need; pip install -e '.[experiments]'")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
