"""The result of `ablate_with_controls`: answers without chosen heads, beside those without random ones.

A condition has one or several sets of heads, and the answer scores with each of them ablated.
Intervals are over queries (not prompts, because those with the same query are not independent) and
random sets.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float

from icl_lens.edits.ablate import Mode
from icl_lens.edits.edit import Positions
from icl_lens.errors import check_choice, short_repr
from icl_lens.foundation.intervals import (
    MIN_CLUSTERS,
    MIN_RANDOM_SETS,
    Interval,
    beside_random_sets,
    leave_one_out_interval,
    leave_one_out_means,
    leave_one_out_weights,
    with_random_sets,
)
from icl_lens.measures.answer_scores import AnswerScores, PromptMeasure
from icl_lens.measures.head_findings import heads_matter, removal_finding
from icl_lens.metrics import label_aurocs, mean_aurocs
from icl_lens.models.active_edits import edits_note
from icl_lens.models.head import Head
from icl_lens.result.base import Displayed, Result
from icl_lens.result.number_format import decimal, joined, mean_and_range, percent, signed
from icl_lens.result.tables import SHOWN_ROWS, columns_first, intervals_note, plural_prompts
from icl_lens.result.view import Cell, Column, Dots, Label, Section, View, table_view

ControlName = Literal["same layers", "all layers"]


CONTROLS: tuple[ControlName, ...] = get_args(ControlName)
"""Random heads from the layers of the ablated heads, and from all layers."""


ConditionName = Literal["no ablation", "heads", "same layers", "all layers"]


Measure = PromptMeasure | Literal["auroc"]


@dataclass(frozen=True, repr=False)
class Condition(Displayed):
    """Head sets, and the answer scores with each of them ablated; random conditions have several
    sets.
    """

    sets: tuple[tuple[Head, ...], ...]
    scores: tuple[AnswerScores, ...]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per set: heads (ablated) and top_token.

        `top_token` is the share of prompts whose answer is the top token.
        """
        heads = [" ".join(map(str, head_set)) for head_set in self.sets]
        shares = [scores.top_token_share for scores in self.scores]
        return pd.DataFrame({"heads": heads, "top_token": shares})

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        columns: dict[str, list[object]] = {"heads ablated": [], "answer is top token": []}
        for heads in self.sets[:SHOWN_ROWS]:
            columns["heads ablated"].append(", ".join(map(str, heads)) or "none")
        for scores in self.scores[:SHOWN_ROWS]:
            columns["answer is top token"].append(f"{scores.top_token_share:.1%}")
        n_prompts = plural_prompts(len(self.scores[0].answer)) if self.scores else "no head sets"
        return table_view(f"Condition({n_prompts})", columns, len(self.sets))


@dataclass(frozen=True, repr=False)
class ControlledAblation(Result):
    """Answer scores with chosen heads ablated jointly, next to those with random head sets ablated.

    `conditions`: "no ablation"; "heads", the chosen ones; "same layers" and "all layers", random
    sets of the same size; a control that was not asked for has no sets. Measures are "accuracy"
    between a prompt's labels and "over_vocabulary" (the answer is the top token), both 0 to 1,
    "log_odds" of the answer against the other labels, nats, and "auroc": the probability that a
    label's log-odds are larger where it is the answer than where it is not, averaged over labels
    (`metrics.label_aurocs`). Heads that only change which label is preferred change accuracy, but
    not the AUROC.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> ablation = il.ablate_with_controls(model, many, ["L5H0", "L4H1"], n_random=3)
        >>> ablation.to_frame().index.tolist()
        ['no ablation', 'heads', 'same layers', 'all layers']
        >>> ablation.difference("heads", "same layers", "log_odds").low < 0
        True
    """

    heads: tuple[Head, ...]
    conditions: dict[ConditionName, Condition]
    queries: tuple[str, ...]
    """The query of each prompt (`PromptBatch.queries`)."""
    labels: tuple[str, ...]
    """Labels of the columns of `AnswerScores.label_log_probs`."""
    positions: Positions
    edits: tuple[str, ...] = ()
    """What else edited the model in all conditions, "no ablation" included: open `with` blocks, and
    other hooks.
    """
    mode: Mode = "zero"
    """What heads were set to: zero, or their mean or a draw from other prompts."""
    reference: str = ""
    """Over which prompts their mean was taken, or from which they were drawn, in words; empty for
    zero.
    """

    @property
    def ablated(self) -> str:
        """What was done to the heads, in words."""
        return {"zero": "zeroed", "mean": "mean-ablated", "resample": "resample-ablated"}[self.mode]

    @property
    def reference_sentence(self) -> str:
        """A sentence on where what takes the heads' place is from; empty for zero."""
        verbs = {
            "zero": "",
            "mean": "The mean is over",
            "resample": "What takes the heads' place is drawn from",
        }
        return f"{verbs[self.mode]} {self.reference}." if self.reference else ""

    @property
    def chance(self) -> float:
        """Accuracy between labels of a random guess, 0 to 1."""
        return float(
            self.conditions["heads"].scores[0].label_mask.double().sum(-1).reciprocal().mean()
        )

    @property
    def chance_in_words(self) -> str:
        """The chance in percent and, if there are more labels than a prompt has, between how
        many; if all prompts have the same answer, also that a constant answer is always right.
        """
        n_choices = self.conditions["heads"].scores[0].label_mask.sum(-1)
        fewest, most = int(n_choices.min()), int(n_choices.max())
        chance = percent(self.chance)
        if most < len(self.labels):
            number = f"{most}" if fewest == most else f"{fewest} to {most}"
            chance += f", between the {number} labels that each prompt has of {len(self.labels)}"
        answers = self.conditions["heads"].scores[0].answer.tolist()
        if len(answers) > 1 and len(set(answers)) == 1 and answers[0] >= 0:
            label = self.labels[answers[0]]
            chance += f", but {percent(1.0)} for a model that always answers {short_repr(label)}"
        return chance

    @property
    def n_displaced(self) -> int:
        """Number of heads in the first "same layers" set that come from another layer, because
        theirs has too few.
        """
        random_sets = self.conditions["same layers"].sets
        if not random_sets:
            return 0
        heads_in_layer = Counter(head.layer for head in self.heads)
        random_in_layer = Counter(head.layer for head in random_sets[0])
        return (heads_in_layer - random_in_layer).total()

    def per_prompt(
        self, condition: ConditionName, measure: PromptMeasure
    ) -> Float[np.ndarray, "set prompt"]:
        """Return a measure for every head set of a condition and every prompt.

        The AUROC is no such measure: it is one number for all prompts.

        Raise InputError for an unknown condition or measure, prompts without an answer, and the
        log-odds of prompts with one label.
        """
        check_choice("condition", condition, tuple(self.conditions))
        check_choice("measure", measure, get_args(PromptMeasure))
        by_set = []
        for scores in self.conditions[condition].scores:
            by_set.append(scores.per_prompt(measure).double().numpy())
        return np.stack(by_set)

    def interval(self, condition: ConditionName, measure: Measure) -> Interval:
        """Return the mean of a measure over prompts and sets, with its 95% interval.

        The interval is NaN for fewer than four queries, and for fewer than three random sets.
        """
        bounds = None if measure == "log_odds" else (0.0, 1.0)
        return self._interval([(condition, self._without_each_query(condition, measure))], bounds)

    def difference(
        self, condition: ConditionName, baseline: ConditionName, measure: Measure
    ) -> Interval:
        """Return the mean of a measure under a condition minus that under another, the `baseline`.

        Both are measured on the same prompts. "heads" minus "same layers" is below zero if the
        heads matter more than others of their layers. The 95% interval is NaN for fewer
        than four queries, and for fewer than three random sets.
        """
        bounds = None if measure == "log_odds" else (-1.0, 1.0)
        values = self._without_each_query(condition, measure)
        baseline_values = self._without_each_query(baseline, measure)
        return self._interval([(condition, values), (baseline, -baseline_values)], bounds)

    @property
    def finding(self) -> str:
        """Whether the heads matter more than random heads; empty for prompts without answer.

        The measure is the log-odds of the answer or, if there is one label, how often it is the top
        token. Random heads are those of the same layers. For a single prompt, the interval is that
        in which another random set would lie.
        """
        if bool((self.conditions["no ablation"].scores[0].answer < 0).any()):
            return ""
        measure = self.finding_measure
        lost, difference = self._lost_and_excess()
        where = "the last position" if self.positions == "last" else "all positions"
        over = "random sets" if len(self.queries) == 1 else ""
        return removal_finding(
            self.heads,
            difference,
            lost=lost,
            unit="nats of log-odds" if measure == "log_odds" else "of its share of top tokens",
            where=f"{self.ablated} at {where}",
            random="random heads of the same layers",
            n_random_sets=len(self.conditions["same layers"].sets),
            over=over,
        )

    @property
    def lacks_task(self) -> bool:
        """Whether the model, without ablation, is not shown to do the task: neither its accuracy nor
        its AUROC has an interval above chance. For one label, whether no answer is the top token;
        False without intervals or answers.
        """
        if not self._is_answered or len(set(self.queries)) < MIN_CLUSTERS:
            return False
        if len(self.labels) < 2:
            return self.interval("no ablation", "over_vocabulary").value == 0
        accuracy, auroc = (self.interval("no ablation", name) for name in ("accuracy", "auroc"))
        return not (accuracy.low > self.chance or auroc.low > 0.5)

    @property
    def shows_that_heads_matter(self) -> bool:
        """Whether `finding` says that the heads matter more than random heads."""
        if not self.finding:
            return False
        return heads_matter(*self._lost_and_excess())

    @property
    def is_undecided(self) -> bool:
        """Whether `finding` lacks an interval above or below zero although there are enough random
        sets: its interval includes zero, or there are too few queries.
        """
        if not self.finding or len(self.conditions["same layers"].sets) < MIN_RANDOM_SETS:
            return False
        return self._lost_and_excess()[1].is_undecided

    @property
    def finding_measure(self) -> PromptMeasure:
        """The measure of `finding`: log-odds or, for one label, how often it is the top token."""
        return "log_odds" if len(self.labels) > 1 else "over_vocabulary"

    def _lost_and_excess(self) -> tuple[float, Interval]:
        """Return what the answer loses without the heads, and how much more that is than without
        random heads of the same layers.

        The interval is over queries and random sets; with a single prompt, over random sets alone.
        """
        measure = self.finding_measure
        before = float(self.per_prompt("no ablation", measure).mean())
        lost = before - float(self.per_prompt("heads", measure).mean())
        if not self.conditions["same layers"].sets:
            return lost, Interval(math.nan, math.nan, math.nan)
        if len(self.queries) > 1:
            return lost, self.difference("same layers", "heads", measure)
        lost_in_sets = before - self.per_prompt("same layers", measure).mean(1)
        return lost, beside_random_sets(lost, lost_in_sets)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per condition: each measure's interval, range and comparison.

        The columns are the measures' means; then, for each measure, `_low` and `_high` (95%
        interval), if there are random sets `_minus_same_layers` with `_low` and `_high` (NaN for
        these sets), `_min` and `_max` (over the means of sets); `n_sets`.
        """
        rows = {}
        for name, condition in self.conditions.items():
            if condition.sets:
                rows[name] = self._row(name)
        table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("condition")
        return columns_first(table, "accuracy", "log_odds", "auroc", "over_vocabulary")

    def to_dict(self) -> dict[str, Any]:
        """Return the finding, chance and, for several labels, the table of conditions for JSON."""
        table = {}
        if len(self.labels) > 1:
            table = json.loads(str(self.to_frame().to_json(orient="index")))
        return {"finding": self.finding, "chance": self.chance, "conditions": table}

    def to_view(self) -> View:
        """Return the finding, the answers under each condition, and differences from controls."""
        n_prompts, n_heads = len(self.queries), len(self.heads)
        where = "the last position" if self.positions == "last" else "all positions"
        heads = ", ".join(map(str, self.heads[:SHOWN_ROWS]))
        if n_heads > SHOWN_ROWS:
            heads += f" and {n_heads - SHOWN_ROWS} more"
        setting = f"{heads} {self.ablated} at {where}, {plural_prompts(n_prompts)}."
        sentences = [self.finding, f"{setting} {self.reference_sentence}".strip()]
        if n_prompts == 1:
            sentences.append(
                "One prompt: it shows what these heads do there, not what they do in general."
            )
            sections = [self._probabilities_section()]
        else:
            sections = [self._conditions_section()]
        if n_prompts > 1 and self._is_answered and self._compared_conditions():
            sections.append(self._differences_section())
        return View(
            title=f"{n_heads} head{'s' * (n_heads > 1)} {self.ablated}",
            sentences=tuple(filter(None, sentences)),
            sections=tuple(sections),
            about="ablation",
        )

    @property
    def _is_answered(self) -> bool:
        """Whether every prompt has an answer; else there is no measure."""
        return bool((self.conditions["no ablation"].scores[0].answer >= 0).all())

    def _condition_names(self) -> dict[ConditionName, str]:
        """Return what each condition is called in tables."""
        n_heads = len(self.heads)
        names: dict[ConditionName, str] = {
            "no ablation": "no ablation",
            "heads": f"{n_heads} head{'s' * (n_heads > 1)} {self.ablated}",
            "same layers": f"{n_heads} random, same layers",
            "all layers": f"{n_heads} random, all layers",
        }
        return {name: words for name, words in names.items() if self.conditions[name].sets}

    def _compared_conditions(self) -> list[ConditionName]:
        """Return the conditions of random heads that have sets."""
        return [name for name in CONTROLS if self.conditions[name].sets]

    def _conditions_section(self) -> Section:
        """Return accuracy and log-odds with 95% intervals, a row per condition."""
        columns = [Column("condition", is_number=False)]
        has_odds = len(self.labels) > 1
        if self._is_answered:
            columns.append(Column("accuracy (95%)"))
            columns += [Column("log-odds, nats (95%)")] if has_odds else []
            columns += [Column("top token"), Column("accuracy, 0 – 100%", is_number=False)]
        else:
            columns.append(Column("sets"))
        rows: list[tuple[Cell, ...]] = []
        for name, words in self._condition_names().items():
            row: list[Cell] = [words]
            if self._is_answered:
                row.append(share_text(self.interval(name, "accuracy")))
                row += [nats_text(self.interval(name, "log_odds"))] if has_odds else []
                row.append(percent(self.interval(name, "over_vocabulary").value))
                row.append(self._accuracy_dots(name))
            else:
                row.append(len(self.conditions[name].sets))
            rows.append(tuple(row))
        return self._answers_section(columns, rows)

    def _answers_section(
        self, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]
    ) -> Section:
        """Return how prompts are answered under each condition, as a section."""
        return Section(
            f"Answers with heads {self.ablated}",
            "The heads matter for the answer if it loses more than with random heads of the same "
            "layers.",
            tuple(columns),
            tuple(rows),
            notes=tuple(self.notes()),
        )

    def _accuracy_dots(self, name: ConditionName) -> Dots:
        """Return a condition's accuracy, beside that without ablation and that of each random
        set.
        """
        before = float(self.per_prompt("no ablation", "accuracy").mean())
        means = self.per_prompt(name, "accuracy").mean(1).tolist()
        draws = tuple(means) if name in CONTROLS else ()
        return Dots(before, sum(means) / len(means), draws)

    def _probabilities_section(self) -> Section:
        """Return each label's probability after the only prompt, a column per condition."""
        names = self._condition_names()
        columns = [Column("probability of", is_number=False), *map(Column, names.values())]
        columns.append(Column("0 – 100%", is_number=False))
        rows: list[tuple[Cell, ...]] = []
        for index, label in enumerate(self.labels):
            probabilities = {name: self._label_probabilities(name, index) for name in names}
            before, after = probabilities["no ablation"][0], probabilities["heads"][0]
            draws = tuple(probabilities.get("same layers", ()))
            texts = map(mean_and_range, probabilities.values())
            rows.append((Label(label, index), *texts, Dots(before, after, draws)))
        return self._answers_section(columns, rows)

    def _label_probabilities(self, name: ConditionName, label: int) -> list[float]:
        """Return a label's probability after the first prompt under each head set of a
        condition.
        """
        scores = self.conditions[name].scores
        return [math.exp(float(answers.label_log_probs[0, label])) for answers in scores]

    def _differences_section(self) -> Section:
        """Return what the answers lose without the heads, more than without random heads."""
        has_odds = len(self.labels) > 1
        columns = [Column("lost more than without", is_number=False)]
        columns.append(Column("accuracy, points (95%)"))
        columns += [Column("log-odds, nats (95%)")] if has_odds else []
        rows: list[tuple[Cell, ...]] = []
        for name in self._compared_conditions():
            accuracy = self.difference(name, "heads", "accuracy")
            row: list[Cell] = [f"random heads, {name}", points_text(accuracy)]
            row += [nats_text(self.difference(name, "heads", "log_odds"))] if has_odds else []
            rows.append(tuple(row))
        return Section(
            "Compared with random heads",
            "Above zero if the answers lose more without these heads than without random ones.",
            tuple(columns),
            tuple(rows),
        )

    def notes(self) -> list[str]:
        """Return notes that explain the table's numbers."""
        n_prompts, n_queries = len(self.queries), len(set(self.queries))
        n_sets = len(self.conditions["same layers"].sets)
        statistic = "mean" if n_prompts > 1 else "mean (range)"
        lines = [f"Random: {statistic} over {n_sets} sets each."] if n_sets else []
        if n_prompts > 1 and self._is_answered:
            lines.append(
                "Accuracy: share of prompts whose answer is the most probable of their labels; "
                f"chance: {self.chance_in_words}. Top token: share whose answer is the most "
                "probable of all tokens."
            )
        if len(self.labels) > 1 and self._is_answered:
            lines.append("Log-odds: those of the answer against the prompt's other labels.")
        if n_prompts > 1:
            over_sets = ", and over the random sets" if n_sets else ""
            intervals = (
                f"95% intervals are over the {n_queries} queries of {n_prompts} prompts{over_sets}."
            )
            lines.append(intervals_note(n_queries, intervals))
        if 0 < n_sets < MIN_RANDOM_SETS:
            lines.append(
                f"Random heads have no intervals: these need at least {MIN_RANDOM_SETS} random "
                f"sets, got {n_sets}."
            )
        if n_prompts > 1 and self._is_answered:
            lines += self._auroc_notes()
        if self.edits:
            lines.append(edits_note(self.edits, "All conditions, also “no ablation”,"))
        if self.n_displaced:
            lines.append(
                f"{self.n_displaced} heads of each same-layer set are from the nearest layers, for "
                "lack of other heads."
            )
        return lines

    def _auroc_notes(self) -> list[str]:
        """Return a note on the AUROC under each condition; none if it is not defined."""
        aurocs = []
        for name, words in self._condition_names().items():
            auroc = self.interval(name, "auroc")
            if not math.isnan(auroc.value):
                aurocs.append(f"{words} {auroc_text(auroc)}")
        if not aurocs:
            return []
        return [
            "AUROC of the labels' log-odds, which a preference for one label does not change "
            f"(chance: 0.5): {joined(aurocs)}."
        ]

    def _row(self, name: ConditionName) -> dict[str, float | int]:
        """Return one row of `to_frame`; log-odds and AUROC are omitted if there is one label."""
        row: dict[str, float | int] = {}
        measures: tuple[Measure, ...] = ("accuracy", "auroc", "log_odds", "over_vocabulary")
        if len(self.labels) < 2:
            measures = ("accuracy", "over_vocabulary")
        for measure in measures:
            means = self._without_each_query(name, measure)[0]
            intervals = {measure: self.interval(name, measure)}
            if name != "same layers" and self.conditions["same layers"].sets:
                difference = self.difference(name, "same layers", measure)
                intervals[f"{measure}_minus_same_layers"] = difference
            for column, (value, low, high) in intervals.items():
                row |= {column: value, f"{column}_low": low, f"{column}_high": high}
            row |= {f"{measure}_min": float(means.min()), f"{measure}_max": float(means.max())}
        return row | {"n_sets": len(self.conditions[name].sets)}

    def _without_each_query(
        self, condition: ConditionName, measure: Measure
    ) -> Float[np.ndarray, "draw set"]:
        """Return a measure of every set: first over all prompts, then without each query."""
        if measure != "auroc":
            return leave_one_out_means(self.per_prompt(condition, measure).T, self.queries)
        check_choice("condition", condition, tuple(self.conditions))
        if condition not in self._computed_aurocs:
            weights = leave_one_out_weights(self.queries)
            by_set = []
            for scores in self.conditions[condition].scores:
                aurocs = label_aurocs(
                    scores.label_log_probs,
                    scores.answer,
                    choices=scores.label_mask,
                    weights=weights,
                )
                by_set.append(mean_aurocs(aurocs))
            self._computed_aurocs[condition] = np.stack(by_set, axis=1)
        return self._computed_aurocs[condition]

    @cached_property
    def _computed_aurocs(self) -> dict[ConditionName, Float[np.ndarray, "draw set"]]:
        return {}

    def _interval(
        self,
        terms: list[tuple[ConditionName, Float[np.ndarray, "draw _"]]],
        bounds: tuple[float, float] | None,
    ) -> Interval:
        """Return the sum of terms, each a condition's mean over its sets, or minus that.

        The interval is over queries and random sets. The first draw has all queries, each other one
        leaves a query out.
        """
        values = np.sum([means.mean(1) for _, means in terms], axis=0)
        interval = leave_one_out_interval(values, self.queries, bounds=bounds)
        means_of_random_sets = [draws[0] for name, draws in terms if name in CONTROLS]
        return with_random_sets(interval, *means_of_random_sets, bounds=bounds)


def share_text(share: Interval) -> str:
    """Format a share with its interval: "96.7% (88.0–100.0)"."""
    if math.isnan(share.low):
        return percent(share.value)
    return f"{percent(share.value)} ({100 * share.low:.1f}–{100 * share.high:.1f})"


def nats_text(nats: Interval) -> str:
    """Format nats with their interval: "+1.23 (+0.45…+2.01)"."""
    if math.isnan(nats.low):
        return signed(nats.value, 2)
    return f"{signed(nats.value, 2)} ({signed(nats.low, 2)}…{signed(nats.high, 2)})"


def points_text(share: Interval) -> str:
    """Format a difference of shares in percentage points: "−3.2 (−6.1…−0.4)"."""
    value, low, high = (signed(100 * end, 1) for end in (share.value, share.low, share.high))
    return value if math.isnan(share.low) else f"{value} ({low}…{high})"


def auroc_text(auroc: Interval) -> str:
    """Format an AUROC with its interval: "0.98 (0.95–1.00)"."""
    if math.isnan(auroc.low):
        return decimal(auroc.value, 2)
    return f"{decimal(auroc.value, 2)} ({auroc.low:.2f}–{auroc.high:.2f})"
