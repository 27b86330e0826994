"""Adapters of peft: passes follow them, weights are not read behind them, and positions of prompts
are not shifted.
"""

import copy

import families
import pytest
import torch
from tolerance import assert_close

import icl_lens as il

PROMPT = il.Prompt.parse(families.PROMPT, answer="foo")
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


def configuration(peft, kind):
    if kind == "ia3":
        return peft.IA3Config(
            task_type="CAUSAL_LM", target_modules=TARGETS, feedforward_modules=["down_proj"]
        )
    return peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, use_dora=kind == "dora", target_modules=TARGETS
    )


def adapted(peft, family, config):
    """Return a family's tiny model with an adapter that changes what it computes."""
    model = peft.get_peft_model(families.build(family), config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def load(hf):
    return il.load_model(hf_model=hf, tokenizer=families.tokenizer(), device="cpu")


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_an_adapter_gives_the_numbers_of_the_merged_model_or_is_refused(peft, kind):
    hf = adapted(peft, "llama_gqa", configuration(peft, kind))
    model, merged = load(hf), load(copy.deepcopy(hf).merge_and_unload())
    batch = il.tokenize(model, [PROMPT], prepend_bos=False)
    plain = il.score(load(families.build("llama_gqa")), batch)
    assert (il.score(model, batch) - plain).abs().max() > 1e-2
    acts, expected = il.capture(model, batch), il.capture(merged, batch)
    assert_close(
        acts.label_log_probs.as_subclass(torch.Tensor),
        expected.label_log_probs.as_subclass(torch.Tensor),
    )
    assert_close(il.head_log_prob_increase(acts), il.head_log_prob_increase(expected))
    assert_close(acts.last_query("L1H0"), expected.last_query("L1H0"))
    for read in (
        lambda: il.neuron_log_prob_increase(acts, 1),
        lambda: il.query_key_metric(model, "L1H0"),
        lambda: il.head_copying(model, "L1H0", [2, 3]),
    ):
        with pytest.raises(il.InputError, match="merge_and_unload"):
            read()


def test_an_adapter_on_a_joint_matrix_is_refused(peft):
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"])
    with pytest.raises(
        il.InputError, match=r"an adapter of peft acts on .*c_attn.*merge_and_unload"
    ):
        load(adapted(peft, "gpt2", config))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_positions_before_the_text_are_refused(peft, kind):
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(il.InputError, match="learned positions before every text"):
        load(peft.get_peft_model(families.build("llama_gqa"), config))
