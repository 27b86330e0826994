"""Compare two explanations."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import ClassVar

import pandas as pd

from icl_lens.analyses.explanation.command import command
from icl_lens.analyses.explanation.result import Explanation
from icl_lens.analyses.explanation.sentences import contrast_name, exchange_note, scores_note
from icl_lens.analyses.explanation.tables import prompt_pieces
from icl_lens.errors import InputError, short_repr
from icl_lens.foundation.ranking_scores import SCORES, Score
from icl_lens.measures.head_findings import MODELS_NOTE
from icl_lens.models.active_edits import edits_note
from icl_lens.models.head import Head
from icl_lens.result.base import Result
from icl_lens.result.number_format import percent
from icl_lens.result.tables import columns_first
from icl_lens.result.view import Cell, Column, HeadValues, Label, Section, View

N_CHANGED = 12
"""Number of heads whose changes are shown."""


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """A comparison of two explanations, A and B, returned by `compare`.

    Example:
        >>> a = il.explain(model, prompt)
        >>> shorter = il.Prompt.parse("love : bar eight : foo two : foo one :", answer="foo")
        >>> b = il.explain(model, shorter)
        >>> both = il.compare(a, b)
        >>> both.to_frame().columns.tolist()
        ['name', 'change', 'a', 'b', 'layer', 'head', 'increase_a', 'increase_b', 'increase_change']
    """

    version: ClassVar[int] = 2
    a: Explanation
    b: Explanation

    @property
    def same_heads(self) -> bool:
        """Whether both models have as many layers and heads, so that heads can be compared."""
        return self.a.all_heads.shape == self.b.all_heads.shape

    @property
    def scores(self) -> list[Score]:
        """The scores that both explanations have of every head.

        Heads are ranked by the change of the first: the score that ranks the heads of both. If
        these differ, it is the contrast, or the increase if one has no contrasts.
        """
        a, b = self.a, self.b
        first: Score = (
            "contrast" if a.scores.compared_with and b.scores.compared_with else "increase"
        )
        if a.settings.by == b.settings.by:
            first = a.settings.by
        shared: list[Score] = [by for by in SCORES if a.all_heads.by(by) and b.all_heads.by(by)]
        return [first, *(by for by in shared if by != first)]

    def to_frame(self) -> pd.DataFrame:
        """Return every head's scores in A and B and their change (nats), largest change first.

        Columns: name, change, a, b (of the first of `scores`), layer, head, and, for the other
        scores, such as increases, increase_a, increase_b and increase_change. Scores refer to each
        explanation's own target. Raise InputError if the models have different numbers of layers or
        heads.
        """
        if not self.same_heads:
            shapes = self.a.all_heads.shape, self.b.all_heads.shape
            raise InputError(
                f"models must have the same (layers, heads), got {shapes[0]} for {self.a.model} "
                f"and {shapes[1]} for {self.b.model}; use a.to_frame() and b.to_frame() instead"
            )
        first, *further = self.scores
        frame = self.a.to_frame("heads").filter(["name", "layer", "head"])
        prefixes: dict[Score, str] = {first: ""}
        for by in further:
            prefixes[by] = f"{by}_"
        for by, prefix in prefixes.items():
            for side, explanation in (("a", self.a), ("b", self.b)):
                grid = explanation.all_heads.by(by)
                frame[f"{prefix}{side}"] = list(chain.from_iterable(grid))
            frame[f"{prefix}change"] = frame[f"{prefix}b"] - frame[f"{prefix}a"]
        frame = columns_first(frame, "name", "change", "a", "b")
        return frame.sort_values("change", key=lambda x: -x.abs(), kind="stable", ignore_index=True)

    def to_view(self) -> View:
        """Return answers, layers, and the heads that changed most (between sizes, the best)."""
        return View(
            title=self._title(),
            sentences=(self._headlines(), *self._context(), *self._edits_notes()),
            sections=tuple(self._sections()),
            about="A and B",
        )

    def _title(self) -> str:
        """Return in a few words what both predict."""
        a_word, b_word = map(_continuation, (self.a, self.b))
        is_plain_text = self.a.is_plain_text
        if is_plain_text or (self.a.scores.predicts_label and self.b.scores.predicts_label):
            if a_word == b_word:
                return f"Both predict {a_word}"
            return f"A predicts {a_word}, B predicts {b_word}"
        if a_word == b_word:
            return f"Among the labels, both prefer {a_word}"
        return f"Among the labels, A prefers {a_word}, B {b_word}"

    def _headlines(self) -> str:
        """Return what both predict; models are named if they are two."""
        a, b = self.a, self.b
        if a.model == b.model:
            return f"A: {a.headline}. B: {b.headline}."
        return f"A ({a.model}): {a.headline}. B ({b.model}): {b.headline}."

    def _context(self) -> list[str]:
        """Return sentences on which models and prompts are compared, and what each explains."""
        a, b = self.a, self.b
        same_prompt = a.input.prompt == b.input.prompt and a.input.text == b.input.text
        prompts = "The same prompt" if same_prompt else "Two prompts"
        models = f"one model: {a.model}" if a.model == b.model else "two models"
        sentences = [f"{prompts}, {models}."]
        if a.target != b.target:
            sentences.append(f"A explains {a.target}, B explains {b.target}.")
        return sentences

    def _edits_notes(self) -> list[str]:
        sides = {"A": self.a, "B": self.b}
        return [
            f"In {name}: {edits_note(side.edits)}" for name, side in sides.items() if side.edits
        ]

    def _sections(self) -> Iterator[Section]:
        sides = {"A": self.a, "B": self.b}
        for name, side in sides.items():
            title = f"Prompt {name} · {side.model}"
            explanation = "" if side.is_plain_text else "Labels are highlighted in their colors."
            yield Section(title, explanation, quote=prompt_pieces(side))
        yield self._answers_section()
        yield self._layers_section()
        is_plain_text = self.a.is_plain_text or self.b.is_plain_text
        if self.same_heads:
            changed = self.to_frame().head(N_CHANGED)
            yield self._changes_section(changed)
            yield self._map_section(changed)
            if not is_plain_text:
                yield self._attention_section(changed)
        else:
            for name, side in sides.items():
                yield _best_section(name, side)
        for name, side in sides.items():
            title = f"Configuration of {name}"
            yield Section(title, f"What reproduces {name}.", code=command(side))

    def _answers_section(self) -> Section:
        unit = "token" if self.a.is_plain_text else "label"
        columns = (
            Column(unit, is_number=False),
            Column("A"),
            Column("B"),
            Column("change of log p, nats"),
        )
        rows: list[tuple[Cell, ...]] = []
        for index, label in enumerate(dict.fromkeys([*self.a.labels, *self.b.labels])):
            probabilities = [side.scores.probs.get(label) for side in (self.a, self.b)]
            texts = ["–" if share is None else percent(share) for share in probabilities]
            change = math.nan
            if label in self.a.labels and label in self.b.labels:
                log_prob_a = self.a.scores.log_probs[self.a.labels.index(label)]
                log_prob_b = self.b.scores.log_probs[self.b.labels.index(label)]
                change = log_prob_b - log_prob_a
            rows.append((Label(label, index), *texts, change))
        explanation = f"Probability of each {unit}’s token after each prompt."
        return Section(f"Probability of each {unit}", explanation, columns, tuple(rows))

    def _layers_section(self) -> Section:
        columns = [Column("layer")]
        added = []
        for name, side in (("A", self.a), ("B", self.b)):
            columns += [Column(f"{part} in {name}", has_bars=True) for part in ("attention", "FFN")]
            added += [side.layers.attn, side.layers.ffn]
        rows: list[tuple[Cell, ...]] = []
        for layer, increases in enumerate(zip_longest(*added, fillvalue="–")):
            rows.append((layer, *increases))
        unit = "token" if self.a.is_plain_text else "label"
        return Section(
            "What each layer adds, nats",
            f"To the log-probability of the explained {unit}, on a shared scale. Increases are "
            "not additive.",
            tuple(columns),
            tuple(rows),
            is_detail=True,
        )

    def _changes_section(self, changed: pd.DataFrame) -> Section:
        columns = [Column("head", is_number=False)]
        names = []
        for by in self.scores:
            prefix = "" if by == self.scores[0] else f"{by}_"
            name_in_a, name_in_b = by, by
            if by == "contrast":
                name_in_a, name_in_b = contrast_name(self.a), contrast_name(self.b)
            in_b = "in B" if name_in_b == name_in_a else f"{name_in_b} in B"
            columns += [Column(f"{name_in_a} in A"), Column(in_b), Column("change", has_bars=True)]
            names += [f"{prefix}a", f"{prefix}b", f"{prefix}change"]
        rows: list[tuple[Cell, ...]] = []
        for head in changed.to_dict("records"):
            rows.append((head["name"], *(head[name] for name in names)))
        a, b = self.a, self.b
        notes = [f"A: {scores_note(a)}."]
        if scores_note(b) != scores_note(a):
            notes.append(f"B: {scores_note(b)}.")
        if "exchange" in self.scores:
            notes += [f"A: {exchange_note(a)}", f"B: {exchange_note(b)}"]
        notes.append("Change: B minus A.")
        notes += [MODELS_NOTE] if a.model != b.model else []
        if a.target != b.target and a.target in b.labels:
            notes.append(
                f"Changes compare what heads add to {a.target} in A with what they add to "
                f"{b.target} in B; to explain {a.target} in both, pass --answer {a.target} "
                f"--answer-b {a.target}."
            )
        return Section(
            f"Heads whose {self.scores[0]} changed most, nats (A: {a.target}, B: {b.target})",
            "Each head’s scores in A and B, and the change: blue if it is larger in B, orange if "
            "it is smaller.",
            tuple(columns),
            tuple(rows),
            n_rows=a.all_heads.shape[0] * a.all_heads.shape[1],
            notes=tuple(notes),
        )

    def _map_section(self, changed: pd.DataFrame) -> Section:
        by = self.scores[0]
        changes = []
        for a_row, b_row in zip(self.a.all_heads.by(by), self.b.all_heads.by(by), strict=True):
            changes.append(tuple(b - a for a, b in zip(a_row, b_row, strict=True)))
        marked = frozenset(zip(changed["layer"], changed["head"], strict=True))
        return Section(
            "Every head’s change",
            f"The change of the {by}, B minus A, by layer and head. The heads of the table above "
            "are ringed.",
            head_map=HeadValues(f"change of {by}, B minus A, nats", tuple(changes), marked),
        )

    def _attention_section(self, changed: pd.DataFrame) -> Section:
        """Return attention summed by label, or "–" where a prompt does not have the label."""
        labels = list(dict.fromkeys([*self.a.labels, *self.b.labels]))
        columns = [Column("head", is_number=False)]
        for label in labels:
            columns += [Column(f"A to {label}"), Column(f"B to {label}")]
        rows: list[tuple[Cell, ...]] = []
        for layer, head in zip(changed["layer"], changed["head"], strict=True):
            cells: list[Cell] = [str(Head(layer, head))]
            for label in labels:
                for side in (self.a, self.b):
                    cells.append(
                        _attention_text(side, side.all_heads.attention[layer][head], label)
                    )
            rows.append(tuple(cells))
        return Section(
            "Attention to labels",
            "Attention from the last token, summed over the positions of each label, for the "
            "heads above.",
            tuple(columns),
            tuple(rows),
            is_detail=True,
        )


def _best_section(name: str, side: Explanation) -> Section:
    """Return a side's best heads and, for prompts with labels, their attention to these."""
    by = side.settings.by
    columns = [Column("head", is_number=False), Column(f"{by}, nats", has_bars=True)]
    labels = () if side.is_plain_text else side.labels
    columns += [Column(f"attention to {label}") for label in labels]
    rows: list[tuple[Cell, ...]] = []
    for report in side.heads:
        weights = report.attention_to(side.input.label_ranges)
        attention = [_attention_text(side, weights, label) for label in labels]
        rows.append((str(report.head), report.scores[by], *attention))
    return Section(
        f"Best heads of {name} for {side.target}",
        "The models have different numbers of layers or heads, so their heads do not correspond.",
        tuple(columns),
        tuple(rows),
    )


def _attention_text(side: Explanation, weights: Sequence[float], label: str) -> str:
    """Return the attention to the demonstrations with a label, summed; "–" for other labels."""
    if label not in side.labels:
        return "–"
    index = side.labels.index(label)
    shares = []
    for weight, place in zip(weights, side.input.demonstration_labels, strict=True):
        if place == index:
            shares.append(weight)
    return f"{math.fsum(shares):.2f}"


def _continuation(side: Explanation) -> str:
    """Return what a model predicts: the most probable label or, for plain text, token."""
    return side.scores.next_tokens[0][0] if side.is_plain_text else side.predicted


def compare(a: Explanation, b: Explanation) -> Comparison:
    """Compare two explanations of different prompts, targets or models.

    Raise InputError for arguments that are not explanations.

    Example:
        >>> a, b = il.explain(model, prompt), il.explain(model, prompt)
        >>> il.compare(a, b).to_frame()["change"].abs().max()
        np.float64(0.0)
    """
    for argument in (a, b):
        if not isinstance(argument, Explanation):
            raise InputError(
                f"expected an explanation, got {short_repr(argument)}; pass the result of "
                "il.explain or il.results.load"
            )
    return Comparison(a, b)
