"""Labels of several tokens as a whole: their tokens in place, and the log-probability of all of them.

A label is scored by one token, which for " about animals" may be " " alone. The whole label's log-probability is the
sum of its tokens', each given the prompt and the label's tokens before it:

    log p(label | prompt) = Σ_j log p(token_j | prompt, token_1 … token_{j−1})

1. Each label is tokenized behind the prompt, where it stands.
2. For every token of every label a row is made of the prompt and the tokens before it (teacher-forced), in one batch.
3. The rows' log-probabilities of those tokens are summed by label.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import last_log_probs
from icl_lens.errors import InputError
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.token_alignment import require_fast_tokenizer, tokenize_texts

# Tokens in one pass.
PASS_TOKENS = 8192

Ids = Sequence[int]


@dataclass(frozen=True)
class LabelTokenization:
    """A prompt's tokens, without any that were appended to it, and those of each label behind it."""

    prompt: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]


def tokenize_labels(model: Any, batch: PromptBatch, row: int = 0) -> LabelTokenization:
    """The tokens that each label is made of behind a prompt of the batch.

    Raises InputError for prompts without demonstrations.
    """
    batch.require_labels("label to spell", "tokenize_text names the tokens of a target itself")
    tokenizer, prompt, template = require_fast_tokenizer(model), batch.prompts[row], batch.template
    (asked,) = tokenize_texts(tokenizer, [template.render(prompt)])
    continued = tokenize_texts(tokenizer, [template.continuation(prompt, label) for label in batch.labels])
    labels = tuple(tuple(text.continuation_tokens(asked, template.gap)) for text in continued)
    tokens = batch.tokens[row, : int(batch.last[row]) + 1].tolist()
    # What stands in front, the prompt's own tokens, and perhaps what all labels begin with (shared_prefix="append").
    for n_shared in range(min(map(len, labels))):
        own = tokens[: len(tokens) - n_shared]
        scored = [ids[n_shared] for ids in labels]
        if own[len(own) - len(asked.ids) :] == asked.ids and scored == batch.label_tokens.tolist():
            return LabelTokenization(tuple(own), labels)
    raise InputError(
        f"the labels of prompt {row} are not those its tokens were made for: the model's tokenizer is another one; "
        "tokenize the prompts with this model"
    )


def whole_label_log_probs(model: Any, batch: PromptBatch) -> Float[Tensor, "batch label"]:
    """Log-probability of each whole label after each prompt, summed over its tokens (teacher-forced), nats.

    For a label of one token that is `label_log_probs`. One row for every token of every label. Inside interventions
    this is the edited model's answer. Raises InputError for prompts without demonstrations.

    Example:
        >>> whole, first = il.whole_label_log_probs(model, batch), il.label_log_probs(model, batch)
        >>> whole.shape, (whole - first).abs().max() < 1e-5
        (torch.Size([1, 2]), tensor(True))
    """
    pairs = []
    for row in range(len(batch)):
        spelled = tokenize_labels(model, batch, row)
        pairs += [(spelled.prompt, ids) for ids in spelled.labels]
    return continuation_log_probs(model, pairs).reshape(len(batch), -1)


def continuation_log_probs(model: Any, pairs: Sequence[tuple[Ids, Ids]]) -> Float[Tensor, " pair"]:
    """log p of each pair's second tokens after its first, summed over them (teacher-forced), nats."""
    rows, following, of = [], [], []
    for pair, (before, ids) in enumerate(pairs):
        for j, token in enumerate(ids):
            rows.append([*before, *ids[:j]])
            following.append(token)
            of.append(pair)
    scored = PromptBatch.from_tokens(rows, model=model, targets=following)
    found = []
    for some in scored.split(max(1, PASS_TOKENS // scored.tokens.shape[1])):
        every = last_log_probs(model, some)
        found.append(every.gather(-1, some.answer_tokens.to(every.device)[:, None])[:, 0])
    log_probs = torch.cat(found)
    return log_probs.new_zeros(len(pairs)).index_add(0, torch.tensor(of, device=log_probs.device), log_probs)
