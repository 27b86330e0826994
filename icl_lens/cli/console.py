"""Console output that shows user text verbatim, without markup, emoji codes or control
characters.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from icl_lens.foundation.printable import HIDDEN, escape_control_characters

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
                yield Segment(escape_control_characters(segment.text), segment.style)


@contextmanager
def progress(*, hidden: bool = False, announces: bool = True) -> "Iterator[Progress]":
    """Yield a progress callback: bars on standard error, if it is a terminal.

    Elsewhere, such as in a log, a sentence says how long a stage takes, if it `announces` and the
    stage is long.
    """
    from icl_lens.runs.progress import displayed_name, progress_bar

    is_terminal = PlainConsole(stderr=True).is_terminal
    with progress_bar(hidden=hidden or not is_terminal) as report:
        if hidden or is_terminal or not announces:
            yield report
        else:
            yield announcing(
                report,
                lambda stage, total, duration: (
                    f"{displayed_name(stage).capitalize()}: about {duration}."
                ),
                least=LONG,
            )


LONG = 10.0
"""Seconds from which a stage, such as a check, is announced."""


def with_duration(
    report: "Progress",
    *,
    is_asked_for: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> "Progress":
    """Return a progress callback that, after its first batch, says on standard error how long a
    check will take and, unless it `is_asked_for`, how to omit it.
    """

    def sentence(stage: str, total: int, duration: str) -> str:
        checking = f"hecking what the model does on the task: {total:,} passes, about {duration}"
        return f"C{checking}." if is_asked_for else f"First c{checking}; --no-check omits this."

    return announcing(report, sentence, least=LONG, clock=clock)


def announcing(
    report: "Progress",
    sentence_of: Callable[[str, int, str], str],
    *,
    least: float,
    clock: Callable[[], float] = time.monotonic,
) -> "Progress":
    """Return a progress callback that says on standard error, after a stage's first batch, how long
    the stage will take.

    `sentence_of` makes a sentence of a stage, its total and the duration in words. Nothing is said
    if less than `least` seconds are left.
    """
    starts: dict[str, float] = {}
    announced: set[str] = set()
    first_start = clock()

    def announce(stage: str, done: int, total: int) -> None:
        if not done:
            starts[stage] = clock()
        elif stage not in announced:
            announced.add(stage)
            seconds = clock() - starts.get(stage, first_start)
            left = seconds * (total - done) / done
            if left >= least:
                sentence = sentence_of(stage, total, duration_in_words(left))
                PlainConsole(stderr=True, soft_wrap=True, highlight=False).print(sentence)
        report(stage, done, total)

    return announce


def duration_in_words(seconds: float) -> str:
    """Return a duration as "40 s" or "6 min"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def report_error(program: str, message: object) -> None:
    """Print a message as one line on standard error."""
    line = " ".join(str(message).split("\n"))
    PlainConsole(stderr=True, soft_wrap=True, highlight=False).print(f"{program}: {line}")
