"""Word tasks: prompts from two categories of a word list."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import permutations
from math import perm
from pathlib import Path
from typing import Any, ClassVar

from icl_lens.errors import InputError, did_you_mean, first_line, quoted_list
from icl_lens.foundation.digest import json_digest
from icl_lens.foundation.files import parse_json
from icl_lens.prompts.datasets import DATASETS, SUFFIXES
from icl_lens.prompts.draw import (
    SURROGATE,
    Draw,
    KeepTexts,
    TextPool,
    own_separator,
    spelling_key,
)
from icl_lens.prompts.labeled_task import LabeledTask
from icl_lens.prompts.pair_task import bundled_pairs
from icl_lens.prompts.prompt import SPACE, check_unicode
from icl_lens.prompts.row_counts import check_path

WORD_TASKS = ("sentiment-number", "number-sentiment", "animal-country", "country-animal")
"""The paper's word tasks. The second category is the true class, that of the query."""


@dataclass(frozen=True)
class WordTask(LabeledTask):
    """A task "FALSE-TRUE" from two categories of a word list.

    The paper's are "sentiment-number", "number-sentiment", "animal-country" and "country-animal".
    `path` may be another word list, a .json file with {"categories": {name: [words]}}. Words that
    are in both categories are skipped.

    Raise InputError for an inaccessible path. Source: docs/howto/own_dataset.md.

    Example:
        >>> print(il.WordTask("animal-country").prompts(1, layout="order")[0])
        crab : bar buffalo : bar Scotland : foo Kenya : foo Bolivia :
    """

    has_one_true_class: ClassVar[bool] = True

    name: str
    path: str | Path | None = None

    def __post_init__(self) -> None:
        check_unicode(self.name)
        check_path(self.path)

    def words(self) -> dict[str, list[str]]:
        """Return the words of the false and of the true category; those that are in both are left
        out.

        Raise InputError for an unknown category and an unreadable word list.

        Example:
            >>> il.WordTask("animal-country").words()["country"][:2]
            ['France', 'Germany']
        """
        false, false_words, true, true_words = self._words()
        return {false: false_words, true: true_words}

    def digest(self) -> str:
        """Return a 16-digit hexadecimal digest of the word list."""
        return json_digest(word_list(self.path))

    def _draws(
        self,
        demonstrations: int,
        rng: random.Random,
        keep: KeepTexts | None = None,
        *,
        is_balanced: bool = False,
    ) -> Iterator[Draw]:
        """Yield endless draws; none repeats until every possible draw has been used.

        Raise InputError for an unknown task, an unreadable word list, and a category with too few
        words.
        """
        false, false_words, true, true_words = self._words()
        separator = SPACE
        if self.path is not None:
            separator = own_separator([*false_words, *true_words])
        if keep is not None:
            false_words, true_words = keep([false_words, true_words], separator)
        for category, words, needed in (
            (false, false_words, demonstrations),
            (true, true_words, demonstrations + 1),
        ):
            if len(words) < needed:
                raise InputError(
                    f"category {category!r} must have at least {needed} words that are not in the "
                    f"other category, got {len(words)}; use fewer demonstrations"
                )
        false_pool = TextPool(false_words, key=self._spelling)
        n_false_draws = perm(len(false_words), demonstrations)
        n_true_draws = perm(len(true_words), demonstrations + 1)
        seen = set()
        while True:
            false_texts = rng.sample(false_words, demonstrations)
            *true_texts, query = rng.sample(true_words, demonstrations + 1)
            words_in_order = (*false_texts, *true_texts, query)
            if words_in_order in seen:
                continue
            seen.add(words_in_order)
            if len(seen) == n_false_draws * n_true_draws:
                seen.clear()
            false_query = false_pool.unused([*false_texts, *true_texts], f"{query} {false_texts}")
            yield Draw(
                [(false, false_texts)],
                (true, true_texts),
                query,
                false_query,
                (false, true),
                separator,
            )

    def _words(self) -> tuple[str, list[str], str, list[str]]:
        """Return the false category and its words, then the true category and its words."""
        categories = word_list(self.path)
        false, _, true = self.name.partition("-")
        if false not in categories or true not in categories or false == true:
            hint = did_you_mean(self.name, task_names(self.path))
            raise InputError(
                f"unknown task {self.name!r}{hint}; choose a sentence "
                f"dataset ({', '.join(DATASETS)}), pairs ({', '.join(bundled_pairs())}), a word "
                f"task such as {WORD_TASKS[0]!r} from two of the categories "
                f"{', '.join(sorted(categories))}, or pass the path of your own sentences or pairs"
            )
        false_words, true_words = map(self._different, (categories[false], categories[true]))
        only_false = [word for key, word in false_words.items() if key not in true_words]
        only_true = [word for key, word in true_words.items() if key not in false_words]
        return false, only_false, true, only_true

    @property
    def _spelling(self) -> Callable[[str], str]:
        """What words of the same spelling share.

        The bundled words are told apart by case, because "turkey" and "Turkey" are in prompts of
        published numbers.
        """
        return str if self.path is None else spelling_key

    def _different(self, words: Iterable[str]) -> dict[str, str]:
        """Return the words by their spelling, the first of each spelling."""
        by_spelling: dict[str, str] = {}
        for word in words:
            by_spelling.setdefault(self._spelling(word), word)
        return by_spelling


def task_names(path: str | Path | None = None) -> list[str]:
    """Return the names of all tasks, with the word tasks of the bundled word list or a .json file."""
    names = [*WORD_TASKS, *DATASETS, *bundled_pairs()]
    for first, second in permutations(word_list(path), 2):
        names.append(f"{first}-{second}")
    return names


def word_list(path: str | Path | None = None) -> dict[str, list[str]]:
    """Return the categories and words of the bundled word list or a .json file.

    Raise InputError for a missing or unreadable file.

    Example:
        >>> from icl_lens.prompts.word_task import word_list
        >>> word_list()["number"][:2]
        ['one', 'two']
    """
    source = files("icl_lens") / "bundled" / "words.json" if path is None else Path(path)
    if not source.is_file():
        raise InputError(
            f"there is no word list {str(source)!r}; pass the path of an existing file"
        )
    try:
        categories = parse_json(source.read_text(encoding="utf-8-sig"))["categories"]
        wrong = _fault_of(categories)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        wrong, categories = f"cannot be read: {type(error).__name__} {first_line(error)}", {}
    if wrong:
        raise InputError(
            f'{str(source)!r} is not a word list ({wrong}); write {{"categories": {{name: '
            f"[words]}}}}, pairs as "
            f'[{{"input": text, "output": answer}}], or pass sentences in a file of type '
            f"{quoted_list(SUFFIXES)}"
        )
    return categories


def _fault_of(categories: Any) -> str | None:
    """Return the fault of a word list's categories, None if they are valid."""
    if not isinstance(categories, dict):
        return "categories must be an object"
    for name, words in categories.items():
        if not isinstance(words, list):
            return f"category {name!r} must be a list"
        for word in words:
            if not isinstance(word, str) or not word.strip() or SURROGATE.search(word):
                return f"category {name!r} must contain words, got {word!r:.40}"
    return None
