"""`icl-lens ablate`: what is left of the answer, or of a task's accuracy, when heads are removed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from icl_lens.cli.console import PlainConsole
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import (
    ByChoice,
    ClassesChoice,
    ModelOptions,
    TaskOption,
    TaskOptions,
    TokenOptions,
    preview,
)
from icl_lens.report.number_format import percent

if TYPE_CHECKING:
    from icl_lens.interventions.controlled_ablation import AnswerScores, ControlledAblation
    from icl_lens.models.head import Head
    from icl_lens.models.view import ModelView
    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.prompt import Prompt


MAX_RANDOM_SETS = 1000
"""Sets of random heads, each of which costs as much as the answer that is asked for."""


@dataclass(frozen=True, kw_only=True)
class AblateTask(TaskOptions):
    """The task that is answered instead of one prompt."""

    task: TaskOption = None
    n: Annotated[int, typer.Option("--n", "-n", help="Prompts of the task; heads are located on as many others.")] = 200

    def split_prompts(self, seed: int) -> "tuple[list[Prompt], list[Prompt]]":
        """Prompts to locate heads on, and `n` others to remove them on."""
        half = self.n + self.n % 2  # in pairs, so that both halves have both labels as often
        balanced = self.classes is ClassesChoice.binary  # with all classes, labels stay with them and answers vary
        prompts = self.prompts(n=2 * half, seed=seed, balanced=balanced)
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
    random_sets: Annotated[int, typer.Option(help="Sets of as many random heads to compare with.")] = 20

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
    from icl_lens.interventions.controlled_ablation import ablate_with_controls
    from icl_lens.models.view import ModelView

    _check(prompt, answer, task, heads)
    loaded = model.load()
    if task.name is not None:
        choosing, testing = task.split_prompts(seed)
    else:
        assert prompt is not None
        choosing = testing = [il.Prompt.parse(prompt, answer=answer)]
    batch = tokens.tokenize(loaded, testing)
    view, console = ModelView.of(loaded), PlainConsole()
    if task.name is not None:
        console.print(preview(batch))
    removed = _chosen(view, heads, lambda: tokens.tokenize(loaded, choosing))
    removal = ablate_with_controls(loaded, batch, removed, n_random_sets=heads.random_sets, seed=seed)
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
        task.check_no_task()
        if task.task is not None or task.path is not None or task.labels is not None:
            raise InputError("--path and --labels are a task's; a prompt says all of it itself: leave them out")
    if task.n < 1 or heads.random_sets < 1 or heads.top < 1:
        raise InputError(f"--n {task.n}, --random-sets {heads.random_sets} and --top {heads.top} must be at least 1")
    if heads.random_sets > MAX_RANDOM_SETS:
        raise InputError(f"--random-sets {heads.random_sets} would take too long; at most {MAX_RANDOM_SETS} are drawn")


def _chosen(view: "ModelView", options: HeadsOptions, prompts: Callable[[], "PromptBatch"]) -> "list[Head]":
    """The heads that the options name, or those of largest mean increase over the prompts."""
    from icl_lens.errors import InputError
    from icl_lens.interventions.controlled_ablation import top_heads_by_increase

    if options.heads is not None:
        names = dict.fromkeys(options.heads.replace(",", " ").split())
        if not names:
            raise InputError("--heads names no head; give heads like L1H2,L3H0, or leave it out to locate some")
        return [view.check_head(name) for name in names]
    if options.top > len(view.heads()):
        raise InputError(f"--top {options.top} is more than the {len(view.heads())} heads of {view.name}")
    return top_heads_by_increase(view.model, prompts(), options.top, by=options.by.value if options.by else "increase")


def _of_task(removal: "ControlledAblation") -> Table:
    """Accuracies with nothing removed, without the heads, and without random sets of as many, in a row each."""

    def shares(answers: "AnswerScores") -> tuple[float, float]:
        return answers.accuracy_between_labels, answers.accuracy_over_vocabulary

    table = _table("", "accuracy between labels", "over the vocabulary")
    for name, cells in zip(_removed(removal), zip(*_cells(removal, shares), strict=True), strict=True):
        table.add_row(name, *cells)
    return table


def _of_prompt(removal: "ControlledAblation", labels: Sequence[str]) -> Table:
    """The labels' probabilities, a row a label: there may be many."""

    def shares(answers: "AnswerScores") -> list[float]:
        return answers.label_log_probs[0].exp().tolist()

    table = _table("probability of", *_removed(removal))
    for label, cells in zip(labels, _cells(removal, shares), strict=True):
        table.add_row(Text(label), *cells)
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _removed(removal: "ControlledAblation") -> tuple[str, str, str]:
    """What is compared."""
    count = len(removal.heads)
    return "nothing removed", f"{count} heads removed", f"{count} random heads, {len(removal.random)} sets"


def _cells(
    removal: "ControlledAblation", shares: Callable[["AnswerScores"], Sequence[float]]
) -> list[tuple[str, str, str]]:
    """Of every share: with nothing removed, without the heads, and of the random sets mean, least and most."""
    random = zip(*map(shares, removal.random), strict=True)
    return [
        (percent(before), percent(after), _spread(random_sets))
        for before, after, random_sets in zip(shares(removal.baseline), shares(removal.ablated), random, strict=True)
    ]


def _spread(values: Sequence[float]) -> str:
    """Mean, least and most of some shares."""
    return f"{percent(sum(values) / len(values))} ({percent(min(values))} to {percent(max(values))})"
