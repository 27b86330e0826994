"""The reports that an explanation holds: typed numbers and words, one class per report.

`ExplanationReports` holds all of them. What is said of them is in `sentences`, their
tables are in `tables`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from icl_lens.foundation.defaults import N_ABLATED, N_DESCRIBED, N_RANDOM_SETS
from icl_lens.foundation.ranking_scores import SCORES, Score
from icl_lens.models.head import Head
from icl_lens.models.readout import MIN_STANDOUT, FinalNorm
from icl_lens.prompts.prompt import Prompt, Template
from icl_lens.reading.reasons import AttentionReasons

Grid = tuple[tuple[float, ...], ...]

Supports = Literal["answer", "others", "both", "neither"]
TopWords = tuple[int, str, tuple[str, ...], float | None, int | None]
"""Position, kind ("value", "key" or "query"), top words, standout and, for values, rank."""


def supports(increase: float, contrast: float) -> Supports:
    """Return what a head supports: the answer, the tokens it is compared with, both, or neither.

    The head increases log p of the answer by `increase` and that of the others by `increase -
    contrast` (nats). It treats both alike if the contrast is less than half of the larger magnitude
    and changes their odds by less than a factor of two: it then supports both or, if it lowers
    them, neither. Otherwise the contrast's sign decides.

    Example:
        >>> from icl_lens.analyses.explanation.reports import supports
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
    k: int = N_DESCRIBED
    n_ablated: int = N_ABLATED
    n_random: int = N_RANDOM_SETS
    seed: int = 0
    prepend_bos: bool | None = None
    dtype: str = "float32"
    target: str | int | None = None
    """Target of plain text as passed by the user; None means the model's most probable token."""
    against: tuple[str | int, ...] | None = None
    """What the target is compared with; None is all other labels, and nothing for plain text."""
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
    """A located head: its scores (nats), attention, increases by token, and top words.

    `value_words`, `key_words` and `value_ranks` have one entry per demonstration; `value_ranks` is
    the rank of the demonstration's own label in the projection of its value. `ablated` holds the
    label log-probabilities (nats) with only this head zeroed at the last position. `contrast` and
    `position_contrasts` (if the target is compared with other tokens) are the head's contributions
    to the log-odds of the target against those tokens. `effect` (with `by="effect"`) is what these
    log-odds, or log p(target) if nothing is compared, lose by that; `exchange` (with
    `by="exchange"`) is what the log-odds lose if the head's query there is that of the same
    demonstrations with `AllHeadsReport.other_query`. For plain text, words and ranks refer to
    `positions`, the tokens that the head attends to most; ranks are those of the tokens themselves,
    and there are no key words. `similarity` holds position-free attention scores
    (`label_similarity`), with one row per prediction position and one for the last token, and one
    column per label; it is empty for plain text and for models that do not expose their rotary
    angles.
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
    """How far each value stands out from random directions, in standard deviations.

    `key_standouts` and `query_standout` say it of keys and the query; see `Readout.describe`.
    """
    key_standouts: tuple[float, ...] = ()
    query_standout: float | None = None
    effect: float | None = None
    exchange: float | None = None
    why: AttentionReasons | None = None
    """Why the head attends to the target's labels rather than the others.

    In plain text, it is why the head attends to its most attended token rather than to the next.
    None if all labels are the same, or if the model's scores cannot be split.
    """

    @property
    def scores(self) -> dict[Score, float]:
        """The available scores, nats."""
        scores: dict[Score, float | None] = {by: getattr(self, by) for by in SCORES}
        return {by: score for by, score in scores.items() if score is not None}

    def top_attended(self, n: int = 5) -> tuple[tuple[int, float], ...]:
        """Return (position, attention) of the `n` positions with the most attention, in order."""
        ranked = sorted(enumerate(self.attention), key=lambda pair: (-pair[1], pair[0]))
        return tuple(ranked[:n])

    def attention_to(self, ranges: Sequence[Sequence[int]]) -> tuple[float, ...]:
        """Return the attention to ranges of tokens, such as labels, summed over each range."""
        return tuple(math.fsum(self.attention[start:stop]) for start, stop in ranges)


@dataclass(frozen=True)
class SubheadReport:
    """A located (head, position) part, its increase and, if there is one, its contrast (nats)."""

    head: Head
    position: int
    token: str
    increase: float
    contrast: float | None = None


@dataclass(frozen=True)
class LeftOut:
    """A section that cannot be computed for the model's family, and the reason."""

    section: str
    reason: str

    def __str__(self) -> str:
        return f"Left out: {self.section}. Reason: {self.reason}."


@dataclass(frozen=True)
class AblationReport:
    """Label log-probabilities (nats) with located or random heads zeroed at the last position."""

    heads: tuple[Head, ...]
    located: tuple[float, ...]
    random: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class InputReport:
    """What the model reads: the prompt or text, its tokens, and where the labels are."""

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
    """Number of label tokens appended to the prompt, up to which the compared labels agree."""

    @property
    def is_plain_text(self) -> bool:
        """Whether this is plain text; `ScoreReport.labels` are then the scored tokens."""
        return self.prompt is None

    @property
    def appended_text(self) -> str:
        """The label tokens after the prompt, up to which the compared labels agree; else empty."""
        return "".join(self.token_names[len(self.tokens) - self.n_shared_tokens :]).replace(
            "␣", " "
        )

    @property
    def label_at(self) -> dict[int, int]:
        """The demonstrations' labels (indices into `ScoreReport.labels`) by position."""
        labels: dict[int, int] = {}
        for (start, stop), label in zip(self.label_ranges, self.demonstration_labels, strict=True):
            labels |= dict.fromkeys(range(start, stop), label)
        return labels

    @property
    def range_at(self) -> dict[int, tuple[int, int]]:
        """The token range of each demonstration's label by the position of its scored token."""
        return dict(zip(self.label_positions, self.label_ranges, strict=True))


@dataclass(frozen=True)
class ScoreReport:
    """The scored labels or tokens, their log-probabilities (nats), and the next tokens."""

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
        return {
            name: math.exp(value) for name, value in zip(self.labels, self.log_probs, strict=True)
        }

    @property
    def predicts_label(self) -> bool:
        """Whether the most probable label's token is the most probable of the vocabulary."""
        return max(self.log_probs) >= math.log(self.next_tokens[0][1]) - 1e-4

    @property
    def has_multi_token_labels(self) -> bool:
        """Whether any label has more than one token."""
        return any(len(spelling) > 1 for spelling in self.spellings)


@dataclass(frozen=True)
class DemonstrationsReport:
    """What the explained label loses without each demonstration, nats of the contrast's log-odds
    (or of log p).

    Each tuple has an entry per demonstration and, last, that of all demonstrations at once; see
    `demonstration_effects`.
    """

    hidden: tuple[float, ...]
    keys: tuple[float, ...]
    values: tuple[float, ...]
    begins_text: bool
    """Whether the first demonstration begins the text, with a token that many heads attend to."""


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
    """Empty, as `exchange` is, unless heads are ranked by it."""
    exchange: Grid
    other_query: str
    """The query of the other class whose prompt `exchange` takes queries from."""
    attention: tuple[Grid, ...]
    """[layer][head][key]: attention to all tokens of each demonstration's label or, in plain text,
    to `positions`.
    """
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
    """The largest (head, position) parts, by contrast or else by increase."""

    largest: tuple[SubheadReport, ...]
    n_parts: int
    """Number of all parts, of which `n_exact` were evaluated exactly."""
    n_exact: int
    certified: bool
    """Whether bounds prove that no other part is larger."""


@dataclass(frozen=True, repr=False)
class ExplanationReports:
    """All reports of an explanation, and values that follow from several of them."""

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
            list(words_of(self.input, report))  # raises ValueError for inconsistent lengths
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


def n_largest(reports: ExplanationReports) -> int:
    """Return how many of the located heads have the largest scores; the one of `why=` may be
    another.
    """
    return min(reports.settings.k, len(reports.heads))


def rank_of(reports: ExplanationReports, head: Head) -> int:
    """Return the rank of a head among all heads, by the score that ranks them; 1 is the largest."""
    scores = reports.all_heads.by(reports.settings.by)
    score_of_head = scores[head.layer][head.head]
    rank = 1
    for scores_of_layer in scores:
        rank += sum(score > score_of_head for score in scores_of_layer)
    return rank


def first_report(reports: ExplanationReports) -> HeadReport:
    """Return the located head that is shown first: the one of `why=`, otherwise the best."""
    for report in reports.heads:
        if str(report.head) == reports.settings.why:
            return report
    return reports.heads[0]


def words_of(model_input: InputReport, report: HeadReport) -> Iterator[TopWords]:
    """Yield a row for each value and key of a head, and one for its query.

    A row has position, kind, top words, standout and, for values, the rank of the label or token
    there. Raise ValueError if the head's vectors do not fit the input, as in a damaged file.
    """
    positions = report.positions or model_input.label_positions
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
        last = len(model_input.tokens) - 1
        yield last, "query", report.query_words, report.query_standout, None


def is_noise(standout: float | None) -> bool:
    """Return whether top words stand out no more than those of most random directions."""
    return standout is not None and standout < MIN_STANDOUT
