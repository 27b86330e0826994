"""Errors for invalid user input."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any


class InputError(ValueError):
    """Invalid input that the caller can correct; the message gives the cause, the value and a fix in one sentence.

    Example:
        >>> il.Prompt.parse("no colon here")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        icl_lens.errors.InputError: no ' : ' separator in 'no colon here'; write ...
    """


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise InputError unless `value` is one of `choices`."""
    if value not in choices:
        raise InputError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_integers(**values: object) -> tuple[int, ...]:
    """Return the values as integers of Python; raise InputError unless each is one, or one of NumPy.

    Random generators, JSON and hashes of texts do not take integers of NumPy for those of Python.

    Example:
        >>> from icl_lens.errors import check_integers
        >>> check_integers(k=3, n=10)
        (3, 10)
    """
    integers: list[int] = []
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InputError(f"{name} must be an integer, got {value!r}")
        integers.append(int(value))
    return tuple(integers)


def check_at_least(minimum: int, **values: Any) -> tuple[int, ...]:
    """Return the values as integers of Python; raise InputError unless each is an integer of at least `minimum`."""
    integers = check_integers(**values)
    for name, value in zip(values, integers, strict=True):
        if value < minimum:
            raise InputError(f"{name} must be at least {minimum}, got {value}")
    return integers
