"""Read labeled texts from local files or from data files on the Hub, which are downloaded once and cached."""

import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icl_lens.errors import InputError
from icl_lens.hub import Repository, first_line, open_repository
from icl_lens.prompts.prompt import quoted_list

SUFFIXES: tuple[str, ...] = (".jsonl", ".csv", ".parquet")
"""Supported file suffixes."""


@dataclass(frozen=True)
class RawTable:
    """Raw rows. `class_names[column]` has the class names of a column of class indices."""

    rows: list[dict[str, Any]]
    class_names: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class HubDataset:
    """The location of a dataset on the Hub, in data files that need no code from the repository.

    `file` is a regular expression for the name of the file that is read for `{split}`, and `text` the text column. The
    first existing column of `labels` is read; `class_names` are its class names if the file does not define them. At
    most the first `max_rows` rows are read.
    """

    repository: str
    text: str
    labels: tuple[str, ...]
    file: str
    class_names: tuple[str, ...] = ()
    max_rows: int | None = None


DATASETS = {
    # The copy in GLUE has no labels in its test split.
    "sst2": HubDataset("SetFit/sst2", "text", ("label_text", "label"), r"{split}\.jsonl", ("negative", "positive")),
    # The original repository of TREC needs a script. Coarse classes: ABBR, DESC, ENTY, HUM, LOC, NUM.
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


def load_hub_splits(name: str, splits: Sequence[str]) -> tuple[dict[str, RawTable], tuple[str, str]]:
    """Return the rows of the splits of one of `DATASETS`, and the names of its text and label columns.

    Files are downloaded once into the cache of huggingface_hub and then read from there, also offline. Raise
    InputError, with the cause and a remedy, if the download fails or the files are not as expected.
    """
    source = DATASETS[name]

    def file_of(repository: Repository, split: str) -> str | None:
        pattern = source.file.replace("{split}", re.escape(split))
        return next((file for file in repository.files if re.fullmatch(pattern, file)), None)

    try:
        repository = open_repository(
            source.repository,
            kind="dataset",
            is_complete=lambda r: all(file_of(r, split) for split in splits),
        )
        files = {split: file_of(repository, split) for split in splits}
        if missing := [split for split in splits if files[split] is None]:
            found = re.compile(source.file.replace("{split}", r"(\w+)"))
            existing = sorted(match[1] for match in map(found.fullmatch, repository.files) if match)
            raise InputError(f"{name} must have the split {missing[0]!r}, got {quoted_list(existing)}; choose another")
        folder = repository.fetch([file for file in files.values() if file is not None])
    except InputError as error:
        raise InputError(f"{error}; or pass a local copy with path=") from error.__cause__
    repository.record_revision()
    tables = {}
    for split, file in files.items():
        path = folder / str(file)
        table = _read(path, f"delete {str(path)!r} to download it again", source.max_rows)
        tables[split] = RawTable(table.rows, dict.fromkeys(source.labels, source.class_names) | dict(table.class_names))
    columns = {column for table in tables.values() for row in table.rows[:1] for column in row}
    label = next((column for column in source.labels if column in columns), None)
    if source.text not in columns or label is None:
        raise InputError(
            f"{source.repository!r} must have the columns {source.text!r} and "
            f"{' or '.join(map(repr, source.labels))}, got {quoted_list(sorted(columns)) or 'none'}; pass a local copy "
            "with path="
        )
    return tables, (source.text, label)


def read_files(paths: Sequence[Path]) -> RawTable:
    """Return the raw rows of one file or its shards; raise InputError if they cannot be read.

    Cells of a .csv are strings ("01" stays "01", "NA" stays "NA"); an empty cell is a missing value.
    """
    tables = [_read(path, "fix the file or pass another") for path in paths]
    return RawTable([row for table in tables for row in table.rows], tables[0].class_names)


def _read(path: Path, remedy: str, max_rows: int | None = None) -> RawTable:
    """Return at most the first `max_rows` rows of a file."""
    if not path.is_file():
        raise InputError(f"there is no file {str(path)!r}; pass the path of an existing file or folder")
    if path.suffix not in SUFFIXES:
        raise InputError(f"path must be a file of type {quoted_list(SUFFIXES)}, got {str(path)!r}")
    try:
        if path.suffix == ".parquet":
            return _parquet(path, max_rows)
        rows = _json_lines(path) if path.suffix == ".jsonl" else _csv(path)
        return RawTable(list(itertools.islice(rows, max_rows)), {})
    except Exception as error:  # the readers raise many types; the file is at fault
        raise InputError(f"cannot read {str(path)!r} as {path.suffix}: {first_line(error)}; {remedy}") from error


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f'line {number} is not a JSON object like {{"text": "…", "label": "…"}}')
            yield row


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        header = _distinct(next(reader, []))
        for cells in filter(None, reader):
            if len(cells) != len(header):
                raise ValueError(
                    f"line {reader.line_num} has {len(cells)} cells and the header {len(header)}; quote cells that "
                    "contain commas"
                )
            yield {name: cell or None for name, cell in zip(header, cells, strict=True)}


def _parquet(path: Path, max_rows: int | None) -> RawTable:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    _distinct(file.schema_arrow.names)
    # The library `datasets` stores class names in this metadata.
    info = json.loads((file.schema_arrow.metadata or {}).get(b"huggingface") or b"{}").get("info", {})
    features = {column: kind for column, kind in info.get("features", {}).items() if isinstance(kind, dict)}
    rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
    return RawTable(
        list(itertools.islice(rows, max_rows)),
        {column: kind["names"] for column, kind in features.items() if kind.get("names")},
    )


def _distinct(columns: list[str]) -> list[str]:
    """Return the column names; raise ValueError if there are none or if one repeats."""
    if not columns or len(set(columns)) < len(columns):
        raise ValueError(f"columns must have different names, got {columns}")
    return columns
