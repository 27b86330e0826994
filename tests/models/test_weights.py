"""Weights that are not in memory as floats: quantized ones are refused, offloaded ones read, absent
ones refused.
"""

from types import SimpleNamespace

import pytest
import sweep
import torch
from shared import PROMPTS
from sweep import assert_same
from torch import nn
from transformers import PreTrainedTokenizerFast

import icl_lens as il
from icl_lens.foundation.digest import weights_digest
from icl_lens.models.loading.supported import tl_version
from icl_lens.models.passes.offload import ParameterMap
from icl_lens.models.view import ModelView


@pytest.fixture
def load(family_folder):
    """Return a function that loads a model anew, so that a test may change it."""

    def fresh(name, **kwargs):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(family_folder(name))
        return il.load_model(str(family_folder(name)), tokenizer=tokenizer, **kwargs)

    return fresh


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_packed_weights_are_refused(load, dtype):
    """Layers in 8 and 4 bits hold such weights."""
    model = load("llama_gqa", device="cpu")
    linear = next(module for module in model.blocks[1].modules() if type(module) is nn.Linear)
    linear.weight = nn.Parameter(torch.zeros(linear.weight.shape).to(dtype), requires_grad=False)
    with pytest.raises(
        il.InputError, match=rf"LlamaForCausalLM must not be quantized, got {str(dtype)[6:]};"
    ):
        ModelView.of(model)


def test_quantizers_that_leave_no_packed_parameter_are_refused(load):
    """GPTQ and AWQ pack into buffers; the model still names its quantizer."""
    model = load("gpt2", device="cpu")
    for configuration in (None, SimpleNamespace(dequantize=False)):
        model.original_model.hf_quantizer = SimpleNamespace(quantization_config=configuration)
        with pytest.raises(il.InputError, match="weights of GPT2LMHeadModel must not be quantized"):
            ModelView.of(model)


# Device maps of the parts other than blocks.
REST = {
    "gpt2": {
        "transformer.wte": "cpu",
        "transformer.wpe": "disk",
        "transformer.ln_f": "disk",
        "lm_head": "cpu",
    },
    "llama_gqa": {
        "model.embed_tokens": "disk",
        "model.norm": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
    "gemma2": {
        "model.embed_tokens": "cpu",
        "model.norm": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "qwen3": {
        "model.embed_tokens": "disk",
        "model.norm": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
    "gptj": {"transformer.wte": "disk", "transformer.ln_f": "disk", "lm_head": "disk"},
}


READ_WEIGHTS = [
    *(
        "capture",
        "whole_label_log_probs",
        "layer_log_prob_increase",
        "head_log_prob_increase",
        "top_subheads",
    ),
    *(
        "neuron_log_prob_increase",
        "Activations.label_values",
        "Activations.label_keys",
        "Activations.last_query",
    ),
    *("locate", "head_effects", "ablate_heads"),
]
"""A call for each part of the package that reads a model's weights."""


@pytest.fixture
def offloaded(load, tmp_path):
    """A family's tiny model with all layers but the first on the disk."""

    def offloaded(name):
        blocks = "transformer.h" if "transformer.ln_f" in REST[name] else "model.layers"
        spread = {f"{blocks}.{layer}": "disk" if layer else "cpu" for layer in range(3)}
        model = load(name, device_map=REST[name] | spread, offload_folder=str(tmp_path / "away"))
        assert any(parameter.is_meta for parameter in model.original_model.parameters())
        return model

    return offloaded


@pytest.mark.skipif(
    tl_version() < (4, 0), reason="TransformerLens 3 does not split fused matrices that are away"
)
@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_offloaded_weights_are_read_when_needed(offloaded, load_tiny, name):
    """Results are those of the model in memory; the weights do not stay in memory afterwards."""
    model, whole = offloaded(name), load_tiny(name)
    away = {
        name for name, parameter in model.original_model.named_parameters() if parameter.is_meta
    }
    cases = [
        sweep.Case(loaded_model, sweep.PROMPTS, sweep.OTHERS) for loaded_model in (model, whole)
    ]
    for what in READ_WEIGHTS:
        actual, expected = (sweep.CALLS[what].function(case) for case in cases)
        assert_same(actual, expected, msg=what)
    assert {
        name for name, parameter in model.original_model.named_parameters() if parameter.is_meta
    } == away
    assert ModelView.of(model).fingerprint() == ModelView.of(whole).fingerprint()
    parameters = dict(whole.named_parameters())
    assert weights_digest(ParameterMap(model)) == weights_digest(parameters)


def test_absent_weights_are_refused(load):
    model = load("gpt2", device="cpu")
    model.blocks[2].mlp.to("meta")
    with pytest.raises(il.InputError, match="some weights of GPT2LMHeadModel are not loaded"):
        il.capture(model, il.tokenize(model, PROMPTS, prepend_bos=False))
