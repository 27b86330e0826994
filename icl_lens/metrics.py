"""Accuracy, rank statistics and label biases; intervals over prompts, as in all results.

Axes named `batch` have one entry per prompt; `n`, `query` and `key` count any items.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError, short_repr
from icl_lens.foundation.defaults import N_TOP
from icl_lens.foundation.intervals import Interval as Interval
from icl_lens.foundation.intervals import beside_random_sets as beside_random_sets
from icl_lens.foundation.intervals import bootstrap_interval as bootstrap_interval
from icl_lens.foundation.intervals import interval_table as interval_table
from icl_lens.foundation.intervals import mean_intervals as mean_intervals
from icl_lens.foundation.intervals import with_random_sets as with_random_sets
from icl_lens.result.base import Result
from icl_lens.result.number_format import signed
from icl_lens.result.view import View, table_view

__all__ = [
    "Agreement",
    "Interval",
    "accuracy",
    "agreement",
    "auroc",
    "beside_random_sets",
    "bias_gap",
    "bootstrap_interval",
    "interval_table",
    "is_correct",
    "label_aurocs",
    "label_log_odds",
    "majority_label",
    "mean_aurocs",
    "mean_intervals",
    "mean_reciprocal_rank",
    "most_probable",
    "precision_at_1",
    "ranks_with_ties",
    "recent_label",
    "spearman",
    "with_random_sets",
]


def __dir__() -> list[str]:
    return __all__


@runtime_checkable
class AnsweredPrompts(Protocol):
    """What these functions read of an `il.PromptBatch`."""

    @property
    def answer(self) -> Int[Tensor, " batch"]:
        """The index of each prompt's label."""
        ...

    @property
    def label_mask(self) -> Bool[Tensor, "batch label"]:
        """The labels that each prompt chooses between."""
        ...


def most_probable(
    scores: Float[Tensor, "*batch label"], choices: Bool[Tensor, "*#batch label"]
) -> Int[Tensor, "*batch"]:
    """Return the index of each prompt's label with the highest score, among its `choices`; ties go
    to the first.
    """
    return scores.masked_fill(~choices.to(scores.device), -torch.inf).argmax(-1)


def is_correct(
    scores: Float[Tensor, "batch label"],
    answer: Int[Tensor, " batch"] | Sequence[str] | AnsweredPrompts,
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
) -> Bool[Tensor, " batch"]:
    """Return whether the answer scores highest among each prompt's labels.

    `answer` is the batch of the prompts, each of which chooses among its own labels; the index of
    each prompt's label; or, for scores that carry labels, as those of `il.score` do, the labels
    themselves. With indices or labels, all labels of the scores compete, except where `choices`
    leaves some out. Ties go to the first label. Raise InputError if a prompt has no answer (-1), an
    answer is not among the choices, labels are given for scores without labels, or the highest
    score is NaN or infinite.
    """
    answer, choices = _answer_and_choices(scores, answer, choices)
    if scores.ndim != 2 or answer.shape != scores.shape[:1]:
        raise InputError(
            "scores must have shape [batch label] and answer shape [batch], got "
            f"{tuple(scores.shape)} and {tuple(answer.shape)}"
        )
    mask = (
        torch.ones_like(scores, dtype=torch.bool) if choices is None else choices.to(scores.device)
    )
    answer = answer.to(scores.device)
    if bool(((answer < 0) | (answer >= scores.shape[1])).any()) or not bool(
        mask.gather(1, answer[:, None]).all()
    ):
        raise InputError(
            "every prompt must have an answer among its labels, and some have none; add answers or "
            "drop these prompts"
        )
    best = scores.masked_fill(~mask, -torch.inf).max(-1)
    if not bool(best.values.isfinite().all()):
        row = int((~best.values.isfinite()).nonzero()[0])
        raise InputError(
            f"the highest score of prompt {row} must be finite, got {float(best.values[row])}; find "
            "the cause "
            "(weights, an edit, float16) or drop such prompts"
        )
    return best.indices == answer


def _answer_and_choices(
    scores: Float[Tensor, "batch label"],
    answer: Int[Tensor, " batch"] | Sequence[str] | AnsweredPrompts,
    choices: Bool[Tensor, "batch label"] | None,
) -> tuple[Int[Tensor, " batch"], Bool[Tensor, "batch label"] | None]:
    """Return the index of each prompt's answer, and which labels it competes with (None: all)."""
    if isinstance(answer, Tensor):
        return answer, choices
    if isinstance(answer, Sequence):
        return _label_indices(scores, answer), choices
    return answer.answer, answer.label_mask if choices is None else choices


def _label_indices(
    scores: Float[Tensor, "batch label"], answers: Sequence[str]
) -> Int[Tensor, " batch"]:
    """Return the column of each answer; raise InputError for scores without labels and for other
    labels.
    """
    labels: tuple[str, ...] = getattr(scores, "labels", ())
    if not labels:
        raise InputError(
            "answer must have the index of each prompt's label, since these scores carry no labels, "
            "got "
            f"{short_repr(answers)}; pass batch.answer, or the scores as il.score returns them"
        )
    for answer in answers:
        if answer not in labels:
            raise InputError(
                f"answer must have labels of the scores {labels!r}, got {short_repr(answer)}"
            )
    return torch.tensor([labels.index(answer) for answer in answers], dtype=torch.long)


def accuracy(
    scores: Float[Tensor, "batch label"],
    answer: Int[Tensor, " batch"] | Sequence[str] | AnsweredPrompts,
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
) -> float:
    """Return the share of prompts whose answer scores highest among their labels, 0 to 1; see
    `is_correct`.

    Example:
        >>> il.metrics.accuracy(il.score(model, batch), batch)
        1.0
    """
    return float(is_correct(scores, answer, choices=choices).double().mean())


def mean_reciprocal_rank(ranks: Int[Tensor, "*axes"]) -> float:
    """Return the mean of 1/rank, 0 to 1; ranks below 1 mark missing values and are skipped.

    NaN if no ranks remain. The best rank is 1, as in `Readout.ranks`.
    """
    ranks = ranks[ranks >= 1]
    return float(ranks.double().reciprocal().mean())


def ranks_with_ties(values: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
    """Return each value's rank along the last axis, 0 for the smallest; equal values share the mean
    of their ranks.

    Raise InputError for NaN.

    Example:
        >>> from icl_lens.metrics import ranks_with_ties
        >>> ranks_with_ties(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist()
        [2.5, 0.0, 2.5, 1.0]
    """
    if bool(values.isnan().any()):
        raise InputError(
            f"values must not be NaN, got {int(values.isnan().sum())} NaN values; drop them"
        )
    values = values.contiguous()
    ordered = values.sort(-1).values
    below, up_to = (torch.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    return (below + up_to - 1).double() / 2


def spearman(
    first: Float[Tensor, "*#rest n"], second: Float[Tensor, "*#rest n"]
) -> Float[Tensor, "*_"]:
    """Return the rank correlation of two scores of the same items along the last axis, -1 to 1.

    The other axes broadcast. NaN where one of the two is constant.

    Example:
        >>> from icl_lens.metrics import spearman
        >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([[1.0, 4.0, 9.0], [3.0, 2.0, 1.0]])).tolist()
        [1.0, -1.0]
    """
    x, y = (ranks - ranks.mean(-1, keepdim=True) for ranks in map(ranks_with_ties, (first, second)))
    return (x * y).sum(-1) / (x.square().sum(-1) * y.square().sum(-1)).sqrt()


@dataclass(frozen=True, repr=False)
class Agreement(Result):
    """Agreement of two head rankings: rank correlation over all heads, and overlap of the top k.

    Example:
        >>> increase = il.head_log_prob_increase(acts, targets)[0]
        >>> agreed = il.metrics.agreement(increase, increase, k=4)
        >>> round(agreed.spearman, 3), agreed.overlap
        (1.0, 4)
    """

    spearman: float
    k: int
    overlap: int
    """Number of heads in both top k."""
    expected_overlap: float
    """Expected overlap of two random sets of k heads."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row with spearman, k, overlap and expected_overlap."""
        return pd.DataFrame([asdict(self)])

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        columns: dict[str, list[object]] = {
            "rank correlation": [signed(self.spearman)],
            f"of the top {self.k}": [f"{self.overlap} in both"],
            "expected by chance": [f"{self.expected_overlap:.1f}"],
        }
        return table_view("Agreement of two rankings of heads", columns, 1)


def agreement(
    first_scores: Float[Tensor, "layer head"],
    second_scores: Float[Tensor, "layer head"],
    *,
    k: int = N_TOP,
) -> Agreement:
    """Return how well two scores of the same heads agree in ranking, such as causal effects and
    increases.

    Scores are means over prompts. Ties share their mean rank. Raise InputError if k is not between
    1 and the number of heads, or if the shapes differ.

    Example:
        >>> increase = il.head_log_prob_increase(acts, targets)[0]
        >>> il.metrics.agreement(increase, il.head_effects(model, batch).log_prob[0], k=4).expected_overlap
        0.3333333333333333
    """
    if first_scores.shape != second_scores.shape:
        shapes = f"{tuple(first_scores.shape)} and {tuple(second_scores.shape)}"
        raise InputError(f"both scores must have the same shape, got {shapes}")
    n = first_scores.numel()
    if not 1 <= k <= n:
        raise InputError(f"k must be between 1 and {n} (heads), got {short_repr(k)}")
    best = []
    for scores in (first_scores, second_scores):
        best.append(set(scores.flatten().topk(k).indices.tolist()))
    first, second = first_scores.flatten().double().cpu(), second_scores.flatten().double().cpu()
    return Agreement(float(spearman(first, second)), k, len(best[0] & best[1]), k * k / n)


def auroc(scores: Float[Tensor, " n"], positive: Bool[Tensor, " n"]) -> float:
    """Return the probability that a positive scores above a negative, ties counted half: 0 to 1,
    chance is ½.

    NaN if all items are positive, or none are. Raise InputError for NaN scores.

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
    """Return the share of queries whose highest-scoring key has the `same` class; ties count
    fractionally.

    Keys to exclude from a query have a score of -inf. Raise InputError if a query has no finite
    score.

    Example:
        >>> from icl_lens.metrics import precision_at_1
        >>> precision_at_1(torch.tensor([[2.0, 1.0], [3.0, 3.0]]), torch.tensor([[True, False], [False, True]]))
        0.75
    """
    best = scores.max(-1, keepdim=True).values
    if not bool(best.isfinite().all()):
        row = int((~best.isfinite()).nonzero()[0][0])
        raise InputError(f"query {row} has no finite score; every query needs at least one key")
    tied = scores == best
    return float(((tied & same.to(tied.device)).sum(-1) / tied.sum(-1)).double().mean())


def label_log_odds(
    scores: Float[Tensor, "batch label"],
    label: Int[Tensor, " batch"] | Sequence[str] | AnsweredPrompts,
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
) -> Float[Tensor, " batch"]:
    """Return the log-odds of one label against all other labels of a prompt, nats.

    `label` and `choices` are what `is_correct` takes; of a batch, the label is the answer. `scores`
    are log-probabilities; with two labels the result is their difference. Raise InputError if a
    prompt has no such label (-1) or no other label.
    """
    label, choices = _answer_and_choices(scores, label, choices)
    mask = (
        torch.ones_like(scores, dtype=torch.bool) if choices is None else choices.to(scores.device)
    )
    label = label.to(scores.device)
    if bool((label < 0).any()):
        raise InputError(
            "label must be an index for every prompt, and some are -1; drop these prompts"
        )
    is_other = mask.scatter(1, label[:, None], False)
    if not bool(is_other.any(-1).all()):
        raise InputError(
            "some prompts have only one label, or labels that begin with the same token, so their "
            "log-odds are undefined; drop these prompts: batch[batch.label_mask.sum(1) > 1]"
        )
    label_score = scores.gather(1, label[:, None])[:, 0]
    return label_score - scores.masked_fill(~is_other, -torch.inf).logsumexp(-1)


def label_aurocs(
    scores: Float[Tensor, "batch label"],
    label: Int[Tensor, " batch"],
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
    weights: Float[np.ndarray, "draw batch"] | None = None,
) -> Float[np.ndarray, "draw label"]:
    """Return how well each label's log-odds tell the prompts that have it as `label` from the
    others, 0 to 1.

    For each label, this is the probability that its log-odds (`label_log_odds`) are larger in a
    prompt whose `label` it is than in one where it is another choice; ties count half, chance is ½.
    A preference for a label, however strong, does not change it, as it would accuracy. With
    `label=batch.answer`, it says whether a model tells the classes apart. `scores` are
    log-probabilities.

    `weights` gives each prompt a weight in each line, as `leave_one_out_weights` of
    `icl_lens.foundation.intervals` does; without it, there is one line, that of the data. NaN for a
    label that all prompts or none of them have. Raise InputError for prompts with only one label.

    Example:
        >>> from icl_lens.metrics import label_aurocs
        >>> scores = torch.tensor([[-3.0, -1.0], [-5.0, -1.0], [-5.0, -1.5]])  # always prefers the second label
        >>> label_aurocs(scores, torch.tensor([0, 1, 1])).tolist()
        [[1.0, 1.0]]
    """
    n, n_labels = scores.shape
    weights = np.full((1, n), 1 / n) if weights is None else weights
    is_choice = (
        torch.ones_like(scores, dtype=torch.bool) if choices is None else choices.to(scores.device)
    )
    aurocs = np.full((len(weights), n_labels), np.nan)
    for index in range(n_labels):
        rows = is_choice[:, index].nonzero()[:, 0]
        if not len(rows):
            continue
        labels_of_rows = torch.full_like(rows, index)
        odds = (
            label_log_odds(scores[rows], labels_of_rows, choices=is_choice[rows])
            .double()
            .cpu()
            .numpy()
        )
        is_positive = (label.to(rows.device)[rows] == index).cpu().numpy()
        if is_positive.all() or not is_positive.any():
            continue
        positive, negative = odds[is_positive], odds[~is_positive]
        wins = (positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)
        of_row = weights[:, rows.cpu().numpy()]
        first, second = of_row[:, is_positive], of_row[:, ~is_positive]
        with np.errstate(invalid="ignore"):  # a draw without one of the two kinds
            aurocs[:, index] = ((first @ wins) * second).sum(1) / (first.sum(1) * second.sum(1))
    return aurocs


def mean_aurocs(aurocs: Float[np.ndarray, "draw label"]) -> Float[np.ndarray, " draw"]:
    """Return the mean over the labels that have an AUROC in the data, the first row of
    `label_aurocs`; NaN if none has.

    A draw in which one of them has none is NaN.
    """
    defined = np.isfinite(aurocs[0])
    return aurocs[:, defined].mean(1) if defined.any() else np.full(len(aurocs), np.nan)


def majority_label(label_index: Int[Tensor, "batch demo"]) -> Int[Tensor, " batch"]:
    """Return the most frequent label among each prompt's demonstrations, -1 for a tie.

    -1 in `label_index` marks a missing demonstration.
    """
    n_labels = int(label_index.max()) + 1
    counts = torch.stack([(label_index == label).sum(-1) for label in range(n_labels)], dim=-1)
    best = counts.max(-1, keepdim=True)
    tied = (counts == best.values).sum(-1) > 1
    return best.indices[:, 0].masked_fill(tied, -1)


def recent_label(label_index: Int[Tensor, "batch demo"]) -> Int[Tensor, " batch"]:
    """Return the label of each prompt's last demonstration, the one next to the query."""
    places = torch.arange(label_index.shape[1], device=label_index.device).expand_as(label_index)
    last = places.masked_fill(label_index < 0, -1).max(-1, keepdim=True).values
    return label_index.gather(1, last)[:, 0]


def bias_gap(
    correct: Bool[Tensor, " batch"],
    answer: Int[Tensor, " batch"],
    favored: Int[Tensor, " batch"],
) -> float:
    """Return the accuracy where the answer is the favored label minus the accuracy where it is not,
    -1 to 1.

    With `favored=majority_label(…)` this is the majority-label bias, with `recent_label(…)` the
    recency bias. It is zero if the model's answers do not depend on which label is favored,
    whatever its accuracy. Prompts that favor no label (-1) are skipped. Raise InputError unless
    both kinds of prompts are present.
    """
    answer, favored = answer.to(correct.device), favored.to(correct.device)
    is_favored, is_other = (
        (favored >= 0) & (answer == favored),
        (favored >= 0) & (answer != favored),
    )
    if not bool(is_favored.any()) or not bool(is_other.any()):
        raise InputError(
            "a bias needs prompts whose answer is the favored label and prompts whose answer is "
            "another, got "
            f"{int(is_favored.sum())} and {int(is_other.sum())}; mix prompts of both kinds"
        )
    return float(correct[is_favored].double().mean() - correct[is_other].double().mean())
