"""Commands that several processes share, and that can be interrupted and go on: what is said, and how they end."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from icl_lens.locate.distributed import Processes


@contextmanager
def interruptible(out: Path | None, console: Console, *, program: str = "icl-lens") -> Iterator[None]:
    """Ctrl-C ends the run with a line that says how to continue it."""
    try:
        yield
    except KeyboardInterrupt:
        kept = "" if out is None else f"; the same command goes on from the chunks in {str(out)!r}"
        console.print(f"{program}: interrupted{kept}")
        raise SystemExit(130) from None


@contextmanager
def report_once(processes: "Processes") -> Iterator[None]:
    """What is wrong is said once: by the first process, or by the one that alone meets the error."""
    from icl_lens.errors import InputError

    try:
        yield
    except InputError as error:
        if processes.main_also_failed():
            raise SystemExit(2) from None
        processes.mark_reported()
        if processes.is_main:
            raise
        raise InputError(f"process {processes.rank} of {processes.size}: {error}") from None
    except Exception:
        processes.mark_reported()
        raise
