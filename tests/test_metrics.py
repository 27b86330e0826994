"""Metrics against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from icl_lens.errors import InputError
from icl_lens.intervals import bootstrap_interval, interval_table
from icl_lens.metrics import (
    accuracy,
    bias_gap,
    is_correct,
    label_log_odds,
    majority_label,
    mean_reciprocal_rank,
    ranks_with_ties,
    recent_label,
    spearman,
)

SCORES = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -2.0, -1.0], [-1.0, -1.5, -2.0]])
CHOICES = torch.tensor([[True, True, False], [True, True, True], [False, True, True]])


def test_accuracy_looks_at_a_prompts_own_labels_only():
    answer = torch.tensor([0, 2, 1])
    assert is_correct(SCORES, answer).tolist() == [False, True, False]
    assert is_correct(SCORES, answer, choices=CHOICES).tolist() == [True, True, True]
    assert accuracy(SCORES, answer) == pytest.approx(1 / 3)
    assert accuracy(SCORES, answer, choices=CHOICES) == 1.0


@pytest.mark.parametrize("answer", [[0, -1, 1], [2, 2, 1]])
def test_an_answer_that_is_no_choice_is_refused(answer):
    with pytest.raises(InputError, match="an answer among its labels"):
        accuracy(SCORES, torch.tensor(answer), choices=CHOICES)


def test_mean_reciprocal_rank_leaves_out_what_is_missing():
    assert mean_reciprocal_rank(torch.tensor([[1, 2], [0, 4]])) == pytest.approx((1 + 1 / 2 + 1 / 4) / 3)
    assert math.isnan(mean_reciprocal_rank(torch.tensor([0, 0])))


def test_log_odds_are_against_the_other_labels_together():
    probabilities = torch.tensor([[0.5, 0.25, 0.125], [0.1, 0.2, 0.3]])
    odds = label_log_odds(probabilities.log(), torch.tensor([0, 2]))
    torch.testing.assert_close(odds, torch.tensor([0.5 / 0.375, 0.3 / 0.3]).log())
    two = torch.tensor([[True, True, False], [False, True, True]])
    odds = label_log_odds(probabilities.log(), torch.tensor([0, 2]), choices=two)
    torch.testing.assert_close(odds, torch.tensor([2.0, 1.5]).log())
    with pytest.raises(InputError, match="only one label"):
        label_log_odds(probabilities.log(), torch.tensor([0, 2]), choices=two & torch.tensor([[True, False, True]]))
    with pytest.raises(InputError, match="some are -1"):
        label_log_odds(probabilities.log(), torch.tensor([0, -1]))


def test_majority_and_recent_labels():
    index = torch.tensor([[0, 0, 1, 2], [1, 0, 1, 0], [1, 1, 0, -1], [2, -1, -1, -1]])
    assert majority_label(index).tolist() == [0, -1, 1, 2]
    assert recent_label(index).tolist() == [2, 0, 0, 2]


def test_bias_gap_is_the_difference_of_two_accuracies():
    #            right when favored: 2 of 3; right when not: 1 of 2; the last prompt favors no label
    correct = torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    answer = torch.tensor([0, 1, 0, 0, 0, 1])
    favored = torch.tensor([0, 1, 0, 1, 1, -1])
    assert bias_gap(correct, answer, favored) == pytest.approx(2 / 3 - 1 / 2)
    with pytest.raises(InputError, match="got 3 and 0"):
        bias_gap(correct[:3], answer[:3], favored[:3])


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        _, low, high = bootstrap_interval(rng.exponential(1.0, size=100), draws=400)
        hits += low <= 1.0 <= high
    assert 175 <= hits <= 199  # 95% of 200 is 190


def test_clusters_are_drawn_whole():
    """Ten copies of every value count as one: the interval is mean ± 1.96 standard errors over clusters."""
    values = np.random.default_rng(4).normal(size=400)
    value, low, high = bootstrap_interval(values.repeat(10), clusters=list(np.arange(400).repeat(10)))
    error = values.std(ddof=1) / math.sqrt(400)
    assert value == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((value - 1.96 * error, value + 1.96 * error), abs=0.2 * error)
    assert math.isnan(bootstrap_interval([0.0, 1.0], clusters=["one", "one"]).low)


def test_a_table_has_the_interval_of_every_entry():
    values = torch.randn(12, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clusters = [f"query {i % 5}" for i in range(12)]
    table = interval_table(values, {"kind": ["x", "y"], "layer": range(3)}, clusters, value="effect")
    assert table.columns.tolist() == ["kind", "layer", "effect", "low", "high"]
    for kind, layer, *interval in table.itertuples(index=False):
        assert interval == pytest.approx([*bootstrap_interval(values[:, "xy".index(kind), layer], clusters=clusters)])
    assert interval_table(values.numpy(), {"kind": "xy", "layer": range(3)}, clusters)["value"].equals(table["effect"])
    for axes, queries in (({"kind": "xy", "layer": range(4)}, clusters), ({"kind": "xy", "layer": range(3)}, ["one"])):
        with pytest.raises(InputError, match=r"shape \[prompt kind layer\] = "):
            interval_table(values, axes, queries)


def test_all_correct_is_not_certainty():
    """An accuracy of 0.05 ** (1 / 30) or less gives 30 correct answers in at most 5% of samples."""
    right = bootstrap_interval(np.ones(60), clusters=list(range(30)) * 2, bounds=(0.0, 1.0))
    assert tuple(right) == pytest.approx((1.0, 0.05 ** (1 / 30), 1.0))


def test_rows_are_drawn_together():
    """A ratio of two columns that are proportional has no uncertainty at all."""
    before = np.random.default_rng(3).uniform(1, 2, size=50)
    rows = np.stack([before, 0.8 * before], axis=1)
    reduction = bootstrap_interval(rows, statistic=lambda x: float(1 - x[:, 1].mean() / x[:, 0].mean()))
    assert tuple(reduction) == pytest.approx((0.2, 0.2, 0.2))


def test_draws_without_a_value_are_left_out_unless_there_are_many():
    few = np.array([1.0] * 5 + [0.0] * 5)
    share = bootstrap_interval(few, statistic=lambda x: float(1 / x.mean()) if x.any() else math.nan)
    assert math.isfinite(share.low)
    rare = np.array([1.0] + [0.0] * 9)  # a third of the draws miss the only one
    share = bootstrap_interval(rare, statistic=lambda x: float(1 / x.mean()) if x.any() else math.nan)
    assert share.value == 10.0
    assert math.isnan(share.low)


def test_the_same_seed_gives_the_same_interval_however_it_is_chunked(monkeypatch):
    values = torch.rand(30)
    whole = bootstrap_interval(values, seed=5)
    monkeypatch.setattr("icl_lens.intervals.MAX_DRAWN_VALUES", 100)
    assert bootstrap_interval(values, seed=5) == pytest.approx(whole)
    assert bootstrap_interval(values, seed=6).low != whole.low


def test_equal_values_share_their_rank():
    assert ranks_with_ties(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    values = torch.randint(5, (40,), generator=torch.Generator().manual_seed(0)).double()
    below, equal = (values[None] < values[:, None]).sum(1), (values[None] == values[:, None]).sum(1)
    assert ranks_with_ties(values).tolist() == (below + (equal - 1) / 2).tolist()


def test_rank_correlation_is_the_correlation_of_ranks():
    first, second = torch.randint(9, (2, 50), generator=torch.Generator().manual_seed(1)).double()
    ranks = torch.stack([ranks_with_ties(first), ranks_with_ties(second)])
    assert float(spearman(first, second)) == pytest.approx(float(torch.corrcoef(ranks)[0, 1]), abs=1e-12)
    many = spearman(first, torch.stack([second, -(first**3), torch.ones(50)]).double())
    assert many[:2].tolist() == pytest.approx([float(spearman(first, second)), -1])
    assert math.isnan(many[2])
