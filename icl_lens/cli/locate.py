"""`icl-lens locate`: the heads of largest mean increase over a task, exact and certified."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

from icl_lens.cli.options import (
    BiasOption,
    BosOption,
    ClassesChoice,
    ClassesOption,
    ColumnsOption,
    DemonstrationsOption,
    DeviceOption,
    DtypeChoice,
    DtypeOption,
    FinalNormChoice,
    FinalNormOption,
    LabelsOption,
    LayoutChoice,
    LayoutOption,
    MaxWordsOption,
    ModelOption,
    PathOption,
    RevisionOption,
    SplitOption,
    load,
    task_prompts,
)

if TYPE_CHECKING:
    import pandas as pd

    from icl_lens.attribution.search import TopHeads
    from icl_lens.locate.folder import PartFolder
    from icl_lens.locate.processes import Processes
    from icl_lens.prompts.batch import PromptBatch

PASSES = {"part": "locating", "again": "second pass over open heads"}


def locate(
    task: Annotated[str, typer.Option("--task", "-t", help="Word task (FALSE-TRUE categories) or sentence dataset.")],
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts.")] = 1000,
    model: ModelOption = "icl-mini",
    k: Annotated[int, typer.Option("--top", "-k", help="How many heads to find.")] = 20,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    layout: LayoutOption = LayoutChoice.order,
    demonstrations: DemonstrationsOption = 2,
    path: PathOption = None,
    columns: ColumnsOption = "text,label",
    split: SplitOption = "test",
    max_words: MaxWordsOption = None,
    classes: ClassesOption = ClassesChoice.binary,
    labels: LabelsOption = None,
    template: Annotated[str, typer.Option(help="How a demonstration is written.")] = "{text} : {label}",
    separator: Annotated[str, typer.Option(help="What stands between demonstrations.")] = " ",
    prefix: Annotated[str, typer.Option(help="What stands before the first demonstration.")] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for parts and result; a killed run goes on from there.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Prompts a batch, instead of as many as fit.")] = None,
    budget: Annotated[int, typer.Option(help="MiB that a batch's activations may take up.")] = 64,
    final_norm: FinalNormOption = FinalNormChoice.frozen,
    bias: BiasOption = True,
    bos: BosOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeChoice.float32,
    revision: RevisionOption = None,
) -> None:
    """Locate the heads of largest mean log-probability increase over a task's prompts: exact, certified.

    With --out, parts are kept: killed at any moment and started again with the same settings, the run goes on where
    it was and ends with the same files. A damaged part is named and computed again. Other settings need another
    folder. `accelerate launch --cpu --num_processes 2 -m icl_lens locate …` shares the prompts out among processes.
    """
    from icl_lens.locate.folder import PartFolder, opened
    from icl_lens.locate.locate import locate_heads, plan_batches
    from icl_lens.locate.processes import Processes
    from icl_lens.models.view import ModelView
    from icl_lens.prompts.batch import tokenize

    processes = Processes.launched()
    console = Console(quiet=not processes.first)
    warnings = Console(stderr=True, quiet=not processes.first, soft_wrap=True, highlight=False)
    with (
        _interruptible(out, warnings),
        _together(processes),
        opened(out) if out is not None and processes.first else nullcontext(),
    ):
        prompts = task_prompts(
            task,
            n=n,
            seed=seed,
            layout=layout.value,
            demonstrations=demonstrations,
            path=path,
            columns=columns,
            split=split,
            max_words=max_words,
            classes=classes.value,
            labels=labels,
        )
        own_device = None if processes.device is None else str(processes.device)
        loaded = load(model, device=device or own_device, dtype=dtype, revision=revision)
        batch = tokenize(loaded, prompts, template=_template(template, separator, prefix), prepend_bos=bos)
        view = ModelView.of(loaded)
        plan = plan_batches(view, batch, batch_size=batch_size, byte_budget=budget * 2**20)
        folder = None
        if out is not None:
            configuration = {
                "model": model,
                "revision": revision,
                "weights": weights_digest(loaded),
                "task": task,
                "n": n,
                "seed": seed,
                "layout": layout.value,
                "demonstrations": demonstrations,
                "path": None if path is None else str(path),
                "columns": columns.replace(" ", ""),
                "split": split,
                "max_words": max_words,
                "classes": classes.value,
                "labels": list(batch.labels),
                "template": template,
                "separator": separator,
                "prefix": prefix,
                "bos": bos,
                "prompts": prompts_digest(batch),
                "k": k,
                "final_norm": final_norm.value,
                "bias": bias,
                "dtype": dtype.value,
                "device": view.home.type,
                "batches": len(plan),
                "plan": _digest(plan),
                "versions": {
                    name: version(name) for name in ("icl-lens", "transformer-lens", "transformers", "torch", "pyarrow")
                },
            }
            folder = PartFolder(out, configuration)
            if processes.first:
                folder.take()
        with _bar(console, processes) as progress:
            top = locate_heads(
                loaded,
                batch,
                k=k,
                final_norm=final_norm.value,
                bias=bias,
                batch_size=batch_size,
                byte_budget=budget * 2**20,
                folder=folder if processes.first else None,
                processes=processes,
                progress=progress,
                warn=lambda line: warnings.print(f"icl-lens: {line}", markup=False),
            )
        if not processes.first:
            return
        table = heads_table(top, folder, len(plan))
        console.print(_shown(table))
        console.print(summary(top))
        if folder is not None:
            _write(folder, table, top)
            console.print(f"Table: {folder.path / 'heads.parquet'}, heads.csv; per prompt: part-*.parquet")


@contextmanager
def _interruptible(out: Path | None, console: Console) -> Iterator[None]:
    """Ctrl-C ends the run with a word on how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "" if out is None else f"; the same command goes on from the parts in {str(out)!r}"
        console.print(f"icl-lens: interrupted{kept}", markup=False)
        raise SystemExit(130) from None


@contextmanager
def _together(processes: "Processes") -> Iterator[None]:
    """What is wrong with the input is said once: all processes meet the same error, or the launcher ends them."""
    from icl_lens.errors import InputError

    try:
        yield
    except InputError:
        if processes.first:
            raise
        raise SystemExit(2) from None


def _template(demonstration: str, separator: str, prefix: str) -> Any:
    from icl_lens.prompts.prompt import Template

    query = demonstration.partition("{label}")[0].rstrip(" ")
    return Template(demonstration, query, separator, prefix)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def prompts_digest(batch: "PromptBatch") -> str:
    """Tells prompts apart by what the model reads and is asked."""
    tokens = [row[: last + 1] for row, last in zip(batch.tokens.tolist(), batch.last.tolist(), strict=True)]
    return _digest([tokens, batch.answer_tokens.tolist()])


def weights_digest(model: Any) -> str:
    """Tells models apart by a sample of every parameter: enough for other weights, not against forgery."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // 512)].float().cpu().numpy()
        found.update(f"{name}{tuple(parameter.shape)}".encode() + sample.tobytes())
    return found.hexdigest()[:16]


def heads_table(top: "TopHeads", folder: "PartFolder | None", n_batches: int) -> "pd.DataFrame":
    """Rank, layer, head, name, increase (mean, nats), low, high (95 % bootstrap over prompts), share evaluated.

    Without a folder no prompt's own value is kept, and there is no interval.
    """
    from icl_lens.metrics import bootstrap_interval
    from icl_lens.report.tables import top_heads_table

    table = top_heads_table(top)
    if folder is not None and top.n_prompts > 1:
        values = per_prompt(top, folder, n_batches)
        intervals = [bootstrap_interval(values[:, i]) for i in range(values.shape[1])]
        table["low"] = [interval.low for interval in intervals]
        table["high"] = [interval.high for interval in intervals]
    table["share_evaluated"] = 1.0
    return table


def per_prompt(top: "TopHeads", folder: "PartFolder", n_batches: int) -> Any:
    """The located heads' increase on every prompt, [prompt, head], nats, from the parts."""
    import numpy as np

    values = np.full((top.n_prompts, len(top.value)), np.nan)
    column = {head: i for i, head in enumerate(zip(top.layer.tolist(), top.head.tolist(), strict=True))}
    for kind in ("part", "again"):
        for number in range(n_batches):
            part = folder.read(f"{kind}-{number:05d}.parquet")
            if part is None:
                continue
            frame = part.to_pandas().dropna(subset="increase")
            at = [column.get(head, -1) for head in zip(frame["layer"], frame["head"], strict=True)]
            frame = frame.assign(column=at)
            frame = frame[frame["column"] >= 0]
            values[frame["prompt"], frame["column"]] = frame["increase"]
    return values


def summary(top: "TopHeads") -> str:
    """How much was evaluated exactly, and what was left out by its bound."""
    if not top.certified:
        return (
            f"All {top.n_parts} heads were evaluated exactly on all {top.n_prompts:,} prompts: this readout (own norm "
            "or soft-cap) has no bounds."
        )
    text = (
        f"Exact, certified: {top.n_exact} of {top.n_parts} heads evaluated on all {top.n_prompts:,} prompts, "
        f"{100 * top.share:.1f} % of all evaluations."
    )
    if top.n_exact < top.n_parts:
        text += (
            f" Largest bound left out: {top.left_out:.4f} nats, against {float(top.value[-1]):.4f} of the last head "
            "in the table."
        )
    return text


def _shown(table: "pd.DataFrame") -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    intervals = "low" in table
    for name in ("rank", "head", "mean increase (nats)", *(["95 % interval"] if intervals else []), "evaluated"):
        shown.add_column(name, justify="left" if name == "head" else "right")
    for row in table.to_dict("records"):
        interval = [f"{row['low']:.4f} … {row['high']:.4f}"] if intervals else []
        cells = [str(row["rank"]), row["name"], f"{row['increase']:.4f}", *interval, f"{row['share_evaluated']:.0%}"]
        shown.add_row(*[Text(cell) for cell in cells])
    return shown


def _write(folder: "PartFolder", table: "pd.DataFrame", top: "TopHeads") -> None:
    folder.write("heads.parquet", {name: table[name].to_numpy() for name in table.columns})
    folder.write_bytes("heads.csv", table.to_csv(index=False, lineterminator="\n").encode())
    found = {
        "certified": top.certified,
        "n_prompts": top.n_prompts,
        "heads": top.n_parts,
        "heads_evaluated_on_all_prompts": top.n_exact,
        "share_evaluated": top.share,
        "largest_bound_left_out": top.left_out if top.n_exact < top.n_parts else None,
    }
    folder.write_bytes("result.json", (json.dumps(found, indent=1) + "\n").encode())


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
