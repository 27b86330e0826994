"""Ablate heads and compare with random head sets of the same size, from the same layers and from
all layers.

1. `random_head_sets` draws sets that have as many heads as were chosen and contain none of these.
   Some layers matter more than others, so sets from the chosen heads' layers are the stricter
   control.
2. `ablate_with_controls` scores every prompt without ablation, with the chosen heads zeroed, and
   with each set zeroed.
3. Intervals are over queries (not prompts, because those with the same query are not independent)
   and random sets.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.passes import NO_LABELS_HINT
from icl_lens.digest import weights_digest
from icl_lens.edits.ablate import Ablate, Mode, Reference
from icl_lens.edits.edit import Edit, Positions
from icl_lens.edits.reference import described, warn_of_same_pairs
from icl_lens.engine.score import read_labels, score_sets
from icl_lens.errors import InputError, check_at_least, check_choice, check_integers
from icl_lens.intervals import (
    MIN_RANDOM_SETS,
    Interval,
    beside_random_sets,
    leave_one_out_interval,
    leave_one_out_means,
    leave_one_out_weights,
    with_random_sets,
)
from icl_lens.metrics import accuracy, is_correct, label_aurocs, label_log_odds, mean_aurocs
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.memory import PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, check_batch
from icl_lens.result.base import Displayed, Result
from icl_lens.result.head_findings import removal_finding
from icl_lens.result.number_format import decimal, joined, mean_and_range, percent, signed
from icl_lens.result.tables import SHOWN_ROWS, columns_first, plural_prompts
from icl_lens.result.view import Cell, Column, Dots, Label, Section, View, table_view
from icl_lens.runs.run import Run
from icl_lens.runs.stream import plan_in_order, start

ConditionName = Literal["no ablation", "heads", "same layers", "all layers"]
PromptMeasure = Literal["accuracy", "log_odds", "over_vocabulary"]
Measure = PromptMeasure | Literal["auroc"]


@dataclass(frozen=True, repr=False)
class AnswerScores(Displayed):
    """Label log-probabilities (nats), and whether the correct label is the top token of the full
    vocabulary.
    """

    label_log_probs: Float[Tensor, "prompt label"]
    top1_correct: Bool[Tensor, " prompt"]
    answer: Int[Tensor, " prompt"]
    """Index of the correct label; -1 where a prompt has no answer."""
    label_mask: Bool[Tensor, "prompt label"]
    """Labels that occur in each prompt."""

    def to_frame(self) -> pd.DataFrame:
        """Return answer (index), is_top_token, and log p of each label (nats): one row per
        prompt.
        """
        frame = pd.DataFrame(
            {"answer": self.answer.tolist(), "is_top_token": self.top1_correct.tolist()}
        )
        return frame.join(pd.DataFrame(self.label_log_probs.tolist()).add_prefix("log_prob_"))

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        n, scores = len(self.answer), self.label_log_probs[:SHOWN_ROWS]
        columns: dict[str, list[object]] = {
            "prompt": list(range(len(scores))),
            "answer": self.answer[:SHOWN_ROWS].tolist(),
            "log p(labels), nats": [
                "  ".join(
                    signed(value, 2) if is_own else "–"
                    for value, is_own in zip(row, own, strict=True)
                )
                for row, own in zip(scores.tolist(), self.label_mask.tolist(), strict=False)
            ],
            "is top token": [str(one) for one in self.top1_correct[:SHOWN_ROWS].tolist()],
        }
        return table_view(
            f"AnswerScores({plural_prompts(n)} × {self.label_log_probs.shape[1]} labels)",
            columns,
            n,
        )

    @property
    def accuracy_between_labels(self) -> float:
        """Share of prompts whose correct label is the most probable of their labels, 0 to 1."""
        return accuracy(self.label_log_probs, self.answer, choices=self.label_mask)


_MEASURES: dict[PromptMeasure, Callable[[AnswerScores], Tensor]] = {
    "accuracy": lambda one: is_correct(one.label_log_probs, one.answer, choices=one.label_mask),
    "log_odds": lambda one: label_log_odds(one.label_log_probs, one.answer, choices=one.label_mask),
    "over_vocabulary": lambda one: one.top1_correct,
}


@dataclass(frozen=True, repr=False)
class Condition(Displayed):
    """Head sets, and the answer scores with each of them ablated; random conditions have several
    sets.
    """

    sets: tuple[tuple[Head, ...], ...]
    scores: tuple[AnswerScores, ...]

    def to_frame(self) -> pd.DataFrame:
        """Return heads (ablated) and top_token (share of prompts whose answer is the top token):
        one row per set.
        """
        heads = [" ".join(map(str, one)) for one in self.sets]
        return pd.DataFrame(
            {
                "heads": heads,
                "top_token": [float(one.top1_correct.double().mean()) for one in self.scores],
            }
        )

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        columns: dict[str, list[object]] = {
            "heads ablated": [
                ", ".join(map(str, heads)) or "none" for heads in self.sets[:SHOWN_ROWS]
            ],
            "answer is top token": [
                f"{float(one.top1_correct.double().mean()):.1%}" for one in self.scores[:SHOWN_ROWS]
            ],
        }
        n_prompts = plural_prompts(len(self.scores[0].answer)) if self.scores else "no head sets"
        return table_view(f"Condition({n_prompts})", columns, len(self.sets))


@dataclass(frozen=True, repr=False)
class ControlledAblation(Result):
    """Answer scores with chosen heads ablated jointly, next to those with random head sets ablated.

    `conditions`: "no ablation"; "heads", the chosen ones; "same layers" and "all layers", random
    sets of the same size. Measures are "accuracy" between a prompt's labels and "over_vocabulary"
    (the answer is the top token), both 0 to 1, "log_odds" of the answer against the other labels,
    nats, and "auroc": the probability that a label's log-odds are larger where it is the answer
    than where it is not, averaged over labels (`metrics.label_aurocs`). Heads that only change
    which label is preferred change accuracy, but not the AUROC.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> found = il.ablate_with_controls(model, many, ["L5H0", "L4H1"], n_random=3)
        >>> found.to_frame().index.tolist()
        ['no ablation', 'heads', 'same layers', 'all layers']
        >>> found.difference("heads", "same layers", "log_odds").low < 0
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
    def n_displaced(self) -> int:
        """Number of heads in the first "same layers" set that come from another layer, because
        theirs has too few.
        """
        first = next(iter(self.conditions["same layers"].sets), self.heads)
        own, others = (Counter(head.layer for head in heads) for heads in (self.heads, first))
        return (own - others).total()

    def per_prompt(
        self, condition: ConditionName, measure: PromptMeasure
    ) -> Float[np.ndarray, "set prompt"]:
        """Return a measure for every head set of a condition and every prompt; not the AUROC, which
        is one of all.

        Raise InputError for an unknown condition or measure, prompts without an answer, and the
        log-odds of prompts with one label.
        """
        check_choice("condition", condition, tuple(self.conditions))
        check_choice("measure", measure, tuple(_MEASURES))
        return np.stack(
            [_MEASURES[measure](one).double().numpy() for one in self.conditions[condition].scores]
        )

    def interval(self, condition: ConditionName, measure: Measure) -> Interval:
        """Return the mean of a measure over prompts and sets, with its 95% interval.

        The interval is NaN for a single query, and for fewer than three random sets.
        """
        bounds = None if measure == "log_odds" else (0.0, 1.0)
        return self._interval([(condition, self._without_each_query(condition, measure))], bounds)

    def difference(
        self, condition: ConditionName, other: ConditionName, measure: Measure
    ) -> Interval:
        """Return the mean of a measure under one condition minus that under another, with its 95%
        interval.

        Both are measured on the same prompts. "heads" minus "same layers" is below zero if the
        heads matter more than others of their layers. The interval is NaN for a single query, and
        for fewer than three random sets.
        """
        bounds = None if measure == "log_odds" else (-1.0, 1.0)
        first, second = (
            self._without_each_query(condition, measure),
            self._without_each_query(other, measure),
        )
        return self._interval([(condition, first), (other, -second)], bounds)

    @property
    def finding(self) -> str:
        """Whether the heads matter more than random heads, in one or two sentences; empty for
        prompts without answer.

        The measure is the log-odds of the answer or, if there is one label, how often it is the top
        token. Random heads are those of the same layers. For a single query, the interval is that
        in which another random set would lie.
        """
        if bool((self.conditions["no ablation"].scores[0].answer < 0).any()):
            return ""
        measure = self._finding_measure
        lost, difference = self._loss_and_difference()
        is_last = self.positions == "last"
        return removal_finding(
            self.heads,
            difference,
            lost=lost,
            unit="nats of log-odds" if measure == "log_odds" else "of its share of top tokens",
            where=f"{self.ablated} at {'the last position' if is_last else 'all positions'}",
            random="random heads of the same layers",
            n_random_sets=len(self.conditions["same layers"].sets),
        )

    @property
    def shows_that_heads_matter(self) -> bool:
        """Whether `finding` says that the heads matter more than random heads."""
        if not self.finding:
            return False
        lost, difference = self._loss_and_difference()
        return lost > 0 and difference.low > 0

    @property
    def _finding_measure(self) -> PromptMeasure:
        return "log_odds" if len(self.labels) > 1 else "over_vocabulary"

    def _loss_and_difference(self) -> tuple[float, Interval]:
        """Return what the answer loses without the heads, and how much more than without random
        heads of the same layers.
        """
        measure = self._finding_measure
        before, after = (
            float(self.per_prompt(name, measure).mean()) for name in ("no ablation", "heads")
        )
        if not self.conditions["same layers"].sets:
            return before - after, Interval(math.nan, math.nan, math.nan)
        if len(set(self.queries)) > 1:
            return before - after, self.difference("same layers", "heads", measure)
        in_sets = before - self.per_prompt("same layers", measure).mean(1)
        return before - after, beside_random_sets(before - after, in_sets)

    def to_frame(self) -> pd.DataFrame:
        """Return each measure's interval, range over sets and difference from "same layers", one
        row per condition.

        The columns are the measures' means; then, for each measure, `_low` and `_high` (95%
        interval), if there are random sets `_minus_same_layers` with `_low` and `_high` (NaN for
        these sets), `_min` and `_max` (over the means of sets); `n_sets`.
        """
        rows = {
            name: self._row(name) for name, condition in self.conditions.items() if condition.sets
        }
        table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("condition")
        return columns_first(table, "accuracy", "log_odds", "auroc", "over_vocabulary")

    def to_dict(self) -> dict[str, Any]:
        """Return the finding, chance and, for prompts with several labels, the table of conditions
        for JSON.
        """
        table = (
            {} if len(self.labels) < 2 else json.loads(str(self.to_frame().to_json(orient="index")))
        )
        return {"finding": self.finding, "chance": self.chance, "conditions": table}

    def to_view(self) -> View:
        """Return the finding, the answers under each condition, and what is added to random heads'
        cost.
        """
        n_prompts, n_heads = len(self.queries), len(self.heads)
        where = "the last position" if self.positions == "last" else "all positions"
        heads = ", ".join(map(str, self.heads[:SHOWN_ROWS]))
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
        random: tuple[ConditionName, ...] = ("same layers", "all layers")
        return [name for name in random if self.conditions[name].sets]

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
        return Section(
            f"Answers with heads {self.ablated}",
            "The heads matter for the answer if it changes more than with random heads of the same "
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
        is_random = name in ("same layers", "all layers")
        return Dots(before, sum(means) / len(means), tuple(means) if is_random else ())

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
        return Section(
            f"Answers with heads {self.ablated}",
            "The heads matter for the answer if it changes more than with random heads of the same "
            "layers.",
            tuple(columns),
            tuple(rows),
            notes=tuple(self.notes()),
        )

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
                f"chance: {percent(self.chance)}. Top token: share whose answer is the most "
                "probable of all tokens."
            )
        if n_prompts > 1:
            lines.append(
                f"95% intervals are over the {n_queries} queries of {n_prompts} prompts, and over "
                "the random sets."
            )
        if 0 < n_sets < MIN_RANDOM_SETS:
            lines.append(
                f"Random heads have no intervals: these need at least {MIN_RANDOM_SETS} random "
                f"sets, got {n_sets}."
            )
        if n_prompts > 1 and self._is_answered:
            aurocs = []
            for name, words in self._condition_names().items():
                auroc = self.interval(name, "auroc")
                if not math.isnan(auroc.value):
                    aurocs.append(f"{words} {auroc_text(auroc)}")
            if aurocs:
                lines.append(
                    "AUROC of the labels' log-odds, which a preference for one label does not "
                    f"change (chance: 0.5): {joined(aurocs)}."
                )
        if self.edits:
            lines.append(edits_note(self.edits, "All conditions, also “no ablation”,"))
        if self.n_displaced:
            lines.append(
                f"{self.n_displaced} heads of each same-layer set are from the nearest layers, for "
                "lack of other heads."
            )
        return lines

    def _row(self, name: ConditionName) -> dict[str, float | int]:
        """Return one row of `to_frame`; log-odds and AUROC are omitted if there is only one
        label.
        """
        row: dict[str, float | int] = {}
        measures: tuple[Measure, ...] = ("accuracy", "auroc", "log_odds", "over_vocabulary")
        if len(self.labels) < 2:
            measures = ("accuracy", "over_vocabulary")
        for measure in measures:
            means = self._without_each_query(name, measure)[0]
            found = {"": self.interval(name, measure)}
            if name != "same layers" and self.conditions["same layers"].sets:
                found["_minus_same_layers"] = self.difference(name, "same layers", measure)
            for suffix, (value, low, high) in found.items():
                row |= {
                    measure + suffix: value,
                    f"{measure}{suffix}_low": low,
                    f"{measure}{suffix}_high": high,
                }
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
            of_sets = [
                mean_aurocs(
                    label_aurocs(
                        one.label_log_probs, one.answer, choices=one.label_mask, weights=weights
                    )
                )
                for one in self.conditions[condition].scores
            ]
            self._computed_aurocs[condition] = np.stack(of_sets, axis=1)
        return self._computed_aurocs[condition]

    @cached_property
    def _computed_aurocs(self) -> dict[ConditionName, Float[np.ndarray, "draw set"]]:
        return {}

    def _interval(
        self,
        terms: list[tuple[ConditionName, Float[np.ndarray, "draw _"]]],
        bounds: tuple[float, float] | None,
    ) -> Interval:
        """Return the sum of the means over sets of some conditions, with its interval over queries
        and random sets.
        """
        values = np.sum([means.mean(1) for _, means in terms], axis=0)
        interval = leave_one_out_interval(values, self.queries, bounds=bounds)
        random = [means[0] for name, means in terms if name in ("same layers", "all layers")]
        return with_random_sets(interval, *random, bounds=bounds)


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
    """Format a difference of shares, in percentage points, with its interval: "−3.2
    (−6.1…−0.4)".
    """
    value, low, high = (signed(100 * end, 1) for end in (share.value, share.low, share.high))
    return value if math.isnan(share.low) else f"{value} ({low}…{high})"


def auroc_text(auroc: Interval) -> str:
    """Format an AUROC with its interval: "0.98 (0.95–1.00)"."""
    if math.isnan(auroc.low):
        return decimal(auroc.value, 2)
    return f"{decimal(auroc.value, 2)} ({auroc.low:.2f}–{auroc.high:.2f})"


def random_head_sets(
    model: Any,
    heads: Sequence[AnyHead],
    *,
    draws: int = 20,
    seed: int = 0,
    same_layers: bool = True,
) -> list[list[Head]]:
    """Return `draws` random sets of `len(heads)` distinct heads that are not in `heads`: the
    control of an edit.

    A set has as many heads of each layer as `heads`, because some layers matter more than others;
    if a layer has too few other heads, the rest come from the nearest layers. With
    `same_layers=False`, heads come from all layers. The same seed gives the same sets. Raise
    InputError for unknown heads, and if fewer than `len(heads)` other heads exist.

    Example:
        >>> random_sets = il.random_head_sets(model, ["L5H0", "L4H1"], draws=3)
        >>> [sorted(head.layer for head in heads) for heads in random_sets]
        [[4, 5], [4, 5], [4, 5]]
    """
    view = ModelView.of(model)
    heads, all_heads = list(view.check_heads(heads)), view.heads()
    others = [head for head in all_heads if head not in heads]
    if len(others) < len(heads):
        raise InputError(
            f"heads must be at most half of the model's {len(all_heads)} heads, to draw random "
            f"sets, got {len(heads)}"
        )
    rng = random.Random(seed)
    if not same_layers:
        return [rng.sample(others, len(heads)) for _ in range(draws)]
    sets = []
    for _ in range(draws):
        remaining, chosen = list(others), []
        for head in heads:
            nearest = min(abs(one.layer - head.layer) for one in remaining)
            chosen.append(
                rng.choice([one for one in remaining if abs(one.layer - head.layer) == nearest])
            )
            remaining.remove(chosen[-1])
        sets.append(chosen)
    return sets


def ablate_with_controls(
    model: Any,
    batch: PromptBatch,
    heads: Sequence[AnyHead],
    *,
    n_random: int = 10,
    positions: Positions = "last",
    mode: Mode = "zero",
    reference: Reference = None,
    seed: int = 0,
    run: Run | None = None,
) -> ControlledAblation:
    """Score a batch without ablation, with `heads` ablated, and with random sets of the same number
    of other heads.

    `n_random` sets are drawn from the layers of `heads`, and the same number from all layers. Heads
    are ablated at each prompt's last position; `positions="all"` ablates them everywhere, which
    takes much longer. `mode="zero"` sets their z to zero, `mode="mean"` to its mean over the
    `reference` prompts, `mode="resample"` to that of one of them (see `Ablate`). Pass several
    batches as `reference` for a mean over all prompts of several tasks; there is a warning if all
    of them are of the pairs that are scored, since their mean keeps what heads do for these. Zero
    is a value that later layers have not seen in training, so it can change more than the heads'
    own part. `run` says how the prompts run (see `Run`). Raise InputError for an unknown head, no
    heads, a negative `n_random`, fewer than `len(heads)` other heads, and like `Ablate` for `mode`
    and `reference`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> heads = il.locate(model, many, k=2).heads
        >>> ablation = il.ablate_with_controls(model, many, heads, n_random=3)
        >>> ablation.interval("no ablation", "accuracy").value > ablation.chance
        True
    """
    view = ModelView.of(model)
    check_batch(batch)
    (n_random,) = check_at_least(0, n_random=n_random)
    (seed,) = check_integers(seed=seed)
    chosen = list(view.check_heads(heads))
    if not chosen:
        raise InputError("heads must contain at least one head, got none")
    sets: dict[ConditionName, list[list[Head]]] = {
        "no ablation": [[]],
        "heads": [chosen],
        "same layers": random_head_sets(model, chosen, draws=n_random, seed=seed),
        "all layers": random_head_sets(model, chosen, draws=n_random, seed=seed, same_layers=False),
    }
    ablation = Ablate([], mode=mode, reference=reference, positions=positions, seed=seed)
    ablated = [replace(ablation, heads=one) for one in chain.from_iterable(sets.values())]
    if ablation.reference is not None:
        warn_of_same_pairs(batch, ablation.reference)
    ablated = Ablate.prepare(view, ablated, None)  # runs the reference once for all pieces
    options: dict[str, Any] = {
        "heads": list(map(str, chosen)),
        "n_random_sets": n_random,
        "seed": seed,
    }
    options |= {"positions": positions, "mode": mode}
    if (z := ablated[0].recorded_z) is not None:
        options["reference"] = weights_digest({str(layer): values for layer, values in z.items()})

    def compute(rows: list[int]) -> dict[str, Tensor]:
        found = score_answers(view, batch[rows], [[one] for one in ablated])
        columns = {
            "scores": [one.label_log_probs for one in found],
            "top1": [one.top1_correct.int() for one in found],
        }
        return {name: torch.stack(values, dim=1) for name, values in columns.items()}

    plan = plan_in_order(batch, run, n_tokens=PASS_TOKENS // len(ablated))
    with start(run, model, batch, "ablation", options, plan=plan) as stream:
        found = stream.map("ablation", compute)
    answer, mask = batch.answer.cpu(), batch.label_mask.cpu()
    scores = iter(
        AnswerScores(torch.from_numpy(labels), torch.from_numpy(top1).bool(), answer, mask)
        for labels, top1 in zip(
            *(found[name].swapaxes(0, 1) for name in ("scores", "top1")), strict=True
        )
    )
    return ControlledAblation(
        heads=tuple(chosen),
        conditions={
            name: Condition(tuple(map(tuple, some)), tuple(next(scores) for _ in some))
            for name, some in sets.items()
        },
        queries=batch.queries,
        labels=tuple(batch.labels),
        positions=positions,
        edits=active_edits(view),
        mode=mode,
        reference="" if ablation.reference is None else described(batch, ablation.reference),
    )


def score_answers(
    view: ModelView, batch: PromptBatch, sets: Sequence[Sequence[Edit]]
) -> list[AnswerScores]:
    """Return each prompt's answer scores under each set of edits, on the CPU."""
    batch.require_labels("label to score", NO_LABELS_HINT)
    labels = read_labels(batch)

    def labels_and_top1(log_probs: Tensor, prompt: Tensor) -> Tensor:
        is_top1 = log_probs.argmax(-1) == batch.answer_tokens[prompt].to(log_probs.device)
        return torch.cat([labels(log_probs, prompt), is_top1[:, None].to(log_probs)], dim=-1)

    scores = score_sets(view, batch, sets, labels_and_top1)[0].cpu()
    return [
        AnswerScores(
            one_set[:, :-1].float(),
            one_set[:, -1] > 0.5,
            batch.answer.cpu(),
            batch.label_mask.cpu(),
        )
        for one_set in scores.unbind(1)
    ]
