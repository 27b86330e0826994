"""Lock a model for one thread, since hooks and edits belong to the model, not to the thread that sets them.

Web servers and notebook widgets run requests in threads: without the lock, one request's edit would change the numbers
of another. A pass waits for another thread's pass to end. A block that edits the model may stay open indefinitely, so
other threads get an InputError in the meantime.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import Condition, Lock, get_ident
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from icl_lens.errors import InputError, not_a_model_error

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class _ModelLock:
    """The thread that uses a model, with its numbers of running passes and open blocks."""

    condition: Condition = field(default_factory=Condition)
    thread: int | None = None
    passes: int = 0
    blocks: int = 0


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
        "model is in use by another thread; wait for its pass or exit its block, or load one model per thread"
    )


def check_thread(model: Any) -> None:
    """Raise InputError if another thread has a pass running or a block open on the model."""
    lock = _lock_of(model)
    with lock.condition:
        if lock.thread not in (None, get_ident()):
            raise _busy_error()


@contextmanager
def model_lock(model: Any, *, block: bool = False) -> Iterator[None]:
    """Lock the model for this thread, after waiting for another thread's pass to end.

    Set `block` for a block of user code, which may take any time. Raise InputError while another thread has such a
    block open.
    """
    lock, me = _lock_of(model), get_ident()
    with lock.condition:
        while lock.thread not in (None, me):
            if not lock.passes:
                raise _busy_error()
            lock.condition.wait()
        lock.thread = me
        lock.passes += not block
        lock.blocks += block
    try:
        yield
    finally:
        with lock.condition:
            lock.passes -= not block
            lock.blocks -= block
            if not lock.passes and not lock.blocks:
                lock.thread = None
            lock.condition.notify_all()


def locks_model(function: F) -> F:
    """Decorate a function so that it holds the lock of the model, its first argument."""

    @wraps(function)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        with model_lock(args[0] if args else kwargs["model"]):
            return function(*args, **kwargs)

    return cast(F, waiting)
