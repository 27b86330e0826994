"""Calibrated scores of a batch by hand; calibration cancels a planted preference for a label."""

import pytest
import torch
from planted import build
from tolerance import assert_close

import icl_lens as il
from icl_lens.metrics import accuracy

PROMPTS = [
    il.Prompt.parse("love : bar like : bar eight : foo one :", answer="foo"),
    il.Prompt.parse("two : foo sad : bar three :", answer="foo"),
    il.Prompt.parse("sad : foo happy : foo two : bar three :", answer="bar"),
]


def test_a_batchs_prior_is_the_mean_over_its_prompts(gpt2):
    """The sweep compares the other method with plain passes."""
    batch = il.tokenize(gpt2, PROMPTS)
    p = il.score(gpt2, batch).softmax(dim=1)
    ours = il.calibrated_scores(gpt2, batch, "batch").exp()
    ratio = p / p.mean(0)
    assert_close(ours, ratio / ratio.sum(1, keepdim=True))
    assert (ours - p).abs().max() > 1e-4


@pytest.mark.parametrize("method", ["contextual", "batch"])
def test_a_planted_preference_for_a_label_cancels(tmp_path, method):
    """A two-tower model that always says "bar" because it prefers it: half right; calibrated,
    nearly always.
    """
    truth = build("two-tower", tmp_path, preference=12.0, preferred="bar")
    model = il.load_model(str(truth.folder))
    prompts = il.load_task("sentiment-number", path=truth.words, n=40)
    batch = il.tokenize(model, prompts)
    calibrated = il.calibrated_scores(model, batch, method, inputs=["foo", "bar"])
    assert accuracy(il.score(model, batch), batch.answer) < 0.6
    assert accuracy(calibrated, batch.answer) > 0.9


def test_prompts_with_labels_of_their_own(load_tiny):
    """Each prompt is calibrated among its own labels, and others have no probability."""
    model = load_tiny("gpt2")
    prompt = il.Prompt.parse("love : happy eight : sad one :", answer="sad")
    batch = il.tokenize(model, [*PROMPTS, prompt], prepend_bos=False)
    for method in ("contextual", "batch"):
        probabilities = il.calibrated_scores(model, batch, method, inputs=["nine"]).exp()
        assert_close(probabilities.sum(1), torch.ones(4))
        assert torch.equal(probabilities > 0, batch.label_mask)
