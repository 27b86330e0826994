"""Check that a fault ends in one sentence that names the cause, without a traceback."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging

import icl_lens as il
from icl_lens.cli import main


def assert_sentence(message: str, words: str) -> None:
    """Assert that a message is one line, contains `words`, can hold a cause and a fix, and is free
    of Python jargon.
    """
    assert words in message, message
    assert "\n" not in message, message
    assert len(message) >= 20, message
    assert not re.search(r"Traceback|<class |object at 0x|NoneType'|\bself\b", message), message


def assert_refused(
    words: str, function: Callable[..., Any], *arguments: Any, **options: Any
) -> None:
    """Assert that a call raises InputError, with one sentence that contains `words`."""
    with pytest.raises(il.InputError) as caught:
        function(*arguments, **options)
    assert_sentence(str(caught.value), words)


def call(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: Any) -> tuple[Any, str, str]:
    """Run `icl-lens` in this process; return exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["icl-lens", *map(str, arguments)])
    monkeypatch.setattr(
        "icl_lens.cli.program.quiet_libraries", logging.disable_progress_bar
    )  # not the whole process
    monkeypatch.setenv("COLUMNS", "300")
    capsys.readouterr()
    code: Any = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def left_in(folder: Path) -> set[str]:
    """Return the names of all files in a folder, including hidden ones."""
    return {path.name for path in folder.iterdir()}
