"""Comparison of two explanations, as a table and a page."""

from dataclasses import dataclass
from typing import Any

import pandas as pd
from rich.console import Group, RenderableType
from rich.text import Text

from icl_lens.display import format_signed, text_table
from icl_lens.errors import InputError
from icl_lens.report.findings import Findings
from icl_lens.report.html.compare import content
from icl_lens.report.html.page import HasPage
from icl_lens.report.number_format import percent
from icl_lens.report.rich_table import new_table
from icl_lens.scores import SCORES, Score

N_SHOWN = 8
"""Number of heads in the repr."""
N_CHANGED = 12
"""Number of heads on the page and in the terminal."""
MODELS_NOTE = Text("Heads of two models correspond only if one model was trained from the other.", "dim")


@dataclass(frozen=True, repr=False)
class Comparison(HasPage):
    """A comparison of two explanations, A and B, returned by `compare`.

    Example:
        >>> a = il.explain(model, prompt)
        >>> b = il.explain(model, il.Prompt.parse("love : bar eight : foo two : foo one :", answer="foo"))
        >>> both = il.compare(a, b)
        >>> both.to_frame().columns.tolist()
        ['layer', 'head', 'name', 'a', 'b', 'change', 'increase_a', 'increase_b', 'increase_change']
    """

    a: Findings
    b: Findings

    @property
    def same_heads(self) -> bool:
        """Whether both models have the same number of layers and heads, so that heads can be compared directly."""
        return self.a.shape == self.b.shape

    @property
    def scores(self) -> list[Score]:
        """The scores that both explanations have of every head.

        Heads are ranked by the change of the first: the score that ranks the heads of both. If these differ, it is the
        contrast, or the increase if one has no contrasts.
        """
        a, b = self.a, self.b
        first: Score = "contrast" if a.compared_with and b.compared_with else "increase"
        if a.settings.by == b.settings.by:
            first = a.settings.by
        return [first, *(by for by in SCORES if by != first and a.scores_by(by) and b.scores_by(by))]

    def to_frame(self) -> pd.DataFrame:
        """Return every head's scores in A and B and their change (nats), largest change first.

        Columns: layer, head, name, a, b, change (of the first of `scores`), and, for the other scores, such as
        increases, increase_a, increase_b and increase_change. Scores refer to each explanation's own target. Raise
        InputError if the models have different numbers of layers or heads.
        """
        if not self.same_heads:
            raise InputError(
                f"models must have the same (layers, heads), got {self.a.shape} for {self.a.model} and {self.b.shape} "
                f"for {self.b.model}; use a.to_frame() and b.to_frame() instead"
            )
        first, *others = self.scores
        frame = self.a.to_frame("heads").filter(["layer", "head", "name"])
        named: list[tuple[Score, str]] = [(first, ""), *((by, f"{by}_") for by in others)]
        for by, prefix in named:
            for side, e in (("a", self.a), ("b", self.b)):
                frame[f"{prefix}{side}"] = [score for row in e.scores_by(by) for score in row]
            frame[f"{prefix}change"] = frame[f"{prefix}b"] - frame[f"{prefix}a"]
        return frame.sort_values("change", key=lambda x: -x.abs(), kind="stable", ignore_index=True)

    def _page(self) -> tuple[str, dict[str, Any]]:
        changed = self.to_frame().head(N_CHANGED) if self.same_heads else None
        return "compare.html.j2", content(self.a, self.b, self.scores, changed)

    def __rich__(self) -> Group:
        """Return the probability of each label, and the heads that changed most or the best heads of each."""
        a, b = self.a, self.b
        answers = new_table("label", "A", "B")
        for label in dict.fromkeys([*a.labels, *b.labels]):
            probabilities = (side.label_probs.get(label) for side in (a, b))
            answers.add_row(Text(label), *("–" if value is None else percent(value) for value in probabilities))
        edited = [
            Text(f"{name}: {side.edits_note}", "bold") for name, side in zip("AB", (a, b), strict=True) if side.edits
        ]
        shown: list[RenderableType] = [*edited, Text("Probability of each label", "bold"), answers]
        targets = f"A: {a.target}, B: {b.target}"
        if not self.same_heads:
            table = new_table("A", a.settings.by, "B", b.settings.by, left=(0, 2))
            for x, y in zip(a.heads, b.heads, strict=False):
                scores = x.scores[a.settings.by], y.scores[b.settings.by]
                table.add_row(str(x.head), f"{scores[0]:+.3f}", str(y.head), f"{scores[1]:+.3f}")
            return Group(*shown, Text(f"Heads with the largest scores, nats ({targets})", "bold"), table)
        first, *others = self.scores
        table = new_table("head", *(column for by in (first, *others) for column in (f"{by} in A", "in B", "change")))
        columns = [prefix + name for prefix in ("", *(f"{by}_" for by in others)) for name in ("a", "b", "change")]
        for row in self.to_frame().head(N_CHANGED).to_dict("records"):
            table.add_row(row["name"], *(f"{row[column]:+.3f}" for column in columns))
        shown += [Text(f"Heads whose {first} changed most, nats ({targets})", "bold"), table]
        shown += [MODELS_NOTE] if a.model != b.model else []
        if a.target != b.target and a.target in b.labels:
            note = (
                f"Changes compare what heads add to {a.target} in A with what they add to {b.target} in B; to explain "
                f"{a.target} in both, pass --answer {a.target} --answer-b {a.target}."
            )
            shown.append(Text(note, "dim"))
        return Group(*shown)

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


def compare(a: Findings, b: Findings) -> Comparison:
    """Compare two explanations of different prompts, targets or models.

    Raise InputError for arguments that are not explanations.

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
