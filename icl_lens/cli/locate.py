"""`icl-lens locate`: locate the heads with the largest mean score over a task."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rich.table import Table
from typer import Option

from icl_lens.cli.atlas import AtlasTask
from icl_lens.cli.console import progress
from icl_lens.cli.folder_options import FolderOptions
from icl_lens.cli.head_options import LocatingByOption
from icl_lens.cli.option_groups import grouped, option_words, reject_options
from icl_lens.cli.options import (
    FileOptions,
    ModelOptions,
    Positions,
    ReadoutOptions,
    SeedOption,
    TokenOptions,
    preview,
)
from icl_lens.cli.task_options import (
    SplitTask,
    TaskOptions,
    print_what_heads_carry,
    shared_queries_remedy,
)
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_LOCATED, N_RANDOM_SETS
from icl_lens.foundation.ranking_scores import LOCATING_SCORE
from icl_lens.report.terminal import new_table

if TYPE_CHECKING:
    from icl_lens.measures.locate_result import LocatedHeads
    from icl_lens.models.head import Head


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The score that ranks heads, the number of heads to locate, and the size of batches."""

    panel: ClassVar[str] = "Options"

    k: Annotated[
        int | None,
        Option(
            "--top",
            "-k",
            min=1,
            help="Number of heads to locate.",
            show_default=f"{N_LOCATED}, or all if fewer",
        ),
    ] = None
    by: LocatingByOption = None
    positions: Annotated[
        Positions, Option(help="With --by effect: positions to zero ('all' is slower).")
    ] = "last"
    method: Annotated[
        Literal["exact", "gradient"],
        Option(help="With --by effect: exact, or a gradient estimate."),
    ] = "exact"
    random_sets: Annotated[
        int, Option(min=3, max=1000, help="Random sets from the same layers.")
    ] = N_RANDOM_SETS
    anyway: Annotated[
        bool, Option("--anyway", help="Locate heads also where the model does not do the task.")
    ] = False
    batch_size: Annotated[
        int | None, Option(min=1, help="Prompts per batch.", show_default="as many as fit")
    ] = None
    memory: Annotated[int, Option(min=1, help="Memory for a batch's activations, MiB.")] = 64


@grouped
def locate(
    rank: RankOptions,
    task: SplitTask,
    files: FileOptions,
    folder: FolderOptions,
    readout: ReadoutOptions,
    model: ModelOptions,
    seed: SeedOption = 0,
) -> None:
    """Locate the heads that carry a task's answer, and test them on other prompts.

    Heads are ranked by their mean effect; then the first are zeroed jointly, on as many prompts
    with other queries, beside random heads of the same layers. A task of 20 prompts or more is
    checked first: if the model is not shown to do it, the command stops, unless --anyway is given.

    A head's effect is the log-odds that the answer loses when the head is zeroed, or a gradient
    estimate of this with --method gradient. --by exchange ranks by the log-odds lost when the head's
    query alone is exchanged for that of the other class, --by contrast by the increase of
    log p(answer) − log Σ p(other labels), --by increase by that of log p(answer).

    With --out, an interrupted run resumes where it stopped and writes the same files. Different
    settings require a different folder. `torchrun --nproc_per_node 2 -m icl_lens locate …`
    distributes the prompts over processes.
    """
    import icl_lens as il
    from icl_lens.models.view import ModelView

    by = rank.by or LOCATING_SCORE
    if by in ("effect", "exchange"):
        reject_options(
            readout, "final_norm", "bias", reason="effects are measured on the model's output"
        )
    if by != "effect":
        reject_options(rank, "positions", "method", reason="only --by effect ablates heads")
    if rank.batch_size is not None:
        reject_options(rank, "memory", reason="--batch-size sets the number of prompts per batch")
    files.check()
    with folder.running() as (run, console):
        locating, testing = task.split_prompts(seed)
        prompts = [*locating, *testing]
        task.describe_data(console, prompts, readout)
        loaded = model.load(default_device=run.device)
        batch, held_out = (readout.tokenize(loaded, half) for half in (locating, testing))
        model.warn_of_words(console, prompts)
        console.print(preview(batch))
        behavior = task.print_behavior(
            console, loaded, readout, n=task.n, seed=seed, measured=testing
        )
        if behavior is not None and behavior.lacks_task and not rank.anyway:
            raise InputError(
                "the model is not shown to do this task, so that heads cannot be shown to carry it; "
                "pass --anyway to locate heads all the same, or change the task's format "
                "(--separator, --labels, --demonstrations)"
            )
        with progress(hidden=console.quiet) as report:
            run = replace(
                run,
                batch_size=rank.batch_size,
                memory=rank.memory * 2**20,
                progress=report,
                about=folder.about(task, model, readout, prompts=prompts, n=task.n, seed=seed),
            )
            located = il.locate(
                loaded,
                batch,
                held_out=held_out,
                n_random=rank.random_sets,
                seed=seed,
                by=by,
                k=rank.k,
                positions=rank.positions,
                method=rank.method,
                **readout.readout_arguments(),
                run=run,
            )
        if console.quiet:
            return
        page = files.write(located.to_html)
        files.write_json(lambda: located.to_json(model=ModelView.of(loaded).name))
        console.print(located.finding, style="bold")
        print_what_heads_carry(console, behavior, located.removal)
        is_undecided = located.removal is not None and located.removal.is_undecided
        task.print_more_queries(console, testing, n=task.n, seed=seed, is_undecided=is_undecided)
        if located.n_shared_queries:
            console.print(shared_queries_remedy(task, seed))
        console.print(_table(located))
        if located.removal is not None:
            console.print(located.table_finding)
        console.print(located.summary())
        command = atlas_command(task, readout, model, located.heads, seed=seed)
        console.print(f"What kind of heads they are: {command}", soft_wrap=True)
        files.show(page, console)
        if folder.out is not None:
            table_path = folder.out / "heads.parquet"
            console.print(f"Table: {table_path}, heads.csv; values per prompt: part-*.parquet")


def atlas_command(
    task: SplitTask,
    tokens: TokenOptions,
    model: ModelOptions,
    heads: "Sequence[Head]",
    *,
    seed: int,
) -> str:
    """Return the command that says what kind of heads these are, with the same task and model."""
    words = ["icl-lens", "atlas", *option_words(model, ModelOptions)]
    words += option_words(task, TaskOptions)
    if task.n < AtlasTask.n:
        words += ["-n", str(task.n)]
    words += option_words(tokens, TokenOptions)
    if seed:
        words += ["--seed", str(seed)]
    return shlex.join([*words, "--heads", ",".join(map(str, heads))])


def _table(located: "LocatedHeads") -> Table:
    columns = located.columns()
    table = new_table(*columns)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(str, row))
    return table
