"""The two fixes together, and the choice of their strength."""

import sys

import pytest
import torch
from shared import PROMPTS
from tolerance import assert_close

import icl_lens as il
from icl_lens.measures.debias import balancing_weights

HEADS = [il.Head(0, 1), il.Head(1, 3)]


@pytest.fixture(scope="module")
def model(load_tiny):
    return load_tiny("llama_gqa")


@pytest.fixture(scope="module")
def batch(model):
    return il.tokenize(model, PROMPTS, prepend_bos=False)


def test_weights_by_hand(batch):
    """Labels are bar bar foo foo, bar bar foo, and foo bar; weights are labels' mean frequency over a label's own."""
    weights = balancing_weights(batch)
    expected = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.75, 0.75, 1.5, 1.0], [1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(balancing_weights(batch, 0.5), expected.sqrt())
    with pytest.raises(il.InputError, match=r"got -1\.0"):
        balancing_weights(batch, -1.0)


@pytest.mark.parametrize(
    ("bias", "n_correct", "others", "max_drop", "strength"),
    [
        ([1.0, 0.4, -0.1, 0.0], [3, 3, 3, 2], False, 0.01, 0.75),
        ([1.0, 0.4, -0.1, 0.0], [3, 3, 3, 2], False, 0.5, 1.0),
        ([0.4 + 2e-7, 0.4 + 1e-7, 0.5, 0.4], [3, 3, 3, 3], False, 0.01, 0.0),  # rounding does not choose
        ([1.0, 0.5, 0.25, 0.0], [3, 3, 3, 3], True, 0.01, 0.75),  # another class's prompts are lost at 1.0
    ],
)
def test_the_strength_of_smallest_bias_that_keeps_accuracy(
    model, batch, monkeypatch, bias, n_correct, others, max_drop, strength
):
    strengths = (0.0, 0.5, 0.75, 1.0)
    favored, unfavored, other = batch, batch[[0, 1, 2]], batch[[0, 1]]

    def scored(model, batch, heads, fix, tried):
        assert tried == strengths
        correct = [n_correct[i] if batch is not other else 2 - (one == 1.0) for i, one in enumerate(tried)]
        odds = [one / 2 * (1 if batch is favored else -1) for one in bias]
        n = len(batch)
        return [(torch.full((n,), odd).double(), torch.arange(n) < k) for odd, k in zip(odds, correct, strict=True)]

    monkeypatch.setattr(sys.modules["icl_lens.measures.debias"], "_scored", scored)
    options = {"fix": "recency", "strengths": strengths[1:], "max_accuracy_drop": max_drop}
    batches = [other] if others else []
    found = il.choose_strength(model, favored, unfavored, HEADS, accuracy_batches=batches, **options)
    assert found.strength == strength
    assert found.bias == pytest.approx(bias)
    lost = [(3 - k) / 3 for k in n_correct] if not others else [0, 0, 0, 0.5]
    assert found.accuracy_drop == pytest.approx(lost)
    assert found.accuracy == pytest.approx([1, 1, 1, 7 / 8] if others else [1 - one for one in lost])
    assert found.to_frame()["accuracy_drop"].tolist() == pytest.approx(lost)
    with pytest.raises(il.InputError, match="got 3 and 2"):
        il.choose_strength(model, favored, other, HEADS, **options)


def test_strength_is_measured_with_the_fix_at_work(model, batch):
    found = il.choose_strength(model, batch, batch, HEADS, fix="recency", strengths=[1.0], max_accuracy_drop=1.0)
    for value, strength in zip(found.bias, found.strengths, strict=True):
        with il.edited(model, *il.debias_edits(batch, HEADS, recency=strength), batch=batch):
            scores = il.score(model, batch)
        assert_close(value, 0.0)  # the same prompts on both sides
        own = scores[torch.arange(3), batch.answer] >= scores[torch.arange(3), 1 - batch.answer]
        assert found.accuracy[found.strengths.index(strength)] == pytest.approx(float(own.float().mean()))


def test_factors_of_demonstrations_that_are_not_there_do_nothing(model, batch):
    """In ragged prompts, weights of demonstrations that a prompt does not have are not read."""
    weights = balancing_weights(batch)
    absent = batch.label_positions < 0
    assert bool(absent.any())
    found = []
    for padding in (1.0, 0.0):
        filled = weights.masked_fill(absent, padding)
        with il.edited(model, il.Reweight(HEADS, filled, renormalize=True), batch=batch):
            found.append(il.score(model, batch))
    assert torch.equal(*found)
