"""The folder of a resumable run: configuration, chunks, results, and the locks by which processes share it.

A process locks each chunk that it computes. Others compute other chunks, and wait only for chunks that they need.
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

from icl_lens.errors import InputError
from icl_lens.files import atomic_write, remove_partial_files
from icl_lens.hub import first_line

if TYPE_CHECKING:
    import pandas as pd

MANIFEST = "manifest.json"


class RunFolder:
    """Chunks and results of one run with one configuration, written atomically.

    The files' bytes depend only on the configuration and the numbers, not on times, hosts or counters.
    """

    def __init__(self, path: Path, configuration: Mapping[str, Any]):
        self.path = path
        self.configuration = dict(configuration)
        self._metadata = {
            f"icl_lens.{name}": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in self.configuration.items()
        }

    def initialize(self) -> None:
        """Create the folder if needed, and write the manifest or compare it with an existing one.

        Raise InputError if the folder cannot be created, or holds another configuration or files without a manifest.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.locked():
                self._initialize()
        except OSError as error:
            raise InputError(
                f"cannot write to folder {str(self.path)!r}: {error.strerror or error}; choose another folder"
            ) from error

    def _initialize(self) -> None:
        manifest = self.path / MANIFEST
        text = json.dumps(self.configuration, indent=1, ensure_ascii=False) + "\n"
        if manifest.is_file():
            self._compare(manifest, json.loads(text))
        elif others := sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")):
            raise InputError(
                f"folder {str(self.path)!r} must be empty or hold a {MANIFEST}, got {', '.join(others[:3])}; choose an "
                "empty or new folder"
            )
        else:
            self.write_bytes(MANIFEST, text.encode())

    def _compare(self, manifest: Path, ours: dict[str, Any]) -> None:
        """Raise InputError if an existing manifest is unreadable or differs from this configuration."""
        try:
            theirs = json.loads(manifest.read_text(encoding="utf-8"))
            different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            raise InputError(f"cannot read {str(manifest)!r} as a JSON object; choose another folder") from None
        if different:
            name = different[0]
            more = f" (and {len(different) - 1} more differ)" if len(different) > 1 else ""
            raise InputError(
                f"folder {str(self.path)!r} holds a run with {name}={theirs.get(name)!r}, got "
                f"{name}={ours.get(name)!r}{more}; choose another folder, or use the settings in its {MANIFEST}"
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
            raise InputError(f"{error}, and rerun with the same settings to resume") from error

    def write(self, name: str, table: pa.Table) -> None:
        """Write a table as Parquet, with the configuration as metadata and a checksum of every page."""
        buffer = BytesIO()
        table = table.replace_schema_metadata(self._metadata)
        pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
        self.write_bytes(name, buffer.getvalue())

    def write_result(self, tables: "Mapping[str, pd.DataFrame]", result: Mapping[str, Any]) -> None:
        """Write tables as Parquet and CSV, and result.json. Raise InputError if the folder is not writable."""
        with self.locked():
            for name, table in tables.items():
                self.write(f"{name}.parquet", pa.table({column: table[column].to_numpy() for column in table.columns}))
                self.write_bytes(f"{name}.csv", table.to_csv(index=False, lineterminator="\n").encode())
            self.write_bytes("result.json", (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())

    @contextmanager
    def claimed(self, names: Sequence[str], n: int) -> Iterator[list[str]]:
        """Lock up to n of the chunks that are missing, and yield their names; wait if others compute all of them.

        The list is empty if waiting found the first chunk stored. A process that dies loses its locks.
        """
        claims: dict[str, FileLock] = {}

        def claim(name: str, timeout: float) -> None:
            lock = FileLock(self.path / f".{name}.lock", timeout=timeout)
            try:
                lock.acquire()
            except Timeout:
                return
            except OSError as error:
                raise InputError(f"cannot write to folder {str(self.path)!r}: {error.strerror or error}") from error
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

    def read(self, name: str) -> pa.Table | None:
        """Read a chunk, or return None if it does not exist. Raise CorruptChunk if it fails its checks."""
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            return None
        try:
            table = pq.ParquetFile(BytesIO(data), page_checksum_verification=True).read()
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        except Exception as error:  # the reader may raise any error on corrupt bytes
            raise CorruptChunk(f"{name} is corrupt ({first_line(error)})") from error
        if any(metadata.get(key) != value for key, value in self._metadata.items()):
            raise CorruptChunk(f"{name} is corrupt (it belongs to another configuration)")
        return table


class CorruptChunk(UserWarning):
    """Raised for a chunk that cannot be read, fails its checksums, or belongs to another configuration.

    Runs recompute the chunk and give this warning.
    """
