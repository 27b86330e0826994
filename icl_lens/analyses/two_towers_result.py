"""What exchanges cost by prompt, and the sentence and tables on two towers that follow from it."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from icl_lens.analyses.behavior_contrasts import balanced_values
from icl_lens.analyses.task_check_base import few_queries
from icl_lens.foundation.intervals import (
    MIN_CLUSTERS,
    Interval,
    bootstrap_interval,
    with_random_sets,
)
from icl_lens.foundation.ranking_scores import Score
from icl_lens.models.active_edits import edits_note
from icl_lens.models.head import Head
from icl_lens.result.base import Result
from icl_lens.result.number_format import (
    interval_decimals,
    interval_text,
    joined,
    percent,
    signed,
    signed_ends,
)
from icl_lens.result.tables import (
    format_share,
    intervals_note,
    json_records,
    plural_prompts,
    selected_note,
)
from icl_lens.result.view import Column, Section, View

N_SCAN_SHOWN = 12
DONORS = {
    "query": "the prompts with a query of the other class",
    "keys": "the prompts with exchanged texts",
    "values": "the prompts with exchanged labels",
}
"""The donors of the exchanges of one thing alone."""
PAIRS = {
    "query+keys": ("query", "keys"),
    "query+values": ("query", "values"),
    "keys+values": ("keys", "values"),
}


@dataclass(frozen=True, eq=False)
class ExchangeEffects:
    """What one exchange costs, by prompt."""

    name: str
    predicted: Literal["other", "same"]
    """The label that two towers predict: the other one or the same as without the exchange."""
    lost: Float[np.ndarray, " prompt"]
    """Log-odds that the answer loses, nats."""
    random_lost: Float[np.ndarray, "set prompt"]
    """The same with random sets of heads."""
    partner_log_odds: Float[np.ndarray, " prompt"]
    """Log-odds of the answer against its partner with the exchange, nats."""
    correct: Bool[np.ndarray, " prompt"]
    """Whether the model still gives the prompt's answer."""
    as_predicted: Bool[np.ndarray, " prompt"]
    """Whether the model gives the label that two towers predict."""
    donors_correct: Float[np.ndarray, " prompt"] | None
    """Whether the model gives the donors' answers, a mean over the donors; None without a query."""
    donors_log_odds: Float[np.ndarray, " prompt"] | None
    """Log-odds of the donors' answers against the prompt's other label, mean over donors, nats."""


@dataclass(frozen=True)
class Prediction:
    """One condition of two towers: a difference that is above zero, nats."""

    kind: Literal["answered", "effect", "structure", "turned"]
    """What the condition is about.

    - "answered": the model's answers without an exchange;
    - "effect": an effect beyond that of random heads, which models of other kinds can show as well;
    - "structure": what models of other kinds fail;
    - "turned": an exchange that turns the answer.
    """
    text: str
    """What must hold, as a clause."""
    difference: Interval
    exchange: str = ""
    """The exchange that must turn the answer; empty for other conditions."""

    @property
    def holds(self) -> bool:
        """Whether the 95% interval of the difference is above zero."""
        return self.difference.low > 0


@dataclass(frozen=True, repr=False, eq=False)
class TwoTowers(Result):
    """What exchanging some heads' queries, keys and values costs; made by `two_towers`.

    `print` shows `verdict` and the table. `exchanges` has the values of every prompt; intervals
    resample queries, since prompts with the same query are not independent.

    Example:
        >>> towers = il.two_towers(model, "sentiment-number", k=3, n=20, n_random=3)
        >>> towers.scan.columns.tolist()[:6], len(towers.heads)
        (['head', 'query', 'low', 'high', 'selected', 'keys'], 3)
    """

    version: ClassVar[int] = 3
    model: str
    heads: tuple[Head, ...]
    random_sets: tuple[tuple[Head, ...], ...]
    exchanges: tuple[ExchangeEffects, ...]
    log_odds: Float[np.ndarray, " prompt"]
    """The answer's log-odds without exchange, nats."""
    partner_log_odds: Float[np.ndarray, " prompt"]
    """The same against its partner alone; equal with two labels."""
    correct: Bool[np.ndarray, " prompt"]
    """Whether the model gives the answer without exchange."""
    queries: tuple[str, ...]
    answers: tuple[str, ...]
    partners: tuple[str, ...]
    """The label that each answer is exchanged with."""
    scan: pd.DataFrame | None = field(repr=False)
    """Mean effects (nats) of exchanging single heads, on other prompts; None if heads were given.

    Columns: head, query, low, high, selected, keys, values, rank, layer, index. See
    `LocatedHeads.to_frame`; the list of heads is `heads`.
    """
    n_scanned: int
    """Number of prompts on which the heads were found; 0 if they were given."""
    chance: float
    """Accuracy of a random guess, 0 to 1."""
    text: str
    """The first prompt."""
    fallback_reason: str = ""
    """Why full forward passes were used instead of the prefix cache; empty if it was used."""
    edits: tuple[str, ...] = ()
    """What edited the model: edits of open `with` blocks, and hooks. Empty for the plain model."""
    by: Score = "exchange"
    """The score by which the heads were found."""

    @property
    def accuracy(self) -> Interval:
        """Accuracy without exchange, 0 to 1."""
        return bootstrap_interval(self.correct, clusters=self.queries, bounds=(0.0, 1.0))

    @cached_property
    def lost(self) -> dict[str, Interval]:
        """The mean log-odds that each exchange costs the answer, nats."""
        return {exchange.name: self._interval(exchange.lost) for exchange in self.exchanges}

    def _interval(self, values: np.ndarray) -> Interval:
        return bootstrap_interval(values, clusters=self.queries)

    def _above_random(self, exchange: ExchangeEffects) -> Interval:
        """Return how much more an exchange costs than in random heads, with its interval."""
        over_queries = self._interval(exchange.lost - exchange.random_lost.mean(0))
        return with_random_sets(over_queries, exchange.random_lost.mean(1))

    def _balanced(self, log_odds: Float[np.ndarray, " prompt"]) -> Interval:
        """Return the mean log-odds against the partner, without preferences for a label."""
        labels = sorted({*self.answers, *self.partners})
        answer = np.array([labels.index(label) for label in self.answers])
        partner = np.array([labels.index(label) for label in self.partners])
        return self._interval(balanced_values(log_odds, answer, partner))

    @cached_property
    def answered(self) -> dict[str, Interval]:
        """The mean log-odds of the right answer against its partner, nats, of prompts and donors.

        The model's preference for a label is taken out: see `balanced_values`.
        """
        exchanges = {exchange.name: exchange for exchange in self.exchanges}
        answered = {"the prompts": self._balanced(self.partner_log_odds)}
        for name, donors in DONORS.items():
            log_odds = exchanges[name].donors_log_odds
            if log_odds is not None:
                answered[donors] = self._balanced(log_odds)
        return answered

    @cached_property
    def left(self) -> dict[str, Interval]:
        """The mean log-odds against the partner that each exchange leaves, without preferences."""
        intervals = {}
        for exchange in self.exchanges:
            intervals[exchange.name] = self._balanced(exchange.partner_log_odds)
        return intervals

    def to_frame(self) -> pd.DataFrame:
        """Return one row per exchange.

        - exchanged; predicted: "other" label or "same" label as without the exchange.
        - log_odds_lost, low, high: mean log-odds that the answer loses, nats, with its 95%
          interval.
        - accuracy: share of prompts with the correct label; as_predicted: with the label that two
          towers predict (interchange accuracy). Without exchange, both labels' shares are
          `accuracy` and 1 − `accuracy`.
        - random, random_low, random_high: log-odds lost with random heads, mean and range over
          sets.
        - difference, difference_low, difference_high: log_odds_lost − random, with its 95%
          interval.
        - donor_accuracy: share of donor prompts that the model answers correctly; NaN for donors
          without a query.
        """
        rows = []
        for exchange in self.exchanges:
            value, low, high = self.lost[exchange.name]
            random = exchange.random_lost.mean(1)
            difference = self._above_random(exchange)
            donor_accuracy = float("nan")
            if exchange.donors_correct is not None:
                donor_accuracy = float(exchange.donors_correct.mean())
            rows.append(
                {
                    "exchanged": exchange.name,
                    "predicted": exchange.predicted,
                    "log_odds_lost": value,
                    "low": low,
                    "high": high,
                    "accuracy": float(exchange.correct.mean()),
                    "as_predicted": float(exchange.as_predicted.mean()),
                    "random": float(random.mean()),
                    "random_low": float(random.min()),
                    "random_high": float(random.max()),
                    "difference": difference.value,
                    "difference_low": difference.low,
                    "difference_high": difference.high,
                    "donor_accuracy": donor_accuracy,
                }
            )
        return pd.DataFrame(rows)

    @cached_property
    def checks(self) -> tuple[Prediction, ...]:
        """What two towers predict, with the interval of each difference.

        1. The model answers the prompts and the donors: by log-odds, since a preference for a label
           may hide it.
        2. Query, keys and values alone cost something, and more than in random heads; models of
           other kinds can pass this.
        3. Keys of exchanged texts cost more than keys of exchanged labels, a changed own text costs
           more than all other texts, and each exchange costs more than a pair with another one that
           cancels it; other kinds fail this.
        4. Query, keys and values alone turn the answer: its log-odds against the other label fall
           below zero, with the model's preference for a label taken out.
        """
        exchanges = {exchange.name: exchange for exchange in self.exchanges}

        def above(larger: str, smaller: str) -> Interval:
            return self._interval(exchanges[larger].lost - exchanges[smaller].lost)

        checks = []
        for what, log_odds in self.answered.items():
            checks.append(Prediction("answered", f"the model answers {what}", log_odds))
        for name in DONORS:
            lost = self.lost[name]
            if lost.low > 0:
                text = f"exchanging the {name} costs more than in random heads"
                difference = self._above_random(exchanges[name])
            else:
                text, difference = f"exchanging the {name} costs the answer something", lost
            checks.append(Prediction("effect", text, difference))
        text = "keys with exchanged texts cost more than keys with exchanged labels"
        checks.append(Prediction("structure", text, above("keys", "keys: labels")))
        text = "keys whose own text changes cost more than keys of which all other texts change"
        checks.append(Prediction("structure", text, above("keys: own text", "keys: other texts")))
        for pair, parts in PAIRS.items():
            for part, second_part in (parts, parts[::-1]):
                text = (
                    f"exchanging the {part} costs less if the {second_part} are exchanged as well"
                )
                text = text.replace("the query are", "the query is")
                checks.append(Prediction("structure", text, above(part, pair)))
        for name in DONORS:
            value, low, high = self.left[name]
            checks.append(
                Prediction(
                    "turned",
                    f"exchanging the {name} turns the answer",
                    Interval(-value, -high, -low),
                    exchange=name,
                )
            )
        return tuple(checks)

    @property
    def is_two_towers(self) -> bool:
        """Whether every one of `checks` holds."""
        return all(check.holds for check in self.checks)

    @property
    def is_undecided(self) -> bool:
        """Whether a check fails because its interval includes zero, or for lack of queries."""
        return any(check.difference.is_undecided for check in self.checks)

    def _failed(self, kind: str) -> list[Prediction]:
        return [check for check in self.checks if check.kind == kind and not check.holds]

    @property
    def verdict(self) -> str:
        """Whether the heads work as two towers on these prompts, in words."""
        is_one = len(self.heads) == 1
        heads = "head" if is_one else f"{len(self.heads)} heads"
        n_queries = len(set(self.queries))
        if n_queries < MIN_CLUSTERS:
            few = few_queries(len(self.queries), n_queries)
            return f"No verdict on the {heads}, because {few}."
        if unanswered := self._failed("answered"):
            texts = [f"{check.text} ({_nats(check.difference)})" for check in unanswered]
            return (
                f"These prompts do not show whether the {heads} {'works' if is_one else 'work'} as "
                "two towers, because exchanges say so only of prompts that the model answers. By "
                f"log-odds against the other label, it is not shown that {joined(texts)}."
            )
        if self._failed("effect") or self._failed("structure"):
            return self._not_two_towers(heads, is_one=is_one)
        if self._failed("turned"):
            return self._not_turned(heads, is_one=is_one)
        return self._affirmed(heads, is_one=is_one)

    def _not_two_towers(self, heads: str, *, is_one: bool) -> str:
        """Return the sentence for heads without their own effect, or without the structure."""
        effects, structure = self._failed("effect"), self._failed("structure")
        failed = effects or structure
        texts = [f"{check.text} (difference {_nats(check.difference)})" for check in failed]
        if effects:
            is_or_are = "is" if is_one else "are"
            start = f"The {heads} {is_or_are} not shown to work as two towers on these prompts"
        else:
            change = "lowers the log-odds of" if self._failed("turned") else "turns"
            they_are = "it is" if is_one else "they are"
            start = (
                f"Exchanging the query, keys or values of the {heads} {change} the answer, but "
                f"{they_are} not shown to work as two towers"
            )
        return (
            f"{start}. Two towers predict, but the 95% interval is not above zero: "
            f"{'; '.join(texts)}."
        )

    def _not_turned(self, heads: str, *, is_one: bool) -> str:
        """Return the sentence for heads that move the answer without turning it."""
        their = "its" if is_one else "their"
        kept_log_odds = []
        for check in self._failed("turned"):
            left = self.left[check.exchange]
            log_odds = interval_text(left.value, left.low, left.high)
            kept_log_odds.append(f"{log_odds} with {their} {check.exchange} exchanged")
        return (
            f"The {heads} {'moves' if is_one else 'move'} the answer in the direction that two "
            f"towers predict, but {'is' if is_one else 'are'} not shown to turn it. Its "
            "log-odds against the other label, without a preference for a label, are "
            f"{signed(self.answered['the prompts'].value, 2)} and become {joined(kept_log_odds)}."
        )

    def _affirmed(self, heads: str, *, is_one: bool) -> str:
        """Return the sentences for heads for which all checks hold."""
        work, their = ("works", "its") if is_one else ("work", "their")
        lost = {name: signed(interval.value, 2) for name, interval in self.lost.items()}
        left = [signed(self.left[name].value, 2) for name in DONORS]
        exchanges = {exchange.name: exchange for exchange in self.exchanges}
        shares = [percent(float(exchanges[name].as_predicted.mean())) for name in DONORS]
        return (
            f"The {heads} {work} as two towers on these prompts. Exchanging {their} query, keys or "
            f"values for those of the other class costs {lost['query']}, {lost['keys']} and "
            f"{lost['values']} nats. This turns the answer: its log-odds against the other label, "
            "without a preference for a label, are "
            f"{signed(self.answered['the prompts'].value, 2)} and become {left[0]}, {left[1]} and "
            f"{left[2]}, and the model then gives the other label in {shares[0]}, {shares[1]} and "
            f"{shares[2]} of prompts. Two of them together cost less than either alone "
            f"({joined([lost[pair] for pair in PAIRS])}). Keys follow the texts more than the "
            f"labels ({lost['keys']} and {lost['keys: labels']}), and each its own "
            "demonstration's text more than the others "
            f"({lost['keys: own text']} and {lost['keys: other texts']})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict, the tables and the values of every prompt for JSON."""
        checks = []
        for check in self.checks:
            row = {"check": check.text, "kind": check.kind, "holds": check.holds}
            checks.append(row | _finite(check.difference))
        prompts = []
        for row, query in enumerate(self.queries):
            lost = {exchange.name: float(exchange.lost[row]) for exchange in self.exchanges}
            prompts.append({"query": query, "log_odds": float(self.log_odds[row]), "lost": lost})
        return {
            "model": self.model,
            "edits": list(self.edits),
            "verdict": self.verdict,
            "is_two_towers": self.is_two_towers,
            "heads": list(map(str, self.heads)),
            "random_sets": [list(map(str, heads)) for heads in self.random_sets],
            "n_prompts": len(self.queries),
            "n_queries": len(set(self.queries)),
            "log_odds": float(self.log_odds.mean()),
            "accuracy": self.accuracy.value,
            "chance": self.chance,
            "exchanges": json_records(self.to_frame()),
            "checks": checks,
            "scan": None if self.scan is None else json_records(self.scan),
            "n_scanned": self.n_scanned,
            "by": self.by,
            "expected_selected": None if self.scan is None else len(self.heads) / len(self.scan),
            "prompts": prompts,
            "fallback_reason": self.fallback_reason,
        }

    @property
    def summary(self) -> str:
        """The model, its edits, the heads, and what the model does without exchange."""
        log_odds = signed(float(self.log_odds.mean()), 2)
        against_partner = signed(float(self.partner_log_odds.mean()), 2)
        without_preference = signed(self.answered["the prompts"].value, 2)
        if against_partner != log_odds:
            log_odds += (
                f" against all other labels, {against_partner} against the one that exchanges "
                "give instead"
            )
        if without_preference != against_partner:
            log_odds += f" (without what a preference for a label adds: {without_preference})"
        text = (
            f"{self.model}: {', '.join(map(str, self.heads))}. Without exchange: accuracy "
            f"{percent(self.accuracy.value)}{_shares(self.accuracy)}, log-odds {log_odds}, "
            f"{plural_prompts(len(self.queries))}."
        )
        return text + (f" {edits_note(self.edits)}" if self.edits else "")

    def to_view(self) -> View:
        """Return the verdict, what each exchange costs, and the heads of the scan."""
        sections = [self._exchange_section()]
        if self.scan is not None:
            sections.append(self._scan_section(self.scan))
        return View(
            title=self.headline,
            sentences=(self.verdict, self.summary),
            sections=tuple(sections),
            about=f"two towers · {self.model}",
        )

    @property
    def headline(self) -> str:
        """The verdict in a few words."""
        is_one = len(self.heads) == 1
        heads = "1 head" if is_one else f"{len(self.heads)} heads"
        if not self.is_two_towers:
            return f"{heads} not shown to work as two towers"
        if is_one:
            return f"{heads} matches queries with keys and carries labels as values"
        return f"{heads} match queries with keys and carry labels as values"

    def _exchange_section(self) -> Section:
        columns = (
            Column("exchanged", is_number=False),
            Column("label predicted", is_number=False),
            Column("log-odds lost, nats", digits=2, has_bars=True),
            Column("95% interval"),
            Column("random heads", digits=2),
            Column("range of random heads", is_detail=True),
            Column("accuracy", is_detail=True),
            Column("as predicted"),
            Column("donors' accuracy", is_detail=True),
        )
        rows = []
        for exchange in self.to_frame().to_dict("records"):
            donors = exchange["donor_accuracy"]
            rows.append(
                (
                    exchange["exchanged"],
                    exchange["predicted"],
                    exchange["log_odds_lost"],
                    signed_ends(exchange["low"], exchange["high"], 2),
                    exchange["random"],
                    signed_ends(exchange["random_low"], exchange["random_high"], 2),
                    percent(exchange["accuracy"]),
                    percent(exchange["as_predicted"]),
                    "–" if math.isnan(donors) else percent(donors),
                )
            )
        n_queries, in_prompts = len(set(self.queries)), plural_prompts(len(self.queries))
        intervals = f"95% intervals resample the {n_queries} queries of {in_prompts}."
        n_sets = "1 set" if len(self.random_sets) == 1 else f"{len(self.random_sets)} sets"
        notes = (
            "Exchanged: the query, for that of a prompt that asks for the other class; keys, for "
            "those of the prompt with exchanged texts; values, for those of the prompt with "
            "exchanged labels; all: the three. After a colon, the donor is another one: only a "
            "demonstration's own text or only all other texts change, labels or texts are "
            "exchanged, or the query is of the same class.",
            "Each exchange is made in all heads at once, for the last position only. Log-odds "
            "lost: those of the answer against the other labels, mean over prompts. Label "
            "predicted: by two towers, the other one or the same as without the exchange. As "
            "predicted: share of prompts with this label. Donors' accuracy: of the prompts from "
            "which queries, keys and values come.",
            f"Random heads: {n_sets} of as many other heads from the same layers, mean and range. "
            f"{intervals_note(n_queries, intervals)}",
        )
        explanation = (
            "Queries, keys or values of the heads are exchanged for those of a donor prompt."
        )
        return Section("What each exchange costs", explanation, columns, tuple(rows), notes=notes)

    def _scan_section(self, scan: pd.DataFrame) -> Section:
        columns = (
            Column("head", is_number=False),
            Column("query", digits=2, has_bars=True),
            Column("95% interval"),
            Column("selected"),
            Column("keys", digits=2),
            Column("values", digits=2),
        )
        rows = []
        for head in scan.head(N_SCAN_SHOWN).to_dict("records"):
            interval = signed_ends(head["low"], head["high"], 2)
            selected = format_share(head["selected"])
            rows.append(
                (head["head"], head["query"], interval, selected, head["keys"], head["values"])
            )
        return Section(
            "Scan: a single head's query, keys or values exchanged",
            "Log-odds that the answer loses, nats.",
            columns,
            tuple(rows),
            notes=(self.scan_note,),
            n_rows=len(scan),
            full_table="scan",
        )

    @property
    def scan_note(self) -> str:
        """How the heads were found; empty if they were given."""
        heads_have = "The head has" if len(self.heads) == 1 else "The heads have"
        if self.scan is None and self.n_scanned:
            return (
                f"{heads_have} the largest mean {self.by} on {plural_prompts(self.n_scanned)} "
                "other than these."
            )
        if self.scan is None:
            return ""
        return (
            f"{heads_have} the largest {'effect' if len(self.heads) == 1 else 'effects'} of "
            "exchanging the query alone, in a scan of all "
            f"{len(self.scan)} heads on {plural_prompts(self.n_scanned)} other than these; "
            f"log-odds lost, nats. {selected_note(len(self.heads), len(self.scan)).capitalize()}."
        )


def _nats(interval: Interval) -> str:
    digits = interval_decimals(interval.low, interval.high)
    return f"{signed(interval.value, digits)}, {signed_ends(interval.low, interval.high, digits)}"


def _shares(share: Interval) -> str:
    """Return " (88.0–100.0%)", or "" without an interval."""
    return "" if share.low != share.low else f" ({100 * share.low:.1f}–{100 * share.high:.1f}%)"


def _finite(interval: Interval) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in vars(interval).items()}
