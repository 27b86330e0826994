"""Random sets of heads, the control for what a set of heads does."""

import random
from collections.abc import Sequence
from typing import Any

from icl_lens.errors import InputError
from icl_lens.foundation.defaults import N_RANDOM_SETS
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.view import ModelView


def random_head_sets(
    model: Any,
    heads: Sequence[AnyHead],
    *,
    n_random: int = N_RANDOM_SETS,
    seed: int = 0,
    same_layers: bool = True,
) -> list[list[Head]]:
    """Return `n_random` random sets of as many other heads as `heads`: the control of an edit.

    A set has distinct heads, none of which is in `heads`. It has as many heads of each layer as
    `heads`, because some layers matter more than others; if a layer has too few other heads, more
    come from the nearest layers. With `same_layers=False`, heads come from all layers. The same
    seed gives the same sets. Raise InputError for unknown heads, and if fewer than `len(heads)`
    other heads exist.

    Example:
        >>> random_sets = il.random_head_sets(model, ["L5H0", "L4H1"], n_random=3)
        >>> [sorted(head.layer for head in heads) for heads in random_sets]
        [[4, 5], [4, 5], [4, 5]]
    """
    view = ModelView.of(model)
    heads, all_heads = list(view.check_heads(heads)), view.heads()
    candidates = [head for head in all_heads if head not in heads]
    if len(candidates) < len(heads):
        raise InputError(
            f"heads must be at most half of the model's {len(all_heads)} heads, to draw random "
            f"sets, got {len(heads)}"
        )
    rng = random.Random(seed)
    if not same_layers:
        return [rng.sample(candidates, len(heads)) for _ in range(n_random)]
    return [_in_nearest_layers(heads, candidates, rng) for _ in range(n_random)]


def _in_nearest_layers(
    heads: Sequence[Head], candidates: Sequence[Head], rng: random.Random
) -> list[Head]:
    """Draw a candidate for each head, from its layer or the nearest ones that have any left."""
    remaining = list(candidates)
    drawn = []
    for head in heads:
        distances = [abs(candidate.layer - head.layer) for candidate in remaining]
        least = min(distances)
        nearest = []
        for candidate, distance in zip(remaining, distances, strict=True):
            if distance == least:
                nearest.append(candidate)
        drawn.append(rng.choice(nearest))
        remaining.remove(drawn[-1])
    return drawn
