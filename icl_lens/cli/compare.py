"""`icl-lens compare`: compare two prompts or two models."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import Argument, Option

from icl_lens.cli.console import PlainConsole, progress
from icl_lens.cli.folder_options import FolderOptions
from icl_lens.cli.head_options import ByOption
from icl_lens.cli.option_groups import grouped, reject_options
from icl_lens.cli.options import (
    PAPER_ANSWER,
    PAPER_PROMPT,
    FileOptions,
    ModelOptions,
    ReadoutOptions,
    SeedOption,
    parse_prompt,
)
from icl_lens.cli.task_options import TaskOptions
from icl_lens.errors import InputError


@dataclass(frozen=True, kw_only=True)
class TwoModels(ModelOptions):
    """The models of A and B, and their device and precision."""

    model_b: Annotated[str | None, Option(help="Model of B.", show_default="same as A")] = None
    revision_b: Annotated[
        str | None, Option(help="Hub revision of B's model.", show_default="main branch")
    ] = None

    @property
    def are_same(self) -> bool:
        """Whether A and B share one model."""
        return self.model_b is None and self.revision_b is None

    def both(self) -> tuple[Any, Any]:
        """Load both models; return the same object twice if B has no other model."""
        first = self.load()
        if self.are_same:
            return first, first
        return first, replace(
            self, model=self.model_b or self.model, revision=self.revision_b
        ).load()


@grouped
def compare(
    files: FileOptions,
    folder: FolderOptions,
    task: TaskOptions,
    readout: ReadoutOptions,
    models: TwoModels,
    a: Annotated[
        str | None, Argument(help="First prompt.", show_default=f"{PAPER_PROMPT}, with --model-b")
    ] = None,
    b: Annotated[str | None, Argument(help="Second prompt.", show_default="the first")] = None,
    answer: Annotated[str | None, Option("--answer", "-a", help="Correct label of A.")] = None,
    answer_b: Annotated[
        str | None,
        Option(help="Correct label of B.", show_default="A's for one prompt, else B's prediction"),
    ] = None,
    n: Annotated[int, Option("--n", "-n", min=1, help="Prompts of a task, for two models.")] = 1,
    by: ByOption = None,
    seed: SeedOption = 0,
) -> None:
    """Compare the answers and heads of two prompts on one model, or of two models on one prompt.

    With --task or --path, A and B are a task's first two prompts, or its first prompt on two
    models. With -n, compare means over prompts, with intervals of the differences. With --html, the
    page also compares layers and attention, or shows all heads of both models.
    """
    from icl_lens import Run, compare_models, explain
    from icl_lens.analyses.explanation.comparison import compare as compare_explanations
    from icl_lens.analyses.model_comparison import ModelComparison

    _check_number(n, models, task, folder)
    prompts: list[Any] = task.sample_prompts(
        2 if models.are_same else n, seed=seed, conflicting=(a, b, answer, answer_b)
    )
    if not prompts and models.are_same and b is None:
        raise InputError(
            "nothing to compare; pass two prompts, a task, or a second model with --model-b"
        )
    files.check()
    if not prompts:
        prompts = _parsed(a, b, answer, answer_b)
    console = PlainConsole()
    task.describe_data(console, prompts, readout)
    first, second = models.both()
    models.warn_of_words(console, prompts)
    settings = readout.tokenize_arguments(first) | readout.readout_arguments()
    second_settings = readout.tokenize_arguments(second) | readout.readout_arguments()
    if n > 1:
        _check_same_settings(settings, second_settings)
        if task.check:
            for side, model in (("A", first), ("B", second)):
                console.print(f"Model {side}:", style="bold")
                task.print_behavior(console, model, readout, n=n, seed=seed, measured=prompts)
        with progress() as report:
            comparison = compare_models(
                first,
                second,
                prompts,
                by=by,
                run=Run(folder.out, progress=report),
                **settings,
            )
    else:
        second_prompt = prompts[-1]
        before = explain(first, prompts[0], by=by, **settings)
        if b is None and not models.are_same:  # explain the same answer of one prompt
            second_prompt = replace(second_prompt, answer=second_prompt.answer or before.target)
        after = explain(second, second_prompt, by=by, **second_settings)
        comparison = compare_explanations(before, after)
    files.write_json(comparison.to_json)
    page = files.write(comparison.to_html)
    console.print(comparison)
    if isinstance(comparison, ModelComparison):
        task.print_more_queries(
            console, prompts, n=n, seed=seed, is_undecided=comparison.is_undecided
        )
    files.show(page, console)


def _parsed(a: str | None, b: str | None, answer: str | None, answer_b: str | None) -> list[Any]:
    """Return both prompts; by default, the paper's and the first."""
    if a is None:
        a, answer = PAPER_PROMPT, answer or PAPER_ANSWER
    return [parse_prompt(a, answer), parse_prompt(a if b is None else b, answer_b)]


def _check_number(n: int, models: TwoModels, task: TaskOptions, folder: FolderOptions) -> None:
    """Raise InputError for several prompts without a task and two models, and for a folder without
    several prompts.
    """
    if n > 1 and (models.are_same or task.name is None):
        raise InputError(
            f"-n must be 1 without a second model and a task, got {n}; pass --model-b and --task"
        )
    if n == 1:
        reject_options(folder, "out", reason="only -n prompts are stored")


def _check_same_settings(settings: dict[str, Any], second_settings: dict[str, Any]) -> None:
    """Raise InputError if two models would read the same prompts in different forms."""
    if settings != second_settings:
        raise InputError(
            "--chat requires two models with the same chat template; pass --template instead"
        )
