"""Accuracy, reciprocal ranks, label biases, and bootstrap intervals over prompts.

Everything takes plain tensors, one row per prompt, so that it does not matter where they came from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError

# Numbers drawn at a time: bounds the memory of a bootstrap whatever the number of prompts.
DRAWN_AT_ONCE = 2_000_000


@dataclass(frozen=True)
class Interval:
    """A statistic and its bootstrap interval, in the statistic's own unit."""

    value: float
    low: float
    high: float

    def __iter__(self) -> Iterator[float]:
        """`value, low, high = …`"""
        return iter((self.value, self.low, self.high))

    def to_frame(self) -> pd.DataFrame:
        """One row: value, low, high."""
        return pd.DataFrame([asdict(self)])


def is_correct(
    scores: Float[Tensor, "batch label"],
    answer: Int[Tensor, " batch"],
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
) -> Bool[Tensor, " batch"]:
    """Whether the answer scores highest among each prompt's labels.

    `choices` (`PromptBatch.label_mask`) leaves out labels that are none of a prompt's own; ties go to the label that
    comes first. Raises InputError for prompts without an answer (-1), an answer that is no choice, and scores that are
    NaN or infinite, of which none is highest.
    """
    mask = torch.ones_like(scores, dtype=torch.bool) if choices is None else choices.to(scores.device)
    answer = answer.to(scores.device)
    if bool((answer < 0).any()) or not bool(mask.gather(1, answer[:, None]).all()):
        raise InputError(
            "some prompts have no answer among their labels, so they cannot be right or wrong; give every prompt an "
            "answer, or leave them out"
        )
    best = scores.masked_fill(~mask, -torch.inf).max(-1)
    if not bool(best.values.isfinite().all()):
        row = int((~best.values.isfinite()).nonzero()[0])
        raise InputError(
            f"the scores of prompt {row} are {_shown(best.values[row])}, so that no label is highest; find out what "
            "made them so (weights, an edit, float16), or leave such prompts out"
        )
    return best.indices == answer


def _shown(value: Tensor) -> str:
    """ "NaN", "infinite": what a number is that is not finite."""
    return "NaN" if bool(value.isnan()) else "infinite"


def accuracy(
    scores: Float[Tensor, "batch label"],
    answer: Int[Tensor, " batch"],
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
) -> float:
    """Share of prompts whose answer scores highest among their labels, 0 to 1; see `is_correct`."""
    return float(is_correct(scores, answer, choices=choices).double().mean())


def mean_reciprocal_rank(ranks: Int[Tensor, "*axes"]) -> float:
    """Mean of 1/rank over all ranks, 0 to 1; ranks below 1 stand for what is missing and are left out.

    NaN if nothing is left. 1 is the best rank, as `Readout.ranks` counts.
    """
    ranks = ranks[ranks >= 1]
    return float(ranks.double().reciprocal().mean())


def ranks_with_ties(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The rank of each value, 0 for the smallest; equal values share the mean of their ranks.

    Raises InputError for NaN, which has no rank.

    Example:
        >>> from icl_lens.metrics import ranks_with_ties
        >>> ranks_with_ties(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist()
        [2.5, 0.0, 2.5, 1.0]
    """
    if bool(values.isnan().any()):
        raise InputError(f"{int(values.isnan().sum())} of the values are NaN and have no rank; leave them out")
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts.double() + 1) / 2)[place]


def spearman(first: Float[Tensor, " n"], second: Float[Tensor, " n"]) -> float:
    """Rank correlation of two scores of the same things, -1 to 1; NaN where one of them never changes.

    Example:
        >>> from icl_lens.metrics import spearman
        >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 9.0]))
        1.0
    """
    x, y = (ranks - ranks.mean() for ranks in map(ranks_with_ties, (first, second)))
    spread = x.square().mean().sqrt() * y.square().mean().sqrt()
    return float((x * y).mean() / spread)


def auroc(scores: Float[Tensor, " n"], positive: Bool[Tensor, " n"]) -> float:
    """Probability that a positive scores above one that is not, ties counted half: 0 to 1, chance is ½.

    NaN where all are positive, or none. Raises InputError for NaN among the scores.

    Example:
        >>> from icl_lens.metrics import auroc
        >>> auroc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([False, False, True, True]))
        0.875
    """
    n = int(positive.sum())
    if n in (0, len(positive)):
        return float("nan")
    ranks = ranks_with_ties(scores)[positive.to(scores.device)]
    return float((ranks.sum() - n * (n - 1) / 2) / (n * (len(positive) - n)))


def precision_at_1(scores: Float[Tensor, "query key"], same: Bool[Tensor, "query key"]) -> float:
    """Share of queries whose highest-scoring key is one of the `same` class; of tied keys, their share counts.

    Keys that a query cannot be compared with have a score of -inf. Raises InputError for a query without a finite
    score.

    Example:
        >>> from icl_lens.metrics import precision_at_1
        >>> precision_at_1(torch.tensor([[2.0, 1.0], [3.0, 3.0]]), torch.tensor([[True, False], [False, True]]))
        0.75
    """
    best = scores.max(-1, keepdim=True).values
    if not bool(best.isfinite().all()):
        row = int((~best.isfinite()).nonzero()[0][0])
        raise InputError(f"query {row} has no finite score; give every query a key to be compared with")
    tied = scores == best
    return float(((tied & same.to(tied.device)).sum(-1) / tied.sum(-1)).double().mean())


def label_log_odds(
    scores: Float[Tensor, "batch label"],
    label: Int[Tensor, " batch"],
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
) -> Float[Tensor, " batch"]:
    """Log-odds of one label against a prompt's other labels together, nats.

    `scores` are log-probabilities; with two labels this is their difference. Raises InputError where a prompt has no
    such label (-1) or no other.
    """
    mask = torch.ones_like(scores, dtype=torch.bool) if choices is None else choices.to(scores.device)
    label = label.to(scores.device)
    if bool((label < 0).any()):
        raise InputError("some prompts have no such label (-1), so there are no odds; leave them out")
    others = mask.scatter(1, label[:, None], False)
    if not bool(others.any(-1).all()):
        raise InputError("some prompts have one label only, so there are no odds; leave them out")
    own = scores.gather(1, label[:, None])[:, 0]
    return own - scores.masked_fill(~others, -torch.inf).logsumexp(-1)


def majority_label(label_index: Int[Tensor, "batch demo"]) -> Int[Tensor, " batch"]:
    """The label most demonstrations of a prompt have; -1 where two have equally many.

    -1 in `label_index` stands for a demonstration that is not there.
    """
    n_labels = int(label_index.max()) + 1
    counts = torch.stack([(label_index == label).sum(-1) for label in range(n_labels)], dim=-1)
    best = counts.max(-1, keepdim=True)
    tied = (counts == best.values).sum(-1) > 1
    return best.indices[:, 0].masked_fill(tied, -1)


def recent_label(label_index: Int[Tensor, "batch demo"]) -> Int[Tensor, " batch"]:
    """The label of each prompt's last demonstration, the one next to the query."""
    places = torch.arange(label_index.shape[1], device=label_index.device).expand_as(label_index)
    last = places.masked_fill(label_index < 0, -1).max(-1, keepdim=True).values
    return label_index.gather(1, last)[:, 0]


def bias_gap(
    correct: Bool[Tensor, " batch"],
    answer: Int[Tensor, " batch"],
    favored: Int[Tensor, " batch"],
) -> float:
    """How much more often a model is right when the answer is the favored label than when it is not, -1 to 1.

    With `favored=majority_label(…)` the majority-label bias, with `recent_label(…)` the recency bias. Zero for a
    model whose answers do not depend on which label is favored, however often it errs. Prompts that favor none (-1)
    are left out. Raises InputError unless both kinds of prompts are there.
    """
    answer, favored = answer.to(correct.device), favored.to(correct.device)
    with_it, against = (favored >= 0) & (answer == favored), (favored >= 0) & (answer != favored)
    if not bool(with_it.any()) or not bool(against.any()):
        raise InputError(
            f"{int(with_it.sum())} prompts have the favored label as their answer and {int(against.sum())} another; "
            "a bias needs both: mix prompts of both kinds"
        )
    return float(correct[with_it].double().mean() - correct[against].double().mean())


def bootstrap_interval(
    per_prompt: Sequence[float] | np.ndarray | Tensor,
    *,
    statistic: Callable[[np.ndarray], float] | None = None,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """A statistic over prompts and its percentile bootstrap interval.

    `per_prompt` has one row per prompt: a number, or several that belong together and are drawn together (scores before
    and after). `statistic` takes such rows, in any number, and gives one number; left out, the mean. Draws for which
    it is not finite (a ratio whose denominator happens to be zero) are left out; the interval is NaN if more than
    one draw in twenty is. The same seed gives the same interval.

    Raises InputError for fewer than two prompts, values that are not finite, or a level outside 0 to 1.
    """
    rows = np.asarray(per_prompt.detach().cpu() if isinstance(per_prompt, Tensor) else per_prompt, dtype=float)
    n = len(rows)
    if n < 2:
        raise InputError(f"an interval over prompts needs at least two, and there are {n}; give more prompts")
    if not np.isfinite(rows).all():
        raise InputError(f"{int((~np.isfinite(rows)).sum())} of the values are not finite; leave those prompts out")
    if not 0 < level < 1 or draws < 1:
        raise InputError(f"level={level} must lie between 0 and 1, and draws={draws} be at least 1")
    if statistic is None and rows.ndim != 1:
        raise InputError(
            f"the values have shape {rows.shape}; give one number per prompt, or a statistic= that makes one number of "
            "the rows"
        )
    rng = np.random.default_rng(seed)
    drawn = np.empty(draws)
    step = max(1, DRAWN_AT_ONCE // n)
    for start in range(0, draws, step):
        index = rng.integers(n, size=(min(step, draws - start), n))
        some = slice(start, start + len(index))
        drawn[some] = rows[index].mean(-1) if statistic is None else [statistic(rows[one]) for one in index]
    value = float(rows.mean() if statistic is None else statistic(rows))
    usable = drawn[np.isfinite(drawn)]
    if len(usable) < 0.95 * draws:
        return Interval(value, float("nan"), float("nan"))
    low, high = np.quantile(usable, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))
