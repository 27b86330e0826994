"""Saliency of attention edges, and its flow from texts to labels to the end, against Hugging Face and autograd."""

import copy
from dataclasses import replace

import pytest
import torch
from test_effects import hf_twin, ragged, remains
from tolerance import assert_close

import icl_lens as il
from icl_lens.engine import gradients
from icl_lens.errors import InputError
from icl_lens.measures.saliency import KINDS

FAMILIES = ["gpt2", "gptj", "llama_bias"]


def hf_saliency(hf, ids, label_ids, target):
    """[layer query key] from the patterns that Hugging Face returns, differentiated by autograd, head after head."""
    hf = copy.deepcopy(hf)
    out = hf(ids, output_attentions=True)
    loss = torch.nn.functional.cross_entropy(out.logits[:, -1, label_ids], torch.tensor([label_ids.index(target)]))
    slopes = torch.autograd.grad(loss, out.attentions)
    layers = []
    for pattern, slope in zip(out.attentions, slopes, strict=True):
        total = torch.zeros_like(pattern[0, 0])
        for head in range(pattern.shape[1]):
            total = total + (pattern[0, head] * slope[0, head]).abs()
        layers.append(total.detach())
    return torch.stack(layers)


def mean_over(saliency, edges):
    return sum(float(saliency[i, j]) for i, j in edges) / len(edges)


def flows(saliency, labels, n, shown):
    """Return the published means by counting edges; the first `shown` of n tokens belong to demonstrations."""
    every = [(i, j) for i in range(n) for j in range(i)]
    to_label = [(i, j) for i, j in every if i in labels]
    to_last = [(n - 1, j) for j in labels]
    return {
        "text_to_label": mean_over(saliency, to_label),
        "label_to_last": mean_over(saliency, to_last),
        "rest": mean_over(saliency, [edge for edge in every if edge not in to_label and edge not in to_last]),
        "text_to_other": mean_over(saliency, [(i, j) for i, j in every if i < shown and i not in labels]),
        "other_to_last": mean_over(saliency, [(n - 1, j) for j in range(n - 1) if j not in labels]),
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_saliency_is_hugging_faces_patterns_times_their_gradients(load_tiny, family_folder, float64, name, monkeypatch):
    model, hf = load_tiny(name, dtype=torch.float64), hf_twin(family_folder, name)
    batch = ragged(model)
    saliency, flow = il.attention_saliency(model, batch), il.saliency_flow(model, batch)
    for row in range(len(batch)):
        n = int(batch.last[row]) + 1
        ids, answer = batch.tokens[row : row + 1, :n], int(batch.answer_tokens[row])
        theirs = hf_saliency(hf, ids, batch.label_tokens.tolist(), answer)
        assert_close(saliency[row, :, :n, :n], theirs)
        assert theirs.max() > 1e-2
        assert not saliency[row, :, n:].any()
        assert not saliency[row, :, :, n:].any()
        labels = [place for place in batch.label_positions[row].tolist() if place >= 0]
        for layer in range(len(theirs)):
            by_hand = flows(theirs[layer], labels, n, int(batch.query_range[row, 0]))
            for kind, value in by_hand.items():
                expected = torch.tensor(value, dtype=torch.float64)
                assert_close(getattr(flow, kind)[row, layer], expected, msg=f"{kind} in layer {layer}")
    monkeypatch.setattr(gradients, "GRAPH_BYTES", 1)
    assert_close(il.attention_saliency(model, batch), saliency)


def test_heads_that_are_edited_are_refused(gpt2, gpt2_batch):
    """The output of an ablated head is not its attention times its values."""
    with pytest.raises(InputError, match="remove any active edits"), il.ablate_heads(gpt2, [il.Head(1, 0)]):
        il.attention_saliency(gpt2, gpt2_batch)


def test_free_texts_are_scored_over_the_vocabulary(load_tiny, family_folder, float64):
    model, hf = load_tiny("gpt2", dtype=torch.float64), hf_twin(family_folder, "gpt2")
    free = il.tokenize(model, il.Text("love : bar one :", answer=" foo"), prepend_bos=False)
    theirs = hf_saliency(hf, free.tokens, list(range(97)), int(free.answer_tokens[0]))
    assert_close(il.attention_saliency(model, free)[0], theirs)
    with pytest.raises(InputError, match="no demonstrations"):
        il.saliency_flow(model, free)
    with pytest.raises(InputError, match="must have an answer or target"):
        il.attention_saliency(model, il.tokenize(model, il.Text("love : bar one :")))


def test_it_leaves_nothing_behind_and_shows_itself(load_tiny):
    model = load_tiny("gptj")
    il.saliency_flow(model, ragged(model))  # at first use TransformerLens adds hooks that stay
    before = remains(model)
    with torch.inference_mode():
        flow = il.saliency_flow(model, ragged(model))
    assert remains(model) == before
    assert not flow.rest.requires_grad
    assert list(flow.to_frame().columns) == ["prompt", "layer", *KINDS]
    assert "text to label" in repr(flow)
    assert "<table" in flow._repr_html_()
    share = replace(flow, text_to_label=3 * flow.text_to_other).share("text_to_label", "text_to_other")
    torch.testing.assert_close(share[:, 0], torch.full((3,), 0.75))
