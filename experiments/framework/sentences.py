"""Sentences about the real models, with numbers from stored cells."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.framework.models import QWEN, REAL_MODELS, SMOLLM2

TITLES = {SMOLLM2: "SmolLM2", QWEN: "Qwen"}
"""Short names of the real models."""
MAX_TASKS = 2
"""Tasks that a sentence names one by one."""


def applicable(cells: Iterable[Any], measure: str, ranking: str = "contrast") -> list[tuple[Any, Any]]:
    """Return each cell and its row of a measure where it applies; see `Stored.row`."""
    found = [(cell, cell.row(measure, ranking)) for cell in cells]
    return [(cell, row) for cell, row in found if row is not None and row.applies]


def real_rows(cells: Sequence[Any], measure: str, ranking: str = "contrast") -> list[tuple[Any, Any]]:
    """Return the real models' cells and rows of a measure, where it applies."""
    return applicable([cell for cell in cells if cell.model in REAL_MODELS], measure, ranking)


def number(value: float, *, scale: float = 1.0, digits: int = 2) -> str:
    """Return a number with a true minus sign and without a negative zero; NaN is "–"."""
    return "–" if math.isnan(value) else f"{value * scale:z.{digits}f}".replace("-", "−")


def extent(values: Sequence[float], *, scale: float = 1.0, digits: int = 2) -> str:
    """Return the range of some numbers: "0.20–0.43", or "−0.20 … 0.43" with a negative number."""
    low, high = (number(end, scale=scale, digits=digits) for end in (min(values), max(values)))
    return low if low == high else f"{low} … {high}" if "−" in low else f"{low}–{high}"


def each(cells: Sequence[Any], measure: str, template: str, ranking: str = "contrast") -> str:
    """Return a measure on every task: "2.30 (control −0.08) on animal-country, A/B (SmolLM2); …".

    The template's {q}, {c}, {low}, {high} are the quantity, its control, and the interval of their difference. Of more
    than `MAX_TASKS` tasks, these are ranges: "0.66–2.30 (control −0.08 … 0.02) on 3 tasks".
    """
    rows = real_rows(cells, measure, ranking)
    groups = [[one] for one in rows] if len(rows) <= MAX_TASKS else [rows]
    parts = []
    for some in groups:
        cell = some[0][0]
        shown = next(one for one in cell.finding.measures if one.name == measure)
        fields = {"q": "quantity", "c": "control", "low": "low", "high": "high"}
        values = {
            name: extent([getattr(row, field) for _, row in some], scale=float(shown.scale), digits=shown.digits)
            for name, field in fields.items()
        }
        where = f"{cell.task} ({TITLES[cell.model]})" if len(some) == 1 else f"{len(some)} tasks"
        parts.append(f"{template.format(**values)} on {where}")
    return "; ".join(parts)


def by_outcome(cells: Sequence[Any], measure: str, text: str, *, every: str = "", none: str = "") -> str:
    """Return `text` with {where}: "on every task" if the measure is above its control there, "on 2 of 3 tasks", ….

    `every` and `none` replace the text where it is above on every task, or on none.
    """
    rows = real_rows(cells, measure)
    n = sum(row.outcome == "above" for _, row in rows)
    if not rows:
        return "Not measured"
    if n == len(rows):
        said = (every or text).format(where="on every task")
    elif n:
        said = text.format(where=f"on {n} of {len(rows)} tasks")
    else:
        said = (none or text).format(where="on no task")
    return said[0].upper() + said[1:]
