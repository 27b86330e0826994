"""An explanation of one prompt: its reports, with the sentences, tables and views that users read."""

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import pandas as pd

from icl_lens.analyses.explanation import sections, sentences
from icl_lens.analyses.explanation.reports import ExplanationReports
from icl_lens.analyses.explanation.tables import TableName
from icl_lens.errors import check_choice
from icl_lens.models.active_edits import edits_note
from icl_lens.result.base import Result
from icl_lens.result.number_format import signed
from icl_lens.result.view import View


@dataclass(frozen=True, repr=False)
class Explanation(ExplanationReports, Result):
    """The result of `explain`: sections, which tables, figures, the page and the terminal show.

    Log-probabilities and increases are in nats. `target` is the label whose log-probability is
    explained (the answer if the prompt has one, else the prediction).

    Example:
        >>> explanation = il.explain(model, prompt)
        >>> explanation.input.label_positions
        (3, 7, 11, 15)
        >>> explanation.to_frame("heads").columns.tolist()
        ['name', 'contrast', 'increase', 'layer', 'head']
    """

    version: ClassVar[int] = 5

    @property
    def headline(self) -> str:
        """The model's prediction, and the most probable token if this is no label, in few words."""
        return sentences.headline(self)

    @property
    def finding(self) -> str:
        """Whether the zeroed heads matter more than random heads in this prompt."""
        return sentences.finding(self)

    @property
    def shows_that_heads_matter(self) -> bool:
        """Whether `finding` says that the zeroed heads matter more than random heads."""
        return sentences.shows_that_heads_matter(self)

    @property
    def verdict(self) -> str:
        """Which located heads support the target, the tokens it is compared with, or both.

        Empty without contrasts.
        """
        return sentences.verdict(self)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on labels or targets of several tokens; empty if each is a single token."""
        return sentences.remarks(self)

    def to_frame(self, table: TableName = "heads") -> pd.DataFrame:
        """Return one of the explanation's tables in tidy form.

        "heads" (all heads), "layers", "subheads", "labels", "demonstrations", "words", "similarity"
        (queries by label keys) or "why" (the largest parts, by writer, of attention scores and, in
        nats, of what values add; top words of the largest).
        """
        check_choice("table", table, get_args(TableName))
        return pd.DataFrame(list(sections.table(table)(self)))

    def to_view(self) -> View:
        """Return the finding, and the sections that every format can show."""
        sentences = (self.finding, *self.remarks)
        if self.edits:
            sentences = (edits_note(self.edits), *sentences)
        return View(
            title=self.headline,
            sentences=sentences,
            sections=tuple(sections.views(self)),
            about=f"explanation · {self.model}",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the headline, the finding, the prediction and the probability of each label."""
        return {
            "headline": self.headline,
            "finding": self.finding,
            "predicted": self.predicted,
            "label_probs": self.scores.probs,
        }

    def __repr__(self) -> str:
        by = self.settings.by
        best = ", ".join(f"{report.head} {signed(report.scores[by])}" for report in self.heads[:5])
        where = f"{self.model}, {len(self.input.tokens)} tokens"
        where += f", edited: {'; '.join(self.edits)}" if self.edits else ""
        return (
            f"Explanation({where}: {self.headline}; heads by {by} for {self.target!r}, nats: "
            f"{best})"
        )
