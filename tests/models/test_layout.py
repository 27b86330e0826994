"""Layouts of blocks that cannot be explained are refused where a model is first used; others are
read as they are.
"""

import gc
import weakref

import families
import pytest
import torch
from shared import PROMPTS
from tolerance import assert_close

import icl_lens as il
from icl_lens.models.loading import layout
from icl_lens.models.view import ModelView

ROTATES = {"cohere2": [True, False, True], "smollm3": [True, False, True]}
CALLS = [
    lambda model, batch: il.capture(model, batch),
    lambda model, batch: il.score(model, batch),
    lambda model, batch: il.score(model, batch, [[il.Ablate([(1, 0)])]]),
    lambda model, batch: il.head_effects(model, batch),
    lambda model, batch: il.query_key_metric(model, (1, 0)),
    lambda model, batch: il.explain(model, PROMPTS[0], prepend_bos=False),
    lambda model, batch: il.ablate_heads(model, [(1, 0)]).__enter__(),
]


@pytest.fixture
def batch(gpt2_batch):
    """A batch for models with the same tokens, also those that cannot tokenize for themselves."""
    return gpt2_batch


@pytest.mark.parametrize("call", CALLS)
def test_every_function_refuses_layers_without_attention_alike(load_tiny, batch, call):
    model = load_tiny("lfm2")
    with pytest.raises(
        il.InputError,
        match=r"^Lfm2ForCausalLM is not supported: .* \(layers 0, 2\), .*; use a decoder",
    ):
        call(model, batch)


def test_a_layer_with_other_sizes_or_without_a_hook_is_named(load_tiny, monkeypatch):
    model = load_tiny("gpt2")
    with monkeypatch.context() as patch:
        patch.setattr(model.cfg, "n_key_value_heads", 3, raising=False)
        patch.setattr(model.cfg, "d_head", 4)
        patch.setattr(layout, "_CHECKED", set())
        with pytest.raises(
            il.InputError, match="W_Q in layer 0 does not have the size 4×32×4 of the configuration"
        ):
            ModelView.of(model)
    with monkeypatch.context() as patch:
        patch.setattr(layout, "_CHECKED", set())
        patch.setattr(layout, "_HOOKS", ("attn.hook_z", "attn.hook_nothing"))
        with pytest.raises(il.InputError, match=r"layer 0 has no attn\.hook_nothing"):
            ModelView.of(model)
    ModelView.of(model)


def test_checked_models_are_not_kept_alive(family_folder):
    model = il.load_model(str(family_folder("gpt2")), device="cpu", tokenizer=families.tokenizer())
    ModelView.of(model)
    assert model in layout._CHECKED
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("name", ROTATES)
def test_layers_without_rotation_have_no_distance(load_tiny, name):
    """Scores at two distances differ in the layers that the configuration rotates, and only
    there.
    """
    model = load_tiny(name)
    x = torch.randn(2, 5, families.D_MODEL, generator=torch.Generator().manual_seed(0))
    for layer, rotates in enumerate(ROTATES[name]):
        near, far = (
            il.query_key_metric(model, (layer, 1), distance=distance).scores(*x)
            for distance in (1, 9)
        )
        assert torch.equal(near, far) != rotates


@pytest.mark.parametrize("name", ROTATES)
def test_attention_of_layers_without_rotation_follows_from_their_parts(load_tiny, name):
    model = load_tiny(name)
    batch = il.tokenize(model, PROMPTS[:1], prepend_bos=False)
    acts = il.capture(model, batch, writers="all")
    for layer in range(len(ROTATES[name])):
        parts = il.attention_score_parts(acts, (layer, 1), keys="all")
        row = parts.scores[0] + torch.zeros_like(acts.pattern[0, layer, 1])
        window = families.WINDOW if name == "cohere2" and ROTATES[name][layer] else len(row)
        expected = acts.pattern[0, layer, 1, -window:]
        assert_close(row[-window:].softmax(-1), expected)


def test_heads_that_gate_their_values_are_refused(load_tiny, gpt2_batch, monkeypatch):
    """What a head writes would otherwise be split wrongly among positions, although heads sum to
    attention's output.
    """
    model = load_tiny("gpt2")
    monkeypatch.setattr(ModelView, "has_hooks", False)  # as in a model that gates by itself

    def gate(z, hook):
        return z * 0.5

    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_z", gate)]):
        with pytest.raises(
            il.InputError, match="in layer 1 the heads' outputs are not the sum of their values"
        ):
            il.capture(model, gpt2_batch)
        unchecked = il.capture(model, gpt2_batch, check=False)
    clean = il.capture(model, gpt2_batch)
    assert_close(unchecked.z[:, 1], clean.z[:, 1] * 0.5)
