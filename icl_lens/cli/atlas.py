"""`icl-lens atlas`: every score of every head, with or without a task."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from typer import Option

from icl_lens.cli.atlas_start import print_duration, warn_of_few_queries
from icl_lens.cli.console import progress
from icl_lens.cli.folder_options import FolderOptions
from icl_lens.cli.head_options import NO_HEADS, head_names
from icl_lens.cli.option_groups import grouped, reject_options
from icl_lens.cli.options import FileOptions, ModelOptions, SeedOption, TokenOptions, preview
from icl_lens.cli.task_options import SplitTask
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_LOCATED


@dataclass(frozen=True, kw_only=True)
class AtlasTask(SplitTask):
    """The task whose prompts the heads are measured on, if there is one."""

    n: Annotated[int, Option("--n", "-n", min=1, help="Number of prompts.")] = 60


@dataclass(frozen=True, kw_only=True)
class AtlasOptions:
    """The heads to tell about, the number of random sequences, and the size of batches."""

    panel: ClassVar[str] = "Options"

    heads: Annotated[
        str | None,
        Option(
            help="Heads to tell about: L1H2,L3H0 or heads.csv.",
            show_default="all",
        ),
    ] = None
    k: Annotated[
        int | None,
        Option(
            "--top",
            "-k",
            min=1,
            help="First heads by a score: to list, and to --judge.",
            show_default=f"3, and {N_LOCATED}",
        ),
    ] = None
    sequences: Annotated[int, Option(min=1, help="Sequences of random tokens.")] = 40
    edited: Annotated[
        int,
        Option(
            min=1,
            help="Prompts on which heads are edited one by one.",
        ),
    ] = 24
    judge: Annotated[
        bool, Option("--judge", help="Also remove each score's first heads on held-out prompts.")
    ] = False
    batch_size: Annotated[
        int | None, Option(min=1, help="Prompts per batch.", show_default="as many as fit")
    ] = None
    memory: Annotated[int, Option(min=1, help="Memory for a batch's activations, MiB.")] = 64

    def head_names(self) -> list[str] | None:
        """Return the heads to tell about, None for all; raise InputError if there is none."""
        if self.heads is None:
            return None
        names = head_names(self.heads)
        if not names:
            raise InputError(f"{NO_HEADS}; omit it for an atlas of all heads")
        return names

    def counts(self) -> dict[str, int]:
        """Return what decides how long the atlas takes, beside the model and its prompts."""
        n_held_out = self.edited if self.judge else 0
        return {"n_sequences": self.sequences, "n_edited": self.edited, "n_held_out": n_held_out}


@grouped
def atlas(
    options: AtlasOptions,
    task: AtlasTask,
    files: FileOptions,
    folder: FolderOptions,
    tokens: TokenOptions,
    model: ModelOptions,
    seed: SeedOption = 0,
) -> None:
    """Measure every head by the scores that papers use, and say which kinds heads have.

    Without --task, the scores are those of weights, of random tokens shown twice, and of short
    texts: previous token, induction, copying and others. With a task, they are also what each head
    adds to the answer, what zeroing it or exchanging its query, keys or values costs, its
    function-vector effect, and its attention to labels.

    A head has a kind, such as induction, where its score stands out against turned copies of the
    heads, or against the mean absolute score of all heads on the same prompts, at a stated rate of
    false discoveries.
    With --heads, the answer is about these heads, and says why they have no kind.

    With --judge, the first heads by each score are zeroed together on prompts with other queries,
    beside random heads of the same layers. With --out, an interrupted run resumes where it stopped,
    and the folder gets the table as heads.csv.
    """
    import icl_lens as il
    from icl_lens.models.view import ModelView

    if options.batch_size is not None:
        reject_options(
            options, "memory", reason="--batch-size sets the number of prompts per batch"
        )
    names = options.head_names()
    files.check()
    with folder.running() as (run, console):
        if task.name is None:
            task.check_no_task()
            reject_options(options, "edited", "judge", reason="heads are edited with --task only")
            loaded, batch, held_out, prompts = model.load(default_device=run.device), None, None, []
        else:
            prompts, testing = task.prompts(n=task.n, seed=seed), []
            if options.judge:
                prompts, testing = task.split_prompts(seed)
            task.describe_data(console, [*prompts, *testing], tokens)
            loaded = model.load(default_device=run.device)
            n_heads = len(ModelView.of(loaded).heads())
            warn_of_few_queries(
                console, task, prompts, seed=seed, n_edited=options.edited, n_heads=n_heads
            )
            batch = tokens.tokenize(loaded, prompts)
            held_out = tokens.tokenize(loaded, testing) if testing else None
            model.warn_of_words(console, [*prompts, *testing])
            console.print(preview(batch))
            task.print_behavior(console, loaded, tokens, n=task.n, seed=seed)
        print_duration(console, loaded, batch, options.counts())
        with progress(hidden=console.quiet) as report:
            about = folder.about(task, model, tokens, prompts=prompts, n=task.n, seed=seed)
            run = replace(
                run,
                batch_size=options.batch_size,
                memory=options.memory * 2**20,
                progress=report,
                about=about,
            )
            head_atlas = il.head_atlas(
                loaded,
                batch,
                heads=names,
                k=options.k,
                n_sequences=options.sequences,
                n_edited=options.edited,
                held_out=held_out,
                seed=seed,
                run=run,
            )
        if console.quiet:
            return
        page = files.write(head_atlas.to_html)
        files.write_json(lambda: head_atlas.to_json(model=ModelView.of(loaded).name))
        console.print(head_atlas)
        files.show(page, console)
        if folder.out is not None:
            folder.out.mkdir(parents=True, exist_ok=True)
            table_path = folder.out / "heads.csv"
            head_atlas.to_csv(table_path)
            console.print(f"Table: {table_path}")
