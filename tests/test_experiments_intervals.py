"""Intervals over clusters: coverage, exact bounds, p-values, several clusterings at once, heads within layers."""

import math

import numpy as np
import pandas as pd
import pytest

from experiments.lab.controls import beside, matched
from experiments.lab.frames import by_prompt
from experiments.lab.intervals import clusters_of, drawn_counts, holm, mean_estimate, resample
from icl_lens.errors import InputError
from icl_lens.metrics import bootstrap_interval


def clustered(seed: int, *, binary: bool) -> pd.Series:
    """Some 500 prompts about 33 words of very different frequency; six tenths of the variance are between words."""
    rng = np.random.default_rng(seed)
    word = np.repeat(np.arange(33), rng.integers(3, 28, 33))
    latent = rng.normal(0, math.sqrt(0.6), 33)[word] + rng.normal(0, math.sqrt(0.4), len(word))
    value = (latent > 0).astype(float) - 0.5 if binary else latent
    index = pd.MultiIndex.from_arrays([range(len(word)), word], names=["prompt", "query"])
    return pd.Series(value, index=index)


@pytest.mark.parametrize("binary", [False, True])
def test_intervals_cover_the_truth_as_often_as_they_say(binary: bool) -> None:
    """500 made-up data sets whose true mean is 0: 92 to 98 % of the 95 % intervals; of the old ones less than 60 %."""
    hits = old_hits = 0
    for seed in range(500):
        data = clustered(seed, binary=binary)
        drawn = resample(clusters_of(data.index), draws=200)
        found = drawn.estimate(drawn.mean(data.to_numpy()))
        hits += found.low <= 0 <= found.high
        assert (found.p(0.0) < 0.05) == (not found.low <= 0 <= found.high)
        old = bootstrap_interval(data.to_numpy(), draws=100)
        old_hits += old.low <= 0 <= old.high
    assert 0.92 <= hits / 500 <= 0.98
    assert old_hits / 500 < 0.6


def test_prompts_with_two_queries_are_drawn_by_both() -> None:
    """A word of either class moves all prompts that ask about it: one clustering alone misses the other's spread."""
    hits = {"both": 0, "query": 0}
    for seed in range(200):
        rng = np.random.default_rng(seed)
        query, other = rng.integers(25, size=400), rng.integers(25, size=400)
        value = rng.normal(size=25)[query] + rng.normal(size=25)[other] + rng.normal(size=400)
        for name, ids in (("both", [query, other]), ("query", [query])):
            drawn = resample(ids, draws=400)
            found = drawn.estimate(drawn.mean(value))
            hits[name] += found.low <= 0 <= found.high
    assert hits["both"] / 200 >= 0.92
    assert hits["query"] / 200 < 0.9


def test_heads_are_drawn_within_layers() -> None:
    """Controls that differ widely make an average over them unsure, however many prompts there are."""
    rng = np.random.default_rng(0)

    def table(controls: list[float]) -> pd.DataFrame:
        heads = [("located", "L1H0", 1.0), *(("random", f"L1H{i + 1}", mean) for i, mean in enumerate(controls))]
        parts = []
        for group, name, mean in heads:
            columns = {"prompt": range(200), "query": np.arange(200) % 50, "value": mean + rng.normal(0, 0.1, 200)}
            parts.append(pd.DataFrame(columns).assign(group=group, name=name, layer=1))
        return pd.concat(parts)

    alike, apart = (beside(table(controls), "value") for controls in ([0.5] * 4, [-1.0, 0.0, 1.0, 2.0]))
    sure, unsure = (one.drawn.estimate(one.located - one.random) for one in (alike, apart))
    assert (sure.value, unsure.value) == (pytest.approx(0.5, abs=0.03), pytest.approx(0.5, abs=0.03))
    assert sure.low > 0
    # By hand: the standard error of the mean of −1, 0, 1, 2.
    assert unsure.error == pytest.approx(np.std([-1, 0, 1, 2], ddof=1) / 2, rel=0.1)
    assert unsure.low < 0
    both = pd.concat([table([0.0, 0.0]), table([0.0, 0.0]).query("group == 'located'").assign(name="L1H9", value=5.0)])
    kind, these = (beside(both, "value", these=these) for these in (False, True))
    errors = [one.drawn.estimate(one.located).error for one in (kind, these)]
    assert errors == [pytest.approx(2.0, rel=0.1), pytest.approx(0.0, abs=0.05)], "1 and 5: half their difference"
    assert (alike.controls, alike.named, beside(table([0.5]), "value").named) == (
        4,
        "4 other heads (few)",
        "1 other head (few)",
    )


def test_layers_count_as_often_as_they_have_located_heads() -> None:
    """By hand: located 1, 2 | 6 and controls 0 | 10: 3 − (2 · 0 + 10) / 3."""
    heads = [("located", 0, 1.0), ("located", 0, 2.0), ("located", 5, 6.0), ("random", 0, 0.0), ("random", 5, 10.0)]
    table = pd.concat(
        pd.DataFrame({"prompt": range(4), "query": range(4), "value": value}).assign(
            group=group, layer=layer, name=f"{i}"
        )
        for i, (group, layer, value) in enumerate(heads)
    )
    found = beside(table, "value")
    assert found.located[0] - found.random[0] == pytest.approx(3 - 10 / 3)
    assert matched(table, "value").to_numpy() == pytest.approx(10 / 3)


def test_a_share_that_never_varies_gets_the_binomial_bound() -> None:
    """30 words, all right: no interval of no width. 0.025 ** (1/30), and twice the chance of 30 of 30 at 0.75."""
    index = pd.MultiIndex.from_arrays([range(90), np.arange(90) % 30], names=["prompt", "query"])
    found = mean_estimate(pd.Series(1.0, index=index), bounds=(0.0, 1.0))
    assert (found.low, found.high) == (pytest.approx(0.025 ** (1 / 30)), 1.0)
    assert found.p(0.75) == pytest.approx(2 * 0.75**30)
    assert found.p(found.low) == pytest.approx(0.05)
    never = mean_estimate(pd.Series(0.0, index=index), bounds=(0.0, 1.0))
    assert (never.low, never.high) == (0.0, pytest.approx(1 - 0.025 ** (1 / 30)))
    half = mean_estimate(pd.Series(0.5, index=index), bounds=(0.0, 1.0))
    assert (0.5 - half.low) == pytest.approx(half.high - 0.5) == pytest.approx((1 - 0.025 ** (1 / 30)) / 2)
    still = mean_estimate(pd.Series(0.0, index=index), bounds=(-1.0, 1.0))
    assert (still.low, still.high, still.p(-0.02)) == (0.0, 0.0, pytest.approx(2**-29))


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (10, 2.2281), (32, 2.0369), (120, 1.9799)]
)
def test_students_t(freedom: int, quantile: float) -> None:
    """A mean of independent numbers: the printed table's quantile times the standard error; p is 5 % at its ends."""
    found = mean_estimate(np.random.default_rng(0).normal(size=freedom + 1))
    assert found.high - found.value == pytest.approx(quantile * found.error, rel=1e-4)
    assert found.p(found.low) == pytest.approx(0.05, abs=1e-6)
    assert found.p(found.value) == pytest.approx(1.0)


def test_counts_have_the_variance_of_the_whole() -> None:
    """n − 1 of n, rescaled: the variance of a mean of n is that of the sample variance, not (n − 1) / n of it."""
    counts = drawn_counts(3, 200_000, np.random.default_rng(0))
    assert counts.sum(1) == pytest.approx(3)
    means = counts @ np.array([0.0, 1.0, 5.0]) / 3
    assert means.var() == pytest.approx(np.var([0, 1, 5], ddof=1) / 3, rel=0.02)


def test_holm_against_the_definition() -> None:
    """Slowly: the smallest of m times m, the next times m − 1, …, never less than the one before."""
    p = np.random.default_rng(0).uniform(size=20).round(2).tolist()
    least, expected = 0.0, {}
    for rank, i in enumerate(sorted(range(20), key=lambda i: p[i])):
        least = max(least, min(1.0, (20 - rank) * p[i]))
        expected[i] = least
    assert holm(p) == pytest.approx([expected[i] for i in range(20)])
    assert holm([0.01, math.nan]) == [0.02, 1.0]
    assert holm([]) == []


def test_the_same_data_give_the_same_interval() -> None:
    assert mean_estimate(clustered(1, binary=False)) == mean_estimate(clustered(1, binary=False))


def test_values_that_do_not_say_what_was_asked_are_refused() -> None:
    table = pd.DataFrame({"prompt": [0, 1, 2], "value": [1.0, 2.0, 3.0]})
    with pytest.raises(InputError, match="share a query"):
        mean_estimate(by_prompt(table, "value"))
