"""`icl-lens explain`: explain one prompt in the terminal, as JSON or as a page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from icl_lens.cli.console import PlainConsole
from icl_lens.cli.option_groups import grouped
from icl_lens.cli.options import PAPER_ANSWER, PAPER_PROMPT, By, ModelOptions, PageOptions, ReadoutOptions, TaskOptions


@dataclass(frozen=True, kw_only=True)
class ExplainOutput(PageOptions):
    """The page, and the JSON file."""

    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers as JSON.")] = None


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Plain text without demonstrations, and the tokens or labels to compare with."""

    panel: ClassVar[str] = "Text"

    text: Annotated[str | None, typer.Option(help="Text to explain instead of an in-context prompt.")] = None
    target: Annotated[
        str | None,
        typer.Option(help='With --text: token to explain, e.g. " Mary".', show_default="most probable token"),
    ] = None
    against: Annotated[
        list[str] | None,
        typer.Option(help="Label or token to compare with; repeatable.", show_default="all other labels"),
    ] = None

    def check(self, prompt: str | None, answer: str | None, reading: ReadoutOptions) -> None:
        """Raise InputError for options that conflict or have no effect."""
        from icl_lens.errors import InputError

        if self.text is None:
            if self.target is not None:
                raise InputError("--target requires --text; use --answer for a prompt with demonstrations")
        elif prompt is not None:
            raise InputError("pass either a prompt with demonstrations or --text, not both")
        elif answer is not None:
            raise InputError("--answer has no effect with --text; use --target for the token to explain")
        elif not reading.is_default:
            raise InputError(
                "--template, --separator, --prefix and --shared-prefix have no effect with --text, which has no "
                "demonstrations; remove them"
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
        typer.Argument(help='Prompt, e.g. "happy : bar three : foo nine :".', show_default=PAPER_PROMPT),
    ] = None,
    answer: Annotated[
        str | None,
        typer.Option(
            "--answer", "-a", help="Correct label.", show_default="model's prediction; foo for the default prompt"
        ),
    ] = None,
    by: Annotated[
        By | None,
        typer.Option(help="Score that ranks heads.", show_default="contrast with --against, else increase"),
    ] = None,
    why: Annotated[
        str | None, typer.Option(help="Head whose attention to explain, e.g. L23H1.", show_default="the first head")
    ] = None,
    k: Annotated[int, typer.Option("--top", "-k", min=1, help="Number of heads to describe.")] = 10,
    n_ablated: Annotated[int, typer.Option("--ablate", min=1, help="Number of located heads to zero jointly.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed for the task's prompt and random heads.")] = 0,
) -> None:
    """Explain one prompt: layers, heads, positions, top words, and the effect of ablating the located heads.

    Without arguments, explain the paper's example on the bundled model; with --text, any text without demonstrations;
    with --task or --path, the first prompt that `icl-lens locate` samples with the same options.
    """
    from icl_lens.explanation import explain as explain_prompt
    from icl_lens.files import check_writable
    from icl_lens.report.terminal import render

    free.check(prompt, answer, reading)
    sampled = task.sample_prompts(1, seed=seed, conflicting=(prompt, answer, free.text, free.target))
    check_writable(output.json_file, output.html)
    convention: dict[str, Any] = {
        "prepend_bos": reading.bos,
        "final_norm": reading.final_norm,
        "bias": reading.bias,
        "by": by,
        "why": why,
        "k": k,
        "n_ablated": n_ablated,
        "seed": seed,
    }
    loaded, console = model.load(), PlainConsole()
    task.print_behavior(console, loaded, reading, seed=seed)
    if free.text is not None:
        explanation = explain_prompt(
            loaded, free.text, answer=free.target, against=free.against or None, plain_text=True, **convention
        )
    else:
        if prompt is None and not sampled:
            prompt, answer = PAPER_PROMPT, answer or PAPER_ANSWER
        explanation = explain_prompt(
            loaded,
            sampled[0] if sampled else prompt or "",
            answer=answer,
            against=free.against or None,
            **reading.template_kwargs(),
            **convention,
        )
    # Files are written before printing, so that a closed pipe loses nothing.
    if output.json_file is not None:
        explanation.save(output.json_file)
    page = output.write(explanation.to_html)
    console.print(render(explanation))
    if output.json_file is not None:
        console.print(f"JSON: {output.json_file}", soft_wrap=True)
    output.show(page, console)
