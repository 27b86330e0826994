"""Saliency of attention edges, and its flow from texts to labels to the end, against Hugging Face
and autograd.
"""

from dataclasses import replace

import pytest
import torch
from passes import remains
from reference_passes import saliency_of
from shared import hf_twin, ragged
from tolerance import assert_close

import icl_lens as il
from icl_lens.errors import InputError
from icl_lens.measures.saliency import KINDS


def test_heads_that_are_edited_are_refused(gpt2, gpt2_batch):
    """The output of an ablated head is not its attention times its values."""
    with (
        pytest.raises(InputError, match="remove any active edits"),
        il.ablate_heads(gpt2, [il.Head(1, 0)]),
    ):
        il.attention_saliency(gpt2, gpt2_batch)


def test_free_texts_are_scored_over_the_vocabulary(load_tiny, family_folder, float64):
    model, hf = load_tiny("gpt2", dtype=torch.float64), hf_twin(family_folder, "gpt2")
    free = il.tokenize(model, il.Text("love : bar one :", answer=" foo"), prepend_bos=False)
    theirs = saliency_of(hf, free.tokens[0], slice(None), int(free.answer_tokens[0]))
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
    share = replace(flow, text_to_label=3 * flow.text_to_other).share(
        "text_to_label", "text_to_other"
    )
    torch.testing.assert_close(share[:, 0], torch.full((3,), 0.75))
