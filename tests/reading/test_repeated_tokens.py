"""Random repeated sequences begin as prompts do; their scores: the sweep."""

from itertools import chain

import icl_lens as il
from icl_lens.reading.repeated_tokens import prefix_tokens, random_tokens


def test_sequences_begin_as_the_models_prompts_do(icl_mini):
    front = prefix_tokens(icl_mini)
    prompt = il.tokenize(icl_mini, il.Text("love"))
    assert prompt.tokens[0, : len(front)].tolist() == front
    special = icl_mini.tokenizer.all_special_ids
    assert not set(chain.from_iterable(random_tokens(icl_mini, 5, 20, 0))) & {*special}
