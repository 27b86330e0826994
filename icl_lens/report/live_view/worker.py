"""Compute the newest request in a thread of its own, and stop as soon as there is a newer one.

1. `Worker.submit` keeps only the newest request; the thread starts when there is one, and ends when
   it is idle.
2. Before every module of a model runs, a hook of PyTorch that is set for all modules compares the
   request with the newest and raises `Cancelled` if they differ. A pass over one token of a large
   model thus ends within one module.
3. `Cancelled` is no `Exception`, so that no function takes it for its own error; `with` blocks
   close as usual.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Thread, get_ident
from typing import Generic, TypeVar

from torch.nn.modules.module import register_module_forward_pre_hook

Request = TypeVar("Request")
IDLE_SECONDS = 60.0
"""Time without a request after which the thread ends."""


class Cancelled(BaseException):
    """Raised inside a computation whose result is no longer wanted."""


@contextmanager
def cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """Raise `Cancelled` at this thread's next module once `is_cancelled` returns True."""
    thread = get_ident()

    def check(module: object, args: object) -> None:
        if get_ident() == thread and is_cancelled():
            raise Cancelled

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


class Worker(Generic[Request]):
    """A thread that runs `compute` on the newest request; each newer one cancels the one before."""

    def __init__(self, compute: Callable[[Request, Callable[[], bool]], None]) -> None:
        """Take what is computed: a function of a request and of a function that tells whether it is
        cancelled.
        """
        self._compute = compute
        self._changed = Condition()
        self._newest: Request | None = None
        self._is_pending = self._is_closed = False
        self._thread: Thread | None = None

    def submit(self, request: Request) -> None:
        """Compute this request next; cancel the one that is computed."""
        with self._changed:
            self._newest, self._is_pending = request, True
            if self._thread is None:
                self._thread = Thread(target=self._run, name="icl-lens live", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, timeout: int | float | None = None) -> bool:
        """Wait until the newest request is computed; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_pending, timeout)

    def close(self) -> None:
        """Cancel what is computed and end the thread."""
        with self._changed:
            self._newest, self._is_pending, self._is_closed = None, False, self._thread is not None
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                is_awake = self._changed.wait_for(
                    lambda: self._is_pending or self._is_closed, IDLE_SECONDS
                )
                if not is_awake or self._is_closed:
                    self._thread, self._is_closed = None, False
                    return
                request = self._newest

            def is_cancelled(request: Request | None = request) -> bool:
                return self._newest is not request

            try:
                if request is not None:
                    with cancellable(is_cancelled):
                        self._compute(request, is_cancelled)
            except Cancelled:
                continue
            except Exception:  # the thread lives on for the next request
                logging.getLogger(__name__).exception("a live view could not be computed")
            finally:
                with self._changed:
                    if self._newest is request:
                        self._is_pending = False
                        self._changed.notify_all()
