"""What is planted in each kind of model: heads by role, and the neurons that look names up."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.models.head import Head
from planted.heads import N_HEADS, NOISE_NORM, HeadWeights, look_back, match, planted_head, prefer
from planted.stream import D_MODEL, EMBEDDED, FEATURE, TYPE, Directions, Stream
from planted.vocabulary import CATEGORIES, LABELS

Kind = Literal[
    "two-tower", "compare-copy", "last-label", "majority", "lookup", "suppressor", "untrained"
]
Role = Literal[
    "mover", "two-tower", "comparer", "copier", "last-label", "majority", "suppressor", "decoy"
]

N_LAYERS = 8
MOVER_LAYER, NEURON_LAYER = 1, 3
ANSWER_LAYERS, ANSWER_NORMS = (4, 5, 5, 6), (2.0, 1.6, 1.3, 1.0)
"""Layers of the heads that write outputs, and the norms of what they write if they attend to one
label only.
"""
DECOY_LAYERS, DECOY_NORM = (2, 4), 2.5
NOISE_FFN_NORM = 1.2  # output norm of FFNs of noise
TYPE_SCORE, EQUAL_SCORE, DISTANCE_SCORE = 5.0, 5.0, 20.0
"""Attention scores, in nats, for the right type of token, for equal features, and for the right
distance.
"""
EVEN_SCORE = 3.0
"""Score of labels in majority heads: lower than `TYPE_SCORE`, so that noise moves less attention
between labels.
"""


@dataclass(frozen=True)
class Site:
    """A planted head, its role, and the norm of what it writes."""

    head: Head
    role: Role
    norm: float


def draw_sites(kind: Kind, generator: torch.Generator) -> list[Site]:
    """Draw the planted heads; all kinds of one seed plant their heads of a layer at the same
    indices.
    """
    unused = [torch.randperm(N_HEADS, generator=generator).tolist() for _ in range(N_LAYERS)]
    mover, *answerers = (
        Head(layer, unused[layer].pop()) for layer in (MOVER_LAYER, *ANSWER_LAYERS)
    )
    sites = [Site(Head(layer, unused[layer].pop()), "decoy", DECOY_NORM) for layer in DECOY_LAYERS]
    if kind == "untrained":
        return []
    if kind in ("two-tower", "compare-copy", "lookup"):
        sites.append(Site(mover, "mover", FEATURE))
    if kind == "lookup":
        return sites
    if kind == "compare-copy":
        sites.append(Site(answerers.pop(0), "comparer", FEATURE))
    role = "copier" if kind == "compare-copy" else kind
    answer_sites = [
        Site(head, role, norm) for head, norm in zip(answerers, ANSWER_NORMS, strict=False)
    ]
    return answer_sites if kind == "suppressor" else sites + answer_sites


def scale_before(layer: int) -> float:
    """Return the expected factor by which a layer's LayerNorm scales the residual stream of
    embeddings and noise.
    """
    noise = layer * (N_HEADS * NOISE_NORM**2 + NOISE_FFN_NORM**2)
    return math.sqrt(D_MODEL / (EMBEDDED**2 + noise))


def head_weights(site: Site, stream: Stream) -> HeadWeights:
    """Return the weights of a planted head."""
    scale = scale_before(site.head.layer)
    texts, labels = (
        prefer(direction, TYPE_SCORE, TYPE * scale) for direction in (stream.text, stream.label)
    )
    same_category = match(stream.moved, stream.moved, EQUAL_SCORE, FEATURE * scale)
    is_picked = match(stream.picked, stream.identity, EQUAL_SCORE, FEATURE * scale)
    nearest_text, last_label = (
        look_back(stream, distance, DISTANCE_SCORE, scale) for distance in (1.5, 2.0)
    )
    terms, reads, writes = {
        "mover": ([texts, nearest_text], stream.category, stream.moved),
        "two-tower": ([labels, same_category], stream.identity, stream.output),
        "comparer": ([labels, same_category], stream.identity, stream.picked),
        "copier": ([labels, is_picked], stream.identity, stream.output),
        "last-label": ([labels, last_label], stream.identity, stream.output),
        "majority": (
            [prefer(stream.label, EVEN_SCORE, TYPE * scale)],
            stream.identity,
            stream.output,
        ),
        "suppressor": (
            [prefer(stream.label, EVEN_SCORE, TYPE * scale)],
            stream.identity,
            -stream.output,
        ),
        "decoy": ([labels], stream.label, stream.output_all),
    }[site.role]
    size = TYPE if site.role == "decoy" else FEATURE
    return planted_head(terms, reads, writes, size=size * scale, norm=site.norm)


def planted_neurons(
    kind: Kind, stream: Stream
) -> tuple[Directions, Float[Tensor, " neuron"], Directions] | None:
    """Return what planted neurons read, their biases and what they write; None if there are none.

    In "lookup", they write for each moved category the output of its name; in "suppressor", at
    colons, the output of all labels alike.
    """
    present, absent = 3.0, -1.0  # before the GELU, which maps them to 3 and −0.16
    if kind == "lookup":
        features, size = stream.moved, FEATURE
        outputs = stream.output[[LABELS.index(name) for name in CATEGORIES]]
    elif kind == "suppressor":
        features, size, outputs = stream.colon, TYPE, stream.output_all
    else:
        return None
    reads = features * (present - absent) / (size * scale_before(NEURON_LAYER))
    biases = torch.full((len(features),), absent)
    return reads, biases, outputs * sum(ANSWER_NORMS) / present
