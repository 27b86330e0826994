"""What a finding is: one question, the measurement that answers it, and the words around its numbers."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from experiments.framework.estimate import Clusters, Comparison, Ratio, compare_ratios
from experiments.framework.study import Study
from icl_lens.errors import InputError


@dataclass(frozen=True)
class Measure:
    """A number that a finding reports: what it is, what it is compared with, and in which unit."""

    name: str
    """A key in tables, such as "accuracy"."""
    quantity: str
    """Heading of the quantity, such as "located heads removed"."""
    control: str
    """Heading of what it is compared with, such as "random heads removed"."""
    unit: str
    """Such as "accuracy, %" or "nats"; the one unit of a table's columns."""
    scale: int | float = 1
    """What stored numbers are multiplied by to be shown: 100 for percent."""
    digits: int = 2
    """Digits after the point."""
    paper: Mapping[str, int | float] = field(default_factory=dict)
    """The paper's numbers in the same unit, by model; as shown, after scaling."""


@dataclass(frozen=True)
class Row:
    """A measure on one model and task: quantity, control, and the interval of their difference, before scaling."""

    measure: str
    quantity: float = math.nan
    control: float = math.nan
    low: float = math.nan
    high: float = math.nan
    ranking: str = ""
    n_prompts: int = 0
    n_clusters: int = 0
    n_heads: int = 0
    note: str = ""
    """Why the measure does not apply here, or what a reader needs to know about this row."""

    @classmethod
    def from_comparison(cls, measure: str, found: Comparison, *, ranking: str = "", note: str = "") -> "Row":
        """Return the row of a comparison."""
        return cls(measure, **asdict(found), ranking=ranking, note=note)

    @classmethod
    def from_ratios(
        cls, measure: str, quantity: Ratio, control: Ratio, clusters: Clusters, *, total: str, **about: str
    ) -> "Row":
        """Return the row of `compare_ratios`; not applicable where the denominator, named by `total`, may be zero."""
        try:
            return cls.from_comparison(measure, compare_ratios(quantity, control, clusters, total=total), **about)
        except InputError as error:
            return cls.not_applicable(measure, str(error), ranking=about.get("ranking", ""))

    @classmethod
    def from_result(cls, measure: str, found: Comparison | str, *, ranking: str = "") -> "Row":
        """Return the row of a comparison, or of the reason why there is none."""
        if isinstance(found, str):
            return cls.not_applicable(measure, found, ranking=ranking)
        return cls.from_comparison(measure, found, ranking=ranking)

    @classmethod
    def not_applicable(cls, measure: str, reason: str, *, ranking: str = "") -> "Row":
        """Return a row without numbers, and why."""
        return cls(measure, ranking=ranking, note=reason)


def rows_or_reason(measures: Iterable[Measure], compute: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows that `compute` returns, or the reason that it gives why these measures do not apply."""
    try:
        return compute()
    except InputError as error:
        return [Row.not_applicable(one.name, str(error)) for one in measures]


@dataclass(frozen=True)
class Measured:
    """What a finding measured on one model and task: rows, and a tidy table with what its own figure draws."""

    rows: Sequence[Row]
    details: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One question about in-context learning, and how a page answers it."""

    id: str
    short: str
    """What it measures in a few words, for lists."""
    title: str
    question: str
    claim: str
    """What the paper says, with its numbers, in our words."""
    covers: str
    """The paper's figures and tables that have their place here."""
    measures: Sequence[Measure]
    """The first one is the page's table and figure; the others follow in a second table."""
    measure: Callable[[Study], Measured]
    look_for: str
    """What a reader should look for in the figure."""
    method: str
    caveats: Sequence[str] = ()
    post_hoc: str = ""
    """What was changed after results had been seen, and why; empty if nothing was."""
    earlier: str = ""
    """The measure that was the main one before; empty if that was not changed."""
    draw: Callable[[pd.DataFrame], Figure] | None = None
    """A second figure from the details of all cells, with columns model and task."""
    predicted: bool = True
    """Whether the paper predicts that the main measure's quantity is above its control."""
    arbitrary_labels: bool = False
    """Whether labels must be able to change places, so that natural labels do not apply."""

    @property
    def main(self) -> Measure:
        return self.measures[0]

    def reason_not_applicable(self, study: Study) -> str:
        """Why the finding does not apply to a task; empty if it does."""
        if self.arbitrary_labels and study.task.natural:
            return "labels name the classes, so they cannot change places"
        return ""


def to_json(measured: Measured) -> dict[str, Any]:
    """Return rows and details as plain lists and dictionaries; NaN becomes None."""
    rows = [{name: _without_nan(value) for name, value in asdict(row).items()} for row in measured.rows]
    details = measured.details.astype(object).where(measured.details.notna(), None).to_dict("list")
    return {"rows": rows, "details": details}


def rows_from_json(cell: Mapping[str, Any]) -> list[Row]:
    """Return the rows that `to_json` stored."""
    rows: list[dict[str, Any]] = cell["rows"]
    return [Row(**{name: _with_nan(value) for name, value in row.items()}) for row in rows]


def _without_nan(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def _with_nan(value: Any) -> Any:
    return math.nan if value is None else value
