"""`icl-lens circuit`: locate the edges through which heads and FFNs work over a task, and test them
on other prompts.
"""

import shlex
import sys
from dataclasses import dataclass, replace
from typing import Annotated

from typer import Option

from icl_lens.cli.console import progress
from icl_lens.cli.folder_options import FolderOptions
from icl_lens.cli.head_options import HeadChoice, LocatingByOption, located_on
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import (
    FileOptions,
    ModelOptions,
    ReaderAt,
    SeedOption,
    TokenOptions,
    preview,
)
from icl_lens.cli.task_options import SplitTask
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_RANDOM_SETS


@dataclass(frozen=True, kw_only=True)
class CircuitTask(SplitTask):
    """A task whose prompts are split: edges are ranked on some and tested on others."""

    n: Annotated[
        int, Option("--n", "-n", min=1, help="Number of prompts; edges are ranked on n others.")
    ] = 100


@dataclass(frozen=True, kw_only=True)
class EdgeOptions(HeadChoice):
    """The heads and FFNs whose edges are located, and how many edges."""

    by: LocatingByOption = None
    ffns: Annotated[
        str | None, Option(help="FFNs that read edges, too: all, or layers such as 0,5.")
    ] = None
    edges: Annotated[int, Option(min=1, help="Number of edges to test one by one.")] = 30
    random_sets: Annotated[
        int, Option(min=3, max=1000, help="Random rankings to compare with.")
    ] = N_RANDOM_SETS
    reader_at: Annotated[ReaderAt, Option(help="Tokens at which heads and FFNs act.")] = "last"

    def ffn_names(self, n_layers: int) -> list[str]:
        """The FFNs named in `--ffns`; raise InputError unless they are layers, or "all"."""
        if self.ffns is None:
            return []
        if self.ffns.strip().lower() == "all":
            return [f"F{layer}" for layer in range(n_layers)]
        layers = [layer.strip() for layer in self.ffns.split(",") if layer.strip()]
        if not layers or not all(layer.isdecimal() for layer in layers):
            raise InputError(f"--ffns must be all, or layers such as 0,5, got {self.ffns!r}")
        return [f"F{int(layer)}" for layer in layers]


@grouped
def circuit(
    files: FileOptions,
    folder: FolderOptions,
    heads: EdgeOptions,
    task: CircuitTask,
    tokens: TokenOptions,
    model: ModelOptions,
    seed: SeedOption = 0,
) -> None:
    """Locate the edges through which heads and FFNs raise the answer over a task, and test how much
    of it they carry.

    An edge is what an earlier head, FFN or embedding wrote, as read by a head's query, keys or
    values or, with --ffns, by an FFN. Edges are ranked on some prompts. On others, the first edges
    of this ranking are removed one by one. Then all edges except these are removed or, for
    comparison, all except as many random ones.

    With --out, an interrupted run resumes where it stopped and writes the same files. `torchrun
    --nproc_per_node 2 -m icl_lens circuit …` distributes the prompts over processes.
    """
    import icl_lens as il
    from icl_lens.foundation.files import write_text
    from icl_lens.models.view import ModelView
    from icl_lens.report import plots
    from icl_lens.report.circuit_graph import svg
    from icl_lens.report.renderers import page as page_of

    if heads.heads is None and heads.reader_at != "last":
        raise InputError(
            f"--reader-at {heads.reader_at} needs --heads: heads are located at the last token"
        )
    if heads.heads is not None and (heads.k is not None or heads.by is not None):
        raise InputError("pass either --heads, or --top and --by to locate them, not both")
    files.check()
    with folder.running() as (run, console):
        locating, testing = task.split_prompts(seed)
        task.describe_data(console, [*locating, *testing], tokens)
        loaded = model.load(default_device=run.device)
        all_prompts = tokens.tokenize(loaded, [*locating, *testing])
        ranked, tested = all_prompts[: len(locating)], all_prompts[len(locating) :]
        model.warn_of_words(console, [*locating, *testing])
        console.print(preview(tested))
        ffns = heads.ffn_names(ModelView.of(loaded).n_layers)
        chosen_heads, how = heads.choose(loaded, ranked, by=heads.by)
        readers = [*chosen_heads, *ffns]
        if heads.heads is None:
            how += located_on(ranked, tested)
        if ffns:
            how += ", and FFNs named in --ffns"
        behavior = task.print_behavior(
            console, loaded, tokens, n=task.n, seed=seed, measured=testing
        )
        options = {
            "n_edges": heads.edges,
            "n_random": heads.random_sets,
            "seed": seed,
            "reader_at": heads.reader_at,
        }
        with progress(hidden=console.quiet) as report:
            about = folder.about(
                task, model, tokens, prompts=all_prompts.prompts, n=task.n, seed=seed
            )
            run = replace(run, progress=report, about=about)
            located_circuit = il.locate_circuit(loaded, ranked, tested, readers, **options, run=run)
        if console.quiet:
            return
        if folder.out is not None:
            write_text(folder.out / "circuit.svg", svg(plots.circuit(located_circuit)).decode())
        about = {
            "model": ModelView.of(loaded).name,
            "command": shlex.join(["icl-lens", *sys.argv[1:]]),
        }
        page_texts = {
            "text": tested.texts[0],
            "chosen": f"{how[:1].upper()}{how[1:]}.",
            "behavior": str(behavior or ""),
        }
        page = files.write(lambda: page_of(located_circuit, **page_texts, **about))
        files.write_json(
            lambda: located_circuit.to_json(
                **about, chosen=how, task_check=behavior and behavior.to_dict()
            )
        )
        console.print(f"{about['model']}: {', '.join(located_circuit.readers)}, {how}")
        console.print(located_circuit)
        is_undecided = located_circuit.is_undecided
        task.print_more_queries(console, testing, n=task.n, seed=seed, is_undecided=is_undecided)
        files.show(page, console)
        if folder.out is not None:
            console.print(
                f"Tables: {folder.out / 'edges.parquet'}, curve, groups, layers, scores, and CSV; "
                "graph: circuit.svg"
            )
