"""The result of `il.locate`: every head's mean score over prompts, the first k heads, and a
sentence on them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pandas as pd

from icl_lens.edits.edit import Positions
from icl_lens.foundation.ranking_scores import DIRECT_SCORES, Score
from icl_lens.measures.controlled_ablation_result import (
    ControlledAblation,
    Measure,
    auroc_text,
    share_text,
)
from icl_lens.measures.effects import Algorithm
from icl_lens.measures.head_findings import list_finding
from icl_lens.measures.ranking_means import MeanScore
from icl_lens.models.active_edits import edits_note
from icl_lens.models.head import Head
from icl_lens.reading.scored_tokens import Outcome
from icl_lens.result.base import Result
from icl_lens.result.number_format import decimal, percent, signed
from icl_lens.result.tables import (
    format_share,
    interval_texts,
    intervals_note,
    plural_prompts,
    selected_note,
)
from icl_lens.result.view import View, table_view

SCORE_NAMES: dict[Score, str] = {
    "contrast": "contrast",
    "increase": "increase",
    "effect": "effect",
    "exchange": "effect of exchanging the query",
}
OUTCOME_NAMES: dict[Outcome, str] = {"log_odds": "log-odds", "log_prob": "log p"}


class ScoreColumn(NamedTuple):
    """The column of a score that did not rank the heads."""

    title: str
    definition: str
    """What it says of a head; {lost} is what an effect is lost of."""
    unit: Literal["nats", "share"] = "nats"


SCORE_COLUMNS = {
    "contrast": ScoreColumn(
        "contrast", "what the head adds to log p(answer) − log Σ p(other labels)"
    ),
    "increase": ScoreColumn("increase", "what it adds to log p(answer)"),
    "effect": ScoreColumn("effect", "{lost} lost if it alone is zeroed at the last position"),
    "exchange": ScoreColumn(
        "query", "log-odds lost if it alone takes its query from a prompt of the other class"
    ),
    "keys": ScoreColumn(
        "keys", "log-odds lost if it alone takes its keys from the prompt with exchanged texts"
    ),
    "values": ScoreColumn(
        "values", "log-odds lost if it alone takes its values from the prompt with exchanged labels"
    ),
    "true_label_attention": ScoreColumn(
        "attention to true labels",
        "from the last position to labels that are the answer",
        "share",
    ),
    "false_label_attention": ScoreColumn(
        "attention to false labels", "to the other labels", "share"
    ),
    "log_prob": ScoreColumn("log p lost", "log p(answer) lost if it alone is zeroed"),
}
"""In the order of the table."""


def score_definitions(scores: Sequence[Score]) -> str:
    """Return a sentence on what these scores of heads are, for effects on log-odds."""
    definitions = []
    for name in scores:
        definition = SCORE_COLUMNS[name].definition.format(lost=OUTCOME_NAMES["log_odds"])
        definitions.append(f"{name} ({definition})")
    return f"Scores: {'; '.join(definitions)}."


@dataclass(frozen=True, repr=False)
class LocatedHeads(Result):
    """Every head's mean score over prompts, nats, and the first `k` heads; made by `il.locate`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> located = il.locate(model, many, by="exchange", k=4)
        >>> len(located.heads), list(located.scores)[:3]
        (4, ['exchange', 'keys', 'values'])
        >>> located.other_scores[:3], located.other_scores[-2:]
        (['contrast', 'increase', 'effect'], ['true_label_attention', 'false_label_attention'])
        >>> located.to_frame().columns.tolist()[:5]
        ['name', 'score', 'low', 'high', 'selected']
    """

    version: ClassVar[int] = 1
    by: Score
    """The score that ranks heads."""
    scores: dict[str, MeanScore]
    """The score `by`, and others. Of all heads: with "exchange", those of exchanging `keys` and
    `values`; with "effect", of the log-odds, also the `log_prob`. Of the first `k` heads, NaN for
    others: the scores of `SCORE_COLUMNS` (`OtherScores`).
    """
    k: int
    """Number of heads of the list, which `selected` refers to."""
    n_prompts: int
    n_queries: int
    """Number of distinct queries, which the intervals resample."""
    outcome: Outcome = "log_odds"
    """What an effect is lost of: the log-odds, or log p where no prompt has other labels."""
    positions: Positions = "last"
    """The positions at which heads were zeroed, for effects."""
    algorithms: Mapping[Algorithm, int] | None = None
    """How many prompts each algorithm was used for, for effects."""
    fallback_reason: str = ""
    """Why the prefix cache was not used; empty if it was used for all prompts, or not needed."""
    removal: ControlledAblation | None = None
    """What removing the first `k` heads jointly costs on held-out prompts, beside random heads."""
    n_shared_queries: int = 0
    """Number of queries of the held-out prompts that also located the heads."""
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks."""
    no_exchanges: str = ""
    """Why the columns query, keys and values are missing, as a sentence; empty if they are there,
    or if the prompts have nothing to exchange.
    """

    @property
    def score(self) -> MeanScore:
        """The score that ranks heads."""
        return self.scores[self.by]

    @property
    def n_heads(self) -> int:
        """The number of heads of the model."""
        return self.score.mean.numel()

    @property
    def heads(self) -> list[Head]:
        """The first `k` heads."""
        return self.top(self.k)

    @property
    def is_exact(self) -> bool:
        """Whether heads were edited or read out; False for first-order estimates of effects."""
        return "gradient" not in (self.algorithms or {})

    def top(self, k: int) -> list[Head]:
        """Return the k heads with the largest mean scores, largest first."""
        order = self.score.mean.flatten().argsort(descending=True, stable=True)[:k]
        return [Head.from_index(index, self.score.mean.shape[1]) for index in order.tolist()]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per head, largest score first.

        The columns are name; score, low and high: the mean of the score `by` (nats) and its
        interval; selected, the share of draws of queries in which the head is among the first `k`;
        the other scores, each with its interval (an `effect` is lost of `outcome`); rank, layer and
        head.
        """
        heads = self.top(self.n_heads)
        index = tuple(np.array(heads).T)
        columns: dict[str, Any] = {"name": [str(head) for head in heads]}
        columns["score"] = self.score.mean[index].numpy()
        columns["low"] = self.score.low[index].numpy()
        columns["high"] = self.score.high[index].numpy()
        columns["selected"] = self.score.selected[index].numpy()
        for name in self.other_scores:
            score = self.scores[name]
            columns[name] = score.mean[index].numpy()
            columns[f"{name}_low"] = score.low[index].numpy()
            columns[f"{name}_high"] = score.high[index].numpy()
        columns["rank"] = np.arange(1, len(heads) + 1)
        return pd.DataFrame(columns | {"layer": index[0], "head": index[1]})

    @property
    def finding(self) -> str:
        """What held-out prompts lose without the first `k` heads, after a sentence on a model that is
        not shown to do the task; without such prompts, `table_finding`.
        """
        if self.removal is None:
            return self.table_finding
        sentences = [
            self.task_sentence,
            self.removal.finding,
            self._held_out_sentence(self.removal),
        ]
        if self.removal.finding and not self.heads_that_matter:
            sentences.append(self._alone_sentence())
        elif self.task_sentence:
            sentences.append("What these heads add is therefore not shown to be this task.")
        return " ".join(filter(None, sentences))

    def _alone_sentence(self) -> str:
        """Return what the table shows of single heads where they are not shown to matter
        together.
        """
        table = self.to_frame().head(self.k)
        ends = "effect_low" if self.by in DIRECT_SCORES else "low"
        if ends in table and bool((table[ends] > 0).any()):
            return "The table ranks single heads; together, they are not shown to carry the answer."
        return "The table ranks heads; none of them is shown to carry the answer."

    @property
    def task_sentence(self) -> str:
        """That the model is not shown to do the task on the held-out prompts, which then have little
        that heads could carry; empty if it is.
        """
        removal = self.removal
        if removal is None or not removal.lacks_task:
            return ""
        measure: Measure = "accuracy" if len(removal.labels) > 1 else "over_vocabulary"
        correct = share_text(removal.interval("no ablation", measure))
        chance = ""
        if len(removal.labels) > 1:
            auroc = auroc_text(removal.interval("no ablation", "auroc"))
            chance = f" (chance {removal.chance_in_words}; AUROC {auroc}, chance 0.5)"
        return (
            f"The model is not shown to do this task: of {plural_prompts(len(removal.queries))} it "
            f"answers {correct} correctly{chance}."
        )

    @property
    def heads_that_matter(self) -> list[Head]:
        """The heads that were removed, if held-out prompts lose more without them than without random
        heads; otherwise, or without such prompts, none.
        """
        if self.removal is None or not self.removal.shows_that_heads_matter:
            return []
        return list(self.removal.heads)

    @property
    def table_finding(self) -> str:
        """How many of the first `k` heads have a score above zero, and what zeroing each alone
        does.
        """
        options: dict[str, Any] = {"n_heads": self.n_heads}
        if self.removal is not None:
            options["joint_removal"] = ""
        return list_finding(self.to_frame(), self.k, SCORE_NAMES[self.by], **options).strip()

    def _held_out_sentence(self, removal: ControlledAblation) -> str:
        """Return a sentence on log-odds and accuracy with and without the heads, on held-out
        prompts.
        """
        where = f"On {plural_prompts(len(removal.queries))}"
        if self.n_shared_queries:
            were = "was" if self.n_shared_queries == 1 else "were"
            where += (
                f", {self.n_shared_queries} of whose {len(set(removal.queries))} queries {were} "
                "used to locate the heads"
            )
        else:
            where += " that did not locate the heads (with other queries)"
        if len(removal.labels) < 2:
            correct = _under_conditions(removal, "over_vocabulary", percent)
            return f"{where}, accuracy is {correct}."
        log_odds = _under_conditions(removal, "log_odds", partial(decimal, digits=2))
        correct = _under_conditions(removal, "accuracy", percent)
        chance = f"chance {removal.chance_in_words}"
        return f"{where}, the answer's log-odds are {log_odds}; accuracy is {correct} ({chance})."

    def summary(self) -> str:
        """Return how the scores were computed and over what, and what the columns mean."""
        sentences = [self._method()]
        sentences.append(f"Means over {plural_prompts(self.n_prompts)}.")
        intervals = f"95% intervals are over {self.n_queries:,} distinct queries."
        sentences.append(intervals_note(self.n_queries, intervals))
        if self.fallback_reason:
            sentences.append(
                f"Whole passes where the prefix cache could not be used: {self.fallback_reason}."
            )
        sentences.append(f"{selected_note(self.k, self.n_heads).capitalize()}.")
        sentences.append(self._column_definitions())
        sentences.append(self.no_exchanges)
        sentences.append(edits_note(self.edits))
        return " ".join(filter(None, sentences))

    @property
    def other_scores(self) -> list[str]:
        """The names of the scores that did not rank the heads, in the order of the table.

        A score that no head has is left out, such as attention to true labels on pairs, whose
        answers are not shown.
        """
        names = []
        for name in SCORE_COLUMNS:
            is_other = name != self.by and name in self.scores
            if is_other and not self.scores[name].mean.isnan().all():
                names.append(name)
        return names

    def _table_scores(self) -> list[str]:
        """Return the names of the other scores that tables show: `to_frame` has the loss of log p
        beside that of the log-odds, too.
        """
        return [name for name in self.other_scores if name != "log_prob"]

    def _column_definitions(self) -> str:
        """Return a sentence on the columns beside the score; empty without such columns."""
        definitions = []
        for name in self._table_scores():
            column = SCORE_COLUMNS[name]
            definition = column.definition.format(lost=OUTCOME_NAMES[self.outcome])
            definitions.append(f"{column.title} ({definition})")
        if not definitions:
            return ""
        return f"Other columns: {'; '.join(definitions)}."

    def _method(self) -> str:
        """Return a sentence on what the score is."""
        if self.by == "increase":
            return "The score is what a head adds to log p(answer)."
        if self.by == "contrast":
            return "The score is what a head adds to log p(answer) − log Σ p(other labels)."
        lost = OUTCOME_NAMES[self.outcome]
        if self.by == "effect":
            where = "at the last position" if self.positions == "last" else "at every position"
            if self.is_exact:
                return f"The score is the {lost} lost if the head alone is zeroed {where}."
            return (
                f"The score is a first-order estimate of the {lost} lost if the head alone is "
                f"zeroed {where}."
            )
        return (
            "The score is the log-odds that the answer loses if, at the last position, one head "
            "alone takes its query from the prompt with a query of the other class."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the finding, the names of the first k heads, and the counts, for JSON."""
        return {
            "finding": self.finding,
            "heads": [str(head) for head in self.heads],
            "heads_that_matter": [str(head) for head in self.heads_that_matter],
            "by": self.by,
            "removal": None if self.removal is None else self.removal.to_dict(),
            "n_prompts": self.n_prompts,
            "n_queries": self.n_queries,
            "n_heads": self.n_heads,
            "expected_selected": self.k / self.n_heads,
            "exact": self.is_exact,
            "positions": self.positions,
            "prompts_by_algorithm": None if self.algorithms is None else dict(self.algorithms),
            "fallback_reason": self.fallback_reason or None,
        }

    def columns(self) -> dict[str, list[Any]]:
        """Return the cells of a table of the first k heads, best first."""
        table = self.to_frame().head(self.k)
        columns: dict[str, list[Any]] = {"head": table["name"].tolist()}
        columns[SCORE_COLUMNS[self.by].title] = list(map(signed, table["score"]))
        columns["95% interval"] = interval_texts(table)
        columns["selected"] = list(map(format_share, table["selected"]))
        for name in self._table_scores():
            column = SCORE_COLUMNS[name]
            format_cell = signed if column.unit == "nats" else format_share
            columns[column.title] = list(map(format_cell, table[name]))
        return columns

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        title = f"Heads by {SCORE_NAMES[self.by]} over {plural_prompts(self.n_prompts)}, nats"
        sentences = [self.finding]
        if self.removal is not None:
            sentences.append(self.table_finding)
        sentences.append(self.summary())
        return replace(table_view(title, self.columns(), self.n_heads), sentences=tuple(sentences))


def _under_conditions(
    removal: ControlledAblation, measure: Measure, format_value: Callable[[float], str]
) -> str:
    """Return a measure with the heads, without them, and without random heads, in words."""
    with_heads = format_value(removal.interval("no ablation", measure).value)
    without_heads = format_value(removal.interval("heads", measure).value)
    without_random = format_value(removal.interval("same layers", measure).value)
    return (
        f"{with_heads} with these heads, {without_heads} without them, {without_random} without "
        "random heads"
    )
