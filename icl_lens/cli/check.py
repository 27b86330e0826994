"""`icl-lens check`: what a model does on a task, kept on disk for the other commands."""

from dataclasses import dataclass, field
from typing import Annotated

from typer import Option

from icl_lens.cli.folder_options import FolderOptions
from icl_lens.cli.option_groups import grouped, reject_options
from icl_lens.cli.options import FileOptions, ModelOptions, SeedOption, TokenOptions, preview
from icl_lens.cli.task_options import TaskOptions


@dataclass(frozen=True, kw_only=True)
class CheckedTask(TaskOptions):
    """A task, which this command always checks."""

    check: bool = field(default=True, init=False)


@grouped
def check(
    files: FileOptions,
    folder: FolderOptions,
    task: CheckedTask,
    tokens: TokenOptions,
    model: ModelOptions,
    n: Annotated[int, Option("--n", "-n", min=20, help="Number of prompts.")] = 60,
    seed: SeedOption = 0,
) -> None:
    """Report what the model does on a task: what it learns from the demonstrations, copies, knows
    and prefers.

    The prompts are in balanced random order, and --layout is refused. The result is kept on disk,
    and the other commands print it for the same model, task and options.
    """
    from icl_lens.prompts.prompt_list import demonstrations_each

    files.check()
    reject_options(task, "layout", reason="a check needs balanced random order")
    prompts = task.prompts(n=n, seed=seed)  # before the model is loaded
    with folder.running() as (run, console):
        task.describe_data(console, prompts, tokens)
        loaded = model.load(default_device=run.device)
        model.warn_of_words(console, prompts)
        first = tokens.tokenize(loaded, prompts[:1])
        console.print(preview(first, n=n, demonstrations=demonstrations_each(prompts)))
        behavior = task.behavior(
            console, loaded, tokens, sizes=[n], seed=seed, is_asked_for=True, run=run
        )
        if console.quiet or behavior is None:
            return
        page = files.write(behavior.to_html)
        files.write_json(behavior.to_json)
        console.print(behavior)
        task.print_more_queries(
            console, prompts, n=n, seed=seed, is_undecided=behavior.is_undecided
        )
        files.show(page, console)
