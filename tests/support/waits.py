"""How long does a thread wait for the model beside three others and a live view?

`PYTHONPATH=. python tests/support/waits.py --model smollm2-135m --out waits.csv`

Four threads each loop one function on the same model, and the query of a live view is edited again
and again. A turn is what a thread gets the model for, a forward pass as a rule. Recorded are the
time from asking for a turn until it begins, and whose turns began in between.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pandas as pd

import icl_lens as il
from experiments.benchmark.timing import write_table
from icl_lens.models.passes import locking

TEXT = (
    "love : bar like : bar eight : foo two : foo "
    "happy : bar three : foo hate : bar nine : foo one :"
)
QUERIES = ("good", "bad", "sad", "seven", "ten")
VIEW = "live view"


@dataclass(frozen=True)
class Turn:
    """A wait for the model that has ended."""

    thread: str
    seconds: float
    between: tuple[str, ...]
    """The threads whose turns ran or began while this one waited, in order."""


@dataclass
class Turns:
    """All waits for a model, and the turns in the order in which they began."""

    waits: list[Turn] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    longest_turn: float = 0.0
    """Seconds."""


@contextmanager
def recorded_turns(model: Any) -> Iterator[Turns]:
    """Record the turns of all threads on a model."""
    lock = locking._lock_of(model)
    turns, wait, leave = Turns(), lock._wait, lock.leave
    began = 0.0

    def recorded_wait(request: Any) -> None:
        nonlocal began
        start, n_before = time.perf_counter(), len(turns.order)
        running = turns.order[-1:] if lock.thread is not None else []
        wait(request)
        name = current_thread().name
        between = (*running, *turns.order[n_before:])
        began = time.perf_counter()
        turns.waits.append(Turn(name, began - start, between))
        turns.order.append(name)

    def recorded_leave(**options: Any) -> None:
        leave(**options)
        turns.longest_turn = max(turns.longest_turn, time.perf_counter() - began)

    lock._wait, lock.leave = recorded_wait, recorded_leave
    try:
        yield turns
    finally:
        del lock._wait, lock.leave


def looped_functions(model: Any) -> dict[str, Callable[[], Any]]:
    """Return the functions that threads loop."""
    prompts = il.load_task("sentiment-number", n=4)
    batch = il.tokenize(model, prompts)
    run = il.Run(progress=False)
    return {
        "explain": lambda: il.explain(model, prompts[0], progress=False),
        "head_effects": lambda: il.head_effects(model, batch, progress=False),
        "locate": lambda: il.locate(model, batch, by="contrast", run=run),
        "trace": lambda: il.trace(model, batch[:2], run=run),
    }


def measure(model: Any, n_edits: int) -> tuple[Turns, Counter[str], list[float]]:
    """Return the turns, the finished calls by function, and the seconds from each edit of the view
    until its probabilities, while all functions run in threads."""
    is_done, finished = Event(), Counter[str]()
    functions = looped_functions(model)

    def loop(name: str) -> None:
        while not is_done.is_set() or not finished[name]:
            functions[name]()
            finished[name] += 1

    view = il.live(model, il.Prompt.parse(TEXT, answer="foo"))
    view.wait()
    seconds: list[float] = []
    start = 0.0
    view.observe(lambda _: seconds.append(time.perf_counter() - start), names=["_answer"])
    first_state = view.state
    threads = [Thread(target=loop, name=name, args=(name,)) for name in functions]
    with recorded_turns(model) as turns:
        for thread in threads:
            thread.start()
        for number in range(n_edits):
            padding = " one" * (1 + number // len(QUERIES))
            start = time.perf_counter()
            view.state = replace(first_state, query=QUERIES[number % len(QUERIES)] + padding)
            view.wait()
        is_done.set()
        for thread in threads:
            thread.join()
    view.close()
    return turns, finished, seconds


def table(turns: Turns, finished: Counter[str], seconds: list[float]) -> pd.DataFrame:
    """Return a row per thread: its calls, turns, longest wait, and most turns of one other thread
    while it waited."""
    waits: dict[str, list[Turn]] = {}
    for turn in turns.waits:
        name = turn.thread if turn.thread in finished else VIEW
        waits.setdefault(name, []).append(turn)
    rows = []
    for name, turns_of_thread in waits.items():
        overtaking = [max(Counter(turn.between).values(), default=0) for turn in turns_of_thread]
        rows.append(
            {
                "thread": name,
                "calls": finished[name] if name in finished else len(seconds),
                "turns": len(turns_of_thread),
                "longest wait (s)": max(turn.seconds for turn in turns_of_thread),
                "turns of one other thread meanwhile": max(overtaking),
                "longest turn of any (s)": turns.longest_turn,
            }
        )
    return pd.DataFrame(rows)


def main() -> None:
    """Read the options; write and print the table, and what the view's edits took."""
    parser = argparse.ArgumentParser(description="Time how long threads wait for one model.")
    parser.add_argument("--model", default="icl-mini")
    parser.add_argument("--edits", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("waits.csv"))
    options = parser.parse_args()
    turns, finished, seconds = measure(il.load_model(options.model), options.edits)
    write_table(table(turns, finished, seconds), options.out)
    print(f"from an edit of the view to its probabilities: at most {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
