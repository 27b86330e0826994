"""`icl-lens locate`: locate the heads with the largest mean increase or effect over a task."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

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
"""Default number of heads."""


Rank = Literal["increase", "contrast", "effect"]
Positions = Literal["last", "all"]
Method = Literal["exact", "gradient"]


@dataclass(frozen=True, kw_only=True)
class LocateTask(TaskOptions):
    """The task to locate heads on."""

    task: TaskOption = None
    n: Annotated[int, typer.Option("--n", "-n", help="Number of prompts.")] = 1000
    seed: Annotated[int, typer.Option(help="Seed for sampling prompts.")] = 0

    def draw(self) -> "list[Prompt]":
        """Return the task's prompts."""
        return self.prompts(n=self.n, seed=self.seed)

    def asked(self, model: ModelOptions, reading: ReadoutOptions, by: Rank) -> "RunRequest":
        """Return the options that the run's manifest stores."""
        from icl_lens.locate.configuration import RunRequest

        return RunRequest(
            model=model.model,
            revision=model.revision,
            dtype=model.dtype,
            task=self.name or "",
            n=self.n,
            seed=self.seed,
            layout=self.layout,
            demonstrations=self.demonstrations,
            path=None if self.path is None else str(self.path),
            columns=self.columns.replace(" ", ""),
            split=self.split,
            max_words=self.max_words,
            classes=self.classes,
            template=reading.demonstration,
            separator=reading.separator_text,
            prefix=unescape(reading.prefix),
            prepend_bos=reading.bos,
            shared_prefix=reading.shared_prefix,
            by=by,
        )


@dataclass(frozen=True, kw_only=True)
class LocateOutput:
    """The output folder of a run."""

    panel: ClassVar[str] = "Output"

    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output folder; an interrupted run resumes from it.")
    ] = None


@grouped
def locate(
    task: LocateTask,
    output: LocateOutput,
    reading: ReadoutOptions,
    model: ModelOptions,
    k: Annotated[
        int | None, typer.Option("--top", "-k", help="Number of heads to find.", show_default="20, or all if fewer")
    ] = None,
    by: Annotated[
        Rank,
        typer.Option(help="Rank by increase, contrast with other labels, or ablation effect."),
    ] = "increase",
    positions: Annotated[Positions, typer.Option(help="With --by effect: positions to zero; all is slower.")] = "last",
    method: Annotated[Method, typer.Option(help="With --by effect: exact, or a gradient estimate.")] = "exact",
    batch_size: Annotated[int | None, typer.Option(help="Prompts per batch.", show_default="as many as fit")] = None,
    budget: Annotated[int, typer.Option(help="Memory for a batch's activations, MiB.")] = 64,
) -> None:
    """Locate the heads with the largest mean log-probability increase over a task's prompts, exact and certified.

    With --by contrast, rank heads by their increase of log p(answer) − log Σ p(other labels). With --by effect, rank
    all heads by how much log p(answer) drops when the head is zeroed.

    With --out, an interrupted run resumes where it stopped and writes the same files. A corrupt chunk is reported and
    recomputed. Different settings require a different folder. `torchrun --nproc_per_node 2 -m icl_lens locate …`
    distributes the prompts over processes.
    """
    from icl_lens.locate.configuration import EffectOptions, LocateOptions, prepare_run_folder
    from icl_lens.locate.distributed import Distributed
    from icl_lens.locate.progress import progress_bar
    from icl_lens.locate.run_folder import locked_folder
    from icl_lens.models.view import ModelView

    if by == "effect":
        reject_options("final_norm", "bias", reason="effects are measured on the model's output")
    else:
        reject_options("positions", "method", reason="only --by effect ablates heads")
    if batch_size is not None:
        reject_options("budget", reason="--batch-size sets the number of prompts per batch")
    distributed, out = Distributed.from_environment(), output.out
    console = PlainConsole(quiet=not distributed.is_main)
    warnings = PlainConsole(stderr=True, quiet=not distributed.is_main, soft_wrap=True, highlight=False)
    batches = {"batch_size": batch_size, "byte_budget": budget * 2**20}
    norm, bias = reading.final_norm, reading.bias
    run_path = out if distributed.is_main else None
    with (
        interruptible(out, warnings),
        report_once(distributed),
        locked_folder(run_path) if run_path is not None else nullcontext(),
    ):
        prompts = task.draw()
        loaded = model.load(default_device=None if distributed.device is None else str(distributed.device))
        batch = reading.tokenize(loaded, prompts)
        console.print(preview(batch))
        found = min(DEFAULT_TOP, len(ModelView.of(loaded).heads())) if k is None else k
        if by == "effect":
            options = EffectOptions(positions=positions, method=method, **batches)
        else:
            options = LocateOptions(k=found, final_norm=norm, bias=bias, **batches)
        folder = None
        if run_path is not None:
            folder = prepare_run_folder(run_path, loaded, batch, options, task.asked(model, reading, by))
        ranked = _by_effect if by == "effect" else _by_increase
        with progress_bar(console, hidden=not distributed.is_main) as progress:
            table, sentence = ranked(
                loaded,
                batch,
                against=batch.other_label_tokens if by == "contrast" else None,
                **asdict(options),
                folder=folder,
                distributed=distributed,
                progress=progress,
                warn=lambda line: warnings.print(f"icl-lens: {line}"),
            )
        console.print(_shown(table.head(found), by))
        console.print(sentence)
        if folder is not None:
            console.print(f"Table: {folder.path / 'heads.parquet'}, heads.csv; values per prompt: part-*.parquet")


def _by_increase(loaded: Any, batch: "PromptBatch", **run: Any) -> "tuple[pd.DataFrame, str]":
    """Return the table to display and a summary sentence; the main process writes the result files."""
    from icl_lens.locate.locate import locate_heads
    from icl_lens.locate.table import heads_table, summary, write_result

    top = locate_heads(loaded, batch, **run)
    table = heads_table(top, run["folder"])
    if run["folder"] is not None:
        write_result(run["folder"], table, top)
    return table, summary(top)


def _by_effect(loaded: Any, batch: "PromptBatch", **run: Any) -> "tuple[pd.DataFrame, str]":
    """Like `_by_increase`, for the effects of all heads."""
    from icl_lens.locate.mean_effects import locate_effects
    from icl_lens.locate.table import write_effects

    effects = locate_effects(loaded, batch, **run)
    if run["folder"] is not None:
        write_effects(run["folder"], effects)
    return effects.to_frame(), effects.summary()


def _shown(table: "pd.DataFrame", by: Rank) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    value = "effect" if by == "effect" else "increase"
    intervals = "low" in table
    for name in ("rank", "head", f"mean {by} (nats)", *(["95 % interval"] if intervals else [])):
        shown.add_column(name, justify="left" if name == "head" else "right")
    shown.add_column("log-odds drop" if by == "effect" else "evaluated", justify="right")
    for row in table.to_dict("records"):
        interval = [f"{row['low']:.4f} … {row['high']:.4f}"] if intervals else []
        more = f"{row['log_odds']:.4f}" if by == "effect" else f"{row['share_evaluated']:.0%}"
        shown.add_row(*[Text(cell) for cell in [str(row["rank"]), row["name"], f"{row[value]:.4f}", *interval, more]])
    return shown
