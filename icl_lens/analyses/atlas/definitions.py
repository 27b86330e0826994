"""What each score of an atlas is: its name, definition, source, unit and cost.

The order is that of the columns of an atlas.
"""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "nats", "tokens", "logit", "probability", "AUROC", "score", ""]
"""Unit of a score; "share" is attention, or a share of tokens, 0 to 1."""
UNITS_OF_SHARES: tuple[Unit, ...] = ("share", "probability", "AUROC")
"""Units of numbers between 0 and 1."""

Samples = Literal[
    "sequences", "texts", "prompts", "tokens", "weights", "published", "file", "given"
]
"""What a score is a mean over; one of weights, from a list or of given numbers is no mean."""


@dataclass(frozen=True)
class ScoreDefinition:
    """A score of heads, in words."""

    name: str
    """Name in Python, in tables and in files."""
    title: str
    definition: str
    """One sentence."""
    source: str
    """Papers, by their numbers on arXiv."""
    unit: Unit
    over: Samples
    cost: str
    """In forward passes, beside those that other scores share with it."""


_SEQUENCE_PASS = "one pass a sequence, for all scores of random tokens"
_TEXT_PASS = "one pass a text, for all scores of texts"
_PROMPT_PASS = "one pass a prompt, for all scores that only read"
_HEAD_TOKENS = "and {} for each head, from its layer on"

_RANDOM_TOKENS = (
    ScoreDefinition(
        "previous_token",
        "previous token",
        "Attention to the token before, on random tokens.",
        "2209.11895",
        "share",
        "sequences",
        _SEQUENCE_PASS,
    ),
    ScoreDefinition(
        "duplicate_token",
        "duplicate token",
        "Attention to the earlier occurrence of the same token, on random tokens shown twice.",
        "2211.00593",
        "share",
        "sequences",
        _SEQUENCE_PASS,
    ),
    ScoreDefinition(
        "induction",
        "induction",
        "Attention to the token after the earlier occurrence of the same token, on random "
        "tokens shown twice.",
        "2209.11895, 2212.09095",
        "share",
        "sequences",
        _SEQUENCE_PASS,
    ),
    ScoreDefinition(
        "first_token",
        "first token (sink)",
        "Attention to the first token of the sequence, on random tokens.",
        "2309.17453",
        "share",
        "sequences",
        _SEQUENCE_PASS,
    ),
    ScoreDefinition(
        "entropy",
        "entropy of attention",
        "Entropy of the attention to all positions, on random tokens.",
        "2309.17453",
        "nats",
        "sequences",
        _SEQUENCE_PASS,
    ),
    ScoreDefinition(
        "distance",
        "distance of attention",
        "Mean number of tokens back to the attended token, on random tokens.",
        "2309.17453",
        "tokens",
        "sequences",
        _SEQUENCE_PASS,
    ),
)
_TEXTS = (
    ScoreDefinition(
        "previous_token_in_text",
        "previous token in text",
        "Attention to the token before, in texts.",
        "2209.11895",
        "share",
        "texts",
        _TEXT_PASS,
    ),
    ScoreDefinition(
        "copy_suppression",
        "copy suppression",
        "How much the head lowers the logit of an earlier token by attending to it, for the "
        "earlier token of the text that the residual stream before the head predicts most.",
        "2310.04625",
        "logit",
        "texts",
        _TEXT_PASS,
    ),
)
_WEIGHTS = (
    ScoreDefinition(
        "copying",
        "copying (eigenvalues)",
        "Sum of the eigenvalues of W_E W_V W_O W_U over the whole vocabulary, over the sum of "
        "their absolute values.",
        "Elhage et al. 2021",
        "score",
        "weights",
        "no pass; the product of W_U and W_E",
    ),
    ScoreDefinition(
        "promotes_attended",
        "promotes the attended token",
        "Share of random tokens whose logit the head raises most, among these tokens, when it "
        "attends to them.",
        "2211.00593",
        "share",
        "tokens",
        "no pass",
    ),
)
_TASK = (
    ScoreDefinition(
        "contrast",
        "contrast",
        "What the head adds to log p(answer) − log Σ p(other labels).",
        "2402.02872",
        "nats",
        "prompts",
        _PROMPT_PASS,
    ),
    ScoreDefinition(
        "increase",
        "increase",
        "What the head adds to log p(answer).",
        "2402.02872",
        "nats",
        "prompts",
        f"{_PROMPT_PASS}; products with W_U",
    ),
    ScoreDefinition(
        "effect",
        "effect",
        "What the answer's log-odds lose if the head alone is zeroed at the last position; its "
        "log-probability, if the prompts have no other labels.",
        "direct ablation",
        "nats",
        "prompts",
        f"one pass a prompt, {_HEAD_TOKENS.format('one token')}",
    ),
    ScoreDefinition(
        "exchange",
        "query exchange",
        "What the log-odds lose if the head alone takes its query from a prompt of the other "
        "class.",
        "2402.02872",
        "nats",
        "prompts",
        f"up to four passes a prompt, {_HEAD_TOKENS.format('three tokens')}, for all exchanges",
    ),
    ScoreDefinition(
        "keys",
        "key exchange",
        "What the log-odds lose if the head alone takes its keys from the prompt with exchanged "
        "texts.",
        "2402.02872",
        "nats",
        "prompts",
        "see query exchange",
    ),
    ScoreDefinition(
        "values",
        "value exchange",
        "What the log-odds lose if the head alone takes its values from the prompt with "
        "exchanged labels.",
        "2402.02872",
        "nats",
        "prompts",
        "see query exchange",
    ),
    ScoreDefinition(
        "indirect_effect",
        "indirect effect",
        "Probability of the answer that the head's mean output over these prompts recovers on the "
        "same prompts with shuffled labels (AIE, by which function vectors are made).",
        "2310.15213",
        "probability",
        "prompts",
        f"two passes a prompt, {_HEAD_TOKENS.format('one token')}; all logits",
    ),
    ScoreDefinition(
        "true_label_attention",
        "attention to true labels",
        "Attention from the last position to the labels that are the answer.",
        "2307.09476",
        "share",
        "prompts",
        _PROMPT_PASS,
    ),
    ScoreDefinition(
        "false_label_attention",
        "attention to false labels",
        "Attention from the last position to the other labels.",
        "2307.09476",
        "share",
        "prompts",
        _PROMPT_PASS,
    ),
    ScoreDefinition(
        "label_difference",
        "true − false labels",
        "Attention to the labels that are the answer minus attention to the others.",
        "2307.09476",
        "share",
        "prompts",
        _PROMPT_PASS,
    ),
    ScoreDefinition(
        "label_reads_text",
        "label reads its text",
        "Attention from a label to the text of its own demonstration.",
        "2410.04468, 2505.16694",
        "share",
        "prompts",
        _PROMPT_PASS,
    ),
    ScoreDefinition(
        "task_recognition",
        "task recognition (TSLA)",
        "Squared norm of the head's output at the last position, in the span of the labels' "
        "unembeddings.",
        "2509.24164",
        "",
        "prompts",
        _PROMPT_PASS,
    ),
    ScoreDefinition(
        "task_learning",
        "task learning (TSLA)",
        "Mean difference of the head's output times the unembedding of the answer and of each "
        "other label, over task recognition.",
        "2509.24164",
        "",
        "prompts",
        _PROMPT_PASS,
    ),
    ScoreDefinition(
        "similarity",
        "query-key similarity",
        "How often the last position's query is more similar to the key of a label that is the "
        "answer than to that of another label, without positions; chance is ½.",
        "2402.02872",
        "AUROC",
        "prompts",
        _PROMPT_PASS,
    ),
)

DEFINITIONS: dict[str, ScoreDefinition] = {
    definition.name: definition for definition in (*_RANDOM_TOKENS, *_TEXTS, *_WEIGHTS, *_TASK)
}
"""The scores that are measured, by name."""
TEXT_SCORES = tuple(definition.name for definition in _TEXTS)
TASK_SCORES = tuple(definition.name for definition in _TASK)
EDITING_SCORES = ("effect", "exchange", "keys", "values", "indirect_effect")
"""The scores for which each head is edited alone."""
