"""Bounds bound, and the certified search finds what the exhaustive one finds."""

import pytest
import torch
from tolerance import assert_close, tolerance

import icl_lens as il


def exhaustive(acts, targets, **convention):
    increase = il.subhead_log_prob_increase(acts, targets, **convention)
    keys = torch.arange(increase.shape[-1])
    return increase.masked_fill((keys > acts.batch.last[:, None])[:, None, None], -torch.inf)


@pytest.mark.parametrize("k", [1, 7, 60])
def test_top_subheads_of_each_prompt(gpt2_acts, gpt2_batch, k):
    targets = gpt2_batch.answer_tokens
    top = il.top_subheads(gpt2_acts, targets, k=k)
    everything = exhaustive(gpt2_acts, targets)
    assert_close(top.value, everything.flatten(1).topk(k).values)
    rows = torch.arange(len(gpt2_batch))[:, None]
    assert_close(everything[rows, top.layer, top.head, top.position], top.value)
    assert (top.value.diff(dim=1) <= 0).all()
    assert top.certified
    assert top.n_parts.tolist() == [12 * 14, 12 * 11, 12 * 10]
    assert ((top.n_exact >= k) & (top.n_exact <= top.n_parts)).all()
    assert (top.unevaluated_bound <= top.value[:, -1] + tolerance()).all()


def test_a_search_that_must_widen(gpt2_acts, gpt2_batch):
    """With a slack larger than any bound every part is evaluated, and the answer stays the same."""
    targets = gpt2_batch.answer_tokens
    wide = il.top_subheads(gpt2_acts, targets, k=5, slack=1e6)
    assert torch.equal(wide.n_exact, wide.n_parts)
    assert_close(wide.value, il.top_subheads(gpt2_acts, targets, k=5).value)
    heads = il.top_heads(gpt2_acts, targets, k=3, slack=1e6)
    assert heads.n_exact == heads.n_parts == 12
    assert heads.heads == il.top_heads(gpt2_acts, targets, k=3).heads


def test_own_norm_is_exhaustive_and_says_so(gpt2_acts, gpt2_batch):
    targets = gpt2_batch.answer_tokens
    top = il.top_subheads(gpt2_acts, targets, k=6, final_norm="own")
    assert not top.certified
    assert torch.equal(top.n_exact, top.n_parts)
    expected = exhaustive(gpt2_acts, targets, final_norm="own").flatten(1).topk(6).values
    assert_close(top.value, expected)
    heads = il.top_heads(gpt2_acts, targets, k=3, final_norm="own")
    mean = il.head_log_prob_increase(gpt2_acts, targets, final_norm="own").mean(0).flatten().topk(3)
    assert (heads.certified, heads.n_exact) == (False, 12)
    assert_close(heads.value, mean.values)


@pytest.mark.slow
def test_a_thousand_prompts_of_icl_mini(icl_mini):
    """k = 20 on 1,000 prompts equals exhaustive evaluation; few parts are evaluated exactly."""
    prompts = il.load_task("sentiment-number", n=1000, seed=0)
    batch = il.tokenize(icl_mini, prompts)
    n_exact, n_parts = [], []
    for part in batch.split(100):
        acts = il.capture(icl_mini, part)
        top = il.top_subheads(acts, part.answer_tokens, k=20)
        expected = exhaustive(acts, part.answer_tokens).flatten(1).topk(20).values
        assert_close(top.value, expected)
        n_exact.append(top.n_exact)
        n_parts.append(top.n_parts)
    assert float(torch.cat(n_exact).double().mean()) < 60 < float(torch.cat(n_parts).double().mean())
