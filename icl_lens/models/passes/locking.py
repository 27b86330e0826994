"""Give a model to one thread at a time, since hooks and edits belong to the model, not to the
thread that sets them.

Web servers and notebook widgets run requests in threads: without the lock, one request's edit would
change the numbers of another. There are three uses of a model, and each is re-entrant.

1. A pass (`model_lock`), for which hooks are set. Threads run their passes one at a time, first
   come, first served.
2. A function of several passes (`reserves_model`). Passes of other threads run between its own, so
   that nobody waits for the whole function. No other thread opens a block of edits before it ends.
3. A block of edits that a user opens (`model_lock` with `block=True`) may stay open indefinitely.
   It waits for passes and functions that run; once it is open, other threads get an InputError.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import Condition, Lock, get_ident
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from icl_lens.errors import InputError, not_a_model_error

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(eq=False)
class _Request:
    """A thread that waits for its pass, or to open a block."""

    thread: int
    is_block: bool


@dataclass
class _ModelLock:
    """Who uses a model, and who waits for it."""

    changed: Condition = field(default_factory=Condition)
    thread: int | None = None
    """The thread that runs a pass or has a block open."""
    passes: int = 0
    blocks: int = 0
    """Open passes and blocks of this thread."""
    functions: Counter[int] = field(default_factory=Counter)
    """Thread -> its running functions that reserve the model."""
    queue: list[_Request] = field(default_factory=list)
    """Requests in the order in which they came."""

    def enter(self, *, block: bool) -> bool:
        """Wait for this thread's turn and count a pass or block; return whether it counts as a
        block of a user.
        """
        me = get_ident()
        with self.changed:
            is_inside_pass = self.thread == me and self.passes > 0
            is_block = block and not is_inside_pass and not self.functions[me]
            if self.thread != me:
                self._wait(_Request(me, is_block))
            self.thread = me
            self.blocks += is_block
            self.passes += not is_block
        return is_block

    def leave(self, *, is_block: bool) -> None:
        with self.changed:
            self.blocks -= is_block
            self.passes -= not is_block
            if not self.passes and not self.blocks:
                self.thread = None
            self.changed.notify_all()

    def enter_function(self) -> None:
        """Count a function of this thread, after the blocks that other threads wait to open."""
        me = get_ident()
        with self.changed:
            while (
                self.thread != me
                and not self.functions[me]
                and any(request.is_block for request in self.queue)
            ):
                self._check_no_block()
                self.changed.wait()
            if self.thread != me:
                self._check_no_block()
            self.functions[me] += 1

    def leave_function(self) -> None:
        me = get_ident()
        with self.changed:
            self.functions[me] -= 1
            self.functions += Counter()  # forgets threads without functions
            self.changed.notify_all()

    def _wait(self, request: _Request) -> None:
        self.queue.append(request)
        try:
            while self._next() is not request:
                self._check_no_block()
                self.changed.wait()
        finally:
            self.queue.remove(request)
            self.changed.notify_all()

    def _next(self) -> _Request | None:
        """Return the request whose turn it is; None if none can go now.

        A block that waits for running functions also stops the requests behind it, or it might wait
        for ever. It does not stop the passes of these functions.
        """
        if self.thread is not None:
            return None
        is_block_waiting = False
        for request in self.queue:
            if request.is_block and self._is_reserved_against(request):
                is_block_waiting = True
            elif not is_block_waiting or self.functions[request.thread]:
                return request
        return None

    def _is_reserved_against(self, request: _Request) -> bool:
        return any(
            thread != request.thread and count > 0 for thread, count in self.functions.items()
        )

    def _check_no_block(self) -> None:
        """Raise InputError if another thread has a block open, which may take any time."""
        if self.blocks and not self.passes and self.thread != get_ident():
            raise _busy_error()


_LOCKS: "WeakKeyDictionary[Any, _ModelLock]" = WeakKeyDictionary()
_CREATION_LOCK = Lock()


def _lock_of(model: Any) -> _ModelLock:
    """Return a model's lock, created on first use."""
    try:
        with _CREATION_LOCK:
            return _LOCKS.setdefault(model, _ModelLock())
    except TypeError:  # of an object without weak references, such as a model's name
        raise not_a_model_error(model) from None


def _busy_error() -> InputError:
    return InputError(
        "model is in use by another thread; wait for its pass or exit its block, or load one model "
        "per thread"
    )


def check_thread(model: Any) -> None:
    """Raise InputError if another thread has a pass running or a block open on the model."""
    lock = _lock_of(model)
    with lock.changed:
        if lock.thread not in (None, get_ident()):
            raise _busy_error()


@contextmanager
def model_lock(model: Any, *, block: bool = False) -> Iterator[None]:
    """Lock the model for a pass of this thread, in the order in which threads ask.

    Set `block` for a block of user code, which may take any time. Raise InputError while another
    thread has such a block open.
    """
    lock = _lock_of(model)
    is_block = lock.enter(block=block)
    try:
        yield
    finally:
        lock.leave(is_block=is_block)


@contextmanager
def model_reserved(model: Any) -> Iterator[None]:
    """Keep other threads from editing the model; their passes may run between those of this thread.

    Raise InputError while another thread has a block open.
    """
    lock = _lock_of(model)
    lock.enter_function()
    try:
        yield
    finally:
        lock.leave_function()


@contextmanager
def thread_noted(threads_of: "WeakKeyDictionary[Any, set[int]]", model: Any) -> Iterator[None]:
    """List this thread among those of a model inside the outermost of nested `with` blocks."""
    threads = threads_of.setdefault(model, set())
    is_nested = get_ident() in threads
    threads.add(get_ident())
    try:
        yield
    finally:
        if not is_nested:
            threads.discard(get_ident())


def reserves_model(function: F) -> F:
    """Decorate a function so that it reserves the model, its first argument."""

    @wraps(function)
    def reserving(*args: Any, **kwargs: Any) -> Any:
        with model_reserved(args[0] if args else kwargs["model"]):
            return function(*args, **kwargs)

    return cast(F, reserving)
