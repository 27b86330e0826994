"""Writing files so that a reader never sees half of one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from icl_lens.errors import InputError


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; moved into place when the block ends well, removed when it does not.

    Raises InputError if the folder does not exist or cannot be written to.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.", suffix=path.suffix)
    except OSError as error:
        raise InputError(
            f"cannot write {str(path)!r}: {error.strerror or error}; choose an existing, writable folder"
        ) from error
    os.close(handle)
    beside = Path(name)
    try:
        yield beside
        umask = os.umask(0)
        os.umask(umask)
        beside.chmod(0o666 & ~umask)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Writes text beside `path`, then moves it into place; raises InputError where the folder does not allow it."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8")
