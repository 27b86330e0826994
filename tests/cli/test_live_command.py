"""`icl-lens live`: what is wrong is said in the terminal, before a page is served.

Tests that require marimo are slow ones: the tests of README.md run without it.
"""

import socket
import subprocess
import sys

import pytest

import icl_lens as il
from icl_lens.report.live_view import browser

PROMPT = "love : bar like : bar eight : foo two : foo one :"


@pytest.fixture
def atlas_file(icl_mini, tmp_path):
    """The file of an atlas of icl-mini."""
    il.head_atlas(icl_mini, n_sequences=2).save(tmp_path / "atlas.json")
    return tmp_path / "atlas.json"


@pytest.mark.slow
def test_each_view_of_the_page_has_the_scores_of_the_atlas(run, atlas_file, monkeypatch):
    pytest.importorskip("marimo", reason="marimo is missing: no page is served")
    offered = []

    def serve_nothing(new_view, **_):
        view = new_view()
        view.close()
        offered.extend(score["name"] for score in view._about["atlas"])

    monkeypatch.setattr(browser, "serve", serve_nothing)
    monkeypatch.setattr("os._exit", lambda code: None)
    code, _, err = run("live", PROMPT, "--atlas", atlas_file)
    assert code == 0, err
    assert offered == list(il.results.HeadAtlas.load(atlas_file).scores)


@pytest.mark.slow
def test_an_atlas_of_another_model_is_refused_before_a_page_is_served(run, atlas_file, tiny):
    pytest.importorskip("marimo", reason="marimo is missing: no page is served")
    code, out, err = run("live", PROMPT, "--atlas", atlas_file, "--model", tiny)
    assert (code, out) == (2, "")
    assert "atlas must be of the model of the view" in err


def test_a_view_is_made_only_while_a_page_is_served():
    with pytest.raises(il.InputError, match="run icl-lens live"):
        browser.new_view()


def test_missing_marimo_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "marimo", None)
    with pytest.raises(
        il.InputError, match="requires marimo; install it with pip install anywidget"
    ):
        browser.serve(lambda: None, announce=lambda address: None)


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_sentence():
    pytest.importorskip("marimo", reason="marimo is missing: no page is served")
    with socket.socket() as taken:
        taken.bind((browser.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(il.InputError, match=f"port {port} cannot be used"):
            browser.serve(lambda: None, port=port, announce=lambda address: None)


SERVE_AND_SAY_WHAT_IS_IMPORTED = """
import os, sys
from icl_lens.report.live_view import browser

def announce(address):
    print("icl_lens.report.live_view.widget" in sys.modules, "anywidget" in sys.modules)
    sys.stdout.flush()
    os._exit(0)

assert "anywidget" not in sys.modules
browser.serve(lambda: None, open_browser=False, announce=announce)
"""


@pytest.mark.slow
def test_the_widget_is_imported_before_a_tab_can_open():
    """Each tab is a thread of its own; two that import at once end in a deadlock."""
    pytest.importorskip("marimo", reason="marimo is missing: no page is served")
    command = [sys.executable, "-c", SERVE_AND_SAY_WHAT_IS_IMPORTED]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.split() == ["True", "True"], result.stderr
