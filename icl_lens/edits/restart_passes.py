"""Put rows that start at about the same layer and token into passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor

from icl_lens.models.memory import LOGIT_BYTES, MIN_PASS_TOKENS, RESTART_BYTES
from icl_lens.models.sizes import pass_bytes
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

Pair = tuple[int, int]
"""A set and a prompt."""
MAX_SKIPPED = 64
"""Unchanged tokens that a pass runs before its rows' first changed ones; above it, at most a
quarter of its tokens.
"""


def passes(
    view: ModelView,
    start_layers: Sequence[int],
    batch: PromptBatch,
    firsts: Int[Tensor, "set prompt"],
    pass_tokens: int,
) -> Iterator[tuple[int, list[Pair]]]:
    """Yield the first token and the (set, prompt) pairs of each pass, by the set's first layer and
    the pair's first token; skip empty sets, and pairs of which no token changes.
    """
    sets = [number for number, layer in enumerate(start_layers) if layer < view.n_layers]
    if view.has_hooks:
        for number in sets:
            yield 0, [(number, row) for row in range(len(batch))]
        return
    last, first_of_set = batch.last.tolist(), firsts.tolist()
    pairs: list[tuple[int, int, Pair]] = []
    for number in sets:
        for row, first in enumerate(first_of_set[number]):
            if first <= last[row]:
                pairs.append((start_layers[number], first, (number, row)))
    group = PassRows(view, pass_tokens)
    for layer, first, (number, row) in sorted(pairs, key=lambda pair: pair[:2]):
        if not group.has_room(layer, first, last[row] + 1):
            yield group.first, group.pairs
            group = PassRows(view, pass_tokens)
        group.add(layer, first, last[row] + 1, (number, row))
    if group.pairs:
        yield group.first, group.pairs


@dataclass
class PassRows:
    """Rows of one pass, to which others are added while there is room."""

    view: ModelView
    pass_tokens: int
    pairs: list[Pair] = field(default_factory=list)
    layer: int = 0
    """The first layer of the first row."""
    first: int = 0
    """The first token that is run."""
    end: int = 0
    """One more than the last token that is run."""
    sum_of_firsts: int = 0

    def add(self, layer: int, first: int, end: int, pair: Pair) -> None:
        """Add a row that starts at a layer and a token and ends before another."""
        if not self.pairs:
            self.layer, self.first = layer, first
        self.first, self.end = min(self.first, first), max(self.end, end)
        self.sum_of_firsts += first
        self.pairs.append(pair)

    def has_room(self, layer: int, first: int, end: int) -> bool:
        """Return whether the pass is small enough with a row that is added."""
        if not self.pairs:
            return True
        n_tokens = len(self.pairs) * (self.end - self.first)
        if layer != self.layer and n_tokens >= MIN_PASS_TOKENS:
            return False
        n_rows = len(self.pairs) + 1
        sum_of_firsts = self.sum_of_firsts + first
        first, end = min(self.first, first), max(self.end, end)
        n_tokens = n_rows * (end - first)
        n_skipped = sum_of_firsts - n_rows * first
        return (
            n_tokens <= self.pass_tokens
            and n_rows * pass_bytes(self.view, end - first, end) <= RESTART_BYTES
            and n_rows * 4 * self.view.model.W_U.shape[1] <= LOGIT_BYTES
            and n_skipped <= max(MAX_SKIPPED, n_tokens // 4)
        )
