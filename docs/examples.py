"""Outputs of the examples in docstrings, from icl-mini, and the README's tables, from SmolLM2, made anew.

`refresh_examples` runs every docstring with a `>>>` under `icl_lens` and writes what it printed in place of what stood
there; what still holds is left as it is. An example that raises, or that no longer says True where it did, is not
rewritten: it is told, and is for a person to look at. `refresh_readme` does the same with the tables that the README
shows of commands' outputs, and with the sentences that name their heads and tokens.
"""

import ast
import doctest
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
README = ROOT / "README.md"
WIDTH = 120
"""Columns of a line of code."""


def setup_of(page: str) -> str:
    """The lines that examples begin from: the block named `setup` of the reference."""
    found = re.search(r"```\{code-block\} python\n:name: setup\n\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found.group(1)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings with examples: the line (from 0) they begin on, and their text, lines as in the file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and node.body and isinstance(first := node.body[0], ast.Expr):
            value = first.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and ">>> " in value.value:
                yield value.lineno - 1, value.value


@dataclass(frozen=True)
class Changed:
    """One example's output: lines `start` up to `end` of the file become `lines`."""

    start: int
    end: int
    lines: list[str]


class Runner(doctest.DocTestRunner):
    """Runs examples on; keeps what they print instead of what they should, and why some cannot be taken."""

    def __init__(self) -> None:
        super().__init__(verbose=False)
        self.changed: list[Changed] = []
        self.faults: list[str] = []

    def report_failure(self, out: Any, test: doctest.DocTest, example: doctest.Example, got: str) -> None:
        """A changed output is kept, unless it denies what the example shows."""
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
        """An example that raises is for a person."""
        self.faults.append(f"{test.filename}: {example.source.strip()} raises {exc_info[1]}")


def refreshed(source: str, names: dict[str, Any], file: str = "<source>") -> tuple[str, list[str]]:
    """`source` with its examples' outputs as they are now, and what could not be refreshed."""
    runner, parser = Runner(), doctest.DocTestParser()
    for line, docstring in docstrings(source):
        runner.run(parser.get_doctest(docstring, dict(names), file, file, line), clear_globs=True)
    lines = source.split("\n")
    for change in sorted(runner.changed, key=lambda change: change.start, reverse=True):
        lines[change.start : change.end] = change.lines
    return "\n".join(lines), runner.faults


def refresh_examples(package: Path = ROOT / "icl_lens") -> list[str]:
    """Rewrites the docstrings of a package's files in place; returns what a person has to look at."""
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
    """Puts a whole file in the place of another, with its permissions."""
    beside = path.with_suffix(".half")
    beside.write_text(text, encoding="utf-8")
    beside.chmod(path.stat().st_mode)
    beside.replace(path)


# The README's tables: how each begins, and after what command.
HEADS, LOCATED = " head    increase   tells labels apart", " rank   head"
WORDS = " head   part    position   token   top words"
REMOVED = " label   as it is"
N_ROWS = 2
SAYING = (("L23H1", "value"), ("L23H1", "key"))
"""What the README shows in words of which located head: the one that raises the answer most."""
MODEL = ("--model", "smollm2-135m")
TASK = (*("--task", "animal-country", "--layout", "random"), *("--demonstrations", "8", "--separator", r"\n"))
N_SHOWN_WORDS = 5


def table_of(output: str, header: str, n: int) -> str:
    """The first `n` rows of the table that begins with `header`, with its head and rule."""
    lines = [line.rstrip() for line in output.split("\n")]
    start = next((i for i, line in enumerate(lines) if line.startswith(header)), None)
    if start is None:
        raise SystemExit(f"no table {header.strip()!r} in the output: has its head changed?")
    return "\n".join(lines[start : start + 2 + n])


def words_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the heads of `SAYING` say in words: rows of an explanation's frame "words" as a table."""
    lines = [WORDS, " " + "─" * (len(WORDS) + 34)]
    for name, kind in SAYING:
        found = [row for row in rows if (row["name"], row["kind"]) == (name, kind)]
        if not found:
            raise SystemExit(f"{name} is not among the heads that raise the answer most: choose others for SAYING")
        for row in found:
            words = ", ".join(row["words"].split()[:N_SHOWN_WORDS])
            lines.append(f" {name:<6} {kind:<7} {row['position']:>8}   {row['token'].strip():<5}   {words}")
    return "\n".join(lines)


def readme_with(text: str, explained: str, located: str, words: str) -> str:
    """The README's `text` with the three tables, and the sentences that name what is in the first, made new.

    Raises SystemExit if something of it is not there any more.
    """
    for header, output in ((HEADS, explained), (LOCATED, located)):
        text = with_block(text, header, table_of(output, header, N_ROWS))
    text = with_block(text, REMOVED, table_of(explained, REMOVED, N_ROWS))
    text = with_block(text, WORDS, words)
    head = re.search(r"^ *L(\d+)H(\d+) ", table_of(explained, HEADS, 1), re.MULTILINE)
    label = re.search(r"→ foo@(\d+)", explained)
    assert head is not None
    assert label is not None
    layer, number = head.groups()
    for pattern, replacement in (
        (r"`foo@\d+` is the label at token \d+", f"`foo@{label[1]}` is the label at token {label[1]}"),
        (r"`L\d+H\d+` is head \d+ of layer \d+", f"`L{layer}H{number}` is head {number} of layer {layer}"),
        (r"four heads such as L\d+H\d+", f"four heads such as L{layer}H{number}"),
    ):
        text, n = re.subn(pattern, replacement, text)
        if n != 1:
            raise SystemExit(f"the README has {n} places like {pattern!r}, not one")
    return text


def with_block(text: str, header: str, new: str) -> str:
    """The text with `new` in place of its one block that begins with `header`."""
    block = re.compile(rf"(?<=```text\n){re.escape(header)}.*?(?=\n```)", re.DOTALL)
    text, n = block.subn(lambda _: new, text)
    if n != 1:
        raise SystemExit(f"the README has {n} tables that begin with {header.strip()!r}, not one")
    return text


def refresh_readme() -> None:
    """Runs the commands that the README shows, and takes their tables over."""
    with tempfile.TemporaryDirectory() as folder:
        explained = printed("explain", *MODEL, "--answer", "foo")
        located = printed("locate", *MODEL, *TASK, "--by", "contrast", "-n", "100", "--out", f"{folder}/located")
    import icl_lens as il

    prompt = "love : bar like : bar eight : foo two : foo one :"
    frame = il.explain(il.load_model(MODEL[1]), prompt, answer="foo").to_frame("words")
    before = README.read_text(encoding="utf-8")
    after = readme_with(before, explained, located, words_table(frame.to_dict("records")))
    if after != before:
        print(README.name)
        write(README, after)


def printed(*command: str) -> str:
    """What `icl-lens` prints, in 120 columns."""
    return subprocess.run(
        [sys.executable, "-m", "icl_lens", *command],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=os.environ | {"COLUMNS": str(WIDTH), "PYTHONIOENCODING": "utf-8"},
    ).stdout
