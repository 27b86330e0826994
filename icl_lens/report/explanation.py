"""An explanation of one prompt: typed sections, and the sentences and tables that follow from them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal, get_args

import pandas as pd

from icl_lens.attribution.reasons import SIDES, AttentionReasons, writers_in_words
from icl_lens.errors import check_choice
from icl_lens.models.active_edits import edits_note
from icl_lens.models.head import Head
from icl_lens.models.readout import MIN_STANDOUT, FinalNorm
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.report.number_format import percent
from icl_lens.result.base import Result
from icl_lens.result.tables import format_signed
from icl_lens.scores import SCORES, DirectScore, Score, score_of_parts

Grid = tuple[tuple[float, ...], ...]
Table = Literal["heads", "layers", "subheads", "labels", "words", "similarity", "why"]

Supports = Literal["answer", "others", "both", "neither"]


def supports(increase: float, contrast: float) -> Supports:
    """Return what a head supports: the answer, the tokens it is compared with, both, or neither.

    The head increases log p of the answer by `increase` and that of the others by `increase - contrast` (nats). It
    treats both alike if the contrast is less than half of the larger magnitude and changes their odds by less than a
    factor of two: it then supports both or, if it lowers them, neither. Otherwise the contrast's sign decides.

    Example:
        >>> from icl_lens.report.explanation import supports
        >>> supports(1.0, 0.75), supports(0.5, -2.25), supports(1.0, 0.25), supports(8.0, 3.5)
        ('answer', 'others', 'both', 'answer')
    """
    larger = max(abs(increase), abs(increase - contrast))
    if abs(contrast) < min(larger / 2, math.log(2)):
        return "both" if increase > 0 else "neither"
    return "answer" if contrast > 0 else "others"


@dataclass(frozen=True)
class Settings:
    """Settings of `explain`, weights and versions that its numbers and words depend on."""

    final_norm: FinalNorm = "frozen"
    bias: bool = True
    k: int = 10
    n_ablated: int = 4
    n_random: int = 20
    seed: int = 0
    prepend_bos: bool | None = None
    dtype: str = "float32"
    target: str | int | None = None
    """Target of plain text as passed by the user; None means the model's most probable token."""
    against: tuple[str | int, ...] | None = None
    """What the target is compared with; None means a prompt's other labels, and nothing for plain text."""
    shared_prefix: Literal["error", "append"] = "error"
    why: str | None = None
    """Name of a head to report even if it is not among the located ones."""
    by: Score = "contrast"
    """The score that ranks heads."""
    source: str = ""
    """The argument of `load_model` that reloads the model, such as a folder's path."""
    quantization: str = ""
    """Quantization of the weights, such as "Q4_1"; empty if they are not quantized."""
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class HeadReport:
    """A located head: its increase (nats), its attention and increase by token position, and its top words.

    `value_words`, `key_words` and `value_ranks` have one entry per demonstration; `value_ranks` is the rank of the
    demonstration's own label in the projection of its value. `ablated` holds the label log-probabilities (nats) with
    only this head zeroed. `contrast` and `position_contrasts` (if the target is compared with other tokens) are the
    head's contributions to the log-odds of the target against those tokens. `effect` (with `by="effect"`) is what these
    log-odds, or log p(target) if nothing is compared, lose if the head is zeroed at the last position; `towers` (with
    `by="towers"`) is what the log-odds lose if the head's query there is that of the same demonstrations with
    `AllHeadsReport.other_query`. For plain text, words and ranks refer to `positions`, the tokens that the head attends
    to most; ranks are those of the tokens themselves, and there are no key words. `similarity` holds position-free
    attention scores (`label_similarity`), with one row per prediction position and one for the last token, and one
    column per label; it is empty for plain text and for models that do not expose their rotary angles.
    """

    head: Head
    increase: float
    attention: tuple[float, ...]
    position_increases: tuple[float, ...]
    value_words: tuple[tuple[str, ...], ...]
    value_ranks: tuple[int, ...]
    key_words: tuple[tuple[str, ...], ...]
    query_words: tuple[str, ...]
    ablated: tuple[float, ...]
    contrast: float | None = None
    position_contrasts: tuple[float, ...] = ()
    positions: tuple[int, ...] = ()
    similarity: tuple[tuple[float, ...], ...] = ()
    value_standouts: tuple[float, ...] = ()
    """How far each value, key and query stands out from random directions (`Readout.describe`), in standard deviations.
    """
    key_standouts: tuple[float, ...] = ()
    query_standout: float | None = None
    effect: float | None = None
    towers: float | None = None
    why: AttentionReasons | None = None
    """Why the head attends to the target's labels rather than the others (in plain text: to its most attended token
    rather than the next); None if all labels are the same, or if the model's scores cannot be split."""

    @property
    def scores(self) -> dict[Score, float]:
        """The available scores, nats."""
        scores: dict[Score, float | None] = {by: getattr(self, by) for by in SCORES}
        return {by: score for by, score in scores.items() if score is not None}

    def top_attended(self, n: int = 5) -> tuple[tuple[int, float], ...]:
        """Return (position, attention) for the `n` positions that the last token attends to most, largest first."""
        ranked = sorted(enumerate(self.attention), key=lambda pair: (-pair[1], pair[0]))
        return tuple(ranked[:n])

    def attention_to(self, ranges: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Return the attention to token ranges, such as those of labels, summed over the tokens of each."""
        return tuple(math.fsum(self.attention[slice(*one)]) for one in ranges)


@dataclass(frozen=True)
class SubheadReport:
    """A located (head, position) part, its increase and, if the target is compared, its contrast (nats)."""

    head: Head
    position: int
    token: str
    increase: float
    contrast: float | None = None


@dataclass(frozen=True)
class LeftOut:
    """A section of an explanation that cannot be computed for the model's family, and the reason."""

    section: str
    reason: str

    def __str__(self) -> str:
        return f"Left out: {self.section}. Reason: {self.reason}."


@dataclass(frozen=True)
class AblationReport:
    """Label log-probabilities (nats) with the located heads, or each random set of the same size, zeroed."""

    heads: tuple[Head, ...]
    located: tuple[float, ...]
    random: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class InputReport:
    """What the model reads: the prompt or text, its tokens, and where the demonstrations' labels are."""

    prompt: Prompt | None
    """None for plain text without demonstrations."""
    template: Template
    text: str
    """The text the model continues, without appended shared tokens."""
    tokens: tuple[str, ...]
    token_names: tuple[str, ...]
    """The tokens with white space visible: "␣to"."""
    label_positions: tuple[int, ...] = ()
    """Position of the token that each demonstration's label is scored by."""
    label_ranges: tuple[tuple[int, int], ...] = ()
    """The token range of each demonstration's label, end exclusive."""
    prediction_positions: tuple[int, ...] = ()
    """Position where each demonstration's label is predicted: the token before its scored token."""
    demonstration_labels: tuple[int, ...] = ()
    """Index of each demonstration's label in `ScoreReport.labels`."""
    n_shared_tokens: int = 0
    """Number of leading tokens that all labels share, appended to the prompt (`shared_prefix="append"`)."""

    @property
    def is_plain_text(self) -> bool:
        """Whether this is plain text without demonstrations; `ScoreReport.labels` are then the scored tokens."""
        return self.prompt is None

    @property
    def appended_text(self) -> str:
        """The first tokens that all labels share, appended to the prompt (`shared_prefix="append"`); else empty."""
        return "".join(self.token_names[len(self.tokens) - self.n_shared_tokens :]).replace("␣", " ")

    @property
    def label_at(self) -> dict[int, int]:
        """The demonstrations' labels (indices into `ScoreReport.labels`) by the positions of all their tokens."""
        by_range = zip(self.label_ranges, self.demonstration_labels, strict=True)
        return {position: label for tokens, label in by_range for position in range(*tokens)}

    @property
    def range_at(self) -> dict[int, tuple[int, int]]:
        """The token range of each demonstration's label by the position of its scored token."""
        return dict(zip(self.label_positions, self.label_ranges, strict=True))


@dataclass(frozen=True)
class ScoreReport:
    """The scored labels (plain text: tokens) with their log-probabilities (nats), and the most probable next tokens."""

    labels: tuple[str, ...]
    log_probs: tuple[float, ...]
    """log p of the token that scores each label, over the full vocabulary."""
    target: str
    """The explained label: the answer if the prompt has one, else the prediction."""
    target_token: str
    next_tokens: tuple[tuple[str, float], ...]
    """The most probable tokens of the vocabulary and their probabilities."""
    compared_with: tuple[str, ...] = ()
    """The labels, or tokens for plain text, that the target is compared with."""
    contrast_adds_up: bool = False
    """Whether contrasts are additive over parts: one other token, frozen norm, no soft-cap."""
    spellings: tuple[tuple[str, ...], ...] = ()
    """Each label's tokens in context, with white space visible."""
    scored_tokens: tuple[str, ...] = ()
    """The token of each spelling that the label is scored by."""
    whole_log_probs: tuple[float, ...] = ()
    """log p of each full label, summed over its tokens; empty if every label is a single token."""

    @property
    def predicted(self) -> str:
        """The most probable label; for plain text, the most probable of the scored tokens."""
        return max(zip(self.log_probs, self.labels, strict=True))[1]

    @property
    def probs(self) -> dict[str, float]:
        """Probability of each label's token over the full vocabulary."""
        return {name: math.exp(value) for name, value in zip(self.labels, self.log_probs, strict=True)}

    @property
    def predicts_label(self) -> bool:
        """Whether the token of the most probable label is the most probable token of the vocabulary."""
        return max(self.log_probs) >= math.log(self.next_tokens[0][1]) - 1e-4

    @property
    def has_multi_token_labels(self) -> bool:
        """Whether any label has more than one token."""
        return any(len(spelling) > 1 for spelling in self.spellings)


@dataclass(frozen=True)
class LayerReport:
    """What each layer's attention and FFN add to log p(target) and to the contrast, nats."""

    attn: tuple[float, ...]
    ffn: tuple[float, ...]
    attn_contrast: tuple[float, ...] = ()
    """Contrasts are empty if the target is compared with nothing."""
    ffn_contrast: tuple[float, ...] = ()


@dataclass(frozen=True)
class AllHeadsReport:
    """Scores of all heads, [layer][head] in nats, and where each attends from the last token."""

    increase: Grid
    contrast: Grid
    """Empty if the target is compared with nothing."""
    effect: Grid
    """Empty, as `towers` is, unless heads are ranked by it."""
    towers: Grid
    other_query: str
    """The query of the other class whose prompt `towers` takes queries from."""
    attention: tuple[Grid, ...]
    """[layer][head][key]: attention to all tokens of each demonstration's label or, in plain text, to `positions`."""
    positions: tuple[int, ...] = ()
    """Positions in plain text with the most attention of any head."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of layers and of heads per layer."""
        return len(self.increase), len(self.increase[0])

    def by(self, score: Score) -> Grid:
        """Return one score [layer][head] of all heads, nats; empty if it was not computed."""
        return getattr(self, score)


@dataclass(frozen=True)
class SubheadsReport:
    """The (head, position) parts with the largest contrast, or increase if heads are ranked by it."""

    largest: tuple[SubheadReport, ...]
    n_parts: int
    """Number of all parts, of which `n_exact` were evaluated exactly."""
    n_exact: int
    certified: bool
    """Whether bounds prove that no other part is larger."""


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """The result of `explain`: typed sections, of which tables, figures, the page and the terminal are views.

    Log-probabilities and increases are in nats. `target` is the label whose log-probability is explained (the answer if
    the prompt has one, else the prediction).

    Example:
        >>> explanation = il.explain(model, prompt)
        >>> explanation.input.label_positions
        (3, 7, 11, 15)
        >>> explanation.to_frame("heads").columns.tolist()
        ['name', 'contrast', 'increase', 'layer', 'head']
    """

    version: ClassVar[int] = 4

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
    edits: tuple[str, ...] = ()
    """What edited the model while it was explained: the edits of open `with` blocks, and other hooks. All numbers are
    those of the edited model; "no ablation" means no other one."""
    left_out: tuple[LeftOut, ...] = ()
    """Sections that cannot be computed for the model's family; the others are complete."""

    def __post_init__(self) -> None:
        """Raise ValueError if sections do not fit together, as in a damaged file."""
        found, scores, layers = self.input, self.scores, self.layers
        demos, n = len(found.label_positions), len(layers.attn)
        for name, values, wanted in (
            ("layers.ffn", layers.ffn, n),
            ("layers.ffn_contrast", layers.ffn_contrast, len(layers.attn_contrast)),
            ("layers.attn_contrast", layers.attn_contrast, n if layers.attn_contrast else 0),
            ("all_heads.increase", self.all_heads.increase, n),
            ("scores.log_probs", scores.log_probs, len(scores.labels)),
            ("input.demonstration_labels", found.demonstration_labels, demos),
            ("input.label_ranges", found.label_ranges, demos),
            ("input.token_names", found.token_names, len(found.tokens)),
        ):
            if len(values) != wanted:
                raise ValueError(f"{name} must have {wanted} entries, got {len(values)}")
        for report in self.heads:
            list(self.words_of(report))  # raises ValueError for inconsistent lengths
            sizes = [len(row) for row in report.similarity]
            if sizes and (sizes != [demos] * (demos + 1) or len(found.prediction_positions) != demos):
                raise ValueError(f"similarity of {report.head} does not match {demos} demonstrations")
        last = max((*found.label_at, *found.label_positions, *self.all_heads.positions), default=-1)
        if last >= len(found.tokens):
            raise ValueError(f"position {last} is out of range for {len(found.tokens)} tokens")

    def __repr__(self) -> str:
        by = self.settings.by
        best = ", ".join(f"{report.head} {format_signed(report.scores[by])}" for report in self.heads[:5])
        where = f"{self.model}, {len(self.input.tokens)} tokens"
        where += f", edited: {'; '.join(self.edits)}" if self.edits else ""
        return f"Explanation({where}: {self.headline}; heads by {by} for {self.target!r}, nats: {best})"

    @property
    def is_plain_text(self) -> bool:
        """Whether the prompt is plain text without demonstrations; `labels` are then the scored tokens."""
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
        """The correct label; None if the prompt has none, and for plain text."""
        return None if self.input.prompt is None else self.input.prompt.answer

    @property
    def predicted(self) -> str:
        """The most probable label; for plain text, the most probable of the scored tokens."""
        return self.scores.predicted

    @property
    def score_name(self) -> str:
        """The name of the score that ranks heads, in a sentence."""
        return "towers score" if self.settings.by == "towers" else self.settings.by

    @property
    def part_score(self) -> DirectScore:
        """The score that ranks (head, position) parts."""
        return score_of_parts(self.settings.by, comparable=bool(self.scores.compared_with))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on labels or targets of several tokens; empty if each is a single token."""
        scores = self.scores
        if self.is_plain_text:
            return tuple(
                f"{' + '.join(map(repr, spelling))} has {len(spelling)} tokens; only the first, {spelling[0]!r}, is "
                "scored. The table also lists the log-probability of all its tokens."
                for spelling in scores.spellings
                if len(spelling) > 1
            )
        if not scores.has_multi_token_labels:
            return ()
        found = [
            "Labels of several tokens are scored by one token, at which their values and keys are read; attention "
            "counts all tokens of a label. The table also shows each full label's log p."
        ]
        for label, token in zip(scores.labels, scores.scored_tokens, strict=True):
            if not token.strip("␣⏎⇥␍ "):
                found.append(
                    f"Label {label!r} is scored by {token!r}, which is only white space; choose other labels or "
                    'another template, or, if all labels start with it, shared_prefix="append".'
                )
        return tuple(found)

    @property
    def verdict(self) -> str:
        """Which located heads support the target, the tokens it is compared with, or both; empty without contrasts."""
        if not self.scores.compared_with:
            return ""
        compared_with = self.scores.compared_with
        groups: dict[Supports, str] = {
            "answer": self.target,
            "others": ", ".join(compared_with),
            "both": "both" if len(compared_with) == 1 else "both sides",
        }
        heads = [(str(report.head), supports(report.increase, report.contrast or 0.0)) for report in self.heads]
        if any(group == "neither" for _, group in heads):
            groups["neither"] = "neither"
        named = {name: ", ".join(head for head, group in heads if group == which) for which, name in groups.items()}
        # Heads ranked by their increase or contrast need not include those with the lowest contrasts.
        scores = [(x, Head(i, j)) for i, row in enumerate(self.all_heads.contrast) for j, x in enumerate(row) if x < 0]
        lowest = ", ".join(f"{head} ({score:+.3f})" for score, head in sorted(scores, key=lambda one: one[0])[:2])
        return (
            " ".join(f"Support {name}: {found or 'none'}." for name, found in named.items())
            + (f" Lowest contrasts of all heads: {lowest}." if lowest else "")
            + " A head supports both (neither, if it lowers both) if its contrast is below 0.69 nats (a factor of two"
            " in the odds) and below half of the larger change; otherwise, the sign of its contrast decides."
        )

    @property
    def headline(self) -> str:
        """The model's prediction, in a few words; if no label is the most probable token, it names this token too."""
        scores = self.scores
        if self.is_plain_text:
            return f"The model continues with {scores.next_tokens[0][0]!r}"
        correct = (
            "" if self.answer is None else ", correctly" if self.answer == self.predicted else f", not {self.answer!r}"
        )
        if not scores.predicts_label:
            token, probability = scores.next_tokens[0]
            return (
                f"Most probable: {(token.strip('␣') or token)!r} ({percent(probability)}); among the labels: "
                f"{self.predicted!r} ({percent(scores.probs[self.predicted])}){correct}"
            )
        verb = "Among the labels, the model prefers" if scores.has_multi_token_labels else "The model predicts"
        return f"{verb} {self.predicted!r}{correct}"

    @property
    def edits_note(self) -> str:
        """A sentence that says that the explained model is edited; empty if it is not."""
        return edits_note(self.edits)

    @property
    def towers_note(self) -> str:
        """A sentence on what `all_heads.towers` are."""
        return (
            f"Towers: log-odds that {self.target} loses against all other labels if the head's query at the last "
            "position, and nothing else, is that of the same demonstrations with the query "
            f"{self.all_heads.other_query!r}."
        )

    def to_frame(self, table: Table = "heads") -> pd.DataFrame:
        """Return one of the explanation's tables in tidy form.

        "heads" (all heads), "layers", "subheads", "labels", "words", "similarity" (queries by label keys) or "why"
        (the largest parts, by writer, of attention scores and, in nats, of what values add; top words of the largest).
        """
        check_choice("table", table, get_args(Table))
        found, scores = self.input, self.scores
        if table == "heads":
            chosen = self.settings.by
            maps = {by: values for by in (chosen, *SCORES) if (values := self.all_heads.by(by))}
            rows = [
                {"name": str(Head(layer, head))}
                | {by: values[layer][head] for by, values in maps.items()}
                | {"layer": layer, "head": head}
                for layer, head in product(*map(range, self.all_heads.shape))
            ]
        elif table == "layers":
            layers = self.layers
            parts = (("attn", layers.attn, layers.attn_contrast), ("ffn", layers.ffn, layers.ffn_contrast))
            rows = [
                {"layer": layer, "component": component, "increase": value}
                | ({"contrast": contrasts[layer]} if contrasts else {})
                for component, values, contrasts in parts
                for layer, value in enumerate(values)
            ]
        elif table == "subheads":
            rows = [
                {"name": str(part.head), self.part_score: getattr(part, self.part_score)}
                | {"position": part.position, "token": part.token, "increase": part.increase, "contrast": part.contrast}
                | {"layer": part.head.layer, "head": part.head.head}
                for part in self.subheads.largest
            ]
        elif table == "labels":
            rows = [
                {
                    "label": label,
                    "log_prob": scores.log_probs[i],
                    "log_prob_located_zeroed": self.ablation.located[i],
                    # Log of the mean probability, as shown on the page and in the terminal.
                    "log_prob_random_zeroed": _log_mean_probability([draw[i] for draw in self.ablation.random]),
                }
                | ({"scored_token": scores.scored_tokens[i]} if scores.spellings else {})
                | ({"log_prob_whole": scores.whole_log_probs[i]} if scores.whole_log_probs else {})
                for i, label in enumerate(scores.labels)
            ]
        elif table == "words":
            rows = [
                {
                    "name": str(report.head),
                    "position": position,
                    "token": self.input.token_names[position],
                    "kind": kind,
                    "words": " ".join(words),
                    "standout": float("nan") if standout is None else standout,
                    "own_label_rank": pd.NA if rank is None else rank,
                }
                for report in self.heads
                for position, kind, words, standout, rank in self.words_of(report)
            ]
        elif table == "similarity":
            queries, names = (*found.prediction_positions, len(found.tokens) - 1), (*self.labels, None)
            rows = [
                {
                    "name": str(report.head),
                    "query_position": position,
                    "query_label": names[query_label],
                    "key_position": key,
                    "key_label": names[label],
                    "score": score,
                }
                for report in self.heads
                if report.similarity
                for position, query_label, row in zip(queries, self.query_labels, report.similarity, strict=True)
                for key, label, score in zip(found.label_positions, found.demonstration_labels, row, strict=True)
            ]
        else:
            rows = list(self._why_rows())
        return pd.DataFrame(rows)

    def key_name(self, position: int) -> str:
        """Return the name of a label or token with its position, such as "foo@8"."""
        label = self.input.label_at.get(position)
        return f"{self.input.token_names[position].strip() if label is None else self.labels[label]}@{position}"

    def keys_name(self, positions: Sequence[int]) -> str:
        """Return the names of up to three keys, or how many there are: "foo@8, foo@11", "12 foo labels"."""
        if len(positions) < 4:
            return ", ".join(map(self.key_name, positions))
        named = {self.labels[self.input.label_at[position]] for position in positions}
        return f"{len(positions)} {named.pop() if len(named) == 1 else 'other'} labels"

    def change_if_zeroed(self, report: HeadReport) -> float:
        """Return the change of the target's score when only this head is zeroed, at all positions, nats.

        The score is log p(target) − log Σ p(compared tokens), or log p(target) if it is compared with none. A head may
        rank first by what it adds and change nothing, if later components compensate for it.
        """
        target, others = self.labels.index(self.target), [self.labels.index(name) for name in self.scores.compared_with]

        def score(log_probs: Sequence[float]) -> float:
            if not others:
                return log_probs[target]
            largest = max(log_probs[i] for i in others)  # factored out so that no probability underflows to 0
            return log_probs[target] - largest - math.log(sum(math.exp(log_probs[i] - largest) for i in others))

        return score(report.ablated) - score(self.scores.log_probs)

    def why_sentence(self, report: HeadReport) -> str:
        """Return, in two or three sentences, why a head attends where it does; empty if its scores were not split."""
        why = report.why
        if why is None:
            return ""
        more, less = self.keys_name(why.more), self.keys_name(why.less)
        attention = [
            math.fsum(report.attention_to([self.input.range_at.get(at, (at, at + 1)) for at in positions]))
            for positions in (why.more, why.less)
        ]
        mean = "mean " if len(why.more) + len(why.less) > 2 else ""
        than = f"{abs(why.score_difference):.2f} {'higher' if why.score_difference >= 0 else 'lower'}"
        text = (
            f"{report.head} gives {more} {attention[0]:.2f} of its attention and {less} {attention[1]:.2f}: its {mean}"
            f"score there is {than}. Largest parts: {why.because}."
        )
        if why.value:
            what = f"the log-odds of {self.target}" if why.value_is_exact else f"log p({self.target}), to first order"
            writers = writers_in_words(why.value, why.value_total >= 0)
            text += f" From {more} it adds {why.value_total:+.2f} nats to {what}; largest parts: {writers}."
        return text

    def _why_rows(self) -> Iterator[dict[str, Any]]:
        for report in self.heads:
            if report.why is None:
                continue
            names = {"more": report.why.more, "less": report.why.less}
            keys = {name: " ".join(map(self.key_name, positions)) for name, positions in names.items()}
            for side in SIDES:
                in_words = report.why.words(side)
                for writer, value in getattr(report.why, side):
                    words, standout = in_words.get(writer, ((), float("nan")))
                    row = {"name": str(report.head), **keys, "side": side, "writer": writer, "value": value}
                    yield row | {"words": " ".join(words), "standout": standout}
            for query_writer, key_writer, value in report.why.pairs:
                pair = f"{query_writer} × {key_writer}"
                yield {"name": str(report.head), **keys, "side": "pair", "writer": pair, "value": value}

    @property
    def query_labels(self) -> tuple[int, ...]:
        """Index of the correct label for each row of `HeadReport.similarity`; -1 for an unknown answer."""
        last = -1 if self.answer is None else self.labels.index(self.answer)
        return (*self.input.demonstration_labels, last)

    def words_of(self, report: HeadReport) -> Iterator[tuple[int, str, tuple[str, ...], float | None, int | None]]:
        """Yield position, kind, top words, standout and the own label's rank of a head's values, keys and query."""
        positions = report.positions or self.input.label_positions
        value_standouts, key_standouts = (
            standouts or (None,) * len(positions) for standouts in (report.value_standouts, report.key_standouts)
        )
        for row in zip(positions, report.value_words, value_standouts, report.value_ranks, strict=True):
            yield row[0], "value", *row[1:]
        if report.key_words:
            for position, words, standout in zip(positions, report.key_words, key_standouts, strict=True):
                yield position, "key", words, standout, None
        if report.query_words or report.query_standout is not None:  # else left out
            yield len(self.input.tokens) - 1, "query", report.query_words, report.query_standout, None

    def to_dict(self) -> dict[str, Any]:
        """Return the headline, the prediction and the probability of each label."""
        return {"headline": self.headline, "predicted": self.predicted, "label_probs": self.scores.probs}


def is_noise(standout: float | None) -> bool:
    """Return whether a vector's top words stand out no more than those of most random directions."""
    return standout is not None and standout < MIN_STANDOUT


def _log_mean_probability(log_probs: Sequence[float]) -> float:
    largest = max(log_probs)  # factored out so that no probability underflows to 0
    return largest + math.log(sum(math.exp(value - largest) for value in log_probs) / len(log_probs))
