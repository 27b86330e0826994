"""The `icl-lens` command line: one module per command. Invalid input ends in a one-line error and exit code 2."""

from typing import Annotated

import typer

from icl_lens.cli.ablate import ablate
from icl_lens.cli.circuit import circuit
from icl_lens.cli.compare import compare
from icl_lens.cli.examples import as_text, cheat_sheet
from icl_lens.cli.explain import explain
from icl_lens.cli.locate import locate
from icl_lens.cli.models import models
from icl_lens.cli.program import new_app, run_program
from icl_lens.cli.towers import towers

app = new_app(
    invoke_without_command=True,  # for --version
    epilog="The paper's experiments are in the repository, not in the installed package: "
    "see experiments/README.md there.",
)


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
    examples: Annotated[bool, typer.Option("--examples", help="Print the cheat sheet: Python and commands.")] = False,
) -> None:
    """Find and explain the attention heads behind in-context learning."""
    if version:
        from icl_lens import __version__

        print(f"icl-lens {__version__}")
        raise typer.Exit
    if examples:
        print(as_text(cheat_sheet()))
        raise typer.Exit


for command in (explain, ablate, circuit, compare, locate, towers, models):
    app.command()(command)


def main() -> None:
    """Run `icl-lens`, the entry point; without arguments, run `explain`."""
    run_program(app, "icl-lens", default="explain")
