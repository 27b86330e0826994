"""Progress callbacks and progress bars of computations over many prompts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Callback with the name of a stage, the number of finished prompts, and the total."""

NAMES = {
    "part": "locating heads",
    "refined": "second pass",
    "pairs": "pairs of writers",
    "check": "checking the task",
    "comparison": "comparing",
    "ablation": "ablating heads",
    "exchanges": "exchanging",
}
"""Displayed names of stages."""


@contextmanager
def progress_bar(*, hidden: bool = False) -> Iterator[Progress]:
    """Show a progress bar with rate and remaining time; yield the callback that advances it.

    Each stage replaces the bar of the one before. The bar is text on standard error, which every notebook shows, and is
    erased at the end.
    """
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}

    def close() -> None:
        for bar in bars.values():
            bar.close()

    def advance(what: str, done: int, total: int) -> None:
        if not total:  # no work left
            return
        if what not in bars:
            close()
            name = NAMES.get(what, what)
            bars[what] = tqdm(desc=name, total=total, unit=" prompts", leave=False, position=0, disable=hidden)
        bars[what].update(done - bars[what].n)

    try:
        yield advance
    finally:
        close()


@contextmanager
def progress_callback(progress: Progress | bool | None) -> Iterator[Progress]:
    """Yield a callback: the given one, that of a progress bar for True, or one that does nothing."""
    if progress is True:
        with progress_bar() as advance:
            yield advance
    else:
        yield progress if callable(progress) else lambda *_: None
