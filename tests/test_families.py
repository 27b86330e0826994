"""Every family: exact against a plain Hugging Face reference, or refused by name."""

import against_hf
import families
import pytest
import torch
from conftest import PROMPTS, SEVERAL
from family_tables import EXACT, REFUSED, SOFT_CAPPED
from tolerance import assert_close

import icl_lens as il
from icl_lens.activations.decompose import neuron_values, subhead_values
from icl_lens.activations.passes import last_log_probs
from icl_lens.models.view import ModelView


@pytest.mark.parametrize("name", EXACT)
def test_increases_and_contrasts_agree_with_hugging_face(family_run, name):
    """Every part, in all conventions, against no, one and several tokens; our batch is padded, the reference is not."""
    run = family_run(name)
    assert (run.batch.attention_mask == 0).any()
    against_hf.check_increases(run.acts, run.batch, run.hf, against=(None, run.batch.other_label_tokens, SEVERAL))


@pytest.mark.parametrize("name", EXACT)
def test_parts_sum_to_their_whole(family_run, name):
    """Σ_pos subheads = head; Σ heads + b_O = attention out; x + attn + ffn = next x; readout(F) = model."""
    run = family_run(name)
    model, batch, acts = run.model, run.batch, run.acts
    view = ModelView.of(model)
    following = torch.cat([acts.resid_pre[:, 1:], acts.resid_final[:, None]], dim=1)
    assert_close(acts.resid_pre + acts.attn_out + acts.mlp_out, following)
    for layer in range(view.n_layers):
        heads = acts.head_outputs(layer)
        parts = subhead_values(acts.scaled_pattern(layer), acts.head_values(layer), view.W_O(layer))
        assert_close(parts.sum(2), heads)
        b_O = view.b_O(layer)
        scale = 1.0 if acts.attn_scale is None else acts.attn_scale[:, layer, None]
        total = heads.sum(1) + (0.0 if b_O is None else b_O * scale)
        assert_close(total, acts.attn_out[:, layer])
        if name in families.MIXTURES:
            continue
        scale = 1.0 if acts.mlp_scale is None else acts.mlp_scale[:, layer, None]
        neurons = neuron_values(acts.mlp_post[:, layer] * scale, view.W_out(layer)).sum(1)
        b_out = view.raw_b_out(layer)
        if b_out is not None:
            neurons = neurons + view.to_residual(b_out, view.mlp_post_norm(layer)) * scale
        assert_close(neurons, acts.mlp_out[:, layer])
    model_says = torch.log_softmax(model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits"), -1)
    at_last = model_says[torch.arange(len(batch)), batch.last]
    assert_close(acts.readout.log_probs(acts.resid_final), at_last)
    assert_close(last_log_probs(model, batch), at_last)
    assert_close(il.score(model, batch), acts.label_log_probs)


@pytest.mark.parametrize("name", EXACT)
def test_searches_find_what_trying_everything_finds(family_run, name):
    """All parts are evaluated against one token or if logits are soft-capped, fewer otherwise; increases: see above."""
    run = family_run(name)
    certified, one = name not in SOFT_CAPPED, run.batch.other_label_tokens
    for against in (None, one, SEVERAL):
        top = against_hf.check_search(run.acts, run.batch, certified=certified, against=against)
        by = "increase" if against is None else "contrast"
        best = il.top_heads(run.acts, k=5, by=by, against=against)
        every = il.head_log_prob_increase(run.acts, run.batch.answer_tokens, against=against)
        expected = every.mean(0).flatten().topk(5)
        assert_close(best.value, expected.values)
        assert best.heads == [il.Head(i // 4, i % 4) for i in expected.indices.tolist()]
        assert best.certified == certified
        if against is one or not certified:
            assert torch.equal(top.n_exact, top.n_parts)
            assert (top.unevaluated_bound == -torch.inf).all()
            assert (best.n_exact, best.unevaluated_bound, best.share_evaluated) == (12, -float("inf"), 1.0)
        else:
            assert (top.n_exact < top.n_parts).all()


@pytest.mark.parametrize("name", EXACT)
def test_from_cache_is_capture(family_run, name):
    run = family_run(name)
    against_hf.check_cache(run.model, run.batch, run.acts)


@pytest.mark.parametrize("name", EXACT)
def test_ablation_is_a_zeroed_z(family_run, name):
    """Zero-ablating heads in the model = zeroing their z in Hugging Face's."""
    run, heads = family_run(name), [il.Head(0, 1), il.Head(2, 3)]
    against_hf.check_ablation(run.model, run.batch, run.hf, heads, folded=False)
    with il.ablate_heads(run.model, heads):
        assert (il.score(run.model, run.batch) - run.acts.label_log_probs).abs().max() > 1e-3


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_families_are_refused_by_name(load_tiny, name):
    with pytest.raises(il.InputError, match=REFUSED[name][0]):
        il.capture(load_tiny(name), il.tokenize(load_tiny(name), PROMPTS, prepend_bos=False))


def test_blocks_that_do_not_add_up_are_refused(load_tiny, monkeypatch):
    """The check at capture prevents wrong explanations of an unknown family; here, one multiplier is unknown."""
    model = load_tiny("granite")
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    for multiplier, message in [
        ("residual_multiplier", "GraniteForCausalLM is not supported: in layer 0 the heads"),
        ("logit_scale", "do not reproduce the model's logits"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(ModelView, multiplier, 1.0)
            with pytest.raises(il.InputError, match=message):
                il.capture(model, batch)
