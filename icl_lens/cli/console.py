"""Console output that shows user text verbatim, without markup, emoji codes or control
characters.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from icl_lens.printable import HIDDEN, visible

if TYPE_CHECKING:
    from icl_lens.runs.progress import Progress


class PlainConsole(Console):
    """A console that treats every string as plain text, whatever prompts, labels, names and paths
    contain.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(**{"markup": False, "emoji": False, **kwargs})
        if self.width < 1:  # COLUMNS=0 means an unknown width; every line would be truncated
            self.width = 80

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render like rich, with control characters in text escaped."""
        for segment in super().render(renderable, options):
            if segment.control or not HIDDEN.search(segment.text):
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)


def progress(*, hidden: bool = False) -> "AbstractContextManager[Progress]":
    """Return a context with a progress callback: bars on standard error, if it is a terminal."""
    from icl_lens.runs.progress import progress_bar

    return progress_bar(hidden=hidden or not PlainConsole(stderr=True).is_terminal)


LONG = 10.0
"""Seconds from which a check that nobody asked for is announced."""


def with_duration(
    report: "Progress",
    *,
    is_asked_for: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> "Progress":
    """Return a progress callback that, after its first batch, says on standard error how long a
    check will take and, unless it `is_asked_for`, how to omit it.

    It says nothing if less than `LONG` seconds are left.
    """
    start = clock()
    is_first = True

    def announce(what: str, done: int, total: int) -> None:
        nonlocal start, is_first
        if not done:
            start = clock()
        elif is_first:
            is_first = False
            left = (clock() - start) * (total - done) / done
            if left >= LONG:
                duration = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
                sentence = f"Checking what the model does on the task: {total:,} passes, about "
                sentence += f"{duration}."
                if not is_asked_for:
                    sentence = f"First c{sentence[1:-1]}; --no-check omits this."
                PlainConsole(stderr=True, soft_wrap=True, highlight=False).print(sentence)
        report(what, done, total)

    return announce


def report_error(program: str, message: object) -> None:
    """Print a message as one line on standard error."""
    line = " ".join(str(message).split("\n"))
    PlainConsole(stderr=True, soft_wrap=True, highlight=False).print(f"{program}: {line}")
