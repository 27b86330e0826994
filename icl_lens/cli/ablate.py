"""`icl-lens ablate`: zero heads and measure the answer's probability or a task's accuracy, next to
random heads.
"""

import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from icl_lens.cli.console import PlainConsole, progress
from icl_lens.cli.folder_options import FolderOptions
from icl_lens.cli.head_options import HeadChoice, LocatingByOption, located_on
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import (
    FileOptions,
    ModelOptions,
    Positions,
    SeedOption,
    TokenOptions,
    parse_prompt,
    preview,
)
from icl_lens.cli.task_options import SplitTask, print_what_heads_carry
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_RANDOM_SETS_PER_GROUP

if TYPE_CHECKING:
    from icl_lens.prompts.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class HeadsOptions(HeadChoice):
    """The heads to ablate, and the random sets to compare them with."""

    by: LocatingByOption = None
    positions: Annotated[Positions, Option(help="Positions to ablate ('all' is slower).")] = "last"
    mode: Annotated[
        Literal["zero", "mean", "resample"],
        Option(help="Set heads to zero, or to their mean over, or a draw from, other prompts."),
    ] = "zero"
    mean_over: Annotated[
        str | None,
        Option(help="Tasks whose mean takes the heads' place, e.g. antonyms,present-past."),
    ] = None
    random_sets: Annotated[
        int, Option(min=1, max=1000, help="Random sets from the same layers, and from all.")
    ] = N_RANDOM_SETS_PER_GROUP


@grouped
def ablate(
    files: FileOptions,
    folder: FolderOptions,
    heads: HeadsOptions,
    task: SplitTask,
    tokens: TokenOptions,
    model: ModelOptions,
    prompt: Annotated[
        str | None,
        Argument(help='Prompt, e.g. "happy : bar three : foo nine :" (\\n: line break).'),
    ] = None,
    answer: Annotated[
        str | None,
        Option("--answer", "-a", help="Correct label.", show_default="model's prediction"),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Ablate heads and compare with random head sets of the same size, from the same layers and
    from all layers.

    By default, prompts of two classes query both, and each label is the answer equally often, so a
    constant answer scores at chance, 50%. Accuracy is reported between the labels and over the full
    vocabulary (top token); log-odds are those against the other labels.
    """
    import icl_lens as il
    from icl_lens.foundation.files import write_text
    from icl_lens.models.view import ModelView
    from icl_lens.report.renderers import page as page_of
    from icl_lens.result.tables import csv_text

    _check(prompt, answer, task, heads)
    files.check()
    console = PlainConsole()
    testing: list[Prompt] = []
    if prompt is None:
        locating, testing = task.split_prompts(seed)
        task.describe_data(console, [*locating, *testing], tokens)
        loaded = model.load()
        reference, batch = (tokens.tokenize(loaded, prompts) for prompts in (locating, testing))
        model.warn_of_words(console, [*locating, *testing])
        console.print(preview(batch))
    else:
        parsed = parse_prompt(prompt, answer)
        loaded = model.load()
        batch = tokens.tokenize(loaded, [parsed])
        model.warn_of_words(console, [parsed])
        if answer is None:
            predicted = batch.labels[int(il.score(loaded, batch)[0].argmax())]
            batch = tokens.tokenize(loaded, [parse_prompt(prompt, predicted)])
        reference = batch
    ablated_heads, how = heads.choose(loaded, reference, by=heads.by)
    if heads.heads is None and prompt is None:
        how += located_on(reference, batch)
    behavior = task.print_behavior(console, loaded, tokens, n=task.n, seed=seed, measured=testing)
    sets: dict[str, Any] = {
        "n_random": heads.random_sets,
        "positions": heads.positions,
        "seed": seed,
    }
    if heads.mean_over is not None:
        task_prompts = task.other_tasks(heads.mean_over, n=task.n, seed=seed)
        batches = [tokens.tokenize(loaded, prompts) for prompts in task_prompts]
        sets |= {"mode": "mean", "reference": batches}
    elif heads.mode != "zero":
        sets |= {"mode": heads.mode, "reference": reference}
    with progress() as report:
        ablation = il.ablate_with_controls(
            loaded, batch, ablated_heads, run=il.Run(folder.out, progress=report), **sets
        )
    about = {"model": ModelView.of(loaded).name, "command": shlex.join(["icl-lens", *sys.argv[1:]])}
    page_texts = {
        "text": batch.texts[0],
        "chosen": f"{how[:1].upper()}{how[1:]}.",
        "behavior": str(behavior or ""),
    }
    page = files.write(lambda: page_of(ablation, **page_texts, **about))
    rows = [
        {"text": text, "answer": asked.answer}
        for text, asked in zip(batch.texts, batch.prompts, strict=True)
    ]
    files.write_json(
        lambda: ablation.to_json(
            **about, chosen=how, task_check=behavior and behavior.to_dict(), prompts=rows
        )
    )
    if folder.out is not None:
        write_text(folder.out / "conditions.csv", csv_text(ablation.to_frame(), index=True))
    console.print(f"{about['model']}: {', '.join(map(str, ablation.heads))}, {how}")
    console.print(ablation)
    print_what_heads_carry(console, behavior, ablation)
    task.print_more_queries(
        console, testing, n=task.n, seed=seed, is_undecided=ablation.is_undecided
    )
    files.show(page, console)
    if folder.out is not None:
        console.print(f"Table: {folder.out / 'conditions.csv'}", soft_wrap=True)


def _check(prompt: str | None, answer: str | None, task: SplitTask, heads: HeadsOptions) -> None:
    """Raise InputError for options that conflict or have no effect."""
    if (prompt is None) == (task.name is None):
        raise InputError("pass either a prompt or --task, e.g. --task sentiment-number")
    if task.name is not None and answer is not None:
        raise InputError(
            "--answer has no effect with a task, whose prompts have their own answers; remove it"
        )
    if heads.heads is not None and (heads.k is not None or heads.by is not None):
        raise InputError("pass either --heads, or --top and --by to locate them, not both")
    if heads.mean_over is not None and heads.mode == "resample":
        raise InputError("--mean-over has no effect with --mode resample; pass one of them")
    if prompt is not None and heads.mean_over is not None:
        raise InputError(
            "--mean-over requires --task, whose prompts have a last position to compare; pass a "
            "task"
        )
    if prompt is not None and heads.mode != "zero":
        raise InputError(
            f"--mode {heads.mode} requires --task, whose other prompts take the heads' place"
        )
    if prompt is not None:
        task.check_no_task()
