"""The `icl-lens` command line: one module per command. Invalid input ends in a one-line error and
exit code 2.

1. Commands: `explain`, `check`, `locate`, `atlas`, `ablate`, `towers`, `trace`, `circuit`,
   `compare`, `live`, `models`. `examples` prints the cheat sheet.
2. Options that several commands share: `options`, `task_options` of those that run on a task,
   `head_options` of those that test heads, `folder_options` of those that can be resumed.
   `option_groups` makes a dataclass of options.
3. What commands say: `console` prints it. `own_data` is about your own data, `atlas_start` about
   how long an atlas takes, `more_queries` about intervals that include zero.
4. `program` runs a command and its errors: `spelling` writes them in the words of the shell, and
   `hints` adds what to write instead. `stored_checks` keeps checks of a task on disk.
"""

from typing import Annotated

import typer

from icl_lens.cli.ablate import ablate
from icl_lens.cli.atlas import atlas
from icl_lens.cli.check import check
from icl_lens.cli.circuit import circuit
from icl_lens.cli.compare import compare
from icl_lens.cli.examples import as_text, cheat_sheet
from icl_lens.cli.explain import explain
from icl_lens.cli.live import live
from icl_lens.cli.locate import locate
from icl_lens.cli.models import models
from icl_lens.cli.program import new_app, run_program
from icl_lens.cli.towers import towers
from icl_lens.cli.trace import trace

app = new_app(
    invoke_without_command=True,  # for --version
    epilog="The paper's experiments are in the repository, not in the installed package: "
    "see experiments/README.md there.",
)


TASKS = (
    "sentiment-number, animal-country and other pairs of word categories; antonyms, "
    "country-capital, present-past, singular-plural, english-french, english-spanish, next-item, "
    "country-language, capitalization, verb-gerund, adjective-comparative, animal-class; sst2, "
    "trec, agnews, ethos, amazon (from the Hub); or your own with --path."
)
COMMANDS = {
    explain: "one prompt: which heads give the answer, and why",
    check: "what a model does on a task",
    locate: "the heads that matter over a task's prompts",
    atlas: "every score of every head, and kinds of heads",
    ablate: "what is lost without heads, beside random heads",
    towers: "whether heads match queries and carry labels",
    trace: "at which layer and token the query, texts and labels are read",
    circuit: "the edges through which heads work",
    compare: "two prompts, or two models",
    live: "a prompt in the browser: edit it, click heads, see what changes",
    models: "the models that load without a network",
}
"""Each command with the words that the overview and --help say of it."""


def overview() -> str:
    """Return what `icl-lens` can do, which it prints without arguments."""
    lines = ["Find and explain the attention heads behind in-context learning.", ""]
    for command, summary in COMMANDS.items():
        lines.append(f"  {command.__name__:9} {summary}")
    lines += [
        "",
        "Begin with icl-lens explain, or icl-lens locate --task sentiment-number -n 100.",
        "icl-lens COMMAND --help explains a command, icl-lens --examples prints examples.",
    ]
    return "\n".join(lines)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
    examples: Annotated[
        bool, typer.Option("--examples", help="Print the cheat sheet: Python and commands.")
    ] = False,
) -> None:
    """Find and explain the attention heads behind in-context learning."""
    if version:
        from icl_lens import __version__

        print(f"icl-lens {__version__}")
        raise typer.Exit
    if examples:
        print(as_text(cheat_sheet()))
        raise typer.Exit


WITHOUT_TASKS = (live, models)
for command, summary in COMMANDS.items():
    epilog = None if command in WITHOUT_TASKS else f"More options: --help-all. Tasks: {TASKS}"
    app.command(short_help=summary, epilog=epilog)(command)


def main() -> None:
    """Run `icl-lens`, the entry point; without arguments, print what it can do."""
    run_program(app, "icl-lens", overview=overview())
