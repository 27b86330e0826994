"""Interrupt and error handling of resumable commands that may run in several processes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from icl_lens.locate.distributed import Distributed

# Seconds that a process with an error leaves to the main one: most errors occur in all processes, and the launcher ends
# this one as soon as the main one has reported its own.
MAIN_FIRST = 5.0


@contextmanager
def interruptible(out: Path | None, console: Console, *, program: str = "icl-lens") -> Iterator[None]:
    """On Ctrl-C, end the run with a line that explains how to resume it."""
    try:
        yield
    except KeyboardInterrupt:
        hint = "" if out is None else f"; rerun the same command to resume from {str(out)!r}"
        console.print(f"{program}: interrupted{hint}")
        raise SystemExit(130) from None


@contextmanager
def report_once(distributed: "Distributed") -> Iterator[None]:
    """Report an error once: from the main process, or from the only process in which it occurs."""
    from icl_lens.errors import InputError

    try:
        yield
    except InputError as error:
        if distributed.is_main:
            raise
        time.sleep(MAIN_FIRST)
        raise InputError(f"process {distributed.rank} of {distributed.size}: {error}") from None
