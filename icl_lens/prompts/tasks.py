"""Tasks as lists of prompts: two categories of words, texts of a labeled dataset, or pairs.

1. A `WordTask` or `TextTask` draws the texts of each prompt.
2. `load_task` labels and orders them. Labels are arbitrary words ("foo", "bar"), so a model can only learn them from
   the demonstrations, unless `class_labels` finds that they belong to classes.
3. A `PairTask` draws pairs of a text and its own answer.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from icl_lens.errors import InputError, check_choice, check_integers
from icl_lens.prompts.class_labels import DEFAULT_LABELS, ClassLabels, Labels, class_labels
from icl_lens.prompts.datasets import DATASETS, column_names
from icl_lens.prompts.draw import Draw
from icl_lens.prompts.pair_task import PAIR_COLUMNS, PairTask
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Demonstration, Prompt, Template, in_order, quoted_list
from icl_lens.prompts.text_task import TextTask
from icl_lens.prompts.token_alignment import require_fast_tokenizer, tokenize_texts
from icl_lens.prompts.tokenize import tokenize
from icl_lens.prompts.word_task import WordTask

Layout = Literal["order", "reorder", "imbalanced", "random"]
QueryClass = Literal["true", "false", "both"]

MAX_PROMPTS = 1_000_000
"""Maximum number of prompts per call, which limits memory."""

# Limit of consecutive draws that do not show all classes that labels name.
MAX_SKIPPED = 10_000


def named_task(name: str, path: str | Path | None = None) -> WordTask | TextTask | PairTask:
    """Return the task of this name, read from `path` if given, with default settings.

    A file with the columns input and output contains pairs; other .json files with rows or columns, and all other
    files, contain labeled texts; a .json file with "categories" is a word list.
    """
    if path is None:
        return TextTask(name) if str(name) in DATASETS else WordTask(name)
    columns = column_names(path)
    if {*PAIR_COLUMNS} <= {*columns} and not {*TextTask.columns} <= {*columns}:
        return PairTask(name, path)
    is_word_list = str(path).endswith(".json") and (not columns or "categories" in columns)
    return WordTask(name, path) if is_word_list else TextTask(name, path)


def load_task(
    task: str | TextTask | PairTask,
    *,
    n: int = 1000,
    seed: int = 0,
    layout: Layout = "random",
    demonstrations: int = 2,
    labels: Labels | None = None,
    balanced: bool | None = None,
    query_class: QueryClass | None = None,
    path: str | Path | None = None,
    same_length_for: Any = None,
    template: Template = DEFAULT_TEMPLATE,
) -> list[Prompt]:
    """Return prompts of a word task ("sentiment-number"), a text task ("sst2") or pairs, each with its answer.

    Word tasks are "FALSE-TRUE" for any two categories of the word list. Text tasks are "sst2", "trec", "agnews",
    "ethos" and "amazon", downloaded once from the Hub. To use your own data under any name, set `path` to a .jsonl,
    .csv, .tsv, .json or .parquet file or folder of labeled texts, to a word list (.json), or to a file with the columns
    input and output, whose answers are words of their own (`PairTask`). `TextTask` sets columns, split, length limit
    and number of classes: `load_task(TextTask("reviews", "reviews.csv", columns=("review", "stars")))`.

    Every prompt has a true class, that of its query, and a false class, with `demonstrations` texts each. By default,
    demonstrations are shuffled, so that neither a constant answer nor the last label scores above chance: the queries
    of a word task alternate between both classes (`query_class="both"`), and both labels are the answer equally often
    (`balanced`). `balanced` swaps the two labels in every second prompt or, with both query classes, every second pair
    of prompts.

    The other layouts are the paper's: "order" puts the demonstrations of the true class last, next to the query;
    "reorder" puts them first; "imbalanced" is "order" without the last one. The true class then has the label
    `labels[0]` and the false class `labels[1]` (default: "foo" and "bar") in every prompt. With "order", the answer is
    also the last label, so a model that only copies the last label is always right. The same seed gives the same texts
    in every layout.

    `query_class="false"` combines the same demonstrations with a query of the (first) false class and its answer.

    Labels belong to classes, and are not exchanged, if they name them, if `labels` is a mapping from classes to their
    words ({"0": "negative", "1": "positive"}), or if the classes are numbers: their words are then given in the order
    of the numbers. `balanced` then balances the queries, and every prompt shows classes that have words. Several words
    of a class are used in turn by pairs of prompts: {"0": ["foo", "bar"], "1": ["bar", "foo"]} exchanges them. With
    `TextTask(classes="all")`, labels that name no class belong to the classes in alphabetical order in every prompt,
    and the false classes appear one after another in random order. Words that look like names of classes or values
    ("negative" for "neg", any for "True") are refused unless they are a mapping.

    With pairs, every prompt shows `demonstrations` pairs in random order and asks for the output of another; its
    `labels` are their outputs and the answer. `labels`, `balanced` and `query_class` do not apply.

    `same_length_for`, a model, keeps only texts of one token length: the length that leaves the most texts in the
    smallest class. All rows of `il.tokenize(model, prompts, template=template)` then have their labels and end at the
    same positions. Patching between prompts requires this. `template` has no other use.

    Raise InputError for unknown names, layouts, splits and files, an unreachable Hub, a class with too few texts, too
    few labels, and labels that could belong to classes in more than one way; with `same_length_for` also for labels
    with different numbers of tokens.
    Source: docs/howto/own_dataset.md.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=3)
        >>> len(prompts), len(prompts[0].demonstrations), [prompt.answer for prompt in prompts]
        (3, 4, ['foo', 'bar', 'bar'])
    """
    if not isinstance(task, str) and path is not None:
        kind = type(task).__name__
        raise InputError(f"path must be None with a {kind}, got {str(path)!r}; set it in {kind}(path=...)")
    source = named_task(task, path) if isinstance(task, str) else task
    check_choice("layout", layout, get_args(Layout))
    given_query_class = query_class
    if query_class is None:
        query_class = "both" if layout == "random" else "true"
    check_choice("query_class", query_class, get_args(QueryClass))
    check_integers(n=n, demonstrations=demonstrations, seed=seed)
    if not 1 <= n <= MAX_PROMPTS:
        raise InputError(f"n must be between 1 and {MAX_PROMPTS:,}, got {n}")
    minimum = 2 if layout == "imbalanced" else 1
    if demonstrations < minimum:
        raise InputError(f"demonstrations must be at least {minimum} with layout {layout!r}, got {demonstrations}")
    if isinstance(source, PairTask):
        _check_no_classes(labels=labels, balanced=balanced or None, query_class=given_query_class)
        if layout not in ("order", "random"):
            raise InputError(f"layout must be 'random' or 'order' for pairs, which have no classes, got {layout!r}")
        is_kept = None if same_length_for is None else partial(_pairs_of_one_length, same_length_for, template)
        return list(islice(source.prompts(demonstrations, random.Random(seed), is_kept), n))
    all_classes = isinstance(source, TextTask) and source.classes == "all"
    if balanced is None:
        balanced = layout == "random" and not all_classes
    if balanced and all_classes:
        raise InputError("balanced must be None or False with TextTask(classes='all'), got True; omit it")
    alternates = query_class == "both" and isinstance(source, WordTask)

    def keep(groups: list[list[str]]) -> list[list[str]]:
        return _of_one_length(groups, next(_words(labels), DEFAULT_LABELS[0]), same_length_for, template)

    draws = source.draws(demonstrations, random.Random(seed), None if same_length_for is None else keep)
    first = next(draws)
    words = class_labels(labels, first.task_classes, len(first.classes))
    prompts = []
    for number, draw in enumerate(islice(_with_classes(chain([first], draws), words), n)):
        swapped = balanced and (number // 2 if alternates else number) % 2
        classes = draw.classes if all_classes else [draw.true[0], draw.false[0][0]]
        label_of = words.of_classes(classes, number // 2, swapped=bool(swapped))
        choices = words.choices or tuple(label_of[name] for name in draw.classes)
        if alternates:
            query_other_class = bool(number % 2)
        else:  # labels that belong to classes are not swapped, so the queries are chosen by their labels
            is_fixed = balanced and words.words and isinstance(source, TextTask)
            query_other_class = bool(is_fixed) and label_of[draw.true[0]] != choices[number % 2]
        if query_other_class:
            draw = draw.with_false_query()
        prompts.append(_build_prompt(draw, label_of, choices, layout, query_class))
    if same_length_for is not None:
        _check_rows_align(prompts, same_length_for, template)
    return prompts


def _words(labels: Labels | None) -> Iterator[str]:
    """Yield the words of `labels`, for a mapping those of all classes."""
    for given in labels.values() if isinstance(labels, Mapping) else labels or ():
        yield from (given,) if isinstance(given, str) else given


def _check_no_classes(**given: object) -> None:
    """Raise InputError for an argument that has no effect on pairs."""
    for name, value in given.items():
        if value is not None:
            raise InputError(f"{name} must be None for pairs, whose answers are words of their own, got {value!r}")


def split_by_query(
    prompts: Sequence[Prompt], n: int, *, assigned: Mapping[str, int] | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Return two lists of at most n prompts that share no query: one to locate heads on, one to test them on.

    `prompts` are those of `load_task`, at least three times n, because all prompts of a query go to the same list. Each
    list has equally many prompts of every class and label. `assigned` maps queries to their list, 0 or 1. Raise
    InputError if the prompts have fewer than two queries.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=60)
        >>> locating, testing = il.split_by_query(prompts, 20)
        >>> len(locating), len(testing), {p.query for p in locating} & {p.query for p in testing}
        (20, 20, set())
    """
    assigned = assigned or {}
    queries = list(dict.fromkeys(prompt.query for prompt in prompts))
    if len(queries) < 2:
        raise InputError(f"prompts must have at least two queries, got {len(queries)}; use more prompts or more data")
    free = [query for query in queries if query not in assigned]
    first = set(free[::4]) | set(free[1::4])  # of both classes, which alternate
    first |= {query for query in queries if assigned.get(query) == 0}
    halves: tuple[list[Prompt], list[Prompt]] = ([], [])
    for turn in range(4):  # `load_task` balances classes and labels within four prompts
        for half, is_first in zip(halves, (True, False), strict=True):
            same = [prompt for prompt in prompts[turn::4] if (prompt.query in first) == is_first]
            half += same[: (n + 3 - turn) // 4]
    return halves


def _of_one_length(groups: list[list[str]], label: str, model: Any, template: Template) -> list[list[str]]:
    """Return the texts of each group that have one token length: that which leaves the smallest group the most texts.

    Tokens are counted in context, from the start of the prompt to the label and from the label to the end of the
    query, since some tokenizers split a word differently at the start.
    """
    texts = list(dict.fromkeys(text for group in groups for text in group))
    lengths = dict(zip(texts, _token_lengths([(text, label) for text in texts], model, template), strict=True))
    counts = [Counter(lengths[text] for text in group) for group in groups]
    best = max(sorted({*lengths.values()}), key=lambda length: min(count[length] for count in counts))
    return [[text for text in group if lengths[text] == best] for group in groups]


def _pairs_of_one_length(model: Any, template: Template, pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the pairs with the most frequent numbers of tokens of their texts and outputs."""
    lengths = _token_lengths(pairs, model, template)
    (best, _), *_ = Counter(lengths).most_common(1)
    return [pair for pair, length in zip(pairs, lengths, strict=True) if length == best]


def _token_lengths(pairs: list[tuple[str, str]], model: Any, template: Template) -> list[tuple[int, int, int]]:
    """Return for each text and label where the label begins and how long it is, and the length of a query after it."""
    shown = [Prompt([Demonstration(text, label)], text) for text, label in pairs]
    tokenized = tokenize_texts(require_fast_tokenizer(model), list(map(template.render, shown)))
    labels = [one.range_of(one.rendered.label_spans[0]) for one in tokenized]
    return [(start, end - start, len(one.ids) - end) for (start, end), one in zip(labels, tokenized, strict=True)]


def _check_rows_align(prompts: list[Prompt], model: Any, template: Template) -> None:
    """Raise InputError for the first row whose labels or end are at other positions than those of row 0."""
    batch = tokenize(model, prompts, template=template, shared_prefix="append")
    ranges = torch.cat([batch.label_ranges.flatten(1), batch.last[:, None]], dim=1)
    positions = torch.cat([batch.label_ranges[..., 1] - 1, batch.last[:, None]], dim=1)
    differs = (ranges != ranges[0]).any(-1)
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise InputError(
            f"labels must have the same number of tokens, got {quoted_list(batch.labels)}, which put the labels and "
            f"end of prompt {row} at {positions[row].tolist()} and of prompt 0 at {positions[0].tolist()}; choose "
            "other labels"
        )


def _build_prompt(
    draw: Draw, label_of: dict[str, str], choices: tuple[str, ...], layout: Layout, query_class: QueryClass
) -> Prompt:
    """Return the prompt of one draw: its texts with the labels of their classes, ordered by `layout`."""
    false = [Demonstration(text, label_of[class_name]) for class_name, texts in draw.false for text in texts]
    true = [Demonstration(text, label_of[draw.true[0]]) for text in draw.true[1]]
    shown = [*true, *false] if layout == "reorder" else [*false, *(true[:-1] if layout == "imbalanced" else true)]
    if layout == "random":  # with a generator seeded by the texts, so that all layouts have the same texts
        random.Random(draw.order_seed).shuffle(shown)
    if query_class == "false":
        draw = draw.with_false_query()
    classes = {label: class_name for class_name, label in label_of.items()}
    return Prompt(shown, draw.query, label_of[draw.true[0]], choices, classes=classes)


def _with_classes(draws: Iterable[Draw], labels: ClassLabels) -> Iterator[Draw]:
    """Yield the draws whose classes `labels` fit; raise InputError after `MAX_SKIPPED` others in a row."""
    n_skipped = 0
    for draw in draws:
        if labels.fits(draw.classes):
            n_skipped = 0
            yield draw
        elif (n_skipped := n_skipped + 1) > MAX_SKIPPED:
            raise InputError(
                f"labels must name classes of the same prompt, got the names of {quoted_list(in_order(labels.words))}, "
                "of which the split has no queries; use other labels or another split"
            )
