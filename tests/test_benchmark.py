"""The benchmark command on a small shape: its pages have all rows, and searches that must agree do."""

import re

import pytest
import torch
from tolerance import tolerance
from typer.testing import CliRunner

from experiments.benchmark.__main__ import main
from experiments.benchmark.memory import peak_of
from experiments.benchmark.model_shapes import SHAPES, build, random_prompts
from experiments.benchmark.two_processes import two_processes
from icl_lens.models.view import tl_version

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_models_are_explained(monkeypatch):
    monkeypatch.setattr("experiments.benchmark.__main__.EXPLAINED", ("small",))


def run(*arguments):
    import typer

    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, arguments)


def rows_of(out, arguments, mark):
    """Run the benchmark; return the cells of the page's lines that contain `mark`."""
    result = run(*arguments.split(), "--out", str(out))
    assert result.exit_code == 0, result.output
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.read_text().splitlines() if mark in line]


def test_one_command_one_page(tmp_path):
    out = tmp_path / "benchmark.md"
    rows = rows_of(out, "--shape small --repeats 1 --n 12 --sizes 14x2,40x1 --slow 14x2 --no-memory", "|")
    small = [row for row in rows if row[0] == "small"]
    slow = [row for row in small if row[1] == "2 × 14" and "largest values as certified" in row[-1]]
    assert len(slow) == 2
    assert all(float(re.search(r"within (\S+) nats", row[-1])[1]) < tolerance(scale=10) for row in slow)
    assert sum("omitted: takes minutes" in row[-1] for row in small) == 2  # the slow ones at the other size
    for name in ("icl-mini", "icl-mini-llama", "icl-mini-gptj"):
        assert any(row[0] == name and row[-1].startswith("the same 20 heads") for row in rows)
        assert any(row[0] == name and row[2].startswith("effect of removing every head, restarted") for row in rows)
        assert any(row[0] == name and row[2].endswith("shared keys") and not row[-1] for row in rows)
        assert any(row[0] == name and row[-1].startswith("Spearman") for row in rows)
        assert any(row[0] == name and row[2].startswith("every head's mean effect") for row in rows)
        fixes = [row for row in rows if row[0] == name and row[2] == "8 bias fixes, in one batch"]
        assert [float(re.search(r"at most (\S+) nats", row[-1])[1]) < tolerance(scale=10) for row in fixes] == [True]
    assert [row[1] for row in small if row[2].endswith("shared keys")] == ["1 × 14", "1 × 200", "1 × 1000"]


def test_only_explain_compares_with_the_forward_pass(tmp_path):
    """Ratios to the forward pass and to the product with W_U, in this order of rows."""
    out = tmp_path / "explain.md"
    rows = rows_of(out, "--only explain --repeats 2", "| small")
    assert [row[2].split()[0] for row in rows] == ["bare", "every", "increases", "explain"]
    assert float(rows[0][4]) == 1
    assert rows[1][-1].startswith("1.00 ×")
    assert float(rows[3][3]) > float(rows[2][3])


def test_only_edges_has_a_row_per_length_and_part(tmp_path):
    rows = rows_of(tmp_path / "edges.md", "--only edges --shape small --repeats 1", "| small")
    assert [(row[1], row[2].split("the ")[-1].split()[0]) for row in rows] == [
        (f"1 × {tokens}", part) for tokens in (14, 200) for part in ("queries", "keys", "values")
    ]
    for row in rows:
        pairs, times = int(row[6].split()[0]), float(re.search(r"takes (\d+) times", row[-1])[1])
        assert times == pytest.approx(pairs / float(row[4]), rel=0.05, abs=1)
        assert "full passes" not in row[-1]


def test_a_bad_size_is_one_line():
    result = run("--sizes", "14by2")
    assert result.exit_code == 2
    assert "14by2" in result.output


def test_peak_memory_is_the_childs_own(tmp_path):
    build(SHAPES["small"], tmp_path)
    ballast = b"\1" * 2**30  # what this process holds is not the child's
    peak = peak_of(tmp_path, "locate", 2, 14)
    assert 0 < peak.weights < peak.loaded <= peak.peak < 0.3 + len(ballast) / 2**30
    assert peak.seconds > 0
    half = peak_of(tmp_path, "explain", 1, 14, dtype=torch.bfloat16)
    assert half.weights == pytest.approx(peak.weights / 2, rel=0.1)
    assert half.what.endswith("explain, 1 × 14, bfloat16")


@pytest.mark.skipif(tl_version() < (4, 0), reason="the same on both lines, and half a minute")
def test_two_processes_and_one_find_the_same(tmp_path):
    build(SHAPES["small"], tmp_path)
    one, two = two_processes(tmp_path, 24)
    assert one.ratio == 1
    assert two.seconds == pytest.approx(two.ratio * one.seconds)
    assert "the same 20 heads" in two.note


@pytest.mark.parametrize("n_tokens", [14, 200])
def test_prompts_have_as_many_tokens_as_asked(n_tokens):
    assert {len(str(prompt).split()) for prompt in random_prompts(3, n_tokens)} == {n_tokens}
