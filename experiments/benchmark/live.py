"""How long does the live view take from an edit or a click to each of its numbers?

`python experiments/benchmark/live.py --model smollm2-135m --out live.csv`
"""

import argparse
import statistics
import time
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the live view.")
    parser.add_argument("--model", default="icl-mini")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("live.csv"))
    options = parser.parse_args()
    rows = measure(il.load_model(options.model), options.model, options.repeats)
    write_table(pd.DataFrame(rows), options.out)


if __name__ == "__main__":
    main()
