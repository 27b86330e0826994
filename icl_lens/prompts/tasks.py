"""Tasks as lists of prompts: two categories of words, or sentences of a labeled dataset.

Labels are arbitrary words ("foo", "bar"), so a model can only learn them from the demonstrations.
"""

import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from math import perm
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from icl_lens.digest import json_digest
from icl_lens.errors import InputError, check_choice, check_integers
from icl_lens.prompts.datasets import DATASETS, SUFFIXES, RawTable, load_hub_splits, read_files
from icl_lens.prompts.prompt import Demonstration, Prompt, Template, check_unicode, quoted_list
from icl_lens.prompts.token_alignment import require_fast_tokenizer, tokenize_texts
from icl_lens.prompts.tokenize import tokenize

_HALF = re.compile("[\ud800-\udfff]")

Layout = Literal["order", "reorder", "imbalanced", "random"]
QueryClass = Literal["true", "false", "both"]

MAX_PROMPTS = 1_000_000
"""Maximum number of prompts per call, which limits memory."""

Rows = list[tuple[str, str]]
"""Texts and their classes."""

_DEFAULT_TEMPLATE = Template()

WORD_TASKS = ("sentiment-number", "number-sentiment", "animal-country", "country-animal")
"""The paper's word tasks. The second category is the true class, that of the query."""

# All begin with different tokens in the vocabularies of GPT-2 and the bundled models.
_LABELS = ("foo", "bar", "baz", "qux", "dax", "wug", "mib", "zib", "toma", "gorp", "nerf", "lorp", "vint", "kiki")


SENTENCE_TASKS = tuple(DATASETS)
"""The paper's sentence datasets, and Amazon polarity."""


@dataclass(frozen=True)
class _Draw:
    """One prompt's texts: those of each false class and of the true class, and a query of either."""

    false: list[tuple[str, list[str]]]
    true: tuple[str, list[str]]
    query: str
    false_query: str | None
    """An unused text of the first false class; None if all are used."""

    def turned(self) -> "_Draw":
        """Return the same demonstrations with the query of the other class, which becomes the true class."""
        return _Draw([self.true], self.false[0], _left(self), self.query)


def load_task(
    name: str,
    *,
    n: int = 1000,
    seed: int = 0,
    layout: Layout = "order",
    query_class: QueryClass | None = None,
    balanced: bool | None = None,
    labels: Sequence[str] | None = None,
    demonstrations: int = 2,
    path: str | Path | None = None,
    split: str = "test",
    classes: Literal["binary", "all"] = "binary",
    columns: tuple[str, str] = ("text", "label"),
    max_words: int | None = None,
    same_length_for: Any = None,
    template: Template = _DEFAULT_TEMPLATE,
) -> list[Prompt]:
    """Return prompts of a word task ("sentiment-number") or a sentence dataset ("sst2"), each with its answer.

    Every prompt has a true class, that of its query, and a false class, with `demonstrations` texts each. The labels
    of the true and false class are `labels[0]` and `labels[1]` (default: "foo" and "bar"). `layout` orders the
    demonstrations: "order" puts those of the true class last, next to the query; "reorder" puts them first;
    "imbalanced" is "order" without the last one. The same seed gives the same texts. With these layouts the answer is
    the same label in every prompt, and with "order" it is also the last label.

    `layout="random"` shuffles the demonstrations, so that neither a constant answer nor the last label scores above
    chance: the queries of a word task alternate between both classes (`query_class="both"`), and both labels are the
    answer equally often (`balanced`). Labels that are names of the classes stay with their classes. `balanced` swaps
    the two labels in every second prompt or, with both query classes, every second pair of prompts.
    `query_class="false"` combines the same demonstrations with a query of the (first) false class and its answer.

    Word tasks are "FALSE-TRUE" for any two categories of the word list; the paper's are `WORD_TASKS`. Words that are
    in both categories are skipped. All prompts differ as long as there are enough words. `path` may be another word
    list, a .json file with {"categories": {name: [words]}}.

    Sentence datasets are `SENTENCE_TASKS`, downloaded once from the Hub, or any name with `path`: a .jsonl, .csv or
    .parquet file with the two `columns` text and label, or a folder with one file per split ("train.jsonl",
    "sst2-test.csv"). Demonstrations come from the train split and queries from `split`; if both are the same, as with
    a single file, each class is divided in half. No text is used for both. After all queries have been used, they are
    reused with other demonstrations. White space in texts is collapsed. Duplicates and texts without a label, empty or
    longer than `max_words` words are skipped. For Amazon polarity, the first 20,000 rows of a split are used.

    `classes="all"`, for sentence datasets, demonstrates every class. Then `labels[i]` belongs to the i-th class in
    alphabetical order in every prompt, and the false classes appear one after another in random order.

    `same_length_for`, a model, keeps only texts with one number of tokens, the one that is most frequent in every
    class, so that all rows of `il.tokenize(model, prompts, template=template)` have their labels and end at the same
    positions. Patching between prompts requires this. `template` is used for nothing else.

    Raises InputError for unknown names, layouts, splits and files, an unreachable Hub, a class with too few texts, and
    too few labels; with `same_length_for` also for labels with different numbers of tokens.
    Source: docs/howto/own_dataset.md.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=3)
        >>> len(prompts), len(prompts[0].demonstrations), prompts[0].answer
        (3, 4, 'foo')
    """
    check_choice("layout", layout, get_args(Layout))
    if query_class is None:
        query_class = "both" if layout == "random" else "true"
    check_choice("query_class", query_class, get_args(QueryClass))
    check_choice("classes", classes, ("binary", "all"))
    check_unicode(name)
    check_integers(n=n, demonstrations=demonstrations, seed=seed, max_words=1 if max_words is None else max_words)
    if n < 1 or demonstrations < 1:
        raise InputError(f"n and demonstrations must be at least 1, got n={n} and demonstrations={demonstrations}")
    if n > MAX_PROMPTS:
        raise InputError(f"at most {MAX_PROMPTS:,} prompts can be drawn at once, got n={n}")
    if max_words is not None and max_words < 1:
        raise InputError(f"the word limit must be at least 1, got max_words={max_words}")
    if isinstance(columns, str) or len(columns) != 2 or not all(isinstance(column, str) for column in columns):
        raise InputError(f"columns must be two names, those of texts and labels, got {columns!r}")
    if layout == "imbalanced" and demonstrations < 2:
        raise InputError(
            f"layout='imbalanced' needs at least 2 demonstrations per class, got demonstrations={demonstrations}"
        )
    if labels is not None and not isinstance(labels, Sequence):
        raise InputError(f"labels must be a sequence that starts with the true class's label, got {labels!r}")
    path = _there(path)
    rng = random.Random(seed)
    label = labels[0] if labels else _LABELS[0]
    is_sentence_task = name in DATASETS if path is None else path.suffix != ".json"
    if not is_sentence_task:
        false, false_words, true, true_words = _words(name, path)
        if same_length_for is not None:
            false_words, true_words = _of_one_length([false_words, true_words], label, same_length_for, template)
        draws = _word_draws(false, false_words, true, true_words, demonstrations, rng)
        fixed = None
    else:
        if path is not None and not path.is_dir():
            split = "train"  # one file for demonstrations and queries
        rows = _rows(name, path, split, columns, max_words)
        if same_length_for is not None:
            rows = _rows_of_one_length(rows, label, same_length_for, template)
        pool, queries = _pools(rows, split, demonstrations, rng)
        draws = _sentence_draws(pool, queries, demonstrations, classes, rng)
        fixed = sorted(pool) if classes == "all" else None
    choices = _choices(labels, 2 if fixed is None else len(fixed))
    if balanced is None:
        balanced = layout == "random" and fixed is None
    if balanced and fixed is not None:
        raise InputError(
            "balanced must be None or False with classes='all', where each label belongs to a class, got True"
        )
    prompts = []
    alternates = query_class == "both" and not is_sentence_task
    for number, draw in enumerate(islice(draws, n)):
        if fixed is None:
            exchanged = balanced and (number // 2 if alternates else number) % 2
            true, false = choices[::-1] if exchanged else choices
            label_of = {draw.true[0]: true, draw.false[0][0]: false}
            label_of = _named_classes(choices, label_of) or label_of
        else:
            label_of = dict(zip(fixed, choices, strict=True))
        draw = draw.turned() if alternates and number % 2 else draw
        prompts.append(_arranged(draw, label_of, choices, layout, query_class))
    if same_length_for is not None:
        _check_rows_align(prompts, same_length_for, template, choices)
    return prompts


def _there(path: str | Path | None) -> Path | None:
    """Return `path` as a Path; raise InputError if it is not a path or cannot be accessed."""
    if path is None:
        return None
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
    return Path(path)


def _of_one_length(groups: list[list[str]], label: str, model: Any, template: Template) -> list[list[str]]:
    """Return the texts of each group with one number of tokens, the number that maximizes the smallest group.

    Tokens are counted in context, from the start of the prompt to the label and from the label to the end of the
    query, since some tokenizers split a word differently at the start.
    """
    texts = list(dict.fromkeys(text for group in groups for text in group))
    shown = [Prompt([Demonstration(text, label)], text) for text in texts]
    lengths = {}
    for text, read in zip(
        texts, tokenize_texts(require_fast_tokenizer(model), list(map(template.render, shown))), strict=True
    ):
        _, label_end = read.range_of(read.rendered.label_spans[0])
        lengths[text] = label_end, len(read.ids) - label_end
    counts = [Counter(lengths[text] for text in group) for group in groups]
    best = max(sorted({*lengths.values()}), key=lambda one: min(count[one] for count in counts))
    return [[text for text in group if lengths[text] == best] for group in groups]


def _rows_of_one_length(rows: dict[str, Rows], label: str, model: Any, template: Template) -> dict[str, Rows]:
    kinds = [(split, kind) for split in rows for kind in sorted({kind for _, kind in rows[split]})]
    groups = [[text for text, one in rows[split] if one == kind] for split, kind in kinds]
    kept = dict(zip(kinds, map(set, _of_one_length(groups, label, model, template)), strict=True))
    return {split: [row for row in rows[split] if row[0] in kept[split, row[1]]] for split in rows}


def _check_rows_align(prompts: list[Prompt], model: Any, template: Template, choices: tuple[str, ...]) -> None:
    """Raise InputError for the first row whose labels or end have other positions than those of row 0."""
    batch = tokenize(model, prompts, template=template, labels=choices, shared_prefix="append")
    places = torch.cat([batch.label_positions, batch.last[:, None]], dim=1)
    other = (places != places[0]).any(-1)
    if bool(other.any()):
        row = int(other.nonzero()[0])
        raise InputError(
            f"labels must have the same number of tokens, got {quoted_list(choices)}, which put the labels and end of "
            f"prompt {row} at {places[row].tolist()} and of prompt 0 at {places[0].tolist()}; choose other labels"
        )


def _arranged(
    draw: _Draw, label_of: dict[str, str], choices: tuple[str, ...], layout: Layout, query_class: QueryClass
) -> Prompt:
    false = [Demonstration(text, label_of[kind]) for kind, texts in draw.false for text in texts]
    true = [Demonstration(text, label_of[draw.true[0]]) for text in draw.true[1]]
    shown = [*true, *false] if layout == "reorder" else [*false, *(true[:-1] if layout == "imbalanced" else true)]
    if layout == "random":  # with a separate generator, so that all layouts have the same texts
        random.Random(f"{draw}").shuffle(shown)
    if query_class != "false":
        return Prompt(shown, draw.query, label_of[draw.true[0]], choices)
    return Prompt(shown, _left(draw), label_of[draw.false[0][0]], choices)


def _left(draw: _Draw) -> str:
    """Return an unused text of the first false class; raise InputError if there is none."""
    if draw.false_query is None:
        raise InputError(
            f"class {draw.false[0][0]!r} has no unused text for the query; reduce demonstrations or add texts"
        )
    return draw.false_query


def _named_classes(labels: Sequence[str], classes: Iterable[str]) -> dict[str, str] | None:
    """Return the label of each class if labels are class names; None if labels are arbitrary."""
    by_name = {label.casefold(): label for label in labels}
    found = {kind: by_name.get(kind.casefold()) for kind in classes}
    return None if None in found.values() else {kind: str(label) for kind, label in found.items()}


def _choices(labels: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if labels is None:
        if count > len(_LABELS):
            raise InputError(f"{count} classes need labels= with {count} words (there are {len(_LABELS)} defaults)")
        return _LABELS[:count]
    if isinstance(labels, str) or len(labels) != count or len(set(labels)) != count:
        raise InputError(f"labels must be {count} different words, one per class, got {labels!r}")
    return tuple(labels)


def data_digest(
    name: str,
    *,
    path: str | Path | None = None,
    split: str = "test",
    columns: tuple[str, str] = ("text", "label"),
    max_words: int | None = None,
) -> str:
    """Return a 16-digit hexadecimal digest of the data that `load_task` draws a task's prompts from.

    It covers the full word list of a word task, and the text and class of every usable row of a sentence dataset.
    Raises InputError as `load_task` does.

    Example:
        >>> from icl_lens.prompts.tasks import data_digest
        >>> len(data_digest("sentiment-number"))
        16
    """
    path = _there(path)
    if (path is None and name not in DATASETS) or (path is not None and path.suffix == ".json"):
        return json_digest(_categories(path))
    split = "train" if path is not None and not path.is_dir() else split
    return json_digest(_rows(name, path, split, columns, max_words))


# Words


def word_list(path: str | Path | None = None) -> dict[str, list[str]]:
    """Return the categories and words of the bundled word list or a .json file.

    Raises InputError as `load_task` does.

    Example:
        >>> from icl_lens.prompts.tasks import word_list
        >>> word_list()["number"][:2]
        ['one', 'two']
    """
    return _categories(_there(path))


def _categories(path: str | Path | None) -> dict[str, list[str]]:
    """Return the categories and words of the bundled word list or another."""
    source = files("icl_lens") / "bundled" / "words.json" if path is None else Path(path)
    if not source.is_file():
        raise InputError(f"there is no word list {str(source)!r}; pass the path of an existing file")
    try:
        categories = json.loads(source.read_text(encoding="utf-8-sig"))["categories"]
        wrong = _not_words(categories)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        wrong, categories = f"cannot be read: {type(error).__name__}", {}
    if wrong:
        raise InputError(
            f'{str(source)!r} is not a word list ({wrong}); write {{"categories": {{name: [words]}}}}, or pass '
            f"sentences in a file of type {quoted_list(SUFFIXES)}"
        )
    return categories


def _words(name: str, path: str | Path | None) -> tuple[str, list[str], str, list[str]]:
    """Return the false category and its words, then the true category and its words."""
    categories = _categories(path)
    false, _, true = name.partition("-")
    if false not in categories or true not in categories or false == true:
        raise InputError(
            f"unknown task {name!r}; choose a sentence dataset ({', '.join(SENTENCE_TASKS)}), a word task such as "
            f"{WORD_TASKS[0]!r} from two of the categories {', '.join(sorted(categories))}, or pass your own sentences "
            "with path="
        )
    both = {*categories[false]} & {*categories[true]}
    only = [[word for word in dict.fromkeys(categories[c]) if word not in both] for c in (false, true)]
    return false, only[0], true, only[1]


def _not_words(categories: Any) -> str | None:
    """Return the fault of a word list's categories, None if they are valid."""
    if not isinstance(categories, dict):
        return "categories must be an object"
    for name, words in categories.items():
        if not isinstance(words, list):
            return f"category {name!r} must be a list"
        for word in words:
            if not isinstance(word, str) or not word.strip() or _HALF.search(word):
                return f"category {name!r} must contain words, got {word!r:.40}"
    return None


def _word_draws(
    false: str, false_words: list[str], true: str, true_words: list[str], count: int, rng: random.Random
) -> Iterator[_Draw]:
    for category, words, needed in ((false, false_words, count), (true, true_words, count + 1)):
        if len(words) < needed:
            raise InputError(
                f"category {category!r} must have at least {needed} words that are not in the other category, got "
                f"{len(words)}; use fewer demonstrations"
            )
    possible = perm(len(false_words), count) * perm(len(true_words), count + 1)
    seen = set()
    while True:
        shown = rng.sample(false_words, count)
        *own, query = rng.sample(true_words, count + 1)
        if (drawn := (*shown, *own, query)) in seen:
            continue
        seen.add(drawn)
        if len(seen) == possible:
            seen.clear()
        yield _Draw([(false, shown)], (true, own), query, _another(false_words, shown, query))


# Sentences


def _sentence_draws(
    pool: dict[str, list[str]], queries: Rows, count: int, classes: str, rng: random.Random
) -> Iterator[_Draw]:
    texts_of: dict[str, list[str]] = {}
    for text, kind in queries:
        texts_of.setdefault(kind, []).append(text)
    while True:
        for query, true in rng.sample(queries, len(queries)):
            others = [kind for kind in sorted(pool) if kind != true]
            chosen = [rng.choice(others)] if classes == "binary" else rng.sample(others, len(others))
            false = [(kind, rng.sample(pool[kind], count)) for kind in chosen]
            kind, shown = false[0]
            texts = texts_of.get(kind) or pool[kind]
            yield _Draw(false, (true, rng.sample(pool[true], count)), query, _another(texts, shown, query))


def _another(texts: list[str], shown: list[str], query: str) -> str | None:
    """Return an unused text, chosen by a seed from this prompt, so that other prompts do not change."""
    left = [text for text in texts if text not in shown]
    return random.Random(f"{query} {shown}").choice(left) if left else None


def _pools(rows: dict[str, Rows], split: str, count: int, rng: random.Random) -> tuple[dict[str, list[str]], Rows]:
    """Return the demonstration texts of each class, and the queries with their classes, without overlap."""
    queries = rows[split]
    if split == "train":
        of_class: dict[str, Rows] = {}
        for text, kind in rng.sample(queries, len(queries)):
            of_class.setdefault(kind, []).append((text, kind))
        queries = [row for kind in sorted(of_class) for row in of_class[kind][: len(of_class[kind]) // 2]]
    query_texts = {text for text, _ in queries}
    pool: dict[str, list[str]] = {}
    for text, kind in rows["train"]:
        if text not in query_texts:
            pool.setdefault(kind, []).append(text)
    kinds = sorted({*pool} | {kind for _, kind in queries})
    if not queries or len(kinds) < 2 or any(len(pool.get(kind, ())) < count for kind in kinds):
        counts = ", ".join(f"{len(pool.get(kind, ()))} of class {kind!r}" for kind in kinds) or "none"
        raise InputError(
            f"the data must have at least one query and two classes with {count} demonstration texts each, got "
            f"{len(queries)} queries and {counts}; add rows, or use a larger max_words or fewer demonstrations"
        )
    return pool, queries


def _rows(name: str, path: Path | None, split: str, columns: tuple[str, str], max_words: int | None) -> dict[str, Rows]:
    """Return text and class of the usable rows of the train split and of `split`."""
    splits = tuple(dict.fromkeys(("train", split)))
    if path is None:
        tables, columns = load_hub_splits(name, splits)
    elif path.is_dir():
        tables = {one: read_files(_files_of(path, name, one)) for one in splits}
    else:
        tables = {one: read_files([path]) for one in splits}
    return {one: list(_usable(table, columns, max_words)) for one, table in tables.items()}


def _usable(table: RawTable, columns: tuple[str, str], max_words: int | None) -> Iterator[tuple[str, str]]:
    if columns[0] == columns[1]:
        raise InputError(f"columns must be two different columns, got {columns!r}")
    class_names = table.class_names.get(columns[1], ())
    seen = set()
    written: dict[str, bool] = {}
    for number, row in enumerate(table.rows, 1):
        missing = [column for column in columns if column not in row]
        if missing:
            raise InputError(
                f"row {number} has no column {quoted_list(missing)}, only {quoted_list(tuple(row)) or 'none'}; "
                "set the text and label columns with columns=(text, label)"
            )
        text, label = (_plain(row[column], number, column) for column in columns)
        if class_names and isinstance(label, int):
            if not -1 <= label < len(class_names):
                raise InputError(
                    f"the label of row {number} must be one of {len(class_names)} classes "
                    f"({quoted_list(class_names)}), got {label}; fix the file"
                )
            label = class_names[label] if label >= 0 else None  # -1: hidden label
        words = "" if text is None else str(text)
        text = " ".join(words.split())
        if not text or label is None or not str(label).strip():
            continue
        kind = str(label)
        if written.setdefault(kind, isinstance(label, str)) != isinstance(label, str):
            raise InputError(
                f"the label {kind} is a number in some rows and the string {kind!r} in others (row {number}); write it "
                "the same way in all rows"
            )
        if text in seen or (max_words is not None and len(words.split()) > max_words):
            continue
        seen.add(text)
        yield text, kind


def _plain(value: Any, number: int, column: str) -> str | int | float | None:
    """Return a cell that is text or a number; raise InputError for other types."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"row {number} has {value} in column {column!r}; use text, a number or an empty cell")
        return int(value) if value.is_integer() else value  # integers in a column with gaps are read as floats
    if value is not None and not isinstance(value, (str, int)):
        raise InputError(
            f"row {number} has {_article(type(value).__name__)} in column {column!r}; use text or a number"
        )
    if isinstance(value, str) and (half := _HALF.search(value)):
        raise InputError(
            f"row {number} has an unpaired surrogate {half[0]!r} in column {column!r}; re-encode the file as UTF-8"
        )
    return value


def _article(kind: str) -> str:
    return {"list": "a list", "dict": "an object", "bytes": "bytes"}.get(kind, f"a value of type {kind}")


def _files_of(folder: Path, name: str, split: str) -> list[Path]:
    """Return the file of a split or its shards; if a folder has several datasets, those of `name`."""
    readable = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES)
    found = [file for file in readable if split in re.split(r"[\W_]+", file.stem)]
    found = [file for file in found if name in re.split(r"[\W_]+", file.stem)] or found
    if len({re.sub(r"\d+", "", file.name) for file in found}) != 1:
        names = quoted_list([file.name for file in found or readable]) or "no readable file"
        raise InputError(
            f"folder {str(folder)!r} must have one file for the split {split!r} of {name!r}, such as '{split}.jsonl', "
            f"got {names}; rename the file, choose another split, or pass the path of one file"
        )
    return found
