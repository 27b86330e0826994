"""Text tasks: prompts from a labeled dataset, from the Hub or from local files."""

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from icl_lens.errors import InputError, check_at_least, check_choice, quoted_list
from icl_lens.foundation.digest import json_digest
from icl_lens.prompts.datasets import (
    DATASETS,
    SUFFIXES,
    RawTable,
    check_columns,
    load_hub_splits,
    read_files,
    two_cells,
)
from icl_lens.prompts.draw import Draw, KeepTexts, TextPool, own_separator, spelling_key
from icl_lens.prompts.labeled_task import LabeledTask
from icl_lens.prompts.name_order import in_order
from icl_lens.prompts.prompt import SPACE, Prompt, check_unicode
from icl_lens.prompts.row_counts import (
    MAX_NAMED,
    WITHOUT_TEXT_OR_LABEL,
    RowCounts,
    check_path,
    warn_of_empty_cells,
)

N_TRIED = 200
"""Number of prompts among which one for a given row is sought."""

LabeledTexts = list[tuple[str, str]]
"""Texts and their classes."""


@dataclass(frozen=True)
class TextTask(LabeledTask):
    """A task of labeled texts.

    `name` is a dataset downloaded once from the Hub ("sst2", "trec", "agnews", "ethos", "amazon"),
    or any name with `path`: a .jsonl, .csv, .tsv, .json or .parquet file with the two `columns`
    text and label, or a folder with one file per split ("train.jsonl", "sst2-test.csv").
    Demonstrations come from the train split and queries from `split`; if these are the same split,
    as with a single file, the texts of each class are divided in half. No text is used for both,
    nor one that differs from a query only in case or Unicode form. White space in texts and classes
    is collapsed (" pos" is "pos"). Duplicates, empty texts, texts without a label and texts of more
    than `max_words` words are skipped; `row_counts` says how many. For Amazon polarity, the first
    20,000 rows of a split are used.

    `classes="binary"` shows two classes per prompt, `classes="all"` every class. The label words of
    your own data are the names of its classes, unless `prompts` gets others.

    Raise InputError for invalid settings. Source: docs/howto/own_dataset.md.

    Example:
        >>> task = il.TextTask("sst2", max_words=20, classes="all")
        >>> prompts = task.prompts(100)  # doctest: +SKIP
    """

    name: str
    path: str | Path | None = None
    _: KW_ONLY
    columns: tuple[str, str] = ("text", "label")
    split: str = "test"
    max_words: int | None = None
    classes: Literal["binary", "all"] = "binary"

    def __post_init__(self) -> None:
        check_unicode(self.name)
        check_path(self.path)
        check_choice("classes", self.classes, ("binary", "all"))
        if self.max_words is not None:
            check_at_least(1, max_words=self.max_words)
        check_columns(self.columns, "texts and labels")

    def digest(self) -> str:
        """Return a 16-digit hexadecimal digest of the text and class of every usable row."""
        return json_digest(self._rows())

    def prompt_of_row(self, row: int, *, seed: int = 0, demonstrations: int = 2) -> Prompt:
        """Return a prompt whose query is the text of one row of the file, counted from 1 without
        the header.

        Its demonstrations are those of the first prompt of `prompts` that shows the row's class and
        not its text. The row may be longer than `max_words`. Raise InputError for a task without a
        file, a row that the file does not have or that lacks a text or a label, and if no such
        prompt is drawn.

        Example:
            >>> task = il.TextTask("reviews", "reviews.csv")  # doctest: +SKIP
            >>> il.explain(model, task.prompt_of_row(17))  # doctest: +SKIP
        """
        if self.path is None or not Path(self.path).is_file():
            raise InputError(
                f"row requires a single file of your own texts, got {str(self.path)!r}; pass the "
                "path of one file"
            )
        (row,) = check_at_least(1, row=row)
        table = read_files([Path(self.path)])
        selected = list(islice(table.rows, row - 1, row))
        usable = _usable(RawTable(selected, table.class_names), self.columns, None, Counter())
        text, class_name = next(usable, (None, None))
        if text is None:
            raise InputError(
                f"row {row} of {str(self.path)!r} must have a text and a label; pass another row"
            )
        for prompt in self.prompts(N_TRIED, seed=seed, demonstrations=demonstrations):
            labels = [label for label, name in (prompt.classes or {}).items() if name == class_name]
            demonstrated = {spelling_key(pair.text) for pair in prompt.demonstrations}
            if labels and spelling_key(text) not in demonstrated:
                return replace(prompt, query=text, answer=labels[0], other_query=None)
        raise InputError(
            f"row {row} must have a class that prompts show without its text, got {class_name!r}; "
            "add rows of this class"
        )

    def row_counts(self) -> RowCounts:
        """Return how many rows the task uses and skips; raise InputError if they cannot be read."""
        skipped: Counter[str] = Counter()
        rows = self._rows(skipped)
        return _row_counts(rows, skipped)

    @property
    def has_class_words(self) -> bool:
        return self.path is not None

    def _draws(
        self,
        demonstrations: int,
        rng: random.Random,
        keep: KeepTexts | None = None,
        *,
        is_balanced: bool = False,
    ) -> Iterator[Draw]:
        """Yield endless draws; after all queries have been used, they are reused with other
        demonstrations.

        Raise InputError for unknown splits and files, an unreachable Hub, and a class with too few
        texts.
        """
        skipped: Counter[str] = Counter()
        rows = self._rows(skipped)
        if self.path is not None:
            warn_of_empty_cells(self.path, _row_counts(rows, skipped))
        separator = SPACE
        if self.path is not None and self.name not in DATASETS:
            separator = own_separator(chain.from_iterable(chain.from_iterable(rows.values())))
        if keep is not None:
            rows = _filtered(rows, keep, separator)
        pool, queries = _pools(rows, self._split, demonstrations, rng)
        del rows
        queries_of: dict[str, list[str]] = {}
        for text, class_name in queries:
            queries_of.setdefault(class_name, []).append(text)
        classes = in_order(pool)
        unasked = {name: TextPool(texts) for name, texts in pool.items() if name not in queries_of}
        in_turn = _as_frequent(queries, rng)
        if is_balanced or self.classes == "all":
            in_turn = _balanced(queries_of, rng)
        for query, true_class in in_turn:
            false_classes = [name for name in classes if name != true_class]
            if self.classes == "binary":
                false_classes = [rng.choice(false_classes)]
            else:
                false_classes = rng.sample(false_classes, len(false_classes))
            false = [(name, rng.sample(pool[name], demonstrations)) for name in false_classes]
            true_texts = rng.sample(pool[true_class], demonstrations)
            first, first_texts = false[0]
            seed = f"{query} {first_texts}"
            if first in queries_of:  # no demonstration is like a query
                false_query = random.Random(seed).choice(queries_of[first])
            else:
                false_query = unasked[first].unused([*first_texts, *true_texts], seed)
            true = (true_class, true_texts)
            yield Draw(false, true, query, false_query, classes, separator)

    @property
    def _split(self) -> str:
        """The split of the queries: a single file has only one."""
        return self.split if self.path is None or Path(self.path).is_dir() else "train"

    def _rows(self, skipped: Counter[str] | None = None) -> dict[str, LabeledTexts]:
        """Return text and class of the usable rows of the train split and of the queries' split.

        `skipped` counts the other rows by the reason why they are skipped.
        """
        skipped = Counter() if skipped is None else skipped
        splits = tuple(dict.fromkeys(("train", self._split)))
        columns = self.columns
        if self.path is None:
            tables, columns = load_hub_splits(self.name, splits)
        else:
            path = Path(self.path)
            tables = {}
            for split in splits:
                files = _files_of(path, self.name, split) if path.is_dir() else [path]
                tables[split] = read_files(files)
        rows = {}
        for split, table in tables.items():
            rows[split] = list(_usable(table, columns, self.max_words, skipped))
        return rows


def _row_counts(rows_of_split: Mapping[str, LabeledTexts], skipped: Counter[str]) -> RowCounts:
    """Return how many rows of each class are used, and how many are skipped."""
    used: Counter[str] = Counter()
    for rows in rows_of_split.values():
        used.update(class_name for _, class_name in rows)
    return RowCounts(used, skipped)


def _as_frequent(queries: LabeledTexts, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield endless queries with their classes, each query once before any again."""
    while True:
        yield from rng.sample(queries, len(queries))


def _balanced(texts_of: Mapping[str, list[str]], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield endless queries with their classes, each class once before any again, and likewise each
    of its queries.
    """
    unused: dict[str, list[str]] = {name: [] for name in in_order(texts_of)}
    while True:
        for name in unused:
            if not unused[name]:
                unused[name] = rng.sample(texts_of[name], len(texts_of[name]))
            yield unused[name].pop(), name


def _filtered(
    rows: dict[str, LabeledTexts], keep: KeepTexts, separator: str
) -> dict[str, LabeledTexts]:
    """Return the rows of each split whose text remains when `keep` filters the texts of every split
    and class.
    """
    texts_of: dict[tuple[str, str], list[str]] = {}
    for split, split_rows in rows.items():
        for name in sorted({name for _, name in split_rows}):
            texts_of[split, name] = [text for text, row_name in split_rows if row_name == name]
    remaining = dict(zip(texts_of, map(set, keep(list(texts_of.values()), separator)), strict=True))
    filtered = {}
    for split, split_rows in rows.items():
        filtered[split] = [
            (text, name) for text, name in split_rows if text in remaining[split, name]
        ]
    return filtered


def _pools(
    rows: dict[str, LabeledTexts], split: str, count: int, rng: random.Random
) -> tuple[dict[str, list[str]], LabeledTexts]:
    """Return the demonstration texts of each class, and the queries with their classes, without
    overlap.
    """
    queries = rows[split]
    if split == "train":
        queries = _half_of_each_class(queries, rng)
    query_keys = {spelling_key(text) for text, _ in queries}
    pool: dict[str, list[str]] = {}
    for text, name in rows["train"]:
        if spelling_key(text) not in query_keys:
            pool.setdefault(name, []).append(text)
    classes = in_order({*pool} | {name for _, name in queries})
    sizes = {name: len(pool.get(name, ())) for name in classes}
    if not queries or len(classes) < 2 or any(size < count for size in sizes.values()):
        raise _too_few_texts_error(rows, split, sizes, n_queries=len(queries), count=count)
    return pool, queries


def _too_few_texts_error(
    rows: dict[str, LabeledTexts],
    split: str,
    sizes: Mapping[str, int],
    *,
    n_queries: int,
    count: int,
) -> InputError:
    """Return the error for data with too few texts; `sizes` has the demonstration texts of each
    class.
    """
    if _row_counts(rows, Counter()).look_like_pairs:
        return InputError(
            f"most of the {len(sizes)} labels have a single text, as answers of their own do, "
            "such as capitals of countries; read pairs with pairs=True (--pairs)"
        )
    if len(sizes) == 1:
        return InputError(
            f"the data must have rows of at least two classes, got only {next(iter(sizes))!r}; add "
            "rows of another class"
        )
    named = list(sizes.items())[:MAX_NAMED]
    counts = ", ".join(f"{size} of class {name!r}" for name, size in named) or "none"
    counts += f" and {len(sizes) - MAX_NAMED} more classes" if len(sizes) > MAX_NAMED else ""
    where = " beside the half of its rows that are queries" if split == "train" else ""
    return InputError(
        f"the data must have at least one query and two classes with {count} demonstration texts "
        f"each{where}, got {n_queries} queries and {counts}; add rows, or use a larger max_words "
        "or fewer demonstrations"
    )


def _half_of_each_class(rows: LabeledTexts, rng: random.Random) -> LabeledTexts:
    """Return half of the rows of each class, drawn at random, in the order of the classes."""
    rows_of: dict[str, LabeledTexts] = {}
    for text, name in rng.sample(rows, len(rows)):
        rows_of.setdefault(name, []).append((text, name))
    halves = []
    for name in in_order(rows_of):
        halves += rows_of[name][: len(rows_of[name]) // 2]
    return halves


def _usable(
    table: RawTable, columns: tuple[str, str], max_words: int | None, skipped: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield text and class of the rows that `TextTask` does not skip; raise InputError for an
    invalid row.

    `skipped` counts the others by reason.
    """
    class_names = table.class_names.get(columns[1], ())
    remedy = ", or, if outputs are words of their own, pass pairs=True (--pairs)"
    seen = set()
    is_string: dict[str, bool] = {}  # by class
    for number, row in enumerate(table.rows, 1):
        text, label = two_cells(row, number, columns, remedy)
        if class_names and isinstance(label, int):
            if not -1 <= label < len(class_names):
                raise InputError(
                    f"the label of row {number} must be one of {len(class_names)} classes "
                    f"({quoted_list(class_names)}), got {label}; fix the file"
                )
            label = class_names[label] if label >= 0 else None  # -1: hidden label
        words = [] if text is None else str(text).split()
        class_name, text = " ".join(str(label).split()), " ".join(words)
        if not text or label is None or not class_name:
            skipped[WITHOUT_TEXT_OR_LABEL] += 1
            continue
        if is_string.setdefault(class_name, isinstance(label, str)) != isinstance(label, str):
            raise InputError(
                f"the label {class_name} is a number in some rows and the string {class_name!r} in "
                f"others (row {number}); write it the same way in all rows"
            )
        if text in seen:
            skipped["duplicate"] += 1
            continue
        if max_words is not None and len(words) > max_words:
            skipped[f"with more than {max_words} words"] += 1
            continue
        seen.add(text)
        yield text, class_name


def _files_of(folder: Path, name: str, split: str) -> list[Path]:
    """Return the file of a split or its shards; if a folder has several datasets, those of
    `name`.
    """
    readable = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    of_split = [file for file in readable if split in _words_of_name(file)]
    files = [file for file in of_split if name in _words_of_name(file)] or of_split
    if len({re.sub(r"\d+", "", file.name) for file in files}) != 1:
        names = quoted_list([file.name for file in files or readable]) or "no readable file"
        raise InputError(
            f"folder {str(folder)!r} must have one file for the split {split!r} of {name!r}, such "
            f"as '{split}.jsonl', got {names}; rename the file, choose another split, or pass the "
            "path of one file"
        )
    return files


def _words_of_name(file: Path) -> list[str]:
    """Return the words of a file's name, such as "sst2" and "test" of "sst2-test.csv"."""
    return re.split(r"[\W_]+", file.stem)
