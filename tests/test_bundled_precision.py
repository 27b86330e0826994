"""The bundled models: exact like any family, and the same heads in half precision."""

from pathlib import Path

import against_hf
import pytest
import torch
from transformers import AutoModelForCausalLM

import icl_lens as il
from icl_lens.prompts.tasks import load_task

BUNDLED = Path(str(il.__file__)).parent / "bundled"
MODELS = ["icl-mini", "icl-mini-llama", "icl-mini-gptj"]


def prompts(n):
    return load_task("sentiment-number", n=n, seed=0)


@pytest.mark.parametrize("name", MODELS)
def test_increases_agree_with_hugging_face(name):
    """Alone and unpadded there, together here; the model's own tokenizer; ablation and search as well."""
    model = il.load_model(name, device="cpu")
    batch = il.tokenize(model, prompts(4))
    acts = il.capture(model, batch)
    hf = AutoModelForCausalLM.from_pretrained(BUNDLED / name, attn_implementation="eager")
    hf = hf.double().eval()
    against_hf.check_increases(acts, batch, hf, folded=False, conventions=against_hf.CONVENTIONS[:1])
    against_hf.check_search(acts, batch, certified=True)
    against_hf.check_ablation(model, batch, hf, [il.Head(0, 1), il.Head(2, 0)], folded=False)


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_finds_the_same_heads(name):
    """At least 18 of the 20 heads of largest mean increase are the same in bfloat16."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = il.load_model(name, device="cpu", dtype=dtype)
        batch = il.tokenize(model, prompts(64))
        top = il.top_heads(il.capture(model, batch), batch.answer_tokens, k=20)
        found[dtype] = set(top.heads)
    assert len(found[torch.float32] & found[torch.bfloat16]) >= 18
