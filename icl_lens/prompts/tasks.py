"""Find a task by name, and split prompts by their queries."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from icl_lens.errors import InputError, short_repr, warn_user
from icl_lens.prompts.class_labels import Labels
from icl_lens.prompts.datasets import DATASETS, column_names
from icl_lens.prompts.draw import N_PROMPTS
from icl_lens.prompts.labeled_task import Layout
from icl_lens.prompts.pair_task import PAIR_COLUMNS, PairTask, bundled_pairs
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE, Prompt, Template, check_no_table
from icl_lens.prompts.text_task import TextTask
from icl_lens.prompts.word_task import WordTask

Task = WordTask | TextTask | PairTask


def named_task(name: str | Path, path: str | Path | None = None) -> Task:
    """Return the task of this name, read from `path` if given, with default settings.

    The name may itself be the path of a file: the task is named after it. A file with the columns
    input and output contains pairs; other .json files with rows or columns, and all other files,
    contain labeled texts; a .json file with "categories" is a word list.
    """
    check_no_table(name)
    if isinstance(name, Path):
        name = str(name)
    if not isinstance(name, str):
        raise InputError(
            f"name must be the name of a task, got {short_repr(name)}; a task has its own method, "
            "task.prompts()"
        )
    if path is None and (Path(name).suffix or {"/", os.sep} & {*name}):
        name, path = Path(name).stem, name
    if path is None:
        if name in DATASETS:
            return TextTask(name)
        if name in bundled_pairs():
            return PairTask(name)
        return WordTask(name)
    columns = column_names(path)
    if {*PAIR_COLUMNS} <= {*columns} and not {*TextTask.columns} <= {*columns}:
        return PairTask(name, path)
    if str(path).lower().endswith(".json") and (not columns or "categories" in columns):
        return WordTask(name, path)
    return TextTask(name, path)


def load_task(
    name: str | Path,
    path: str | Path | None = None,
    *,
    n: int = N_PROMPTS,
    seed: int = 0,
    layout: Layout = "random",
    demonstrations: int = 2,
    labels: Labels | None = None,
    columns: tuple[str, str] | None = None,
    pairs: bool = False,
    classes: Literal["binary", "all"] = "binary",
    same_length_for: Any = None,
    template: Template = DEFAULT_TEMPLATE,
) -> list[Prompt]:
    """Return prompts of the task with this name, each with its answer.

    Without `path`, the name is a word task "FALSE-TRUE" from any two categories of the word list
    ("sentiment-number", `WordTask`), a task of pairs such as "antonyms" (`PairTask` lists them), or
    one of "sst2", "trec", "agnews", "ethos" and "amazon", which are downloaded once from the Hub
    (`TextTask`). To use your own data under any name, set `path` to a .jsonl, .csv, .tsv, .json or
    .parquet file or folder of labeled texts, to a word list (.json, `WordTask`), or to a file with
    the columns input and output (`PairTask`). The path of a file is a name, too. `columns` are the
    two columns of your texts and labels, or of pairs, by default text and label, or input and
    output. `pairs=True` reads your own file as pairs, whose answers are words of their own, and
    `classes="all"` shows every class of labeled texts in each prompt. A task with other settings is
    a value: `TextTask("reviews", "reviews.csv", max_words=40).prompts(n)`.

    The other keywords are those of `WordTask.prompts`, `TextTask.prompts` and `PairTask.prompts`.
    Raise InputError like these, and for `columns`, `pairs` and `classes` of a task that has none.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=3)
        >>> prompts == il.WordTask("sentiment-number").prompts(3)
        True
    """
    task = named_task(name, path)
    if pairs and isinstance(task, TextTask) and task.path is not None:
        task = PairTask(task.name, task.path)
    elif pairs and not isinstance(task, PairTask):
        raise InputError(
            f"pairs must be False for the task {task.name!r}, which has classes, got True; pass a "
            "file of rows with an input and an output as path="
        )
    if columns is not None:
        if isinstance(task, WordTask) or task.path is None:
            raise InputError(
                f"columns must be None for the task {task.name!r}, which has no columns to choose, "
                f"got {short_repr(columns)}; pass the file of your own texts as path="
            )
        task = replace(task, columns=columns)
    if isinstance(task, TextTask):
        task = replace(task, classes=classes)
    elif classes != "binary":
        kind = "pairs, which have no classes" if isinstance(task, PairTask) else "two categories"
        raise InputError(
            f"classes must be 'binary' for the task {task.name!r} of {kind}, got "
            f"{short_repr(classes)}; omit it"
        )
    return task.prompts(
        n,
        seed=seed,
        layout=layout,
        demonstrations=demonstrations,
        labels=labels,
        same_length_for=same_length_for,
        template=template,
    )


def split_by_query(
    prompts: Sequence[Prompt], n: int, *, assigned: Mapping[str, int] | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Return two lists of at most n prompts that share no query: one to locate heads on, one to
    test them on.

    `prompts` are those of `load_task`, at least three times n, because all prompts of a query go to
    the same list. Each list has equally many prompts of every label and, of a word task, of every
    class. `assigned` maps queries to their list, 0 or 1. Raise InputError if the prompts have fewer
    than two queries.

    Warn if a list has fewer than n prompts.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=60)
        >>> locating, testing = il.split_by_query(prompts, 20)
        >>> len(locating), len(testing), {p.query for p in locating} & {p.query for p in testing}
        (20, 20, set())
    """
    halves = halves_by_query(prompts, n, assigned=assigned)
    sizes = list(map(len, halves))
    if min(sizes) < n:
        n_queries = len({prompt.query for prompt in prompts})
        remedy = f"draw at least {3 * n}, or use more rows"
        if len(prompts) >= 3 * n:
            remedy = f"draw more than {len(prompts)}, use more rows, or split off fewer than {n}"
        warn_user(
            f"the lists have {sizes[0]} and {sizes[1]} prompts instead of {n}: {len(prompts)} "
            f"prompts with {n_queries} queries are too few; {remedy}"
        )
    return halves


def halves_by_query(
    prompts: Sequence[Prompt], n: int, *, assigned: Mapping[str, int] | None = None
) -> tuple[list[Prompt], list[Prompt]]:
    """Return the lists of `split_by_query`, without a warning."""
    assigned = assigned or {}
    queries = list(dict.fromkeys(prompt.query for prompt in prompts))
    if len(queries) < 2:
        raise InputError(
            f"prompts must have at least two queries, got {len(queries)}; use more prompts or more "
            "data"
        )
    free = [query for query in queries if query not in assigned]
    assigned_first = {query for query in queries if assigned.get(query) == 0}
    # Pairs of queries take turns, because classes alternate. If no query repeats, each list would
    # have only two of every four prompts, so that fours take turns.
    by_pairs = _halves(prompts, n, assigned_first.union(free[::4], free[1::4]))
    by_fours = _halves(prompts, n, assigned_first.union(*(free[start::8] for start in range(4))))
    pairs_leave_out_many = 3 * min(map(len, by_pairs)) < 2 * min(map(len, by_fours))
    return by_fours if pairs_leave_out_many else by_pairs


def _halves(
    prompts: Sequence[Prompt], n: int, first: set[str]
) -> tuple[list[Prompt], list[Prompt]]:
    """Return at most n prompts whose query is in `first`, and as many others."""
    halves: tuple[list[Prompt], list[Prompt]] = ([], [])
    for turn in range(
        4
    ):  # `load_task` balances labels, and classes of word tasks, within four prompts
        for half, is_first in zip(halves, (True, False), strict=True):
            same = [prompt for prompt in prompts[turn::4] if (prompt.query in first) == is_first]
            half += same[: (n + 3 - turn) // 4]
    return halves
