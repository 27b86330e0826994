"""Induction and previous-token scores are those of the attention pattern."""

import numpy as np
import pytest
import torch

import icl_lens as il
from icl_lens.attribution.repeated_tokens import prefix_tokens, random_tokens

N_TOKENS = 7


def test_scores_are_those_of_the_pattern(gpt2):
    scores = il.repeated_token_scores(gpt2, n=3, n_tokens=N_TOKENS, seed=1)
    found = {"induction": scores.induction, "previous": scores.previous_token}
    expected = {"induction": [], "previous": []}
    for tokens in random_tokens(gpt2, 3, N_TOKENS, 1):
        assert len(set(tokens)) == N_TOKENS
        twice = tokens + tokens
        _, cache = gpt2.run_with_cache(torch.tensor([twice]))
        pattern = cache["blocks.1.attn.hook_pattern"][0, 3]
        for place in range(N_TOKENS, 2 * N_TOKENS):
            expected["induction"].append(float(pattern[place, twice.index(twice[place]) + 1]))
            expected["previous"].append(float(pattern[place, place - 1]))
    for name, values in expected.items():
        assert float(found[name][1, 3]) == pytest.approx(np.mean(values), abs=1e-5)


def test_sequences_begin_as_the_models_prompts_do(icl_mini):
    front = prefix_tokens(icl_mini)
    prompt = il.tokenize(icl_mini, il.Text("love"))
    assert prompt.tokens[0, : len(front)].tolist() == front
    special = icl_mini.tokenizer.all_special_ids
    assert not {token for row in random_tokens(icl_mini, 5, 20, 0) for token in row} & {*special}
