"""Names of heads and FFNs."""

from collections.abc import Iterable
from typing import NamedTuple

from icl_lens.errors import InputError, short_repr
from icl_lens.result.tables import head_name


class LayerAndHead(NamedTuple):
    """The two numbers of a head, from 0."""

    layer: int
    head: int


class Head(LayerAndHead):
    """An attention head; shown as `L22H0`, also in lists. Its name alone makes it, too.

    Raise InputError for another text.

    Example:
        >>> [il.Head(22, 0)], il.Head("L22H0").layer
        ([L22H0], 22)
    """

    __slots__ = ()

    def __new__(cls, layer: int | str, head: int | None = None) -> "Head":
        if head is None or isinstance(layer, str):
            return cls.parse(layer)
        return super().__new__(cls, layer, head)

    def __str__(self) -> str:
        return head_name(self.layer, self.head)

    __repr__ = __str__

    @classmethod
    def from_index(cls, index: int, n_heads: int) -> "Head":
        """Return the head with index `layer · n_heads + head`.

        Example:
            >>> print(il.Head.from_index(17, n_heads=8))
            L2H1
        """
        return cls(*divmod(index, n_heads))

    @classmethod
    def parse(cls, text: object) -> "Head":
        """Parse `L22H0` (also in lower case or without the L); raise InputError for anything
        else.
        """
        if not isinstance(text, str):
            raise InputError(f"invalid head {short_repr(text)}; expected a name like 'L2H0'")
        layer, sep, head = text.strip().upper().removeprefix("L").partition("H")
        if not sep or not layer.isdigit() or not head.isdigit():
            raise InputError(f"invalid head {short_repr(text)}; expected a name like 'L2H0'")
        return cls(int(layer), int(head))


class FFN(NamedTuple):
    """The FFN of a layer; shown as `F3`."""

    layer: int

    def __str__(self) -> str:
        return f"F{self.layer}"

    __repr__ = __str__

    @classmethod
    def parse(cls, text: object) -> "FFN":
        """Parse `F3`; raise InputError for anything else."""
        number = text.strip().upper().removeprefix("F") if isinstance(text, str) else ""
        if not number.isdigit() or not is_ffn_name(text):
            raise InputError(f"invalid FFN {short_repr(text)}; expected a name like 'F3'")
        return cls(int(number))


def is_ffn_name(text: object) -> bool:
    """Return whether a text is meant as the name of an FFN, such as `F3`."""
    return isinstance(text, str) and text.strip().upper().startswith("F")


AnyHead = Head | tuple[int, int] | str
"""What users may pass for a head: `Head(22, 0)`, `(22, 0)` or `"L22H0"`."""


Component = Head | FFN
"""What reads the residual stream and writes to it."""
AnyComponent = AnyHead | FFN
"""What users may pass for a head or an FFN: a head, `"L22H0"` or `"F3"`."""


def as_component(component: AnyComponent) -> Component:
    """Return a `Head` or an `FFN`, whether or not a model has it; raise InputError for a name that
    is neither.
    """
    if isinstance(component, FFN):
        return component
    return FFN.parse(component) if is_ffn_name(component) else as_head(component)


def as_head(head: AnyHead) -> Head:
    """Return a `Head`, whether or not a model has it; raise InputError for a name that is none."""
    return Head.parse(head) if isinstance(head, str) else Head(*head)


def head_tuple(heads: object) -> tuple[AnyHead, ...]:
    """Return heads as a tuple; raise InputError for a single head, and for anything that does not
    list heads.
    """
    if not isinstance(heads, Iterable) or isinstance(heads, str | Head | FFN):
        got = repr(heads) if isinstance(heads, str | Head | FFN | None) else type(heads).__name__
        raise InputError(f"heads must be an iterable of heads, got {got}; e.g. [(1, 6), 'L22H0']")
    return tuple(heads)
