"""What `ablate` computes: which heads are chosen, what is left without them, and the random heads beside them."""

import random

import families
import pytest
import torch
from tolerance import assert_close

import icl_lens as il
from icl_lens.interventions import controlled_ablation
from icl_lens.interventions.controlled_ablation import ablate_with_controls, random_head_sets
from icl_lens.locate.locate import top_heads_by
from icl_lens.models.view import ModelView


@pytest.fixture
def few_rows(monkeypatch):
    """Several forward passes even for a few prompts."""
    monkeypatch.setattr(controlled_ablation, "ROWS", 2)


def test_chosen_are_those_of_largest_mean_increase(gpt2, gpt2_batch, gpt2_acts):
    mean = il.head_log_prob_increase(gpt2_acts, gpt2_batch.answer_tokens).mean(0)
    best = sorted(((float(mean[layer, head]), layer, head) for layer in range(3) for head in range(4)), reverse=True)
    assert top_heads_by(gpt2, gpt2_batch, 5) == [il.Head(layer, head) for _, layer, head in best[:5]]
    assert len(top_heads_by(gpt2, gpt2_batch, 12)) == 12
    with pytest.raises(il.InputError, match="between 1 and 12"):
        top_heads_by(gpt2, gpt2_batch, 13)
    effects = il.head_effects(gpt2, gpt2_batch).log_prob.mean(0).flatten()
    best = [il.Head.from_index(index, 4) for index in effects.argsort(descending=True).tolist()]
    assert top_heads_by(gpt2, gpt2_batch, 5, by="effect") == best[:5]


def test_without_an_answer_it_is_what_the_model_says(gpt2):
    prompt = il.Prompt.parse(families.PROMPT)
    batch = il.tokenize(gpt2, [prompt])
    said = max(zip(il.label_log_probs(gpt2, batch)[0].tolist(), batch.labels, strict=True))[1]
    answered = il.tokenize(gpt2, [il.Prompt.parse(families.PROMPT, answer=said)], labels=batch.labels)
    assert top_heads_by(gpt2, batch, 4) == top_heads_by(gpt2, answered, 4)


def test_random_sets(gpt2):
    view = ModelView.of(gpt2)
    heads = [il.Head(0, 1), il.Head(2, 3)]
    rest = [il.Head(layer, head) for layer in range(3) for head in range(4) if (layer, head) not in heads]
    rng = random.Random(5)
    assert random_head_sets(view, heads, draws=3, seed=5) == [rng.sample(rest, 2) for _ in range(3)]
    for drawn in random_head_sets(view, heads, draws=50, seed=0):
        assert len(set(drawn)) == 2
        assert not set(drawn) & set(heads)
    with pytest.raises(il.InputError, match=r"12 heads, .* got 7"):
        random_head_sets(view, view.heads()[:7], draws=1, seed=0)


def test_removed_prompt_by_prompt(gpt2, gpt2_batch, few_rows):
    """Each prompt alone, under ablate_heads; accuracies counted by hand."""
    heads = [il.Head(0, 1), (2, 3)]
    found = ablate_with_controls(gpt2, gpt2_batch, heads, n_random_sets=2, seed=1)
    assert found.heads == (il.Head(0, 1), il.Head(2, 3))
    sets = [[], heads, *random_head_sets(ModelView.of(gpt2), list(found.heads), draws=2, seed=1)]
    for answers, removed in zip([found.baseline, found.ablated, *found.random], sets, strict=True):
        between = over = 0
        for row in range(len(gpt2_batch)):
            alone = gpt2_batch[row]
            with il.ablate_heads(gpt2, removed):
                log_probs = il.last_log_probs(gpt2, alone)[0]
            labels = log_probs[alone.label_tokens]
            assert_close(answers.label_log_probs[row], labels)
            own = labels.masked_fill(~alone.label_mask[0], -float("inf"))
            between += int(own.argmax()) == int(alone.answer)
            over += int(log_probs.argmax()) == int(alone.answer_tokens)
            assert bool(answers.top1_correct[row]) == (int(log_probs.argmax()) == int(alone.answer_tokens))
        assert answers.accuracy_between_labels == pytest.approx(between / 3)
        assert answers.accuracy_over_vocabulary == pytest.approx(over / 3)
    assert not torch.allclose(found.ablated.label_log_probs, found.baseline.label_log_probs)
    with pytest.raises(il.InputError, match="L9H0"):
        ablate_with_controls(gpt2, gpt2_batch, [(9, 0)])
