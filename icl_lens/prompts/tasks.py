"""Tasks as lists of prompts: two categories of words, or texts of a labeled dataset.

1. A `WordTask` or `TextTask` draws the texts of each prompt.
2. `load_task` labels and orders them. Labels are arbitrary words ("foo", "bar"), so a model can only learn them from
   the demonstrations.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from icl_lens.errors import InputError, check_choice, check_integers
from icl_lens.prompts.datasets import DATASETS
from icl_lens.prompts.draw import Draw
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Demonstration, Prompt, Template, quoted_list
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


# Default labels. All begin with different tokens in the vocabularies of GPT-2 and the bundled models.
_LABELS = ("foo", "bar", "baz", "qux", "dax", "wug", "mib", "zib", "toma", "gorp", "nerf", "lorp", "vint", "kiki")


def named_task(name: str, path: str | Path | None = None) -> WordTask | TextTask:
    """Return the word task or text task of this name, read from `path` if given, with default settings."""
    is_text = str(name) in DATASETS if path is None else not str(path).endswith(".json")
    return TextTask(name, path) if is_text else WordTask(name, path)


def load_task(
    task: str | TextTask,
    *,
    n: int = 1000,
    seed: int = 0,
    layout: Layout = "order",
    demonstrations: int = 2,
    labels: Sequence[str] | None = None,
    balanced: bool | None = None,
    query_class: QueryClass | None = None,
    path: str | Path | None = None,
    same_length_for: Any = None,
    template: Template = DEFAULT_TEMPLATE,
) -> list[Prompt]:
    """Return prompts of a word task ("sentiment-number") or a text task ("sst2"), each with its answer.

    Word tasks are "FALSE-TRUE" for any two categories of the word list. Text tasks are "sst2", "trec", "agnews",
    "ethos" and "amazon", downloaded once from the Hub. To use your own data under any name, set `path` to a .jsonl,
    .csv or .parquet file or folder, or to a word list (.json). `TextTask` sets columns, split, length limit and number
    of classes: `load_task(TextTask("reviews", "reviews.csv", columns=("review", "stars")))`.

    Every prompt has a true class, that of its query, and a false class, with `demonstrations` texts each. The labels
    of the true and false class are `labels[0]` and `labels[1]` (default: "foo" and "bar"). `layout` orders the
    demonstrations: "order" puts those of the true class last, next to the query; "reorder" puts them first;
    "imbalanced" is "order" without the last one. The same seed gives the same texts. With these layouts, by
    default, the answer is the same label in every prompt. With "order" (the paper's layout and the default here), it is
    also the last label, so a model that only copies the last label is always right.

    `layout="random"`, the default of the commands, shuffles the demonstrations, so that neither a constant answer
    nor the last label scores above chance: the queries of a word task alternate between both classes
    (`query_class="both"`), and both labels are the answer equally often (`balanced`). `balanced` swaps the two labels
    in every second prompt or, with both query classes, every second pair of prompts.
    `query_class="false"` combines the same demonstrations with a query of the (first) false class and its answer.

    A label that names a class always belongs to that class, and every prompt shows this class; `balanced` then balances
    the queries. With `TextTask(classes="all")`, the other labels belong to the other classes in alphabetical order in
    every prompt, and the false classes appear one after another in random order.

    `same_length_for`, a model, keeps only texts of one token length: the length that leaves the most texts in the
    smallest class. All rows of `il.tokenize(model, prompts, template=template)` then have their labels and end at the
    same positions. Patching between prompts requires this. `template` has no other use.

    Raise InputError for unknown names, layouts, splits and files, an unreachable Hub, a class with too few texts, and
    too few labels; with `same_length_for` also for labels with different numbers of tokens.
    Source: docs/howto/own_dataset.md.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=3)
        >>> len(prompts), len(prompts[0].demonstrations), prompts[0].answer
        (3, 4, 'foo')
    """
    if isinstance(task, TextTask) and path is not None:
        raise InputError(f"path must be None with a TextTask, got {str(path)!r}; set it in TextTask(path=...)")
    source = task if isinstance(task, TextTask) else named_task(task, path)
    check_choice("layout", layout, get_args(Layout))
    if query_class is None:
        query_class = "both" if layout == "random" else "true"
    check_choice("query_class", query_class, get_args(QueryClass))
    check_integers(n=n, demonstrations=demonstrations, seed=seed)
    if not 1 <= n <= MAX_PROMPTS:
        raise InputError(f"n must be between 1 and {MAX_PROMPTS:,}, got {n}")
    minimum = 2 if layout == "imbalanced" else 1
    if demonstrations < minimum:
        raise InputError(f"demonstrations must be at least {minimum} with layout {layout!r}, got {demonstrations}")
    if labels is not None and not isinstance(labels, Sequence):
        raise InputError(f"labels must be a sequence that starts with the true class's label, got {labels!r}")
    all_classes = isinstance(source, TextTask) and source.classes == "all"
    if balanced is None:
        balanced = layout == "random" and not all_classes
    if balanced and all_classes:
        raise InputError("balanced must be None or False with TextTask(classes='all'), got True; omit it")
    alternates = query_class == "both" and isinstance(source, WordTask)

    def keep(groups: list[list[str]]) -> list[list[str]]:
        return _of_one_length(groups, labels[0] if labels else _LABELS[0], same_length_for, template)

    draws = source.draws(demonstrations, random.Random(seed), None if same_length_for is None else keep)
    first = next(draws)
    choices = _checked_labels(labels, len(first.classes))
    named = _named_classes(choices, first.task_classes)
    prompts = []
    for number, draw in enumerate(islice(_with_classes(chain([first], draws), {*named}), n)):
        swapped = balanced and (number // 2 if alternates else number) % 2
        classes = draw.classes if all_classes else [draw.true[0], draw.false[0][0]]
        label_of = _labels_of_classes(classes, choices[::-1] if swapped else choices, named)
        if alternates:
            query_other_class = bool(number % 2)
        else:  # labels that belong to classes are not swapped, so the queries are chosen by their labels
            is_fixed = balanced and named and isinstance(source, TextTask)
            query_other_class = bool(is_fixed) and label_of[draw.true[0]] != choices[number % 2]
        if query_other_class:
            draw = draw.with_false_query()
        prompts.append(_build_prompt(draw, label_of, choices, layout, query_class))
    if same_length_for is not None:
        _check_rows_align(prompts, same_length_for, template, choices)
    return prompts


def split_by_query(
    prompts: Sequence[Prompt], n: int, *, assigned: Mapping[str, int] | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Return two lists of at most n prompts that share no query: one to locate heads on, one to test them on.

    `prompts` are those of `load_task`, at least three times n, because all prompts of a query go to the same list. Each
    list has equally many prompts of every class and label. `assigned` maps queries to their list, 0 or 1. Raise
    InputError if the prompts have fewer than two queries.

    Example:
        >>> prompts = il.load_task("sentiment-number", layout="random", n=60)
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
    shown = [Prompt([Demonstration(text, label)], text) for text in texts]
    lengths = {}
    for text, tokenized in zip(
        texts, tokenize_texts(require_fast_tokenizer(model), list(map(template.render, shown))), strict=True
    ):
        _, label_end = tokenized.range_of(tokenized.rendered.label_spans[0])
        lengths[text] = label_end, len(tokenized.ids) - label_end
    counts = [Counter(lengths[text] for text in group) for group in groups]
    best = max(sorted({*lengths.values()}), key=lambda length: min(count[length] for count in counts))
    return [[text for text in group if lengths[text] == best] for group in groups]


def _check_rows_align(prompts: list[Prompt], model: Any, template: Template, choices: tuple[str, ...]) -> None:
    """Raise InputError for the first row whose labels or end are at other positions than those of row 0."""
    batch = tokenize(model, prompts, template=template, labels=choices, shared_prefix="append")
    ranges = torch.cat([batch.label_ranges.flatten(1), batch.last[:, None]], dim=1)
    positions = torch.cat([batch.label_ranges[..., 1] - 1, batch.last[:, None]], dim=1)
    differs = (ranges != ranges[0]).any(-1)
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise InputError(
            f"labels must have the same number of tokens, got {quoted_list(choices)}, which put the labels and end of "
            f"prompt {row} at {positions[row].tolist()} and of prompt 0 at {positions[0].tolist()}; choose other labels"
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


def _named_classes(labels: Sequence[str], classes: Sequence[str]) -> dict[str, str]:
    """Return the label of each class that a label names, ignoring case."""
    named: dict[str, str] = {}
    for label in labels:
        own = [name for name in classes if name.casefold() == label.casefold()]
        if own:
            named.setdefault(label if label in own else own[0], label)
    return named


def _with_classes(draws: Iterable[Draw], named: set[str]) -> Iterator[Draw]:
    """Yield the draws that show all `named` classes; raise InputError after `MAX_SKIPPED` others in a row."""
    n_skipped = 0
    for draw in draws:
        if named.issubset(draw.classes):
            n_skipped = 0
            yield draw
        elif (n_skipped := n_skipped + 1) > MAX_SKIPPED:
            raise InputError(
                f"labels must name classes of the same prompt, got the names of {quoted_list(sorted(named))}, of which "
                "the split has no queries; use other labels or another split"
            )


def _labels_of_classes(classes: Sequence[str], labels: Sequence[str], named: Mapping[str, str]) -> dict[str, str]:
    """Return the label of each class: the one that names it, else the next label that names no class."""
    others = iter([label for label in labels if label not in named.values()])
    return {name: named[name] if name in named else next(others) for name in classes}


def _checked_labels(labels: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if labels is None:
        if count > len(_LABELS):
            raise InputError(f"labels must be {count} words, got None; pass one per class (defaults: {len(_LABELS)})")
        return _LABELS[:count]
    if isinstance(labels, str) or len(labels) != count or len(set(labels)) != count:
        raise InputError(f"labels must be {count} different words, one per class, got {labels!r}")
    return tuple(labels)
