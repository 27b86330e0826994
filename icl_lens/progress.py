"""Progress callbacks and progress bars of computations over many prompts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int], None]
"""Callback with the name of a stage, the number of finished prompts, and the total."""

NAMES = {"part": "locating heads", "refined": "second pass", "pairs": "pairs of writers"}
"""Displayed names of stages."""


@contextmanager
def progress_bar(console: "Console | None" = None, *, hidden: bool = False) -> Iterator[Progress]:
    """Show a progress bar with rate and remaining time per stage; yield the callback that advances it.

    Prints to standard error unless a console is given, and erases the bars at the end.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    with Bars(*columns, console=console or Console(stderr=True), disable=hidden, transient=True) as bars:

        def advance(what: str, done: int, total: int) -> None:
            if not total:  # no work left
                return
            if what not in tasks:
                tasks[what] = bars.add_task(NAMES.get(what, what), total=total, rate="")
            speed = bars.tasks[tasks[what]].speed
            bars.update(tasks[what], completed=done, rate="" if speed is None else f"{speed:.1f} prompts/s")

        yield advance


@contextmanager
def notebook_bar() -> Iterator[Progress]:
    """Like `progress_bar`, as text that every notebook can show: rich's bars need ipywidgets."""
    from tqdm import tqdm

    bars: dict[str, tqdm] = {}

    def advance(what: str, done: int, total: int) -> None:
        if not total:  # no work left
            return
        if what not in bars:
            bars[what] = tqdm(desc=NAMES.get(what, what), total=total, unit=" prompts", leave=False, position=0)
        bars[what].update(done - bars[what].n)

    try:
        yield advance
    finally:
        for bar in bars.values():
            bar.close()


@contextmanager
def reported(progress: Progress | bool | None) -> Iterator[Progress]:
    """Yield a callback: the given one, that of a progress bar for True, or one that does nothing."""
    if progress is True:
        from rich.console import Console

        with notebook_bar() if Console().is_jupyter else progress_bar() as advance:
            yield advance
    else:
        yield progress if callable(progress) else lambda *_: None
