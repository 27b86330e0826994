"""`icl-lens compare` and `--open`: what is printed, written and opened."""

import sys
import webbrowser

import families
import pytest
import transformers

from icl_lens.cli import main

OTHER = families.PROMPT.replace("one :", "hate :")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `icl-lens` in this process; returns exit code, standard output, standard error."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["icl-lens", *map(str, arguments)])
        monkeypatch.setattr("icl_lens.cli.program.quiet_libraries", transformers.utils.logging.disable_progress_bar)
        monkeypatch.setenv("COLUMNS", "200")
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def tiny(family_folder):
    return family_folder("gpt2")


@pytest.fixture
def opened(monkeypatch):
    pages = []
    monkeypatch.setattr(webbrowser, "open", lambda url: pages.append(url) or True)
    return pages


def test_two_prompts(run, tiny, tmp_path, opened):
    file = tmp_path / "both.html"
    code, out, _ = run("compare", families.PROMPT, OTHER, "-m", tiny, "-a", "foo", "--answer-b", "bar", "--html", file)
    assert code == 0
    assert "Probability of each label" in out
    assert "increase changed most, nats (A: foo, B: bar)" in out
    assert "L0H" in out
    assert "A explains" in file.read_text()
    assert opened == []


def test_a_model_does_not_differ_from_itself(run, tiny, family_folder):
    code, out, _ = run("compare", families.PROMPT, "-m", tiny, "--model-b", family_folder("gpt2"), "-a", "foo")
    assert code == 0
    changes = [line.split()[-1] for line in out.splitlines() if line.strip().startswith("L")]
    assert set(changes) == {"+0.000"}


def test_nothing_to_compare_is_said(run, tiny):
    code, _, err = run("compare", families.PROMPT, "-m", tiny)
    assert code == 2
    assert "pass a second prompt, or a second model with --model-b" in err


def test_open_writes_a_page_and_opens_it(run, tiny, opened, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, out, _ = run("explain", families.PROMPT, "-m", tiny, "--open", "-k", 2)
    assert code == 0
    pages = list(tmp_path.rglob("page.html"))
    assert [page.as_uri() for page in pages] == opened
    assert f"Page: {pages[0]}" in out


def test_without_a_browser_the_page_is_still_there(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    file = tmp_path / "page.html"
    code, out, _ = run("explain", families.PROMPT, "-m", tiny, "--open", "--html", file, "-k", 2)
    assert code == 0
    assert "open the page manually" in out
    assert file.exists()
