"""`icl-lens locate`: the heads of largest mean increase over a task, exact and certified."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from icl_lens.cli.console import PlainConsole
from icl_lens.cli.groups import grouped
from icl_lens.cli.options import (
    ByChoice,
    ModelOptions,
    ReadingOptions,
    TaskOption,
    TaskOptions,
    check_unused,
    decoded,
    first_prompt,
)

if TYPE_CHECKING:
    import pandas as pd

    from icl_lens.locate.configuration import Asked
    from icl_lens.locate.processes import Processes
    from icl_lens.prompts.prompt import Prompt

MOST_SHOWN = 20
"""Heads that are found unless the user says how many."""

PASSES = {"part": "locating", "again": "second pass over open heads"}


@dataclass(frozen=True, kw_only=True)
class LocateTask(TaskOptions):
    """The task that heads are located on, and how its prompts are written."""

    task: TaskOption = None
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts.")] = 1000
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0

    def draw(self) -> "list[Prompt]":
        """The task's prompts."""
        return self.prompts(n=self.n, seed=self.seed)

    def asked(self, model: ModelOptions, reading: ReadingOptions, by: ByChoice) -> "Asked":
        """What the run's folder remembers of these options."""
        from icl_lens.locate.configuration import Asked

        return Asked(
            model=model.model,
            revision=model.revision,
            dtype=model.dtype.value,
            task=self.name or "",
            n=self.n,
            seed=self.seed,
            layout=self.layout.value,
            demonstrations=self.demonstrations,
            path=None if self.path is None else str(self.path),
            columns=self.columns.replace(" ", ""),
            split=self.split,
            max_words=self.max_words,
            classes=self.classes.value,
            template=reading.demonstration,
            separator=reading.between,
            prefix=decoded(reading.prefix),
            bos=reading.bos,
            shared_prefix=reading.shared_prefix.value,
            by=by.value,
        )


@dataclass(frozen=True, kw_only=True)
class LocateOutput:
    """Where a run is kept."""

    panel: ClassVar[str] = "Output"

    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for chunks and result; a killed run goes on from there.")
    ] = None


@grouped
def locate(
    task: LocateTask,
    output: LocateOutput,
    reading: ReadingOptions,
    model: ModelOptions,
    k: Annotated[
        int | None, typer.Option("--top", "-k", help="How many heads to find.", show_default="20, or all if fewer")
    ] = None,
    by: Annotated[
        ByChoice, typer.Option(help="Rank by log p(answer), or by its contrast with the other labels.")
    ] = ByChoice.increase,
    batch_size: Annotated[int | None, typer.Option(help="Prompts per batch, instead of as many as fit.")] = None,
    budget: Annotated[int, typer.Option(help="MiB that a batch's activations may take up.")] = 64,
) -> None:
    """Locate the heads of largest mean log-probability increase over a task's prompts: exact, certified.

    With --out, chunks are kept: killed at any moment and started again with the same settings, the run goes on where
    it was and ends with the same files. A damaged chunk is named and computed again. Other settings need another
    folder. `torchrun --nproc_per_node 2 -m icl_lens locate …` shares the prompts out among processes.
    """
    from icl_lens.locate.configuration import LocateOptions, run_folder
    from icl_lens.locate.folder import opened
    from icl_lens.locate.locate import locate_heads
    from icl_lens.locate.processes import Processes
    from icl_lens.locate.table import heads_table, summary, write_result
    from icl_lens.models.view import ModelView

    if batch_size is not None:
        check_unused("budget", because="--batch-size says how many prompts a batch has")
    processes, out = Processes.launched(), output.out
    console = PlainConsole(quiet=not processes.first)
    warnings = PlainConsole(stderr=True, quiet=not processes.first, soft_wrap=True, highlight=False)
    norm, bias = reading.final_norm.value, reading.bias
    keeping = out if processes.first else None
    with (
        _interruptible(out, warnings),
        _together(processes),
        opened(keeping) if keeping is not None else nullcontext(),
    ):
        prompts = task.draw()
        loaded = model.load(default_device=None if processes.device is None else str(processes.device))
        batch = reading.tokenize(loaded, prompts)
        console.print(first_prompt(batch))
        found = min(MOST_SHOWN, len(ModelView.of(loaded).heads())) if k is None else k
        options = LocateOptions(k=found, final_norm=norm, bias=bias, batch_size=batch_size, byte_budget=budget * 2**20)
        folder = None
        if keeping is not None:
            folder = run_folder(keeping, loaded, batch, options, task.asked(model, reading, by))
        with _bar(console, processes) as progress:
            top = locate_heads(
                loaded,
                batch,
                **asdict(options),
                against=batch.other_label_tokens if by is ByChoice.contrast else None,
                folder=folder,
                processes=processes,
                progress=progress,
                warn=lambda line: warnings.print(f"icl-lens: {line}"),
            )
        if not processes.first:
            return
        table = heads_table(top, folder)
        if folder is not None:
            write_result(folder, table, top)
        console.print(_shown(table, by))
        console.print(summary(top))
        if folder is not None:
            console.print(f"Table: {folder.path / 'heads.parquet'}, heads.csv; per prompt: part-*.parquet")


@contextmanager
def _interruptible(out: Path | None, console: Console) -> Iterator[None]:
    """Ctrl-C ends the run with a line that says how to continue it."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "" if out is None else f"; the same command goes on from the chunks in {str(out)!r}"
        console.print(f"icl-lens: interrupted{kept}")
        raise SystemExit(130) from None


@contextmanager
def _together(processes: "Processes") -> Iterator[None]:
    """What is wrong is said once: by the first process, or by the one that alone meets the error."""
    from icl_lens.errors import InputError

    try:
        yield
    except InputError as error:
        if processes.first_also_fails():
            raise SystemExit(2) from None
        processes.explained()
        if processes.first:
            raise
        raise InputError(f"process {processes.rank} of {processes.size}: {error}") from None
    except Exception:
        processes.explained()
        raise


def _shown(table: "pd.DataFrame", by: ByChoice) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    intervals = "low" in table
    for name in ("rank", "head", f"mean {by.value} (nats)", *(["95 % interval"] if intervals else []), "evaluated"):
        shown.add_column(name, justify="left" if name == "head" else "right")
    for row in table.to_dict("records"):
        interval = [f"{row['low']:.4f} … {row['high']:.4f}"] if intervals else []
        cells = [str(row["rank"]), row["name"], f"{row['increase']:.4f}", *interval, f"{row['share_evaluated']:.0%}"]
        shown.add_row(*[Text(cell) for cell in cells])
    return shown


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f} prompts/s")


@contextmanager
def _bar(console: Console, processes: "Processes") -> Iterator[Any]:
    """A progress bar with rate and time left; yields the function that moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=console, disable=not processes.first) as bar:

        def move(kind: str, done: int, total: int) -> None:
            if kind not in tasks:
                tasks[kind] = bar.add_task(PASSES[kind], total=total)
            bar.update(tasks[kind], completed=done, total=total)

        try:
            yield move
        except KeyboardInterrupt:
            bar.live.transient = True  # no half-drawn bar is left
            raise
