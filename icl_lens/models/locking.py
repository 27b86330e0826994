"""One thread at a time on a model: hooks and edits belong to the model, not to the thread that set them.

A pass waits until another thread's pass is over. A block that edits the model may stay open for any time, so what
another thread asks of the model meanwhile is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import Condition, Lock, get_ident
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

from icl_lens.errors import InputError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class _Turn:
    """Who is at work on one model: a thread, in so many passes and so many open blocks."""

    changed: Condition = field(default_factory=Condition)
    thread: int | None = None
    passes: int = 0
    blocks: int = 0


_TURNS: "WeakKeyDictionary[Any, _Turn]" = WeakKeyDictionary()
_MAKING = Lock()


def _turn(model: Any) -> _Turn:
    try:
        with _MAKING:
            return _TURNS.setdefault(model, _Turn())
    except TypeError:  # nothing that hooks could be set on
        raise InputError(f"{type(model).__name__} is no model; give what il.load_model(name) returns") from None


def _busy() -> InputError:
    return InputError(
        "the model is being edited in another thread, and edits belong to the model, whoever runs it; end that block "
        "first, or load the model once for each thread"
    )


def check_thread(model: Any) -> None:
    """Raises InputError in a thread other than the one that edits the model."""
    turn = _turn(model)
    with turn.changed:
        if turn.thread not in (None, get_ident()):
            raise _busy()


@contextmanager
def model_lock(model: Any, *, block: bool = False) -> Iterator[None]:
    """The model is this thread's while the block runs; waits for another thread's pass to end.

    `block`: what runs here is the caller's, and may take any time. Raises InputError while another thread has such a
    block open.
    """
    turn, me = _turn(model), get_ident()
    with turn.changed:
        while turn.thread not in (None, me):
            if not turn.passes:
                raise _busy()
            turn.changed.wait()
        turn.thread = me
        turn.passes += not block
        turn.blocks += block
    try:
        yield
    finally:
        with turn.changed:
            turn.passes -= not block
            turn.blocks -= block
            if not turn.passes and not turn.blocks:
                turn.thread = None
            turn.changed.notify_all()


def locks_model(function: F) -> F:
    """A function with a model as its first argument, run while the model is this thread's."""

    @wraps(function)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        with model_lock(args[0] if args else kwargs["model"]):
            return function(*args, **kwargs)

    return cast(F, waiting)
