"""How long does the live view take from an edit or a click to each of its numbers?

`python -m experiments.benchmark.live --model smollm2-135m --out live.csv`, and with `--page` on the
page that `icl-lens live` serves, in Chromium.
"""

import argparse
import shutil
import signal
import statistics
import subprocess
import sys
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
CLICK_HEAD = "view.querySelector('[data-head={}]').click();"


def measure(model: Any, name: str, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each number: seconds from the edit or click until it has arrived."""
    prompt = il.Prompt.parse(TEXT, answer="foo")
    batch = il.tokenize(model, prompt)
    view = il.live(model, prompt)
    view.wait()
    seconds: dict[str, list[float]] = {trait: [] for trait in (*NUMBERS, "forward")}
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
    view.close()
    rows = []
    forward = statistics.median(seconds["forward"])
    for trait, meaning in {"forward": "forward pass", **NUMBERS}.items():
        median = statistics.median(seconds[trait])
        row = {"model": name, "number": meaning, "seconds": median, "forwards": median / forward}
        rows.append(row)
    return rows


@contextmanager
def served_page(model: str) -> Iterator[Any]:
    """Yield the page of `icl-lens live` in Chromium; end the command with Ctrl-C."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "icl_lens", "live", TEXT, "-a", "foo", "-m", model]
    server = subprocess.Popen([*command, "--no-open"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        with sync_playwright() as playwright:
            path = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.set_default_timeout(PATIENCE)
            page.goto(address)
            page.wait_for_selector(".icl-live[aria-busy=false]")
            yield page
            browser.close()
        server.send_signal(signal.SIGINT)
        server.wait(60)
    finally:
        server.kill()
        server.stdout.close()


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
        act("head clicked: all numbers", head, SHOWS_ALL)
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
    options = parser.parse_args()
    if options.page:
        with served_page(options.model) as page:
            rows = measure_page(page, options.model, options.repeats)
    else:
        rows = measure(il.load_model(options.model), options.model, options.repeats)
    write_table(pd.DataFrame(rows), options.out)


if __name__ == "__main__":
    main()
