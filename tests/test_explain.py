"""The explanation's numbers are the functions' numbers, and its tables and JSON carry them."""

import json
import math
import sys

import families
import pytest
import torch

import icl_lens as il


@pytest.fixture(scope="module")
def explanation(gpt2):
    return il.explain(gpt2, families.PROMPT, answer="foo", k=5, n_ablated=3, n_random=6)


def test_numbers_are_those_of_the_functions(gpt2, explanation):
    batch = il.tokenize(gpt2, il.Prompt.parse(families.PROMPT, answer="foo"))
    acts = il.capture(gpt2, batch)
    targets = batch.answer_tokens
    layers = il.layer_log_prob_increase(acts, targets)
    heads = il.head_log_prob_increase(acts, targets)[0]
    assert explanation.layer_attn == pytest.approx(layers.attn[0].tolist(), abs=1e-6)
    assert explanation.layer_ffn == pytest.approx(layers.ffn[0].tolist(), abs=1e-6)
    torch.testing.assert_close(torch.tensor(explanation.head_increases), heads, atol=1e-6, rtol=0)
    order = [report.head for report in explanation.heads]
    best = heads.flatten().topk(5).indices.tolist()
    assert order == [il.Head(i // 4, i % 4) for i in best]
    top = il.top_subheads(acts, targets, k=10)
    assert [(*part.head, part.position) for part in explanation.subheads] == list(
        zip(top.layer[0].tolist(), top.head[0].tolist(), top.position[0].tolist(), strict=True)
    )
    assert explanation.label_probs == pytest.approx(
        {label: math.exp(value) for label, value in zip(batch.labels, acts.label_log_probs[0].tolist(), strict=True)}
    )
    for report in explanation.heads:
        layer, head = report.head
        assert report.attention == pytest.approx(acts.pattern[0, layer, head].tolist())
        assert report.increase == pytest.approx(float(heads[layer, head]), abs=1e-6)
        by_position = il.subhead_log_prob_increase(acts, targets, layers=[layer])[0, 0, head]
        assert report.position_increases == pytest.approx(by_position.tolist(), abs=1e-6)
        assert report.value_ranks == tuple(il.own_label_ranks(acts, report.head)[0].tolist())


def test_ablations_are_those_of_the_context_manager(gpt2, explanation):
    """One pass over copies of the prompt gives what ablating each set by itself gives."""
    batch = il.tokenize(gpt2, il.Prompt.parse(families.PROMPT, answer="foo"))
    for report in explanation.heads:
        with il.ablate_heads(gpt2, [report.head]):
            assert report.ablated == pytest.approx(il.label_log_probs(gpt2, batch)[0].tolist(), abs=1e-5)
    located = [report.head for report in explanation.heads[:3]]
    assert list(explanation.ablation.heads) == located
    with il.ablate_heads(gpt2, located):
        assert explanation.ablation.located == pytest.approx(il.label_log_probs(gpt2, batch)[0].tolist(), abs=1e-5)
    assert len(explanation.ablation.random) == 6
    assert len(set(explanation.ablation.random)) > 1, "the draws must differ"


def test_long_prompts_are_ablated_in_several_passes(gpt2, explanation, monkeypatch):
    # By module: the package's attribute `explain` is the function.
    monkeypatch.setattr(sys.modules["icl_lens.explanation"], "PASS_TOKENS", 30)
    again = il.explain(gpt2, families.PROMPT, answer="foo", k=5, n_ablated=3, n_random=6)
    assert again.ablation.located == pytest.approx(explanation.ablation.located, abs=1e-5)
    for first, second in zip(again.ablation.random, explanation.ablation.random, strict=True):
        assert first == pytest.approx(second, abs=1e-5)


def test_without_an_answer_the_models_choice_is_explained(gpt2):
    explanation = il.explain(gpt2, families.PROMPT, k=2)
    assert explanation.prompt.answer is None
    assert explanation.target == explanation.predicted
    other = next(label for label in explanation.labels if label != explanation.predicted)
    against = il.explain(gpt2, families.PROMPT, answer=other, k=2)
    assert against.target == other
    assert against.head_increases != explanation.head_increases


def test_conventions_are_kept_in_the_result(gpt2, explanation):
    own = il.explain(gpt2, families.PROMPT, answer="foo", final_norm="own", bias=False, k=5)
    assert (own.settings.final_norm, own.settings.bias, own.certified) == ("own", False, False)
    assert own.n_exact == own.n_parts
    assert own.layer_attn != explanation.layer_attn
    assert explanation.certified


def test_tables(explanation):
    heads = explanation.to_frame()
    assert list(heads.columns) == ["layer", "head", "name", "increase"]
    assert len(heads) == 12
    row = heads[heads["name"] == str(explanation.heads[0].head)].iloc[0]
    assert row["increase"] == pytest.approx(explanation.heads[0].increase, abs=1e-6)
    layers = explanation.to_frame("layers")
    assert layers[layers["component"] == "ffn"]["increase"].tolist() == list(explanation.layer_ffn)
    subheads = explanation.to_frame("subheads")
    assert subheads["name"].tolist() == [str(part.head) for part in explanation.subheads]
    labels = explanation.to_frame("labels")
    assert labels["log_prob_located_zeroed"].tolist() == list(explanation.ablation.located)
    words = explanation.to_frame("words")
    assert set(words["kind"]) == {"value", "key", "query"}
    assert len(words) == 5 * (4 + 4 + 1)


def test_json_carries_the_numbers(explanation):
    plain = json.loads(json.dumps(explanation.to_dict()))
    assert plain["label_probs"] == pytest.approx(explanation.label_probs)
    assert plain["heads"][0]["head"] == str(explanation.heads[0].head)
    assert plain["heads"][0]["increase"] == explanation.heads[0].increase
    assert plain["settings"]["final_norm"] == "frozen"
    assert plain["ablation"]["heads"] == [str(head) for head in explanation.ablation.heads]
    assert set(plain["versions"]) == {"icl-lens", "torch", "transformers", "transformer-lens"}


def test_bad_settings_are_refused(gpt2):
    with pytest.raises(il.InputError, match="k=0 must be at least 1"):
        il.explain(gpt2, families.PROMPT, k=0)
    with pytest.raises(il.InputError, match=r"n_ablated=7 leaves no random heads .* 1 to 6"):
        il.explain(gpt2, families.PROMPT, n_ablated=7)
    with pytest.raises(il.InputError, match="baz"):
        il.explain(gpt2, families.PROMPT, answer="baz")


def test_random_draws_are_averaged_as_probabilities():
    from icl_lens.report.findings import _log_mean_probability

    assert _log_mean_probability([math.log(0.9), math.log(0.1)]) == pytest.approx(math.log(0.5))
    assert _log_mean_probability([-2000.0, -2000.0]) == -2000.0
