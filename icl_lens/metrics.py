"""Accuracy, rank statistics, label biases, and bootstrap intervals over prompts.

All intervals draw clusters with `draw_clusters`: prompts with the same query (`PromptBatch.queries`) are not
independent, so a draw contains all prompts of a query or none.

Axes named `batch` or `prompt` have one entry per prompt; `n`, `query` and `key` count any items.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.result.base import Result
from icl_lens.result.tables import format_signed

# Confidence level of intervals.
LEVEL = 0.95
# Values drawn at a time: limits the memory of a bootstrap for any number of prompts.
MAX_DRAWN_VALUES = 2_000_000
# Columns whose bootstrap samples fit in a processor's cache.
N_COLUMNS_PER_CHUNK = 64


@dataclass(frozen=True)
class Interval:
    """A statistic and its bootstrap interval, in the unit of the statistic."""

    value: float
    low: float
    high: float

    def __iter__(self) -> Iterator[float]:
        """Support `value, low, high = …`."""
        return iter((self.value, self.low, self.high))

    def to_frame(self) -> pd.DataFrame:
        """Return one row: value, low, high."""
        return pd.DataFrame([asdict(self)])


def is_correct(
    scores: Float[Tensor, "batch label"],
    answer: Int[Tensor, " batch"],
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
) -> Bool[Tensor, " batch"]:
    """Return whether the answer scores highest among each prompt's labels.

    `choices` (`PromptBatch.label_mask`) restricts each prompt to its own labels; ties go to the first label. Raise
    InputError if a prompt has no answer (-1), an answer is not among the choices, or the highest score is NaN or
    infinite.
    """
    if scores.ndim != 2 or answer.shape != scores.shape[:1]:
        raise InputError(
            "scores must have shape [batch label] and answer shape [batch], got "
            f"{tuple(scores.shape)} and {tuple(answer.shape)}"
        )
    mask = torch.ones_like(scores, dtype=torch.bool) if choices is None else choices.to(scores.device)
    answer = answer.to(scores.device)
    if bool(((answer < 0) | (answer >= scores.shape[1])).any()) or not bool(mask.gather(1, answer[:, None]).all()):
        raise InputError(
            "every prompt must have an answer among its labels, and some have none; add answers or drop these prompts"
        )
    best = scores.masked_fill(~mask, -torch.inf).max(-1)
    if not bool(best.values.isfinite().all()):
        row = int((~best.values.isfinite()).nonzero()[0])
        raise InputError(
            f"the highest score of prompt {row} must be finite, got {float(best.values[row])}; find the cause "
            "(weights, an edit, float16) or drop such prompts"
        )
    return best.indices == answer


def accuracy(
    scores: Float[Tensor, "batch label"],
    answer: Int[Tensor, " batch"],
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
) -> float:
    """Return the share of prompts whose answer scores highest among their labels, 0 to 1; see `is_correct`."""
    return float(is_correct(scores, answer, choices=choices).double().mean())


def mean_reciprocal_rank(ranks: Int[Tensor, "*axes"]) -> float:
    """Return the mean of 1/rank, 0 to 1; ranks below 1 mark missing values and are skipped.

    NaN if no ranks remain. The best rank is 1, as in `Readout.ranks`.
    """
    ranks = ranks[ranks >= 1]
    return float(ranks.double().reciprocal().mean())


def ranks_with_ties(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the rank of each value, 0 for the smallest; equal values share the mean of their ranks.

    Raise InputError for NaN.

    Example:
        >>> from icl_lens.metrics import ranks_with_ties
        >>> ranks_with_ties(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist()
        [2.5, 0.0, 2.5, 1.0]
    """
    if bool(values.isnan().any()):
        raise InputError(f"values must not be NaN, got {int(values.isnan().sum())} NaN values; drop them")
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts.double() + 1) / 2)[place]


def spearman(first: Float[Tensor, " n"], second: Float[Tensor, " n"]) -> float:
    """Return the rank correlation of two scores of the same items, -1 to 1; NaN if one of them is constant.

    Example:
        >>> from icl_lens.metrics import spearman
        >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 9.0]))
        1.0
    """
    x, y = (ranks - ranks.mean() for ranks in map(ranks_with_ties, (first, second)))
    spread = x.square().mean().sqrt() * y.square().mean().sqrt()
    return float((x * y).mean() / spread)


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

    def _shown(self) -> tuple[str, dict[str, list[object]], int]:
        columns: dict[str, list[object]] = {
            "rank correlation": [format_signed(self.spearman)],
            f"of the top {self.k}": [f"{self.overlap} in both"],
            "expected by chance": [f"{self.expected_overlap:.1f}"],
        }
        return "Agreement of two rankings of heads", columns, 1


def agreement(one: Float[Tensor, "layer head"], other: Float[Tensor, "layer head"], *, k: int = 20) -> Agreement:
    """Return how well two scores of the same heads agree in ranking, such as causal effects and increases.

    Scores are means over prompts. Ties share their mean rank. Raise InputError if k is not between 1 and the number of
    heads, or if the shapes differ.

    Example:
        >>> increase = il.head_log_prob_increase(acts, targets)[0]
        >>> il.metrics.agreement(increase, il.head_effects(model, batch).log_prob[0], k=4).expected_overlap
        0.3333333333333333
    """
    n = one.numel()
    if one.shape != other.shape:
        raise InputError(f"one and other must have the same shape, got {tuple(one.shape)} and {tuple(other.shape)}")
    if not 1 <= k <= n:
        raise InputError(f"k must be between 1 and {n} (heads), got {k!r}")
    first, second = (scores.flatten().double().cpu() for scores in (one, other))
    best = [set(scores.flatten().topk(k).indices.tolist()) for scores in (one, other)]
    return Agreement(spearman(first, second), k, len(best[0] & best[1]), k * k / n)


def auroc(scores: Float[Tensor, " n"], positive: Bool[Tensor, " n"]) -> float:
    """Return the probability that a positive scores above a negative, ties counted half: 0 to 1, chance is ½.

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
    """Return the share of queries whose highest-scoring key has the `same` class; ties count fractionally.

    Keys to exclude from a query have a score of -inf. Raise InputError if a query has no finite score.

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
    label: Int[Tensor, " batch"],
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
) -> Float[Tensor, " batch"]:
    """Return the log-odds of one label against all other labels of a prompt, nats.

    `scores` are log-probabilities; with two labels the result is their difference. Raise InputError if a prompt has no
    such label (-1) or no other label.
    """
    mask = torch.ones_like(scores, dtype=torch.bool) if choices is None else choices.to(scores.device)
    label = label.to(scores.device)
    if bool((label < 0).any()):
        raise InputError("label must be an index for every prompt, and some are -1; drop these prompts")
    others = mask.scatter(1, label[:, None], False)
    if not bool(others.any(-1).all()):
        raise InputError("some prompts have only one label, so their log-odds are undefined; drop these prompts")
    own = scores.gather(1, label[:, None])[:, 0]
    return own - scores.masked_fill(~others, -torch.inf).logsumexp(-1)


def label_aurocs(
    scores: Float[Tensor, "batch label"],
    label: Int[Tensor, " batch"],
    *,
    choices: Bool[Tensor, "batch label"] | None = None,
    weights: Float[np.ndarray, "draw batch"] | None = None,
) -> Float[np.ndarray, "draw label"]:
    """Return how well each label's log-odds tell the prompts that have it as `label` from the others, 0 to 1.

    For each label, this is the probability that its log-odds (`label_log_odds`) are larger in a prompt whose `label` it
    is than in one where it is another choice; ties count half, chance is ½. A preference for a label, however strong,
    does not change it, as it would accuracy. With `label=batch.answer`, it says whether a model tells the classes
    apart. `scores` are log-probabilities.

    `weights` gives each prompt a weight in each bootstrap draw, as `weights_with_data` does; without it, there is one
    row, that of the data. NaN for a label that all prompts or none of them have. Raise InputError for prompts with only
    one label.

    Example:
        >>> from icl_lens.metrics import label_aurocs
        >>> scores = torch.tensor([[-3.0, -1.0], [-5.0, -1.0], [-5.0, -1.5]])  # always prefers the second label
        >>> label_aurocs(scores, torch.tensor([0, 1, 1])).tolist()
        [[1.0, 1.0]]
    """
    n, n_labels = scores.shape
    weights = np.full((1, n), 1 / n) if weights is None else weights
    is_choice = torch.ones_like(scores, dtype=torch.bool) if choices is None else choices.to(scores.device)
    found = np.full((len(weights), n_labels), np.nan)
    for index in range(n_labels):
        rows = is_choice[:, index].nonzero()[:, 0]
        if not len(rows):
            continue
        own = torch.full_like(rows, index)
        odds = label_log_odds(scores[rows], own, choices=is_choice[rows]).double().cpu().numpy()
        is_positive = (label.to(rows.device)[rows] == index).cpu().numpy()
        if is_positive.all() or not is_positive.any():
            continue
        positive, negative = odds[is_positive], odds[~is_positive]
        wins = (positive[:, None] > negative) + 0.5 * (positive[:, None] == negative)
        of_row = weights[:, rows.cpu().numpy()]
        first, second = of_row[:, is_positive], of_row[:, ~is_positive]
        with np.errstate(invalid="ignore"):  # a draw without one of the two kinds
            found[:, index] = ((first @ wins) * second).sum(1) / (first.sum(1) * second.sum(1))
    return found


def mean_aurocs(aurocs: Float[np.ndarray, "draw label"]) -> Float[np.ndarray, " draw"]:
    """Return the mean over the labels that have an AUROC in the data, the first row of `label_aurocs`; NaN if none has.

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
    """Return the accuracy where the answer is the favored label minus the accuracy where it is not, -1 to 1.

    With `favored=majority_label(…)` this is the majority-label bias, with `recent_label(…)` the recency bias. It is
    zero if the model's answers do not depend on which label is favored, whatever its accuracy. Prompts that favor no
    label (-1) are skipped. Raise InputError unless both kinds of prompts are present.
    """
    answer, favored = answer.to(correct.device), favored.to(correct.device)
    is_favored, is_other = (favored >= 0) & (answer == favored), (favored >= 0) & (answer != favored)
    if not bool(is_favored.any()) or not bool(is_other.any()):
        raise InputError(
            "a bias needs prompts whose answer is the favored label and prompts whose answer is another, got "
            f"{int(is_favored.sum())} and {int(is_other.sum())}; mix prompts of both kinds"
        )
    return float(correct[is_favored].double().mean() - correct[is_other].double().mean())


def bootstrap_interval(
    per_prompt: Sequence[float] | np.ndarray | Tensor,
    *,
    statistic: Callable[[np.ndarray], float] | None = None,
    clusters: Sequence[object] | None = None,
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return a statistic over prompts and its percentile bootstrap interval.

    `per_prompt` has one row per prompt: one number, or several that are resampled jointly (scores before and after).
    `statistic` maps any number of such rows to one number; the default is the mean. Draws with a non-finite statistic
    (a ratio with a zero denominator) are dropped; the interval is NaN if these are more than 5% of the draws. The
    same seed gives the same interval.

    Prompts that share a query are not independent: with `clusters`, such as the query of each prompt, whole clusters
    are resampled; the statistic must then be the mean. With `bounds`, the smallest and largest possible value, an
    interval of zero width, as for equal rows, is widened to the exact binomial width for the number of clusters (else
    of prompts): 30 of 30 correct answers give 90.5% to 100%.

    Raise InputError for fewer than two prompts, values that are not finite, a level outside 0 to 1, fewer than one
    draw, `clusters` with a `statistic`, or rows of several numbers without one.
    """
    rows = np.asarray(per_prompt.detach().cpu() if isinstance(per_prompt, Tensor) else per_prompt, dtype=float)
    n = len(rows)
    if n < 2:
        raise InputError(f"per_prompt must have at least two rows for an interval, got {n}; use more prompts")
    if not np.isfinite(rows).all():
        n_invalid = int((~np.isfinite(rows)).sum())
        raise InputError(f"per_prompt must be finite, got {n_invalid} NaN or infinite values; drop them")
    if not 0 < level < 1 or draws < 1:
        raise InputError(f"level must be between 0 and 1 and draws at least 1, got level={level} and draws={draws}")
    if statistic is None and rows.ndim != 1:
        raise InputError(
            f"per_prompt must have one number per prompt, got shape {rows.shape}; pass statistic= to reduce rows to "
            "one number"
        )
    if clusters is not None and statistic is not None:
        raise InputError("clusters requires the mean; omit statistic=")
    value = float(rows.mean() if statistic is None else statistic(rows))
    if clusters is not None:
        samples = cluster_weights(clusters, draws=draws, seed=seed) @ rows
        return percentile_interval(value, samples, n_clusters=len(set(clusters)), bounds=bounds, level=level)
    rng = np.random.default_rng(seed)
    samples = np.empty(draws)
    step = max(1, MAX_DRAWN_VALUES // n)
    for start in range(0, draws, step):
        index = rng.integers(n, size=(min(step, draws - start), n))
        chunk = slice(start, start + len(index))
        samples[chunk] = rows[index].mean(-1) if statistic is None else [statistic(rows[one]) for one in index]
    return percentile_interval(value, samples, n_clusters=n, bounds=bounds, level=level)


def mean_intervals(
    rows: Float[np.ndarray, "prompt column"], clusters: Sequence[str], *, level: float = LEVEL
) -> tuple[Float[np.ndarray, " column"], Float[np.ndarray, " column"], Float[np.ndarray, " column"]]:
    """Return each column's mean and the ends of its `bootstrap_interval` with `clusters`; NaN for a single cluster.

    Ends are NaN for a column with a value that is not finite. Results have the same bytes in every process: no matrix
    product is used, since its rounding depends on alignment.
    """
    mean = rows.mean(0)
    if len(set(clusters)) < 2:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    ends = np.empty((2, rows.shape[1]))
    for start in range(0, rows.shape[1], N_COLUMNS_PER_CHUNK):
        some = slice(start, start + N_COLUMNS_PER_CHUNK)
        ends[:, some] = percentile_ends(resampled_means(rows[:, some], clusters), level=level)
    return mean, ends[0], ends[1]


def interval_table(
    values: Float[Tensor, "prompt *axes"] | Float[np.ndarray, "prompt *axes"],
    axes: Mapping[str, Sequence[object]],
    clusters: Sequence[str],
    *,
    value: str = "value",
) -> pd.DataFrame:
    """Return means over prompts with their 95% intervals as a table, which figures take: one row per entry.

    `axes` names the axes after the first and their entries, in order, and `clusters` is the query of each prompt
    (`PromptBatch.queries`). Columns: one for each axis, `value`, low and high, in the unit of `values`; the ends are
    NaN for a single query. Raise InputError if the entries or the clusters do not match the shape of `values`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> effects = il.head_effects(model, many).log_odds  # [batch layer head]
        >>> axes = {"layer": range(8), "head": range(6)}
        >>> table = il.metrics.interval_table(effects, axes, many.queries, value="effect")
        >>> table.columns.tolist(), len(table)
        (['layer', 'head', 'effect', 'low', 'high'], 48)
    """
    rows = np.asarray(values.detach().cpu().double() if isinstance(values, Tensor) else values, dtype=float)
    shape = [len(clusters), *map(len, axes.values())]
    if list(rows.shape) != shape:
        raise InputError(
            f"values must have shape [prompt {' '.join(axes)}] = {shape}, got {list(rows.shape)}; pass one cluster per "
            "prompt and the entries of every other axis"
        )
    mean, low, high = mean_intervals(rows.reshape(len(rows), -1), clusters)
    index = pd.MultiIndex.from_product([list(entries) for entries in axes.values()], names=list(axes))
    return index.to_frame(index=False).assign(**{value: mean}, low=low, high=high)


def resampled_means(
    rows: Float[np.ndarray, "prompt column"], clusters: Sequence[str]
) -> Float[np.ndarray, "draw column"]:
    """Return each column's mean in bootstrap draws of clusters; see `cluster_weights`."""
    weights, members = cluster_weights(clusters), dict[str, list[int]]()
    for row, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(row)
    samples = np.zeros((len(weights), rows.shape[1]))
    for own in members.values():
        samples += weights[:, own[0], None] * rows[own].sum(0)
    return samples


def cluster_weights(
    clusters: Sequence[object] | np.ndarray, *, draws: int = 2000, seed: int = 0
) -> Float[np.ndarray, "draw row"]:
    """Return the weight of each row in bootstrap draws of clusters (see `draw_clusters`); a draw's weights sum to 1."""
    counts, place = draw_clusters(clusters, draws=draws, seed=seed)
    weights = counts[:, place].astype(float)
    return weights / weights.sum(1, keepdims=True)


def weights_with_data(
    clusters: Sequence[object] | np.ndarray, *, draws: int = 2000, seed: int = 0
) -> Float[np.ndarray, "draw row"]:
    """Return the weights of the rows: first those of the data, all equal, then those of each draw of clusters."""
    data = np.full((1, len(clusters)), 1 / len(clusters))
    return np.concatenate([data, cluster_weights(clusters, draws=draws, seed=seed)])


def draw_clusters(
    clusters: Sequence[object] | np.ndarray, *, draws: int = 2000, seed: int = 0
) -> tuple[Int[np.ndarray, "draw cluster"], Int[np.ndarray, " row"]]:
    """Return how often each cluster is drawn in each bootstrap draw, and each row's index into the clusters.

    Of G clusters, G − 1 are drawn, so that the spread of the draws is that of a mean over G clusters (Rao and Wu 1988).
    A single cluster is always drawn once. Draws do not depend on the order of the rows.
    """
    keys = clusters if isinstance(clusters, np.ndarray) else np.array([str(one) for one in clusters])
    _, place = np.unique(keys, return_inverse=True)
    n_clusters = int(place.max()) + 1
    counts, rng = np.empty((draws, n_clusters), np.int32), np.random.default_rng(seed)
    step, chances = max(1, MAX_DRAWN_VALUES // n_clusters), np.full(n_clusters, 1 / n_clusters)
    for start in range(0, draws, step):
        size = min(step, draws - start)
        counts[start : start + size] = rng.multinomial(max(1, n_clusters - 1), chances, size=size)
    return counts, place


def percentile_ends(samples: Float[np.ndarray, "draw *rest"], *, level: float = LEVEL) -> Float[np.ndarray, "2 *rest"]:
    """Return the low and high ends of the central `level` of the samples."""
    return np.quantile(samples, [(1 - level) / 2, (1 + level) / 2], axis=0)


def top_places(values: Float[np.ndarray, "draw item"], k: int) -> Float[np.ndarray, "draw item"]:
    """Return 1 for the k largest items of each draw, else 0; items that tie for the last places share them.

    Rows sum to k. The mean over draws is the share of draws in which an item is among the first k.
    """
    last = np.partition(values, values.shape[1] - k, axis=1)[:, -k, None]
    is_first, is_tied = values > last, values == last
    return is_first + is_tied * (k - is_first.sum(1, keepdims=True)) / is_tied.sum(1, keepdims=True)


def percentile_interval(
    value: float,
    samples: Float[np.ndarray, " draw"],
    *,
    n_clusters: int,
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Interval:
    """Return a value with the percentile interval of its bootstrap samples; see `bootstrap_interval`.

    The interval is NaN if more than 5% of the samples are not finite, or for a single cluster.
    """
    usable = samples[np.isfinite(samples)]
    if len(usable) < 0.95 * len(samples) or n_clusters < 2:
        return Interval(value, float("nan"), float("nan"))
    low, high = map(float, percentile_ends(usable, level=level))
    if bounds is not None and high - low < 1e-9:
        reach = (bounds[1] - bounds[0]) * (1 - (1 - level) ** (1 / n_clusters))
        low, high = max(bounds[0], low - reach), min(bounds[1], high + reach)
    return Interval(value, low, high)
