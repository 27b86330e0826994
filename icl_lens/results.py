"""What functions return: all classes of results, and `load`, which restores them from files.

`results.pyi` lists the classes and the modules that define them; a module is imported when its
class is first used.
"""

from pathlib import Path
from typing import Any

import lazy_loader

_public, _, _names = lazy_loader.attach_stub("icl_lens", __file__)
FORMER_FORMATS = ("icl-lens mean effects", "icl-lens mean exchanges")
"""Formats of results that `LocatedHeads` replaces."""
__all__ = sorted([*_names, "load"])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    return _public(name)


def __dir__() -> list[str]:
    return list(__all__)


def load(path: str | Path) -> Any:
    """Load a result of any kind that its `save`, or `--json` of a command, has written; its tensors
    are on the CPU.

    Raise InputError for a file that is missing, damaged, not a result, or of another version.

    Example:
        >>> import tempfile
        >>> best = il.top_heads(acts, k=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     best.save(f"{folder}/best.json")
        ...     loaded = il.results.load(f"{folder}/best.json")
        >>> loaded.heads == best.heads
        True
    """
    from icl_lens.errors import InputError
    from icl_lens.result.base import Result
    from icl_lens.result.stored import read

    remedy = "pass a file written by the save method of a result"
    format_name = read(path, remedy).get("format")
    for kind in map(_public, _names):
        if (
            isinstance(kind, type)
            and issubclass(kind, Result)
            and kind.format_name() == format_name
        ):
            return kind.load(path)
    if format_name in FORMER_FORMATS:
        version = f"of an earlier version ({format_name})"
        raise InputError(f"{str(path)!r} is {version}; measure it again with il.locate")
    raise InputError(f"{str(path)!r} is not a saved result; {remedy}")
