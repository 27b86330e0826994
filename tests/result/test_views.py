"""A view is drawn alike by every renderer: text, Markdown, JSON, terminal, page and notebook."""

import ast
import io
import json
import math
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

import icl_lens as il
from icl_lens.report.terminal import new_table
from icl_lens.report.view_terminal import ViewInTerminal
from icl_lens.result.base import Result
from icl_lens.result.view import MAX_ROWS, Column, Dots, HeadValues, Label, Section, View
from icl_lens.result.view_text import markdown, plain_text, records

HOSTILE = "<img src=x onerror=alert(1)> | *a* `b`"


@dataclass(frozen=True, repr=False)
class Shown(Result):
    """A result with a view that has everything a view can have."""

    word: str = "plain"

    def to_frame(self):
        return pd.DataFrame({"word": [self.word]})

    def to_view(self):
        columns = (
            Column("label", is_number=False),
            Column("lost, nats", digits=2, has_bars=True),
            Column("number of prompts", is_detail=True),
            Column("0 – 100%", is_number=False),
        )
        rows = (
            (Label(self.word, 1), -1.5, 12, Dots(0.9, 0.5, (0.8, 0.7))),
            (Label("foo", 0), 0.75, 7, Dots(0.9, 0.6)),
            ("all", math.nan, 19, Dots(0.1, 0.2)),
        )
        return View(
            f"Title {self.word}",
            (f"Finding {self.word}.", "More."),
            (
                Section(
                    "Main", "How to read it.", columns, rows, 30, notes=(f"Note {self.word}.",)
                ),
                Section(
                    "Map", head_map=HeadValues("effect, nats", ((1.0, -2.0),), frozenset({(0, 1)}))
                ),
                Section("Prompt", quote=("love : ", Label(self.word, 0)), code=f"run {self.word}"),
                Section("Only pages", columns=(Column("a"),), rows=((4.5,),), is_detail=True),
            ),
            about="kind",
        )


def terminal_lines(result, width):
    console = Console(width=width, record=True, file=io.StringIO(), markup=False, emoji=False)
    console.print(result)
    return console.export_text().splitlines()


def test_print_shows_sentences_and_tables():
    lines = repr(Shown()).splitlines()
    assert lines[:3] == ["Finding plain.", "More.", "Main"]
    assert [line.split() for line in lines[4:7]] == [
        ["plain", "−1.50", "12"],
        ["foo", "+0.75", "7"],
        ["all", "–", "19"],
    ]
    assert lines[7] == "… 27 more rows: to_frame() has all"
    assert "Only pages" not in repr(Shown())
    rows = tuple((float(number),) for number in range(MAX_ROWS + 5))
    long = View("T", sections=(Section(columns=(Column("a"),), rows=rows),))
    assert plain_text(long).splitlines()[-1].startswith("… 5 more rows")


def test_json_has_numbers_and_no_nan(tmp_path):
    (section, *_) = records(Shown().to_view())["sections"]
    assert section["rows"] == [["plain", -1.5, 12], ["foo", 0.75, 7], ["all", None, 19]]
    assert section["n_rows"] == 30
    Shown().save(tmp_path / "shown.json")
    assert json.loads((tmp_path / "shown.json").read_text())["summary"]["title"] == "Title plain"


@pytest.mark.parametrize(("width", "has_details"), [(100, True), (24, False)])
def test_a_narrow_terminal_leaves_out_details_and_says_so(width, has_details):
    lines = terminal_lines(Shown(), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert text.count("prompts") == 1
    assert ("columns also shows: number of prompts." in text) != has_details
    for words in ("Finding plain.", "−1.50", "Note plain.", "27 more rows"):
        assert words in text
    assert "Only pages" not in text


@pytest.mark.parametrize(
    ("width", "heading"),
    [
        (40, ["head log-odds lost, nats"]),
        (24, ["log-odds", "head lost, nats"]),
        (18, ["log-odds", "lost,", "head nats"]),
    ],
)
def test_names_of_columns_take_as_few_lines_as_fit(width, heading):
    columns = (Column("head", is_number=False), Column("log-odds lost, nats", digits=2))
    section = Section(columns=columns, rows=(("L0H1", 1.5),))
    lines = terminal_lines(ViewInTerminal(View("T", sections=(section,))), width)
    rule = next(number for number, line in enumerate(lines) if "─" in line)
    assert [" ".join(line.split()) for line in lines[:rule] if line.strip()][1:] == heading


def test_a_heading_may_be_wider_than_its_table(capsys):
    table = new_table("head", title="Heads by what they add to log p of the answer, nats")
    table.add_row("L4H0")
    Console(width=80).print(table)
    assert (
        capsys.readouterr().out.splitlines()[0]
        == "Heads by what they add to log p of the answer, nats"
    )


def test_pages_have_everything_and_bars_have_one_scale():
    page = Shown().to_html()
    text = " ".join(unescape(re.sub("<[^>]*>", " ", page.partition("<body>")[2])).split())
    for words in (
        "kind",
        "Title plain",
        "Finding plain.",
        "How to read it.",
        "Note plain.",
        "run plain",
        "Only pages",
    ):
        assert words in text
    assert re.findall(r'class="bar (.)" style="--v:([\d.]+)%', page) == [
        ("n", "100.0"),
        ("p", "50.0"),
    ]
    assert 'data-head="L0H1" data-value="-2"' in page
    assert page.count('class="dots"') == 3
    assert "icl-lens-twin" in Shown()._repr_html_()


def columns_of_rows(text):
    """The number of column separators of each row of a Markdown table."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [len(re.findall(r"(?<!\\)\|", row)) for row in rows]


def test_hostile_texts_stay_text():
    hostile, harmless = Shown(HOSTILE), Shown("word")
    tags = re.compile(r"<(\w+)")
    assert tags.findall(hostile.to_html()) == tags.findall(harmless.to_html())
    twins = [
        displayed._repr_html_().partition("icl-lens-twin")[2] for displayed in (hostile, harmless)
    ]
    assert tags.findall(twins[0]) == tags.findall(twins[1])
    written = hostile.to_markdown()
    assert "\\<img src=x onerror=alert(1)\\> \\| \\*a\\*" in written
    assert (
        columns_of_rows(written)
        == columns_of_rows(harmless.to_markdown())
        == [4, 4, 4, 4, 4, 2, 2, 2]
    )
    assert HOSTILE in " ".join(terminal_lines(hostile, 200))


def test_code_is_fenced_whatever_it_has():
    text = markdown(View("T", sections=(Section("Code", code="a\n```\nb"),)))
    assert "````\na\n```\nb\n````" in text


def test_a_result_of_one_table_is_a_small_table_in_notebooks(gpt2_acts):
    heads = il.top_heads(gpt2_acts, k=2)
    assert heads._repr_html_().startswith("<table>")
    assert heads.to_markdown().startswith("# Heads by contrast over")


def test_numbers_that_people_read_are_written_by_one_module():
    """A format with a sign, written elsewhere, would print a hyphen for a minus sign."""
    package = Path(il.__file__).parent
    writers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FormattedValue) or node.format_spec is None:
                continue
            if set("+z") & set(ast.unparse(node.format_spec)):
                writers.add(path.relative_to(package).as_posix())
    assert writers == {"result/number_format.py"}
