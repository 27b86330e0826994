"""The texts of one prompt, as word tasks and text tasks draw them."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from icl_lens.errors import InputError, check_at_least, check_integers
from icl_lens.prompts.prompt import in_order

SURROGATE = re.compile("[\ud800-\udfff]")
"""An unpaired surrogate, which no tokenizer reads."""

MAX_PROMPTS = 1_000_000
"""Maximum number of prompts per call, which limits memory."""

KeepTexts = Callable[[list[list[str]]], list[list[str]]]
"""Filters groups of texts, e.g. to those with the same number of tokens."""


@dataclass(frozen=True)
class Draw:
    """One prompt's texts: those of each false class and of the true class, and a query of the true class."""

    false: list[tuple[str, list[str]]]
    true: tuple[str, list[str]]
    query: str
    false_query: str | None
    """An unused text of the first false class; None if all are used."""
    task_classes: tuple[str, ...]
    """The classes of the task; a prompt may show two of them."""

    @property
    def order_seed(self) -> str:
        """The seed of the random order of the demonstrations.

        It is written out, so that renaming this class or its fields changes no prompt: published numbers depend on it.
        """
        return (
            f"_Draw(false={self.false!r}, true={self.true!r}, query={self.query!r}, other_query={self.false_query!r})"
        )

    @property
    def classes(self) -> list[str]:
        """The classes that the prompt shows, numbers in the order of their values and names alphabetically."""
        return list(in_order([self.true[0], *(class_name for class_name, _ in self.false)]))

    def with_false_query(self) -> "Draw":
        """Return the same demonstrations with a query of the first false class, which becomes the true class.

        Raise InputError if that class has no unused text.
        """
        if self.false_query is None:
            raise InputError(
                f"class {self.false[0][0]!r} has no unused text for the query; reduce demonstrations or add texts"
            )
        return replace(
            self, false=[self.true, *self.false[1:]], true=self.false[0], query=self.false_query, false_query=self.query
        )


def unused_text(texts: list[str], shown: list[str], query: str) -> str | None:
    """Return one of `texts` that is not `shown`, or None; the choice depends on no other prompt."""
    left = [text for text in texts if text not in shown]
    return random.Random(f"{query} {shown}").choice(left) if left else None


def check_path(path: object) -> None:
    """Raise InputError for a value that is not a path, or a path that cannot be accessed."""
    if path is None:
        return
    if not isinstance(path, str | Path):
        raise InputError(f"path must be the path of a file or folder, got {path!r}")
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass  # reported where it is read
    except OSError as error:
        raise InputError(
            f"cannot access {str(path)!r}: {error.strerror}; pass the path of another file or folder"
        ) from error


def check_sampling(n: int, seed: int, demonstrations: int) -> tuple[int, int, int]:
    """Return n, seed and demonstrations as integers of Python.

    Raise InputError for numbers of prompts and demonstrations that are out of range, and for other types.
    """
    n, seed = check_integers(n=n, seed=seed)
    if not 1 <= n <= MAX_PROMPTS:
        raise InputError(f"n must be between 1 and {MAX_PROMPTS:,}, got {n}")
    (demonstrations,) = check_at_least(1, demonstrations=demonstrations)
    return n, seed, demonstrations
