"""The texts of one prompt, as word tasks and text tasks draw them."""

import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from icl_lens.errors import InputError, check_at_least, check_integers
from icl_lens.prompts.name_order import in_order
from icl_lens.prompts.prompt import NEWLINE, SPACE

SURROGATE = re.compile("[\ud800-\udfff]")
"""An unpaired surrogate, which no tokenizer reads."""

N_PROMPTS = 200
"""Number of prompts by default: more hardly change which heads come first, and take longer."""

MAX_PROMPTS = 1_000_000
"""Maximum number of prompts per call, which limits memory."""

KeepTexts = Callable[[list[list[str]], str], list[list[str]]]
"""Filters groups of texts, e.g. to those with the same number of tokens between this separator."""


@dataclass(frozen=True)
class Draw:
    """One prompt's texts: those of each false class and of the true class, and a query of the true
    class.
    """

    false: list[tuple[str, list[str]]]
    true: tuple[str, list[str]]
    query: str
    false_query: str | None
    """An unused text of the first false class; None if all are used."""
    task_classes: tuple[str, ...]
    """The classes of the task; a prompt may show two of them."""
    separator: str = SPACE
    """What separates the demonstrations (`Prompt.separator`)."""

    @property
    def order_seed(self) -> str:
        """The seed of the random order of the demonstrations.

        It is written out, so that renaming this class or its fields changes no prompt: published
        numbers depend on it.
        """
        return (
            f"_Draw(false={self.false!r}, true={self.true!r}, query={self.query!r}, "
            f"other_query={self.false_query!r})"
        )

    @property
    def classes(self) -> list[str]:
        """The classes that the prompt shows, numbers in the order of their values and names
        alphabetically.
        """
        return list(in_order([self.true[0], *(class_name for class_name, _ in self.false)]))

    def with_false_query(self) -> "Draw":
        """Return the same demonstrations with a query of the first false class, which becomes the
        true class.

        Raise InputError if that class has no unused text.
        """
        if self.false_query is None:
            raise InputError(
                f"class {self.false[0][0]!r} has no unused text for the query; reduce "
                "demonstrations or add texts"
            )
        return replace(
            self,
            false=[self.true, *self.false[1:]],
            true=self.false[0],
            query=self.false_query,
            false_query=self.query,
        )


def spelling_key(text: str) -> str:
    """Return what texts have in common that differ only in case or Unicode form, such as "Café" and
    "cafe\u0301".

    Example:
        >>> from icl_lens.prompts.draw import spelling_key
        >>> spelling_key("\uff28ot") == spelling_key("hot")
        True
    """
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def own_separator(texts: Iterable[str]) -> str:
    """Return what separates demonstrations of your own data: a newline if a text or a label has
    several words, which would run together, else a space.

    Example:
        >>> from icl_lens.prompts.draw import own_separator
        >>> own_separator(["love", "two"]), own_separator(["my card was charged twice", "two"])
        (' ', '\\n')
    """
    return NEWLINE if any(len(text.split()) > 1 for text in texts) else SPACE


class TextPool:
    """Different texts, of which one is chosen in a time that does not depend on how many there
    are.
    """

    def __init__(self, texts: Sequence[str], *, key: Callable[[str], str] = spelling_key) -> None:
        self.texts = texts
        self.key = key
        """What texts share that count as the same."""
        self.positions: dict[str, list[int]] = {}
        """The positions of the texts with each key."""
        for position, text in enumerate(texts):
            self.positions.setdefault(key(text), []).append(position)

    def unused(self, used_texts: Sequence[str], seed: str) -> str | None:
        """Return a text with another key than all `used_texts`, or None; the choice depends on no
        other prompt.
        """
        used: set[int] = set()
        for text in used_texts:
            used.update(self.positions.get(self.key(text), ()))
        n_unused = len(self.texts) - len(used)
        if not n_unused:
            return None
        position = random.Random(seed).choice(range(n_unused))
        for used_position in sorted(used):
            position += used_position <= position
        return self.texts[position]


def check_sampling(n: int, seed: int, demonstrations: int) -> tuple[int, int, int]:
    """Return n, seed and demonstrations as integers of Python.

    Raise InputError for numbers of prompts and demonstrations that are out of range, and for other
    types.
    """
    n, seed = check_integers(n=n, seed=seed)
    if not 1 <= n <= MAX_PROMPTS:
        raise InputError(f"n must be between 1 and {MAX_PROMPTS:,}, got {n}")
    (demonstrations,) = check_at_least(1, demonstrations=demonstrations)
    return n, seed, demonstrations
