"""How often intervals cover the truth: the tables of docs/howto/intervals.md. `python docs/refresh.py intervals`.

1. Samples of prompts are drawn from a known distribution, once for each column of an array.
2. Each method gives the 95% interval of each column's mean. The share of intervals that contain the true mean is the
   coverage; the width is the median over samples.
3. Methods that the package does not use are written out here: percentile, BCa (Efron 1987) and Student's t with the
   jackknife's standard error.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.stats import norm
from scipy.stats import t as student

from icl_lens.foundation.intervals import (
    bootstrap_interval,
    draw_clusters,
    leave_one_out_interval,
    leave_one_out_weights,
    mean_intervals,
    top_places,
    with_random_sets,
)
from icl_lens.metrics import label_aurocs

PAGE = Path(__file__).parent / "howto" / "intervals.md"
N_SAMPLES = 2000
SIZES = (12, 30, 60, 100)

Sample = tuple[np.ndarray, np.ndarray, float]
"""Values [prompt, sample], each prompt's cluster, and the true mean."""
Ends = tuple[np.ndarray, np.ndarray]
"""Low and high ends of each column."""


def normal(n: int, rng: np.random.Generator) -> Sample:
    """Every query has two prompts; half of the variance is the query's."""
    cluster = np.arange(n) // 2
    values = rng.normal(size=(n // 2, N_SAMPLES))[cluster] + rng.normal(size=(n, N_SAMPLES))
    return values, cluster, 0.0


def skewed(n: int, rng: np.random.Generator) -> Sample:
    """Log-normal: a few prompts have very large values. Every prompt has a query of its own."""
    return rng.lognormal(size=(n, N_SAMPLES)), np.arange(n), float(np.exp(0.5))


def mildly_skewed(n: int, rng: np.random.Generator) -> Sample:
    """Exponential. Every prompt has a query of its own."""
    return rng.exponential(size=(n, N_SAMPLES)), np.arange(n), 1.0


def unequal(n: int, rng: np.random.Generator) -> Sample:
    """A third as many queries as prompts, of which some are frequent words (Zipf); the query's part is log-normal."""
    n_clusters = n // 3
    chances = 1 / np.arange(1, n_clusters + 1)
    extra = rng.choice(n_clusters, n - n_clusters, p=chances / chances.sum())
    cluster = np.concatenate([np.arange(n_clusters), extra])
    of_queries = rng.lognormal(sigma=0.7, size=(n_clusters, N_SAMPLES)) - np.exp(0.245)
    return of_queries[cluster] + rng.normal(size=(n, N_SAMPLES)), cluster, 0.0


def shared(n: int, rng: np.random.Generator) -> Sample:
    """Queries, eight demonstrations and a donor are words of a list of 100; each word has an effect in each place."""
    words, query = 100, rng.integers(100, size=n)
    demonstrations = np.stack([rng.permutation(words)[:8] for _ in range(n)])
    donor = rng.integers(words, size=n)
    of_query, of_demonstration, of_donor = (rng.lognormal(sigma=0.7, size=(words, N_SAMPLES)) for _ in range(3))
    values = of_query[query] + of_demonstration[demonstrations].mean(1) + of_donor[donor]
    cluster = np.unique(query, return_inverse=True)[1]
    return values + rng.normal(size=(n, N_SAMPLES)), cluster, 3 * float(np.exp(0.245))


def right_answers(n: int, rng: np.random.Generator) -> Sample:
    """Accuracy: 90% of the answers are right. Every prompt has a query of its own."""
    return (rng.random((n, N_SAMPLES)) < 0.9).astype(float), np.arange(n), 0.9


KINDS: dict[str, Callable[[int, np.random.Generator], Sample]] = {
    "normal, two prompts a query": normal,
    "mildly skewed (exponential)": mildly_skewed,
    "very skewed (log-normal)": skewed,
    "skewed, unequal queries": unequal,
    "shared demonstrations and donors": shared,
    "right or wrong (90% right)": right_answers,
}


def percentile(values: np.ndarray, cluster: np.ndarray) -> Ends:
    """Return quantiles of the means of draws of clusters."""
    means = drawn_means(values, cluster)
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return low, high


def bca(values: np.ndarray, cluster: np.ndarray) -> Ends:
    """Return quantiles of the means of draws, corrected for bias and skewness."""
    means, without = drawn_means(values, cluster), means_without(values, cluster)
    bias = norm.ppf(np.clip((means < values.mean(0)).mean(0), 1 / len(means), 1 - 1 / len(means)))
    deviations = without.mean(0) - without
    with np.errstate(invalid="ignore", divide="ignore"):
        acceleration = np.nan_to_num((deviations**3).sum(0) / (6 * (deviations**2).sum(0) ** 1.5))
    ends = []
    for z in norm.ppf([0.025, 0.975]):
        shares = norm.cdf(bias + (bias + z) / (1 - acceleration * (bias + z)))
        ends.append(np.array([np.quantile(column, share) for column, share in zip(means.T, shares, strict=True)]))
    return ends[0], ends[1]


def student_t(values: np.ndarray, cluster: np.ndarray) -> Ends:
    """Return Student's t interval with the jackknife's standard error over clusters."""
    without, mean = means_without(values, cluster), values.mean(0)
    n = len(without)
    reach = student.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * ((without - mean) ** 2).sum(0))
    return mean - reach, mean + reach


def studentized(values: np.ndarray, cluster: np.ndarray) -> Ends:
    """Return the ends of `icl_lens.foundation.intervals`."""
    _, low, high = mean_intervals(values, cluster)
    return low, high


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], Ends]] = {
    "percentile (before)": percentile,
    "BCa": bca,
    "Student's t": student_t,
    "studentized (icl_lens)": studentized,
}


def drawn_means(values: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    """Return the mean of each column in each bootstrap draw of clusters."""
    counts, _ = draw_clusters(cluster)
    sums = np.zeros((counts.shape[1], values.shape[1]))
    np.add.at(sums, cluster, values)
    return (counts @ sums) / (counts @ np.bincount(cluster))[:, None]


def means_without(values: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    """Return the mean of each column without each cluster."""
    return np.stack([values[cluster != number].mean(0) for number in range(cluster.max() + 1)])


def coverage_table() -> list[str]:
    """Return the lines of the table of coverage and width by kind of data, number of prompts and method."""
    lines = ["| data | prompts (queries) | " + " | ".join(METHODS) + " |", "|---|---|" + "---|" * len(METHODS)]
    for kind, draw in KINDS.items():
        for n in SIZES:
            values, cluster, truth = draw(n, np.random.default_rng(n))
            cells = []
            for method in METHODS.values():
                low, high = method(values, cluster)
                if draw is right_answers:  # equal answers get the binomial width, whatever the method
                    reach = np.where(high - low < 1e-9, 1 - 0.05 ** (1 / n), 0.0)
                    low, high = np.maximum(0, low - reach), np.minimum(1, high + reach)
                covered = np.mean((low <= truth + 1e-9) & (truth - 1e-9 <= high))
                cells.append(f"{100 * covered:.0f}% ({np.median(high - low):.2f})")
            lines.append(f"| {kind} | {n} ({cluster.max() + 1}) | " + " | ".join(cells) + " |")
    return lines


def auroc_table() -> list[str]:
    """Return the lines of the table of coverage of an AUROC, by its true value and the number of prompts.

    Log-odds of two labels are normal, half of their variance is the query's, and each label is the answer of one of the
    two prompts of each query.
    """
    lines = ["| AUROC | prompts (queries) | percentile (before) | icl_lens |", "|---|---|---|---|"]
    n_samples = 1000
    for truth in (0.5, 0.75, 0.95):
        distance = np.sqrt(2) * norm.ppf(truth)
        for n in (20, 60):
            rng = np.random.default_rng(n)
            cluster, answer = np.arange(n) // 2, np.arange(n) % 2
            counts, _ = draw_clusters(cluster)
            drawn = counts[:, cluster] / counts.sum(1, keepdims=True)
            weights = np.concatenate([leave_one_out_weights(cluster), drawn])
            n_lines = 1 + n // 2
            ends: dict[str, list[tuple[float, float]]] = {"before": [], "now": []}
            for _ in range(n_samples):
                of_queries = np.sqrt(0.5) * rng.normal(size=n // 2)[cluster]
                log_odds = of_queries + np.sqrt(0.5) * rng.normal(size=n) + distance * answer
                scores = torch.from_numpy(np.stack([np.zeros(n), log_odds], axis=1)).log_softmax(1)
                values = label_aurocs(scores, torch.from_numpy(answer), weights=weights)[:, 1]
                low, high = np.quantile(values[n_lines:], [0.025, 0.975])
                ends["before"].append((low, high))
                interval = leave_one_out_interval(values[:n_lines], cluster, bounds=(0.0, 1.0))
                ends["now"].append((interval.low, interval.high))
            cells = []
            for low_and_high in ends.values():
                low, high = np.array(low_and_high).T
                covered = np.mean((low <= truth) & (truth <= high))
                cells.append(f"{100 * covered:.0f}% ({np.median(high - low):.2f})")
            lines.append(f"| {truth:.2f} | {n} ({n // 2}) | " + " | ".join(cells) + " |")
    return lines


def random_sets_table() -> list[str]:
    """Return the lines of the table of coverage of a difference from random sets, by number of sets, for 30 prompts."""
    lines = ["| random sets | percentile (before) | icl_lens |", "|---|---|---|"]
    n, n_samples = 30, 1000
    for n_sets in (1, 2, 3, 5, 10, 20):
        rng = np.random.default_rng(n_sets)
        in_heads = rng.normal(size=(n, n_samples))
        in_sets = 0.5 * rng.normal(size=(n_sets, 1, n_samples)) + 0.5 * rng.normal(size=(n_sets, n, n_samples))
        queries, _ = draw_clusters(range(n))
        sets, _ = draw_clusters(range(n_sets), seed=1)
        queries, sets = queries / queries.sum(1, keepdims=True), sets / sets.sum(1, keepdims=True)
        covered, widths = {"before": 0, "now": 0}, {"before": [], "now": []}
        for sample in range(n_samples):
            random = in_sets[:, :, sample]
            drawn = queries @ in_heads[:, sample] - ((queries @ random.T) * sets).sum(1)
            over_prompts = bootstrap_interval(in_heads[:, sample] - random.mean(0))
            now = with_random_sets(over_prompts, random.mean(1))
            for name, (low, high) in {
                "before": np.quantile(drawn, [0.025, 0.975]),
                "now": (now.low, now.high),
            }.items():
                covered[name] += low <= 0 <= high
                widths[name].append(high - low)
        cells = []
        for name in ("before", "now"):
            width = np.median(widths[name])
            cells.append("none" if np.isnan(width) else f"{100 * covered[name] / n_samples:.0f}% ({width:.2f})")
        lines.append(f"| {n_sets} | " + " | ".join(cells) + " |")
    return lines


def selected_table() -> list[str]:
    """Return the lines of the table of how often fresh samples list the heads of a list, by `selected`.

    100 heads have true means drawn from an exponential distribution; prompts have normal noise of standard deviation 1,
    or log-normal noise. Lists have k = 10 heads.
    """
    n_heads, k, n_lists = 100, 10, 300
    groups = {
        "at least 99.5%": (0.995, 1.1),
        "90 to 99.5%": (0.9, 0.995),
        "50 to 90%": (0.5, 0.9),
        "below 50%": (0, 0.5),
    }
    lines = [
        "| noise | prompts | " + " | ".join(f"`selected` {name}" for name in groups) + " |",
        "|---|---|" + "---|" * 4,
    ]
    for noise in ("normal", "log-normal"):
        for n in (12, 60, 240):
            rng = np.random.default_rng(n)
            counts, _ = draw_clusters(range(n))
            shares: dict[str, list[float]] = {name: [] for name in groups}
            for _ in range(n_lists):
                truth = 0.3 * rng.exponential(size=n_heads)
                first, fresh = (_noisy(truth, noise, n, rng) for _ in range(2))
                selected = top_places(counts @ first, k).mean(0)
                listed_again = top_places(fresh.mean(0)[None], k)[0]
                for head in np.argsort(-first.mean(0))[:k]:
                    for name, (low, high) in groups.items():
                        if low <= selected[head] < high:
                            shares[name].append(listed_again[head])
            cells = [f"{100 * np.mean(listed):.0f}%" if len(listed) > 50 else "–" for listed in shares.values()]
            lines.append(f"| {noise} | {n} | " + " | ".join(cells) + " |")
    return lines


def _noisy(truth: np.ndarray, noise: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Return each head's score in each of n prompts."""
    if noise == "normal":
        return truth + rng.normal(size=(n, len(truth)))
    return truth * rng.lognormal(mean=-0.5, size=(n, len(truth)))


def cost_table() -> list[str]:
    """Return the lines of the table of seconds for the intervals of 576 heads over 100 and 1,000 prompts."""
    lines = ["| prompts | " + " | ".join(METHODS) + " |", "|---|" + "---|" * len(METHODS)]
    for n in (100, 1000):
        values = np.random.default_rng(0).normal(size=(n, 576))
        cells = []
        for method in METHODS.values():
            start = time.perf_counter()
            method(values, np.arange(n))
            cells.append(f"{time.perf_counter() - start:.2f} s")
        lines.append(f"| {n:,} | " + " | ".join(cells) + " |")
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "coverage": coverage_table,
    "auroc": auroc_table,
    "random sets": random_sets_table,
    "selected": selected_table,
    "cost": cost_table,
}


def refresh_intervals() -> None:
    """Compute the tables anew and store them in the page, between the comments that name them."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        block = "\n".join([f"<!-- {name} -->", "", *table(), "", f"<!-- end of {name} -->"])
        text = re.sub(f"<!-- {name} -->.*?<!-- end of {name} -->", block.replace("\\", r"\\"), text, flags=re.DOTALL)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    refresh_intervals()
