"""How many rows of its data a task uses and skips; the check of the data's path."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from icl_lens.errors import InputError, short_repr, warn_user


@dataclass(frozen=True)
class RowCounts:
    """How many rows of a file a task uses, and how many it skips."""

    used: Mapping[str, int]
    """The number of rows used of each class; of pairs, the number under the name "pairs"."""
    skipped: Mapping[str, int]
    """The number of rows skipped for each reason, such as "duplicate"."""

    @property
    def look_like_pairs(self) -> bool:
        """Whether most classes have a single row, as the answers of questions do."""
        n_single = sum(size == 1 for size in self.used.values())
        return len(self.used) >= MIN_ANSWERS and 2 * n_single > len(self.used)

    def __str__(self) -> str:
        n_used, n_skipped = sum(self.used.values()), sum(self.skipped.values())
        sizes = sorted(self.used.items(), key=lambda entry: -entry[1])
        if {*self.used} == {"pairs"}:
            sentence = f"{n_used:,} pairs used"
        else:
            names = ", ".join(f"{name!r} {size:,}" for name, size in sizes[:MAX_NAMED])
            more = f", … {sizes[-1][0]!r} {sizes[-1][1]:,}" if len(sizes) > MAX_NAMED else ""
            sentence = f"{n_used:,} rows used, in {len(sizes)} classes ({names}{more})"
        if self.look_like_pairs:
            sentence += "; the labels look like answers of their own, which --pairs reads"
        reasons = ", ".join(f"{size:,} {reason}" for reason, size in self.skipped.items() if size)
        return f"{sentence}; {n_skipped:,} skipped" + (f" ({reasons})" if reasons else "")


WITHOUT_TEXT_OR_LABEL, WITH_EMPTY_CELL = "without text or label", "with an empty cell"
"""Reasons why rows are skipped."""

MAX_NAMED = 6
"""The number of classes whose sizes are printed."""

MIN_ANSWERS = 4
"""The least number of classes that can be taken for answers of their own."""


def warn_of_empty_cells(path: object, counts: RowCounts) -> None:
    """Warn, in Python, that rows of the user's file are not used because a cell is empty; commands
    print `RowCounts`.
    """
    reasons = (WITHOUT_TEXT_OR_LABEL, WITH_EMPTY_CELL)
    n_empty = sum(counts.skipped.get(reason, 0) for reason in reasons)
    if n_empty:
        warn_user(f"{path}: rows with an empty cell are skipped: {counts}")


def check_path(path: object) -> None:
    """Raise InputError for a value that is not a path, or a path that cannot be accessed."""
    if path is None:
        return
    if not isinstance(path, str | Path):
        raise InputError(f"path must be the path of a file or folder, got {short_repr(path)}")
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        pass  # reported where it is read
    except OSError as error:
        raise InputError(
            f"cannot access {str(path)!r}: {error.strerror}; pass the path of another file or "
            "folder"
        ) from error
