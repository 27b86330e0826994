"""The `icl-lens` command line. Invalid input ends in a one-line error and exit code 2."""

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
    epilog="The paper's experiments are in the repository, not in the installed package: "
    "clone it and run python -m experiments list.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Find and explain the attention heads behind in-context learning."""
    if version:
        from icl_lens import __version__

        print(f"icl-lens {__version__}")
        raise typer.Exit


for command in (explain, ablate, compare, locate, models):
    app.command()(command)


def quiet_libraries() -> None:
    """Silence loader warnings and progress bars; keep errors and, in a terminal, download progress."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    for name in (None, "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("icl_lens").setLevel(logging.WARNING)
    import transformers

    from icl_lens.hub import download_bars

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()  # also disables download progress bars
    download_bars(sys.stderr.isatty())


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Convert user and environment errors to one line on standard error and exit code 2.

    Handles invalid input, exhausted memory and unwritable output. A closed output pipe ends the program silently with
    exit code 1, because all files are written by then.
    """
    from icl_lens.errors import InputError

    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # raises here if the output cannot be printed
    except InputError as error:
        report_error(program, to_cli_terms(str(error)))
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise
        report_error(program, "out of memory; use fewer prompts, --dtype bfloat16, or another --device")
        raise SystemExit(2) from None
    except BrokenPipeError:
        _print_nowhere()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT, EIO) or error.filename is not None:
            raise
        _print_nowhere()
        report_error(program, f"cannot print the output: {error.strerror}; free space, or redirect it elsewhere")
        raise SystemExit(2) from None


def main() -> None:
    """Run `icl-lens`, the entry point; without arguments, run `explain`."""
    with one_line_errors("icl-lens"):
        escape_unencodable()
        if not {"-h", "--help", "--version"} & set(sys.argv[1:]):
            quiet_libraries()
        app(args=sys.argv[1:] or ["explain"])


def _print_nowhere() -> None:
    """Discard all further output, including what Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
