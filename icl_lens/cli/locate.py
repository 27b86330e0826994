"""`icl-lens locate`: locate the heads with the largest mean contrast, increase or effect over a
task.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from rich.table import Table
from typer import Option

from icl_lens.cli.console import progress
from icl_lens.cli.option_groups import grouped, reject_options
from icl_lens.cli.options import (
    ByOption,
    ModelOptions,
    OutputOptions,
    Positions,
    ReadoutOptions,
    RunOutput,
    SeedOption,
    TaskOptions,
)
from icl_lens.head_scores import SCORES, Score, choose_score
from icl_lens.prompts.draw import N_PROMPTS
from icl_lens.report.terminal import new_table

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The score that ranks heads, the number of heads to find, and the size of batches."""

    panel: ClassVar[str] = "Options"

    k: Annotated[
        int | None,
        Option(
            "--top",
            "-k",
            min=1,
            help="Number of heads to find.",
            show_default="20, or all if fewer",
        ),
    ] = None
    by: ByOption = None
    positions: Annotated[
        Positions, Option(help="With --by effect: positions to zero ('all' is slower).")
    ] = "last"
    method: Annotated[
        Literal["exact", "gradient"],
        Option(help="With --by effect: exact, or a gradient estimate."),
    ] = "exact"
    batch_size: Annotated[
        int | None, Option(min=1, help="Prompts per batch.", show_default="as many as fit")
    ] = None
    memory: Annotated[int, Option(min=1, help="Memory for a batch's activations, MiB.")] = 64


@grouped
def locate(
    rank: RankOptions,
    task: TaskOptions,
    files: OutputOptions,
    output: RunOutput,
    readout: ReadoutOptions,
    model: ModelOptions,
    n: Annotated[int, Option("--n", "-n", min=1, help="Number of prompts.")] = N_PROMPTS,
    seed: SeedOption = 0,
) -> None:
    """Locate the heads with the largest mean contrast over a task's prompts, exactly.

    A head's contrast is its increase of log p(answer) − log Σ p(other labels). With --by increase,
    rank heads by their increase of log p(answer), as the paper does; with --by effect, by the
    log-odds that the answer loses when the head is zeroed, or by a gradient estimate of this with
    --method gradient; with --by towers, by the log-odds that it loses when the head's query alone
    is exchanged for that of a query of the other class. Heads that are ranked by contrast or
    increase are shown next to what zeroing them does, because a head may rank first and have no
    effect.

    With --out, an interrupted run resumes where it stopped and writes the same files. A corrupt
    chunk is reported and recomputed. Different settings require a different folder. `torchrun
    --nproc_per_node 2 -m icl_lens locate …` distributes the prompts over processes.
    """
    from icl_lens.locate.locate import locate_with_effects
    from icl_lens.locate.located_heads import summary
    from icl_lens.locate.mean_effects import locate_effects
    from icl_lens.locate.mean_exchanges import locate_towers
    from icl_lens.models.view import ModelView
    from icl_lens.result.head_findings import list_finding
    from icl_lens.result.tables import selected_note

    if rank.by in ("effect", "towers"):
        reject_options(
            readout, "final_norm", "bias", reason="effects are measured on the model's output"
        )
    if rank.by != "effect":
        reject_options(rank, "positions", "method", reason="only --by effect ablates heads")
    if rank.batch_size is not None:
        reject_options(rank, "memory", reason="--batch-size sets the number of prompts per batch")
    files.check()
    with output.running() as (run, console):
        loaded, batch = task.start(console, model, readout, n=n, seed=seed, device=run.device)
        k = min(20, len(ModelView.of(loaded).heads())) if rank.k is None else rank.k
        by = choose_score(rank.by, SCORES, comparable=batch.has_several_labels)
        task.print_behavior(console, loaded, readout, n=n, seed=seed)
        with progress(hidden=console.quiet) as report:
            run = replace(
                run,
                batch_size=rank.batch_size,
                memory=rank.memory * 2**20,
                progress=report,
                about=output.about(task, model, readout, prompts=batch.prompts, n=n, seed=seed),
            )
            if by == "effect":
                located = locate_effects(
                    loaded, batch, positions=rank.positions, method=rank.method, k=k, run=run
                )
                table, finding, sentence = located.to_frame(), located.finding, located.summary()
            elif by == "towers":
                located = locate_towers(loaded, batch, k=k, run=run)
                table, finding, sentence = located.to_frame(), located.finding, located.summary()
            else:
                located, table = locate_with_effects(
                    loaded, batch, k=k, by=by, **readout.readout_arguments(), run=run
                )
                finding = list_finding(table, k, by, n_heads=located.n_parts)
                sentence = summary(located, batch)
                if "low" in table:
                    sentence += f" 95% intervals over {len(set(batch.queries)):,} distinct queries."
                    sentence += f" {selected_note(k, located.n_parts).capitalize()}."
                sentence += " Last column: with this head alone zeroed at the last position."
        if console.quiet:
            return
        page = files.write(located.to_html)
        files.write_json(lambda: located.to_json(model=ModelView.of(loaded).name))
        console.print(finding, style="bold")
        console.print(_heads(table.head(k), by))
        console.print(sentence)
        files.show(page, console)
        if output.out is not None:
            console.print(
                f"Table: {output.out / 'heads.parquet'}, heads.csv; values per prompt: "
                "part-*.parquet"
            )


def _heads(table: "pd.DataFrame", by: Score) -> Table:
    from icl_lens.result.number_format import decimal
    from icl_lens.result.tables import format_share

    score, further_columns = {
        "increase": ("increase", {"effect": "log p lost"}),
        "contrast": ("contrast", {"effect": "log-odds lost"}),
        "effect": ("effect", {"log_prob": "log p lost"}),
        "towers": ("query", {"keys": "keys", "values": "values"}),
    }[by]
    score_name = "log-odds lost,\nquery" if by == "towers" else f"mean {score}"
    intervals = ["95% interval", "selected"] if "low" in table else []
    printed_table = new_table(
        "rank", "head", f"{score_name}\n(nats)", *intervals, *further_columns.values(), left=(1,)
    )
    for row in table.to_dict("records"):
        cells = [str(row["rank"]), row["name"], decimal(row[score], 4)]
        cells += (
            [f"{decimal(row['low'], 4)} … {decimal(row['high'], 4)}", format_share(row["selected"])]
            if intervals
            else []
        )
        printed_table.add_row(*cells, *(decimal(row[name], 4) for name in further_columns))
    return printed_table
