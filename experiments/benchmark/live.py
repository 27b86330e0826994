"""How long does the live view take from an edit or a click to each of its numbers?

`python -m experiments.benchmark.live --model smollm2-135m --out live.csv`; in Chromium, with
`--page` on the page that `icl-lens live` serves and with `--notebook` in JupyterLab.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import icl_lens as il
from experiments.benchmark.timing import write_table

TEXT = (
    "love : bar like : bar eight : foo two : foo "
    "happy : bar three : foo hate : bar nine : foo one :"
)
QUERIES = ("good", "bad", "sad", "seven", "ten")
HEADS = ("L1H0", "L2H1")
NUMBERS = {
    "_answer": "text edited: probabilities",
    "_heads": "text edited: contrasts of all heads",
    "_demonstrations": "text edited: effects of demonstrations",
    "_effect": "text edited: effects of all heads",
    "_change": "head clicked: its change beside 20 random sets",
}
ALL_OF_A_CLICK = "head clicked: all numbers"
"""Traits of the view that arrive, and what they show."""
PATIENCE = 300_000
"""Milliseconds after which the page counts as hanging."""
UNTIL = """async (view, [act, shows]) => {
  const start = performance.now();
  new Function("view", act)(view);
  const is_there = new Function("view", "return " + shows);
  while (!is_there(view)) await new Promise(requestAnimationFrame);
  return (performance.now() - start) / 1000;
}"""
"""Seconds from an action on the view until it shows something; both are JavaScript."""
SHOWS_PROBABILITIES = (
    "view.querySelector('[role=region][aria-label=Answer]').innerText.includes('%')"
)
SHOWS_ALL = "view.getAttribute('aria-busy') === 'false'"
TYPE_QUERY = """const query = view.querySelector('[aria-label=Query]');
query.value = '{}'; query.dispatchEvent(new Event('input', {{bubbles: true}}));"""
PRESS = """[...view.querySelectorAll('button')]
.find((button) => button.innerText === '{}').click();"""
CELL = """import icl_lens as il
model = il.load_model({model!r})
view = il.live(model, il.Prompt.parse({text!r}, answer="foo"))
view"""
CLICK_HEAD = "view.querySelector('[data-head={}]').click();"


def measure(model: Any, name: str, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each number: seconds from the edit or click until it has arrived."""
    prompt = il.Prompt.parse(TEXT, answer="foo")
    batch = il.tokenize(model, prompt)
    view = il.live(model, prompt)
    view.wait()
    seconds: dict[str, list[float]] = {trait: [] for trait in (*NUMBERS, ALL_OF_A_CLICK, "forward")}
    start = 0.0

    def note_arrival(change: Any) -> None:
        seconds[change["name"]].append(time.perf_counter() - start)

    view.observe(note_arrival, names=list(NUMBERS))
    first_state = view.state
    for number in range(repeats):
        start = time.perf_counter()
        with torch.no_grad():
            model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits")
        seconds["forward"].append(time.perf_counter() - start)
        padding = " one" * (1 + number // len(QUERIES))
        start = time.perf_counter()
        view.state = replace(first_state, query=QUERIES[number % len(QUERIES)] + padding)
        view.wait()
        head = HEADS[number % len(HEADS)]
        for heads, pick in (((head,), f"click {number}"), ((), f"none {number}")):
            start = time.perf_counter()
            state = replace(view.state, heads=heads).to_dict()
            view._look = view._look | {"state": state, "pick": pick}
            view.wait()
            if heads:
                seconds[ALL_OF_A_CLICK].append(time.perf_counter() - start)
    view.close()
    rows = []
    forward = statistics.median(seconds["forward"])
    names = {"forward": "forward pass", **NUMBERS, ALL_OF_A_CLICK: ALL_OF_A_CLICK}
    for trait, meaning in names.items():
        median = statistics.median(seconds[trait])
        row = {"model": name, "number": meaning, "seconds": median, "forwards": median / forward}
        rows.append(row)
    return rows


@contextmanager
def chromium_page(address: str) -> Iterator[Any]:
    """Yield an address as opened in Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(PATIENCE)
        page.goto(address)
        yield page
        browser.close()


@contextmanager
def served_page(model: str) -> Iterator[Any]:
    """Yield the page of `icl-lens live` in Chromium; end the command with Ctrl-C."""
    command = [sys.executable, "-m", "icl_lens", "live", TEXT, "-a", "foo", "-m", model]
    server = subprocess.Popen([*command, "--no-open"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        with chromium_page(server.stdout.readline().strip()) as page:
            page.wait_for_selector(".icl-live[aria-busy=false]")
            yield page
        server.send_signal(signal.SIGINT)
        server.wait(60)
    finally:
        server.kill()
        server.stdout.close()


@contextmanager
def served_notebook(model: str) -> Iterator[Any]:
    """Yield a notebook of JupyterLab in Chromium, after the cell with the view has run."""
    cell = {
        "cell_type": "code",
        "execution_count": None,
        "id": "view",
        "metadata": {},
        "outputs": [],
        "source": CELL.format(model=model, text=TEXT),
    }
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {
        "cells": [cell],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "live.ipynb").write_text(json.dumps(notebook))
        with running_jupyter(Path(folder)) as address, chromium_page(address) as page:
            prompt = page.locator(".jp-InputPrompt").first
            while prompt.inner_text().strip() in ("", "[ ]:"):  # until the kernel takes the cell
                page.locator(".jp-CodeCell .cm-content").first.click()
                page.keyboard.press("Control+Enter")
                page.wait_for_timeout(2000)
            page.wait_for_selector(".icl-live[aria-busy=false]")
            yield page


@contextmanager
def running_jupyter(folder: Path) -> Iterator[str]:
    """Yield the address of `live.ipynb` of a folder in JupyterLab, with its default settings."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("jupyter-lab", path=programs) or "jupyter-lab"
    command = [program, "--no-browser", "--allow-root", "--port=0", "--notebook-dir=."]
    settings = {"JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_RUNTIME_DIR": str(folder)}
    server = subprocess.Popen(command, cwd=folder, env=os.environ | settings)
    try:
        while not (servers := list(folder.glob("jpserver-*.json"))):
            if server.poll() is not None:
                raise RuntimeError("jupyter-lab did not start")
            time.sleep(0.5)
        address = json.loads(servers[0].read_text())
        yield f"{address['url']}doc/tree/live.ipynb?reset&token={address['token']}"
    finally:
        server.kill()
        server.wait(30)


def measure_page(page: Any, name: str, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each action on the page: seconds until what it asks for is shown."""
    seconds: dict[str, list[float]] = {}
    view = page.locator(".icl-live")

    def act(meaning: str, action: str, shows: str) -> None:
        seconds.setdefault(meaning, []).append(view.evaluate(UNTIL, [action, shows]))
        page.wait_for_selector(".icl-live[aria-busy=false]")

    for number in range(repeats):
        padding = " one" * (1 + number // len(QUERIES))
        query = QUERIES[number % len(QUERIES)] + padding
        act("text edited: probabilities", TYPE_QUERY.format(query), SHOWS_PROBABILITIES)
        act("text edited: all numbers", TYPE_QUERY.format(f"{query} one"), SHOWS_ALL)
        head = CLICK_HEAD.format(HEADS[number % len(HEADS)])
        act(ALL_OF_A_CLICK, head, SHOWS_ALL)
        act("values exchanged", PRESS.format("values exchanged"), SHOWS_ALL)
        act("labels exchanged: all numbers", PRESS.format("Exchange labels"), SHOWS_ALL)
        act("head released", head, SHOWS_ALL)
    rows = []
    for meaning, measured in seconds.items():
        rows.append({"model": name, "number": meaning, "seconds": statistics.median(measured)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the live view.")
    parser.add_argument("--model", default="icl-mini")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("live.csv"))
    parser.add_argument("--page", action="store_true", help="Time the page of icl-lens live.")
    parser.add_argument("--notebook", action="store_true", help="Time the view in JupyterLab.")
    options = parser.parse_args()
    if options.page or options.notebook:
        served = served_page if options.page else served_notebook
        with served(options.model) as page:
            rows = measure_page(page, options.model, options.repeats)
    else:
        rows = measure(il.load_model(options.model), options.model, options.repeats)
    write_table(pd.DataFrame(rows), options.out)


if __name__ == "__main__":
    main()
