"""Run a command-line program: library output silenced, and one line with exit code 2 for invalid
input.
"""

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EIO, ENOSPC
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from icl_lens.cli.console import report_error
from icl_lens.cli.hints import check_words
from icl_lens.cli.spelling import shell_spelling


def new_app(**settings: Any) -> typer.Typer:
    """Return a Typer app with the settings that all programs share."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # an option takes one or two lines of help instead of three to six
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


ALL_OPTIONS = "--help-all"


def run_program(app: typer.Typer, program: str, *, overview: str = "") -> None:
    """Run the program's command, or print the overview if there are no arguments.

    `--help-all` is `--help` with the options that it leaves out."""
    with one_line_errors(program):
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # escape what the terminal cannot encode
                stream.reconfigure(errors="backslashreplace")
        arguments = sys.argv[1:]
        if overview and not arguments:
            print(overview)
            return
        command: Any = typer.main.get_command(app)
        check_words(getattr(command, "commands", {}), arguments)
        if ALL_OPTIONS in arguments:
            app_with_all_options(app)(
                args=["--help" if argument == ALL_OPTIONS else argument for argument in arguments],
                prog_name=program,
            )
            return
        if not {"-h", "--help", "--version", "--examples"} & set(arguments):
            check_no_data(arguments)
            quiet_libraries()
        app(args=arguments, prog_name=program)


DATA_SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")


def check_no_data(arguments: list[str]) -> None:
    """Raise InputError for a task, or a file of the user's data, in place of a prompt."""
    from icl_lens.errors import InputError
    from icl_lens.prompts.word_task import task_names

    names_of_tasks = set(task_names())
    for previous, argument in pairwise(arguments):
        if previous.startswith("-"):
            continue
        if argument in names_of_tasks:
            raise InputError(
                f"{argument!r} is a task, which commands take with -t; write icl-lens "
                f"{arguments[0]} -t {argument}"
            )
        if argument.endswith(DATA_SUFFIXES) and Path(argument).is_file():
            raise InputError(
                f"{argument!r} is a file of data, which commands read with --path; write "
                f"icl-lens {arguments[0]} --path {argument}"
            )


def app_with_all_options(app: typer.Typer) -> Any:
    """Return the program as a Click command that hides no option."""
    command: Any = typer.main.get_command(app)
    for subcommand in (command, *getattr(command, "commands", {}).values()):
        for parameter in subcommand.params:
            parameter.hidden = False
    return command


def quiet_libraries() -> None:
    """Silence loader warnings and progress bars; keep errors and, in a terminal, download
    progress.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    for name in (None, "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("icl_lens").setLevel(logging.WARNING)
    import transformers

    from icl_lens.foundation.hub import show_download_bars

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()  # also disables download progress bars
    show_download_bars(sys.stderr.isatty())


@contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Convert invalid input, exhausted memory and unwritable output to one line on standard error
    and exit code 2.

    A closed output pipe ends the program silently with exit code 1, because all files are written
    by then.
    """
    from icl_lens.errors import InputError

    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # raises here if the output cannot be printed
    except InputError as error:
        report_error(program, shell_spelling(str(error)))
        raise SystemExit(2) from None
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise
        report_error(
            program, "out of memory; use fewer prompts, --dtype bfloat16, or another --device"
        )
        raise SystemExit(2) from None
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT, EIO) or error.filename is not None:
            raise
        _discard_output()
        report_error(
            program,
            f"cannot print the output: {error.strerror}; free space, or redirect it elsewhere",
        )
        raise SystemExit(2) from None


def _discard_output() -> None:
    """Discard all further output, including what Python flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
