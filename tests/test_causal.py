"""Removing heads one by one: restarted passes against whole ones and against edited weights; agreement by hand."""

import against_hf
import pytest
import torch
from conftest import PROMPTS
from family_tables import EXACT
from test_effects import hf_twin
from test_head_sets import attention_run
from tolerance import assert_close

import icl_lens as il
from icl_lens.interventions import partial_forward
from icl_lens.interventions.effects import agreement, head_effects
from icl_lens.models.view import ModelView


def one_by_one(model, batch):
    """[batch layer head] the same by whole forward passes, a head at a time."""
    view = ModelView.of(model)
    rows = torch.arange(len(batch))

    def scores():
        labels = il.label_log_probs(model, batch)
        own = labels[rows, batch.answer]
        return torch.stack([own, own - labels[rows, 1 - batch.answer]], dim=-1)

    clean = scores()
    found = torch.empty(len(batch), view.n_layers, view.n_heads, 2)
    for layer in range(view.n_layers):
        for head in range(view.n_heads):
            with il.ablate_heads(model, [(layer, head)]):
                found[:, layer, head] = clean - scores()
    return found.unbind(-1)


@pytest.mark.parametrize("name", EXACT)
def test_restarted_passes_are_whole_passes(load_tiny, name):
    """Every family; ragged prompts in pieces that do not divide them, so that pieces are padded otherwise."""
    model = load_tiny(name)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    effects = head_effects(model, batch, pass_tokens=70)
    log_prob, log_odds = one_by_one(model, batch)
    assert_close(effects.log_prob, log_prob)
    assert_close(effects.log_odds, log_odds)
    assert effects.log_prob[:, 0].abs().max() > 1e-2
    assert "forward" not in vars(model.blocks[0])
    assert_close(one_by_one(model, batch[[0]])[0], log_prob[[0]])


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama_gqa"])
def test_effects_are_those_of_zeroed_output_matrices(load_tiny, family_folder, float64, name):
    """In float64, of Hugging Face with edited weights."""
    model = load_tiny(name, dtype=torch.float64)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    effects = head_effects(model, batch)
    hf = hf_twin(family_folder, name)
    for row in range(len(batch)):
        ids = batch.tokens[row : row + 1, : int(batch.last[row]) + 1]
        clean = torch.log_softmax(hf(ids).logits[0, -1], dim=-1)
        for head in (il.Head(0, 2), il.Head(1, 1), il.Head(2, 3)):
            edited = torch.log_softmax(against_hf.without_heads(hf, [head])(ids).logits[0, -1], dim=-1)
            fall = (clean - edited)[batch.label_tokens]
            answer = int(batch.answer[row])
            ours = effects.log_prob[row][head], effects.log_odds[row][head]
            assert_close(torch.stack(ours), torch.stack([fall[answer], fall[answer] - fall[1 - answer]]))


@pytest.mark.parametrize(("enough", "expected"), [(1, [2, 3, 4]), (10**6, [2, 2, 2])])
def test_earlier_blocks_are_not_run(load_tiny, monkeypatch, enough, expected):
    monkeypatch.setattr(partial_forward, "MIN_PASS_TOKENS", enough)
    model = load_tiny("llama_gqa")
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    with attention_run(model) as ran:
        head_effects(model, batch)
    runs = [sum(layer == one for layer, _ in ran) for one in range(3)]
    # One pass to keep streams, then one for the heads of each earlier layer; or of all, where they would be small.
    assert runs == expected


def test_an_error_leaves_the_model_whole(load_tiny, monkeypatch):
    model = load_tiny("gpt2")
    batch = il.tokenize(model, PROMPTS)
    plain = il.last_log_probs(model, batch)
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) > 1:  # within the block that begins at a layer
            raise ZeroDivisionError
        return il.last_log_probs(*args)

    monkeypatch.setattr(partial_forward, "last_log_probs", failing)
    with pytest.raises(ZeroDivisionError):
        head_effects(model, batch)
    assert torch.equal(il.last_log_probs(model, batch), plain)


def test_other_targets_and_prompts_without_an_answer(load_tiny):
    model = load_tiny("gpt2")
    batch = il.tokenize(model, [il.Prompt.parse("love : bar eight : foo one :")])
    with pytest.raises(il.InputError, match="without an answer"):
        head_effects(model, batch)
    effects = head_effects(model, batch, batch.label_tokens[[0]])
    assert effects.log_odds.isnan().all()
    assert effects.log_prob.isfinite().all()


def test_effects_within_another_intervention(load_tiny):
    """What outer blocks edit is in the kept stream, though the blocks it was made in are not run again."""
    model = load_tiny("gptj")
    batch = il.tokenize(model, PROMPTS)
    with il.remove_position(model, [(0, 0), (2, 1)]):
        effects = head_effects(model, batch)
        assert_close(effects.log_prob, one_by_one(model, batch)[0])


def test_the_best_heads_are_those_of_largest_mean():
    effects = il.HeadEffects(torch.tensor([[[0.0, 3.0], [1.0, 2.0]], [[0.0, 0.0], [1.5, -9.0]]]), torch.zeros(2, 2, 2))
    assert effects.top(2) == [il.Head(0, 1), il.Head(1, 0)]


def test_agreement_by_hand():
    causal = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    static = torch.tensor([[0.0, 2.0, 1.0], [3.0, 50.0, 40.0]])
    found = agreement(causal, static, k=2)
    # Two neighboring pairs exchanged: 1 - 6 * (1 + 1 + 1 + 1) / (6 * 35)
    assert found.spearman == pytest.approx(1 - 24 / 210)
    assert (found.overlap, found.expected_overlap) == (2, pytest.approx(4 / 6))
    assert agreement(causal, -static, k=3).spearman == pytest.approx(-(1 - 24 / 210))
    assert agreement(causal, -static, k=3).overlap == 0
    tied = agreement(torch.tensor([[1.0, 1.0, 3.0]]), torch.tensor([[1.0, 2.0, 3.0]]), k=1)
    assert tied.spearman == pytest.approx(1.5 / 3**0.5)  # ranks ½ ½ 2 against 0 1 2
    with pytest.raises(il.InputError, match=r"between 1 and 6 .* got 7"):
        agreement(causal, static, k=7)
