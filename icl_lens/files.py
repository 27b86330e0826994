"""Writing files so that a reader never sees half of one."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def other_configuration(
    folder: str | Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], *, remedy: str
) -> InputError | None:
    """The error that a folder holds the result of another configuration than ours; None where they are the same.

    `theirs` was read from a JSON file; `ours` is compared as it would be read from one (a tuple as a list). The error
    names every value that differs, and ends with what to do about it.

    Example:
        >>> from icl_lens.files import other_configuration
        >>> print(other_configuration("results", {"n": 24}, {"n": 26}, remedy="choose another folder"))
        'results' holds a result of another configuration (n 24 there, 26 now); choose another folder
    """
    now = json.loads(json.dumps(dict(ours)))
    keys = [key for key in sorted({*theirs, *now}) if theirs.get(key) != now.get(key)]
    if not keys:
        return None
    differences = ", ".join(f"{key} {theirs.get(key)!r} there, {now.get(key)!r} now" for key in keys)
    return InputError(f"{str(folder)!r} holds a result of another configuration ({differences}); {remedy}")
