"""`icl-lens explain`: one prompt, printed, and written as JSON or a page."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from icl_lens.cli.console import PlainConsole
from icl_lens.cli.groups import grouped
from icl_lens.cli.options import AnswerOption, ModelOptions, PageOptions, ReadingOptions
from icl_lens.cli.page import present, written

PAPER_PROMPT = "love : bar like : bar eight : foo two : foo one :"


@dataclass(frozen=True, kw_only=True)
class ExplainOutput(PageOptions):
    """The page, and the numbers in a file."""

    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number as JSON.")] = None


@grouped
def explain(
    output: ExplainOutput,
    reading: ReadingOptions,
    model: ModelOptions,
    prompt: Annotated[str, typer.Argument(help='Like "happy : bar sad : bar three : foo nine :".')] = PAPER_PROMPT,
    answer: AnswerOption = None,
    k: Annotated[int, typer.Option("--top", "-k", help="How many heads to describe.")] = 10,
    n_ablated: Annotated[int, typer.Option("--ablate", help="How many located heads to zero together.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the random heads to compare with.")] = 0,
) -> None:
    """Explain one prompt: layers, heads, positions, words, and what removing the located heads does.

    Without arguments: the paper's example on the bundled model.
    """
    from icl_lens import explain as explain_prompt
    from icl_lens.files import check_writable, write_text
    from icl_lens.report.terminal import render

    check_writable(output.json_file, output.html)
    explanation = explain_prompt(
        model.load(),
        prompt,
        answer=answer,
        prepend_bos=reading.bos,
        final_norm=reading.final_norm.value,
        bias=reading.bias,
        k=k,
        n_ablated=n_ablated,
        seed=seed,
    )
    # Written before they are printed: a pipe that closes loses nothing.
    if output.json_file is not None:
        write_text(output.json_file, json.dumps(explanation.to_dict(), indent=1, ensure_ascii=False) + "\n")
    page = written(explanation.to_html(), output) if output.wanted else None
    console = PlainConsole()
    console.print(render(explanation))
    if output.json_file is not None:
        console.print(f"Numbers: {output.json_file}", soft_wrap=True)
    if page is not None:
        present(page, output, console)
