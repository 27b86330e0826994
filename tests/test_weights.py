"""Where weights lie and what they are: device maps, half precision beside single, quantised and absent weights."""

import pytest
import torch
from conftest import PROMPTS
from torch import nn
from transformers import PreTrainedTokenizerFast

import icl_lens as il
from icl_lens.models.view import ModelView


@pytest.fixture
def load(family_folder):
    """A model of one's own, to be spoilt."""

    def fresh(name, **kwargs):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(family_folder(name))
        return il.load_model(str(family_folder(name)), tokenizer=tokenizer, **kwargs)

    return fresh


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}])
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_device_maps_reach_the_loader(load, load_tiny, name, device_map):
    model = load(name, device_map=device_map)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    found = il.head_log_prob_increase(il.capture(model, batch), batch.answer_tokens)
    expected = il.head_log_prob_increase(il.capture(load_tiny(name), batch), batch.answer_tokens)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert ModelView.of(model).home == torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_packed_weights_are_refused(load, dtype):
    """As 8-bit and 4-bit layers hold them."""
    model = load("llama_gqa", device="cpu")
    linear = next(module for module in model.blocks[1].modules() if type(module) is nn.Linear)
    linear.weight = nn.Parameter(torch.zeros(linear.weight.shape).to(dtype), requires_grad=False)
    with pytest.raises(il.InputError, match=rf"LlamaForCausalLM are quantised \({str(dtype)[6:]}\).*unquantised"):
        ModelView.of(model)


def test_quantisers_that_leave_no_packed_parameter_are_refused(load):
    """GPTQ and AWQ pack into buffers; the model still names its quantiser."""
    model = load("gpt2", device="cpu")
    model.original_model.hf_quantizer = object()
    with pytest.raises(il.InputError, match="the weights of GPT2LMHeadModel are quantised, and heads cannot be read"):
        ModelView.of(model)


def test_absent_weights_are_refused(load):
    model = load("gpt2", device="cpu")
    model.blocks[2].mlp.to("meta")
    with pytest.raises(il.InputError, match="some weights of GPT2LMHeadModel are not in memory"):
        il.capture(model, il.tokenize(model, PROMPTS, prepend_bos=False))
