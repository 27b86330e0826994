"""Projections: values against weights, keys against the stream, queries against the scores they make."""

import families
import pytest
import reference_hf
import torch
from conftest import PROMPTS
from tolerance import assert_close
from torch import nn
from transformers import AutoModelForCausalLM

import icl_lens as il
from icl_lens.models.view import ModelView, tl_version


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama_gqa", "gemma2"])
def test_label_values_agree_with_hugging_face(load_tiny, family_folder, name):
    model = load_tiny(name)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    acts = il.capture(model, batch)
    hf = AutoModelForCausalLM.from_pretrained(family_folder(name), attn_implementation="eager").double().eval()
    for head in (il.Head(0, 0), il.Head(1, 3)):
        values = il.label_values(acts, head)
        if acts.attn_scale is not None:
            values = values * acts.attn_scale[:, head.layer, None, None]
        for i in range(len(batch)):
            theirs = reference_hf.reference(hf, batch.tokens[i, : int(batch.last[i]) + 1], 1)
            for demo, position in enumerate(batch.label_positions[i].tolist()):
                if position < 0:
                    assert (values[i, demo] == 0).all()
                else:
                    expected = theirs.label_value(head.layer, head.head, position)
                    assert_close(values[i, demo], expected)


def test_label_values_through_the_norm_and_the_weights(gpt2, gpt2_acts, gpt2_batch):
    """norm(x) W_V + b_V, times W_O: the formula of the label value, from the weights alone."""
    head = il.Head(2, 1)
    block, view = gpt2.blocks[head.layer], ModelView.of(gpt2)
    x = il.label_keys(gpt2_acts, head)
    normed = torch.nn.functional.layer_norm(x, (32,), block.ln1.weight, block.ln1.bias, 1e-5)
    v = normed @ view.W_V(head.layer)[head.head] + block.attn.b_V[head.head]
    expected = v @ view.W_O(head.layer)[head.head]
    missing = gpt2_batch.label_positions < 0
    assert_close(il.label_values(gpt2_acts, head), expected.masked_fill(missing[..., None], 0))


def test_label_keys_of_both_sources(gpt2, gpt2_acts, gpt2_batch):
    """ "attn" is "resid" without the embedding and every FFN's output before the layer."""
    head = il.Head(2, 0)
    _, cache = gpt2.run_with_cache(gpt2_batch.tokens, attention_mask=gpt2_batch.attention_mask)
    for i, positions in enumerate(gpt2_batch.label_positions.tolist()):
        for demo, position in enumerate(positions):
            if position < 0:
                continue
            x = cache["blocks.2.hook_resid_pre"][i, position]
            embedding = (
                cache["hook_embed"][i, position]
                + cache["hook_pos_embed"][min(i, len(cache["hook_pos_embed"]) - 1), position]
            )
            ffn = sum(cache[f"blocks.{layer}.hook_mlp_out"][i, position] for layer in range(2))
            assert_close(il.label_keys(gpt2_acts, head)[i, demo], x)
            assert_close(il.label_keys(gpt2_acts, head, source="attn")[i, demo], x - embedding - ffn)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "neox", "llama_gqa", "phi3", "cohere"])
def test_last_query_gives_the_heads_scores(load_tiny, name):
    """q·k for any key is the carried query times the key's (normed) input, up to what does not depend on it."""
    if name == "cohere" and tl_version() < (4, 0):
        pytest.skip("Cohere is refused on TransformerLens 3")
    model = load_tiny(name)
    batch = il.tokenize(model, PROMPTS[:1], prepend_bos=False)
    acts = il.capture(model, batch)
    _, cache = model.run_with_cache(batch.tokens)
    for head in (il.Head(1, 0), il.Head(2, 3)):
        normed = cache[f"blocks.{head.layer}.ln1.hook_out"][0]
        kv = ModelView.of(model).kv_head(head.head)
        k = cache[f"blocks.{head.layer}.attn.hook_k"][0, :, kv]
        b_K = model.blocks[head.layer].attn.b_K
        content = k if b_K is None else k - b_K[kv]
        query = cache[f"blocks.{head.layer}.attn.hook_q"][0, int(batch.last[0]), head.head]
        assert_close(normed @ il.last_query(acts, head)[0], content @ query)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2"])
def test_last_query_passes_the_norms_of_queries_and_keys(load_tiny, name):
    """Divided by each key's own scale, the carried query times the key's input is the head's score before rotation."""
    model = load_tiny(name)
    batch = il.tokenize(model, PROMPTS[:1], prepend_bos=False)
    acts = il.capture(model, batch)
    _, cache = model.run_with_cache(batch.tokens)

    def normed(layer, which, kept):
        """[pos head d_head] as the model normalized them, over each head or over all heads together."""
        hook = cache[f"blocks.{layer}.attn.hook_{which}_normed"][0]
        n_heads = cache[f"blocks.{layer}.attn.hook_{which}"].shape[2]
        return hook.unflatten(-1, (n_heads, -1)) if kept == "all" else hook.transpose(0, 1)

    over = "all" if name == "olmo2" else "head"
    for head in (il.Head(1, 0), il.Head(2, 3)):
        kv = ModelView.of(model).kv_head(head.head)
        query = normed(head.layer, "q", over)[int(batch.last[0]), head.head]
        scores = normed(head.layer, "k", over)[:, kv] @ query
        before = "hook_resid_pre" if name == "olmo2" else "ln1.hook_out"
        ours = cache[f"blocks.{head.layer}.{before}"][0] @ il.last_query(acts, head)[0]
        k = cache[f"blocks.{head.layer}.attn.hook_k"][0]
        k = k.flatten(1) if over == "all" else k[:, kv]
        eps = model.original_model.config.rms_norm_eps
        assert_close(ours * torch.rsqrt(k.pow(2).mean(-1) + eps), scores)
        plain = torch.einsum("d,md->m", acts.q[0, head.layer, head.head], ModelView.of(model).W_K(head.layer)[kv])
        assert torch.cosine_similarity(plain, il.last_query(acts, head)[0], dim=0) < 0.999, "the norms' gains matter"


def test_norms_of_queries_that_are_not_known_are_refused(load_tiny, monkeypatch):
    model = load_tiny("qwen3")
    acts = il.capture(model, il.tokenize(model, PROMPTS, prepend_bos=False))
    gains = nn.Module()
    gains.weight = nn.Parameter(torch.ones(families.N_HEADS, 12))
    monkeypatch.setitem(model.blocks[1].attn._modules, "q_norm", gains)
    with pytest.raises(il.InputError, match=r"norm of Qwen3ForCausalLM is not supported.*\(4, 12\).*in layer 1"):
        il.last_query(acts, il.Head(1, 0))
    il.last_query(acts, il.Head(2, 0))


def test_own_label_ranks(gpt2_acts, gpt2_batch):
    head = il.Head(1, 1)
    ranks = il.own_label_ranks(gpt2_acts, head)
    scores = gpt2_acts.readout.vocabulary_scores(il.label_values(gpt2_acts, head))
    for i in range(len(gpt2_batch)):
        for demo, label in enumerate(gpt2_batch.label_index[i].tolist()):
            if label < 0:
                assert ranks[i, demo] == 0
            else:
                order = scores[i, demo].argsort(descending=True).tolist()
                assert ranks[i, demo] == 1 + order.index(int(gpt2_batch.label_tokens[label]))


def test_heads_that_do_not_exist_are_refused(gpt2_acts):
    for function in (il.label_values, il.label_keys, il.last_query):
        with pytest.raises(il.InputError, match=r"layers 0–2 and heads 0–3 .* got L3H0"):
            function(gpt2_acts, il.Head(3, 0))


def test_attention_to_labels(gpt2_acts, gpt2_batch):
    attention = il.attention_to_labels(gpt2_acts)
    by_label = il.attention_by_label(gpt2_acts)
    assert attention.shape == (3, 3, 4, 4)
    for i in range(len(gpt2_batch)):
        sums = torch.zeros(3, 4, len(gpt2_batch.labels))
        for demo, position in enumerate(gpt2_batch.label_positions[i].tolist()):
            if position < 0:
                assert (attention[i, ..., demo] == 0).all()
                continue
            assert torch.equal(attention[i, ..., demo], gpt2_acts.pattern[i, ..., position])
            sums[..., int(gpt2_batch.label_index[i, demo])] += attention[i, ..., demo]
        assert_close(by_label[i], sums)
