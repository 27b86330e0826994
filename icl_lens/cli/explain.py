"""`icl-lens explain`: explain one prompt in the terminal, as JSON or as a page."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Argument, Option

from icl_lens.cli.console import PlainConsole, progress
from icl_lens.cli.folder_options import FolderOptions
from icl_lens.cli.head_options import ByOption, head_names
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
from icl_lens.cli.task_options import TaskOptions, print_what_heads_carry
from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_ABLATED, N_DESCRIBED

if TYPE_CHECKING:
    from icl_lens.prompts.prompt import Prompt


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Plain text without demonstrations, and the labels or tokens to compare with."""

    panel: ClassVar[str] = "Text"

    text: Annotated[str | None, Option(help="Text without demonstrations to explain.")] = None
    against: Annotated[
        list[str] | None,
        Option(help="Label or token to compare with; repeatable.", show_default="all other labels"),
    ] = None

    def check(self, prompt: str | None, readout: ReadoutOptions) -> None:
        """Raise InputError for options that conflict or have no effect."""
        if self.text is not None:
            if prompt is not None:
                raise InputError("pass either a prompt with demonstrations or --text, not both")
            names = ("template", "separator", "prefix", "chat", "system")
            reject_options(readout, *names, reason="--text has no demonstrations")


@dataclass(frozen=True, kw_only=True)
class WhyOptions(FolderOptions):
    """The heads whose attention to explain, for one prompt or on average over a task."""

    panel: ClassVar[str] = "Why a head attends"

    why: Annotated[
        str | None,
        Option(help="Head whose attention to explain, e.g. L23H1.", show_default="the first head"),
    ] = None
    n: Annotated[
        int | None, Option("--n", "-n", min=1, help="With --why: means over n prompts.")
    ] = None

    def check(self, task: TaskOptions, **conflicting: Any) -> None:
        """Raise InputError for options that conflict, are missing or have no effect."""
        if self.n is None:
            if self.out is not None:
                raise InputError(
                    "--out requires -n, the number of the task's prompts to average over"
                )
            return
        if task.name is None:
            raise InputError("-n requires a task, e.g. --task sentiment-number")
        if self.why is None:
            raise InputError("-n requires --why, the heads to explain, e.g. --why L23H1,L23H0")
        for name, is_passed in conflicting.items():
            if is_passed:
                raise InputError(
                    f"--{name} has no effect with -n, which prints means over prompts; remove it"
                )


@grouped
def explain(
    files: FileOptions,
    why_options: WhyOptions,
    text_options: TextOptions,
    task: TaskOptions,
    readout: ReadoutOptions,
    model: ModelOptions,
    prompt: Annotated[
        str | None,
        Argument(
            help='Prompt, e.g. "happy : bar three : foo nine :" (\\n: line break).',
            show_default=PAPER_PROMPT,
        ),
    ] = None,
    answer: Annotated[
        str | None,
        Option(
            "--answer",
            "-a",
            help="Correct label; with --text, any token.",
            show_default="model's prediction; foo for the default prompt",
        ),
    ] = None,
    row: Annotated[int | None, Option(min=1, help="Row of --path to explain.")] = None,
    by: ByOption = None,
    k: Annotated[int, Option("--top", "-k", min=1, help="Number of heads to describe.")] = (
        N_DESCRIBED
    ),
    n_ablated: Annotated[
        int, Option("--ablate", min=1, help="Number of located heads to zero jointly.")
    ] = N_ABLATED,
    seed: SeedOption = 0,
) -> None:
    """Explain one prompt: layers, heads, positions, top words, and the effect of ablating the
    located heads.

    Without arguments, explain the paper's example on the bundled model; with --text, any text
    without demonstrations; with --task or --path, the first prompt that `icl-lens locate` samples
    with the same options.

    With --why and -n, explain on average over a task's prompts why heads attend more to true labels
    than to false ones, and what their values carry, with intervals. With --out, an interrupted run
    resumes where it stopped.
    """
    from icl_lens.analyses.explanation.explain import explain as explain_prompt
    from icl_lens.models.view import ModelView
    from icl_lens.prompts.plain_text import Text
    from icl_lens.prompts.prompt import Prompt

    text_options.check(prompt, readout)
    why_options.check(
        task,
        html=files.html is not None,
        open=files.open_page,
        by=by is not None,
        top=k != 10,
        ablate=n_ablated != N_ABLATED,
        against=text_options.against,
    )
    sampled = task.sample_prompts(1, seed=seed, conflicting=(prompt, answer, text_options.text))
    if row is not None:
        sampled = [_prompt_of_row(task, row, seed=seed)]
    files.check()
    if sampled:
        explained = sampled[0]
    elif text_options.text is not None:
        explained = Text(text_options.text, answer, text_options.against or None)
    elif prompt is None:
        explained = Prompt.parse(PAPER_PROMPT, answer=answer or PAPER_ANSWER)
    else:
        explained = parse_prompt(prompt, answer)
    if why_options.n is not None:
        _explain_task(files, why_options, task, readout, model, n=why_options.n, seed=seed)
        return
    console = PlainConsole()
    if isinstance(explained, Prompt):
        task.describe_data(console, [explained], readout)
    loaded = model.load()
    if why_options.why is not None:
        ModelView.of(loaded).check_head(why_options.why)
    behavior = task.print_behavior(console, loaded, readout, n=1, seed=seed)
    settings: dict[str, Any] = {
        "by": by,
        "why": why_options.why,
        "k": k,
        "n_ablated": n_ablated,
        "seed": seed,
    }
    settings |= readout.readout_arguments() | readout.tokenize_arguments(loaded)
    settings |= {} if text_options.text is not None else {"against": text_options.against or None}
    explanation = explain_prompt(loaded, explained, **settings)
    if isinstance(explained, Prompt):
        model.warn_of_words(console, [explained])
    # Files are written before printing, so that a closed pipe loses nothing.
    if files.json_file is not None:
        explanation.save(files.json_file)
    page = files.write(explanation.to_html)
    console.print(explanation)
    print_what_heads_carry(console, behavior, explanation)
    files.show(page, console)


def _prompt_of_row(task: TaskOptions, row: int, *, seed: int) -> "Prompt":
    """Return a prompt that asks for the text of one row of the user's file."""
    from icl_lens.prompts.text_task import TextTask

    labeled = task.find_task()
    if not isinstance(labeled, TextTask):
        raise InputError("--row requires a file of texts and labels; pass it with --path")
    return labeled.prompt_of_row(row, seed=seed, demonstrations=task.demonstrations)


def _explain_task(
    files: FileOptions,
    why_options: WhyOptions,
    task: TaskOptions,
    readout: ReadoutOptions,
    model: ModelOptions,
    *,
    n: int,
    seed: int,
) -> None:
    """Print why heads attend to true labels on average over a task's prompts, and write the
    files.
    """
    from icl_lens.measures.mean_score_parts import mean_score_parts
    from icl_lens.models.view import ModelView

    reject_options(
        readout, "final_norm", "bias", reason="parts are those of the model's own scores"
    )
    with why_options.running() as (run, console):
        loaded, batch = task.start(console, model, readout, n=n, seed=seed, device=run.device)
        view = ModelView.of(loaded)
        heads = [view.check_head(name) for name in head_names(why_options.why or "")]
        task.print_behavior(console, loaded, readout, n=n, seed=seed)
        with progress(hidden=console.quiet) as report:
            run = replace(
                run,
                progress=report,
                about=why_options.about(
                    task, model, readout, prompts=batch.prompts, n=n, seed=seed
                ),
            )
            mean_parts = mean_score_parts(loaded, batch, heads, run=run)
        if console.quiet:
            return
        files.write_json(lambda: mean_parts.to_json(model=view.name))
        console.print(mean_parts)
        files.show(None, console)
        if why_options.out is not None:
            tables = why_options.out / "writers.parquet"
            console.print(
                f"Tables: {tables}, groups.parquet, also as CSV; per prompt: part-*.parquet"
            )
