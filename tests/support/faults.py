"""What every fault must come to: one sentence that names the cause, and no traceback."""

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
    """One line with the words in it, long enough to hold a cause and a remedy, without Python's own vocabulary."""
    assert words in message, message
    assert "\n" not in message, message
    assert len(message) >= 20, message
    assert not re.search(r"Traceback|<class |object at 0x|NoneType'|\bself\b", message), message


def assert_refused(words: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Assert that a call raises InputError, in one sentence with the words in it."""
    with pytest.raises(il.InputError) as caught:
        function(*arguments, **options)
    assert_sentence(str(caught.value), words)


def call(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: Any) -> tuple[Any, str, str]:
    """Runs `icl-lens` in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["icl-lens", *map(str, arguments)])
    monkeypatch.setattr("icl_lens.cli.program.quiet_libraries", logging.disable_progress_bar)  # not the whole process
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
    """The names in a folder, hidden ones too."""
    return {path.name for path in folder.iterdir()}
