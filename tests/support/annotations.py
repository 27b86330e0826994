"""The check of annotations under pytest: beartype's, and jaxtyping's of axes for functions that
name axes.

jaxtyping remembers the axes of every call of every function, which takes longer than most
functions.
"""

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial, wraps
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype as checked

CHECKED = 2
"""Calls of a function that are checked in each test. A test calls some functions thousands of
times.
"""
_test = 0


def lighter(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """Return jaxtyping's decorator, except that functions and dataclasses without axes are checked
    by beartype alone.

    Functions and classes within functions, which are made anew in every call, are left as they are.
    """

    def decorate(decorated: Any = None, **options: Any) -> Any:
        if decorated is None:
            return partial(decorate, **options)
        if "<locals>" in getattr(decorated, "__qualname__", ""):
            return decorated
        function = decorated.__init__ if isinstance(decorated, type) else decorated
        has_axes = any(map(may_name_axes, getattr(function, "__annotations__", {}).values()))
        if isinstance(decorated, FunctionType):
            return at_first(decorated, partial(jaxtyped, **options) if has_axes else without_axes)
        if has_axes:
            return jaxtyped(decorated, **options)
        if (
            is_dataclass(decorated)
            and "__init__" in vars(decorated)
            and not hasattr(function, "__wrapped__")
        ):
            decorated.__init__ = at_first(function, without_axes)
        return decorated

    return decorate


def begin_test() -> None:
    """Check the next calls of every function again."""
    global _test
    _test += 1


def at_first(function: Callable[..., Any], decorate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is checked in its first `CHECKED` calls in each test, and decorated
    when it is called.
    """
    decorated, test, left = None, -1, 0

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal decorated, test, left
        if test != _test:
            test, left = _test, CHECKED
        if left == 0:
            return function(*args, **kwargs)
        left -= 1
        decorated = decorated or decorate(function)
        return decorated(*args, **kwargs)

    return call


def may_name_axes(hint: Any) -> bool:
    """Return whether an annotation holds axes, or is a string, which may."""
    if isinstance(hint, str) or (
        isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)
    ):
        return True
    return any(map(may_name_axes, hint if isinstance(hint, list) else get_args(hint)))


def without_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that beartype checks unless checks are switched off."""
    strict = checked(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if jaxtyping.config.jaxtyping_disable else strict)(*args, **kwargs)

    return call
