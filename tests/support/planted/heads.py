"""Weights of single heads: planted ones, put together from what they attend by, read and write; and
noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from planted.stream import (
    D_MODEL,
    FREQUENCIES,
    N_WAVES,
    POSITION,
    TYPE,
    Directions,
    Stream,
    waves_at,
)

N_HEADS = 8
D_HEAD = D_MODEL // N_HEADS
NOISE_NORM, NOISE_SPREAD = 0.5, 0.5
"""Output norm of noise heads that attend to one token: median, and standard deviation of the
logarithm.
"""
MAX_DISTANCE = 4  # tokens between query and key, for noise heads that attend at a fixed distance


@dataclass(frozen=True)
class Term:
    """A summand of attention scores, in nats: (query · x + bias) · (key · x′), x and x′ normalized
    by LayerNorm.
    """

    query: Directions
    bias: Float[Tensor, " _"]
    key: Directions


@dataclass(frozen=True)
class HeadWeights:
    """The weights of one head; keys, values and outputs have no bias."""

    query: Float[Tensor, "d_head d_model"]
    query_bias: Float[Tensor, " d_head"]
    key: Float[Tensor, "d_head d_model"]
    value: Float[Tensor, "d_head d_model"]
    output: Float[Tensor, "d_head d_model"]


def match(query: Directions, key: Directions, score: float, size: float) -> Term:
    """Return a term of `score` nats where query and key have the same feature, each of norm
    `size`.
    """
    factor = math.sqrt(score) / size
    return Term(query * factor, torch.zeros(len(query)), key * factor)


def prefer(key: Directions, score: float, size: float) -> Term:
    """Return a term of `score` nats at keys that have one feature, of norm `size`, whatever the
    query.
    """
    return Term(torch.zeros_like(key), torch.tensor([score / size]), key)


def look_back(stream: Stream, distance: float, score: float, scale: float) -> Term:
    """Return a term that is largest, `score` nats, at keys `distance` tokens before the query."""
    cosine, sine = (distance * FREQUENCIES).cos()[:, None], (distance * FREQUENCIES).sin()[:, None]
    cosines, sines = stream.waves.split(N_WAVES)
    earlier = torch.cat([cosine * cosines + sine * sines, cosine * sines - sine * cosines])
    return match(earlier, stream.waves, score, POSITION * scale)


def planted_head(
    terms: Sequence[Term], reads: Directions, writes: Directions, *, size: float, norm: float
) -> HeadWeights:
    """Return a head that attends by `terms` and turns feature i of `reads`, of norm `size`, into
    norm · writes[i].
    """
    return HeadWeights(
        query=math.sqrt(D_HEAD) * _to_d_head(torch.cat([term.query for term in terms])),
        query_bias=math.sqrt(D_HEAD)
        * _to_d_head(torch.cat([term.bias for term in terms])[:, None])[:, 0],
        key=_to_d_head(torch.cat([term.key for term in terms])),
        value=_to_d_head(reads / size),
        output=_to_d_head(writes * norm),
    )


def noise_head(stream: Stream, scale: float, generator: torch.Generator) -> HeadWeights:
    """Draw a head that attends by anything and writes anything, or with probability 1/8 a mixture
    of outputs.
    """
    query, key, value = torch.randn(3, D_HEAD, D_MODEL, generator=generator) / math.sqrt(D_MODEL)
    bias = torch.zeros(D_HEAD)
    for term in _draw_terms(stream, scale, generator):
        n = len(term.bias)
        query[:n], bias[:n] = math.sqrt(D_HEAD) * term.query, math.sqrt(D_HEAD) * term.bias
        key[:n] = term.key
    norm = NOISE_NORM * math.exp(NOISE_SPREAD * float(torch.randn((), generator=generator)))
    writes = stream.output if _draw(8, generator) == 0 else torch.eye(D_MODEL)
    output = torch.randn(D_HEAD, len(writes), generator=generator) @ writes
    return HeadWeights(query, bias, key, value, output * norm / math.sqrt(D_HEAD * len(writes)))


def _draw_terms(stream: Stream, scale: float, generator: torch.Generator) -> list[Term]:
    """Draw what a noise head attends by, plus random scores: nothing, a distance, the first token,
    or a type.
    """
    choice, distance, kind = (
        _draw(4, generator),
        _draw(MAX_DISTANCE + 1, generator),
        _draw(3, generator),
    )
    first = waves_at(torch.zeros(1)) @ stream.waves
    return [
        [],
        [look_back(stream, float(distance), 10.0, scale)],
        [prefer(first, 10.0, POSITION * scale)],
        [prefer((stream.text, stream.label, stream.colon)[kind], 4.0, TYPE * scale)],
    ][choice]


def _draw(n: int, generator: torch.Generator) -> int:
    return int(torch.randint(n, (), generator=generator))


def _to_d_head(rows: Float[Tensor, "feature n"]) -> Float[Tensor, "d_head n"]:
    """Return the rows with rows of zeros below."""
    return pad(rows, (0, 0, 0, D_HEAD - len(rows)))
