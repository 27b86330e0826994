"""Two explanations compared, as a table and a page."""

from dataclasses import dataclass
from pathlib import Path
from typing import overload

import pandas as pd

from icl_lens.display import format_signed, text_table
from icl_lens.errors import InputError
from icl_lens.models.head import Head
from icl_lens.report.findings import Findings
from icl_lens.report.html.compare import compare_body, compare_page
from icl_lens.report.html.element import frame
from icl_lens.report.html.page import write_page

SHOWN = 8


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two explanations, A and B, side by side; made by `compare`.

    Example:
        >>> a = il.explain(model, prompt)
        >>> b = il.explain(model, "love : bar eight : foo two : foo one :", answer="foo")
        >>> both = il.compare(a, b)
        >>> both.to_frame().columns.tolist()
        ['layer', 'head', 'name', 'a', 'b', 'change']
    """

    a: Findings
    b: Findings

    @property
    def same_heads(self) -> bool:
        """Whether both have the same layers and heads, so that heads can be compared one by one."""
        return _shape(self.a) == _shape(self.b)

    def to_frame(self) -> pd.DataFrame:
        """Every head's increase in both and the change, nats, largest change first: layer, head, name, a, b, change.

        Each increase is of its explanation's own target. Raises InputError for models of different layers or heads.
        """
        if not self.same_heads:
            raise InputError(
                f"{self.a.model} has layers and heads {_shape(self.a)}, {self.b.model} {_shape(self.b)}: their heads "
                "do not correspond; see each one's own table: a.to_frame(), b.to_frame()"
            )
        rows = [
            {"layer": layer, "head": head, "name": str(Head(layer, head)), "a": x, "b": y, "change": y - x}
            for layer, (row_a, row_b) in enumerate(zip(self.a.head_increases, self.b.head_increases, strict=True))
            for head, (x, y) in enumerate(zip(row_a, row_b, strict=True))
        ]
        return pd.DataFrame(rows).sort_values("change", key=lambda x: -x.abs(), kind="stable", ignore_index=True)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> None: ...
    def to_html(self, path: str | Path | None = None) -> str | None:
        """Both side by side as one self-contained page, or written to `path`: beside it first, then moved."""
        page = compare_page(self.a, self.b)
        if path is None:
            return page
        write_page(page, path)
        return None

    def _repr_html_(self) -> str:
        return frame("Comparison", compare_page(self.a, self.b), compare_body(self.a, self.b), height=720)

    def __repr__(self) -> str:
        title = f"Comparison: {self.a.headline} (A, {self.a.model}); {self.b.headline} (B, {self.b.model})"
        if not self.same_heads:
            return title
        frame = self.to_frame()
        columns = {"head": frame["name"][:SHOWN].tolist()}
        columns |= {f"{name}, nats": [format_signed(x) for x in frame[name][:SHOWN]] for name in ("a", "b", "change")}
        return text_table(title, columns, total=len(frame))


def _shape(explanation: Findings) -> tuple[int, int]:
    return len(explanation.head_increases), len(explanation.head_increases[0])


def compare(a: Findings, b: Findings) -> Comparison:
    """Two explanations side by side: two prompts, two targets, or two models.

    Raises InputError for what is no explanation.

    Example:
        >>> il.compare(il.explain(model, prompt), il.explain(model, prompt)).to_frame()["change"].abs().max()
        np.float64(0.0)
    """
    for one in (a, b):
        if not isinstance(one, Findings):
            raise InputError(f"{one!r:.60} is no explanation; give what il.explain or il.Explanation.load returns")
    return Comparison(a, b)
