"""Sentences about the real models, with numbers from stored cells."""

import math
from collections.abc import Sequence
from typing import Any

from experiments.framework.models import QWEN, REAL_MODELS, SMOLLM2

TITLES = {SMOLLM2: "SmolLM2", QWEN: "Qwen"}
"""Short names of the real models."""
MAX_TASKS = 2
"""Tasks that a sentence names one by one."""


def real_rows(cells: Sequence[Any], measure: str, ranking: str = "") -> list[tuple[Any, Any]]:
    """Return the real models' cells and rows of a measure, where it applies; by `ranking`, or the first row."""
    found = [(cell, cell.row(measure, ranking)) for cell in cells if cell.model in REAL_MODELS]
    return [(cell, row) for cell, row in found if row is not None and row.applies]


def number(value: float, *, scale: float = 1.0, digits: int = 2) -> str:
    """Return a number with a true minus sign and without a negative zero; NaN is "–"."""
    return "–" if math.isnan(value) else f"{value * scale:z.{digits}f}".replace("-", "−")


def extent(values: Sequence[float], *, scale: float = 1.0, digits: int = 2) -> str:
    """Return the range of some numbers: "0.20–0.43", or "−0.20 … 0.43" with a negative number."""
    low, high = (number(end, scale=scale, digits=digits) for end in (min(values), max(values)))
    return low if low == high else f"{low} … {high}" if "−" in low else f"{low}–{high}"


def each(cells: Sequence[Any], measure: str, template: str = "{q} (control {c})", ranking: str = "") -> str:
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


def by_outcome(cells: Sequence[Any], measure: str, *, every: str, some: str, none: str, ranking: str = "") -> str:
    """Return the text for a measure above its control on every task, on some ({n} of {total}), or on none."""
    rows = real_rows(cells, measure, ranking)
    n = sum(row.outcome == "above" for _, row in rows)
    return (every if n == len(rows) else some if n else none).format(n=n, total=len(rows)) if rows else "Not measured"
