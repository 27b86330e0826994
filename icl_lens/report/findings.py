"""What an explanation of one prompt holds: data only, drawn by the other modules of this room."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import pandas as pd

from icl_lens.errors import check_choice
from icl_lens.models.head import Head
from icl_lens.models.readout import FinalNorm
from icl_lens.prompts.prompt import Prompt, Template

Table = Literal["heads", "layers", "subheads", "labels", "words", "similarity"]

MIN_CONTRAST_RATIO = 0.5
"""A head tells the target from what it is compared with if its contrast is at least this share of its increase."""


@dataclass(frozen=True)
class ExplainOptions:
    """What `explain` was asked for: the conventions its numbers stand under."""

    final_norm: FinalNorm = "frozen"
    bias: bool = True
    k: int = 10
    n_ablated: int = 4
    n_random: int = 20
    n_words: int = 10
    seed: int = 0
    prepend_bos: bool | None = None
    dtype: str = "float32"
    target: str | int | None = None
    """A free prompt's target as it was given; None: the model's most probable token."""
    against: tuple[str | int, ...] | None = None
    """What to compare the target with, as it was given; None: a prompt's other labels, a free prompt's nothing."""
    shared_prefix: Literal["error", "append"] = "error"


@dataclass(frozen=True)
class HeadReport:
    """One located head: increase (nats), attention and increase by token position, words, effect of removing it.

    `value_words`, `key_words`, `value_ranks` have one entry a demonstration; `value_ranks` is the rank of the
    demonstration's own label in its value's projection. `ablated` are the label log-probabilities (nats) with
    only this head zeroed. `contrast` and `position_contrasts` are what the head adds to the target's log-probability
    minus that of what it is compared with, where it is compared. In a free prompt, words and ranks are of `positions`,
    those the head attends to most, there are no keys, and a rank is that of the token's own name. `similarity`: scores,
    position left out, of the queries that each label is predicted from and of the last one with the keys at the labels
    (`label_similarity`); empty in a free prompt, and where the model does not show how it turns queries and keys.
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

    @property
    def discriminates(self) -> bool:
        """Whether the contrast is at least half of a positive increase: the rule is `MIN_CONTRAST_RATIO`.

        Then what the target is compared with rises by no more than half as much, in log-probability.
        """
        return self.contrast is not None and self.increase > 0 and self.contrast >= MIN_CONTRAST_RATIO * self.increase

    def top_attended(self, n: int = 5) -> tuple[tuple[int, float], ...]:
        """The positions that get most attention from the last token, with it, largest first."""
        ranked = sorted(enumerate(self.attention), key=lambda pair: (-pair[1], pair[0]))
        return tuple(ranked[:n])

    def label_attention(self, positions: Sequence[int]) -> tuple[float, ...]:
        """Attention to the given (label) positions."""
        return tuple(self.attention[position] for position in positions)


@dataclass(frozen=True)
class SubheadReport:
    """One located (head, position) part and its increase, nats."""

    head: Head
    position: int
    token: str
    increase: float
    contrast: float | None = None


@dataclass(frozen=True)
class AblationReport:
    """Label log-probabilities (nats) with the located heads zeroed, and with as many random heads, draw by draw."""

    heads: tuple[Head, ...]
    located: tuple[float, ...]
    random: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Findings:
    """Everything `explain` found about one prompt, as plain data: what tables, figures, pages and the terminal draw.

    Log-probabilities and increases are in nats. `labels[i]` belongs to `label_log_probs[i]`; `target` is the label
    whose log-probability is explained (the answer if the prompt has one, else the model's choice).
    `label_attention[layer][head][demo]` is every head's attention from the last token to the labels. `model` is the
    name that is shown, `source` what loads the model again: for a folder its path.
    """

    model: str
    prompt: Prompt | None
    template: Template
    settings: ExplainOptions
    tokens: tuple[str, ...]
    labels: tuple[str, ...]
    label_positions: tuple[int, ...]
    demonstration_labels: tuple[int, ...]
    label_log_probs: tuple[float, ...]
    target: str
    target_token: str
    next_tokens: tuple[tuple[str, float], ...]
    layer_attn: tuple[float, ...]
    layer_ffn: tuple[float, ...]
    head_increases: tuple[tuple[float, ...], ...]
    label_attention: tuple[tuple[tuple[float, ...], ...], ...]
    heads: tuple[HeadReport, ...]
    subheads: tuple[SubheadReport, ...]
    n_parts: int
    n_exact: int
    certified: bool
    ablation: AblationReport
    versions: tuple[tuple[str, str], ...]
    source: str = ""
    quantization: str = ""
    """How the model's weights were quantized, such as "Q4_1"; empty if they were not."""
    text: str = ""
    """What the model read, up to where it continues."""
    token_names: tuple[str, ...] = ()
    """The tokens with white space visible: "▁to" or "␣to"."""
    compared_with: tuple[str, ...] = ()
    """The labels, or a free prompt's tokens, that contrasts compare the target with."""
    contrast_adds_up: bool = False
    """Whether contrasts of parts sum to their whole's: one other token, frozen norm, no soft-cap."""
    head_contrasts: tuple[tuple[float, ...], ...] = ()
    layer_attn_contrast: tuple[float, ...] = ()
    layer_ffn_contrast: tuple[float, ...] = ()
    attended_positions: tuple[int, ...] = ()
    """A free prompt's positions that some head attends to most; `attended_attention` is every head's attention there."""
    attended_attention: tuple[tuple[tuple[float, ...], ...], ...] = ()
    prediction_positions: tuple[int, ...] = ()
    """Where each demonstration's label is predicted: the token before the one it is scored by."""
    label_token_names: tuple[tuple[str, ...], ...] = ()
    """Each label's tokens where it stands, white space visible; the scored one is number `n_shared`."""
    n_shared_tokens: int = 0
    """Tokens that all labels begin with, appended to the prompt (`shared_prefix="append"`)."""
    whole_label_log_probs: tuple[float, ...] = ()
    """log p of each whole label, summed over its tokens, each given those before; empty where each is one token."""

    @property
    def is_plain_text(self) -> bool:
        """Whether the prompt is any text, without demonstrations: `labels` are then the tokens that are scored."""
        return self.prompt is None

    @property
    def answer(self) -> str | None:
        """The right label; None where there is none, and for free prompts."""
        return None if self.prompt is None else self.prompt.answer

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Tokens as they are drawn: in free prompts with white space visible."""
        return self.token_names if self.is_plain_text and self.token_names else self.tokens

    @property
    def scored_tokens(self) -> tuple[str, ...]:
        """The token each label is scored by, white space visible; empty where it is not known."""
        return tuple(spelling[self.n_shared_tokens] for spelling in self.label_token_names)

    @property
    def has_multi_token_labels(self) -> bool:
        """Whether some label is more than the one token it is scored by."""
        return any(len(spelling) > 1 for spelling in self.label_token_names)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What to know about labels or targets of several tokens, in sentences; nothing where each is one token."""
        if self.is_plain_text:
            return tuple(
                f"{' + '.join(map(repr, spelling))} are {len(spelling)} tokens, of which the first, {spelling[0]!r}, "
                "is scored; the log-probability of all of them stands beside."
                for spelling in self.label_token_names
                if len(spelling) > 1
            )
        if not self.has_multi_token_labels:
            return ()
        found = ["A label of several tokens is scored by one of them; its whole log-probability stands beside."]
        for label, token in zip(self.labels, self.scored_tokens, strict=True):
            if not token.strip("▁␣⏎⇥␍ "):
                found.append(
                    f"Label {label!r} is scored by {token!r}, which is white space only and says little about the "
                    "label: choose other labels or another template, or, where all labels begin with it, "
                    'shared_prefix="append".'
                )
        return tuple(found)

    @property
    def verdict(self) -> str:
        """Which located heads tell the target from what it is compared with, by which rule; empty without contrasts."""
        if not self.compared_with:
            return ""
        apart = [str(report.head) for report in self.heads if report.discriminates]
        both = [str(report.head) for report in self.heads if report.increase > 0 and not report.discriminates]
        if self.is_plain_text:
            others = " and ".join(self.compared_with)
            first, second = f"Tell {self.target} from {others}", "Raise the others as well"
        else:
            first, second = "Tell the labels apart", "Only raise all labels"
            if len(self.compared_with) == 1:
                second = "Only raise both labels"
        rule = "A head tells them apart if its contrast is at least half of its increase."
        return f"{first}: {', '.join(apart) or 'none'}. {second}: {', '.join(both) or 'none'}. {rule}"

    @property
    def headline(self) -> str:
        """What the model says, in a few words."""
        if self.is_plain_text:
            return f"The model continues with {self.next_tokens[0][0]!r}"
        return f"{'Among its labels the model prefers' if self.has_multi_token_labels else 'The model says'} {self.predicted!r}"

    @property
    def predicted(self) -> str:
        """The label the model finds most probable; of a free prompt, the most probable of its scored tokens."""
        return max(zip(self.label_log_probs, self.labels, strict=True))[1]

    @property
    def label_probs(self) -> dict[str, float]:
        """Probability of each label's token, among the whole vocabulary."""
        return {name: math.exp(value) for name, value in zip(self.labels, self.label_log_probs, strict=True)}

    def to_frame(self, table: Table = "heads") -> pd.DataFrame:
        """One of the explanation's tables, tidy.

        "heads" (all heads), "layers", "subheads", "labels", "words" or "similarity" (of queries with labels' keys).
        """
        check_choice("table", table, get_args(Table))
        if table == "heads":
            rows = [
                {"layer": layer, "head": head, "name": str(Head(layer, head)), "increase": value}
                | ({"contrast": self.head_contrasts[layer][head]} if self.head_contrasts else {})
                for layer, row in enumerate(self.head_increases)
                for head, value in enumerate(row)
            ]
        elif table == "layers":
            parts = (
                ("attn", self.layer_attn, self.layer_attn_contrast),
                ("ffn", self.layer_ffn, self.layer_ffn_contrast),
            )
            rows = [
                {"layer": layer, "component": component, "increase": value}
                | ({"contrast": contrasts[layer]} if contrasts else {})
                for component, values, contrasts in parts
                for layer, value in enumerate(values)
            ]
        elif table == "subheads":
            rows = [
                {**asdict(part), "head": part.head.head, "layer": part.head.layer, "name": str(part.head)}
                for part in self.subheads
            ]
        elif table == "labels":
            rows = [
                {
                    "label": label,
                    "log_prob": self.label_log_probs[i],
                    "log_prob_located_zeroed": self.ablation.located[i],
                    # Of the mean probability, as the page and the terminal show it.
                    "log_prob_random_zeroed": _log_mean_probability([draw[i] for draw in self.ablation.random]),
                }
                | ({"scored_token": self.scored_tokens[i]} if self.label_token_names else {})
                | ({"log_prob_whole": self.whole_label_log_probs[i]} if self.whole_label_log_probs else {})
                for i, label in enumerate(self.labels)
            ]
        elif table == "words":
            rows = list(self._word_rows())
        else:
            rows = list(self._similarity_rows())
        return pd.DataFrame(rows)

    @property
    def query_labels(self) -> tuple[int, ...]:
        """The label that each row of `HeadReport.similarity` asks for, as an index; -1 for an unknown answer."""
        last = -1 if self.answer is None else self.labels.index(self.answer)
        return (*self.demonstration_labels, last)

    def _similarity_rows(self) -> Any:
        queries = (*self.prediction_positions, len(self.tokens) - 1)
        names = (*self.labels, None)
        for report in self.heads:
            for position, asked, row in zip(
                queries, self.query_labels, report.similarity, strict=bool(report.similarity)
            ):
                for key, label, score in zip(self.label_positions, self.demonstration_labels, row, strict=True):
                    yield {
                        "name": str(report.head),
                        "query_position": position,
                        "query_label": names[asked],
                        "key_position": key,
                        "key_label": names[label],
                        "score": score,
                    }

    def _word_rows(self) -> Any:
        for report in self.heads:
            positions = report.positions or self.label_positions
            keys_there = report.key_words or [()] * len(positions)
            for position, values, keys, rank in zip(
                positions, report.value_words, keys_there, report.value_ranks, strict=True
            ):
                token = self.shown_tokens[position]
                yield {
                    "name": str(report.head),
                    "position": position,
                    "token": token,
                    "kind": "value",
                    "words": " ".join(values),
                    "own_label_rank": rank,
                }
                if not report.key_words:
                    continue
                yield {
                    "name": str(report.head),
                    "position": position,
                    "token": token,
                    "kind": "key",
                    "words": " ".join(keys),
                    "own_label_rank": pd.NA,
                }
            yield {
                "name": str(report.head),
                "position": len(self.tokens) - 1,
                "token": self.tokens[-1],
                "kind": "query",
                "words": " ".join(report.query_words),
                "own_label_rank": pd.NA,
            }

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists, numbers and strings, for JSON. Heads are written `L22H0`."""
        plain = asdict(self)
        for report, entry in zip(self.heads, plain["heads"], strict=True):
            entry["head"] = str(report.head)
        for part, entry in zip(self.subheads, plain["subheads"], strict=True):
            entry["head"] = str(part.head)
        plain["ablation"]["heads"] = [str(head) for head in self.ablation.heads]
        return {
            **plain,
            "predicted": self.predicted,
            "label_probs": self.label_probs,
            "versions": dict(self.versions),
        }


def _log_mean_probability(log_probs: Sequence[float]) -> float:
    largest = max(log_probs)  # taken out, so that no probability is too small to be told from 0
    return largest + math.log(sum(math.exp(value - largest) for value in log_probs) / len(log_probs))
