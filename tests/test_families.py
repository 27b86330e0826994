"""Every family: exact against a plain Hugging Face reference, or refused by name."""

import against_hf
import pytest
import torch
from conftest import PROMPTS
from family_tables import EXACT, REFUSED, SOFT_CAPPED
from tolerance import assert_close
from transformers import AutoModelForCausalLM

import icl_lens as il
from icl_lens.models.view import ModelView


@pytest.fixture(scope="module")
def run(load_tiny, family_folder):
    """(model, batch, activations, Hugging Face twin in float64) of a family, computed once."""
    done = {}

    def get(name):
        if name not in done:
            model = load_tiny(name)
            batch = il.tokenize(model, PROMPTS, prepend_bos=False)
            hf = AutoModelForCausalLM.from_pretrained(family_folder(name), attn_implementation="eager")
            done[name] = (model, batch, il.capture(model, batch), hf.double().eval())
        return done[name]

    return get


@pytest.mark.parametrize("name", EXACT)
def test_increases_agree_with_hugging_face(run, name):
    """Layers, heads, subheads, neurons in all conventions; ragged and padded here, alone and unpadded there."""
    _, batch, acts, hf = run(name)
    assert (batch.attention_mask == 0).any()
    against_hf.check_increases(acts, batch, hf, folded=False)


@pytest.mark.parametrize("name", EXACT)
def test_identities(run, name):
    """Σ_pos subheads = head; Σ heads + b_O = attention out; x + attn + ffn = next x; readout(F) = model."""
    from icl_lens.activations.decompose import neuron_values, subhead_values

    model, batch, acts, _ = run(name)
    view = ModelView.of(model)
    following = torch.cat([acts.resid_pre[:, 1:], acts.resid_final[:, None]], dim=1)
    assert_close(acts.resid_pre + acts.attn_out + acts.mlp_out, following)
    for layer in range(view.n_layers):
        heads = acts.head_outputs(layer)
        parts = subhead_values(acts.head_pattern(layer), acts.head_values(layer), view.W_O(layer))
        assert_close(parts.sum(2), heads)
        b_O = view.b_O(layer)
        scale = 1.0 if acts.attn_scale is None else acts.attn_scale[:, layer, None]
        total = heads.sum(1) + (0.0 if b_O is None else b_O * scale)
        assert_close(total, acts.attn_out[:, layer])
        scale = 1.0 if acts.mlp_scale is None else acts.mlp_scale[:, layer, None]
        neurons = neuron_values(acts.mlp_post[:, layer] * scale, view.W_out(layer)).sum(1)
        b_out = view.raw_b_out(layer)
        if b_out is not None:
            neurons = neurons + view.to_residual(b_out, view.mlp_post_norm(layer)) * scale
        assert_close(neurons, acts.mlp_out[:, layer])
    model_says = torch.log_softmax(model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits"), -1)
    at_last = model_says[torch.arange(len(batch)), batch.last]
    assert_close(acts.readout.log_probs(acts.resid_final), at_last)
    assert_close(il.last_log_probs(model, batch), at_last)


@pytest.mark.parametrize("name", EXACT)
def test_certified_search_is_exhaustive_search(run, name):
    _, batch, acts, _ = run(name)
    against_hf.check_search(acts, batch, certified=name not in SOFT_CAPPED)
    heads = il.top_heads(acts, batch.answer_tokens, k=5)
    mean = il.head_log_prob_increase(acts, batch.answer_tokens).mean(0).flatten().topk(5)
    assert_close(heads.value, mean.values)


@pytest.mark.parametrize("name", EXACT)
def test_from_cache_is_capture(run, name):
    """A cache from a plain run_with_cache gives the same activations, tensor by tensor."""
    model, batch, acts, _ = run(name)
    against_hf.check_cache(model, batch, acts)


@pytest.mark.parametrize("name", EXACT)
def test_ablation_is_a_zeroed_z(run, name):
    """Zero-ablating heads in the model = zeroing their z in Hugging Face's."""
    model, batch, acts, hf = run(name)
    heads = [il.Head(0, 1), il.Head(2, 3)]
    against_hf.check_ablation(model, batch, hf, heads, folded=False)
    assert_close(il.label_log_probs(model, batch), acts.label_log_probs)
    with il.ablate_heads(model, heads):
        assert (il.label_log_probs(model, batch) - acts.label_log_probs).abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_families_are_refused_by_name(load_tiny, name):
    with pytest.raises(il.InputError, match=REFUSED[name][0]):
        il.capture(load_tiny(name), il.tokenize(load_tiny(name), PROMPTS, prepend_bos=False))


def test_blocks_that_do_not_add_up_are_refused(load_tiny, monkeypatch):
    """The check at capture is what keeps an unknown family from being explained wrongly: feed it one."""
    model = load_tiny("granite")
    monkeypatch.setattr(ModelView, "residual_multiplier", 1.0)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    with pytest.raises(il.InputError, match="GraniteForCausalLM is not supported: in layer 0 the heads"):
        il.capture(model, batch)
    monkeypatch.undo()
    monkeypatch.setattr(ModelView, "logit_scale", 1.0)
    with pytest.raises(il.InputError, match="do not reproduce the model's logits"):
        il.capture(model, batch)
