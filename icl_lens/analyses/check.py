"""What checks of a task have in common: a table of measures with intervals, and a sentence."""

import math
from typing import Any

from icl_lens.result.base import Result


class Check(Result):
    """A result whose table has value, low and high by measure, and whose `str` says what they mean."""

    def to_dict(self) -> dict[str, Any]:
        """Return the value of each row of `to_frame` and, as "sentence", what `print` shows, for JSON."""
        frame = self.to_frame()
        rows = zip(map(str, frame.index), frame["value"].tolist(), strict=True)
        values = {name: None if math.isnan(value) else value for name, value in rows}
        return {**values, "edits": list(getattr(self, "edits", ())), "sentence": str(self)}

    def _shown(self) -> tuple[str, dict[str, list[object]], int]:
        frame = self.to_frame()
        columns: dict[str, list[object]] = {
            "measure": list(map(str, frame.index)),
            "value": [f"{value:.2f}" for value in frame["value"]],
            "95% interval": [
                "–" if low != low else f"{low:.2f} … {high:.2f}" for _, low, high in frame.to_numpy().tolist()
            ],
        }
        return str(self), columns, len(frame)
