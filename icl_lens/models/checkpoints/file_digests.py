"""Recognize files that were replaced or damaged.

1. `DigestedFile` is a file whose content was read once; `check_unchanged` compares its size, time
   and inode later.
2. `record_digests` writes a folder's files to disk and records a digest of each; `damaged_file`
   compares them on loading. Of large files, the digest reads 64 bytes of every 4 KiB: any page that
   is zeroed or lost is noticed, at a fraction of the time of loading.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from icl_lens.errors import InputError

DIGESTS = "digests.json"
"""The file in which a folder's digests are recorded."""
_PAGE, _SAMPLE = 4096, 64
_WHOLE = 4 * 1024**2
"""Smaller files are read completely."""


@dataclass(frozen=True)
class DigestedFile:
    """A file, the SHA-256 digest of its content, and its state before it was read."""

    path: Path
    sha256: str
    state: tuple[int, int, int]

    @classmethod
    def read(cls, path: Path) -> "DigestedFile":
        """Read a file once; raise InputError if it cannot be read."""
        try:
            state = _state(path)
            with path.open("rb") as stream:
                return cls(path, hashlib.file_digest(stream, "sha256").hexdigest(), state)
        except OSError as error:
            raise InputError(
                f"cannot read {str(path)!r}: {error.strerror}; pass the path of a readable file"
            ) from error

    def check_unchanged(self) -> None:
        """Raise InputError if the file was replaced or written to since its digest was computed."""
        try:
            is_unchanged = _state(self.path) == self.state
        except OSError:
            is_unchanged = False
        if not is_unchanged:
            raise InputError(
                f"{str(self.path)!r} must not change while it is converted, but it was replaced or "
                "written to; retry when it is complete"
            )


def record_digests(folder: Path) -> None:
    """Write all files of a folder to disk, and a digest of each to `DIGESTS`."""
    digests = {path.name: _page_digest(path) for path in sorted(folder.iterdir())}
    (folder / DIGESTS).write_text(json.dumps(digests, indent=2))
    for path in [*folder.iterdir(), folder]:
        sync_to_disk(path)


def damaged_file(folder: Path) -> str | None:
    """Return the name of a file that is not as `record_digests` left it; None if all are."""
    try:
        digests = json.loads((folder / DIGESTS).read_text())
        for name, digest in digests.items():
            if not (folder / name).is_file() or _page_digest(folder / name) != digest:
                return name
    except (OSError, ValueError, AttributeError):
        return DIGESTS
    return None


def sync_to_disk(path: Path) -> None:
    """Ask the system to write a file, or a folder's entries, to disk; systems without it for
    folders are skipped.
    """
    try:
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except OSError:  # Windows cannot open folders
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _state(path: Path) -> tuple[int, int, int]:
    """Return a file's size, time of the last change in nanoseconds, and inode."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _page_digest(path: Path) -> str:
    """Return a hexadecimal digest of a file's size and its content, or 64 bytes of each page of a
    large file.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    if size <= _WHOLE:
        digest.update(path.read_bytes())
        return digest.hexdigest()
    content = np.memmap(path, dtype=np.uint8, mode="r")
    step = 2**14 * _PAGE
    for start in range(0, size, step):
        block = content[start : start + step]
        pages = block[: len(block) // _PAGE * _PAGE].reshape(-1, _PAGE)
        digest.update(pages[:, -_SAMPLE:].tobytes())
        digest.update(block[len(pages) * _PAGE :].tobytes())
    return digest.hexdigest()
