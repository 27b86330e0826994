"""Log-probabilities of full labels that have several tokens.

Elsewhere a label is scored by one token, which for " about animals" may be just " about". The full
label's log-probability is the sum over its tokens, each conditioned on the prompt and the label's
earlier tokens:

    log p(label | prompt) = Σ_j log p(token_j | prompt, token_1 … token_{j−1})

1. Each label is tokenized in place after the prompt.
2. Each token of each label gets one row: the prompt and the label's earlier tokens (teacher
   forcing), in one batch.
3. The log-probabilities of these tokens are summed per label.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.passes.memory import LABEL_TOKENS
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, require_labels
from icl_lens.prompts.token_alignment import require_fast_tokenizer, tokenize_texts
from icl_lens.reading.label_scores import LabelScores
from icl_lens.reading.last_logits import last_log_probs
from icl_lens.runs.progress import progress_switch, steps

Ids = Sequence[int]


def tokenize_labels(model: Any, batch: PromptBatch, row: int = 0) -> tuple[Ids, tuple[Ids, ...]]:
    """Return the tokens of a prompt, without appended label tokens, and those of each whole label
    after it.

    Raise InputError for prompts without demonstrations, and for a batch that another tokenizer
    tokenized.
    """
    require_labels(batch, "label to tokenize", "set the answer of an il.Text instead")
    tokenizer, prompt, template = require_fast_tokenizer(model), batch.prompts[row], batch.template
    (query,) = tokenize_texts(tokenizer, [template.render(prompt)])
    continued = tokenize_texts(
        tokenizer, [template.continuation(prompt, label) for label in batch.decisions.whole_labels]
    )
    labels = tuple(tuple(text.continuation_tokens(query, template.gap)) for text in continued)
    n_appended = int(batch.decisions.n_appended[row])
    tokens = batch.tokens[row, : int(batch.last[row]) + 1 - n_appended].tolist()
    is_same_query = tokens[len(tokens) - len(query.ids) :] == query.ids
    ids_of = dict(zip(batch.decisions.whole_labels, labels, strict=True))
    if not is_same_query or not _is_tokenized_alike(batch, row, ids_of, n_appended):
        raise InputError(
            "batch must be tokenized with the model's tokenizer, got other tokens for prompt "
            f"{row} and its labels; re-tokenize the prompts for this model"
        )
    return tuple(tokens), labels


def _is_tokenized_alike(
    batch: PromptBatch, row: int, ids_of: Mapping[str, Ids], n_appended: int
) -> bool:
    """Return whether the batch scores each label that a row chooses from by the token that the
    label has in `ids_of`, after the tokens that the decision appended.
    """
    columns = torch.nonzero(batch.label_mask[row])[:, 0].tolist()
    for column in columns:
        scored_token = int(batch.label_tokens[column])
        for label in batch.decisions.groups[column]:
            ids = ids_of[label]
            ends_before = len(ids) <= n_appended
            if not ends_before and ids[n_appended] != scored_token:
                return False
    return True


def whole_label_log_probs(
    model: Any, batch: PromptBatch, *, per_token: bool = False, progress: bool | None = None
) -> LabelScores:
    """Return each whole label's log-probability [batch whole_label], summed over its tokens
    (teacher forcing), nats.

    With `per_token=True`, it is divided by the label's number of tokens, since long labels have
    small probabilities. For single-token labels this equals `score`. Costs one row per token of
    each label. In the block of an intervention, the edited model is scored. If this takes longer
    than two seconds, a terminal or notebook shows a progress bar, unless `progress` is False. Raise
    InputError for prompts without labels.

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
    with progress_switch(progress):
        log_probs = continuation_log_probs(model, pairs)
    if per_token:
        log_probs = log_probs / log_probs.new_tensor([len(ids) for _, ids in pairs])
    return LabelScores.from_tensor(log_probs.reshape(len(batch), -1), batch.decisions.whole_labels)


def continuation_log_probs(model: Any, pairs: Sequence[tuple[Ids, Ids]]) -> Float[Tensor, " pair"]:
    """Return log p(second tokens | first tokens) for each pair, summed over tokens (teacher
    forcing), nats.
    """
    rows, targets, pair_of_row = [], [], []
    for pair, (before, ids) in enumerate(pairs):
        for j, token in enumerate(ids):
            rows.append([*before, *ids[:j]])
            targets.append(token)
            pair_of_row.append(pair)
    scored = PromptBatch.from_tokens(rows, model=model, targets=targets)
    token_log_probs = []
    width = scored.tokens.shape[1]
    size = max(1, min(LABEL_TOKENS // width, rows_at_once(ModelView.of(model), width)))
    with steps("scoring labels", len(scored)) as advance:
        for piece in scored.split(size):
            log_probs = last_log_probs(model, piece)
            tokens = piece.answer_tokens.to(log_probs.device)
            token_log_probs.append(log_probs.gather(-1, tokens[:, None])[:, 0])
            advance(len(piece))
    by_row = torch.cat(token_log_probs)
    return by_row.new_zeros(len(pairs)).index_add(
        0, torch.tensor(pair_of_row, device=by_row.device), by_row
    )
