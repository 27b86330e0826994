"""Accuracy during training, on the category pairs that no training episode contrasts: the stopping rule's measure."""

import random
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from experiments.bundled_models.curriculum import Data
from experiments.bundled_models.episodes import Episode, even_episode, seen_pairs

SHOWN = (2, 4, 8, 16)
"""Numbers of demonstrations, all that training episodes can have."""
CHUNK = 32


def validation_episodes(data: Data, n: int, *, longest: int, held_out: bool = True) -> list[Episode]:
    """Return `n` prompts of two classes, always the same: 2 to 16 right demonstrations, half of each class."""
    rng = random.Random(f"validation {longest} {held_out}")
    pairs = sorted(tuple(sorted(pair)) for pair in data.held_out) if held_out else seen_pairs(data.words, data.held_out)
    return [even_episode(rng, data.words, pairs, SHOWN[i % len(SHOWN)], longest=longest) for i in range(n)]


@torch.no_grad()
def label_accuracy(model: Any, data: Data, episodes: Sequence[Episode]) -> float:
    """Return the percentage of prompts whose correct label is more probable than the episode's other labels."""
    right: list[bool] = []
    for start in range(0, len(episodes), CHUNK):
        part = episodes[start : start + CHUNK]
        rows = [[index for token in episode.tokens[:-1] for index in data.pieces[token]] for episode in part]
        longest, pad = max(map(len, rows)), data.pieces["<pad>"]
        logits = model(input_ids=torch.tensor([row + pad * (longest - len(row)) for row in rows])).logits
        for row, episode, scores in zip(rows, part, logits, strict=True):
            labels = [data.pieces[label][0] for label in episode.labels]
            right.append(int(scores[len(row) - 1, labels].argmax()) == episode.items[-1].side)
    return 100 * statistics.fmean(right)
