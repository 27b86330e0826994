"""Read labeled texts from local files or from data files on the Hub, which are downloaded once and
cached.
"""

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icl_lens.errors import InputError, first_line, quoted_list, short_repr
from icl_lens.foundation.files import parse_json
from icl_lens.foundation.hub import Repository, open_repository
from icl_lens.prompts.draw import SURROGATE

SUFFIXES: tuple[str, ...] = (".jsonl", ".csv", ".tsv", ".json", ".parquet")
"""Supported file suffixes."""


PAIR_COLUMNS = ("input", "output")
"""The columns by which a file of pairs is recognized."""

Row = dict[str, Any]
"""The cells of a row by column."""


@dataclass(frozen=True)
class RawTable:
    """Raw rows, which are read while they are iterated over, and only once.

    `class_names[column]` has the class names of a column of class indices.
    """

    rows: Iterable[Row]
    class_names: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class HubDataset:
    """The location of a dataset on the Hub, in data files that need no code from the repository.

    `file` is a regular expression for the name of the file that is read for `{split}`, and `text`
    the text column. The first existing column of `labels` is read; `class_names` are its class
    names if the file does not define them. At most the first `max_rows` rows are read.
    """

    repository: str
    text: str
    labels: tuple[str, ...]
    file: str
    class_names: tuple[str, ...] = ()
    max_rows: int | None = None


DATASETS = {
    # The copy in GLUE has no labels in its test split.
    "sst2": HubDataset(
        "SetFit/sst2", "text", ("label_text", "label"), r"{split}\.jsonl", ("negative", "positive")
    ),
    # The original repository of TREC needs a script. Coarse classes: ABBR, DESC, ENTY, HUM, LOC,
    # NUM.
    "trec": HubDataset("SetFit/TREC-QC", "text", ("label_coarse_original",), r"{split}\.jsonl"),
    "agnews": HubDataset(
        "fancyzhx/ag_news",
        "text",
        ("label",),
        r"data/{split}-00000-of-00001\.parquet",
        ("World", "Sports", "Business", "Sci/Tech"),
    ),
    "ethos": HubDataset(
        "SetFit/ethos_binary",
        "text",
        ("label_text", "label"),
        r"{split}\.jsonl",
        ("no hate speech", "hate speech"),
    ),
    # 1.1 GB in all; only the first file of each split is downloaded.
    "amazon": HubDataset(
        "fancyzhx/amazon_polarity",
        "content",
        ("label",),
        r"amazon_polarity/{split}-00000-of-\d+\.parquet",
        ("negative", "positive"),
        max_rows=20_000,
    ),
}
"""The built-in sentence datasets by name."""


def load_hub_splits(
    name: str, splits: Sequence[str]
) -> tuple[dict[str, RawTable], tuple[str, str]]:
    """Return the rows of the splits of one of `DATASETS`, and the names of its text and label
    columns.

    Files are downloaded once into the cache of huggingface_hub and then read from there, also
    offline. Raise InputError, with the cause and a remedy, if the download fails or the files are
    not as expected.
    """
    source = DATASETS[name]
    try:
        paths = _split_files(name, source, splits)
    except InputError as error:
        raise InputError(f"{error}; or pass a local copy with path=") from error.__cause__
    tables, columns = {}, set[str]()
    for split, path in paths.items():
        table = _read(path, f"delete {str(path)!r} to download it again", source.max_rows)
        rows = list(table.rows)
        columns.update(*rows[:1])
        class_names = dict.fromkeys(source.labels, source.class_names) | dict(table.class_names)
        tables[split] = RawTable(rows, class_names)
    label = next((column for column in source.labels if column in columns), None)
    if source.text not in columns or label is None:
        raise InputError(
            f"{source.repository!r} must have the columns {source.text!r} and "
            f"{' or '.join(map(repr, source.labels))}, got "
            f"{quoted_list(sorted(columns)) or 'none'}; pass a local copy with path="
        )
    return tables, (source.text, label)


def _split_files(name: str, source: HubDataset, splits: Sequence[str]) -> dict[str, Path]:
    """Return the local file of each split, which is downloaded if it is not in the cache."""

    def file_of(repository: Repository, split: str) -> str | None:
        pattern = source.file.replace("{split}", re.escape(split))
        return next((file for file in repository.files if re.fullmatch(pattern, file)), None)

    def is_complete(repository: Repository) -> bool:
        return all(file_of(repository, split) for split in splits)

    repository = open_repository(source.repository, kind="dataset", is_complete=is_complete)
    files = {}
    for split in splits:
        file = file_of(repository, split)
        if file is None:
            any_split = re.compile(source.file.replace("{split}", r"(\w+)"))
            matches = map(any_split.fullmatch, repository.files)
            existing = sorted(match[1] for match in matches if match)
            raise InputError(
                f"{name} must have the split {split!r}, got {quoted_list(existing)}; choose another"
            )
        files[split] = file
    folder = repository.fetch(list(files.values()))
    repository.record_revision()
    return {split: folder / file for split, file in files.items()}


def read_files(paths: Sequence[Path]) -> RawTable:
    """Return the raw rows of one file or its shards, which are read one by one.

    Raise InputError, while they are read, if they cannot be read. Cells of a .csv are strings ("01"
    stays "01", "NA" stays "NA"); an empty cell is a missing value.
    """
    tables = [_read(path, "fix the file or pass another") for path in paths]
    return RawTable(
        itertools.chain.from_iterable(table.rows for table in tables), tables[0].class_names
    )


def column_names(path: str | Path) -> tuple[str, ...]:
    """Return the columns of a file of rows; none for a folder, and for a file that cannot be read.

    For an unreadable file, the error is raised where all of it is read.
    """
    try:
        path = Path(path)
        suffix = path.suffix.lower()
        if suffix == ".parquet":
            import pyarrow.parquet as pq

            return tuple(pq.read_schema(path).names)
        if suffix == ".json":
            return tuple(_columns_of(json.loads(path.read_text(encoding="utf-8-sig"))))
        return tuple(next(_READERS[suffix](path)))
    except Exception:  # the readers raise many types
        return ()


def _read(path: Path, remedy: str, max_rows: int | None = None) -> RawTable:
    """Return at most the first `max_rows` rows of a file, to be read one by one."""
    if not path.is_file():
        raise InputError(
            f"there is no file {str(path)!r}; pass the path of an existing file or folder"
        )
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"path must be a file of type {quoted_list(SUFFIXES)}, got {short_repr(str(path))}; "
            "save a table as .csv"
        )

    def unreadable(error: Exception) -> InputError:
        if isinstance(error, UnicodeDecodeError):
            return InputError(
                f"cannot read {str(path)!r}, because it is not UTF-8 text; save it as UTF-8 (in a "
                "spreadsheet: CSV UTF-8)"
            )
        return InputError(f"cannot read {str(path)!r} as {suffix}: {first_line(error)}; {remedy}")

    def rows() -> Iterator[Row]:
        try:
            yield from itertools.islice(_READERS[suffix](path), max_rows)
        except Exception as error:  # the readers raise many types; the file is at fault
            raise unreadable(error) from error

    try:
        return RawTable(rows(), _parquet_class_names(path) if suffix == ".parquet" else {})
    except Exception as error:
        raise unreadable(error) from error


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(
                    f'line {number} is not a JSON object like {{"text": "…", "label": "…"}}'
                )
            yield row


_CELL = (str, int, float)
"""Types of a cell in a table of pairs without columns."""


def _columns_of(table: Any) -> Iterable[str]:
    """Return the columns of a JSON table; raise an exception if it has none."""
    if _is_pair_mapping(table) or _is_pair_list(table):
        return PAIR_COLUMNS
    return table if isinstance(table, dict) else table[0]


def _is_pair_mapping(table: Any) -> bool:
    """Return whether a JSON value maps inputs to outputs, as {"France": "Paris"} does."""
    return (
        isinstance(table, dict)
        and bool(table)
        and all(isinstance(cell, _CELL) for cell in table.values())
    )


def _is_pair_list(table: Any) -> bool:
    """Return whether a JSON value is a list of pairs, as [["France", "Paris"]] is."""
    return isinstance(table, list) and bool(table) and all(map(_is_pair, table))


def _is_pair(row: Any) -> bool:
    """Return whether a JSON value is a list of two cells."""
    return isinstance(row, list) and len(row) == 2 and all(isinstance(cell, _CELL) for cell in row)


def _json(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON list of objects, of an object with one list per column, or of pairs
    without columns.
    """
    table: Any = parse_json(path.read_text(encoding="utf-8-sig"))
    columns: tuple[str, ...] = ()
    if _is_pair_mapping(table):
        columns, table = PAIR_COLUMNS, list(table.items())
    elif _is_pair_list(table):
        columns = PAIR_COLUMNS
    elif (
        isinstance(table, dict)
        and table
        and all(isinstance(column, list) for column in table.values())
    ):
        if len({*map(len, table.values())}) > 1:
            raise ValueError(
                f"columns must have the same length, got {[*map(len, table.values())]} rows"
            )
        columns, table = tuple(table), list(zip(*table.values(), strict=True))
    elif not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise ValueError('it is not a list of objects like [{"text": "…", "label": "…"}]')
    table.reverse()
    while table:  # rows are dropped as they are read, which saves memory
        row = table.pop()
        yield dict(zip(columns, row, strict=True)) if columns else row


def _csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a file of comma-separated or, for .tsv, tab-separated cells; the latter are
    not quoted.

    Some spreadsheets write .csv files with semicolons or tabs: a header without a comma says so.
    """
    csv.field_size_limit(2**31 - 1)
    is_tsv = path.suffix.lower() == ".tsv"
    delimiter = "\t" if is_tsv else _delimiter(path)
    quoting = csv.QUOTE_NONE if is_tsv else csv.QUOTE_MINIMAL
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True, delimiter=delimiter, quoting=quoting)
        header = _distinct(next(reader, []))
        for cells in filter(None, reader):
            if len(cells) != len(header):
                raise ValueError(
                    f"line {reader.line_num} has {len(cells)} cells and the header {len(header)}"
                    + ("" if is_tsv else f"; quote cells that contain {_DELIMITERS[delimiter]}")
                )
            yield {name: cell or None for name, cell in zip(header, cells, strict=True)}


_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}


def _delimiter(path: Path) -> str:
    """Return what separates the cells of a .csv file: the first of `_DELIMITERS` in its header."""
    with path.open(encoding="utf-8-sig") as lines:
        header = lines.readline()
    return next((delimiter for delimiter in _DELIMITERS if delimiter in header), ",")


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    _distinct(file.schema_arrow.names)
    for batch in file.iter_batches():
        yield from batch.to_pylist()


def _parquet_class_names(path: Path) -> Mapping[str, Sequence[str]]:
    """Return the class names by column, which the library `datasets` stores in the metadata."""
    import pyarrow.parquet as pq

    metadata = pq.read_schema(path).metadata or {}
    info = json.loads(metadata.get(b"huggingface") or b"{}").get("info", {})
    features = {
        column: kind for column, kind in info.get("features", {}).items() if isinstance(kind, dict)
    }
    return {column: kind["names"] for column, kind in features.items() if kind.get("names")}


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".tsv": _csv,
    ".json": _json,
    ".parquet": _parquet,
}


def _distinct(columns: list[str]) -> list[str]:
    """Return the column names; raise ValueError if there are none or if one repeats."""
    if not columns or len(set(columns)) < len(columns):
        raise ValueError(f"columns must have different names, got {columns}")
    return columns


def check_columns(columns: Sequence[str], what: str) -> None:
    """Raise InputError unless `columns` are two different names; `what` says what they hold."""
    names = [] if isinstance(columns, str) else list(columns)
    if [type(name) for name in names] != [str, str] or names[0] == names[1]:
        raise InputError(
            f"columns must be two different names, those of {what}, got {short_repr(columns)}"
        )


def two_cells(
    row: Mapping[str, Any], number: int, columns: tuple[str, str], remedy: str = ""
) -> list[Any]:
    """Return a row's `plain_cell` of two columns; raise InputError if the row has no such column,
    which names those that it has. `remedy` is the end of its sentence.
    """
    missing = [column for column in columns if column not in row]
    if missing:
        first, second = likely_columns(row, columns)
        # The first row of a file without a header looks like the others.
        has_text_as_name = any(len(name.split()) > 2 for name in row) or second in row.values()
        if has_text_as_name:
            raise InputError(
                f"the first line, {quoted_list(tuple(row))}, seems to be a row, not the names of "
                f"columns; add a line such as text,label above it, or pass columns={(first, second)!r} "
                f"(--columns '{first},{second}') if it has names{remedy}"
            )
        raise InputError(
            f"row {number} has no column {quoted_list(missing)}, only "
            f"{quoted_list(tuple(row)) or 'none'}; pass columns={(first, second)!r} "
            f"(--columns '{first},{second}'){remedy}"
        )
    return [plain_cell(row[column], number, column) for column in columns]


def likely_columns(row: Mapping[str, Any], columns: tuple[str, str]) -> tuple[str, str]:
    """Return which two columns of a row are likely meant by `columns`: those that it has, then its
    only two columns in their order, or the one with the longest text and the last one.

    Example:
        >>> from icl_lens.prompts.datasets import likely_columns
        >>> row = {"id": "17", "message": "I was charged twice", "topic": "refund"}
        >>> likely_columns(row, ("text", "label"))
        ('message', 'topic')
    """
    other_columns = [name for name in row if name not in columns]
    if len(other_columns) + sum(column in row for column in columns) < 2:
        return columns
    first, second = columns
    if len(row) == len(other_columns) == 2:
        return other_columns[0], other_columns[1]
    if first not in row:
        first = max(other_columns, key=lambda name: len(str(row[name] or "")))
        other_columns.remove(first)
    if second not in row:
        second = other_columns[-1]
    return first, second


def plain_cell(value: Any, number: int, column: str) -> str | int | float | None:
    """Return a cell that is text or a number; raise InputError for other types."""
    if isinstance(value, str) and value.isascii():
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(
                f"row {number} has {value} in column {column!r}; use text, a number or an empty "
                "cell"
            )
        return (
            int(value) if value.is_integer() else value
        )  # integers in a column with gaps are read as floats
    if value is not None and not isinstance(value, (str, int)):
        kind = {"list": "a list", "dict": "an object"}.get(
            type(value).__name__, type(value).__name__
        )
        raise InputError(f"row {number} has {kind} in column {column!r}; use text or a number")
    if isinstance(value, str) and (surrogate := SURROGATE.search(value)):
        raise InputError(
            f"row {number} has an unpaired surrogate {surrogate[0]!r} in column {column!r}; "
            "re-encode the file as UTF-8"
        )
    return value
