"""What is told of how far a computation over many prompts has come, and the bar that shows it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int, int], None]
"""Called with what is being computed, how many prompts are done, and how many there are."""

NAMES = {"part": "locating", "refined": "second pass over open heads", "heads": "heads"}
"""What is being computed, in words."""

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def progress_bar(console: "Console | None" = None, *, hidden: bool = False) -> Iterator[Progress]:
    """A bar with rate and time left for each thing that is computed; yields the function that moves it.

    On standard error unless a console is given.
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
    with Bars(*columns, console=console or Console(stderr=True), disable=hidden) as bars:

        def advance(what: str, done: int, total: int) -> None:
            if not total:  # nothing is left to do
                return
            if what not in tasks:
                tasks[what] = bars.add_task(NAMES.get(what, what), total=total, rate="")
            speed = bars.tasks[tasks[what]].speed
            bars.update(tasks[what], completed=done, rate="" if speed is None else f"{speed:.1f} prompts/s")

        try:
            yield advance
        except KeyboardInterrupt:
            bars.live.transient = True  # no half-drawn bar is left
            raise


def shows_progress(function: F) -> F:
    """Where the function is called with `progress=True`, a bar is shown until it ends."""

    @wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("progress") is not True:
            return function(*args, **kwargs)
        with progress_bar() as advance:
            return function(*args, **{**kwargs, "progress": advance})

    return cast(F, shown)


def as_callback(progress: Progress | bool | None) -> Progress:
    """The function that is told, also where nobody wants to know."""
    return progress if callable(progress) else lambda *_: None
