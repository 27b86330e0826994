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
from itertools import product
from math import lcm
from typing import Any

from icl_lens.errors import InputError, quoted_list, short_repr
from icl_lens.prompts.name_order import in_order, is_number
from icl_lens.prompts.prompt import check_unicode

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
    arbitrary: tuple[str, ...]
    """The labels of the other classes, in the order of the classes."""
    choices: tuple[str, ...] | None
    """The labels of every prompt; None if they depend on the classes that a prompt shows."""

    def of_classes(self, classes: Sequence[str], turn: int, *, swapped: bool) -> dict[str, str]:
        """Return the label of each class in prompt `turn`; `swapped` reverses the order of the
        arbitrary labels.
        """
        arbitrary = iter(self.arbitrary[::-1] if swapped else self.arbitrary)
        label_of = {}
        for name in classes:
            if name in self.words:
                words = self.words[name]
                label_of[name] = words[turn % len(words)]
            else:
                label_of[name] = next(arbitrary)
        return label_of

    def fits(self, classes: Sequence[str]) -> bool:
        """Return whether a prompt that shows these classes has a label for each and shows every
        class with words.
        """
        with_words = set(self.words)
        return with_words <= {*classes} or (not self.arbitrary and {*classes} <= with_words)


def class_labels(labels: Labels | None, classes: Sequence[str], n_shown: int) -> ClassLabels:
    """Return the labels of a task's classes, of which every prompt shows `n_shown`.

    Raise InputError for labels that are too few, repeated or unknown, or that can be matched in
    more than one way.
    """
    if labels is None:
        if n_shown > len(DEFAULT_LABELS):
            raise InputError(
                f"labels must be {n_shown} words, got None; pass one per class (defaults: "
                f"{len(DEFAULT_LABELS)})"
            )
        return ClassLabels({}, DEFAULT_LABELS[:n_shown], DEFAULT_LABELS[:n_shown])
    if isinstance(labels, Mapping):
        return _from_mapping(labels, classes, n_shown)
    if not isinstance(labels, Sequence):
        raise InputError(
            "labels must be a sequence of words or a mapping from classes to words, got "
            f"{labels!r}; write labels={DEFAULT_LABELS[:2]!r}"
        )
    return _from_words(labels, classes, n_shown)


def _from_words(labels: Sequence[str], classes: Sequence[str], n_shown: int) -> ClassLabels:
    """Return the labels of a sequence of words."""
    words = (labels,) if isinstance(labels, str) else tuple(labels)
    check_unicode(*words, what="label")
    named = _named_classes(words, classes)
    unnamed = [word for word in words if word not in named.values()]
    means_nothing = set(words) <= set(DEFAULT_LABELS)
    has_word_per_class = bool(unnamed) and len(words) == len(classes) and not means_nothing
    if has_word_per_class and not named and all(map(is_number, classes)):
        named, unnamed = dict(zip(in_order(classes), words, strict=True)), []
    n_expected = len(named) if not unnamed and len(named) > n_shown else n_shown
    if not means_nothing:
        _check_not_one_per_class(words, classes, n_expected)
    if isinstance(labels, str) or len(words) != n_expected or len({*words}) != len(words):
        raise InputError(
            f"labels must be {n_expected} different words, one per class, got {short_repr(labels)}"
        )
    if unnamed and not means_nothing and _is_ambiguous(unnamed, named, classes):
        raise _ambiguous_error(words, named, classes, n_shown)
    words_of = {name: (word,) for name, word in named.items()}
    return ClassLabels(words_of, tuple(unnamed), words if len(words) == n_shown else None)


def _from_mapping(
    labels: Mapping[Any, str | Sequence[str]], classes: Sequence[str], n_shown: int
) -> ClassLabels:
    """Return the labels of a mapping {class: word} or {class: words}."""
    words_of: dict[str, tuple[str, ...]] = {}
    for key, value in labels.items():
        name = _class_of_key(key, classes)
        words_of[name] = _words_of_class(key, value)
    if len(words_of) < n_shown:
        missing = [name for name in in_order(classes) if name not in words_of]
        raise InputError(
            f"labels must have words for at least {n_shown} classes, got {len(words_of)}; add "
            f"{quoted_list(missing)}"
        )
    for turn in range(lcm(*map(len, words_of.values()))):
        words_of_turn = [words[turn % len(words)] for words in words_of.values()]
        if len({*words_of_turn}) < len(words_of_turn):
            raise InputError(
                "labels must be different words in every prompt, got "
                f"{quoted_list(words_of_turn)} together"
            )
    return ClassLabels(words_of, (), None)


def _class_of_key(key: Any, classes: Sequence[str]) -> str:
    """Return the class that a key names, exactly or else ignoring case; raise InputError unless
    there is exactly one.
    """
    text = str(key).strip()
    named = [name for name in classes if name == text]
    if not named:
        named = [name for name in classes if name.casefold() == text.casefold()]
    if len(named) != 1:
        raise InputError(
            f"labels must map classes ({quoted_list(in_order(classes))}) to words, got "
            f"{short_repr(key)}"
        )
    return named[0]


def _words_of_class(key: Any, value: Any) -> tuple[str, ...]:
    """Return the word or words of a class; raise InputError for none, or an empty one."""
    words: tuple[Any, ...] = (value,)
    if isinstance(value, Sequence) and not isinstance(value, str):
        words = tuple(value)
    check_unicode(*words, what="label")
    if not words or not all(word.strip() for word in words):
        raise InputError(
            f"labels must have a word for the class {key!r}, got {short_repr(value)}; add it"
        )
    return words


def _named_classes(labels: Sequence[str], classes: Sequence[str]) -> dict[str, str]:
    """Return the label of each class that a label names, ignoring case."""
    named: dict[str, str] = {}
    for label in labels:
        alike = [name for name in classes if name.casefold() == label.casefold()]
        if alike:
            named.setdefault(label if label in alike else alike[0], label)
    return named


def _is_ambiguous(unnamed: Sequence[str], named: Mapping[str, str], classes: Sequence[str]) -> bool:
    """Return whether words that name no class could mean particular classes.

    They could if classes are numbers or truth values, if a word begins like a class ("negative" and
    "neg"), and if one word in a row names its class and several others do not.
    """
    left = [name for name in classes if name not in named]
    are_truth_values = {name.casefold() for name in classes} == {"true", "false"}
    if (are_truth_values or all(map(is_number, classes))) and not (named and len(left) == 1):
        return True
    if any(_are_alike(word, name) for word, name in product(unnamed, left)):
        return True
    return bool(named) and len(unnamed) > 1


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


def _check_not_one_per_class(words: Sequence[str], classes: Sequence[str], n_shown: int) -> None:
    """Raise InputError for a word per class, where a prompt shows only some classes."""
    if len(words) != len(classes) or len({*words}) != len(words) or len(words) <= n_shown:
        return
    pairs = list(zip(in_order(classes), words, strict=True))
    raise InputError(
        f"labels must be {n_shown} different words, because every prompt shows {n_shown} of the "
        f"{len(classes)} classes, got {quoted_list(words)}; to show all classes, pass "
        f"classes='all' (--classes all), and to give each class its word, write "
        f"{_labels_by_class(pairs)}"
    )


def _labels_by_class(pairs: Sequence[tuple[str, str]]) -> str:
    """Return how to pass each class's word, in Python and in the shell."""
    python = ", ".join(f"{name!r}: {word!r}" for name, word in pairs)
    shell = ",".join(f"{name}={word}" for name, word in pairs)
    return f"labels={{{python}}} (--labels '{shell}')"


def _ambiguous_error(
    words: tuple[str, ...], named: Mapping[str, str], classes: Sequence[str], n_shown: int
) -> InputError:
    unnamed = iter([word for word in words if word not in named.values()])
    example = {name: named.get(name) or next(unnamed, None) for name in in_order(classes)}
    pairs = [(name, word) for name, word in example.items() if word is not None]
    return InputError(
        f"labels ({quoted_list(words)}) could belong to the classes "
        f"({quoted_list(in_order(classes))}) in more than one way; for words that mean classes, "
        f"write which is whose, as in {_labels_by_class(pairs)}; for words that mean "
        f"nothing, pass {', '.join(DEFAULT_LABELS[:n_shown])}"
    )
