"""Vectors added to prompts: shared or each its own, many at once, beside other edits. Their
numbers: the sweep.
"""

from weakref import WeakKeyDictionary

import families
import pytest
import torch
from passes import remains
from shared import PROMPTS
from tolerance import assert_close

import icl_lens as il
from icl_lens.edits import edit_checks, score
from icl_lens.reading.last_logits import last_log_probs

HEADS = [il.Head(0, 2), il.Head(1, 1), il.Head(2, 3), il.Head(2, 0)]


def tokenized(model, prompts):
    return il.tokenize(model, prompts, prepend_bos=False, labels=("foo", "bar"))


def test_a_vector_is_shared_by_prompts_or_belongs_to_them(gpt2):
    batch = tokenized(gpt2, PROMPTS)
    vectors = torch.randn(len(batch), families.D_MODEL, generator=torch.Generator().manual_seed(0))
    last_log_probs(gpt2, batch)  # the first pass compares the bridge with the model
    before = remains(gpt2)
    with il.edited(gpt2, il.AddVector(vectors, 1), batch=batch):
        ours = last_log_probs(gpt2, batch)
    with il.edited(gpt2, il.AddVector(vectors[0], 1), batch=batch):
        shared = last_log_probs(gpt2, batch)
    with (
        pytest.raises(il.InputError, match="run the same batch"),
        il.edited(gpt2, il.AddVector(vectors, 1), batch=batch),
    ):
        last_log_probs(gpt2, batch[:2])
    assert remains(gpt2) == before
    assert_close(shared[0], ours[0])
    assert (shared[1] - ours[1]).abs().max() > 0.01


def test_vectors_of_plain_texts_behind_many_layers_are_as_one_by_one(gpt2):
    batch = il.tokenize(gpt2, [il.Text(text) for text in ("love", "like : bar eight :", "two :")])
    layers = [2, 0, 2, 1, 0]
    vectors = torch.randn(len(layers), families.D_MODEL, generator=torch.Generator().manual_seed(0))
    sets = [[il.AddVector(vector, layer)] for vector, layer in zip(vectors, layers, strict=True)]
    scores = il.score(gpt2, batch, sets, read=lambda log_probs, prompt: log_probs)
    for number, edits in enumerate(sets):
        with il.edited(gpt2, *edits, batch=batch):
            assert_close(scores[:, number], last_log_probs(gpt2, batch))
    assert (scores[:, 0] - scores[:, 1]).abs().max() > 0.01


def test_vectors_share_keys_and_go_the_long_way_where_hooks_are_at_work(load_tiny, monkeypatch):
    model = load_tiny("gpt2")
    batch = tokenized(model, PROMPTS)
    vectors = torch.randn(3, families.D_MODEL, generator=torch.Generator().manual_seed(0))
    whole: list[int] = []
    sets = [[il.AddVector(vector, layer)] for layer, vector in enumerate(vectors)]
    monkeypatch.setattr(
        score, "last_log_probs", lambda *args: whole.append(1) or last_log_probs(*args)
    )
    il.score(model, batch, sets, read=lambda log_probs, prompt: log_probs)
    assert not whole
    with il.ablate_heads(model, HEADS[:1]):
        scores = il.score(model, batch, sets, read=lambda log_probs, prompt: log_probs)
        assert len(whole) == 3
        with il.edited(model, il.AddVector(vectors[1], 1), batch=batch):
            assert_close(scores[:, 1], last_log_probs(model, batch))


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_tests_of_heads_and_means_are_without_the_vector(load_tiny, monkeypatch, mode):
    model = load_tiny("gpt2")
    batch = tokenized(model, PROMPTS)
    vector = torch.randn(families.D_MODEL, generator=torch.Generator().manual_seed(0))
    options = {"mode": mode, "reference": batch[:1] if mode == "mean" else None}
    with (
        il.ablate_heads(model, HEADS, **options),
        il.edited(model, il.AddVector(vector, 1), batch=batch),
    ):
        expected = last_log_probs(model, batch)
    monkeypatch.setattr(edit_checks, "_TESTED", WeakKeyDictionary())
    with (
        il.edited(model, il.AddVector(vector, 1), batch=batch),
        il.ablate_heads(model, HEADS, **options),
    ):
        assert_close(last_log_probs(model, batch), expected)


def test_a_planted_vector_gains_where_it_is_read(gpt2, gpt2_batch):
    """The unembedding of the answer, in place of the last layer's output, is the answer; `best`
    finds the layer.
    """
    model, batch = gpt2, gpt2_batch[:1]
    vectors = torch.zeros(model.cfg.n_layers, model.cfg.d_model)
    vectors[-1] = 100 * model.W_U[:, int(batch.answer_tokens)].detach()
    gains = il.vector_gains(model, vectors, batch, replace=True)
    assert gains.best == model.cfg.n_layers - 1
    table = gains.to_frame().set_index("layer")
    intact = float(last_log_probs(model, batch)[0, batch.answer_tokens])
    assert_close(torch.tensor(table["gain"][gains.best]), gains.log_prob[0, -1] - intact)
    assert table["gain"][gains.best] > 0
    assert table["accuracy"].tolist()[-1] == 1


def test_of_equally_probable_tokens_one_is_on_top(load_tiny):
    """With an unembedding of zeros, all tokens are equally probable, and the answer is not the
    first.
    """
    model = load_tiny("gpt2")
    batch = il.tokenize(model, il.Prompt.parse("love : bar eight : foo one :", answer="foo"))
    before = model.unembed.weight.detach().clone(), model.unembed.bias.detach().clone()
    with torch.no_grad():
        model.unembed.weight.zero_()
        model.unembed.bias.zero_()
        try:
            gains = il.vector_gains(model, torch.ones(model.cfg.d_model), batch, layers=[0])
        finally:
            model.unembed.weight.copy_(before[0])
            model.unembed.bias.copy_(before[1])
    assert int(batch.answer_tokens) > 0
    assert not bool(gains.top1.any() or gains.top1_intact.any())


def test_a_mean_does_not_depend_on_how_its_prompts_are_divided(gpt2):
    """Batches of other sizes, such as the pieces of a long reference, give the same mean."""
    batch = tokenized(gpt2, PROMPTS)
    pieces = [batch[:1], batch[1:]]
    whole, divided = (il.function_vector(gpt2, prompts, HEADS) for prompts in (batch, pieces))
    assert_close(divided, whole)
    for positions in ("last", "all"):
        edits = [
            [il.Ablate(HEADS, mode="mean", reference=reference, positions=positions)]
            for reference in (batch, pieces)
        ]
        scores = il.score(gpt2, batch, edits)
        assert_close(scores[:, 1], scores[:, 0])
