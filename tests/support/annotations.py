"""The check of annotations under pytest: beartype's, and jaxtyping's of axes for functions that name axes.

jaxtyping remembers the axes of every call of every function, which takes longer than most functions.
"""

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial, wraps
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype as checked


def lighter(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """Return jaxtyping's decorator, except that functions and dataclasses without axes are checked by beartype alone.

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
            return in_first_call(decorated, partial(jaxtyped, **options) if has_axes else without_axes)
        if has_axes:
            return jaxtyped(decorated, **options)
        if is_dataclass(decorated) and "__init__" in vars(decorated) and not hasattr(function, "__wrapped__"):
            decorated.__init__ = without_axes(function)
        return decorated

    return decorate


def in_first_call(function: Callable[..., Any], decorate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is decorated in its first call: most functions are never called in most processes."""
    decorated: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not decorated:
            decorated.append(decorate(function))
        return decorated[0](*args, **kwargs)

    return call


def may_name_axes(hint: Any) -> bool:
    """Return whether an annotation holds axes, or is a string, which may."""
    if isinstance(hint, str) or (isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)):
        return True
    return any(map(may_name_axes, hint if isinstance(hint, list) else get_args(hint)))


def without_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that beartype checks unless checks are switched off."""
    strict = checked(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if jaxtyping.config.jaxtyping_disable else strict)(*args, **kwargs)

    return call
