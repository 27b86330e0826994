"""Sets of heads removed together at the last position: against whole passes and against Hugging Face's modules."""

import copy

import families
import pytest
import reference_hf
import torch
from conftest import PROMPTS
from transformers import AutoModelForCausalLM

import icl_lens as il
from icl_lens.interventions import cached_rows, head_sets
from icl_lens.models.view import ModelView

EVERY = [(layer, head) for layer in range(3) for head in range(4)]
SETS = [[], [(2, 3)], [(0, 1), (0, 2), (2, 0)], [(1, 0), (2, 0)], EVERY]
FAMILIES = ["gpt2", "gptj", "llama_bias"]


def ragged(model):
    return il.tokenize(model, PROMPTS, prepend_bos=False)


def hf_labels(hf, batch, row, heads, instead):
    """Log-probabilities of the labels from Hugging Face's modules alone: z of these heads replaced at the end."""
    hf = copy.deepcopy(hf)
    wiring = reference_hf._WIRING[hf.config.model_type]

    def editor(layer):
        def edit(module, args):
            z = args[0].clone().unflatten(-1, (families.N_HEADS, -1))
            for one, head in heads:
                if one == layer:
                    z[:, -1, head] = instead[layer][head] if instead is not None else 0.0
            return (z.flatten(-2), *args[1:])

        return edit

    for layer, block in enumerate(hf.get_submodule(wiring.layers)):
        block.get_submodule(wiring.out).register_forward_pre_hook(editor(layer))
    ids = batch.tokens[row : row + 1, : int(batch.last[row]) + 1]
    with torch.no_grad():
        return torch.log_softmax(hf(ids).logits[0, -1], dim=-1)[batch.label_tokens]


def hf_mean_z(hf, batch):
    """[layer head d_head] z at each prompt's end, averaged."""
    hf, sums = copy.deepcopy(hf), {}
    wiring = reference_hf._WIRING[hf.config.model_type]

    def keeper(layer):
        def keep(module, args):
            z = args[0][0, -1].unflatten(-1, (families.N_HEADS, -1))
            sums[layer] = sums.get(layer, 0) + z / len(batch)

        return keep

    for layer, block in enumerate(hf.get_submodule(wiring.layers)):
        block.get_submodule(wiring.out).register_forward_pre_hook(keeper(layer))
    with torch.no_grad():
        for row in range(len(batch)):
            hf(batch.tokens[row : row + 1, : int(batch.last[row]) + 1])
    return sums


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_against_hugging_face(load_tiny, family_folder, name, mode):
    """In float64, sets over several layers, the empty one and all heads; ragged prompts."""
    model = load_tiny(name, dtype=torch.float64)
    hf = AutoModelForCausalLM.from_pretrained(family_folder(name), attn_implementation="eager").double().eval()
    batch = ragged(model)
    reference = batch[[0, 2]] if mode == "mean" else None
    instead = hf_mean_z(hf, reference) if reference is not None else None
    found = il.label_log_probs_without(model, batch, SETS, mode=mode, reference=reference)
    assert found.shape == (3, len(SETS), 2)
    for row in range(len(batch)):
        for place, heads in enumerate(SETS):
            expected = hf_labels(hf, batch, row, heads, instead)
            torch.testing.assert_close(found[row, place], expected, atol=1e-5, rtol=0)
    # Each set says something of its own.
    assert (found[:, 1:] - found[:, :1]).abs().amax((0, 2)).min() > 1e-3


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama_gqa", "gemma2", "bloom", "mistral"])
@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_rows_are_whole_passes(load_tiny, monkeypatch, name, mode):
    """Also in the smallest pieces, and where nothing can be shared."""
    model = load_tiny(name)
    batch = ragged(model)
    reference = batch if mode == "mean" else None
    found = il.label_log_probs_without(model, batch, SETS, mode=mode, reference=reference)
    removed = head_sets.marked(ModelView.of(model), SETS)
    whole = head_sets._whole(model, batch, removed, mode, None if reference is None else [reference])
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    monkeypatch.setattr(cached_rows, "ROW_BYTES", 1)
    monkeypatch.setattr(cached_rows, "KEY_BYTES", 1)
    pieces = il.label_log_probs_without(model, batch, SETS, mode=mode, reference=reference)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)


def test_within_another_intervention_prompts_are_run_whole(load_tiny):
    model = load_tiny("gpt2")
    batch = ragged(model)
    with il.ablate_heads(model, [(0, 0)], positions="last"):
        nested = il.label_log_probs_without(model, batch, [[], [(1, 1)]])
    own = il.label_log_probs_without(model, batch, [[(0, 0)], [(0, 0), (1, 1)]])
    torch.testing.assert_close(nested, own, atol=1e-5, rtol=1e-5)


def test_bad_arguments_are_one_sentence(load_tiny, no_type_checks):
    model = load_tiny("gpt2")
    batch = ragged(model)
    for sets, options, text in (
        ([], {}, "no set of heads"),
        ([[(9, 0)]], {}, "9"),
        ([[]], {"mode": "mean"}, "reference"),
        ([[]], {"mode": "other"}, "mode"),
        ([[]], {"reference": batch}, "reference"),
    ):
        with pytest.raises(il.InputError, match=text):
            il.label_log_probs_without(model, batch, sets, **options)
    free = il.tokenize_text(model, "love : bar one :")
    with pytest.raises(il.InputError, match="label"):
        il.label_log_probs_without(model, free, [[]])
