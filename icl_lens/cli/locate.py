"""`icl-lens locate`: the heads of largest mean increase over a task, exact and certified."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from icl_lens.cli.console import PlainConsole
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import (
    ModelOptions,
    ReadoutOptions,
    TaskOption,
    TaskOptions,
    preview,
    reject_options,
    unescape,
)
from icl_lens.cli.run_context import interruptible, report_once

if TYPE_CHECKING:
    import pandas as pd

    from icl_lens.locate.configuration import RunRequest
    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.prompt import Prompt

DEFAULT_TOP = 20
"""Heads that are found unless the user says how many."""


class RankChoice(StrEnum):
    increase = "increase"
    contrast = "contrast"
    effect = "effect"


class PositionsChoice(StrEnum):
    last = "last"
    all = "all"


class MethodChoice(StrEnum):
    exact = "exact"
    gradient = "gradient"


@dataclass(frozen=True, kw_only=True)
class LocateTask(TaskOptions):
    """The task that heads are located on, and how its prompts are written."""

    task: TaskOption = None
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts.")] = 1000
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0

    def draw(self) -> "list[Prompt]":
        """The task's prompts."""
        return self.prompts(n=self.n, seed=self.seed)

    def asked(self, model: ModelOptions, reading: ReadoutOptions, by: RankChoice) -> "RunRequest":
        """What the run's folder remembers of these options."""
        from icl_lens.locate.configuration import RunRequest

        return RunRequest(
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
            separator=reading.separator_text,
            prefix=unescape(reading.prefix),
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
    reading: ReadoutOptions,
    model: ModelOptions,
    k: Annotated[
        int | None, typer.Option("--top", "-k", help="How many heads to find.", show_default="20, or all if fewer")
    ] = None,
    by: Annotated[
        RankChoice,
        typer.Option(
            help="Rank by increase of log p(answer), by its contrast with the other labels, or by the effect: what the "
            "answer loses when the head is zeroed."
        ),
    ] = RankChoice.increase,
    positions: Annotated[
        PositionsChoice, typer.Option(help="With --by effect: where heads are zeroed; all positions take far longer.")
    ] = PositionsChoice.last,
    method: Annotated[
        MethodChoice, typer.Option(help="With --by effect: exact, or estimated from gradients in a few passes.")
    ] = MethodChoice.exact,
    batch_size: Annotated[int | None, typer.Option(help="Prompts per batch, instead of as many as fit.")] = None,
    budget: Annotated[int, typer.Option(help="MiB that a batch's activations may take up.")] = 64,
) -> None:
    """Locate the heads of largest mean log-probability increase over a task's prompts: exact, certified.

    Or, --by effect, those whose removal costs the answer most: every head's mean effect, measured.

    With --out, chunks are kept: killed at any moment and started again with the same settings, the run goes on where
    it was and ends with the same files. A damaged chunk is named and computed again. Other settings need another
    folder. `torchrun --nproc_per_node 2 -m icl_lens locate …` shares the prompts out among processes.
    """
    from icl_lens.locate.configuration import EffectOptions, LocateOptions, prepare_run_folder
    from icl_lens.locate.distributed import Processes
    from icl_lens.locate.progress import progress_bar
    from icl_lens.locate.run_folder import locked_folder
    from icl_lens.models.view import ModelView

    if by is RankChoice.effect:
        reject_options("final_norm", "bias", reason="effects are measured on the model's own output")
    else:
        reject_options("positions", "method", reason="only --by effect removes heads")
    if batch_size is not None:
        reject_options("budget", reason="--batch-size says how many prompts a batch has")
    processes, out = Processes.from_environment(), output.out
    console = PlainConsole(quiet=not processes.is_main)
    warnings = PlainConsole(stderr=True, quiet=not processes.is_main, soft_wrap=True, highlight=False)
    batches = {"batch_size": batch_size, "byte_budget": budget * 2**20}
    norm, bias = reading.final_norm.value, reading.bias
    keeping = out if processes.is_main else None
    with (
        interruptible(out, warnings),
        report_once(processes),
        locked_folder(keeping) if keeping is not None else nullcontext(),
    ):
        prompts = task.draw()
        loaded = model.load(default_device=None if processes.device is None else str(processes.device))
        batch = reading.tokenize(loaded, prompts)
        console.print(preview(batch))
        found = min(DEFAULT_TOP, len(ModelView.of(loaded).heads())) if k is None else k
        if by is RankChoice.effect:
            options = EffectOptions(positions=positions.value, method=method.value, **batches)
        else:
            options = LocateOptions(k=found, final_norm=norm, bias=bias, **batches)
        folder = None
        if keeping is not None:
            folder = prepare_run_folder(keeping, loaded, batch, options, task.asked(model, reading, by))
        ranked = _by_effect if by is RankChoice.effect else _by_increase
        with progress_bar(console, hidden=not processes.is_main) as progress:
            table, said = ranked(
                loaded,
                batch,
                against=batch.other_label_tokens if by is RankChoice.contrast else None,
                **asdict(options),
                folder=folder,
                processes=processes,
                progress=progress,
                warn=lambda line: warnings.print(f"icl-lens: {line}"),
            )
        console.print(_shown(table.head(found), by))
        console.print(said)
        if folder is not None:
            console.print(f"Table: {folder.path / 'heads.parquet'}, heads.csv; per prompt: part-*.parquet")


def _by_increase(loaded: Any, batch: "PromptBatch", **run: Any) -> "tuple[pd.DataFrame, str]":
    """The table that is shown, and the sentence below it; both are written before, by the first process."""
    from icl_lens.locate.locate import locate_heads
    from icl_lens.locate.table import heads_table, summary, write_result

    top = locate_heads(loaded, batch, **run)
    table = heads_table(top, run["folder"])
    if run["folder"] is not None:
        write_result(run["folder"], table, top)
    return table, summary(top)


def _by_effect(loaded: Any, batch: "PromptBatch", **run: Any) -> "tuple[pd.DataFrame, str]":
    """As `_by_increase`, of all heads: each of them has an effect."""
    from icl_lens.locate.mean_effects import locate_effects
    from icl_lens.locate.table import write_effects

    effects = locate_effects(loaded, batch, **run)
    if run["folder"] is not None:
        write_effects(run["folder"], effects)
    return effects.to_frame(), effects.summary()


def _shown(table: "pd.DataFrame", by: RankChoice) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    value = "effect" if by is RankChoice.effect else "increase"
    intervals = "low" in table
    for name in ("rank", "head", f"mean {by.value} (nats)", *(["95 % interval"] if intervals else [])):
        shown.add_column(name, justify="left" if name == "head" else "right")
    shown.add_column("log-odds lost" if by is RankChoice.effect else "evaluated", justify="right")
    for row in table.to_dict("records"):
        interval = [f"{row['low']:.4f} … {row['high']:.4f}"] if intervals else []
        more = f"{row['log_odds']:.4f}" if by is RankChoice.effect else f"{row['share_evaluated']:.0%}"
        shown.add_row(*[Text(cell) for cell in [str(row["rank"]), row["name"], f"{row[value]:.4f}", *interval, more]])
    return shown
