"""The renderers of results. `report` defines them, above results, and `icl_lens/__init__.py`
registers them here.

Results thus import nothing from above, and a new way to show them needs no change of theirs.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Renderers(Protocol):
    """What draws any result."""

    def page(self, result: Any) -> str:
        """Return a self-contained page."""
        ...

    def notebook(self, result: Any) -> str:
        """Return the HTML that a notebook shows."""
        ...

    def terminal(self, result: Any) -> Any:
        """Return what rich prints in a terminal."""
        ...

    def figures(self, result: Any) -> dict[str, Any]:
        """Return matplotlib figures by name."""
        ...


_registered: list[Callable[[], Renderers]] = []


def register_renderers(load: Callable[[], Renderers]) -> None:
    """Set the function that returns the renderers; it is called when a result is first drawn."""
    _registered[:] = [load]


def renderers() -> Renderers:
    """Return the registered renderers."""
    return _registered[-1]()
