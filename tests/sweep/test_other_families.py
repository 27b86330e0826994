"""Every other model type that transformers loads for causal language: it agrees with Hugging Face,
or one InputError.

Types differ in thousands of ways that no table lists. What must never happen is a number that is
not the model's, or an error that is not the package's own.
"""

import sys

import causal_models
import families
import pytest
import torch
from family_tables import OTHER_TYPES, listed_types

import icl_lens as il
from icl_lens.models.loading.supported import tl_version
from icl_lens.reading.last_logits import last_log_probs

PROMPT = il.Prompt.parse(families.PROMPT, answer="foo")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind in causal_models.KINDS if kind not in listed_types()]
)
def test_a_type_agrees_with_hugging_face_or_is_refused(tmp_path, kind, request):
    try:
        hf = causal_models.build(kind)
        hf.save_pretrained(tmp_path)
    except Exception as error:
        pytest.skip(f"no tiny model of {kind}: {error}")
    families.tokenizer().save_pretrained(tmp_path)
    expected = causal_models.log_probs(hf)
    refusal = None
    try:
        model = il.load_model(str(tmp_path), device="cpu", tokenizer=families.tokenizer())
        batch = il.tokenize(model, [PROMPT], prepend_bos=False)
        acts = il.capture(model, batch)
    except il.InputError as error:
        refusal = str(error)
    if refusal is not None:
        request.node.user_properties.append(("refused", refusal))
        assert kind not in OTHER_TYPES or tl_version() < (4, 0), refusal
        return
    torch.testing.assert_close(last_log_probs(model, batch)[0], expected, atol=1e-3, rtol=0)
    torch.testing.assert_close(
        acts.label_log_probs[0], expected[batch.label_tokens], atol=1e-3, rtol=0
    )
    heads = torch.stack(
        [acts.head_outputs(layer).sum(1) for layer in range(acts.view.n_layers)], dim=1
    )
    biases = [acts.view.b_O(layer) for layer in range(acts.view.n_layers)]
    constant = torch.stack(
        [torch.zeros_like(heads[0, 0]) if bias is None else bias for bias in biases]
    )
    if acts.attn_scale is not None:
        constant = constant * acts.attn_scale[..., None]
    torch.testing.assert_close(heads + constant, acts.attn_out, atol=1e-3, rtol=1e-3)
    assert il.head_log_prob_increase(acts, batch.answer_tokens).isfinite().all()
    try:
        il.explain(model, PROMPT, prepend_bos=False, k=4)
    except il.InputError as error:
        request.node.user_properties.append(("explain refused", str(error)))
    assert kind in OTHER_TYPES, "add it to OTHER_TYPES and run python docs/families_table.py"


def test_an_unsupported_architecture_is_named(tmp_path):
    causal_models.build("diffllama").save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        il.InputError, match="TransformerLens does not support DiffLlamaForCausalLM; use a family"
    ):
        il.load_model(str(tmp_path), device="cpu", tokenizer=families.tokenizer())


@pytest.mark.skipif(tl_version() < (4, 0), reason="TransformerLens 3 cannot load this type")
def test_loading_installs_nothing(tmp_path, monkeypatch):
    """TransformerLens installs torchvision, and with it another torch, if an image processor cannot
    be loaded.
    """
    import transformers

    load = transformers.AutoProcessor.from_pretrained
    installed = []
    monkeypatch.setitem(sys.modules, "torchvision", None)  # missing, whether or not it is installed
    monkeypatch.setattr(
        "subprocess.check_call", lambda command, *args, **kwargs: installed.append(command)
    )
    causal_models.build("gemma4_unified").save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    model = il.load_model(str(tmp_path), device="cpu", tokenizer=families.tokenizer())
    assert model.cfg.is_multimodal
    assert not installed
    assert transformers.AutoProcessor.from_pretrained == load


def test_listed_types_exist():
    assert not OTHER_TYPES - set(causal_models.KINDS)
    assert not OTHER_TYPES & listed_types()
