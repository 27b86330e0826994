"""An explanation of one prompt, and the sentences and tables that follow from its sections."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import numpy as np
import pandas as pd

from icl_lens.analyses import explanation_tables as tables
from icl_lens.analyses.explanation_reports import (
    AblationReport,
    AllHeadsReport,
    DemonstrationsReport,
    HeadReport,
    InputReport,
    LayerReport,
    LeftOut,
    ScoreReport,
    Settings,
    SubheadsReport,
    Supports,
    supports,
)
from icl_lens.analyses.explanation_tables import Place, Row, TableName, TopWords
from icl_lens.errors import check_choice
from icl_lens.head_scores import DirectScore, score_of_parts
from icl_lens.intervals import Interval, beside_random_sets
from icl_lens.measures.demonstration_effects import BEGINS_TEXT
from icl_lens.measures.head_findings import removal_finding
from icl_lens.models.active_edits import edits_note
from icl_lens.models.head import Head
from icl_lens.models.readout import MIN_STANDOUT
from icl_lens.reading.reasons import writers_in_words
from icl_lens.result.base import Result
from icl_lens.result.number_format import joined, mean_and_range, percent, signed
from icl_lens.result.view import Cell, Column, Label, Section, View

MAX_DEMONSTRATIONS = 16
"""Demonstrations shown by the page and the terminal: those with the largest effects."""


@dataclass(frozen=True, repr=False)
class Explanation(Result):
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

    model: str
    """The displayed name; `settings.source` is the argument that reloads the model."""
    input: InputReport
    scores: ScoreReport
    layers: LayerReport
    all_heads: AllHeadsReport
    heads: tuple[HeadReport, ...]
    """The located heads, largest score first."""
    subheads: SubheadsReport
    ablation: AblationReport
    settings: Settings
    demonstrations: DemonstrationsReport | None = None
    """What each demonstration adds; None for plain text, and if it is left out."""
    edits: tuple[str, ...] = ()
    """What edited the model while it was explained: edits of open `with` blocks, and hooks.

    All numbers are those of the edited model; "no ablation" means no other one.
    """
    left_out: tuple[LeftOut, ...] = ()
    """Sections that cannot be computed for the model's family; the others are complete."""

    def __post_init__(self) -> None:
        """Raise ValueError if sections do not fit together, as in a damaged file."""
        model_input, scores, layers = self.input, self.scores, self.layers
        demos, n = len(model_input.label_positions), len(layers.attn)
        for name, entries, n_expected in (
            ("layers.ffn", layers.ffn, n),
            ("layers.ffn_contrast", layers.ffn_contrast, len(layers.attn_contrast)),
            ("layers.attn_contrast", layers.attn_contrast, n if layers.attn_contrast else 0),
            ("all_heads.increase", self.all_heads.increase, n),
            (
                "demonstrations.hidden",
                getattr(self.demonstrations, "hidden", [0] * (demos + 1)),
                demos + 1,
            ),
            ("scores.log_probs", scores.log_probs, len(scores.labels)),
            ("input.demonstration_labels", model_input.demonstration_labels, demos),
            ("input.label_ranges", model_input.label_ranges, demos),
            ("input.token_names", model_input.token_names, len(model_input.tokens)),
        ):
            if len(entries) != n_expected:
                raise ValueError(f"{name} must have {n_expected} entries, got {len(entries)}")
        for report in self.heads:
            list(self.words_of(report))  # raises ValueError for inconsistent lengths
            sizes = [len(row) for row in report.similarity]
            n_predictions = len(model_input.prediction_positions)
            if sizes and (sizes != [demos] * (demos + 1) or n_predictions != demos):
                raise ValueError(
                    f"similarity of {report.head} does not match {demos} demonstrations"
                )
        positions = *model_input.label_positions, *self.all_heads.positions
        last = max((*model_input.label_at, *positions), default=-1)
        n_tokens = len(model_input.tokens)
        if last >= n_tokens:
            raise ValueError(f"position {last} is out of range for {n_tokens} tokens")

    def __repr__(self) -> str:
        by = self.settings.by
        best = ", ".join(f"{report.head} {signed(report.scores[by])}" for report in self.heads[:5])
        where = f"{self.model}, {len(self.input.tokens)} tokens"
        where += f", edited: {'; '.join(self.edits)}" if self.edits else ""
        return (
            f"Explanation({where}: {self.headline}; heads by {by} for {self.target!r}, nats: "
            f"{best})"
        )

    def to_view(self) -> View:
        """Return the finding, the labels' probabilities, and the located heads."""
        sentences = (self.finding, *self.remarks)
        if self.edits:
            sentences = (self.edits_note, *sentences)
        sections = (self._labels_section(), self._heads_section())
        return View(self.headline, sentences, sections, about=f"explanation · {self.model}")

    def _labels_section(self) -> Section:
        ablation = self.ablation
        columns = (
            Column("token" if self.is_plain_text else "label", is_number=False),
            Column("probability"),
            Column(f"without {', '.join(map(str, ablation.heads))}"),
            Column(f"without {len(ablation.heads)} random heads"),
        )
        rows = []
        for place, label in enumerate(self.labels):
            random_probabilities = [math.exp(log_probs[place]) for log_probs in ablation.random]
            row = (
                Label(label, place),
                percent(math.exp(self.scores.log_probs[place])),
                percent(math.exp(ablation.located[place])),
                mean_and_range(random_probabilities),
            )
            rows.append(row)
        return Section("Probabilities", columns=columns, rows=tuple(rows))

    def _heads_section(self) -> Section:
        scores = list(self.heads[0].scores)
        columns = [Column("head", is_number=False)]
        columns += [Column(f"{score}, nats") for score in scores]
        has_effects = "effect" in scores
        if not has_effects:
            columns.append(Column(f"{self.lost_name}, nats"))
        rows = []
        for report in self.heads:
            row: list[Cell] = [str(report.head), *report.scores.values()]
            if not has_effects:
                row.append(self.lost(report.ablated))
            rows.append(tuple(row))
        title = f"Heads by {self.settings.by}"
        notes = [f"{self.scores_note}."]
        if not has_effects:
            notes.append(f"{self.lost_note}.")
        return Section(title, columns=tuple(columns), rows=tuple(rows), notes=tuple(notes))

    @property
    def prompt_pieces(self) -> tuple[str | Label, ...]:
        """The text that the model continues, in pieces; demonstrations' labels are `Label`s."""
        if self.input.prompt is None:
            return (self.input.text,)
        rendered = self.input.template.render(self.input.prompt)
        pieces: list[str | Label] = []
        end = 0
        for (start, stop), label in zip(
            rendered.label_spans, self.input.demonstration_labels, strict=True
        ):
            pieces += [rendered.text[end:start], Label(rendered.text[start:stop], label)]
            end = stop
        return (*pieces, rendered.text[end:] + self.input.appended_text)

    @property
    def is_plain_text(self) -> bool:
        """Whether the prompt is plain text; `labels` are then the scored tokens."""
        return self.input.is_plain_text

    @property
    def labels(self) -> tuple[str, ...]:
        """The prompt's labels; for plain text, the scored tokens."""
        return self.scores.labels

    @property
    def target(self) -> str:
        """The explained label."""
        return self.scores.target

    @property
    def answer(self) -> str | None:
        """The correct label; None if the prompt has none, and for plain text.

        If labels that begin alike are one label in this decision, such as "very…", it is theirs.
        """
        answer = None if self.input.prompt is None else self.input.prompt.answer
        return answer if answer is None or answer in self.labels else self.scores.target

    @property
    def predicted(self) -> str:
        """The most probable label; for plain text, the most probable of the scored tokens."""
        return self.scores.predicted

    @property
    def demonstration_rows(self) -> list[dict[str, Any]]:
        """Return one row per demonstration, one of their sum, and one of all of them at once.

        Keys: text, label, hidden, keys, values (nats) and place. Empty if `demonstrations` is None.
        """
        report, prompt = self.demonstrations, self.input.prompt
        if report is None or prompt is None:
            return []
        ways = {"hidden": report.hidden, "keys": report.keys, "values": report.values}
        rows: list[dict[str, Any]] = []
        for index, demonstration in enumerate(prompt.demonstrations):
            losses = {way: by_demonstration[index] for way, by_demonstration in ways.items()}
            text, label = demonstration.text, demonstration.label
            rows.append({"text": text, "label": label, **losses, "place": index + 1})
        total = {way: math.fsum(losses[:-1]) for way, losses in ways.items()}
        rows.append({"text": "sum", "label": "", **total, "place": 0})
        all_at_once = {way: losses[-1] for way, losses in ways.items()}
        rows.append({"text": "all at once", "label": "", **all_at_once, "place": 0})
        return rows

    @property
    def shown_demonstrations(self) -> list[dict[str, Any]]:
        """Return the rows to show: those with the largest effects, in order, and the totals."""
        *rows, total, all_at_once = self.demonstration_rows
        largest = sorted(rows, key=lambda row: -abs(row["hidden"]))[:MAX_DEMONSTRATIONS]
        return [*sorted(largest, key=lambda row: row["place"]), total, all_at_once]

    @property
    def demonstrations_note(self) -> str:
        """Return how to read what each demonstration adds."""
        if self.demonstrations is None:
            return ""
        note = (
            "hidden: the last token does not attend to it. keys: others get its attention, its "
            "values are still read. values: its values are not read. Demonstrations may replace "
            "each other: compare sum and all at once."
        )
        rows = self.demonstration_rows[:-2]
        if len(rows) > MAX_DEMONSTRATIONS:
            note += (
                f" Shown are {MAX_DEMONSTRATIONS} of {len(rows)}, those with the largest effects."
            )
        if self.demonstrations.begins_text:
            note += f" {BEGINS_TEXT}."
        return note

    @property
    def score_name(self) -> str:
        """The name of the score that ranks heads, in a sentence."""
        return "exchange score" if self.settings.by == "exchange" else self.settings.by

    @property
    def part_score(self) -> DirectScore:
        """The score that ranks (head, position) parts."""
        return score_of_parts(self.settings.by, comparable=bool(self.scores.compared_with))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on labels or targets of several tokens; empty if each is a single token."""
        scores = self.scores
        if self.is_plain_text:
            spellings = [spelling for spelling in scores.spellings if len(spelling) > 1]
            return tuple(_first_token_remark(spelling) for spelling in spellings)
        if not scores.has_multi_token_labels:
            return ()
        remarks = [
            "Labels of several tokens are scored by one token, at which their values and keys are "
            "read; attention counts all tokens of a label. The table also shows each full label's "
            "log p."
        ]
        for label, token in zip(scores.labels, scores.scored_tokens, strict=True):
            if not token.strip("␣⏎⇥␍ "):
                remarks.append(
                    f"Label {label!r} is scored by {token!r}, which is only white space; choose "
                    "other labels or another template."
                )
        return tuple(remarks)

    @property
    def shown_only(self) -> tuple[str, ...]:
        """Labels that this decision does not choose between, such as "bad" after "very"."""
        if self.is_plain_text or self.settings.against is not None:
            return ()
        choices = self.target, *self.scores.compared_with
        return tuple(label for label in self.labels if label not in choices)

    def answer_notes(self, label: str) -> list[str]:
        """Return what is to be said of a label, or scored token, in the table of answers."""
        notes = []
        if label == self.predicted and not self.is_plain_text:
            notes.append("predicted" if self.scores.predicts_label else "most probable label")
        if label == self.answer:
            notes.append("correct answer")
        if label == self.target:
            notes.append("explained")
        if self.is_plain_text and label in self.scores.compared_with:
            notes.append("compared with")
        if label in self.shown_only:
            notes.append("no choice here")
        return notes

    @property
    def verdict(self) -> str:
        """Which located heads support the target, the tokens it is compared with, or both.

        Empty without contrasts.
        """
        if not self.scores.compared_with:
            return ""
        compared_with = self.scores.compared_with
        groups: dict[Supports, str] = {
            "answer": self.target,
            "others": joined(compared_with),
            "both": "both" if len(compared_with) == 1 else "both sides",
        }
        supporters: dict[Supports, list[str]] = {}
        for report in self.heads:
            group = supports(report.increase, report.contrast or 0.0)
            supporters.setdefault(group, []).append(str(report.head))
        if "neither" in supporters:
            groups["neither"] = "neither"
        supported = []
        for group, name in groups.items():
            supported.append(f"{name} in {joined(supporters.get(group, [])) or 'none'}")
        sentences = [
            "What the listed heads write, before later components act on it, supports "
            f"{'; '.join(supported)}."
        ]
        lowest = joined(self._lowest_contrasts())
        if lowest:
            sentences.append(f"Lowest contrasts of all heads: {lowest}.")
        return (
            f"{' '.join(sentences)} "
            "A head supports both (neither, if it lowers both) if its contrast is below 0.69 nats "
            "(a factor of two in the odds) and below half of the larger change; otherwise, the "
            "sign of its contrast decides."
        )

    def _lowest_contrasts(self) -> list[str]:
        """Return up to two heads with the lowest contrasts below zero, located or not."""
        contrasts = []
        for layer, row in enumerate(self.all_heads.contrast):
            for head, contrast in enumerate(row):
                if contrast < 0:
                    contrasts.append((contrast, Head(layer, head)))
        contrasts.sort(key=lambda contrast_and_head: contrast_and_head[0])
        return [f"{head} ({signed(contrast)})" for contrast, head in contrasts[:2]]

    @property
    def headline(self) -> str:
        """The model's prediction, and the most probable token if this is no label, in few words."""
        scores = self.scores
        if self.is_plain_text:
            return f"The model continues with {scores.next_tokens[0][0]!r}"
        correct = ""
        if self.answer is not None:
            correct = ", correctly" if self.answer == self.predicted else f", not {self.answer!r}"
        if not scores.predicts_label:
            token, probability = scores.next_tokens[0]
            return (
                f"Most probable: {(token.strip('␣') or token)!r} ({percent(probability)}); among "
                f"the labels: {self.predicted!r} ({percent(scores.probs[self.predicted])}){correct}"
            )
        verb = (
            "Among the labels, the model prefers"
            if scores.has_multi_token_labels
            else "The model predicts"
        )
        return f"{verb} {self.predicted!r}{correct}"

    @property
    def edits_note(self) -> str:
        """A sentence that says that the explained model is edited; empty if it is not."""
        return edits_note(self.edits)

    @property
    def scores_note(self) -> str:
        """What the columns contrast and increase, and effect if it was measured, are."""
        increase = f"log p({self.target})"
        notes = []
        if self.scores.compared_with:
            others = "log Σ p(other labels)"
            if len(self.scores.compared_with) == 1:
                others = f"log p({self.scores.compared_with[0]})"
            elif self.is_plain_text:
                others = "log Σ p(those tokens)"
            notes.append(f"{self.contrast_name}: what the head adds to {increase} − {others}")
        notes.append(f"increase: what it adds to {increase}")
        if self.all_heads.effect:
            lost = f"the log-odds of {self.target}" if self.scores.compared_with else increase
            notes.append(f"effect: {lost} lost if it alone is zeroed at the last position")
        return "; ".join(notes)

    @property
    def lost_note(self) -> str:
        """What the column of losses is."""
        measure = f"log p({self.target})"
        if self.scores.compared_with:
            measure = f"the log-odds of {self.target}"
        return (
            f"{self.lost_name}: {measure} lost with this head alone zeroed at the last position; "
            "positive: the head was needed"
        )

    @property
    def contrast_name(self) -> str:
        """What the column of contrasts is called: for plain text, "against" and the tokens."""
        if self.is_plain_text:
            return f"against {', '.join(self.scores.compared_with)}"
        return "contrast"

    @property
    def exchange_note(self) -> str:
        """A sentence on what `all_heads.exchange` are."""
        return (
            f"Exchange: log-odds that {self.target} loses against all other labels if the head's "
            "query at the last position, and nothing else, is that of the same demonstrations with "
            f"the query {self.all_heads.other_query!r}."
        )

    def to_frame(self, table: TableName = "heads") -> pd.DataFrame:
        """Return one of the explanation's tables in tidy form.

        "heads" (all heads), "layers", "subheads", "labels", "demonstrations", "words", "similarity"
        (queries by label keys) or "why" (the largest parts, by writer, of attention scores and, in
        nats, of what values add; top words of the largest).
        """
        check_choice("table", table, get_args(TableName))
        return pd.DataFrame(list(self._table_rows(table)))

    def _table_rows(self, table: TableName) -> Iterable[Row]:
        """Return the rows of a table, made of the sections that it shows."""
        match table:
            case "heads":
                return tables.heads(self.all_heads, self.settings.by)
            case "layers":
                return tables.layers(self.layers)
            case "subheads":
                return tables.subheads(self.subheads, self.part_score)
            case "labels":
                return tables.labels(self.scores, self.ablation)
            case "demonstrations":
                return self.demonstration_rows[:-2]  # without the totals
            case "words":
                return tables.words(self.heads, self.words_of, self.input.token_names)
            case "similarity":
                return tables.similarity(self.heads, self._query_places, self._key_places)
            case "why":
                return tables.why(self.heads, self.key_name)

    def key_name(self, position: int) -> str:
        """Return the name of a label or token with its position, such as "foo@8"."""
        label = self.input.label_at.get(position)
        name = self.input.token_names[position].strip() if label is None else self.labels[label]
        return f"{name}@{position}"

    def keys_name(self, positions: Sequence[int]) -> str:
        """Return the names of up to three keys, or how many: "foo@8, foo@11", "12 foo labels"."""
        if len(positions) < 4:
            return ", ".join(map(self.key_name, positions))
        labels = {self.labels[self.input.label_at[position]] for position in positions}
        label = labels.pop() if len(labels) == 1 else "other"
        return f"{len(positions)} {label} labels"

    def lost(self, log_probs: Sequence[float]) -> float:
        """Return how much less the target's score is with these log-probabilities, nats.

        The score is log p(target) − log Σ p(compared tokens), the log-odds, or log p(target) if it
        is compared with none. With a head's `HeadReport.ablated`, this is what zeroing the head
        alone at the last position costs: positive if the head was needed. A head may rank first by
        what it adds and cost nothing, if later components compensate for it.
        """
        target = self.labels.index(self.target)
        compared = [self.labels.index(name) for name in self.scores.compared_with]

        def score(log_probs: Sequence[float]) -> float:
            if not compared:
                return log_probs[target]
            log_prob_compared = np.logaddexp.reduce([log_probs[label] for label in compared])
            return log_probs[target] - float(log_prob_compared)

        return score(self.scores.log_probs) - score(log_probs)

    @property
    def lost_name(self) -> str:
        """The name of what `lost` returns."""
        return "log-odds lost" if self.scores.compared_with else "log p lost"

    @property
    def finding(self) -> str:
        """Whether the zeroed heads matter more than random heads in this prompt."""
        ablation = self.ablation
        lost, difference = self._loss_and_difference()
        finding = removal_finding(
            ablation.heads,
            difference,
            lost=lost,
            unit="nats of log-odds" if self.scores.compared_with else "nats of log p",
            where="zeroed at the last position of this prompt",
            random="random heads",
            n_random_sets=len(ablation.random),
            over="random sets",
        )
        if self.shows_that_heads_matter:
            finding += (
                " They were located on this prompt as well; icl-lens locate (il.locate) tests "
                "heads on other prompts."
            )
        return finding

    @property
    def shows_that_heads_matter(self) -> bool:
        """Whether `finding` says that the zeroed heads matter more than random heads."""
        lost, difference = self._loss_and_difference()
        return lost > 0 and difference.low > 0

    def _loss_and_difference(self) -> tuple[float, Interval]:
        """Return what the answer loses without the heads, and how much more than without random
        ones.
        """
        lost = self.lost(self.ablation.located)
        random_losses = [self.lost(log_probs) for log_probs in self.ablation.random]
        return lost, beside_random_sets(lost, random_losses)

    @property
    def first_report(self) -> HeadReport:
        """The located head that is shown first: the one of `why=`, otherwise the best."""
        for report in self.heads:
            if str(report.head) == self.settings.why:
                return report
        return self.heads[0]

    def why_sentence(self, report: HeadReport) -> str:
        """Return why a head attends where it does; empty if its scores were not split."""
        why = report.why
        if why is None:
            return ""
        more, less = self.keys_name(why.more), self.keys_name(why.less)
        attention = []
        for positions in (why.more, why.less):
            ranges = [
                self.input.range_at.get(position, (position, position + 1))
                for position in positions
            ]
            attention.append(math.fsum(report.attention_to(ranges)))
        mean = "mean " if len(why.more) + len(why.less) > 2 else ""
        than = "higher" if why.score_difference >= 0 else "lower"
        text = (
            f"{report.head} gives {attention[0]:.0%} of its attention to {more} and "
            f"{attention[1]:.0%} to {less}. Its {mean}score before the softmax is "
            f"{abs(why.score_difference):.2f} {than} at {more} than at {less}. Largest parts: "
            f"{why.because}."
        )
        if why.value:
            what = f"log p({self.target}), to first order"
            if why.value_is_exact:
                what = f"the log-odds of {self.target}"
            writers = writers_in_words(why.value, why.value_total >= 0)
            adds = f"From {more} it adds {signed(why.value_total, 2)} nats to {what}"
            if report.contrast is not None and why.value_is_exact and self.scores.contrast_adds_up:
                whole = f"{signed(report.contrast, 2)} nats that it adds to {what}"
                adds = f"Of the {whole}, {signed(why.value_total, 2)} come from {more}"
            text += f" {adds}; largest parts: {writers}."
        return text

    @property
    def query_labels(self) -> tuple[int, ...]:
        """Index of the correct label of each row of `HeadReport.similarity`; -1 if unknown."""
        last = -1 if self.answer is None else self.labels.index(self.answer)
        return (*self.input.demonstration_labels, last)

    @property
    def _query_places(self) -> list[Place]:
        """Where each row of `HeadReport.similarity` is, and the label that is correct there."""
        positions = (*self.input.prediction_positions, len(self.input.tokens) - 1)
        names = (*self.labels, None)  # the last for -1
        labels = [names[label] for label in self.query_labels]
        return list(zip(positions, labels, strict=True))

    @property
    def _key_places(self) -> list[Place]:
        """Where each column of `HeadReport.similarity` is, and the label there."""
        labels = [self.labels[label] for label in self.input.demonstration_labels]
        return list(zip(self.input.label_positions, labels, strict=True))

    def words_of(self, report: HeadReport) -> Iterator[TopWords]:
        """Yield a row for each value and key of a head, and one for its query.

        A row has position, kind, top words, standout and, for values, the rank of the label or
        token there.
        """
        positions = report.positions or self.input.label_positions
        no_standouts = (None,) * len(positions)
        standouts = report.value_standouts or no_standouts
        values = zip(positions, report.value_words, standouts, report.value_ranks, strict=True)
        for position, words, standout, rank in values:
            yield position, "value", words, standout, rank
        if report.key_words:
            standouts = report.key_standouts or no_standouts
            keys = zip(positions, report.key_words, standouts, strict=True)
            for position, words, standout in keys:
                yield position, "key", words, standout, None
        if report.query_words or report.query_standout is not None:  # else left out
            last = len(self.input.tokens) - 1
            yield last, "query", report.query_words, report.query_standout, None

    def to_dict(self) -> dict[str, Any]:
        """Return the headline, the finding, the prediction and the probability of each label."""
        return {
            "headline": self.headline,
            "finding": self.finding,
            "predicted": self.predicted,
            "label_probs": self.scores.probs,
        }


def _first_token_remark(spelling: Sequence[str]) -> str:
    """Return the remark on a target of several tokens in plain text."""
    return (
        f"{' + '.join(map(repr, spelling))} has {len(spelling)} tokens; only the first, "
        f"{spelling[0]!r}, is scored. The table also lists the log-probability of all its tokens."
    )


def is_noise(standout: float | None) -> bool:
    """Return whether top words stand out no more than those of most random directions."""
    return standout is not None and standout < MIN_STANDOUT
