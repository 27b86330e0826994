"""`icl-lens live`: what is wrong is said in the terminal, before a page is served."""

import socket
import sys

import pytest

import icl_lens as il
from icl_lens.report.live_view import browser


def test_a_view_is_made_only_while_a_page_is_served():
    with pytest.raises(il.InputError, match="run icl-lens live"):
        browser.new_view()


def test_missing_marimo_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "marimo", None)
    with pytest.raises(
        il.InputError, match="requires marimo; install it with pip install anywidget"
    ):
        browser.serve(lambda: None, announce=lambda address: None)


def test_a_port_that_is_taken_is_one_sentence():
    pytest.importorskip("marimo", reason="marimo is missing: no page is served")
    with socket.socket() as taken:
        taken.bind((browser.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(il.InputError, match=f"port {port} cannot be used"):
            browser.serve(lambda: None, port=port, announce=lambda address: None)
