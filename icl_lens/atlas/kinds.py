"""Kinds of heads: which heads a score names, at a stated rate of false discoveries.

1. Each score with a kind has a p-value for each head, from one of two nulls:

   - **turned heads**, for scores that follow from weights (attention to random tokens, copying):
     the same head with its queries turned against its keys, or its values against its output, by
     a random rotation of the head's own dimensions. This keeps how long its vectors are, and loses
     what they match. In a model of random weights, a head and its turned copies have the same
     distribution. The p-value is the share of turned copies of all heads that score at least as
     high. A head is named by its attention only if the token of the kind is the one that it attends
     to most, of all numbers of tokens back (the first token aside), and by copying only if it
     copies more than the average head;
   - **the average head**, for scores of prompts: a head's score must exceed the mean size of all
     heads' scores on the same prompts. The p-value is that of a sign-flip test over queries. If all
     heads of a model do the same, none stands out.

2. Benjamini and Hochberg's rule names heads, kind by kind: of the heads that a kind names, at most
   the share `RATE` is expected to be named wrongly.

Source: Benjamini and Hochberg 1995; docs/howto/atlas.md.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

RATE = 0.05
"""Rate of false discoveries at which heads are named."""
N_TURNS = 20
"""Turned copies of each head."""
N_FLIPS = 20_000
MIN_QUERIES = 8
"""With fewer queries, no sign-flip test can give the p-values that a list of heads needs."""

TURNED_KINDS = {
    "previous_token": "previous token",
    "duplicate_token": "duplicate token",
    "induction": "induction",
    "first_token": "sink",
    "copying": "copying",
}
"""The kinds of scores whose null are turned heads."""
PROMPT_KINDS = {
    "contrast": "writes the answer",
    "effect": "needed",
    "exchange": "compares",
    "values": "carries labels",
    "indirect_effect": "function vector",
    "label_difference": "attends to true labels",
}
"""The kinds of scores whose null is the average head."""
KINDS = TURNED_KINDS | PROMPT_KINDS


def turned_p_values(
    scores: Float[Tensor, "layer head"], turned: Float[Tensor, "turn layer head"]
) -> Float[Tensor, "layer head"]:
    """Return the share of turned heads, each head itself counted once, that score at least as high
    as each head.
    """
    null = turned.flatten().double().sort().values
    n_below = torch.searchsorted(null, scores.flatten().double(), side="left")
    n_as_high = 1.0 + len(null) - n_below.double()
    return (n_as_high / (1 + len(null))).reshape(scores.shape)


def average_head_p_values(
    scores: Float[np.ndarray, "prompt layer head"], queries: Sequence[str], seed: int
) -> Float[Tensor, "layer head"] | None:
    """Return the p-values of a one-sided sign-flip test that each head's score is not larger than
    the mean size of all heads' scores; None for fewer than `MIN_QUERIES` queries.

    Prompts with the same query are flipped together. Prompts without the score do not count.
    """
    shape, scores = scores.shape[1:], scores.reshape(len(scores), -1)
    has_score = np.asarray(~np.isnan(scores).all(1))
    names = [query for query, counts in zip(queries, has_score, strict=True) if counts]
    distinct, index = np.unique(names, return_inverse=True)
    if len(distinct) < MIN_QUERIES:
        return None
    excess = scores[has_score] - np.abs(scores[has_score]).mean(1, keepdims=True)
    sums = np.zeros((len(distinct), excess.shape[1]))
    np.add.at(sums, index, excess)
    observed = sums.sum(0)
    signs = np.random.default_rng(seed).integers(0, 2, (N_FLIPS, len(distinct))) * 2.0 - 1.0
    n_as_large = (signs @ sums >= observed - 1e-12 * np.abs(sums).sum(0)).sum(0)
    return torch.from_numpy((1 + n_as_large) / (1 + N_FLIPS)).reshape(shape)


def discoveries(p_values: Float[Tensor, "*shape"], rate: float) -> Bool[Tensor, "*shape"]:
    """Return what Benjamini and Hochberg's rule discovers: all p-values up to the largest one that
    is at most rate · rank / number.

    Example:
        >>> from icl_lens.atlas.kinds import discoveries
        >>> discoveries(torch.tensor([0.01, 0.04, 0.03, 0.9]), 0.05).tolist()
        [True, False, False, False]
    """
    flat = p_values.flatten()
    ranked = flat.sort().values
    bounds = rate * torch.arange(1, len(flat) + 1).to(flat) / len(flat)
    passing = ranked[ranked <= bounds]
    if not len(passing):
        return torch.zeros_like(p_values, dtype=torch.bool)
    return p_values <= passing[-1]
