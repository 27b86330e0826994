"""One model on one task: prompts to choose heads on, held-out prompts to measure on, located heads and controls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

import icl_lens as il
from experiments.framework.estimate import Bounds, Comparison, compare_heads
from experiments.framework.tasks import Layout, Task
from icl_lens.edits.edit import Edit
from icl_lens.head_scores import DIRECT_SCORES, DirectScore
from icl_lens.measures.controlled_ablation import random_head_sets
from icl_lens.metrics import is_correct, label_log_odds
from icl_lens.models.view import ModelView

RANKINGS = DIRECT_SCORES
"""The scores by which heads are located: the contrast with the other label and, as in the paper, the increase."""

Prompts = TypeVar("Prompts", il.PromptBatch, list[il.Prompt])

PASS_BYTES = 128 * 2**20
MAX_ROWS = 64
"""Limits of a pass: bytes of residual streams, and prompts."""
N_LOCATED = 12
"""Number of heads to locate: 12, as in the published paper, but at most an eighth of the model's heads."""
N_RANDOM_SETS = 20
"""Number of random sets that a set of heads is compared with."""


class Scores(NamedTuple):
    """How prompts are answered under each of some sets of edits."""

    odds: Float[np.ndarray, "row set"]
    """The answer's log-odds, nats."""
    correct: Float[np.ndarray, "row set"]
    """1 where the answer is the most probable label, 0 elsewhere."""

    def select(self, sets: slice) -> "Scores":
        return Scores(self.odds[:, sets], self.correct[:, sets])


@dataclass
class Study:
    """A model on a task. Held-out rows are in the same order in every layout, and `clusters` numbers their queries."""

    model: Any
    task: Task
    n: int
    """Maximum number of prompts in each half."""
    seed: int = 0
    ranking: DirectScore = "contrast"
    n_heads: int | None = None
    """How many heads are located; None is the number for the model's size."""
    _kept: dict[Any, Any] = field(default_factory=dict)

    def ranked_by(self, ranking: DirectScore) -> "Study":
        """Return the same study with heads located by another ranking; both share everything computed."""
        return replace(self, ranking=ranking)

    def by_ranking(self) -> "list[Study]":
        """Return the study with heads located by each ranking."""
        return [self.ranked_by(ranking) for ranking in RANKINGS]

    def of_located(self, values: Shaped[Tensor, "row layer head *rest"]) -> Shaped[np.ndarray, "row located *rest"]:
        """Return the values of the located heads from those of all heads, in double precision."""
        layers, heads = zip(*self.located, strict=True)
        return values[:, layers, heads].double().numpy()

    def memoize(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returned the first time for this key."""
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]

    @cached_property
    def view(self) -> ModelView:
        return ModelView.of(self.model)

    # Prompts

    def halves(self, layout: Layout = "random", *, exchanged: bool = False) -> tuple[il.PromptBatch, il.PromptBatch]:
        """Return the (locating, held-out) prompts: the same texts in every layout."""

        def tokenize() -> tuple[il.PromptBatch, il.PromptBatch]:
            # Each query goes to one side only, so we draw more prompts than we keep.
            prompts = self.task.prompts(3 * self.n, seed=self.seed, layout=layout, exchanged=exchanged)
            first, second = (self.tokenize(half) for half in il.split_by_query(prompts, self.n))
            return first, second

        return self.memoize(("halves", layout, exchanged), tokenize)

    def prompts_with(
        self, demonstrations: int, *, same_length: bool = False
    ) -> tuple[list[il.Prompt], list[il.Prompt]]:
        """Return (locating, held-out) prompts in random order, with this many demonstrations of each class.

        Their texts differ from those of `halves`, but a query stays in its half. With `same_length`, all texts have the
        same number of tokens. Raise InputError if the task has too few such texts.
        """

        def draw() -> tuple[list[il.Prompt], list[il.Prompt]]:
            assigned = {prompt.query: i for i, half in enumerate(self.halves()) for prompt in half.prompts}
            task = replace(self.task, demonstrations=demonstrations)
            prompts = task.prompts(3 * self.n, seed=self.seed, same_length_for=self.model if same_length else None)
            return il.split_by_query(prompts, self.n, assigned=assigned)

        return self.memoize(("prompts", demonstrations, same_length), draw)

    def tokenize(self, prompts: Sequence[il.Prompt]) -> il.PromptBatch:
        """Tokenize prompts by the task's template, with its labels in one order."""
        return il.tokenize(self.model, prompts, template=self.task.template, labels=self.task.labels)

    @property
    def held_out(self) -> il.PromptBatch:
        return self.halves()[1]

    @property
    def clusters(self) -> Int[np.ndarray, " row"]:
        """A number for each held-out prompt's query; prompts with the same query share it."""
        return clusters_of(self.held_out)

    @property
    def with_other_query(self) -> il.PromptBatch:
        """The held-out prompts, each with a query of the other class, so that the answer is the other label."""

        def tokenize() -> il.PromptBatch:
            n = 3 * self.n
            pairs = zip(self.task.prompts(n, seed=self.seed), self.task.other_queries(n, seed=self.seed), strict=True)
            others = dict(pairs)
            return self.tokenize([others[prompt] for prompt in self.held_out.prompts])

        return self.memoize("other queries", tokenize)

    def pieces(self, batch: il.PromptBatch) -> list[il.PromptBatch]:
        """Return the batch in pieces whose activations fit into memory."""
        bytes_per_prompt = 4 * self.view.n_layers * batch.tokens.shape[1] * self.view.d_model
        return list(batch.split(max(1, min(MAX_ROWS, PASS_BYTES // bytes_per_prompt))))

    def scores(self, batch: il.PromptBatch, sets_of: Callable[[slice], Sequence[Sequence[Edit]]]) -> Scores:
        """Return how prompts are answered under sets of edits; `sets_of` returns those of some rows of the batch."""
        found, size = [], len(self.pieces(batch)[0])
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            piece, answer = batch[rows], batch.answer[rows].cpu()
            of_sets = il.score(self.model, piece, sets_of(rows)).cpu().unbind(1)
            read = [torch.stack([label_log_odds(one, answer), is_correct(one, answer)]) for one in of_sets]
            found.append(torch.stack(read, dim=-1))
        return Scores(*torch.cat(found, dim=1).double().numpy())

    def map(
        self,
        batch: il.PromptBatch,
        reduce: Callable[[il.Activations], Shaped[Tensor, "row ..."]],
    ) -> Shaped[Tensor, "row ..."]:
        """Return what `reduce` makes of the activations, one row per prompt, on the CPU."""
        return torch.cat([reduce(il.capture(self.model, piece)).detach().cpu() for piece in self.pieces(batch)])

    # Heads

    @property
    def n_located(self) -> int:
        return self.n_heads or min(N_LOCATED, self.view.n_layers * self.view.n_heads // 8)

    def head_scores(self, half: Literal["locating", "held_out"] = "locating") -> Float[Tensor, "row layer head"]:
        """Return every head's contrast or increase, nats."""

        def score() -> Float[Tensor, "row layer head"]:
            batch = self.halves()[half == "held_out"]
            return self.map(batch, contrasts if self.ranking == "contrast" else increases)

        return self.memoize(("scores", self.ranking, half), score)

    def ranked_heads(self) -> list[il.Head]:
        """Return all heads, the one with the largest mean score on the locating prompts first."""
        order = self.head_scores().mean(0).flatten().argsort(descending=True)
        return [il.Head.from_index(index, self.view.n_heads) for index in order.tolist()]

    @property
    def located(self) -> list[il.Head]:
        """The heads with the largest mean scores on the locating prompts, which are balanced: no label is favored."""
        return self.ranked_heads()[: self.n_located]

    @property
    def controls(self) -> dict[int, list[il.Head]]:
        """Layer of a located head -> the other heads of this layer, or of the nearest layer if all are located."""
        free = [head for head in self.view.heads() if head not in set(self.located)]
        by_layer = {}
        for layer in sorted({head.layer for head in self.located}):
            nearest = min(abs(other.layer - layer) for other in free)
            by_layer[layer] = [other for other in free if abs(other.layer - layer) == nearest]
        return by_layer

    def random_sets(self, heads: Sequence[il.Head], n: int = N_RANDOM_SETS) -> list[list[il.Head]]:
        """Return n random sets, each with as many heads as `heads`, from the same layers, excluding `heads`.

        Where a layer has no heads left, they are drawn from the nearest layer that has some.
        """
        return random_head_sets(self.view, heads, draws=n, seed=self.seed, same_layers=True)

    @property
    def compared(self) -> list[il.Head]:
        """Heads located by either ranking, and the control heads of both, sorted: the heads that comparisons need."""
        heads = {
            head for study in self.by_ranking() for group in (study.located, *study.controls.values()) for head in group
        }
        return sorted(heads)

    def map_heads(
        self,
        batch: il.PromptBatch,
        heads: Sequence[il.Head],
        reduce: Callable[[il.Activations], Tensor],
    ) -> Float[Tensor, "row layer head *rest"]:
        """Scatter `reduce`'s output for `heads` into an array over all layers and heads; all other entries are NaN.

        `reduce` returns [row, head in `heads`, …].
        """
        reduced = self.map(batch, reduce)
        shape = (len(reduced), self.view.n_layers, self.view.n_heads, *reduced.shape[2:])
        values = reduced.new_full(shape, torch.nan, dtype=torch.double)
        values[:, [head.layer for head in heads], [head.head for head in heads]] = reduced.double()
        return values

    def compare_heads(self, values: Float[Tensor, "row layer head"], *, bounds: Bounds | None = None) -> Comparison:
        """Compare located heads with the controls of their layers, from one number per held-out prompt and head."""
        return compare_heads(values.double().numpy(), self.located, self.controls, self.clusters, bounds=bounds)


def clusters_of(batch: il.PromptBatch) -> Int[np.ndarray, " row"]:
    """Return a number for each prompt's query; prompts with the same query share it."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(prompt.query, len(numbers)) for prompt in batch.prompts])


def thin_out(prompts: Prompts, n: int) -> Prompts:
    """Return between n and 2n evenly spaced prompts, or all if there are fewer than 2n."""
    return prompts[:: max(1, len(prompts) // n)]


def label_classes(batch: il.PromptBatch) -> tuple[Bool[Tensor, "row demo"], Bool[Tensor, "row demo"]]:
    """Return two masks: demonstrations with the answer's label (texts of its class), and those with another label."""
    same = (batch.label_index == batch.answer[:, None]).cpu()
    real = (batch.label_index >= 0).cpu()
    return same & real, ~same & real


def contrasts(acts: il.Activations) -> Float[Tensor, "row layer head"]:
    """Return every head's contrast with the other label, nats."""
    return il.head_log_prob_increase(acts, acts.batch.answer_tokens, against=compared_tokens(acts.batch))


def compared_tokens(batch: il.PromptBatch) -> Int[Tensor, "row other"]:
    """Return the tokens that answers are compared with: other labels or, without labels, those in `against`."""
    return batch.other_label_tokens if batch.against is None else batch.against


def increases(acts: il.Activations) -> Float[Tensor, "row layer head"]:
    """Return what each head adds to the answer's log-probability, nats."""
    return il.head_log_prob_increase(acts, acts.batch.answer_tokens)
