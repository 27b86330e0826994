"""Read labeled texts from local files or from data files on the Hub, which are downloaded once and cached."""

import csv
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from icl_lens.errors import InputError
from icl_lens.hub import RangeRequestsUnsupported, RemoteFile, Repository, offline, open_repository
from icl_lens.prompts.prompt import quoted_list

Row = Mapping[str, Any]

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

    `files` is a pattern for the names of a split's files. The first existing column of `labels` is read; `class_names`
    are its class names if the file does not define them. At most the first `max_rows` rows are read.
    """

    repository: str
    text: str
    labels: tuple[str, ...]
    files: str
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
        r"data/{split}-[\d]+-of-[\d]+\.parquet",
        ("World", "Sports", "Business", "Sci/Tech"),
    ),
    "ethos": HubDataset(
        "SetFit/ethos_binary",
        "text",
        ("label_text", "label"),
        r"{split}\.jsonl",
        ("no hate speech", "hate speech"),
    ),
    # 1.1 GB; only the rows used are downloaded.
    "amazon": HubDataset(
        "fancyzhx/amazon_polarity",
        "content",
        ("label",),
        r"amazon_polarity/{split}-[\d]+-of-[\d]+\.parquet",
        ("negative", "positive"),
        max_rows=20_000,
    ),
}
"""The built-in sentence datasets by name."""

_REPOSITORIES = tuple(source.repository for source in DATASETS.values())


def load_hub_splits(name: str, splits: Sequence[str]) -> tuple[dict[str, RawTable], tuple[str, str]]:
    """Return the rows of the splits of one of `DATASETS`, and the names of its text and label columns.

    Files are downloaded once into the cache of huggingface_hub and then read from there, also offline. Of a large
    dataset, only the first rows are downloaded. Raises InputError, with the reason and how to resume, if the download
    fails.
    """
    source = DATASETS[name]
    try:
        tables = (_whole if source.max_rows is None else _first_rows)(name, source, splits)
    except InputError as error:
        if "path=" in str(error) or "choose one of" in str(error):
            raise
        raise InputError(f"{error}; or pass a local copy with path=") from error.__cause__
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
    readers = dict(zip(SUFFIXES, (_json_lines, _csv, _parquet), strict=True))
    tables = []
    for path in paths:
        if not path.is_file():
            raise InputError(f"there is no file {str(path)!r}; pass the path of an existing file or folder")
        if path.suffix not in SUFFIXES:
            raise InputError(f"path must be a file of type {quoted_list(SUFFIXES)}, got {str(path)!r}")
        try:
            tables.append(readers[path.suffix](path))
        except Exception as error:  # the readers raise many types; the file is at fault
            raise InputError(
                f"cannot read {str(path)!r} as {path.suffix}: {_reason(error)}; fix the file or pass another"
            ) from error
    return _joined(tables)


def _json_lines(path: Path) -> RawTable:
    rows = []
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line, object_pairs_hook=_once)
            except RecursionError:
                raise ValueError(f"line {number} is nested too deeply") from None
            except ValueError as error:
                raise ValueError(f"line {number} is not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f'line {number} is not a JSON object like {{"text": "…", "label": "…"}}')
            rows.append(row)
    return RawTable(rows, {})


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict; raise ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, _ in pairs if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"duplicate key {twice!r}")
    return found


def _csv(path: Path) -> RawTable:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        header = next(reader, None)
        if not header:
            raise ValueError("it is empty")
        if len(set(header)) < len(header):
            raise ValueError(f"two columns have the same name, in {header}")
        rows = []
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise ValueError(
                    f"line {reader.line_num} has {len(cells)} cells and the header {len(header)}; quote cells that "
                    "contain commas"
                )
            rows.append({name: cell or None for name, cell in zip(header, cells, strict=True)})
    return RawTable(rows, {})


def _parquet(path: Path) -> RawTable:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if len(set(table.column_names)) < len(table.column_names):
        raise ValueError(f"two columns have the same name, in {table.column_names}")
    return RawTable(table.to_pylist(), _named(table.schema.metadata or {}))


def _whole(name: str, source: HubDataset, splits: Sequence[str]) -> dict[str, RawTable]:
    repository = open_repository(
        source.repository,
        kind="dataset",
        whole=lambda here: all(_files(here, source, split) for split in splits),
        known=_REPOSITORIES,
    )
    files = {split: _of_split(name, repository, source, split) for split in splits}
    folder = repository.fetch([file for split in splits for file in files[split]])
    repository.record_revision()
    return {split: _joined([_read(folder / file, source) for file in files[split]]) for split in splits}


def _joined(tables: Sequence[RawTable]) -> RawTable:
    return RawTable([row for table in tables for row in table.rows], tables[0].class_names)


def _first_rows(name: str, source: HubDataset, splits: Sequence[str]) -> dict[str, RawTable]:
    """Return the first rows of the splits, kept as separate files in the cache."""
    from huggingface_hub import cached_assets_path

    try:
        folder = cached_assets_path("icl_lens", namespace=source.repository, subfolder="main")
    except OSError as error:
        raise InputError(f"cannot write to the cache ({error.strerror}); set HF_HOME to a writable folder") from error
    kept = {
        split: folder / f"{re.sub(r'[^A-Za-z0-9]', '-', split)}-first-{source.max_rows}.parquet" for split in splits
    }
    missing = [split for split in splits if not kept[split].is_file()]
    if missing and offline():
        raise InputError(
            f"the first rows of {source.repository!r} ({quoted_list(missing)}) are not in the cache, and "
            "HF_HUB_OFFLINE is set; unset it once, or pass a local copy with path="
        )
    if missing:
        repository = open_repository(source.repository, kind="dataset", whole=lambda _: False, known=_REPOSITORIES)
        for split in missing:
            files = _of_split(name, repository, source, split)
            _keep(_fetched(repository, source, files), kept[split])
    return {split: _read(kept[split], source) for split in splits}


def _fetched(repository: Repository, source: HubDataset, files: Sequence[str]) -> Any:
    """Return the first rows of some files as an Arrow table."""
    import pyarrow as pa

    columns, tables, left = (source.text, *source.labels), [], source.max_rows or 0
    for file in files:
        try:
            tables.append(_prefix(RemoteFile(repository, file), columns, left))
        except RangeRequestsUnsupported:  # a mirror that serves complete files only
            tables.append(_prefix(str(repository.fetch([file]) / file), columns, left))
        except Exception as error:  # from the network, its libraries or the reader
            raise InputError(
                f"{repository.explain_error(error)} (while downloading the first rows of {file}; none were kept)"
            ) from error
        left -= tables[-1].num_rows
        if left <= 0:
            break
    return pa.concat_tables(tables)


def _keep(table: Any, path: Path) -> None:
    import pyarrow.parquet as pq

    handle, temp_path = tempfile.mkstemp(dir=path.parent, prefix=".icl_lens.", suffix=".parquet")
    os.close(handle)
    try:
        pq.write_table(table, temp_path, compression="zstd")
        os.replace(temp_path, path)
    except OSError as error:
        raise InputError(f"cannot cache the rows ({error.strerror}); free space in {str(path.parent)!r}") from error
    finally:
        Path(temp_path).unlink(missing_ok=True)


def _prefix(file: Any, columns: Sequence[str], count: int) -> Any:
    """Return at most `count` rows of a parquet file, reading only their row groups."""
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file)
    wanted = [column for column in columns if column in parquet.schema_arrow.names]
    groups, rows, spans = [], 0, []
    while rows < count and len(groups) < parquet.num_row_groups:
        group = parquet.metadata.row_group(len(groups))
        rows += group.num_rows
        groups.append(len(groups))
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.partition(".")[0] in wanted:
                start = column.dictionary_page_offset or column.data_page_offset
                spans += [start, start + column.total_compressed_size]
    if isinstance(file, RemoteFile) and spans:
        file.read_ahead(min(spans), max(spans))  # one request for all columns and groups
    return parquet.read_row_groups(groups, columns=wanted).slice(0, count)


def _files(repository: Repository, source: HubDataset, split: str) -> list[str]:
    pattern = re.compile(source.files.replace("{split}", re.escape(split)))
    return sorted(file for file in repository.files if pattern.fullmatch(file))


def _of_split(name: str, repository: Repository, source: HubDataset, split: str) -> list[str]:
    """Return the files of a split; raise InputError that lists the existing splits if there are none."""
    if not (files := _files(repository, source, split)):
        raise InputError(_no_split(name, repository, source, split))
    return files


def _no_split(name: str, repository: Repository, source: HubDataset, split: str) -> str:
    pattern = re.compile(source.files.replace("{split}", r"(\w+)"))
    names = sorted({found[1] for file in repository.files if (found := pattern.fullmatch(file))})
    splits = quoted_list(names) or "none"
    if repository.from_cache:
        return f"{name} has no split {split!r} in the cache, only {splits}; download it once with network access"
    return f"{name} has no split {split!r}, only {splits}; choose one of them"


def _read(path: Path, source: HubDataset) -> RawTable:
    """Return the rows of a downloaded file: JSON lines, or parquet with its class names."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            table = pq.read_table(path)
            rows, names = table.to_pylist(), _named(table.schema.metadata or {})
        else:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
            names = {}
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a line is not an object")
    except (OSError, ValueError, ArithmeticError, TypeError) as error:  # pyarrow's errors are ValueErrors and OSErrors
        raise InputError(
            f"{path.name!r} of {source.repository!r} is corrupt ({_reason(error)}); delete {str(path)!r} and retry to "
            "download it again"
        ) from error
    return RawTable(
        rows, {**dict.fromkeys(source.labels, source.class_names), **names} if source.class_names else names
    )


def _named(metadata: Mapping[bytes, bytes]) -> dict[str, Sequence[str]]:
    """Return the class names that the library `datasets` stores with the columns."""
    features = json.loads(metadata.get(b"huggingface") or b"{}").get("info", {}).get("features", {})
    return {column: kind["names"] for column, kind in features.items() if isinstance(kind, dict) and kind.get("names")}


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
