"""Writing files so that a reader never sees half of one."""

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from errno import EACCES, EDQUOT, EFBIG, EISDIR, ENAMETOOLONG, ENOENT, ENOSPC
from pathlib import Path
from typing import Any

from icl_lens.errors import InputError

TEMP_FILE_NAME = re.compile(r"\.icl_lens-.*-[a-z0-9_]{8}(\.[A-Za-z0-9]+)?")
"""The names of temporary files that `replacing` makes, and nobody else."""


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; moved into place when the block ends well, removed when it does not.

    A file that is there keeps its mode; of a symbolic link the file it points to is replaced, not the link; a device or
    pipe (/dev/stdout) is written to, never replaced. Raises InputError if `path` cannot be written: no such folder, a
    folder itself, a full disk, no permission.
    """
    path = Path(path)
    try:
        target = _target(path)
        folder = tempfile.gettempdir() if target is None else target.parent
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".icl_lens-{path.stem[:30]}-", suffix=path.suffix[:20])
        os.close(handle)
    except (OSError, ValueError, RuntimeError) as error:  # a name with a null byte, a loop of links
        raise _not_written(path, error) from error
    temp_path = Path(name)
    try:
        yield temp_path
        if target is None:
            _pour(temp_path, path)
        else:
            temp_path.chmod(_mode(target))
            temp_path.replace(target)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _not_written(path, error) from error
    finally:
        temp_path.unlink(missing_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Removes what a process that was killed while it wrote has left in a folder; nobody else may be writing there."""
    for half in folder.iterdir():
        if TEMP_FILE_NAME.fullmatch(half.name) and half.is_file() and not half.is_symlink():
            half.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Writes text beside `path`, then moves it into place; raises InputError as `replacing` does."""
    with atomic_write(path) as temp_path:
        # What is no valid Unicode (half a surrogate pair) is written as its escape.
        temp_path.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def check_writable(*paths: str | Path | None) -> None:
    """Raises InputError if one of the files cannot be written, or two of them are the same; None is left out.

    To call before a long computation: nothing is written or changed.
    """
    seen: dict[str, Path] = {}
    for path in (Path(path) for path in paths if path is not None):
        try:
            target = _target(path)
            if target is None:
                continue
            if not target.parent.is_dir():
                raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
            if not os.access(target.parent, os.W_OK | os.X_OK):
                raise PermissionError(EACCES, os.strerror(EACCES))
        except (OSError, ValueError, RuntimeError) as error:
            raise _not_written(path, error) from error
        if str(target) in seen:
            raise InputError(f"{str(path)!r} is named twice, for two outputs; give each a file of its own")
        seen[str(target)] = path


def _target(path: Path) -> Path | None:
    """The file to replace, links followed; None for what is written through: devices, pipes, standard output."""
    if path.is_dir():
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
    if not path.name:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
    whole = Path(os.path.abspath(path))
    through = str(whole).startswith(("/dev/", "/proc/")) and whole.exists()
    if through or (path.exists() and not path.is_file()):
        return None
    return whole.resolve()


def _mode(target: Path) -> int:
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _pour(source: Path, device: Path) -> None:
    with os.fdopen(os.open(device, os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as out, source.open("rb") as text:
        while piece := text.read(2**16):
            view = memoryview(piece)
            while view:
                view = view[out.write(view) :]


def _not_written(path: Path, error: Exception) -> InputError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    remedy = "choose an existing, writable folder"
    if isinstance(error, IsADirectoryError):
        remedy = f"name a file in it, such as {str(path / 'file')!r}"
    elif isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EFBIG):
        remedy = "make room, or choose another folder"
    elif isinstance(error, OSError) and error.errno == ENAMETOOLONG:
        remedy = "choose a shorter name"
    return InputError(f"cannot write {str(path)!r}: {reason}; {remedy}")


def configuration_mismatch_error(
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
    if not isinstance(theirs, Mapping):
        return InputError(f"{str(folder)!r} holds a result without a configuration; {remedy}")
    keys = [key for key in sorted({*theirs, *now}) if theirs.get(key) != now.get(key)]
    if not keys:
        return None
    differences = ", ".join(f"{key} {_short(theirs.get(key))} there, {_short(now.get(key))} now" for key in keys)
    return InputError(f"{str(folder)!r} holds a result of another configuration ({differences}); {remedy}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
