"""The base of all results: a frozen dataclass with views that is stored as JSON and restored
exactly.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import pandas as pd

from icl_lens.foundation.files import write_text
from icl_lens.result import stored
from icl_lens.result.renderer_registry import renderers
from icl_lens.result.view import View
from icl_lens.result.view_text import markdown, plain_text, records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AnyResult = TypeVar("AnyResult", bound="Result")


class Displayed:
    """A frozen dataclass with a view: `print` and notebooks show a few rows, `to_frame` has all.

    Subclasses define `to_frame` and `to_view`; everything else is drawn from these.
    """

    def to_frame(self) -> pd.DataFrame:
        """Return the numbers as a table, the columns that matter first."""
        raise NotImplementedError

    def to_view(self) -> View:
        """Return what is shown of the result, as data."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return plain_text(self.to_view())

    def _repr_html_(self) -> str:
        return renderers().notebook(self)

    def __rich__(self) -> Any:
        return renderers().terminal(self)

    @cached_property
    def figures(self) -> "dict[str, Figure]":
        """Matplotlib figures by name; empty for results without figures."""
        return renderers().figures(self)

    def to_markdown(self) -> str:
        """Return what is shown of the result as Markdown, for a report or an issue."""
        return markdown(self.to_view())

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> None: ...
    def to_html(self, path: str | Path | None = None) -> str | None:
        """Return a self-contained page, or write it to `path` atomically."""
        page = renderers().page(self)
        return page if path is None else write_text(path, page)

    @classmethod
    def name_in_words(cls) -> str:
        """Return the name of the class in words, such as "Top heads"."""
        return re.sub("(?<!^)([A-Z])", lambda letter: f" {letter[1].lower()}", cls.__name__)


class Result(Displayed):
    """What functions return: a frozen dataclass with views that is stored as JSON and restored
    exactly.

    Example:
        >>> import tempfile
        >>> best = il.top_heads(acts, k=3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     best.save(f"{folder}/best.json")
        ...     loaded = il.results.TopHeads.load(f"{folder}/best.json")
        >>> loaded.heads == best.heads
        True
    """

    version: ClassVar[int] = 1
    """Version of the stored format; it increases when earlier files can no longer be read
    correctly.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return what the stored file says for readers without icl-lens, as its "summary".

        By default, this is the view in words and numbers.
        """
        return records(self.to_view())

    def to_json(self, **about: Any) -> str:
        """Return all fields as JSON; `about` is added to its "summary"."""
        return stored.dumps(self, self.format_name(), self.version, self.to_dict() | about)

    def save(self, path: str | Path) -> None:
        """Write all fields as JSON that `load` reads. Raise InputError if the folder is not
        writable.
        """
        write_text(path, self.to_json())

    @classmethod
    def load(cls: type[AnyResult], path: str | Path) -> AnyResult:
        """Load a result written by `save`, without the model; its tensors are on the CPU.

        Raise InputError for a file that is missing, damaged, or of another kind or version.
        """
        return stored.load(cls, path, cls.format_name(), cls.version)

    @classmethod
    def format_name(cls) -> str:
        """Return the kind of a stored file, such as "icl-lens top heads"."""
        return "icl-lens" + re.sub("([A-Z])", r" \1", cls.__name__).lower()
