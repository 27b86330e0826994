"""An order of names that depends only on their set."""

import re
from collections.abc import Iterable

# A number as it is written in a file.
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


def is_number(name: str) -> bool:
    """Return whether a class is written as a number, such as "3", "-1" or "0.5"."""
    return _NUMBER.fullmatch(name) is not None


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return names in an order that depends only on their set: numbers by value, then other names
    alphabetically.

    Numbers within names also count by value.

    Example:
        >>> from icl_lens.prompts.name_order import in_order
        >>> in_order(["10", "2", "level 10", "level 9", "bar"])
        ('2', '10', 'bar', 'level 9', 'level 10')
    """
    return tuple(sorted({*names}, key=_sort_key))


def _sort_key(name: str) -> tuple[bool, float, tuple[str | int, ...], str]:
    """Return what numbers, which come first, and other names are sorted by."""
    if is_number(name):
        return False, float(name), (), name
    pieces: list[str | int] = []
    for number, piece in enumerate(re.split("([0-9]+)", name)):
        is_digits = number % 2 == 1  # text and digits alternate
        pieces.append(int(piece) if is_digits else piece)
    return True, 0.0, tuple(pieces), name
