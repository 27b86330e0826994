"""`icl-lens explain`: one prompt, printed, and written as JSON or a page."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from icl_lens.cli.groups import grouped
from icl_lens.cli.options import AnswerOption, ModelOptions, PageOptions, ReadingOptions
from icl_lens.cli.page import present

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
    from icl_lens.files import write_text
    from icl_lens.report.terminal import render

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
    console = Console()
    console.print(render(explanation))
    if output.json_file is not None:
        write_text(output.json_file, json.dumps(explanation.to_dict(), indent=1, ensure_ascii=False) + "\n")
        console.print(f"Numbers: {output.json_file}")
    if output.wanted:
        present(explanation.to_html(), output, console)
