"""Shared heads: overlap expected by chance, by enumeration; ranking in each draw; a model that cannot do the task."""

from itertools import combinations, product

import numpy as np
import pytest
from tiny_study import tiny_study

from experiments.findings.shared_heads import FINDING
from experiments.framework.overlap import drawn_lists, expected_overlap, overlap
from experiments.framework.run import measure
from icl_lens.metrics import weights_with_data


def lists_of(counts: list[int], n_heads: int) -> list[np.ndarray]:
    """Return every list with these numbers of heads per layer, each as [1 layer head] booleans."""
    found = []
    for chosen in product(*(combinations(range(n_heads), count) for count in counts)):
        one = np.zeros((1, len(counts), n_heads), dtype=bool)
        for layer, heads in enumerate(chosen):
            one[0, layer, list(heads)] = True
        found.append(one)
    return found


def test_expected_overlap_is_the_mean_over_all_random_lists():
    first, second = lists_of([2, 1, 0], 4), lists_of([1, 0, 2], 4)
    observed = np.mean([overlap(one, other) for one in first for other in second])
    assert expected_overlap(first[0], second[0])[0] == pytest.approx(observed)
    assert overlap(first[0], first[0])[0] == 1


def test_heads_are_ranked_again_in_every_draw():
    values = np.random.default_rng(0).normal(size=(12, 2, 3))
    clusters = np.arange(12) // 3
    lists = drawn_lists(values, clusters, 2, seed=5)
    weights = weights_with_data(clusters, seed=5)
    for draw in (0, 1, 700, 2000):
        means = sum(weight * value for weight, value in zip(weights[draw], values, strict=True)).flatten()
        assert {*np.flatnonzero(lists[draw])} == {*np.argsort(means)[-2:]}
    assert (lists.sum((1, 2)) == 2).all()
    assert (drawn_lists(values, clusters, 2, seed=6)[1:] != lists[1:]).any()  # drawn independently of each other


def test_a_model_that_does_nothing_shares_nothing(gpt2, tmp_path):
    (row,) = measure(FINDING, tiny_study(gpt2, tmp_path, n=24)).rows
    assert np.isnan(row.quantity)
    assert "does not do the task" in row.note
