"""Time what the live view takes from an edit or a click to each number."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import icl_lens as il
from experiments.benchmark.report import Row
from experiments.benchmark.variants import forward_only

TEXT = "love : bar like : bar eight : foo two : foo happy : bar three : foo hate : bar nine : foo one :"
QUERIES = ("good", "bad", "sad", "seven", "ten")
HEADS = ((1, 0), (2, 1))
EDITED = {
    "_answer": "live: text edited → probabilities",
    "_heads": "live: text edited → contrasts of all heads",
    "_demonstrations": "live: text edited → effects of demonstrations",
    "_effect": "live: text edited → effects of all heads",
}
CLICKED = "live: head clicked → its change beside 20 random sets"


def live(model: Any, name: str, *, repeats: int) -> Iterator[Row]:
    """Time a bare forward pass, edits of the query and clicks on a head, in alternation; medians of `repeats` runs."""
    prompt = il.Prompt.parse(TEXT, answer="foo")
    batch = il.tokenize(model, prompt)
    view = il.live(model, prompt)
    view.wait()
    times: dict[str, list[float]] = {}
    start = 0.0

    def arrived(change: Any) -> None:
        times.setdefault(change["name"], []).append(time.perf_counter() - start)

    view.observe(arrived, names=[*EDITED, "_change"])
    first = view.state
    for number in range(repeats):
        start = time.perf_counter()
        forward_only(model, batch)
        times.setdefault("", []).append(time.perf_counter() - start)
        query = f"{QUERIES[number % len(QUERIES)]}{' one' * (1 + number // len(QUERIES))}"
        start = time.perf_counter()
        view.state = replace(first, query=query)
        view.wait()
        head = HEADS[number % len(HEADS)]
        start = time.perf_counter()
        view._look = view._look | {
            "state": replace(view.state, heads=(str(il.Head(*head)),)).to_dict(),
            "pick": f"click {number}",
        }
        view.wait()
        view._look = view._look | {"state": replace(view.state, heads=()).to_dict(), "pick": f"none {number}"}
        view.wait()
    view.close()
    forward = statistics.median(times[""])
    tokens = f"1 × {batch.tokens.shape[1]}"
    yield Row(name, tokens, "bare forward", forward, 1.0, repeats)
    for trait, variant in {**EDITED, "_change": CLICKED}.items():
        median = statistics.median(times[trait])
        yield Row(name, tokens, variant, median, median / forward, len(times[trait]))
