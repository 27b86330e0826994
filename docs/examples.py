"""Refresh the outputs of docstring examples (icl-mini) and of the README's commands (SmolLM2).

`refresh_examples` runs every docstring with a `>>>` under `icl_lens` and replaces outdated outputs. An example that
raises, or that no longer prints True where it did, is not rewritten but reported, to be fixed by hand.
`refresh_readme` runs each command of the README that is followed by its output, and updates it.
"""

import ast
import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
README = ROOT / "README.md"
WIDTH = 120
"""Maximum line length, in columns."""


def setup_of(page: str) -> str:
    """Return the setup code of the examples: the block named `setup` in the API reference."""
    found = re.search(r"```\{code-block\} python\n:name: setup\n\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found.group(1)


def code_blocks(page: str, language: str) -> list[str]:
    """Return the fenced code blocks of a Markdown page that are in a language, such as "python"."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring with examples: its first line number, counted from 0, and its text."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and node.body and isinstance(first := node.body[0], ast.Expr):
            value = first.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and ">>> " in value.value:
                yield value.lineno - 1, value.value


@dataclass(frozen=True)
class Changed:
    """A new output of an example: `lines` replace lines `start` to `end` (exclusive) of the file."""

    start: int
    end: int
    lines: list[str]


class Runner(doctest.DocTestRunner):
    """A doctest runner that records changed outputs, and faults that need fixing by hand."""

    def __init__(self) -> None:
        super().__init__(verbose=False)
        self.changed: list[Changed] = []
        self.faults: list[str] = []

    def report_failure(self, out: Any, test: doctest.DocTest, example: doctest.Example, got: str) -> None:
        """Record a changed output, or a fault if a True is lost or a line is too long."""
        if example.want.count("True") > got.count("True"):
            self.faults.append(
                f"{test.filename}: {example.source.strip()} gives {got.strip()}, not {example.want.strip()}"
            )
            return
        start = (test.lineno or 0) + example.lineno + example.source.count("\n")
        lines = [" " * example.indent + (line or "<BLANKLINE>") for line in got.splitlines()]
        if any(len(line) > WIDTH for line in lines):
            self.faults.append(f"{test.filename}: {example.source.strip()} prints lines of more than {WIDTH} columns")
            return
        self.changed.append(Changed(start, start + example.want.count("\n"), lines))

    def report_unexpected_exception(
        self, out: Any, test: doctest.DocTest, example: doctest.Example, exc_info: Any
    ) -> None:
        """Record a fault for an example that raises."""
        self.faults.append(f"{test.filename}: {example.source.strip()} raises {exc_info[1]}")


def refreshed(source: str, names: dict[str, Any], file: str = "<source>") -> tuple[str, list[str]]:
    """Return `source` with current example outputs, and the faults to fix by hand."""
    runner, parser = Runner(), doctest.DocTestParser()
    for line, docstring in docstrings(source):
        runner.run(parser.get_doctest(docstring, dict(names), file, file, line), clear_globs=True)
    lines = source.split("\n")
    for change in sorted(runner.changed, key=lambda change: change.start, reverse=True):
        lines[change.start : change.end] = change.lines
    return "\n".join(lines), runner.faults


def refresh_examples(package: Path = ROOT / "icl_lens") -> list[str]:
    """Rewrite the example outputs of a package's files in place; return the faults to fix by hand."""
    names: dict[str, Any] = {}
    exec(setup_of((DOCS / "api.md").read_text(encoding="utf-8")), names)
    import torch

    names["torch"] = torch
    faults = []
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if ">>> " not in source:
            continue
        text, wrong = refreshed(source, names, str(path.relative_to(package.parent)))
        faults += wrong
        if text != source:
            print(path.relative_to(package.parent), flush=True)
            write(path, text)
    return faults


def write(path: Path, text: str) -> None:
    """Replace a file atomically and keep its permissions."""
    temp_path = path.with_suffix(".half")
    temp_path.write_text(text, encoding="utf-8")
    temp_path.chmod(path.stat().st_mode)
    temp_path.replace(path)


MODEL = ("--model", "smollm2-135m")
COMMAND_AND_OUTPUT = re.compile(r"```bash\n((?:\.venv/bin/)?icl-lens [^`]*?)\n```\n\n```text\n(.*?)\n```", re.DOTALL)
"""A command of the README, followed by what it prints or the beginning of that."""


def readme_with_outputs(text: str, run: Callable[[list[str]], str]) -> str:
    """Return the README with what its commands print now, as many lines as are there.

    They begin with the first line that begins with the same three words, if there is one.
    `run` takes the words of a command after `icl-lens` and returns what it prints. Raise SystemExit
    if no command has its output below it.
    """
    if not COMMAND_AND_OUTPUT.search(text):
        raise SystemExit("the README must have a command of icl-lens with its output below it")

    def with_output(match: re.Match[str]) -> str:
        command, output = match.groups()
        n_lines = output.count("\n") + 1
        words = shlex.split(command.replace("\\\n", " "))[1:]
        lines = [line.rstrip() for line in run(words).strip("\n").split("\n")]
        first_words = " ".join(output.split()[:3])
        start = next((row for row, line in enumerate(lines) if line.startswith(first_words)), 0)
        shown_lines = "\n".join(lines[start : start + n_lines])
        return f"```bash\n{command}\n```\n\n```text\n{shown_lines}\n```"

    return COMMAND_AND_OUTPUT.sub(with_output, text)


def refresh_readme() -> None:
    """Run the commands that the README shows with their outputs, and update these."""
    before = README.read_text(encoding="utf-8")
    after = readme_with_outputs(before, lambda words: printed(*words, width=100))
    if after != before:
        print(README.name)
        write(README, after)


def printed(*command: str, width: int = WIDTH) -> str:
    """Return the output of an `icl-lens` command, `width` columns wide."""
    return subprocess.run(
        [sys.executable, "-m", "icl_lens", *command],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"COLUMNS": str(width), "PYTHONIOENCODING": "utf-8"},
    ).stdout
