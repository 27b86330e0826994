"""Increases by hand, in pieces and by convention; the sweep compares them with Hugging Face."""

import math

import torch
from tolerance import assert_close

import icl_lens as il
from icl_lens.models.readout import Readout


def test_layers_narrow_the_subheads(gpt2_acts, gpt2_batch):
    increases = il.subhead_log_prob_increase(gpt2_acts, gpt2_batch.answer_tokens)
    increases_of_two_layers = il.subhead_log_prob_increase(
        gpt2_acts, gpt2_batch.answer_tokens, layers=[2, 0]
    )
    assert_close(increases_of_two_layers, increases[:, [2, 0]])
    none = il.subhead_log_prob_increase(gpt2_acts, gpt2_batch.answer_tokens, layers=[])
    assert none.shape == (3, 0, *increases.shape[2:])


def test_all_layers_share_one_product(gpt2_acts, gpt2_batch, monkeypatch):
    """W_U is read once for all layers, and again only where the logits would exceed the memory
    budget.
    """
    products = []
    whole = Readout._unembed
    monkeypatch.setattr(
        Readout, "_unembed", lambda self, y: products.append(y[..., 0].numel()) or whole(self, y)
    )
    for increases, rows in (
        (il.head_log_prob_increase, 3 * 3 * (1 + 4)),
        (il.layer_log_prob_increase, 3 * 3 * 3),
    ):
        products.clear()
        increases(gpt2_acts, gpt2_batch.answer_tokens)
        assert products == [rows]
        with monkeypatch.context() as small:
            small.setattr("icl_lens.models.readout.LOGIT_BYTES", 97 * 4 * 5)
            increases(gpt2_acts, gpt2_batch.answer_tokens)
        assert max(products[1:]) == 5


def test_a_hand_computed_increase():
    """The paper's own three-word example (appendix E): bs(x) = [1, 2, 3], bs(v) = [5, 1, 2]."""
    readout = Readout(
        W_U=torch.eye(3),
        b_U=None,
        gain=None,
        shift=None,
        scale=torch.ones(1),
        eps=0.0,
        center=False,
        normalize=False,
    )
    x, v = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[5.0, 1.0, 2.0]])
    tolerances = {"atol": 6e-3, "rtol": 0}  # the paper truncates to two decimals
    torch.testing.assert_close(
        readout.log_probs(x).exp()[0], torch.tensor([0.09, 0.24, 0.67]), **tolerances
    )
    torch.testing.assert_close(
        readout.log_probs(x + v).exp()[0], torch.tensor([0.70, 0.04, 0.26]), **tolerances
    )
    foo = torch.tensor([0])
    increase = readout.token_log_probs((x + v)[:, None], foo) - readout.token_log_probs(
        x[:, None], foo
    )
    by_hand = (6 - math.log(math.exp(6) + math.exp(3) + math.exp(5))) - (
        1 - math.log(math.e + math.e**2 + math.e**3)
    )
    assert_close(increase.item(), by_hand)
