"""The residual stream of the planted models: named directions, the embeddings that write them, the
unembedding.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from planted.vocabulary import CATEGORIES, COLON, LABELS, texts, token_ids

D_MODEL, N_POSITIONS = 192, 160
N_WAVES = 8
FREQUENCIES = torch.logspace(
    math.log10(1.3), math.log10(0.03), N_WAVES
)  # of waves, radians per token
FEATURE, TYPE, RANDOM, POSITION = 3.0, 3.0, 2.0, 5.0
"""Norms of the parts of an embedding: category or identity, type of token, a random part,
position.
"""
EMBEDDED = math.hypot(FEATURE, TYPE, RANDOM, POSITION)
OWN, SHARED = 1.0, 1.0
"""Norms of the parts of an unembedding: the token's own direction, and for labels the one that they
share.
"""

Directions = Float[Tensor, "_ d_model"]


@dataclass(frozen=True)
class Stream:
    """Orthonormal directions [feature d_model], orthogonal to the mean that LayerNorm removes."""

    text: Directions  # the token is a text
    label: Directions  # the token is a label
    colon: Directions  # the token is the colon
    category: Directions  # category of the token
    identity: Directions  # which label the token is
    waves: Directions  # position: cosines, then sines
    moved: Directions  # category of the nearest text, written by the mover
    picked: Directions  # which label has the category of the query, written by the comparer
    output: Directions  # which label to say, read by the unembedding of this label
    output_all: Directions  # how much to say a label, read by the unembedding of all labels
    rest: Directions  # all other directions


def draw_stream(generator: torch.Generator) -> Stream:
    """Draw the directions."""
    columns = torch.randn(D_MODEL, D_MODEL, generator=generator)
    columns[:, 0] = 1
    basis = torch.linalg.qr(columns).Q.T[1:]
    n_categories, n_labels = len(CATEGORIES), len(LABELS)
    sizes = [1, 1, 1, n_categories, n_labels, 2 * N_WAVES, n_categories, n_labels, n_labels, 1]
    return Stream(*basis.split([*sizes, len(basis) - sum(sizes)]))


def waves_at(positions: Float[Tensor, " position"]) -> Float[Tensor, "position wave"]:
    """Return the unit vectors of some positions; the product of two depends on their distance
    only.
    """
    angles = positions[:, None] * FREQUENCIES
    return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(N_WAVES)


def embeddings(stream: Stream, generator: torch.Generator) -> list[Float[Tensor, "_ d_model"]]:
    """Draw token embedding, position embedding and unembedding; random parts distinguish texts."""
    tokens, logits = (
        RANDOM * _random_rows(stream.rest, generator),
        OWN * _random_rows(stream.rest, generator),
    )
    ids = token_ids()
    for category, words in zip(stream.category, texts().values(), strict=True):
        tokens[[ids[word] for word in words]] += TYPE * stream.text + FEATURE * category
    labels = [ids[label] for label in LABELS]
    tokens[labels] += TYPE * stream.label + FEATURE * stream.identity
    tokens[ids[COLON]] += TYPE * stream.colon[0]
    logits[labels] = OWN * stream.output + SHARED * stream.output_all
    return [tokens, POSITION * waves_at(torch.arange(float(N_POSITIONS))) @ stream.waves, logits]


def _random_rows(
    directions: Directions, generator: torch.Generator
) -> Float[Tensor, "d_vocab d_model"]:
    """Draw a unit vector in the span of some directions for every token."""
    rows = torch.randn(len(token_ids()), len(directions), generator=generator)
    return rows / rows.norm(dim=1, keepdim=True) @ directions
