"""`icl-lens ablate`: zero heads and measure the answer's probability or a task's accuracy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from rich.table import Table
from rich.text import Text

from icl_lens.cli.console import PlainConsole, new_table
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import By, ModelOptions, TaskOptions, TokenOptions, preview
from icl_lens.report.number_format import percent

if TYPE_CHECKING:
    from icl_lens.interventions.controlled_ablation import AnswerScores, ControlledAblation
    from icl_lens.models.head import Head
    from icl_lens.models.view import ModelView
    from icl_lens.prompts.batch import PromptBatch
    from icl_lens.prompts.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class AblateTask(TaskOptions):
    """A task to evaluate instead of a single prompt."""

    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Number of prompts; heads are located on n others.")] = 200

    def split_prompts(self, seed: int) -> "tuple[list[Prompt], list[Prompt]]":
        """Return prompts to locate heads on, and `n` held-out prompts to ablate them on."""
        half = self.n + -self.n % 4  # both halves balance query classes and labels
        balanced = self.classes == "binary"  # with all classes, labels are fixed and answers vary
        prompts = self.prompts(n=2 * half, seed=seed, balanced=balanced)
        return prompts[:half], prompts[half:][: self.n]


@dataclass(frozen=True, kw_only=True)
class HeadsOptions:
    """The heads to ablate, and the random sets to compare them with."""

    panel: ClassVar[str] = "Heads"

    heads: Annotated[
        str | None, typer.Option(help="Heads to ablate, e.g. L1H2,L3H0.", show_default="located heads")
    ] = None
    k: Annotated[
        int | None, typer.Option("--top", "-k", min=1, help="Number of heads to locate.", show_default="6")
    ] = None
    by: Annotated[
        By | None,
        typer.Option(help="Locate by increase, or by contrast with other labels.", show_default="increase"),
    ] = None
    random_sets: Annotated[int, typer.Option(min=1, max=1000, help="Number of random head sets.")] = 20

    @property
    def top(self) -> int:
        return 6 if self.k is None else self.k


@grouped
def ablate(
    heads: HeadsOptions,
    task: AblateTask,
    tokens: TokenOptions,
    model: ModelOptions,
    prompt: Annotated[str | None, typer.Argument(help='Prompt, e.g. "happy : bar three : foo nine :".')] = None,
    answer: Annotated[str | None, typer.Option("--answer", "-a", help="Correct label.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for prompts and random heads.")] = 0,
) -> None:
    """Zero-ablate heads and compare with random head sets of the same size.

    Labels are swapped in every second prompt of a task, so a constant answer scores 50 %. Accuracy is reported between
    the labels and over the full vocabulary.
    """
    import icl_lens as il
    from icl_lens.interventions.controlled_ablation import ablate_with_controls
    from icl_lens.models.view import ModelView

    _check(prompt, answer, task, heads)
    loaded = model.load()
    if task.name is not None:
        locating, testing = task.split_prompts(seed)
    else:
        assert prompt is not None
        locating = testing = [il.Prompt.parse(prompt, answer=answer)]
    batch = tokens.tokenize(loaded, testing)
    view, console = ModelView.of(loaded), PlainConsole()
    if task.name is not None:
        console.print(preview(batch))
    task.print_behavior(console, loaded, tokens, seed=seed)
    removed = _chosen(view, heads, lambda: tokens.tokenize(loaded, locating))
    removal = ablate_with_controls(loaded, batch, removed, n_random_sets=heads.random_sets, seed=seed)
    console.print(f"{view.name}: {'located' if heads.heads is None else 'selected'} {', '.join(map(str, removed))}")
    console.print(_of_prompt(removal, batch.labels) if task.name is None else _of_task(removal))


def _check(prompt: str | None, answer: str | None, task: AblateTask, heads: HeadsOptions) -> None:
    """Raise InputError for options that conflict or have no effect."""
    from icl_lens.errors import InputError

    if (prompt is None) == (task.name is None):
        raise InputError("pass either a prompt or --task, e.g. --task sentiment-number")
    if task.name is not None and answer is not None:
        raise InputError("--answer has no effect with a task, whose prompts have their own answers; remove it")
    if heads.heads is not None and (heads.k is not None or heads.by is not None):
        raise InputError("pass either --heads, or --top and --by to locate them, not both")
    if prompt is not None:
        task.check_no_task()


def _chosen(view: "ModelView", options: HeadsOptions, prompts: Callable[[], "PromptBatch"]) -> "list[Head]":
    """Return the heads named by the options, or those with the largest mean score over the prompts."""
    from icl_lens.errors import InputError
    from icl_lens.locate.locate import top_heads_by

    if options.heads is not None:
        names = dict.fromkeys(options.heads.replace(",", " ").split())
        if not names:
            raise InputError("--heads must name at least one head, e.g. L1H2,L3H0; omit it to locate heads")
        return [view.check_head(name) for name in names]
    if options.top > len(view.heads()):
        raise InputError(
            f"--top must be at most {len(view.heads())}, the number of heads of {view.name}, got {options.top}"
        )
    return top_heads_by(view.model, prompts(), options.top, by=options.by or "increase")


def _of_task(removal: "ControlledAblation") -> Table:
    """Return accuracies with no ablation, with the heads zeroed, and with random sets zeroed, one row each."""

    def shares(answers: "AnswerScores") -> tuple[float, float]:
        return answers.accuracy_between_labels, answers.accuracy_over_vocabulary

    table = new_table("", "accuracy between labels", "over full vocabulary")
    for name, cells in zip(_removed(removal), zip(*_cells(removal, shares), strict=True), strict=True):
        table.add_row(name, *cells)
    return table


def _of_prompt(removal: "ControlledAblation", labels: Sequence[str]) -> Table:
    """Return label probabilities, one row per label."""

    def shares(answers: "AnswerScores") -> list[float]:
        return answers.label_log_probs[0].exp().tolist()

    table = new_table("probability of", *_removed(removal))
    for label, cells in zip(labels, _cells(removal, shares), strict=True):
        table.add_row(Text(label), *cells)
    return table


def _removed(removal: "ControlledAblation") -> tuple[str, str, str]:
    """Return the names of the compared conditions."""
    count = len(removal.heads)
    return "no ablation", f"{count} heads zeroed", f"{count} random heads zeroed, {len(removal.random)} sets"


def _cells(
    removal: "ControlledAblation", shares: Callable[["AnswerScores"], Sequence[float]]
) -> list[tuple[str, str, str]]:
    """Return every share with no ablation, with the heads zeroed, and its mean and range over random sets."""
    random = zip(*map(shares, removal.random), strict=True)
    return [
        (percent(before), percent(after), _spread(random_sets))
        for before, after, random_sets in zip(shares(removal.baseline), shares(removal.ablated), random, strict=True)
    ]


def _spread(values: Sequence[float]) -> str:
    """Return the mean, minimum and maximum of shares."""
    return f"{percent(sum(values) / len(values))} ({percent(min(values))} to {percent(max(values))})"
