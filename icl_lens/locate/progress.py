"""What is told of how far a computation over many prompts has come."""

from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with what is being computed, how many prompts are done, and how many there are."""

NAMES = {"part": "locating", "again": "second pass over open heads", "heads": "heads"}
"""What is being computed, in words."""


def progress_of(progress: Progress | bool | None) -> Progress:
    """The function that is told: the user's own, for True one that draws bars in a terminal or notebook, else none."""
    if progress is True:
        return _Bars()
    return progress or (lambda *_: None)


class _Bars:
    """One tqdm bar for each thing that is computed, with rate and time left."""

    def __init__(self) -> None:
        self._bars: dict[str, Any] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        if not total:  # nothing is left to do
            return
        if what not in self._bars:
            from tqdm.auto import tqdm

            self._bars[what] = tqdm(total=total, desc=NAMES.get(what, what), unit="prompt")
        bar = self._bars[what]
        bar.update(done - bar.n)
        if done >= total:
            bar.close()
