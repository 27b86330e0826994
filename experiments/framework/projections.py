"""What heads write and read, in words: ranks of labels in values, label features, and top words.

At each label position a head's value is carried through W_O, not weighted by attention: the vector that attention to
this label adds to the residual stream. Keys are residual streams at labels, and queries are carried through W_K.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

import icl_lens as il

RANKED_ROWS = 256
"""Number of values whose scores over the vocabulary are in memory at a time."""


def label_token_ranks(
    acts: il.Activations, heads: Sequence[il.Head], *, other: bool = False
) -> Float[Tensor, "row chosen demo"]:
    """Return the rank of the label's token in each label's value, 1 to the vocabulary's size; NaN: no demonstration.

    With `other` (two labels only), rank the token of the label that is not at the position. W_O and W_U are multiplied
    once per head, since d_head is smaller than d_model.
    """
    index = acts.batch.label_index.to(acts.readout.W_U.device)
    real = index >= 0
    tokens = acts.batch.label_tokens.to(index.device)[1 - index[real] if other else index[real]]
    ranks = torch.full((len(heads), *index.shape), torch.nan, dtype=torch.double, device=index.device)
    for of_head, (layer, head) in zip(ranks, heads, strict=True):
        values = acts.at_labels(acts.values(layer)[:, :, acts.view.kv_head(head)].to(acts.readout.dtype))[real]
        to_words = acts.readout.vocabulary_scores(acts.view.W_O(layer)[head])
        pieces = zip(values.split(RANKED_ROWS), tokens.split(RANKED_ROWS), strict=True)
        of_head[real] = torch.cat([_ranks(some @ to_words, its) for some, its in pieces])
    return ranks.transpose(0, 1)


def _ranks(scores: Float[Tensor, "n d_vocab"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    return (1 + (scores > scores.gather(1, tokens[:, None])).sum(1)).double()


def label_features(acts: il.Activations, heads: Sequence[il.Head]) -> Float[Tensor, "row chosen"]:
    """Return half the difference, from values at first to second labels, of log p(first) − log p(second label), nats.

    Values are read out with each prompt's own final scale and without biases. A head that writes the same at both
    labels gets 0.
    """
    readout = acts.readout.using(final_norm="frozen", bias=False)
    first, second = acts.batch.label_tokens.to(readout.W_U.device)
    index = acts.batch.label_index.to(readout.W_U.device)
    columns = []
    for head in heads:
        tokens = second.expand(len(index)), first.expand(len(index), 1)
        odds = readout.relative_logits(acts.label_values(head), *tokens)[..., 0]
        at_first, at_second = ((odds * (index == label)).sum(1) / (index == label).sum(1) for label in (0, 1))
        columns.append((at_first - at_second) / 2)
    return torch.stack(columns, dim=1)


def label_effects(acts: il.Activations) -> Float[Tensor, "row layer head demo"]:
    """Return what attention times value at a label's tokens adds to its log-odds against the other label, nats."""
    first, second = (label.expand(len(acts.batch)) for label in acts.batch.label_tokens.to(acts.view.unembed_device))
    added = il.subhead_log_prob_increase(acts, first, against=second)
    places = acts.batch.label_token_positions.to(added.device)
    index = places.flatten(1)[:, None, None].clamp(min=0).expand(-1, *added.shape[1:3], -1)
    at_tokens = added.gather(-1, index).unflatten(-1, places.shape[1:])
    at_labels = at_tokens.masked_fill(places[:, None, None] < 0, 0).sum(-1)
    sign = torch.where(acts.batch.label_index == 0, 1.0, -1.0).to(added)
    return at_labels * sign[:, None, None]


def own_word_wins(acts: il.Activations, head: il.Head) -> Float[Tensor, "row 2"]:
    """Return how often a label key ranks its demonstration's word, and the last query the input's, above another word.

    A key's word is paired with the words of the other demonstrations, the input's word with those of all. Each text is
    represented by its last token, so that long ones have no advantage; ties count half.
    """
    texts, query = _last_tokens(acts.batch), acts.batch.tokens.gather(1, acts.batch.query_range[:, 1:] - 1)
    n = texts.shape[1]
    key_scores = acts.readout.vocabulary_scores(acts.label_keys(head)).gather(-1, texts[:, None].expand(-1, n, -1))
    query_scores = acts.readout.vocabulary_scores(acts.last_query(head)).gather(-1, torch.cat([query, texts], 1))
    in_keys = _wins(key_scores.diagonal(dim1=1, dim2=2)[..., None], key_scores)
    others = ~torch.eye(n, dtype=torch.bool, device=in_keys.device)
    return torch.stack([in_keys[:, others].mean(1), _wins(query_scores[:, :1], query_scores[:, 1:]).mean(1)], dim=1)


def _wins(own: Tensor, other: Tensor) -> Tensor:
    """Return 1 where `own` is larger, ½ where the two tie, else 0."""
    return (own > other).float() + 0.5 * (own == other)


def _last_tokens(batch: il.PromptBatch) -> Int[Tensor, "row demo"]:
    """Return the last token of each demonstration's text."""
    return batch.tokens.gather(1, batch.text_ranges[..., 1] - 1)


def top_words(acts: il.Activations, head: il.Head) -> pd.DataFrame:
    """Return the top ten content words of values and keys at the first prompt's last four labels, and of its query."""
    positions, last = acts.batch.label_positions[0, -4:].tolist(), int(acts.batch.last[0])
    found = []
    for part, at, vectors in (
        ("value", positions, acts.label_values(head)[:, -4:]),
        ("key", positions, acts.label_keys(head)[:, -4:]),
        ("query", [last], acts.last_query(head)[:, None]),
    ):
        names = acts.readout.top_tokens(vectors, 10, keep="words")[0]
        for position, words in zip(at, names, strict=True):
            token = acts.batch.token_strings[0][position].strip()
            row = {"part": part, "head": str(head), "position": position, "token": token}
            found.append(row | {"words": ", ".join(map(str.strip, words)), "prompt": str(acts.batch.prompts[0])})
    return pd.DataFrame(found)
