"""What the user got wrong: one sentence with cause, values and remedy."""

from collections.abc import Sequence
from numbers import Integral


class InputError(ValueError):
    """The input is wrong in a way the caller can correct; the message gives cause, values and remedy in one sentence.

    Example:
        >>> il.Prompt.parse("no colon here")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        icl_lens.errors.InputError: 'no colon here' has no colon standing alone, so no demonstration; write ...
    """


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises InputError unless `value` is one of `choices`, of which there are at least two."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise InputError(f"{name}={value!r} is not known; use {', '.join(others)} or {last}")


def check_integers(**values: object) -> None:
    """Raises InputError unless each value is a whole number, of Python or NumPy.

    Example:
        >>> from icl_lens.errors import check_integers
        >>> check_integers(k=3, n=10)
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InputError(f"{name}={value!r} is no whole number; give one such as {name}=4")
