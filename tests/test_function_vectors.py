"""Function vectors against Hugging Face's modules and plain hooks: mean outputs, indirect effects, the vector added."""

from weakref import WeakKeyDictionary

import families
import pytest
import reference_hf
import torch
from conftest import PROMPTS, QUICK_FAMILIES
from test_effects import hf_twin, remains
from tolerance import assert_close

import icl_lens as il
from icl_lens.interventions import edit_checks, engine

FAMILIES = ["gpt2", "gptj", "llama_bias"]
SHUFFLED = [
    il.Prompt.parse("love : foo like : bar eight : bar two : foo one :", answer="foo"),
    il.Prompt.parse("happy : foo sad : bar three : bar nine :", answer="foo"),
]
HEADS = [il.Head(0, 2), il.Head(1, 1), il.Head(2, 3), il.Head(2, 0)]


def tokenized(model, prompts):
    return il.tokenize(model, prompts, prepend_bos=False, labels=("foo", "bar"))


def rows_of(batch):
    return [batch.tokens[row : row + 1, : int(batch.last[row]) + 1] for row in range(len(batch))]


def last_z(hf, ids, head):
    """[d_head] what a head gives at the last position."""
    return reference_hf.capture(hf, ids[0]).z[head.layer, -1, head.head]


def written(hf, head, z):
    """What the output projection makes of one head's z, without its bias."""
    module = reference_hf._layers(hf)[head.layer].get_submodule(reference_hf._WIRING[hf.config.model_type].out)
    alone = torch.zeros(families.N_HEADS, len(z), dtype=z.dtype)
    alone[head.head] = z
    with torch.no_grad():
        return module(alone.flatten()[None])[0] - module(torch.zeros_like(alone).flatten()[None])[0]


def probability(hf, ids, answer):
    with torch.no_grad():
        return torch.softmax(hf(ids).logits[0, -1], dim=-1)[answer]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_vector_is_the_sum_of_mean_outputs(load_tiny, family_folder, float64, name):
    model, hf = load_tiny(name, dtype=torch.float64), hf_twin(family_folder, name)
    batch = tokenized(model, PROMPTS)
    expected = torch.zeros(families.D_MODEL, dtype=torch.float64)
    for head in HEADS:
        for ids in rows_of(batch):
            expected += written(hf, head, last_z(hf, ids, head)) / len(batch)
    assert expected.abs().max() > 0.1
    vector = il.function_vector(model, [*HEADS, HEADS[0]], batch)
    assert_close(vector, expected)
    assert_close(il.function_vector(model, HEADS, [batch[:1], batch[1:]]), vector)


@pytest.mark.parametrize("name", FAMILIES)
def test_indirect_effects_are_means_put_in_place(load_tiny, family_folder, float64, name):
    model, hf = load_tiny(name, dtype=torch.float64), hf_twin(family_folder, name)
    clean, corrupted = tokenized(model, PROMPTS), tokenized(model, SHUFFLED)
    found = il.indirect_effects(model, corrupted, clean)
    assert found.shape == (2, families.N_LAYERS, families.N_HEADS)
    for head in HEADS:
        mean = torch.stack([last_z(hf, ids, head) for ids in rows_of(clean)]).mean(0)

        def put(layer, z, head=head, mean=mean):
            if layer == head.layer:
                z[0, -1, head.head] = mean

        for row, ids in enumerate(rows_of(corrupted)):
            answer = corrupted.answer_tokens[row]
            before = probability(hf, ids, answer)
            with reference_hf.edited_z(hf, put):
                after = probability(hf, ids, answer)
            assert_close(found[row][head], after - before)
    assert found.abs().max() > 1e-3


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("layer", [0, 2])
def test_a_vector_is_added_behind_its_layer(load_tiny, family_folder, float64, name, layer):
    model, hf = load_tiny(name, dtype=torch.float64), hf_twin(family_folder, name)
    batch = tokenized(model, PROMPTS)
    vectors = torch.randn(len(batch), families.D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    block = hf.get_submodule(reference_hf._WIRING[hf.config.model_type].layers)[layer]
    without = il.last_log_probs(model, batch)  # the first pass hangs TransformerLens' own hooks in
    before = remains(model)
    with il.edited(model, il.AddVector(vectors, layer), batch=batch):
        ours = il.last_log_probs(model, batch)
    with il.edited(model, il.AddVector(vectors[0], layer), batch=batch):
        shared = il.last_log_probs(model, batch)
    with (
        pytest.raises(il.InputError, match="run the same batch"),
        il.edited(model, il.AddVector(vectors, layer), batch=batch),
    ):
        il.last_log_probs(model, batch[:2])
    assert remains(model) == before
    assert (ours - without).abs().max() > 0.1
    assert_close(shared[0], ours[0])
    for row, ids in enumerate(rows_of(batch)):

        def add(module, args, output, row=row):
            stream = (output[0] if isinstance(output, tuple) else output).clone()
            stream[0, -1] += vectors[row]
            return (stream, *output[1:]) if isinstance(output, tuple) else stream

        handle = block.register_forward_hook(add)
        with torch.no_grad():
            theirs = torch.log_softmax(hf(ids).logits[0, -1], dim=-1)
        handle.remove()
        assert_close(ours[row], theirs)


@pytest.mark.parametrize("name", sorted(QUICK_FAMILIES))
@pytest.mark.parametrize("labeled", [True, False])
def test_many_vectors_behind_many_layers_are_as_one_by_one(load_tiny, name, labeled):
    model = load_tiny(name)
    plain = [il.Text(text) for text in ("love", "like : bar eight :", "two :")]
    batch = tokenized(model, PROMPTS) if labeled else il.tokenize(model, plain)
    layers = [2, 0, 2, 1, 0]
    vectors = torch.randn(len(layers), families.D_MODEL, generator=torch.Generator().manual_seed(0))
    sets = [[il.AddVector(vector, layer)] for vector, layer in zip(vectors, layers, strict=True)]
    found = il.score(model, batch, sets, read=lambda log_probs, prompt: log_probs)
    whole = il.last_log_probs(model, batch)
    for i, layer in enumerate(layers):
        with il.edited(model, il.AddVector(vectors[i], layer), batch=batch):
            one = il.last_log_probs(model, batch)
        assert (one - whole).abs().max() > 0.01
        assert_close(found[:, i], one)


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


def test_a_planted_vector_gains_where_it_is_read(gpt2, gpt2_batch):
    """The unembedding of the answer, in place of the last layer's output, is the answer; `best` finds the layer."""
    model, batch = gpt2, gpt2_batch[:1]
    vectors = torch.zeros(model.cfg.n_layers, model.cfg.d_model)
    vectors[-1] = 100 * model.W_U[:, int(batch.answer_tokens)].detach()
    found = il.vector_gains(model, vectors, batch, replace=True)
    assert found.best == model.cfg.n_layers - 1
    table = found.to_frame().set_index("layer")
    intact = float(il.last_log_probs(model, batch)[0, batch.answer_tokens])
    assert_close(torch.tensor(table["gain"][found.best]), found.log_prob[0, -1] - intact)
    assert table["gain"][found.best] > 0
    assert table["accuracy"].tolist()[-1] == 1
    for layers in ([], [99], [-1]):
        with pytest.raises(il.InputError, match="layers must be between 0 and"):
            il.vector_gains(model, vectors, batch, layers=layers)
    with pytest.raises(il.InputError, match="vectors must have shape"):
        il.vector_gains(model, vectors[:2], batch)
