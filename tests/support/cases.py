"""Cases of parametrized tests: some run always, the others with the slow tests."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Return a case of a parametrized test that runs with the slow tests only."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_except(quick: Container[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all cases, of which those that are not `quick` run with the slow tests only."""
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(case if case in quick else slow(*values))
    return marked
