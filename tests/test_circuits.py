"""Projections: values against weights, keys against the stream, queries against the scores they make."""

import against_hf
import families
import pytest
import torch
from conftest import PROMPTS
from tolerance import assert_close
from torch import nn

import icl_lens as il
from icl_lens.models.view import ModelView, tl_version


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama_gqa", "gemma2", "qwen3", "bloom"])
def test_label_values_agree_with_hugging_face(family_run, name):
    """Missing demonstrations are zero; the scale of a norm after attention is not part of the value."""
    run = family_run(name)
    references = against_hf.references_of(run.batch, run.hf)
    for layer, head in [(0, 0), (1, 3)]:
        values = run.acts.label_values(il.Head(layer, head))
        if run.acts.attn_scale is not None:
            values = values * run.acts.attn_scale[:, layer, None, None]
        for row, theirs in enumerate(references):
            positions = run.batch.label_positions[row]
            expected = theirs.label_values[layer, head][positions].masked_fill((positions < 0)[:, None], 0)
            assert_close(values[row], expected)


def test_label_keys_of_attention_lack_embedding_and_ffn_outputs(gpt2, gpt2_acts, gpt2_batch):
    """ "attn" is "resid" without the embedding and every FFN's output before the layer."""
    head = il.Head(2, 0)
    _, cache = gpt2.run_with_cache(gpt2_batch.tokens, attention_mask=gpt2_batch.attention_mask)
    row = torch.arange(len(gpt2_batch))[:, None]
    at = row, gpt2_batch.label_positions
    missing = (gpt2_batch.label_positions < 0)[..., None]
    embedding = cache["hook_embed"][at] + cache["hook_pos_embed"].expand(len(gpt2_batch), -1, -1)[at]
    ffn = sum(cache[f"blocks.{layer}.hook_mlp_out"][at] for layer in range(2))
    x = cache["blocks.2.hook_resid_pre"][at]
    assert_close(gpt2_acts.label_keys(head), x.masked_fill(missing, 0))
    assert_close(gpt2_acts.label_keys(head, source="attn"), (x - embedding - ffn).masked_fill(missing, 0))


@pytest.mark.parametrize("name", ["gpt2", "gptj", "neox", "llama_gqa", "phi3", "cohere"])
def test_last_query_gives_the_heads_scores(family_run, name):
    """For any key, q·k is `last_query` times the key's (normed) input, up to the share of b_K."""
    if name == "cohere" and tl_version() < (4, 0):
        pytest.skip("Cohere is refused on TransformerLens 3")
    model, batch, acts = family_run(name).model, family_run(name).batch[:1], family_run(name).acts
    _, cache = model.run_with_cache(batch.tokens)
    for head in (il.Head(1, 0), il.Head(2, 3)):
        normed = cache[f"blocks.{head.layer}.ln1.hook_out"][0]
        kv = ModelView.of(model).kv_head(head.head)
        k = cache[f"blocks.{head.layer}.attn.hook_k"][0, :, kv]
        b_K = model.blocks[head.layer].attn.b_K
        content = k if b_K is None else k - b_K[kv]
        query = cache[f"blocks.{head.layer}.attn.hook_q"][0, int(batch.last[0]), head.head]
        assert_close(normed @ acts.last_query(head)[0], content @ query)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo2"])
def test_last_query_passes_the_norms_of_queries_and_keys(family_run, name):
    """Divided by each key's own scale, `last_query` times the key's input is the head's score before rotation."""
    model, batch, acts = family_run(name).model, family_run(name).batch[:1], family_run(name).acts
    _, cache = model.run_with_cache(batch.tokens)

    def normed(layer, which, kept):
        """Return queries or keys [pos head d_head] as the model normalizes them, per head or over all heads jointly."""
        hook = cache[f"blocks.{layer}.attn.hook_{which}_normed"][0]
        n_heads = cache[f"blocks.{layer}.attn.hook_{which}"].shape[2]
        return hook.unflatten(-1, (n_heads, -1)) if kept == "all" else hook.transpose(0, 1)

    over = "all" if name == "olmo2" else "head"
    for head in (il.Head(1, 0), il.Head(2, 3)):
        kv = ModelView.of(model).kv_head(head.head)
        query = normed(head.layer, "q", over)[int(batch.last[0]), head.head]
        scores = normed(head.layer, "k", over)[:, kv] @ query
        before = "hook_resid_pre" if name == "olmo2" else "ln1.hook_out"
        ours = cache[f"blocks.{head.layer}.{before}"][0] @ acts.last_query(head)[0]
        k = cache[f"blocks.{head.layer}.attn.hook_k"][0]
        k = k.flatten(1) if over == "all" else k[:, kv]
        eps = model.original_model.config.rms_norm_eps
        assert_close(ours * torch.rsqrt(k.pow(2).mean(-1) + eps), scores)
        plain = torch.einsum("d,md->m", acts.q[0, head.layer, head.head], ModelView.of(model).W_K(head.layer)[kv])
        assert torch.cosine_similarity(plain, acts.last_query(head)[0], dim=0) < 0.999, "the norms' gains matter"


def test_norms_of_queries_that_are_not_known_are_refused(load_tiny, monkeypatch):
    model = load_tiny("qwen3")
    acts = il.capture(model, il.tokenize(model, PROMPTS, prepend_bos=False))
    gains = nn.Module()
    gains.weight = nn.Parameter(torch.ones(families.N_HEADS, 12))
    monkeypatch.setitem(model.blocks[1].attn._modules, "q_norm", gains)
    with pytest.raises(il.InputError, match=r"norm of Qwen3ForCausalLM is not supported.*\(4, 12\).*in layer 1"):
        acts.last_query(il.Head(1, 0))
    acts.last_query(il.Head(2, 0))


def test_own_label_ranks_are_places_among_sorted_scores(gpt2_acts, gpt2_batch):
    head = il.Head(1, 1)
    ranks = gpt2_acts.own_label_ranks(head)
    scores = gpt2_acts.readout.vocabulary_scores(gpt2_acts.label_values(head))
    for i in range(len(gpt2_batch)):
        for demo, label in enumerate(gpt2_batch.label_index[i].tolist()):
            if label < 0:
                assert ranks[i, demo] == 0
            else:
                order = scores[i, demo].argsort(descending=True).tolist()
                assert ranks[i, demo] == 1 + order.index(int(gpt2_batch.label_tokens[label]))


def test_attention_to_labels_is_the_pattern_at_labels(gpt2_acts, gpt2_batch):
    attention = gpt2_acts.attention_to_labels()
    by_label = gpt2_acts.attention_by_label()
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
