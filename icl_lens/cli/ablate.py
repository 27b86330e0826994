"""`icl-lens ablate`: what is left of the answer, or of a task's accuracy, when heads are removed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.table import Table

from icl_lens.cli.console import PlainConsole
from icl_lens.cli.groups import grouped
from icl_lens.cli.options import (
    ByChoice,
    ModelOptions,
    TaskOptions,
    TokenOptions,
    check_unused,
    first_prompt,
)

if TYPE_CHECKING:
    from icl_lens.interventions.removal import Answers, Removal
    from icl_lens.models.head import Head
    from icl_lens.models.view import ModelView
    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.prompt import Prompt


MOST_DRAWS = 1000
"""Sets of random heads, each of which costs as much as the answer that is asked for."""


@dataclass(frozen=True, kw_only=True)
class AblateTask(TaskOptions):
    """The task that is answered instead of one prompt."""

    task: Annotated[str | None, typer.Option("--task", "-t", help="A task instead of one prompt.")] = None
    n: Annotated[int, typer.Option(help="Prompts of the task; heads are located on as many others.")] = 200

    @property
    def name(self) -> str | None:
        return self.named(self.task)

    def halves(self, task: str, seed: int) -> "tuple[list[Prompt], list[Prompt]]":
        """Prompts to locate heads on, and `n` others to remove them on."""
        half = self.n + self.n % 2  # in pairs, so that both halves have both labels as often
        prompts = self.prompts(task, n=2 * half, seed=seed, balanced=True)
        return prompts[:half], prompts[half:][: self.n]


@dataclass(frozen=True, kw_only=True)
class HeadsOptions:
    """The heads that are removed, and the random ones beside them."""

    panel: ClassVar[str] = "Heads"

    heads: Annotated[
        str | None, typer.Option(help="Heads to remove, like L1H2,L3H0; default: those of largest mean increase.")
    ] = None
    k: Annotated[int | None, typer.Option("--top", "-k", help="How many heads to locate.", show_default="6")] = None
    by: Annotated[
        ByChoice | None,
        typer.Option(help="Locate by increase, or by contrast with the other labels.", show_default="increase"),
    ] = None
    draws: Annotated[int, typer.Option(help="Sets of as many random heads to compare with.")] = 20

    @property
    def top(self) -> int:
        return 6 if self.k is None else self.k


@grouped
def ablate(
    heads: HeadsOptions,
    task: AblateTask,
    tokens: TokenOptions,
    model: ModelOptions,
    prompt: Annotated[str | None, typer.Argument(help='Like "happy : bar sad : bar three : foo nine :".')] = None,
    answer: Annotated[str | None, typer.Option("--answer", "-a", help="The prompt's right label.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of prompts and random heads.")] = 0,
) -> None:
    """Remove heads and see what is left, against as many random heads.

    In every second prompt of a task the two labels are exchanged, so that always saying one of them is right half the
    time. Accuracy is given between the labels, and over the whole vocabulary.
    """
    import icl_lens as il
    from icl_lens.interventions.removal import remove_heads
    from icl_lens.models.view import ModelView

    _check(prompt, answer, task, heads)
    loaded = model.load()
    if task.name is not None:
        choosing, testing = task.halves(task.name, seed)
    else:
        assert prompt is not None
        choosing = testing = [il.Prompt.parse(prompt, answer=answer)]
    batch = tokens.tokenize(loaded, testing)
    view, console = ModelView.of(loaded), PlainConsole()
    if task.name is not None:
        console.print(first_prompt(batch))
    removed = _chosen(view, heads, lambda: tokens.tokenize(loaded, choosing))
    removal = remove_heads(loaded, batch, removed, draws=heads.draws, seed=seed)
    console.print(f"{view.name}: {'located' if heads.heads is None else 'chosen'} {', '.join(map(str, removed))}")
    console.print(_of_prompt(removal, batch.labels) if task.name is None else _of_task(removal))


def _check(prompt: str | None, answer: str | None, task: AblateTask, heads: HeadsOptions) -> None:
    """Raises InputError for options that contradict each other, or would be ignored."""
    from icl_lens.errors import InputError

    if (prompt is None) == (task.name is None):
        raise InputError("give either a prompt or --task, for instance --task sentiment-number")
    if task.name is not None and answer is not None:
        raise InputError("--answer is a prompt's; a task's prompts have their own answers: leave it out")
    if heads.heads is not None and heads.k is not None:
        raise InputError("--top locates heads, and --heads names them: give one of the two")
    if heads.heads is not None and heads.by is not None:
        raise InputError("--by locates heads, and --heads names them: give one of the two")
    if prompt is not None:
        own = ("path", "labels", "layout", "n", "demonstrations", "columns", "split", "max_words")
        check_unused(*own, because="it is a task's, and a prompt says all of it itself")
        if task.task is not None or task.path is not None or task.labels is not None:
            raise InputError("--path and --labels are a task's; a prompt says all of it itself: leave them out")
    if task.n < 1 or heads.draws < 1 or heads.top < 1:
        raise InputError(f"--n {task.n}, --draws {heads.draws} and --top {heads.top} must be at least 1")
    if heads.draws > MOST_DRAWS:
        raise InputError(f"--draws {heads.draws} would take too long; at most {MOST_DRAWS} are drawn")


def _chosen(view: "ModelView", options: HeadsOptions, prompts: Callable[[], "PromptBatch"]) -> "list[Head]":
    """The heads that the options name, or those of largest mean increase over the prompts."""
    from icl_lens.errors import InputError
    from icl_lens.interventions.removal import most_increasing

    if options.heads is not None:
        names = dict.fromkeys(options.heads.replace(",", " ").split())
        if not names:
            raise InputError("--heads names no head; give heads like L1H2,L3H0, or leave it out to locate some")
        return [view.check_head(name) for name in names]
    if options.top > len(view.heads()):
        raise InputError(f"--top {options.top} is more than the {len(view.heads())} heads of {view.name}")
    return most_increasing(view.model, prompts(), options.top, by=options.by.value if options.by else "increase")


def _of_task(removal: "Removal") -> Table:
    def shares(answers: "Answers") -> tuple[float, float]:
        return answers.accuracy_between_labels, answers.accuracy_over_vocabulary

    return _table(removal, ["accuracy between labels", "over the vocabulary"], shares)


def _of_prompt(removal: "Removal", labels: Sequence[str]) -> Table:
    def shares(answers: "Answers") -> list[float]:
        return answers.label_log_probs[0].exp().tolist()

    return _table(removal, [f"p({label})" for label in labels], shares)


def _table(removal: "Removal", columns: list[str], shares: Callable[["Answers"], Sequence[float]]) -> Table:
    """A row of shares with nothing removed, one without the heads, one of random sets: mean, least, most."""
    table = Table()
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    count = len(removal.heads)
    table.add_row("nothing removed", *[f"{share:.1%}" for share in shares(removal.nothing)])
    table.add_row(f"{count} heads removed", *[f"{share:.1%}" for share in shares(removal.removed)])
    spreads = [_spread(values) for values in zip(*map(shares, removal.random), strict=True)]
    table.add_row(f"{count} random heads, {len(removal.random)} draws", *spreads)
    return table


def _spread(values: Sequence[float]) -> str:
    """Mean, least and most of some shares."""
    import torch

    shares = torch.tensor(values)
    return f"{float(shares.mean()):.1%} ({float(shares.min()):.1%} to {float(shares.max()):.1%})"
