"""What checks of a task have in common: a table of measures with intervals, and a sentence."""

import math
from typing import Any

from icl_lens.result.base import Result
from icl_lens.result.view import Column, Section, View


class Check(Result):
    """A result whose table has value, low and high by measure, and whose `str` says what they mean."""

    def to_dict(self) -> dict[str, Any]:
        """Return the value of each row of `to_frame` and, as "sentence", what `print` shows, for JSON."""
        frame = self.to_frame()
        rows = zip(map(str, frame.index), frame["value"].tolist(), strict=True)
        values = {name: None if math.isnan(value) else value for name, value in rows}
        return {**values, "edits": list(getattr(self, "edits", ())), "sentence": str(self)}

    def to_view(self) -> View:
        """Return the sentence and the table that `print` shows."""
        rows = []
        for name, (value, low, high) in self.to_frame().iterrows():
            interval = "–" if math.isnan(low) else f"{low:.2f} … {high:.2f}"
            rows.append((str(name), f"{value:.2f}", interval))
        columns = (Column("measure", is_number=False), Column("value"), Column("95% interval"))
        table = Section(columns=columns, rows=tuple(rows))
        return View(self.name_in_words(), (str(self),), (table,))
