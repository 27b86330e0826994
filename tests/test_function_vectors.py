"""Vectors added to prompts: shared or each its own, many at once, beside other edits. Their numbers: the sweep."""

from weakref import WeakKeyDictionary

import families
import pytest
import torch
from conftest import PROMPTS
from test_effects import remains
from tolerance import assert_close

import icl_lens as il
from icl_lens.interventions import edit_checks, engine

HEADS = [il.Head(0, 2), il.Head(1, 1), il.Head(2, 3), il.Head(2, 0)]


def tokenized(model, prompts):
    return il.tokenize(model, prompts, prepend_bos=False, labels=("foo", "bar"))


def test_a_vector_is_shared_by_prompts_or_belongs_to_them(gpt2):
    batch = tokenized(gpt2, PROMPTS)
    vectors = torch.randn(len(batch), families.D_MODEL, generator=torch.Generator().manual_seed(0))
    before = remains(gpt2)
    with il.edited(gpt2, il.AddVector(vectors, 1), batch=batch):
        ours = il.last_log_probs(gpt2, batch)
    with il.edited(gpt2, il.AddVector(vectors[0], 1), batch=batch):
        shared = il.last_log_probs(gpt2, batch)
    with (
        pytest.raises(il.InputError, match="run the same batch"),
        il.edited(gpt2, il.AddVector(vectors, 1), batch=batch),
    ):
        il.last_log_probs(gpt2, batch[:2])
    assert remains(gpt2) == before
    assert_close(shared[0], ours[0])
    assert (shared[1] - ours[1]).abs().max() > 0.01


def test_vectors_of_plain_texts_behind_many_layers_are_as_one_by_one(gpt2):
    batch = il.tokenize(gpt2, [il.Text(text) for text in ("love", "like : bar eight :", "two :")])
    layers = [2, 0, 2, 1, 0]
    vectors = torch.randn(len(layers), families.D_MODEL, generator=torch.Generator().manual_seed(0))
    sets = [[il.AddVector(vector, layer)] for vector, layer in zip(vectors, layers, strict=True)]
    found = il.score(gpt2, batch, sets, read=lambda log_probs, prompt: log_probs)
    for number, edits in enumerate(sets):
        with il.edited(gpt2, *edits, batch=batch):
            assert_close(found[:, number], il.last_log_probs(gpt2, batch))
    assert (found[:, 0] - found[:, 1]).abs().max() > 0.01


def test_vectors_share_keys_and_go_the_long_way_where_hooks_are_at_work(load_tiny, monkeypatch):
    model = load_tiny("gpt2")
    batch = tokenized(model, PROMPTS)
    vectors = torch.randn(3, families.D_MODEL, generator=torch.Generator().manual_seed(0))
    whole: list[int] = []
    sets = [[il.AddVector(vector, layer)] for layer, vector in enumerate(vectors)]
    monkeypatch.setattr(engine, "last_log_probs", lambda *args: whole.append(1) or il.last_log_probs(*args))
    il.score(model, batch, sets, read=lambda log_probs, prompt: log_probs)
    assert not whole
    with il.ablate_heads(model, HEADS[:1]):
        found = il.score(model, batch, sets, read=lambda log_probs, prompt: log_probs)
        assert len(whole) == 3
        with il.edited(model, il.AddVector(vectors[1], 1), batch=batch):
            assert_close(found[:, 1], il.last_log_probs(model, batch))


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_tests_of_heads_and_means_are_without_the_vector(load_tiny, monkeypatch, mode):
    model = load_tiny("gpt2")
    batch = tokenized(model, PROMPTS)
    vector = torch.randn(families.D_MODEL, generator=torch.Generator().manual_seed(0))
    options = {"mode": mode, "reference": batch[:1] if mode == "mean" else None}
    with il.ablate_heads(model, HEADS, **options), il.edited(model, il.AddVector(vector, 1), batch=batch):
        expected = il.last_log_probs(model, batch)
    monkeypatch.setattr(edit_checks, "_TESTED", WeakKeyDictionary())
    with il.edited(model, il.AddVector(vector, 1), batch=batch), il.ablate_heads(model, HEADS, **options):
        assert_close(il.last_log_probs(model, batch), expected)
