"""Calibrated scores equal those computed by hand from plain Hugging Face passes, and cancel a planted preference."""

import pytest
import torch
from tolerance import assert_close

import icl_lens as il
from experiments.planted import build
from icl_lens.metrics import accuracy

PROMPTS = [
    il.Prompt.parse("love : bar like : bar eight : foo one :", answer="foo"),
    il.Prompt.parse("two : foo sad : bar three :", answer="foo"),
    il.Prompt.parse("sad : foo happy : foo two : bar three :", answer="bar"),
]


def probabilities(hf, model, batch, query=None):
    """Softmax over "bar" and "foo" of the logits after each prompt, with another query if one is given."""
    found = []
    for row, text in enumerate(batch.texts):
        own = PROMPTS[row].query
        text = text if query is None else text.removesuffix(f"{own} :") + f"{query} :"
        ids = model.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        found.append(torch.softmax(hf(ids).logits[0, -1, batch.label_tokens], dim=-1))
    return torch.stack(found)


@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_priors_are_those_of_plain_passes(load_tiny, family_run, name):
    model, hf = load_tiny(name), family_run(name).hf.float()
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    with torch.no_grad():
        p = probabilities(hf, model, batch)
        priors = {
            "batch": p.mean(0, keepdim=True),
            "contextual": (probabilities(hf, model, batch, "nine") + probabilities(hf, model, batch, "red")) / 2,
        }
    for method, prior in priors.items():
        ours = il.calibrated_scores(model, batch, method, inputs=["nine", "red"])
        assert_close(ours.exp(), (p / prior) / (p / prior).sum(1, keepdim=True))
        assert (ours.exp() - p).abs().max() > 1e-4
    hf.double()


@pytest.mark.parametrize("method", ["contextual", "batch"])
def test_a_planted_preference_for_a_label_cancels(tmp_path, method):
    """A two-tower model that always says "bar" because it prefers it: half right; calibrated, nearly always."""
    truth = build("two-tower", tmp_path, preference=12.0, preferred="bar")
    model = il.load_model(str(truth.folder))
    prompts = il.load_task("sentiment-number", path=truth.words, n=40)
    batch = il.tokenize(model, prompts)
    calibrated = il.calibrated_scores(model, batch, method, inputs=["foo", "bar"])
    assert accuracy(il.label_log_probs(model, batch), batch.answer) < 0.6
    assert accuracy(calibrated, batch.answer) > 0.9


def test_prompts_with_labels_of_their_own(load_tiny):
    """Each prompt is calibrated among its own labels, and others have no probability."""
    model = load_tiny("gpt2")
    other = il.Prompt.parse("love : happy eight : sad one :", answer="sad")
    batch = il.tokenize(model, [*PROMPTS, other], prepend_bos=False)
    for method in ("contextual", "batch"):
        found = il.calibrated_scores(model, batch, method, inputs=["nine"]).exp()
        assert_close(found.sum(1), torch.ones(4))
        assert torch.equal(found > 0, batch.label_mask)
    with pytest.raises(il.InputError, match="inputs must be a list of at least one text"):
        il.calibrated_scores(model, batch, inputs=[])
