"""What a bundled model is trained on at each step: five levels, from the names of words to the whole world.

Each level continues until a running accuracy is reached, so no length is tuned to an architecture or a seed.
"""

import random
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from experiments.bundled_models.architectures import N_POSITIONS
from experiments.bundled_models.episodes import (
    PLAIN,
    SPECIAL,
    Difficulty,
    Vocabulary,
    draw_episode,
    held_out_pairs,
    list_sequence,
    named_sequence,
)

SINGLE_WORDS = 0.4
"""Share of batches whose texts are single words, in levels with longer texts."""
N_LISTED, N_NAMED = 10, 8
"""Words of a list, and texts of a sequence of named ones."""
Kind = Literal["list", "named", "episode"]


@dataclass(frozen=True)
class Level:
    """A part of training: the shares of the kinds of batches, and the accuracy at which the next level begins."""

    shares: dict[Kind, float]
    episodes: Difficulty = PLAIN
    until: float = 1.0
    """Running accuracy that ends this level."""
    measured: Kind = "episode"
    """Kind of batches on which it is measured: "named" (category names) or "episode" (labels shown before)."""


LEVELS = (
    Level({"list": 0.3, "named": 0.7}, until=0.75, measured="named"),
    Level(
        {"list": 0.05, "named": 0.1, "episode": 0.85},
        Difficulty((3, 6), (9, 15), repeats=0.15, asides=0.25),
        0.65,
    ),
    Level({"list": 0.05, "named": 0.15, "episode": 0.8}, Difficulty((2, 4), (4, 14), near=0.05), 0.75),
    Level(
        {"list": 0.05, "named": 0.15, "episode": 0.8},
        Difficulty((2, 4), (2, 14), longest=4, strays=0.05, mislabeled=0.05, uneven=True, stay=0.15, near=0.1),
        0.7,
    ),
    Level(
        {"list": 0.05, "named": 0.1, "episode": 0.85},
        Difficulty((2, 4), (1, 16), longest=8, strays=0.15, mislabeled=0.15, uneven=True, stay=0.25, near=0.2),
    ),
)


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right with weight 0: token ids and the loss weight of predicting each of them."""

    kind: Kind
    tokens: Int[Tensor, "row pos"]
    weights: Float[Tensor, "row pos"]


class Data:
    """Training batches, each a function of (seed, step, level)."""

    def __init__(self, words: Vocabulary, tokenizer: PreTrainedTokenizerFast, seed: int, n_tokens: int):
        self.words = words
        self.seed = seed
        self.n_tokens = n_tokens
        self.held_out = held_out_pairs(words)
        known = [*SPECIAL, *words.fillers, *words.labels, *words.names.values(), *words.categories_of]
        self.pieces: dict[str, list[int]] = {word: tokenizer.encode(word) for word in known}

    def batch(self, step: int, level: int) -> Batch:
        """Return sequences of one kind with the same number of items, slightly more than `n_tokens` tokens in total."""
        rng = random.Random(f"{self.seed}-{step}")
        shares, difficulty = LEVELS[level].shares, LEVELS[level].episodes
        kind = rng.choices(list(shares), list(shares.values()))[0]
        if rng.random() < SINGLE_WORDS:
            difficulty = replace(difficulty, longest=1)
        n_items = rng.randint(*difficulty.demonstrations) + 1
        rows: list[tuple[list[int], list[float]]] = []
        while sum(len(ids) for ids, _ in rows) < self.n_tokens:
            if kind == "list":
                tokens, weights = list_sequence(rng, self.words, N_LISTED), [1.0] * N_LISTED
            elif kind == "named":
                tokens, weights = named_sequence(rng, self.words, N_NAMED, longest=difficulty.longest)
            else:
                episode = draw_episode(rng, self.words, difficulty, self.held_out, n_items)
                tokens, weights = episode.tokens, episode.weights
            # Each piece has its word's weight.
            ids = [index for token in tokens for index in self.pieces[token]]
            if len(ids) <= N_POSITIONS:
                spread = [weight for token, weight in zip(tokens, weights, strict=True) for _ in self.pieces[token]]
                rows.append((ids, spread))
        longest, pad = max(len(ids) for ids, _ in rows), self.pieces["<pad>"]
        return Batch(
            kind,
            torch.tensor([ids + pad * (longest - len(ids)) for ids, _ in rows]),
            torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in rows]),
        )
