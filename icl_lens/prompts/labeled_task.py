"""Tasks whose texts have classes: their texts become prompts with labels, in one of six layouts.

1. The task draws the texts of each prompt (`WordTask`, `TextTask`).
2. `class_labels` finds the label of each class. Labels that belong to no class are arbitrary words,
   which the model can only learn from the demonstrations; balanced layouts exchange them between
   prompts.
3. The layout orders the demonstrations.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, ClassVar, Literal, get_args

from icl_lens.errors import InputError, check_choice, quoted_list
from icl_lens.prompts.class_labels import DEFAULT_LABELS, ClassLabels, Labels, class_labels
from icl_lens.prompts.draw import N_PROMPTS, Draw, KeepTexts, check_sampling
from icl_lens.prompts.name_order import in_order
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Demonstration, Prompt, Template
from icl_lens.prompts.prompt_list import PromptList
from icl_lens.prompts.same_length import check_rows_align, texts_of_one_length

Layout = Literal["random", "last", "first", "order", "reorder", "imbalanced"]
_BALANCED: tuple[Layout, ...] = ("random", "last", "first")

# Limit of consecutive draws that do not show all classes that labels name.
MAX_SKIPPED = 10_000


class LabeledTask(ABC):
    """A task whose texts have classes."""

    has_one_true_class: ClassVar[bool] = False
    """Whether all queries that the task draws are of the same class."""
    name: str
    classes: Literal["binary", "all"] = "binary"

    @property
    def has_class_words(self) -> bool:
        """Whether the names of the classes are the label words by default."""
        return False

    def prompts(
        self,
        n: int = N_PROMPTS,
        *,
        seed: int = 0,
        layout: Layout = "random",
        demonstrations: int = 2,
        labels: Labels | None = None,
        same_length_for: Any = None,
        template: Template = DEFAULT_TEMPLATE,
    ) -> list[Prompt]:
        """Return `n` prompts, each with its answer; the same seed gives the same texts in every
        layout.

        Every prompt has a true class, that of its query, and a false class, with `demonstrations`
        texts each. By default, demonstrations are in random order, and both labels and both classes
        are the answer equally often, so that neither a constant answer nor the last label scores
        above chance. Two more layouts are balanced in the same way: "last" shows the true class
        last, next to the query, and "first" shows it first.

        The other layouts are the paper's: "order" puts the demonstrations of the true class last;
        "reorder" puts them first; "imbalanced" is "order" without the last one. A word task then
        asks only for words of its second category, the true class has the label `labels[0]` and the
        false class `labels[1]` (default: "foo" and "bar") in every prompt. With "order", the answer
        is also the last label, so a model that only copies the last label is always right.
        `Prompt.with_other_query` asks the same demonstrations for the other class.

        The default labels of your own data are the names of its classes; those of other tasks are
        "foo" and "bar". Labels belong to classes, and are not exchanged, if they name them, if
        `labels` is a mapping from classes to their words ({"0": "negative", "1": "positive"}), or
        if the classes are numbers: their words are then given in the order of the numbers. Every
        prompt then shows classes that have words. Several words of a class are used in turn by
        pairs of prompts: {"0": ["foo", "bar"], "1": ["bar", "foo"]} exchanges them. With
        `TextTask(classes="all")`, labels that name no class belong to the classes in alphabetical
        order in every prompt, and the false classes appear one after another in random order. Words
        that look like names of classes or values ("negative" for "neg", any for "True") are refused
        unless they are a mapping.

        `same_length_for`, a model, keeps only texts of one token length: the length that leaves the
        most texts in the smallest class. All rows of `il.tokenize(model, prompts,
        template=template)` then have their labels and end at the same positions. Patching between
        prompts requires this. `template` has no other use.

        Raise InputError for unknown tasks, layouts, splits and files, an unreachable Hub, a class
        with too few texts, too few labels, and labels that could belong to classes in more than one
        way; with `same_length_for` also for labels with different numbers of tokens. Source:
        docs/howto/own_dataset.md.

        Example:
            >>> prompts = il.WordTask("sentiment-number").prompts(3)
            >>> len(prompts), len(prompts[0].demonstrations), [prompt.answer for prompt in prompts]
            (3, 4, ['foo', 'bar', 'bar'])
        """
        check_choice("layout", layout, get_args(Layout))
        n, seed, demonstrations = check_sampling(n, seed, demonstrations)
        if layout == "imbalanced" and demonstrations < 2:
            raise InputError(
                f"demonstrations must be at least 2 with layout 'imbalanced', got {demonstrations}"
            )

        def keep(groups: list[list[str]], separator: str) -> list[list[str]]:
            label = next(_words(labels), DEFAULT_LABELS[0])
            separated = template.separated_by(separator)
            return texts_of_one_length(groups, label, same_length_for, separated)

        uses_class_words = labels is None and self.has_class_words
        draws = self._draws(
            demonstrations,
            random.Random(seed),
            None if same_length_for is None else keep,
            is_balanced=uses_class_words,
        )
        first = next(draws)
        if uses_class_words:
            labels = {name: name for name in first.task_classes}
        words = class_labels(labels, first.task_classes, len(first.classes))
        draws = islice(_with_classes(chain([first], draws), words), n)
        prompts = PromptList(self._prompts_of_draws(draws, words, layout), self.name)
        if same_length_for is not None:
            check_rows_align(prompts, same_length_for, template)
        return prompts

    def _prompts_of_draws(
        self, draws: Iterable[Draw], words: ClassLabels, layout: Layout
    ) -> Iterator[Prompt]:
        """Yield the prompt of each draw; balanced layouts exchange labels and classes between
        prompts.
        """
        exchanges = layout in _BALANCED and self.classes == "binary"
        alternates = layout in _BALANCED and self.has_one_true_class
        for number, draw in enumerate(draws):
            turn = number // 2 if alternates else number
            classes = [draw.true[0], draw.false[0][0]]
            if self.classes == "all":
                classes = draw.classes
            label_of = words.of_classes(classes, number // 2, swapped=exchanges and turn % 2 == 1)
            choices = words.choices or tuple(label_of[name] for name in draw.classes)
            asks_other_class = alternates and number % 2 == 1
            if exchanges and not alternates and words.words:
                # Labels that belong to classes are not swapped: their queries alternate instead.
                asks_other_class = label_of[draw.true[0]] != choices[number % 2]
            if asks_other_class:
                draw = draw.with_false_query()
            yield _prompt(draw, label_of, choices, layout)

    @abstractmethod
    def digest(self) -> str:
        """Return a 16-digit hexadecimal digest of the task's data."""

    @abstractmethod
    def _draws(
        self,
        demonstrations: int,
        rng: random.Random,
        keep: KeepTexts | None = None,
        *,
        is_balanced: bool = False,
    ) -> Iterator[Draw]:
        """Yield endless draws of texts; `keep` filters the texts of each class.

        With `is_balanced`, queries of all classes are drawn equally often.
        """


def _words(labels: Labels | None) -> Iterator[str]:
    """Yield the words of `labels`, for a mapping those of all classes."""
    if labels is None:
        return
    for entry in labels.values() if isinstance(labels, Mapping) else labels:
        if isinstance(entry, str):
            yield entry
        else:
            yield from entry


def _prompt(
    draw: Draw, label_of: dict[str, str], choices: tuple[str, ...], layout: Layout
) -> Prompt:
    """Return the prompt of one draw: its texts with the labels of their classes, ordered by
    `layout`.
    """
    true_class, true_texts = draw.true
    answer = label_of[true_class]
    true = [Demonstration(text, answer) for text in true_texts]
    false = []
    for class_name, texts in draw.false:
        false += [Demonstration(text, label_of[class_name]) for text in texts]
    if layout in ("reorder", "first"):
        demonstrations = [*true, *false]
    elif layout == "imbalanced":
        demonstrations = [*false, *true[:-1]]
    else:
        demonstrations = [*false, *true]
    if layout == "random":
        # The generator is seeded by the texts, so that all layouts have the same texts.
        random.Random(draw.order_seed).shuffle(demonstrations)
    other_query = None
    if draw.false_query is not None:
        first_false_class, _ = draw.false[0]
        other_query = Demonstration(draw.false_query, label_of[first_false_class])
    classes = {label: class_name for class_name, label in label_of.items()}
    return Prompt(
        demonstrations,
        draw.query,
        answer,
        choices,
        classes=classes,
        other_query=other_query,
        separator=draw.separator,
    )


def _with_classes(draws: Iterable[Draw], labels: ClassLabels) -> Iterator[Draw]:
    """Yield the draws whose classes `labels` fit; raise InputError after `MAX_SKIPPED` others in a
    row.
    """
    n_skipped = 0
    for draw in draws:
        if labels.fits(draw.classes):
            n_skipped = 0
            yield draw
        elif (n_skipped := n_skipped + 1) > MAX_SKIPPED:
            raise InputError(
                "labels must name classes of the same prompt, got the names of "
                f"{quoted_list(in_order(labels.words))}, of which the split has no queries; use "
                "other labels or another split"
            )
