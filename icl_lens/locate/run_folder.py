"""The folder of a run that can be killed and continued: lock, configuration, chunks, results."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from icl_lens.errors import InputError
from icl_lens.files import atomic_write, remove_partial_files

MANIFEST = "manifest.json"


class RunFolder:
    """Chunks and results of one run with one configuration, each written whole or not at all.

    The bytes depend on the configuration and the numbers only: no times, hosts or counters. Use inside `opened`.
    """

    def __init__(self, path: Path, configuration: Mapping[str, Any]):
        self.path = path
        self.configuration = dict(configuration)
        self._metadata = {
            f"icl_lens.{name}": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in self.configuration.items()
        }

    def initialize(self) -> None:
        """Makes the folder this configuration's: writes the manifest, or compares it with the one that is there.

        Half-written files of an earlier run that was killed are removed. Raises InputError if the folder holds another
        configuration, or files without a manifest.
        """
        manifest = self.path / MANIFEST
        text = json.dumps(self.configuration, indent=1, ensure_ascii=False) + "\n"
        if manifest.is_file():
            self._compare(manifest, json.loads(text))
        elif others := sorted(entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")):
            raise InputError(
                f"the folder {str(self.path)!r} holds other files ({', '.join(others[:3])}) and no {MANIFEST}; "
                "choose an empty or new folder"
            )
        remove_partial_files(self.path)
        if not manifest.is_file():
            self.write_bytes(MANIFEST, text.encode())

    def _compare(self, manifest: Path, ours: dict[str, Any]) -> None:
        try:
            theirs = json.loads(manifest.read_text(encoding="utf-8"))
            different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            raise InputError(f"{str(manifest)!r} is damaged: it is no JSON object; choose another folder") from None
        if different:
            name = different[0]
            more = f" (and {len(different) - 1} more differ)" if len(different) > 1 else ""
            raise InputError(
                f"the folder {str(self.path)!r} holds a run with {name}={theirs.get(name)!r}, and this one has "
                f"{name}={ours.get(name)!r}{more}; choose another folder, or the settings in its {MANIFEST}"
            )

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes a file; raises InputError if the disk is full or the folder does not allow it."""
        try:
            with atomic_write(self.path / name) as beside:
                beside.write_bytes(data)
        except InputError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in (ENOSPC, EDQUOT):
                raise InputError(
                    f"the disk is full: {name!r} could not be written to {str(self.path)!r}; make room and start "
                    "again with the same settings, which goes on from the chunks that are there"
                ) from cause
            reason = (cause.strerror if isinstance(cause, OSError) else None) or str(error)
            raise InputError(
                f"{name!r} could not be written to {str(self.path)!r}: {reason}; fix that and start "
                "again with the same settings, which goes on from the chunks that are there"
            ) from cause

    def write(self, name: str, columns: Mapping[str, Any]) -> None:
        """Writes named columns as parquet, with the configuration as metadata and a digest of the whole file in it."""
        table = pa.table(dict(columns)).replace_schema_metadata(self._metadata)
        buffer = BytesIO()
        with pq.ParquetWriter(buffer, table.schema, compression="zstd", write_page_checksum=True) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata({DIGEST: NO_DIGEST})
        data = buffer.getvalue()
        self.write_bytes(name, data.replace(NO_DIGEST.encode(), sha256(data).hexdigest().encode()))

    def read(self, name: str) -> pa.Table | None:
        """The columns of a chunk; None where it is not there yet. Raises `DamagedChunk` if it cannot be trusted."""
        path = self.path / name
        if not path.is_file():
            return None
        try:
            data = path.read_bytes()
            _check_digest(data)
            with pq.ParquetFile(BytesIO(data), page_checksum_verification=True) as file:
                table = file.read()
            metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
        except Exception as error:  # whatever the reader makes of it
            raise CorruptChunk(name, (str(error).strip().splitlines() or [type(error).__name__])[0]) from error
        if any(metadata.get(key) != value for key, value in self._metadata.items()):
            raise CorruptChunk(name, "it says that it belongs to another configuration")
        return table


DIGEST, NO_DIGEST = "icl_lens.sha256", "0" * 64
"""Where a chunk keeps the SHA-256 of its own bytes, and what stands there while they are counted."""


def _check_digest(data: bytes) -> None:
    """Raises ValueError unless a file's bytes are those that were written: before anything else is read of them."""
    if not (found := re.search(DIGEST.encode() + rb"[^0-9a-f]{1,8}([0-9a-f]{64})", data)):
        raise ValueError("it has no checksum")
    start, end = found.span(1)
    if sha256(data[:start] + NO_DIGEST.encode() + data[end:]).hexdigest().encode() != found[1]:
        raise ValueError("its bytes are not those that were written")


class CorruptChunk(ValueError):
    """A chunk that cannot be read, or fails its checksums."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"{name} is damaged ({reason})")
        self.name = name


@contextmanager
def locked_folder(path: Path) -> Iterator[Path]:
    """The folder, made if need be, and locked against other runs until the block ends or the process dies.

    Raises InputError if the folder cannot be made, or another run is writing it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path / ".lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise InputError(
            f"another run is writing the folder {str(path)!r}; wait for it to end, or choose another folder"
        ) from None
    except OSError as error:
        raise InputError(
            f"the folder {str(path)!r} cannot be written to: {error.strerror or error}; choose another folder"
        ) from error
    try:
        yield path
    finally:
        lock.release()
