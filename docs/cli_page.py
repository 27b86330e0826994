"""`python docs/cli_page.py`: writes docs/cli.md from the commands themselves, as Typer describes them.

A test fails when the page and the commands differ.
"""

import re
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from icl_lens.cli import app

PAGE = Path(__file__).parent / "cli.md"
ABOUT = """
Bad input ends in one line on standard error and exit code 2. Without arguments, `icl-lens` explains the paper's prompt
on the bundled model. `python -m icl_lens` is the same command.

The paper's experiments are a package of the repository, not of the installed one, because they keep results, figures
and findings beside their code: clone the repository (or unpack the source distribution), install it with
`pip install -e ".[experiments]"`, and run `python -m experiments list` there.
"""


def page() -> str:
    """The page as Markdown."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="icl-lens")
    text = get_docs_for_click(obj=command, ctx=context, name="icl-lens", title="Command line")
    # The list of commands is cut short there; the contents beside the page have them all.
    text = re.sub(r"\*\*Commands\*\*:\n\n(\* .*\n)+\n?", "", text, count=1)
    head, first, rest = text.partition("\n## ")
    return f"{head.rstrip()}\n{ABOUT}{first}{rest}".rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
