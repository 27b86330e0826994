"""Intervals over prompts: the recipe of `icl_lens.foundation.intervals`, draw by draw, and how often it covers
the truth.
"""

import math

import numpy as np
import pytest
import torch
from scipy.stats import t as student

from icl_lens.foundation import intervals
from icl_lens.foundation.intervals import (
    MIN_CLUSTERS,
    Interval,
    beside_random_sets,
    bootstrap_interval,
    leave_one_out_interval,
    leave_one_out_weights,
    mean_intervals,
    resampled_sums,
    student_quantile,
    with_random_sets,
)

SIZES = [1, 1, 2, 3, 1, 6, 1]
CLUSTERS = np.repeat(np.arange(7), SIZES)


def jackknife_error(groups, center):
    """Return the jackknife's standard error of the mean of some groups of rows, around a center."""
    n = len(groups)
    squares = 0.0
    for left_out in range(n):
        without = np.concatenate([rows for number, rows in enumerate(groups) if number != left_out])
        squares += (without.mean() - center) ** 2
    return math.sqrt((n - 1) / n * squares)


def by_draws(values, clusters, level=0.95):
    """Compute the studentized interval of a mean of clusters of one size, with rows copied in every
    draw.
    """
    groups = [values[clusters == cluster] for cluster in np.unique(clusters)]
    n, mean = len(groups), values.mean()
    error = jackknife_error(groups, mean)
    most = 2 * student.ppf(0.5 + level / 2, n - 1)
    studentized = []
    for counts in np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=2000):
        drawn = [groups[number] for number in range(n) for _ in range(counts[number])]
        change = np.concatenate(drawn).mean() - mean
        drawn_error = jackknife_error(drawn, mean + change)
        t = (
            math.inf * np.sign(change)
            if drawn_error < 1e-12 and change
            else change / drawn_error
            if change
            else 0.0
        )
        studentized.append(min(max(t, -most), most))
    low, high = np.quantile(studentized, [(1 - level) / 2, (1 + level) / 2])
    return mean - high * error, mean - low * error


@pytest.mark.parametrize(("kind", "level"), [("skewed", 0.95), ("skewed", 0.99), ("rare", 0.95)])
def test_ends_are_those_of_a_loop_over_draws(kind, level):
    rng = np.random.default_rng(3)
    values = rng.lognormal(size=24) if kind == "skewed" else (np.arange(24) == 5).astype(float)
    clusters = np.arange(24) // 2
    interval = bootstrap_interval(values, clusters=clusters, level=level)
    assert (interval.low, interval.high) == pytest.approx(by_draws(values, clusters, level))


def test_the_error_of_unequal_clusters_is_the_jackknifes(monkeypatch):
    """With all draws at the limit, an end is 2 · t · the jackknife's standard error away."""
    values = np.random.default_rng(0).normal(size=len(CLUSTERS))
    monkeypatch.setattr(intervals, "MAX_REACH", 1e-6)
    value, low, high = bootstrap_interval(values, clusters=CLUSTERS)
    error = jackknife_error([values[cluster == CLUSTERS] for cluster in range(7)], values.mean())
    assert value == pytest.approx(values.mean())
    assert (low - value, high - value) == pytest.approx(
        np.array([-1, 1]) * 1e-6 * student.ppf(0.975, 6) * error
    )


def test_columns_statistics_and_weights_give_the_same_interval():
    """A mean is a column, the default statistic, a given statistic, and a statistic of weighted
    rows.
    """
    values = np.random.default_rng(1).exponential(size=(len(CLUSTERS), 70))
    columns = np.stack(mean_intervals(values, CLUSTERS), axis=1)
    for column in (0, 69):
        rows = values[:, column]
        expected = pytest.approx(columns[column].tolist())
        assert [*bootstrap_interval(torch.from_numpy(rows), clusters=CLUSTERS)] == expected
        assert [
            *bootstrap_interval(rows, clusters=CLUSTERS, statistic=lambda x: float(x.mean()))
        ] == expected
        assert [
            *leave_one_out_interval(leave_one_out_weights(CLUSTERS) @ rows, CLUSTERS)
        ] == expected


def test_the_order_of_prompts_does_not_matter():
    values = np.random.default_rng(1).exponential(size=len(CLUSTERS))
    order = np.random.default_rng(2).permutation(len(values))
    names = np.array(["c", "a", "g", "b", "f", "d", "e"])[CLUSTERS]
    expected = bootstrap_interval(values, clusters=names)
    assert [*bootstrap_interval(values[order], clusters=names[order])] == pytest.approx([*expected])


COVERED = {"normal": (92.5, 97.5), "skewed": (91.0, 97.0), "unequal": (90.5, 96.5)}


@pytest.mark.parametrize("kind", COVERED)
def test_intervals_cover_the_truth_about_as_often_as_they_say(kind):
    """1,000 samples of 30 prompts; percentile intervals cover 92.2%, 88.0% and 88.9%."""
    rng = np.random.default_rng(5)
    clusters = np.arange(30)
    values, truth = rng.normal(size=(30, 1000)), 0.0
    if kind == "skewed":
        values, truth = rng.lognormal(sigma=0.8, size=(30, 1000)), math.exp(0.32)
    if kind == "unequal":
        clusters = np.concatenate([np.arange(10), np.zeros(8, int), np.ones(6, int), np.full(6, 2)])
        values += rng.normal(size=(10, 1000))[clusters]
    _, low, high = mean_intervals(values, clusters)
    covered = 100 * np.mean((low <= truth) & (truth <= high))
    assert COVERED[kind][0] <= covered <= COVERED[kind][1]


def test_all_correct_is_not_certainty():
    """An accuracy of 0.05 ** (1 / 30) or less gives 30 correct answers in at most 5% of samples."""
    right = bootstrap_interval(np.ones(60), clusters=list(range(30)) * 2, bounds=(0.0, 1.0))
    assert tuple(right) == pytest.approx((1.0, 0.05 ** (1 / 30), 1.0))
    columns = mean_intervals(np.ones((60, 2)), list(range(30)) * 2, bounds=(0.0, 1.0))
    assert np.stack(columns)[:, 1] == pytest.approx(np.array([*right]))


def test_ends_stay_within_bounds_and_are_finite():
    """One wrong answer of 12 is missing in a third of the draws, which then have no spread."""
    nearly = bootstrap_interval(np.array([0.0] + [1.0] * 11), bounds=(0.0, 1.0))
    assert 0.4 < nearly.low < 11 / 12 < nearly.high <= 1.0
    assert bootstrap_interval(np.array([0.0, 1.0] * 2), bounds=(0.0, 1.0)) == Interval(
        0.5, 0.0, 1.0
    )


@pytest.mark.parametrize("n", [2, 3, MIN_CLUSTERS])
def test_a_few_clusters_have_no_interval(n):
    values, has_interval = np.linspace(0.2, 0.9, n), n >= MIN_CLUSTERS
    intervals = [
        bootstrap_interval(values),
        bootstrap_interval(values, bounds=(0.0, 1.0)),
        bootstrap_interval(np.ones(n), bounds=(0.0, 1.0)),
        leave_one_out_interval(leave_one_out_weights(range(n)) @ values, range(n)),
    ]
    for interval in intervals:
        assert math.isfinite(interval.value)
        for widened in (interval, with_random_sets(interval, values, bounds=(0.0, 1.0))):
            assert math.isfinite(widened.low) == math.isfinite(widened.high) == has_interval
    for bounds in (None, (0.0, 1.0)):
        _, low, high = mean_intervals(values[:, None], range(n), bounds=bounds)
        assert np.isfinite([low, high]).all() == has_interval


def test_no_interval_for_one_cluster():
    assert math.isnan(bootstrap_interval([0.0, 1.0], clusters=["one", "one"]).low)
    assert np.isnan(mean_intervals(np.ones((3, 2)), ["one"] * 3)[1]).all()
    assert math.isnan(
        leave_one_out_interval(leave_one_out_weights(["one"] * 3) @ np.arange(3.0), ["one"] * 3).low
    )
    assert not Interval(1.0, math.nan, math.nan).excludes_zero
    infinite = mean_intervals(
        np.array([[1.0, np.nan], [2.0, 1.0], [4.0, 2.0], [3.0, 0.0]]), range(4)
    )
    assert np.isfinite(np.stack(infinite)[:, 0]).all()
    assert np.isnan(np.stack(infinite)[:, 1]).all()


def test_a_ratio_of_proportional_columns_is_certain():
    before = np.random.default_rng(3).uniform(1, 2, size=50)
    rows = np.stack([before, 0.8 * before], axis=1)
    reduction = bootstrap_interval(
        rows, statistic=lambda x: float(1 - x[:, 1].mean() / x[:, 0].mean())
    )
    assert tuple(reduction) == pytest.approx((0.2, 0.2, 0.2))


def test_a_statistic_that_one_cluster_makes_possible_has_no_interval():
    def inverse(rows):
        return float(1 / rows.mean()) if rows.any() else math.nan

    assert math.isfinite(bootstrap_interval(np.array([1.0] * 5 + [0.0] * 5), statistic=inverse).low)
    only_one = bootstrap_interval(np.array([1.0] + [0.0] * 9), statistic=inverse)
    assert only_one.value == 10.0
    assert math.isnan(only_one.low)


def test_the_seed_decides():
    values = np.random.default_rng(0).exponential(size=30)
    assert bootstrap_interval(values, seed=5) == bootstrap_interval(values, seed=5)
    assert bootstrap_interval(values, seed=6).low != bootstrap_interval(values, seed=5).low


def test_many_clusters_are_merged(monkeypatch):
    """Their interval is about the same, in less memory."""
    values = np.random.default_rng(0).normal(size=(600, 1))
    ends = np.stack(mean_intervals(values, range(600)))
    monkeypatch.setattr(intervals, "MAX_CLUSTERS", 200)
    merged = np.stack(mean_intervals(values, range(600)))
    assert len(leave_one_out_weights(range(600))) == 201
    assert merged == pytest.approx(ends, abs=0.15 * float(ends[2, 0] - ends[1, 0]))
    assert not np.array_equal(merged, ends)


def test_products_of_counts_are_exact():
    """Rows in another order have the same bytes, and so have equal columns."""
    rng = np.random.default_rng(0)
    counts, sums = (
        rng.integers(9, size=(50, 400)).astype(float),
        rng.normal(size=(400, 3)) * [1e-9, 1.0, 1e7],
    )
    sums = np.concatenate([sums, sums], axis=1)
    order = rng.permutation(400)
    drawn = resampled_sums(counts, sums)
    np.testing.assert_array_equal(resampled_sums(counts[:, order], sums[order]), drawn)
    np.testing.assert_array_equal(drawn[:, :3], drawn[:, 3:])
    np.testing.assert_allclose(drawn, counts @ sums, rtol=1e-9, atol=1e-15)


def test_random_sets_may_be_tensors():
    sets = [0.1, 0.3, 0.2, 0.4]
    expected = tuple(beside_random_sets(1.0, sets))
    difference = beside_random_sets(torch.tensor(1.0), torch.tensor(sets))
    assert tuple(difference) == pytest.approx(expected, rel=1e-6)
    interval = Interval(0.5, 0.4, 0.6)
    assert with_random_sets(interval, torch.tensor(sets)) == with_random_sets(
        interval, np.array(sets, dtype=np.float32)
    )


def test_random_sets_widen_the_interval():
    """By Student's t interval of their mean; both distances add up in squares."""
    over_prompts = Interval(1.0, 0.7, 1.4)
    means = np.array([0.1, 0.5, 0.2, 0.4])
    reach = student.ppf(0.975, 3) * means.std(ddof=1) / 2
    expected = (1.0, 1.0 - math.hypot(0.3, reach), 1.0 + math.hypot(0.4, reach))
    assert tuple(with_random_sets(over_prompts, means)) == pytest.approx(expected)
    twice = with_random_sets(over_prompts, means, means)
    assert twice.low == pytest.approx(1.0 - math.hypot(0.3, reach, reach))
    assert with_random_sets(over_prompts, means, bounds=(0.0, 1.2)).high == 1.2
    for few in (means[:2], means[:1], means[:0]):
        assert math.isnan(with_random_sets(over_prompts, means, few).low)
    assert with_random_sets(over_prompts) == over_prompts


@pytest.mark.parametrize("freedom", [1, 2, 3, 11, 1999])
def test_students_quantile(freedom):
    for probability in (0.8, 0.975, 0.995):
        assert student_quantile(probability, freedom) == pytest.approx(
            student.ppf(probability, freedom), rel=1e-6
        )
