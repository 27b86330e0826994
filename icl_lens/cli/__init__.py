"""The command line: `icl-lens`. Prints, writes files, and turns bad input into one line and exit code 2."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EIO, ENOSPC
from typing import Annotated

import typer

from icl_lens.cli.ablate import ablate
from icl_lens.cli.compare import compare
from icl_lens.cli.console import escape_unencodable, report_error
from icl_lens.cli.explain import explain
from icl_lens.cli.locate import locate
from icl_lens.cli.models import models
from icl_lens.cli.option_messages import to_cli_terms

app = typer.Typer(
    invoke_without_command=True,  # for --version
    epilog="The paper's experiments live in the repository, not in the installed package: "
    "clone it and run python -m experiments list.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Which heads make a language model learn in context, and how?"""
    if version:
        from icl_lens import __version__

        print(f"icl-lens {__version__}")
        raise typer.Exit


for command in (explain, ablate, compare, locate, models):
    app.command()(command)


def quiet_libraries() -> None:
    """Keeps the loaders' remarks and bars out of the output; not errors, nor, in a terminal, bars of downloads."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    for name in (None, "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("icl_lens").setLevel(logging.WARNING)
    import transformers

    from icl_lens.hub import download_bars

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()  # switches the bars of downloads off as well
    download_bars(sys.stderr.isatty())


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """What ends a program through no fault of its own becomes one line on standard error, and exit code 2.

    That is bad input, too little memory, and an output that cannot be written. Where whoever read the output has gone,
    nothing is said: files are written by then.
    """
    from icl_lens.errors import InputError

    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # what cannot be printed says so here
    except InputError as error:
        report_error(program, to_cli_terms(str(error)))
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise
        report_error(program, "the memory is full; take fewer prompts, --dtype bfloat16, or another --device")
        raise SystemExit(2) from None
    except BrokenPipeError:
        _print_nowhere()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT, EIO) or error.filename is not None:
            raise
        _print_nowhere()
        report_error(program, f"the output cannot be printed: {error.strerror}; make room, or send it elsewhere")
        raise SystemExit(2) from None


def main() -> None:
    """Entry point of `icl-lens`; no argument means `explain`. InputError becomes one line on stderr, exit code 2."""
    with one_line_errors("icl-lens"):
        escape_unencodable()
        if not {"-h", "--help", "--version"} & set(sys.argv[1:]):
            quiet_libraries()
        app(args=sys.argv[1:] or ["explain"])


def _print_nowhere() -> None:
    """Drops what is still to be printed, also by Python when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
