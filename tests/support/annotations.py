"""The check of annotations under pytest: beartype's, on functions of modules and classes."""

from collections.abc import Callable

from beartype import beartype


def checked(function: Callable) -> Callable:
    """Return a function that checks its arguments, as beartype makes it, or a function within a function unchanged.

    Inner functions are made anew in every call, and to check them would take as long as the calls of small models.
    """
    return function if "<locals>" in getattr(function, "__qualname__", "") else beartype(function)
