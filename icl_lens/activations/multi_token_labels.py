"""Log-probabilities of full labels that have several tokens.

Elsewhere a label is scored by one token, which for " about animals" may be just " about". The full label's
log-probability is the sum over its tokens, each conditioned on the prompt and the label's earlier tokens:

    log p(label | prompt) = Σ_j log p(token_j | prompt, token_1 … token_{j−1})

1. Each label is tokenized in place after the prompt.
2. Each token of each label gets one row: the prompt and the label's earlier tokens (teacher forcing), in one batch.
3. The log-probabilities of these tokens are summed per label.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.label_scores import LabelScores
from icl_lens.activations.passes import last_log_probs
from icl_lens.errors import InputError
from icl_lens.models.memory import LABEL_TOKENS
from icl_lens.prompts.batch import PromptBatch, check_batch
from icl_lens.prompts.token_alignment import require_fast_tokenizer, tokenize_texts

Ids = Sequence[int]


def tokenize_labels(model: Any, batch: PromptBatch, row: int = 0) -> tuple[Ids, tuple[Ids, ...]]:
    """Return the tokens of a prompt, without appended label tokens, and the tokens of each label after it.

    Raise InputError for prompts without demonstrations, and for a batch that another tokenizer tokenized.
    """
    batch.require_labels("label to tokenize", "set the answer of an il.Text instead")
    tokenizer, prompt, template = require_fast_tokenizer(model), batch.prompts[row], batch.template
    (query,) = tokenize_texts(tokenizer, [template.render(prompt)])
    continued = tokenize_texts(tokenizer, [template.continuation(prompt, label) for label in batch.labels])
    labels = tuple(tuple(text.continuation_tokens(query, template.gap)) for text in continued)
    tokens = batch.tokens[row, : int(batch.last[row]) + 1].tolist()
    # `tokens` may end in tokens that all labels share (shared_prefix="append").
    for n_shared in range(min(map(len, labels))):
        own = tokens[: len(tokens) - n_shared]
        scored = [ids[n_shared] for ids in labels]
        if own[len(own) - len(query.ids) :] == query.ids and scored == batch.label_tokens.tolist():
            return tuple(own), labels
    raise InputError(
        f"batch must be tokenized with the model's tokenizer, got other tokens for prompt {row} and its labels; "
        "re-tokenize the prompts for this model"
    )


def whole_label_log_probs(model: Any, batch: PromptBatch) -> LabelScores:
    """Return each full label's log-probability [batch label], summed over its tokens (teacher forcing), nats.

    For single-token labels this equals `score`. Costs one row per token of each label. In the block
    of an intervention, the edited model is scored. Raise InputError for prompts without labels.

    Example:
        >>> whole, first = il.whole_label_log_probs(model, batch), il.score(model, batch)
        >>> whole.shape, (whole - first).abs().max() < 1e-5
        (torch.Size([1, 2]), tensor(True))
    """
    check_batch(batch)
    pairs = []
    for row in range(len(batch)):
        prompt, labels = tokenize_labels(model, batch, row)
        pairs += [(prompt, ids) for ids in labels]
    return LabelScores.from_tensor(continuation_log_probs(model, pairs).reshape(len(batch), -1), batch.labels)


def continuation_log_probs(model: Any, pairs: Sequence[tuple[Ids, Ids]]) -> Float[Tensor, " pair"]:
    """Return log p(second tokens | first tokens) for each pair, summed over tokens (teacher forcing), nats."""
    rows, targets, pair_of_row = [], [], []
    for pair, (before, ids) in enumerate(pairs):
        for j, token in enumerate(ids):
            rows.append([*before, *ids[:j]])
            targets.append(token)
            pair_of_row.append(pair)
    scored = PromptBatch.from_tokens(rows, model=model, targets=targets)
    found = []
    for piece in scored.split(max(1, LABEL_TOKENS // scored.tokens.shape[1])):
        log_probs = last_log_probs(model, piece)
        found.append(log_probs.gather(-1, piece.answer_tokens.to(log_probs.device)[:, None])[:, 0])
    by_row = torch.cat(found)
    return by_row.new_zeros(len(pairs)).index_add(0, torch.tensor(pair_of_row, device=by_row.device), by_row)
