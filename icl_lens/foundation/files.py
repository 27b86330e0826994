"""Write files atomically, so that no reader sees a partial file; read JSON without losing repeated
keys.
"""

import glob
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EACCES, EDQUOT, EFBIG, EISDIR, ENAMETOOLONG, ENOENT, ENOSPC
from pathlib import Path
from typing import Any

from icl_lens.errors import InputError

TEMP_FILE_NAME = re.compile(r"\.icl_lens-.*-[a-z0-9_]{8}(\.[A-Za-z0-9]+)?")
"""Names of the temporary files that `atomic_write` creates."""


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; move it into place on success, remove it on failure.

    An existing file keeps its mode. A symbolic link is followed: its target is replaced. A device
    or pipe (/dev/stdout) is written to, never replaced. Raise InputError if `path` cannot be
    written: missing folder, a folder itself, full disk, no permission.
    """
    path = Path(path)
    try:
        target = _target(path)
        folder = Path(tempfile.gettempdir()) if target is None else target.parent
        temp_path = folder / f"{_temp_prefix(path)}{secrets.token_hex(4)}{path.suffix[:20]}"
        is_new = target is not None and not target.exists()
        # The system applies the umask to a new file. To read the umask is to set it for a moment,
        # for all threads.
        os.close(
            os.open(temp_path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if is_new else 0o600)
        )
    except (OSError, ValueError, RuntimeError) as error:  # a null byte in the name, a symlink loop
        raise _write_error(path, error) from error
    try:
        yield temp_path
        if target is None:
            with temp_path.open("rb") as content, path.open("ab") as device:
                shutil.copyfileobj(content, device)
        else:
            if target.exists():
                temp_path.chmod(stat.S_IMODE(target.stat().st_mode))
            temp_path.replace(target)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        temp_path.unlink(missing_ok=True)


def remove_partial_files(path: Path) -> None:
    """Remove the temporary files of killed processes that were writing `path`; no other process may
    be writing it.
    """
    for file in path.parent.glob(f"{glob.escape(_temp_prefix(path))}*"):
        if TEMP_FILE_NAME.fullmatch(file.name) and file.is_file() and not file.is_symlink():
            file.unlink(missing_ok=True)


def _temp_prefix(path: Path) -> str:
    return f".icl_lens-{path.stem[:30]}-"


def write_text(path: str | Path, text: str) -> None:
    """Write text to `path` atomically; raise InputError as `atomic_write` does."""
    with atomic_write(path) as temp_path:
        # Invalid Unicode (an unpaired surrogate) is written as its escape.
        temp_path.write_bytes(text.encode("utf-8", errors="backslashreplace"))


def parse_json(text: str) -> Any:
    """Return the data of a JSON text; raise ValueError if it is invalid or if an object has a key
    twice.

    The standard library keeps only the last value of such a key.
    """

    def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = [key for key, _ in pairs]
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {repeated!r:.60} occurs twice in one object")
        return entries

    return json.loads(text, object_pairs_hook=distinct_keys)


def check_writable(*paths: str | Path | None) -> None:
    """Raise InputError if one of the files cannot be written or is given twice; None is skipped.

    Call it before a long computation. It does not write or change anything.
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
            raise _write_error(path, error) from error
        if str(target) in seen:
            raise InputError(
                f"{str(path)!r} is given for two outputs; pass a different file for each"
            )
        seen[str(target)] = path


def _target(path: Path) -> Path | None:
    """Return the file to replace, following links; None for devices and pipes, which are written to
    directly.
    """
    if path.is_dir():
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
    if not path.name:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
    absolute = Path(os.path.abspath(path))
    is_device = str(absolute).startswith(("/dev/", "/proc/")) and absolute.exists()
    if is_device or (path.exists() and not path.is_file()):
        return None
    return absolute.resolve()


def _write_error(path: Path, error: Exception) -> InputError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    remedy = "choose an existing, writable folder"
    if isinstance(error, IsADirectoryError):
        remedy = f"pass a file in it, e.g. {str(path / 'file')!r}"
    elif isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT, EFBIG):
        remedy = "free space or choose another folder"
    elif isinstance(error, OSError) and error.errno == ENAMETOOLONG:
        remedy = "choose a shorter name"
    return InputError(f"cannot write {str(path)!r}: {reason}; {remedy}")
