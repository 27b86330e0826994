"""Which label each class of a task has.

1. A label that names a class belongs to it, and so do the words of a mapping {class: word}.
2. If classes are numbers, words belong to them in the order of the numbers: "negative, positive"
   are 0 and 1.
3. All other words are arbitrary: a task may exchange them between prompts.
4. Words that could be meant in two ways are refused with both ways to say it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from icl_lens.errors import InputError
from icl_lens.prompts.prompt import check_unicode, in_order, is_number, quoted_list

Labels = Sequence[str] | Mapping[Any, str | Sequence[str]]
"""Words, or the word or words of each class."""

DEFAULT_LABELS = (
    *("foo", "bar", "baz", "qux", "dax", "wug", "mib"),
    *("zib", "toma", "gorp", "nerf", "lorp", "vint", "kiki"),
)
"""Default labels, which begin with different tokens in the vocabularies of GPT-2 and the bundled
models.
"""
# Characters that a label and the name of a class must share at the start to be taken for the same
# word.
_MIN_SHARED = 3


@dataclass(frozen=True)
class ClassLabels:
    """The labels of a task's classes; made by `class_labels`."""

    words: Mapping[str, tuple[str, ...]]
    """The words of each class that has its own, of which a prompt shows one; prompts use them in
    turn.
    """
    others: tuple[str, ...]
    """The labels of the other classes, in the order of the classes."""
    choices: tuple[str, ...] | None
    """The labels of every prompt; None if they depend on the classes that a prompt shows."""

    def of_classes(self, classes: Sequence[str], turn: int, *, swapped: bool) -> dict[str, str]:
        """Return the label of each class in prompt `turn`; `swapped` reverses the order of the
        arbitrary labels.
        """
        others = iter(self.others[::-1] if swapped else self.others)
        return {
            name: self.words[name][turn % len(self.words[name])]
            if name in self.words
            else next(others)
            for name in classes
        }

    def fits(self, classes: Sequence[str]) -> bool:
        """Return whether a prompt that shows these classes has a label for each and shows every
        class with words.
        """
        return {*self.words} <= {*classes} or (not self.others and {*classes} <= {*self.words})


def class_labels(labels: Labels | None, classes: Sequence[str], n_shown: int) -> ClassLabels:
    """Return the labels of a task's classes, of which every prompt shows `n_shown`.

    Raise InputError for labels that are too few, repeated or unknown, or that can be matched in
    more than one way.
    """
    if labels is None:
        if n_shown > len(DEFAULT_LABELS):
            n_defaults = len(DEFAULT_LABELS)
            raise InputError(
                f"labels must be {n_shown} words, got None; pass one per class (defaults: "
                f"{n_defaults})"
            )
        return ClassLabels({}, DEFAULT_LABELS[:n_shown], DEFAULT_LABELS[:n_shown])
    if isinstance(labels, Mapping):
        return _from_mapping(labels, classes, n_shown)
    if not isinstance(labels, Sequence):
        raise InputError(
            "labels must be a sequence of words or a mapping from classes to words, got "
            f"{labels!r}; write labels={DEFAULT_LABELS[:2]!r}"
        )
    words = (labels,) if isinstance(labels, str) else tuple(labels)
    check_unicode(*words, what="label")
    named = _named_classes(words, classes)
    unnamed = [word for word in words if word not in named.values()]
    if unnamed and len(words) == len(classes) and not named and all(map(is_number, classes)):
        named, unnamed = dict(zip(in_order(classes), words, strict=True)), []
    n_expected = len(named) if not unnamed and len(named) > n_shown else n_shown
    if isinstance(labels, str) or len(words) != n_expected or len({*words}) != len(words):
        raise InputError(
            f"labels must be {n_expected} different words, one per class, got {labels!r}"
        )
    if unnamed and _is_ambiguous(unnamed, named, classes, n_shown):
        raise _ambiguous_error(words, named, classes, n_shown)
    fixed = {name: (word,) for name, word in named.items()}
    return ClassLabels(fixed, tuple(unnamed), words if len(words) == n_shown else None)


def _from_mapping(
    labels: Mapping[Any, str | Sequence[str]], classes: Sequence[str], n_shown: int
) -> ClassLabels:
    """Return the labels of a mapping {class: word} or {class: words}."""
    words: dict[str, tuple[str, ...]] = {}
    for key, given in labels.items():
        found = [name for name in classes if name == str(key).strip()]
        found = found or [
            name for name in classes if name.casefold() == str(key).strip().casefold()
        ]
        if len(found) != 1:
            raise InputError(
                f"labels must map classes ({quoted_list(in_order(classes))}) to words, got {key!r}"
            )
        several = (
            tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
        )
        check_unicode(*several, what="label")
        if not several or not all(word.strip() for word in several):
            raise InputError(
                f"labels must have a word for the class {key!r}, got {given!r}; add it"
            )
        words[found[0]] = several
    if len(words) < n_shown:
        missing = [name for name in in_order(classes) if name not in words]
        raise InputError(
            f"labels must have words for at least {n_shown} classes, got {len(words)}; add "
            f"{quoted_list(missing)}"
        )
    for turn in range(lcm(*map(len, words.values()))):
        shown = [several[turn % len(several)] for several in words.values()]
        if len({*shown}) < len(shown):
            raise InputError(
                f"labels must be different words in every prompt, got {quoted_list(shown)} together"
            )
    return ClassLabels(words, (), None)


def _named_classes(labels: Sequence[str], classes: Sequence[str]) -> dict[str, str]:
    """Return the label of each class that a label names, ignoring case."""
    named: dict[str, str] = {}
    for label in labels:
        own = [name for name in classes if name.casefold() == label.casefold()]
        if own:
            named.setdefault(label if label in own else own[0], label)
    return named


def _is_ambiguous(
    unnamed: Sequence[str], named: Mapping[str, str], classes: Sequence[str], n_shown: int
) -> bool:
    """Return whether words that name no class could mean particular classes.

    They could if classes are numbers or truth values, if a word begins like a class ("negative" and
    "neg"), and if one word in a row names its class and several others do not.
    """
    left = [name for name in classes if name not in named]
    means_classes = all(map(is_number, classes)) or {name.casefold() for name in classes} == {
        "true",
        "false",
    }
    is_alike = any(_are_alike(word, name) for word in unnamed for name in left)
    is_partial = bool(named) and len(unnamed) > 1
    return (means_classes and not (named and len(left) == 1)) or is_alike or is_partial


def _are_alike(word: str, name: str) -> bool:
    """Return whether one of two texts begins like the other, as "neg" and "negative" or "in side"
    and "inside" do.

    Of a label of several words, each word counts, and all of them written as one.
    """
    pieces = re.findall(r"\w+", word.casefold())
    joined_name = "".join(re.findall(r"\w+", name.casefold()))
    return any(
        min(len(piece), len(joined_name)) >= _MIN_SHARED
        and (piece.startswith(joined_name) or joined_name.startswith(piece))
        for piece in [*pieces, "".join(pieces)]
    )


def _ambiguous_error(
    words: tuple[str, ...], named: Mapping[str, str], classes: Sequence[str], n_shown: int
) -> InputError:
    unnamed = iter([word for word in words if word not in named.values()])
    example = {name: named.get(name) or next(unnamed, None) for name in in_order(classes)}
    pairs = [(name, word) for name, word in example.items() if word is not None]
    python = ", ".join(f"{name!r}: {word!r}" for name, word in pairs)
    shell = ",".join(f"{name}={word}" for name, word in pairs)
    return InputError(
        f"labels ({quoted_list(words)}) could belong to the classes "
        f"({quoted_list(in_order(classes))}) in more than one way; for words that mean classes, "
        f"write labels={{{python}}} (--labels '{shell}') or as it should be; for words that mean "
        f"nothing, omit labels (default: {quoted_list(DEFAULT_LABELS[:n_shown])})"
    )
