"""`icl-lens locate`: locate the heads with the largest mean increase or effect over a task."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from rich.table import Table
from rich.text import Text
from typer import Option

from icl_lens.cli.console import PlainConsole, progress
from icl_lens.cli.option_groups import grouped, reject_options
from icl_lens.cli.options import By, ModelOptions, ReadoutOptions, RunOutput, SeedOption, TaskOptions, run_request
from icl_lens.errors import InputError
from icl_lens.report.rich_table import new_table

if TYPE_CHECKING:
    import pandas as pd

    from icl_lens.locate.distributed import Distributed
    from icl_lens.prompts.batch import PromptBatch

DEFAULT_TOP = 20
"""Default number of heads."""

MAIN_FIRST = 5.0
"""Seconds that a process with an error leaves to the main one: most errors occur in all processes, and the launcher
ends this one as soon as the main one has reported its own."""

Positions = Literal["last", "all"]
Method = Literal["exact", "gradient"]


@dataclass(frozen=True, kw_only=True)
class LocateTask(TaskOptions):
    """The task to locate heads on."""

    n: Annotated[int, Option("--n", "-n", min=1, help="Number of prompts.")] = 1000
    seed: SeedOption = 0


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """What heads are ranked by, how many are shown, and the size of batches."""

    panel: ClassVar[str] = "Options"

    k: Annotated[
        int | None, Option("--top", "-k", min=1, help="Number of heads to find.", show_default="20, or all if fewer")
    ] = None
    by: Annotated[By, Option(help="Score that ranks heads; the paper's is increase.")] = "contrast"
    positions: Annotated[Positions, Option(help="With --by effect: positions to zero ('all' is slower).")] = "last"
    method: Annotated[Method, Option(help="With --by effect: exact, or a gradient estimate.")] = "exact"
    batch_size: Annotated[int | None, Option(min=1, help="Prompts per batch.", show_default="as many as fit")] = None
    budget: Annotated[int, Option(min=1, help="Memory for a batch's activations, MiB.")] = 64

    def check(self, reading: ReadoutOptions) -> None:
        """Raise InputError for options that have no effect."""
        if self.by == "effect":
            reject_options(reading, "final_norm", "bias", reason="effects are measured on the model's output")
        else:
            reject_options(self, "positions", "method", reason="only --by effect ablates heads")
        if self.batch_size is not None:
            reject_options(self, "budget", reason="--batch-size sets the number of prompts per batch")


@grouped
def locate(
    task: LocateTask, output: RunOutput, reading: ReadoutOptions, model: ModelOptions, rank: RankOptions
) -> None:
    """Locate the heads with the largest mean contrast over a task's prompts; the result is exact and certified.

    A head's contrast is its increase of log p(answer) − log Σ p(other labels). With --by increase, rank heads by their
    increase of log p(answer), as the paper does; with --by effect, by how much log p(answer) drops when the head is
    zeroed.

    With --out, an interrupted run resumes where it stopped and writes the same files. A corrupt chunk is reported and
    recomputed. Different settings require a different folder. `torchrun --nproc_per_node 2 -m icl_lens locate …`
    distributes the prompts over processes.
    """
    from icl_lens.locate.configuration import EffectOptions, LocateOptions, prepare_run_folder
    from icl_lens.locate.distributed import Distributed
    from icl_lens.models.view import ModelView

    rank.check(reading)
    distributed = Distributed.from_environment()
    console, folder = PlainConsole(quiet=not distributed.is_main), None
    batches = {"batch_size": rank.batch_size, "byte_budget": rank.budget * 2**20}
    with output.running(is_main=distributed.is_main) as warn, _report_once(distributed):
        loaded, batch = task.start(console, model, reading, n=task.n, seed=task.seed, device=distributed.device)
        k = min(DEFAULT_TOP, len(ModelView.of(loaded).heads())) if rank.k is None else rank.k
        if rank.by == "effect":
            options = EffectOptions(positions=rank.positions, method=rank.method, **batches)
        else:
            options = LocateOptions(k=k, final_norm=reading.final_norm, bias=reading.bias, **batches)
        if distributed.is_main and output.out is not None:
            request = run_request(task, model, reading, n=task.n, seed=task.seed, by=rank.by)
            folder = prepare_run_folder(output.out, loaded, batch, options, request)
        if distributed.is_main:
            task.print_behavior(console, loaded, reading, seed=task.seed)
        with progress(hidden=not distributed.is_main) as report:
            table, sentence = (_by_effect if rank.by == "effect" else _by_increase)(
                loaded,
                batch,
                against=batch.other_label_tokens if rank.by == "contrast" else None,
                **asdict(options),
                folder=folder,
                distributed=distributed,
                progress=report,
                warn=warn,
            )
        console.print(_shown(table.head(k), rank.by))
        console.print(sentence)
        if folder is not None:
            console.print(f"Table: {folder.path / 'heads.parquet'}, heads.csv; values per prompt: part-*.parquet")


@contextmanager
def _report_once(distributed: "Distributed") -> Iterator[None]:
    """Report an error once: from the main process, or from the only process in which it occurs."""
    try:
        yield
    except InputError as error:
        if distributed.is_main:
            raise
        time.sleep(MAIN_FIRST)
        raise InputError(f"process {distributed.rank} of {distributed.size}: {error}") from None


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


def _shown(table: "pd.DataFrame", by: By) -> Table:
    value, last = ("effect", "log-odds drop") if by == "effect" else ("increase", "evaluated")
    intervals = ["95% interval"] if "low" in table else []
    shown = new_table("rank", "head", f"mean {by} (nats)", *intervals, last, left=(1,))
    for row in table.to_dict("records"):
        interval = [f"{row['low']:.4f} … {row['high']:.4f}"] if intervals else []
        more = f"{row['log_odds']:.4f}" if by == "effect" else f"{row['share_evaluated']:.0%}"
        shown.add_row(*[Text(cell) for cell in [str(row["rank"]), row["name"], f"{row[value]:.4f}", *interval, more]])
    return shown
