"""`icl-lens explain`: one prompt, printed, and written as JSON or a page."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from icl_lens.cli.options import (
    BiasOption,
    BosOption,
    DeviceOption,
    DtypeChoice,
    DtypeOption,
    FinalNormChoice,
    FinalNormOption,
    ModelOption,
    OpenOption,
    RevisionOption,
    load,
)
from icl_lens.cli.page import present

PAPER_PROMPT = "love : bar like : bar eight : foo two : foo one :"


def explain(
    prompt: Annotated[str, typer.Argument(help='Like "happy : bar sad : bar three : foo nine :".')] = PAPER_PROMPT,
    model: ModelOption = "icl-mini",
    answer: Annotated[
        str | None, typer.Option("--answer", "-a", help="The right label; default: what the model says.")
    ] = None,
    k: Annotated[int, typer.Option("--top", "-k", help="How many heads to describe.")] = 10,
    n_ablated: Annotated[int, typer.Option("--ablate", help="How many located heads to zero together.")] = 4,
    html: Annotated[Path | None, typer.Option(help="Write a self-contained page.")] = None,
    open_page: OpenOption = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number as JSON.")] = None,
    final_norm: FinalNormOption = FinalNormChoice.frozen,
    bias: BiasOption = True,
    bos: BosOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the random heads to compare with.")] = 0,
    device: DeviceOption = None,
    dtype: DtypeOption = DtypeChoice.float32,
    revision: RevisionOption = None,
) -> None:
    """Explain one prompt: layers, heads, positions, words, and what removing the located heads does.

    Without arguments: the paper's example on the bundled model.
    """
    from icl_lens import explain as explain_prompt
    from icl_lens.files import write_text
    from icl_lens.report.terminal import render

    loaded = load(model, device=device, dtype=dtype, revision=revision)
    explanation = explain_prompt(
        loaded,
        prompt,
        answer=answer,
        prepend_bos=bos,
        final_norm=final_norm.value,
        bias=bias,
        k=k,
        n_ablated=n_ablated,
        seed=seed,
    )
    console = Console()
    console.print(render(explanation))
    if json_file is not None:
        write_text(json_file, json.dumps(explanation.to_dict(), indent=1, ensure_ascii=False) + "\n")
        console.print(f"Numbers: {json_file}")
    if html is not None or open_page:
        present(explanation.to_html(), html, open_page=open_page, console=console)
