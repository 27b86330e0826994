"""Progress callbacks and progress bars of computations that take longer than two seconds.

1. A public function opens `progress_callback` with what the user passes as `progress`, and advances
   it; what it calls then shows no bar of its own.
2. Loops of passes advance `steps`, which opens a bar if no function above them has one.
3. Without an answer from the user, a bar appears after `PATIENCE` seconds, in terminals and
   notebooks only.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Timer
from typing import Any

Progress = Callable[[str, int, int], None]
"""Callback with the name of a stage, the number of finished prompts, and the total."""

NAMES = {
    "part": "locating heads",
    "pairs": "pairs of writers",
    "check": "checking the task",
    "comparison": "comparing",
    "ablation": "ablating heads",
    "exchanges": "exchanging",
}
"""Displayed names of stages."""
OTHER_SCORES = "other-scores-of-"
"""What the stage of the other scores of the first heads begins with; their number follows."""

PATIENCE = 2.0
"""Seconds after which a bar appears that nobody asked for."""


def displayed_name(stage: str) -> str:
    """Return what a progress bar calls a stage."""
    if stage.startswith(OTHER_SCORES):
        return "other scores of these heads"
    return NAMES.get(stage, stage)


_HAS_BAR: ContextVar[bool] = ContextVar("has_bar", default=False)
"""Whether a function further up reports progress, or has been told not to."""


@contextmanager
def progress_bar(
    *, hidden: bool = False, delay: float = 0.0, unit: str = " prompts"
) -> Iterator[Progress]:
    """Show a progress bar with rate and remaining time; yield the callback that advances it.

    Each stage replaces the bar of the one before. The bar is text on standard error, which every
    notebook shows, and is erased at the end. With a `delay`, it appears after so many seconds.
    """
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}
    timers: list[Timer] = []

    def close() -> None:
        for timer in timers:
            timer.cancel()
        for bar in bars.values():
            bar.close()

    def advance(what: str, done: int, total: int) -> None:
        if not total:  # no work left
            return
        if what not in bars:
            close()
            options: dict[str, Any] = {"leave": False, "position": 0, "unit": unit}
            options |= {"disable": hidden, "delay": delay}
            bar = bars[what] = tqdm(desc=displayed_name(what), total=total, **options)
            if delay and not hidden:  # a long first step shows its bar, too
                timers.append(Timer(delay, lambda: None if bar.disable else bar.refresh()))
                timers[-1].daemon = True
                timers[-1].start()
        bars[what].update(done - bars[what].n)

    try:
        yield advance
    finally:
        close()


@contextmanager
def progress_callback(
    progress: Progress | bool | None, *, unit: str = " prompts"
) -> Iterator[Progress]:
    """Yield a callback: the given one, or that of a progress bar.

    True shows a bar, False none, and None one after `PATIENCE` seconds in a terminal or notebook.
    What runs in the block shows no other bar.
    """
    is_inner = _HAS_BAR.get()
    token = _HAS_BAR.set(True)
    try:
        if progress is True:
            with progress_bar(unit=unit) as advance:
                yield advance
        elif callable(progress):
            yield progress
        elif progress is None and not is_inner and shows_bars():
            with progress_bar(delay=PATIENCE, unit=unit) as advance:
                yield advance
        else:
            yield lambda *_: None
    finally:
        _HAS_BAR.reset(token)


@contextmanager
def progress_switch(progress: bool | None) -> Iterator[None]:
    """Show no bars in the block if `progress` is False; else its loops show them (`steps`)."""
    token = _HAS_BAR.set(_HAS_BAR.get() or progress is False)
    try:
        yield
    finally:
        _HAS_BAR.reset(token)


@contextmanager
def steps(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts a loop's finished steps, on a bar unless a caller has one."""
    done = 0
    with progress_callback(None, unit=" rows") as show_progress:
        show_progress(what, 0, total)

        def advance(n: int) -> None:
            nonlocal done
            done += n
            show_progress(what, done, total)

        yield advance


def shows_bars() -> bool:
    """Return whether standard error is a terminal or a notebook's output."""
    if sys.stderr is not None and sys.stderr.isatty():
        return True
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"
