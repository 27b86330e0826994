"""Comparison of two explanations, as a table and a page."""

from dataclasses import dataclass
from pathlib import Path
from typing import overload

import pandas as pd

from icl_lens.display import format_signed, text_table
from icl_lens.errors import InputError
from icl_lens.report.findings import By, Findings
from icl_lens.report.html.compare import compare_inline, compare_page, compared_scores
from icl_lens.report.html.page import write_page

SHOWN = 8


@dataclass(frozen=True, repr=False)
class Comparison:
    """A comparison of two explanations, A and B, returned by `compare`.

    Example:
        >>> a = il.explain(model, prompt)
        >>> b = il.explain(model, "love : bar eight : foo two : foo one :", answer="foo")
        >>> both = il.compare(a, b)
        >>> both.to_frame().columns.tolist()
        ['layer', 'head', 'name', 'a', 'b', 'change', 'contrast_a', 'contrast_b', 'contrast_change']
    """

    a: Findings
    b: Findings

    @property
    def same_heads(self) -> bool:
        """Whether both models have the same number of layers and heads, so that heads can be compared directly."""
        return _shape(self.a) == _shape(self.b)

    def to_frame(self) -> pd.DataFrame:
        """Return every head's scores in A and B and their change (nats), largest change first.

        Columns: layer, head, name, a, b, change, and contrast_a, contrast_b and contrast_change if both explanations
        have contrasts. The first score is the one that ranks the heads of both explanations, or the increase if these
        differ. Scores refer to each explanation's own target. Raises InputError if the models have different numbers of
        layers or heads.
        """
        if not self.same_heads:
            raise InputError(
                f"models must have the same (layers, heads), got {_shape(self.a)} for {self.a.model} and "
                f"{_shape(self.b)} for {self.b.model}; use a.to_frame() and b.to_frame() instead"
            )
        first, *others = compared_scores(self.a, self.b)
        frame = self.a.to_frame("heads").filter(["layer", "head", "name"])
        named: list[tuple[By, str]] = [(first, ""), *((by, f"{by}_") for by in others)]
        for by, prefix in named:
            for side, e in (("a", self.a), ("b", self.b)):
                frame[f"{prefix}{side}"] = [score for row in e.scores_by(by) for score in row]
            frame[f"{prefix}change"] = frame[f"{prefix}b"] - frame[f"{prefix}a"]
        return frame.sort_values("change", key=lambda x: -x.abs(), kind="stable", ignore_index=True)

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: str | Path) -> None: ...
    def to_html(self, path: str | Path | None = None) -> str | None:
        """Return a self-contained comparison page, or write it to `path` atomically."""
        page = compare_page(self.a, self.b)
        if path is None:
            return page
        write_page(page, path)
        return None

    def _repr_html_(self) -> str:
        return compare_inline(self.a, self.b)

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
    """Compare two explanations of different prompts, targets or models.

    Raises InputError for arguments that are not explanations.

    Example:
        >>> il.compare(il.explain(model, prompt), il.explain(model, prompt)).to_frame()["change"].abs().max()
        np.float64(0.0)
    """
    for one in (a, b):
        if not isinstance(one, Findings):
            raise InputError(
                f"expected an explanation, got {one!r:.60}; pass the result of il.explain or il.Explanation.load"
            )
    return Comparison(a, b)
