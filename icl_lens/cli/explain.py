"""`icl-lens explain`: one prompt, printed, and written as JSON or a page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from icl_lens.cli.console import PlainConsole
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import AnswerOption, ModelOptions, PageOptions, ReadoutOptions, TaskOptions
from icl_lens.cli.page import save_page, show_page

PAPER_PROMPT = "love : bar like : bar eight : foo two : foo one :"


@dataclass(frozen=True, kw_only=True)
class ExplainOutput(PageOptions):
    """The page, and the numbers in a file."""

    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number as JSON.")] = None


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """A text without demonstrations, and what is compared: of a prompt, labels."""

    panel: ClassVar[str] = "Text"

    text: Annotated[str | None, typer.Option(help="Any text instead of a prompt: what continues it is explained.")] = (
        None
    )
    target: Annotated[
        str | None,
        typer.Option(help='With --text: the token explained, like " Mary"; default: the most probable one.'),
    ] = None
    against: Annotated[
        list[str] | None,
        typer.Option(help='What to compare with: a token like " John", or a label (default: all others); repeatable.'),
    ] = None

    def check(self, prompt: str | None, answer: str | None, reading: ReadoutOptions) -> None:
        """Raises InputError for options that contradict each other, or would be ignored."""
        from icl_lens.errors import InputError

        if self.text is None:
            if self.target is not None:
                raise InputError("--target is a text's: give --text, or --answer for a prompt with demonstrations")
        elif prompt is not None:
            raise InputError("give either a prompt with demonstrations or --text")
        elif answer is not None:
            raise InputError("--answer is one of a prompt's labels; the token explained of --text is --target")
        elif not reading.is_default:
            raise InputError(
                "--template, --separator, --prefix and --shared-prefix write demonstrations, which --text has none of: "
                "leave them out"
            )


@grouped
def explain(
    output: ExplainOutput,
    free: TextOptions,
    task: TaskOptions,
    reading: ReadoutOptions,
    model: ModelOptions,
    prompt: Annotated[
        str | None,
        typer.Argument(help='Like "happy : bar sad : bar three : foo nine :".', show_default=PAPER_PROMPT),
    ] = None,
    answer: AnswerOption = None,
    k: Annotated[int, typer.Option("--top", "-k", help="How many heads to describe.")] = 10,
    n_ablated: Annotated[int, typer.Option("--ablate", help="How many located heads to zero together.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of a task's prompt, and of the random heads to compare with.")] = 0,
) -> None:
    """Explain one prompt: layers, heads, positions, words, and what removing the located heads does.

    Without arguments: the paper's example on the bundled model. With --text: any text, without demonstrations. With
    --task or --path: a prompt of a task, the first that `icl-lens locate` reads with the same options.
    """
    from icl_lens.explanation import explain as explain_prompt
    from icl_lens.explanation import explain_text
    from icl_lens.files import check_writable
    from icl_lens.report.findings import ExplainOptions
    from icl_lens.report.terminal import render

    free.check(prompt, answer, reading)
    drawn = task.sample_prompts(1, seed=seed, conflicting=(prompt, answer, free.text, free.target))
    check_writable(output.json_file, output.html)
    convention: dict[str, Any] = {
        "prepend_bos": reading.bos,
        "final_norm": reading.final_norm.value,
        "bias": reading.bias,
        "k": k,
        "n_ablated": n_ablated,
        "seed": seed,
    }
    if free.text is not None:
        others = tuple(free.against) if free.against else None
        options = ExplainOptions(**convention, target=free.target, against=others)
        explanation = explain_text(model.load(), free.text, options)
    else:
        explanation = explain_prompt(
            model.load(),
            drawn[0] if drawn else PAPER_PROMPT if prompt is None else prompt,
            answer=answer,
            against=free.against or None,
            **reading.template_kwargs(),
            **convention,
        )
    # Written before they are printed: a pipe that closes loses nothing.
    if output.json_file is not None:
        explanation.save(output.json_file)
    page = save_page(explanation.to_html(), output) if output.wanted else None
    console = PlainConsole()
    console.print(render(explanation))
    if output.json_file is not None:
        console.print(f"Numbers: {output.json_file}", soft_wrap=True)
    if page is not None:
        show_page(page, output, console)
