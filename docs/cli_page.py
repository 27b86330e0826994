"""Write docs/cli.md from Typer's description of the commands: `python docs/cli_page.py`.

A test fails if the page and the commands differ.
"""

import re
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from icl_lens.cli import app
from icl_lens.cli.program import app_with_all_options

PAGE = Path(__file__).parent / "cli.md"
ABOUT = """
Invalid input prints one line to standard error and exits with code 2; an unknown option or a value of a wrong type
also prints the usage. Without arguments, `icl-lens` prints what it can do. `python -m icl_lens` is
the same command. `--help` leaves out options that are rarely needed; `--help-all` shows them, as this page does.

The experiments are scripts to run and to copy. Clone the repository (or unpack the source distribution), install
it with `pip install -e .`, and run, for example, `python experiments/ablation.py --model icl-mini` in its root
folder; `experiments/README.md` lists them.
"""


def page() -> str:
    """Return the page as Markdown."""
    command = app_with_all_options(app)
    context = typer.Context(command, info_name="icl-lens")
    text = get_docs_for_click(obj=command, ctx=context, name="icl-lens", title="Command line")
    # Typer truncates the list of commands here; the table of contents shows all of them.
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n?", "", text, count=1)
    head, first, rest = text.partition("\n## ")
    return f"{head.rstrip()}\n{ABOUT}{first}{rest}".rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
