"""The cheat sheet: its lines run, its commands parse, and the terminal, the page and llms.txt show
the same.
"""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from examples import code_blocks  # pyright: ignore[reportMissingImports]
from extensions import llms_txt  # pyright: ignore[reportMissingImports]

from icl_lens.cli import app
from icl_lens.cli.examples import INDENT, as_text, cheat_sheet

ROOT = Path(__file__).parents[2]
SHEET = cheat_sheet()
PYTHON = code_blocks(SHEET, "python")
(BASH,) = code_blocks(SHEET, "bash")
COMMANDS = BASH.splitlines()


@pytest.mark.slow
def test_the_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in PYTHON:
        exec(compile(block, block, "exec"), names)
    assert {path.name for path in tmp_path.iterdir()} == {
        "heads.pdf",
        "page.html",
        "page.json",
        "runs",
    }


def parse(line, monkeypatch):
    """Return the name and the options of a command, as the program's own parser reads them."""
    group = typer.main.get_command(app)
    called = []
    for name, command in group.commands.items():
        monkeypatch.setattr(
            command, "callback", lambda name=name, **options: called.append((name, options))
        )
    program, *arguments = shlex.split(line)
    assert program == "icl-lens"
    group.main(arguments, prog_name=program, standalone_mode=False)
    return called[0]


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_are_what_the_program_takes(line, monkeypatch):
    name, options = parse(line, monkeypatch)
    assert name == line.split()[1]
    n = re.search(r" -n (\d+)", line)
    assert n is None or options["n"] == int(n[1])


def test_every_command_is_shown(monkeypatch):
    assert {line.split()[1] for line in COMMANDS} == set(typer.main.get_command(app).commands)
    for wrong in ("icl-lens locate --tsk a", "icl-lens towers -n many", "icl-lens lens"):
        with pytest.raises(Exception, match=r"tsk|integer|lens"):
            parse(wrong, monkeypatch)


SERVES = "icl-lens live"  # until Ctrl-C: tests/report/test_live_browser.py


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMANDS if not line.startswith(SERVES)])
def test_the_commands_run(line, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, errors = run(*shlex.split(line)[1:])
    assert (code, bool(output)) == (0, True), errors


def test_the_terminal_shows_every_line_in_80_columns(run):
    code, output, _ = run("--examples")
    assert (code, output) == (0, as_text(SHEET) + "\n")
    assert max(map(len, output.splitlines())) <= 80
    assert not re.search("```|^#|^[|]|\\*\\*", output, re.MULTILINE), "Markdown"
    lines = output.splitlines()
    for code_line in "".join([*PYTHON, BASH]).splitlines():
        assert not code_line or INDENT + code_line in lines
    headings = [line for line in lines if line and not line.startswith(INDENT)]
    assert headings == re.findall("^## (.*)", SHEET, re.MULTILINE)
    assert len(headings) == len(PYTHON) + 1


def test_the_page_includes_the_file():
    page = ROOT / "docs" / "cheatsheet.md"
    (included,) = re.findall(r"```\{include\} (\S+)", page.read_text(encoding="utf-8"))
    assert (page.parent / included).read_text(encoding="utf-8") == SHEET


def test_llms_txt_is_written_from_the_sheet_and_links_to_every_page(tmp_path):
    text = llms_txt.text()
    start, after_heading = text.partition("## Cheat sheet\n\n")[::2]
    assert start.startswith("# icl_lens\n\n> ")
    assert after_heading.startswith(SHEET.replace("## ", "### ").strip())
    docs = ROOT / "docs"
    links = re.findall(r"^- \[.+\]\((\S+)\.html\): .{8,}[.]$", text, re.MULTILINE)
    sources = {path.relative_to(docs) for path in [*docs.rglob("*.md"), *docs.rglob("*.ipynb")]}
    sources = {
        source.with_suffix("").as_posix() for source in sources if source.parts[0] != "_build"
    }
    own_list = {source for source in sources if source.startswith("results/")} - {"results/index"}
    assert set(links) == sources - {"index"} - own_list
    site = SimpleNamespace(outdir=tmp_path, builder=SimpleNamespace(format="html"))
    with pytest.raises(FileNotFoundError, match=r"guide\.html"):
        llms_txt.write(site)
    for link in links:
        path = tmp_path / f"{link}.html"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    llms_txt.write(site)
    assert (tmp_path / "llms.txt").read_text(encoding="utf-8") == text
