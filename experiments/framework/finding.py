"""What a finding is: one question, the measurement that answers it, and the texts of its page."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pandas as pd
from matplotlib.figure import Figure

from experiments.framework.estimate import Comparison
from experiments.framework.study import Study
from icl_lens.errors import InputError

Outcome = Literal["above", "below", "includes", "not applicable"]


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
    """The unit of quantity and control, such as "accuracy, %" or "nats"."""
    scale: int | float = 1
    """Factor by which stored numbers are multiplied when shown: 100 for percent."""
    digits: int = 2
    """Digits after the decimal point."""
    paper: Mapping[str, int | float] = field(default_factory=dict)
    """The paper's numbers by model, as shown (multiplied by `scale`)."""
    tabled: bool = False
    """Whether the finding's own tables show it, so that the table of other measures does not."""


def percent(
    name: str, quantity: str, control: str, unit: str, *, paper: Mapping[str, int | float] | None = None
) -> Measure:
    """Return a measure of shares from 0 to 1, shown in percent or points."""
    return Measure(name, quantity, control, unit, scale=100, digits=1, paper=paper or {})


@dataclass(frozen=True)
class Row:
    """A measure on one model and task: quantity, control, and the interval of their difference, before scaling."""

    measure: str
    quantity: float = math.nan
    control: float = math.nan
    low: float = math.nan
    high: float = math.nan
    ranking: str = ""
    """How the located heads are ranked: "contrast" or "increase"; empty without heads."""
    n_prompts: int = 0
    n_clusters: int = 0
    """Number of query words; prompts that share one are resampled jointly."""
    n_heads: int = 0
    note: str = ""
    """Why the measure does not apply here, or what a reader needs to know about this row."""

    @property
    def outcome(self) -> Outcome:
        """Whether the interval of the difference is above zero, below it, or includes it."""
        if not self.applies:
            return "not applicable"
        return "above" if self.low > 0 else "below" if self.high < 0 else "includes"

    @property
    def applies(self) -> bool:
        """Whether there are numbers and an interval."""
        return not (math.isnan(self.quantity) or math.isnan(self.low))

    @classmethod
    def from_result(cls, measure: str, found: Comparison | str, *, ranking: str = "", note: str = "") -> "Row":
        """Return the row of a comparison, or a row with the reason why the measure does not apply."""
        if isinstance(found, str):
            return cls(measure, ranking=ranking, note=found)
        return cls(measure, **asdict(found), ranking=ranking, note=note)


def rows_of(found: Mapping[str, Comparison | str], *, ranking: str = "") -> list[Row]:
    """Return the rows of several measures' comparisons."""
    return [Row.from_result(name, one, ranking=ranking) for name, one in found.items()]


def rows_or_reason(measures: Iterable[Measure], compute: Callable[[], list[Row]]) -> list[Row]:
    """Return the rows that `compute` returns; if it raises InputError, rows with that reason for these measures."""
    try:
        return compute()
    except InputError as error:
        return rows_of(dict.fromkeys((one.name for one in measures), str(error)))


@dataclass(frozen=True)
class Measured:
    """The result of a finding on one model and task: rows, and the data of its second figure as a tidy table."""

    rows: Sequence[Row]
    details: pd.DataFrame = field(default_factory=pd.DataFrame)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One question about in-context learning, how it is measured, and the texts of its page."""

    id: str
    title: str
    question: str
    claim: str
    """What the paper says, with its numbers, in our words."""
    covers: str
    """The paper's sections, figures and tables that this finding corresponds to."""
    measures: Sequence[Measure]
    """The first is the main measure, with a table and a figure; the others share a second table."""
    measure: Callable[[Study], Measured]
    answer: Callable[[Sequence[Any]], str]
    """Returns the answer in one or two sentences, with numbers from the stored cells of all models."""
    tables: Callable[[Sequence[Any]], str] | None = None
    """Returns tables of the finding's own, in Markdown, from the stored cells of all models."""
    look_for: str
    """What the figure shows."""
    method: str
    caveats: Sequence[str] = ()
    post_hoc: str = ""
    """What was changed after results had been seen, and why; empty if nothing was."""
    earlier: str = ""
    """Name of the previous main measure; empty if it was not changed."""
    draw: Callable[[pd.DataFrame], Figure]
    """Draws the figure from the details of all models and tasks, with columns model and task."""
    arbitrary_labels: bool = False
    """Whether the finding exchanges labels, which is not possible for labels that name the classes."""

    @property
    def main(self) -> Measure:
        return self.measures[0]

    def reason_not_applicable(self, study: Study) -> str:
        """Why the finding does not apply to a task; empty if it does."""
        if self.arbitrary_labels and study.task.natural:
            return "labels name the classes, so they cannot change places"
        return ""


def to_json(measured: Measured) -> dict[str, Any]:
    """Return rows and details as lists and dictionaries; NaN becomes None."""
    tables = pd.DataFrame(map(asdict, measured.rows)), measured.details
    rows, details = (table.astype(object).where(table.notna(), None) for table in tables)
    return {"rows": rows.to_dict("records"), "details": details.to_dict("list")}


def rows_from_json(cell: Mapping[str, Any]) -> list[Row]:
    """Return the rows that `to_json` stored."""
    return [Row(**{name: value for name, value in row.items() if value is not None}) for row in cell["rows"]]
