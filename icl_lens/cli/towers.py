"""`icl-lens towers`: exchange queries, keys and values of heads, and compare with random heads."""

import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from typer import Option

from icl_lens.cli.console import PlainConsole, progress
from icl_lens.cli.folder_options import FolderOptions
from icl_lens.cli.head_options import HeadChoice
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import FileOptions, ModelOptions, SeedOption, TokenOptions, preview
from icl_lens.cli.task_options import SplitTask
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_LOCATED, N_RANDOM_SETS
from icl_lens.foundation.ranking_scores import Score

if TYPE_CHECKING:
    from icl_lens.prompts.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class TowerTask(SplitTask):
    """A task whose prompts are split: heads are located on some and tested on others."""

    n: Annotated[
        int, Option("--n", "-n", min=2, help="Number of test prompts; 12 others locate the heads.")
    ] = 60
    check: Annotated[
        bool, Option("--check/--no-check", help="First report what the model does on the task.")
    ] = False

    def split_prompts(self, seed: int) -> "tuple[list[Prompt], list[Prompt]]":
        """Return prompts that locate heads and `n` prompts to test them on, the same as in
        `il.two_towers`.
        """
        from icl_lens.analyses.two_towers import n_drawn, scanned_and_tested

        return scanned_and_tested(self.prompts(n=n_drawn(self.n), seed=seed), self.n)


@dataclass(frozen=True, kw_only=True)
class TowerHeads(HeadChoice):
    """The heads to test, and the random sets to compare them with."""

    k: Annotated[
        int | None,
        Option(
            "--top", "-k", min=1, help="Number of heads to locate.", show_default=str(N_LOCATED)
        ),
    ] = None
    by: Annotated[
        Score | None, Option(help="Score that locates heads.", show_default="exchange")
    ] = None
    random_sets: Annotated[
        int, Option(min=3, max=1000, help="Random sets from the same layers.")
    ] = N_RANDOM_SETS


@grouped
def towers(
    files: FileOptions,
    folder: FolderOptions,
    heads: TowerHeads,
    task: TowerTask,
    tokens: TokenOptions,
    model: ModelOptions,
    seed: SeedOption = 0,
) -> None:
    """Test whether heads match queries with keys and carry labels as values, by exchanging these
    with other prompts.

    Without --heads, a scan locates the heads with the largest effect of exchanging their query, on
    other prompts; --by locates them by another score. Then queries, keys and values of all these
    heads are exchanged for those of prompts with another query, exchanged texts or exchanged
    labels, one by one and in pairs; random heads of the same layers are the control.
    """
    from icl_lens.analyses.two_towers import two_towers
    from icl_lens.report.renderers import page as page_of
    from icl_lens.runs.run import Run

    if heads.heads is not None and (heads.k is not None or heads.by is not None):
        raise InputError("pass either --heads, or --top and --by to locate them, not both")
    files.check()
    console = PlainConsole()
    scanned, tested = task.split_prompts(seed)
    task.describe_data(console, [*scanned, *tested], tokens)
    loaded = model.load()
    console.print(preview(tokens.tokenize(loaded, tested[:1]), n=len(tested)))
    model.warn_of_words(console, [*scanned, *tested])
    behavior = task.print_behavior(console, loaded, tokens, n=task.n, seed=seed, measured=tested)
    tower_heads = (
        None
        if heads.heads is None
        else heads.choose(loaded, tokens.tokenize(loaded, tested[:1]))[0]
    )
    with progress() as report:
        two_towers_result = two_towers(
            loaded,
            tested,
            tower_heads,
            k=heads.k or N_LOCATED,
            by=heads.by or "exchange",
            scan_prompts=scanned,
            n_random=heads.random_sets,
            seed=seed,
            run=Run(folder.out, progress=report),
            **tokens.tokenize_arguments(loaded),
        )
    command = shlex.join(["icl-lens", *sys.argv[1:]])
    descriptions = {
        "text": two_towers_result.text,
        "command": command,
        "behavior": str(behavior or ""),
    }
    page = files.write(lambda: page_of(two_towers_result, **descriptions))
    files.write_json(
        lambda: two_towers_result.to_json(
            command=command, task_check=behavior and behavior.to_dict()
        )
    )
    console.print(two_towers_result)
    task.print_more_queries(
        console, tested, n=task.n, seed=seed, is_undecided=two_towers_result.is_undecided
    )
    files.show(page, console)
