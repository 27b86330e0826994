"""The two fixes together, and the choice of their strength."""

import sys

import pytest
import torch
from conftest import PROMPTS
from passes import watched
from tolerance import assert_close

import icl_lens as il
from icl_lens.activations.passes import last_log_probs
from icl_lens.engine import prefix_cache
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


def test_both_fixes_are_the_two_interventions(model, batch):
    with il.edited(model, *il.debias_edits(batch, HEADS, majority=1.0, recency=0.5), batch=batch):
        together = last_log_probs(model, batch)
    with (
        il.edited(model, il.Reweight(HEADS, balancing_weights(batch), renormalize=True), batch=batch),
        il.edited(model, il.RemovePosition(HEADS, strength=0.5, positions="last")),
    ):
        assert_close(last_log_probs(model, batch), together)
    plain = last_log_probs(model, batch)
    assert (plain - together).abs().max() > 1e-3
    with il.edited(model, *il.debias_edits(batch, HEADS), batch=batch):
        assert torch.equal(last_log_probs(model, batch), plain)


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


FIXES = [
    ([], {}),
    (HEADS, {"majority": 1.0}),
    ([(2, 0), (1, 3)], {"majority": 0.5, "recency": 0.25}),
    ([(2, head) for head in range(4)], {"recency": 1.0}),
    ([(layer, head) for layer in range(3) for head in range(4)], {"recency": 0.5}),
]


def fixes(batch):
    return [il.debias_edits(batch, heads, **strengths) for heads, strengths in FIXES]


KINDS = "gpt2 gptj neox llama_gqa llama_bias gemma2 mistral qwen3 bloom falcon_alibi opt olmo2".split()


@pytest.mark.parametrize("name", KINDS)
def test_fixes_side_by_side_are_the_blocks_one_by_one(load_tiny, monkeypatch, name):
    """Learned positions, every rotation, ALiBi, grouped queries, caps, windows; ragged prompts, in any pieces."""
    model = load_tiny(name)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    whole = []
    for edits in fixes(batch):
        with il.edited(model, *edits, batch=batch):
            whole.append(il.score(model, batch))
    whole = torch.stack(whole, dim=1)
    # No pass is run for each fix: only the pass that computes the keys runs over full prompts.
    widths = []
    with watched(lambda _, x: widths.append(x.shape[1]), model.blocks[0]):
        found = il.score(model, batch, fixes(batch))
    assert_close(found, whole)
    assert sorted(widths)[:-1] == [1] * (len(widths) - 1)
    assert (found[:, 1:] - found[:, :1]).abs().amax((0, 2)).min() > 1e-4
    monkeypatch.setattr(prefix_cache, "ROW_BYTES", 1)
    monkeypatch.setattr(prefix_cache, "KEY_BYTES", 1)
    assert_close(il.score(model, batch, fixes(batch)), whole)


def test_within_another_intervention_each_fix_has_a_pass(model, batch):
    with il.ablate_heads(model, [(0, 0)]):
        nested = il.score(model, batch, fixes(batch))
        for place, edits in enumerate(fixes(batch)):
            with il.edited(model, *edits, batch=batch):
                assert_close(nested[:, place], il.score(model, batch))


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
