"""The fix of a label bias by hand and with known answers, the choice of its strength, and shares of a whole."""

import numpy as np
import pytest
from tiny_study import labels_of, log_odds, tiny_study

import icl_lens as il
from experiments.findings.recency_bias import attention_on_true
from experiments.framework import label_bias
from experiments.framework.arrangements import prompts_by_frequency
from experiments.framework.estimate import compare_ratios
from experiments.framework.label_bias import NO_FIX, Pairs, answered, best_strengths, choose_strengths, fix_rows
from experiments.framework.study import Scores, Study
from experiments.framework.tasks import PAPER_TASKS


def test_the_fix_by_hand(gpt2, tmp_path, monkeypatch):
    """The fix multiplies labels' attention from the last position by (mean frequency / own frequency) ** strength."""
    monkeypatch.setattr("experiments.framework.study.MAX_ROWS", 5)
    study, heads = tiny_study(gpt2, tmp_path), [il.Head(0, 1), il.Head(1, 0), il.Head(2, 2)]
    batch = study.tokenize(prompts_by_frequency(study.prompts_with(3)[1], 2, 0)["minority"])
    fixes = [NO_FIX, (heads, {"majority": 0.5})]
    ours = answered(study, Pairs(batch, batch), fixes)[0].odds
    weights = [[(2 / labels.count(one)) ** 0.5 for one in labels] for labels in map(labels_of, batch.prompts)]
    with il.edited(gpt2, il.Reweight(heads, weights, renormalize=True), batch=batch):
        fixed = il.metrics.label_log_odds(il.score(gpt2, batch), batch.answer)
    assert ours[:, 0] == pytest.approx([log_odds(gpt2, batch, row) for row in range(len(batch))], abs=1e-5)
    assert ours[:, 1] == pytest.approx(fixed.numpy(), abs=1e-5)
    assert np.abs(ours[:, 1] - ours[:, 0]).max() > 1e-3


def test_attention_on_true_labels_by_hand(gpt2, tmp_path):
    study, heads = tiny_study(gpt2, tmp_path, n=4), [il.Head(0, 1), il.Head(2, 2)]
    batch = study.halves("order")[1]
    pattern = il.capture(gpt2, batch).pattern
    for row, prompt in enumerate(batch.prompts):
        places = zip(labels_of(prompt), batch.label_positions[row].tolist(), strict=True)
        own = [place for label, place in places if label == prompt.answer]
        by_hand = [float(pattern[row, head.layer, head.head, place]) for head in heads for place in own]
        assert attention_on_true(study, batch, heads)[row] == pytest.approx(sum(by_hand) / len(heads), abs=1e-6)


def test_strengths_are_those_of_the_library(icl_mini, monkeypatch):
    """`il.choose_strength` for each set, where no strength costs too much."""
    monkeypatch.setattr(label_bias, "MAX_ACCURACY_DROP", 1.0)
    study = Study(icl_mini, PAPER_TASKS[0], 12)
    found = prompts_by_frequency(study.prompts_with(3)[0], 2, 0)
    pairs = Pairs(study.tokenize(found["majority"]), study.tokenize(found["minority"]))
    sets = [study.located, *study.random_sets(study.located, 1)]
    by_library = [
        il.choose_strength(
            icl_mini, pairs.favored, pairs.unfavored, heads, fix="majority", max_accuracy_drop=1.0
        ).strength
        for heads in sets
    ]
    assert choose_strengths(study, pairs, sets, "majority") == by_library


def test_a_strength_that_costs_accuracy_is_not_chosen():
    """The strongest removes the bias but loses 10 of 100 answers; the next loses 10 favored and gains 10 others.

    In the second set of heads, no strength reduces the bias.
    """
    odds = np.tile([2.0, 2.0, 1.5, 1.0, 0.0, 2.0, 2.1, 2.2, 2.3], (50, 1))
    favored, unfavored = np.ones((50, 9)), np.zeros((50, 9))
    favored[:10, 3:5] = 0
    unfavored[:10, 3] = 1
    assert best_strengths(Scores(odds, favored), Scores(0 * odds, unfavored)) == [0.75, 0]


def test_the_arithmetic_of_a_fix():
    """A bias of 2 nats; located heads remove half, one random set nothing and one makes it a tenth larger."""
    favored = Scores(np.tile([3.0, 2.5, 3.0, 3.2], (30, 1)), np.tile([1.0, 0.9, 1.0, 1.0], (30, 1)))
    unfavored = Scores(np.tile([1.0, 1.5, 1.0, 1.0], (30, 1)), np.tile([0.5, 0.7, 0.5, 0.5], (30, 1)))
    rows = fix_rows(favored, unfavored, np.arange(30), {"ranking": "contrast"})
    found = {row.measure: (round(row.quantity, 9), round(row.control, 9)) for row in rows}
    assert found == {"removed": (0.5, -0.05), "fixed": (0.2, 0.5), "favored": (0.9, 1.0), "unfavored": (0.7, 0.5)}
    assert "not above zero" in fix_rows(favored, favored, np.arange(30), {"ranking": "contrast"})[0].note


def test_shares_with_known_answers():
    clusters, rng = np.arange(60) // 2, np.random.default_rng(0)
    whole, noise = 2 + rng.normal(0, 0.3, 60), rng.normal(0, 1, 60)
    exact = compare_ratios((0.25 * whole, whole), (0.1 * whole, whole), clusters, total="it")
    assert (exact.quantity, exact.control, exact.low, exact.high) == pytest.approx((0.25, 0.1, 0.15, 0.15))
    noisy = compare_ratios((0.25 * whole + noise, whole), (0.1 * whole, whole), clusters, total="it")
    assert noisy.quantity == pytest.approx((0.25 * whole + noise).mean() / whole.mean())
    error = noise.reshape(30, 2).mean(1).std(ddof=1) / 30**0.5 / 2  # of the mean noise, over a whole of 2
    assert noisy.high - noisy.low == pytest.approx(2 * 2.045 * error, rel=0.1)
    assert "the bias is not above zero" in compare_ratios((noise, noise), (noise, noise), clusters, total="the bias")
