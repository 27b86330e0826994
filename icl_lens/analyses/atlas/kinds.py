"""Kinds of heads: which heads stand out by a score, at a stated rate of false discoveries.

1. Each score with a kind has a p-value for each head, from one of three nulls:

   - **turned heads**, for attention to random tokens: the same head with its queries turned against
     its keys by a random rotation of the head's own dimensions. This keeps how long its vectors
     are, and loses what they match. In a model of random weights, a head and its turned copies have
     the same distribution. The p-value is the share of turned copies of all heads that score at
     least as high. A head has a kind of attention only if the token of the kind is the one that it
     attends to most, of all tokens at fixed distances back; the first token is not compared;
   - **the other heads and chance**, for copying: the share of tokens that a head promotes most when
     it attends to them must exceed both chance (a binomial test) and what the heads of the model
     have in common, a normal distribution with the median and the median absolute deviation of all
     heads' shares. The p-value is the larger of the two. Most trained heads promote what they attend
     to a little more than chance, so too many would stand out against chance alone;
   - **the mean of all heads**, for scores of prompts: a head's score must exceed the mean absolute
     score of all heads on the same prompts. The p-value is that of a sign-flip test over the
     prompts' queries. If all heads of a model do the same, none stands out.

2. Benjamini and Hochberg's rule decides which heads have a kind, kind by kind: of the heads of a
   kind, at most the share `RATE` is expected to have it by mistake.

Source: Benjamini and Hochberg 1995; a null from the middle of all statistics: Efron 2004;
docs/howto/atlas.md.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

RATE = 0.05
"""Rate of false discoveries at which heads have a kind."""
N_TURNS = 20
"""Turned copies of each head."""
N_FLIPS = 20_000
"""Random signs of a sign-flip test; more for models of many heads."""
FLIPS_AT_ONCE = 5_000
MAD_TO_DEVIATION = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MIN_QUERIES = 8
"""With fewer, heads are not tested; `queries_needed` says how many a single head needs."""

TURNED_KINDS = {
    "previous_token": "previous token",
    "duplicate_token": "duplicate token",
    "induction": "induction",
    "first_token": "sink",
}
"""The kinds of scores whose null are turned heads."""
OTHER_HEADS_KINDS = {"promotes_attended": "copying"}
"""The kinds of scores whose null are the other heads, and chance."""
PROMPT_KINDS = {
    "contrast": "writes the answer",
    "effect": "needed",
    "exchange": "compares",
    "values": "carries labels",
    "indirect_effect": "function vector",
    "label_difference": "attends to true labels",
}
"""The kinds of scores whose null is the mean of all heads."""
KINDS = TURNED_KINDS | OTHER_HEADS_KINDS | PROMPT_KINDS


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


def copying_p_values(
    is_promoted: Bool[Tensor, "token layer head"],
) -> Float[Tensor, "layer head"]:
    """Return the p-values of each head's share of tokens that it promotes most when it attends to
    them: the larger one of a binomial test against chance, one of the tokens, and of a test against
    the other heads.

    The latter compares arcsine square roots of shares, whose sampling error is the same for all
    shares, with a normal distribution that has the median of all heads. Its standard deviation
    follows from the median absolute deviation, and is at least the sampling error.
    """
    n_tokens, counts = len(is_promoted), is_promoted.double().sum(0)
    sizes = (counts / n_tokens).sqrt().asin()
    middle = sizes.median()
    spread = (sizes - middle).abs().median() * MAD_TO_DEVIATION
    deviations = (sizes - middle) / spread.clamp(min=0.5 / n_tokens**0.5)
    above_other_heads = 0.5 * torch.erfc(deviations / 2**0.5)
    return torch.maximum(above_other_heads, binomial_tail(counts, n_tokens, 1 / n_tokens))


def binomial_tail(
    counts: Float[Tensor, "*shape"], n: int, probability: float
) -> Float[Tensor, "*shape"]:
    """Return the probability of each count or a larger one, of `n` draws."""
    k = torch.arange(n + 1).double()
    n_total = torch.tensor(float(n)).double()
    log_coefficients = (
        torch.lgamma(n_total + 1) - torch.lgamma(k + 1) - torch.lgamma(n_total - k + 1)
    )
    log_mass = log_coefficients + k * math.log(probability) + (n - k) * math.log1p(-probability)
    tail = log_mass.exp().flip(0).cumsum(0).flip(0).clamp(max=1.0)
    return tail[counts.long()]


def queries_needed(n_heads: int) -> int:
    """Return the number of queries with which a sign-flip test can tell a single head among
    `n_heads`: the smallest p-value of n queries is 2⁻ⁿ, and one head has a kind below rate /
    n_heads.

    Example:
        >>> from icl_lens.analyses.atlas.kinds import queries_needed
        >>> queries_needed(48), queries_needed(336), queries_needed(1024)
        (10, 13, 15)
    """
    return max(MIN_QUERIES, math.ceil(math.log2(n_heads / RATE)))


def average_head_p_values(
    scores: Float[np.ndarray, "prompt layer head"], queries: Sequence[str], seed: int
) -> Float[Tensor, "layer head"] | None:
    """Return the p-values of a one-sided sign-flip test that each head's score is not larger than
    the mean absolute score of all heads; None for fewer than `MIN_QUERIES` queries.

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
    # With a p-value of one in `n_flips`, a single head can still have the kind.
    n_flips = max(N_FLIPS, 2 * math.ceil(scores.shape[1] / RATE))
    signs = np.random.default_rng(seed).integers(0, 2, (n_flips, len(distinct))) * 2.0 - 1.0
    smallest_counted = observed - 1e-12 * np.abs(sums).sum(0)
    n_as_large = np.zeros(len(observed))
    for first in range(0, n_flips, FLIPS_AT_ONCE):
        flipped = signs[first : first + FLIPS_AT_ONCE] @ sums
        n_as_large += (flipped >= smallest_counted).sum(0)
    return torch.from_numpy((1 + n_as_large) / (1 + n_flips)).reshape(shape)


def discoveries(p_values: Float[Tensor, "*shape"], rate: float) -> Bool[Tensor, "*shape"]:
    """Return what Benjamini and Hochberg's rule discovers: all p-values up to the largest one that
    is at most rate · rank / number.

    Example:
        >>> from icl_lens.analyses.atlas.kinds import discoveries
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


def q_values(p_values: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return the smallest rate at which `discoveries` discovers each p-value, at most 1.

    Example:
        >>> from icl_lens.analyses.atlas.kinds import q_values
        >>> [round(q, 3) for q in q_values(torch.tensor([0.01, 0.04, 0.03, 0.9])).tolist()]
        [0.04, 0.053, 0.053, 0.9]
    """
    flat = p_values.flatten()
    order = flat.argsort()
    by_rank = flat[order] * len(flat) / torch.arange(1, len(flat) + 1).to(flat)
    smallest_from_rank = by_rank.flip(0).cummin(0).values.flip(0).clamp(max=1.0)
    return torch.empty_like(flat).scatter(0, order, smallest_from_rank).reshape(p_values.shape)
