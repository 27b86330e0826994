"""What checks of a task have in common: a table of measures with intervals, and a sentence."""

import math
from typing import Any, ClassVar

from icl_lens.foundation.intervals import MIN_CLUSTERS
from icl_lens.result.base import Result
from icl_lens.result.number_format import decimal, joined, signed, whole_percent
from icl_lens.result.view import Column, Section, View


class Check(Result):
    """A result with a table of measures with intervals, and a `str` that says what they mean."""

    definitions: ClassVar[tuple[str, ...]] = ()
    """Lines below the table that say what its shares are."""
    interval_name: ClassVar[str] = "95% interval"
    """The title of the column of intervals."""

    @property
    def learns_from_demonstrations(self) -> bool:
        """Whether the model is shown to learn from the demonstrations."""
        raise NotImplementedError

    @property
    def lacks_task(self) -> bool:
        """Whether the model is neither shown to learn from the demonstrations nor to know the answers,
        on enough queries for an interval.
        """
        raise NotImplementedError

    @property
    def is_undecided(self) -> bool:
        """Whether learning is not shown for lack of queries, or because an interval includes
        zero.
        """
        raise NotImplementedError

    def sources_of_answers(self) -> list[str]:
        """Return what else the answers are shown to depend on, in words such as "which label is
        last".
        """
        raise NotImplementedError

    def on_heads_that_matter(self) -> str:
        """Return what heads that matter carry where the model is not shown to learn; empty if it
        is.
        """
        if self.learns_from_demonstrations:
            return ""
        sources = self.sources_of_answers()
        carried = "may come from anything else in the prompt"
        if sources:
            carried = f"here depends on {joined(sources)}"
        return (
            "That heads matter is no sign of learning from the demonstrations, which the model is "
            f"not shown to do on this task: the heads carry the answer, which {carried}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the value of each row of `to_frame` and, as "sentence", the printed text."""
        frame = self.to_frame()
        rows = zip(map(str, frame.index), frame["value"].tolist(), strict=True)
        values = {name: None if math.isnan(value) else value for name, value in rows}
        return {**values, "edits": list(getattr(self, "edits", ())), "sentence": str(self)}

    def to_view(self) -> View:
        """Return the sentence and the table that `print` shows."""
        rows = []
        for name, (value, low, high) in self.to_frame().iterrows():
            ends = "–" if math.isnan(low) else f"{_cell(name, low)} … {_cell(name, high)}"
            rows.append((str(name), _cell(name, value), ends))
        columns = (Column("measure", is_number=False), Column("value"), Column(self.interval_name))
        table = Section(columns=columns, rows=tuple(rows), notes=self.definitions)
        return View(self.name_in_words(), (str(self),), (table,))


def few_queries(n_prompts: int, n_queries: int) -> str:
    """Return in words that prompts have too few different queries for an interval."""
    have = f"all {n_prompts} prompts have the same query"
    if n_queries > 1:
        have = f"the {n_prompts} prompts have {n_queries} different queries"
    return f"{have}, and an interval needs at least {MIN_CLUSTERS}"


def _cell(measure: Any, value: float) -> str:
    """Return a number of the table as the sentence writes it: nats with their sign, an AUROC with
    two decimals, and shares of prompts or answers in percent.
    """
    if math.isnan(value):
        return "–"
    if str(measure).endswith("nats"):
        return signed(value, 2)
    if str(measure).startswith("AUROC"):
        return decimal(value, 2)
    return whole_percent(value)
