"""Compare two explanations."""

from dataclasses import dataclass

import pandas as pd

from icl_lens.analyses.explanation import Explanation
from icl_lens.errors import InputError
from icl_lens.head_scores import SCORES, Score
from icl_lens.result.base import Result
from icl_lens.result.tables import columns_first, format_signed, text_table

N_SHOWN = 8
"""Number of heads in the repr."""


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """A comparison of two explanations, A and B, returned by `compare`.

    Example:
        >>> a = il.explain(model, prompt)
        >>> b = il.explain(model, il.Prompt.parse("love : bar eight : foo two : foo one :", answer="foo"))
        >>> both = il.compare(a, b)
        >>> both.to_frame().columns.tolist()
        ['name', 'change', 'a', 'b', 'layer', 'head', 'increase_a', 'increase_b', 'increase_change']
    """

    a: Explanation
    b: Explanation

    @property
    def same_heads(self) -> bool:
        """Whether both models have the same number of layers and heads, so that heads can be compared directly."""
        return self.a.all_heads.shape == self.b.all_heads.shape

    @property
    def scores(self) -> list[Score]:
        """The scores that both explanations have of every head.

        Heads are ranked by the change of the first: the score that ranks the heads of both. If these differ, it is the
        contrast, or the increase if one has no contrasts.
        """
        a, b = self.a, self.b
        first: Score = "contrast" if a.scores.compared_with and b.scores.compared_with else "increase"
        if a.settings.by == b.settings.by:
            first = a.settings.by
        return [first, *(by for by in SCORES if by != first and a.all_heads.by(by) and b.all_heads.by(by))]

    def to_frame(self) -> pd.DataFrame:
        """Return every head's scores in A and B and their change (nats), largest change first.

        Columns: name, change, a, b (of the first of `scores`), layer, head, and, for the other scores, such as
        increases, increase_a, increase_b and increase_change. Scores refer to each explanation's own target. Raise
        InputError if the models have different numbers of layers or heads.
        """
        if not self.same_heads:
            shapes = [one.all_heads.shape for one in (self.a, self.b)]
            raise InputError(
                f"models must have the same (layers, heads), got {shapes[0]} for {self.a.model} and {shapes[1]} for "
                f"{self.b.model}; use a.to_frame() and b.to_frame() instead"
            )
        first, *others = self.scores
        frame = self.a.to_frame("heads").filter(["name", "layer", "head"])
        named: list[tuple[Score, str]] = [(first, ""), *((by, f"{by}_") for by in others)]
        for by, prefix in named:
            for side, e in (("a", self.a), ("b", self.b)):
                frame[f"{prefix}{side}"] = [score for row in e.all_heads.by(by) for score in row]
            frame[f"{prefix}change"] = frame[f"{prefix}b"] - frame[f"{prefix}a"]
        frame = columns_first(frame, "name", "change", "a", "b")
        return frame.sort_values("change", key=lambda x: -x.abs(), kind="stable", ignore_index=True)

    def __repr__(self) -> str:
        names = [
            ", edited: ".join([side.model, *(["; ".join(side.edits)] if side.edits else [])])
            for side in (self.a, self.b)
        ]
        title = f"Comparison: {self.a.headline} (A, {names[0]}); {self.b.headline} (B, {names[1]})"
        if not self.same_heads:
            return title
        frame = self.to_frame()
        columns = {"head": frame["name"][:N_SHOWN].tolist()}
        columns |= {f"{name}, nats": [format_signed(x) for x in frame[name][:N_SHOWN]] for name in ("a", "b", "change")}
        return text_table(title, columns, total=len(frame))


def compare(a: Explanation, b: Explanation) -> Comparison:
    """Compare two explanations of different prompts, targets or models.

    Raise InputError for arguments that are not explanations.

    Example:
        >>> il.compare(il.explain(model, prompt), il.explain(model, prompt)).to_frame()["change"].abs().max()
        np.float64(0.0)
    """
    for one in (a, b):
        if not isinstance(one, Explanation):
            raise InputError(
                f"expected an explanation, got {one!r:.60}; pass the result of il.explain or il.results.load"
            )
    return Comparison(a, b)
