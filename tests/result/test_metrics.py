"""Metrics against numbers worked out by hand."""

import math

import pytest
import torch

from icl_lens.errors import InputError
from icl_lens.foundation.intervals import bootstrap_interval, interval_table
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
    assert mean_reciprocal_rank(torch.tensor([[1, 2], [0, 4]])) == pytest.approx(
        (1 + 1 / 2 + 1 / 4) / 3
    )
    assert math.isnan(mean_reciprocal_rank(torch.tensor([0, 0])))


def test_log_odds_are_against_the_other_labels_together():
    probabilities = torch.tensor([[0.5, 0.25, 0.125], [0.1, 0.2, 0.3]])
    odds = label_log_odds(probabilities.log(), torch.tensor([0, 2]))
    torch.testing.assert_close(odds, torch.tensor([0.5 / 0.375, 0.3 / 0.3]).log())
    two = torch.tensor([[True, True, False], [False, True, True]])
    odds = label_log_odds(probabilities.log(), torch.tensor([0, 2]), choices=two)
    torch.testing.assert_close(odds, torch.tensor([2.0, 1.5]).log())
    with pytest.raises(InputError, match="only one label"):
        label_log_odds(
            probabilities.log(),
            torch.tensor([0, 2]),
            choices=two & torch.tensor([[True, False, True]]),
        )
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


def test_a_table_has_the_interval_of_every_entry():
    values = torch.randn(12, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clusters = [f"query {i % 5}" for i in range(12)]
    table = interval_table(
        values, {"kind": ["x", "y"], "layer": range(3)}, clusters, value="effect"
    )
    assert table.columns.tolist() == ["kind", "layer", "effect", "low", "high"]
    for kind, layer, *interval in table.itertuples(index=False):
        assert interval == pytest.approx(
            [*bootstrap_interval(values[:, "xy".index(kind), layer], clusters=clusters)]
        )
    assert interval_table(values.numpy(), {"kind": "xy", "layer": range(3)}, clusters)[
        "value"
    ].equals(table["effect"])
    for axes, queries in (
        ({"kind": "xy", "layer": range(4)}, clusters),
        ({"kind": "xy", "layer": range(3)}, ["one"]),
    ):
        with pytest.raises(InputError, match=r"shape \[prompt kind layer\] = "):
            interval_table(values, axes, queries)


def test_equal_values_share_their_rank():
    assert ranks_with_ties(torch.tensor([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    values = torch.randint(5, (40,), generator=torch.Generator().manual_seed(0)).double()
    below, equal = (values[None] < values[:, None]).sum(1), (values[None] == values[:, None]).sum(1)
    assert ranks_with_ties(values).tolist() == (below + (equal - 1) / 2).tolist()


def test_rank_correlation_is_the_correlation_of_ranks():
    first, second = torch.randint(9, (2, 50), generator=torch.Generator().manual_seed(1)).double()
    ranks = torch.stack([ranks_with_ties(first), ranks_with_ties(second)])
    assert float(spearman(first, second)) == pytest.approx(
        float(torch.corrcoef(ranks)[0, 1]), abs=1e-12
    )
    many = spearman(first, torch.stack([second, -(first**3), torch.ones(50)]).double())
    assert many[:2].tolist() == pytest.approx([float(spearman(first, second)), -1])
    assert math.isnan(many[2])
