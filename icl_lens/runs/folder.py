"""The folder of a resumable run, with its configuration, chunks, results and locks.

Processes share a folder: each locks the chunks that it computes. The others compute other chunks,
and wait only for chunks that they need.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from icl_lens.errors import InputError, first_line
from icl_lens.foundation.files import atomic_write, parse_json, remove_partial_files
from icl_lens.result.stored import encode
from icl_lens.result.tables import csv_text

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "manifest.json"
# Entry of a configuration with the format of chunks. Chunks of format 2 name themselves and their
# prompts in their metadata; those of format 3 have one row per prompt.
FORMAT_NAME, FORMAT = "format", 3
# Characters of a configuration's value that an error quotes.
MAX_SHOWN = 80


class FolderError(InputError):
    """A run's folder holds another run, or cannot be read or written."""


class RunFolder:
    """Chunks and results of one run with one configuration, written atomically.

    The files' bytes depend only on the configuration and the numbers, not on times, hosts or
    counters.
    """

    def __init__(self, path: Path, configuration: Mapping[str, Any]):
        self.path = path
        self.configuration = dict(configuration)
        self._metadata: dict[str, str] = {}
        for name, value in self.configuration.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            self._metadata[f"icl_lens.{name}"] = text

    def initialize(self) -> None:
        """Create the folder if needed, and write the manifest or compare it with an existing one.

        A folder with a manifest need not be writable, since its chunks may be all that the run
        needs. Raise InputError if the folder cannot be created, or holds another configuration or
        files without a manifest.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not self._has_manifest():
                with self.locked():
                    self._initialize()
        except OSError as error:
            raise self._write_error(error) from error

    def _initialize(self) -> None:
        if self._has_manifest():  # written by another process in the meantime
            return
        names = [entry.name for entry in self.path.iterdir()]
        if visible_names := sorted(name for name in names if not name.startswith(".")):
            raise FolderError(
                f"folder {str(self.path)!r} must be empty or hold a {MANIFEST}, got "
                f"{', '.join(visible_names[:3])}; choose an empty or new folder"
            )
        text = json.dumps(self.configuration, indent=1, ensure_ascii=False) + "\n"
        self.write_bytes(MANIFEST, text.encode())

    def _has_manifest(self) -> bool:
        """Return whether the folder has a manifest, which must be that of this configuration."""
        manifest = self.path / MANIFEST
        if not manifest.exists():
            return False
        self._compare(manifest, json.loads(json.dumps(self.configuration)))
        return True

    def _compare(self, manifest: Path, ours: dict[str, Any]) -> None:
        """Raise InputError if an existing manifest is unreadable or of another configuration."""
        try:
            theirs = parse_json(manifest.read_text(encoding="utf-8"))
            if not isinstance(theirs, dict):
                raise TypeError("not an object")
            different = _differences(ours, theirs)  # fails for files that are not ours
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            raise FolderError(
                f"cannot read {str(manifest)!r} as a JSON object; choose another folder"
            ) from None
        if ours.get(FORMAT_NAME) != theirs.get(FORMAT_NAME):
            raise FolderError(
                f"folder {str(self.path)!r} must hold a run of format {ours.get(FORMAT_NAME)}, got "
                f"format {_shortened(theirs.get(FORMAT_NAME, 1))} of another version of icl_lens; "
                "choose another folder, or use that version"
            )
        if different:
            name, (our_value, their_value) = next(iter(different.items()))
            more = f" (and {len(different) - 1} more differ)" if len(different) > 1 else ""
            raise FolderError(
                f"folder {str(self.path)!r} holds a run with {name}={_shortened(their_value)}, got "
                f"{name}={_shortened(our_value)}{more}; choose another folder, or use the settings "
                f"in its {MANIFEST}"
            )

    def _write_error(self, error: OSError) -> FolderError:
        return FolderError(
            f"cannot write to folder {str(self.path)!r}: {error.strerror or error}; choose another "
            "folder"
        )

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file atomically; call it with the lock of the chunk or folder.

        Raise InputError if the disk is full or the folder is not writable.
        """
        remove_partial_files(self.path / name)
        try:
            with atomic_write(self.path / name) as temporary:
                temporary.write_bytes(data)
        except InputError as error:
            raise FolderError(f"{error}, and rerun with the same settings to resume") from error

    def remove(self, name: str) -> None:
        """Remove a file; raise InputError if the folder is not writable."""
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise self._write_error(error) from error

    def write(self, name: str, table: pa.Table, contents: Mapping[str, str] | None = None) -> None:
        """Write a table as Parquet; `contents` says what it holds, which `read` compares."""
        self.write_bytes(name, self._parquet(table, contents or {}))

    def _parquet(self, table: pa.Table, contents: Mapping[str, str]) -> bytes:
        """Return a table as a file with the configuration and `contents` as metadata."""
        buffer = BytesIO()
        table = table.replace_schema_metadata(self._metadata | _contents_metadata(contents))
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        return buffer.getvalue()

    def write_result(self, tables: "Mapping[str, pd.DataFrame]", result: Mapping[str, Any]) -> None:
        """Write tables as Parquet and CSV, and result.json, unless the folder has the same already.

        Raise InputError if the folder is not writable.
        """
        files: dict[str, bytes] = {}
        for name, table in tables.items():
            columns = pa.table({column: table[column].to_numpy() for column in table.columns})
            files[f"{name}.parquet"] = self._parquet(columns, {})
            files[f"{name}.csv"] = csv_text(table).encode()
        numbers = encode(result)  # strict JSON: null for NaN
        text = json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False)
        files["result.json"] = f"{text}\n".encode()
        missing = [name for name, data in files.items() if not self._holds(name, data)]
        if not missing:  # as in a finished run, whose folder need not be writable
            return
        try:
            with self.locked():
                for name in missing:
                    self.write_bytes(name, files[name])
        except OSError as error:
            raise self._write_error(error) from error

    def _holds(self, name: str, data: bytes) -> bool:
        """Return whether a file has this content."""
        try:
            return (self.path / name).read_bytes() == data
        except OSError:
            return False

    @contextmanager
    def claimed(self, names: Sequence[str], n: int) -> Iterator[list[str]]:
        """Lock up to n of the chunks that are missing, and yield their names.

        If other processes compute all of them, wait for the first chunk; the list is empty if it is
        stored by then. A process that dies loses its locks.
        """
        claims: dict[str, FileLock] = {}

        def claim(name: str, timeout: float) -> None:
            lock = FileLock(self.path / f".{name}.lock", timeout=timeout)
            try:
                lock.acquire()
            except Timeout:
                return
            except OSError as error:
                raise self._write_error(error) from error
            claims[name] = lock
            if (self.path / name).is_file():  # stored since the caller looked
                release(name)

        def release(name: str) -> None:
            lock = claims.pop(name)
            with suppress(OSError):
                Path(lock.lock_file).unlink()
            lock.release()

        try:
            for name in names:
                if len(claims) < n and not (self.path / name).is_file():
                    claim(name, 0)
            if not claims and not (self.path / names[0]).is_file():
                claim(names[0], -1)
            yield list(claims)
        finally:
            for name in list(claims):
                release(name)

    def locked(self) -> FileLock:
        """Return the lock under which files other than chunks are written."""
        return FileLock(self.path / ".lock")

    def read(self, name: str, contents: Mapping[str, str] | None = None) -> pa.Table | None:
        """Read a chunk, or return None if it does not exist.

        Raise CorruptChunk if it fails its checks or was not written with the same `contents`, and
        InputError if it is no readable file.
        """
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FolderError(
                f"cannot read {str(self.path / name)!r}: {error.strerror or error}; remove it to "
                "compute it again"
            ) from error
        try:
            table = pq.ParquetFile(BytesIO(data), page_checksum_verification=True).read()
            metadata = {}
            for key, value in (table.schema.metadata or {}).items():
                metadata[key.decode()] = value.decode()
        except Exception as error:  # the reader may raise any error on corrupt bytes
            raise CorruptChunk(f"{name} is corrupt ({first_line(error)})") from error
        if not _has_entries(metadata, self._metadata):
            raise CorruptChunk(f"{name} is corrupt (it belongs to another configuration)")
        if not _has_entries(metadata, _contents_metadata(contents or {})):
            raise CorruptChunk(f"{name} is corrupt (it is the chunk of other prompts)")
        return table


def _has_entries(metadata: Mapping[str, str], entries: Mapping[str, str]) -> bool:
    return all(metadata.get(name) == value for name, value in entries.items())


def _contents_metadata(contents: Mapping[str, str]) -> dict[str, str]:
    return {f"icl_lens.chunk.{name}": value for name, value in contents.items()}


def _differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return name -> (our value, their value) where two configurations differ.

    The name of an entry of a mapping is the mapping's name, a dot, and the entry's.
    """
    different: dict[str, tuple[Any, Any]] = {}
    for name in {**ours, **theirs}:
        our_value, their_value = ours.get(name), theirs.get(name)
        if isinstance(our_value, dict) and isinstance(their_value, dict):
            different |= _differences(our_value, their_value, f"{prefix}{name}.")
        elif our_value != their_value:
            different[prefix + name] = our_value, their_value
    return different


def _shortened(value: Any) -> str:
    """Return a value of a configuration for a sentence."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


class CorruptChunk(UserWarning):
    """Raised for a chunk that fails its checksums, or is of another configuration or other prompts.

    Runs recompute the chunk and give this warning.
    """
