"""The folder of a resumable run: lock, configuration, chunks and results."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from icl_lens.errors import InputError
from icl_lens.files import atomic_write, remove_partial_files
from icl_lens.hub import first_line

MANIFEST = "manifest.json"


class RunFolder:
    """Chunks and results of one run with one configuration, written atomically.

    The files' bytes depend only on the configuration and the numbers, not on times, hosts or counters. Use the class
    inside `locked_folder`.
    """

    def __init__(self, path: Path, configuration: Mapping[str, Any]):
        self.path = path
        self.configuration = dict(configuration)
        self._metadata = {
            f"icl_lens.{name}": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in self.configuration.items()
        }

    def check_by(self, by: str) -> None:
        """Raise InputError unless the configuration's entry "by" is this one, so that runs' chunks do not mix."""
        if (found := self.configuration.get("by")) != by:
            raise InputError(
                f"the folder's configuration must have by={by!r}, got {found!r}; set it, so that its chunks are "
                "not mistaken for others"
            )

    def initialize(self) -> None:
        """Write the manifest, or compare it with an existing one, and remove partial files of a killed run.

        Raise InputError if the folder holds another configuration or files without a manifest.
        """
        manifest = self.path / MANIFEST
        text = json.dumps(self.configuration, indent=1, ensure_ascii=False) + "\n"
        if manifest.is_file():
            self._compare(manifest, json.loads(text))
        elif others := sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")):
            raise InputError(
                f"folder {str(self.path)!r} must be empty or hold a {MANIFEST}, got {', '.join(others[:3])}; choose an "
                "empty or new folder"
            )
        remove_partial_files(self.path)
        if not manifest.is_file():
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
        """Write a file atomically. Raise InputError if the disk is full or the folder is not writable."""
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

    def read(self, name: str) -> pa.Table | None:
        """Read a chunk, or return None if it does not exist. Raise CorruptChunk if it fails its checks."""
        path = self.path / name
        if not path.is_file():
            return None
        try:
            table = pq.ParquetFile(BytesIO(path.read_bytes()), page_checksum_verification=True).read()
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        except Exception as error:  # the reader may raise any error on corrupt bytes
            raise CorruptChunk(f"{name} is corrupt ({first_line(error)})") from error
        if any(metadata.get(key) != value for key, value in self._metadata.items()):
            raise CorruptChunk(f"{name} is corrupt (it belongs to another configuration)")
        return table


class CorruptChunk(ValueError):
    """Raised for a chunk that cannot be read, fails its checksums, or belongs to another configuration."""


@contextmanager
def locked_folder(path: Path) -> Iterator[Path]:
    """Create the folder if needed and lock it until the block ends or the process dies.

    Raise InputError if the folder cannot be created or another run is using it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise InputError(
            f"folder {str(path)!r} is in use by another run; wait for it to end, or choose another folder"
        ) from None
    except OSError as error:
        raise InputError(
            f"cannot write to folder {str(path)!r}: {error.strerror or error}; choose another folder"
        ) from error
    try:
        yield path
    finally:
        lock.release()
