"""Contrasts beside TransformerLens' own direct logit attribution, on its processed HookedTransformer (3.9)."""

import families
import pytest
import torch
from conftest import PROMPTS
from tolerance import assert_close

import icl_lens as il
from icl_lens.models.view import tl_version

if tl_version() >= (4, 0):
    pytest.skip("TransformerLens 4 has no HookedTransformer", allow_module_level=True)

from family_tables import HOOKED_EXACT, SOFT_CAPPED
from hooked import hooked

# `stack_head_results` and `stack_neuron_results` leave out a norm that follows attention or the FFN.
POST_NORMED = {"gemma3"}
NAMES = sorted(set(HOOKED_EXACT) - SOFT_CAPPED - POST_NORMED)


@pytest.mark.parametrize("name", NAMES)
def test_contrasts_are_logit_attrs(name, tmp_path_factory):
    """Heads, layers and neurons of each prompt alone, within rounding; ours from the padded batch."""
    folder = tmp_path_factory.mktemp("tiny")  # no official name in the path
    hf = families.save(name, folder)
    model = hooked(hf, folder, families.tokenizer(), processed=True)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    acts = il.capture(model, batch)
    targets, against = batch.answer_tokens, batch.other_label_tokens
    heads = il.head_log_prob_increase(acts, targets, against=against)
    layers = il.layer_log_prob_increase(acts, targets, against=against)
    neurons = torch.stack([il.neuron_log_prob_increase(acts, targets, i, against=against) for i in range(3)], 1)
    for i in range(len(batch)):
        _, cache = model.run_with_cache(batch.tokens[i : i + 1, : int(batch.last[i]) + 1])

        def attrs(stack, i=i, cache=cache):
            pair = {"tokens": targets[i : i + 1], "incorrect_tokens": against[i]}
            return cache.logit_attrs(stack, **pair, pos_slice=-1)[:, 0]

        at_last = {"pos_slice": -1}
        theirs = attrs(cache.stack_head_results(layer=-1, **at_last))
        assert_close(heads[i].flatten(), theirs)
        parts, labels = cache.decompose_resid(layer=-1, mode="all", return_labels=True, **at_last)
        found = dict(zip(labels, attrs(parts), strict=True))
        for kind, ours in (("attn", layers.attn), ("mlp", layers.ffn)):
            theirs = torch.stack([found[f"{layer}_{kind}_out"] for layer in range(3)])
            assert_close(ours[i], theirs)
        theirs = attrs(cache.stack_neuron_results(layer=-1, **at_last))
        assert_close(neurons[i].flatten(), theirs)
