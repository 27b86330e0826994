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

Table = Literal["heads", "layers", "subheads", "labels", "words"]


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


@dataclass(frozen=True)
class HeadReport:
    """One located head: increase (nats), attention and increase by token position, words, effect of removing it.

    `value_words`, `key_words`, `value_ranks` have one entry a demonstration; `value_ranks` is the rank of the
    demonstration's own label in its value's projection. `ablated` are the label log-probabilities (nats) with
    only this head zeroed.
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
    prompt: Prompt
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

    @property
    def predicted(self) -> str:
        """The label the model finds most probable."""
        return max(zip(self.label_log_probs, self.labels, strict=True))[1]

    @property
    def label_probs(self) -> dict[str, float]:
        """Probability of each label's token, among the whole vocabulary."""
        return {name: math.exp(value) for name, value in zip(self.labels, self.label_log_probs, strict=True)}

    def to_frame(self, table: Table = "heads") -> pd.DataFrame:
        """One of the explanation's tables, tidy: "heads" (all heads), "layers", "subheads", "labels" or "words"."""
        check_choice("table", table, get_args(Table))
        if table == "heads":
            rows = [
                {"layer": layer, "head": head, "name": str(Head(layer, head)), "increase": value}
                for layer, row in enumerate(self.head_increases)
                for head, value in enumerate(row)
            ]
        elif table == "layers":
            parts = (("attn", self.layer_attn), ("ffn", self.layer_ffn))
            rows = [
                {"layer": layer, "component": component, "increase": value}
                for component, values in parts
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
                for i, label in enumerate(self.labels)
            ]
        else:
            rows = list(self._word_rows())
        return pd.DataFrame(rows)

    def _word_rows(self) -> Any:
        for report in self.heads:
            for position, values, keys, rank in zip(
                self.label_positions, report.value_words, report.key_words, report.value_ranks, strict=True
            ):
                token = self.tokens[position]
                yield {
                    "name": str(report.head),
                    "position": position,
                    "token": token,
                    "kind": "value",
                    "words": " ".join(values),
                    "own_label_rank": rank,
                }
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
