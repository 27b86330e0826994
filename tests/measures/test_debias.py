"""The two fixes together."""

import pytest
import torch
from shared import PROMPTS

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
    """Labels are bar bar foo foo, bar bar foo, and foo bar; weights are labels' mean frequency over
    a label's own.
    """
    weights = balancing_weights(batch)
    expected = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.75, 0.75, 1.5, 1.0], [1.0, 1.0, 1.0, 1.0]])
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(balancing_weights(batch, 0.5), expected.sqrt())
    with pytest.raises(il.InputError, match=r"got -1\.0"):
        balancing_weights(batch, -1.0)


def test_factors_of_demonstrations_that_are_not_there_do_nothing(model, batch):
    """In ragged prompts, weights of demonstrations that a prompt does not have are not read."""
    weights = balancing_weights(batch)
    absent = batch.label_positions < 0
    assert bool(absent.any())
    scores = []
    for padding in (1.0, 0.0):
        filled = weights.masked_fill(absent, padding)
        with il.edited(model, il.Reweight(HEADS, filled, renormalize=True), batch=batch):
            scores.append(il.score(model, batch))
    assert torch.equal(*scores)
