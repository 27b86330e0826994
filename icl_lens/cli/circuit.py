"""`icl-lens circuit`: locate the edges through which heads work over a task, and test them on other prompts."""

import shlex
import sys
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from icl_lens.cli.console import PlainConsole, progress
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import (
    HeadChoice,
    ModelOptions,
    OutputOptions,
    RunOutput,
    SeedOption,
    SplitTask,
    TokenOptions,
    located_on,
    preview,
)
from icl_lens.errors import InputError


@dataclass(frozen=True, kw_only=True)
class CircuitTask(SplitTask):
    """A task whose prompts are split: edges are ranked on some and tested on others."""

    n: Annotated[int, Option("--n", "-n", min=1, help="Number of prompts; edges are ranked on n others.")] = 100


@dataclass(frozen=True, kw_only=True)
class EdgeOptions(HeadChoice):
    """The heads whose edges are located, and how many edges."""

    edges: Annotated[int, Option(min=1, help="Number of edges to test one by one.")] = 30
    random_sets: Annotated[int, Option(min=2, max=1000, help="Random rankings to compare with.")] = 20


@grouped
def circuit(
    output: OutputOptions,
    run: RunOutput,
    heads: EdgeOptions,
    task: CircuitTask,
    tokens: TokenOptions,
    model: ModelOptions,
    seed: SeedOption = 0,
) -> None:
    """Locate the edges through which heads raise the answer over a task, and test how much of it they carry.

    An edge is what an earlier head, FFN or embedding wrote, as read by a head's query, keys or values. Edges are ranked
    on some prompts. On others, the first edges of this ranking are removed one by one. Then all edges except these are
    removed or, for comparison, all except as many random ones.

    With --out, an interrupted run resumes where it stopped and writes the same files. `torchrun --nproc_per_node 2 -m
    icl_lens circuit …` distributes the prompts over processes.
    """
    import icl_lens as il
    from icl_lens.locate.distributed import Distributed
    from icl_lens.locate.table import write_run
    from icl_lens.models.view import ModelView
    from icl_lens.report import plots
    from icl_lens.report.circuit_graph import svg
    from icl_lens.report.views import page as page_of

    if heads.heads is not None and heads.k is not None:
        raise InputError("pass either --heads, or --top to locate them, not both")
    output.check()
    distributed = Distributed.from_environment()
    is_main = distributed.is_main
    console, folder = PlainConsole(quiet=not is_main), None
    with run.running(distributed) as warn:
        locating, testing = task.split_prompts(seed)
        loaded = model.load(default_device=None if distributed.device is None else str(distributed.device))
        both = tokens.tokenize(loaded, [*locating, *testing])  # the folder depends on all prompts
        ranked, tested = both[: len(locating)], both[len(locating) :]
        console.print(preview(tested))
        chosen, how = distributed.run_on_main(lambda: heads.choose(loaded, ranked))
        if heads.heads is None:
            how += located_on(ranked, tested)
        options = {"n_edges": heads.edges, "n_random": heads.random_sets, "seed": seed}
        behavior = None
        if is_main:
            named = {"heads": list(map(str, chosen)), **options}
            folder = run.prepare(loaded, both, named, task, model, tokens, n=task.n, seed=seed, by="circuit")
            behavior = task.print_behavior(console, loaded, tokens, seed=seed)
        with progress(hidden=not is_main) as report:
            how_run = {"folder": folder, "distributed": distributed, "progress": report, "warn": warn}
            found = il.locate_circuit(loaded, ranked, tested, chosen, **options, **how_run)
        if not is_main:
            return
        if folder is not None:
            write_run(folder, found.tables, found.to_dict())
            folder.write_bytes("circuit.svg", svg(plots.circuit(found)))
        about = {"model": ModelView.of(loaded).name, "command": shlex.join(["icl-lens", *sys.argv[1:]])}
        shown = {"text": tested.texts[0], "chosen": f"{how.capitalize()}.", "behavior": str(behavior or "")}
        page = output.write(lambda: page_of(found, **shown, **about))
        output.write_json(lambda: found.to_json(**about, chosen=how, task_check=behavior and behavior.to_dict()))
        console.print(f"{about['model']}: {', '.join(map(str, found.receivers))}, {how}")
        console.print(found)
        output.show(page, console)
        if folder is not None:
            console.print(
                f"Tables: {folder.path / 'edges.parquet'}, curve, groups, layers, scores, and CSV; graph: circuit.svg"
            )
