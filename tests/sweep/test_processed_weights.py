"""TransformerBridge in compatibility mode, weights processed or not: what stays, and what moves by
a known amount.
"""

from functools import cache

import against_hf
import pytest
from cases import slow
from family_tables import PROCESSED_EXACT, SOFT_CAPPED
from shared import PROMPTS
from tolerance import assert_close
from transformers import PreTrainedTokenizerFast

import icl_lens as il

HEADS = [il.Head(0, 1), il.Head(2, 3)]
MODES = {"processed": {"no_processing": False}, "unprocessed": {"no_processing": True}}


@pytest.fixture(scope="module")
def run(family_folder, family_run):
    """(model, batch, activations, Hugging Face twin in float64) of a family in one mode, computed
    once.
    """

    @cache
    def get(name, mode):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(family_folder(name))
        model = il.load_model(str(family_folder(name)), device="cpu", tokenizer=tokenizer)
        model.enable_compatibility_mode(disable_warnings=True, **MODES[mode])
        batch = il.tokenize(model, PROMPTS, prepend_bos=False)
        return model, batch, il.capture(model, batch), family_run(name).hf

    return get


@pytest.mark.parametrize("name", PROCESSED_EXACT)
@pytest.mark.parametrize("mode", ["processed", slow("unprocessed")])
def test_increases_agree_with_hugging_face(run, name, mode):
    """Those of layers and neurons as on raw weights; heads and subheads lose the constant part of
    processed values.
    """
    _, batch, acts, hf = run(name, mode)
    conventions = against_hf.CONVENTIONS[: None if mode == "processed" else 1]
    against_hf.check_increases(acts, batch, hf, folded=mode == "processed", conventions=conventions)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "neox", "qwen2", "opt"])
def test_the_constant_part_is_there_to_be_missed(run, name):
    """In families with biased values, or a shift in the norm before attention, heads do differ from
    raw ones.
    """
    _, batch, acts, hf = run(name, "processed")
    with pytest.raises(AssertionError, match="heads of prompt 0"):
        against_hf.check_increases(acts, batch, hf, folded=False)


@pytest.mark.parametrize("name", PROCESSED_EXACT)
@pytest.mark.parametrize("mode", MODES)
def test_search_caches_and_ablation_agree_with_hugging_face(run, name, mode):
    model, batch, acts, hf = run(name, mode)
    against_hf.check_search(acts, batch, certified=name not in SOFT_CAPPED)
    against_hf.check_ablation(model, batch, hf, HEADS, folded=mode == "processed")
    against_hf.check_cache(model, batch, acts)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "llama_gqa", "qwen3"])
def test_processed_projections_are_raw_ones_without_constants(run, load_tiny, name):
    """Label values lose κ, last queries are times the gain of the norm before attention; LayerNorm
    centers both.
    """
    _, batch, acts, hf = run(name, "processed")
    raw = il.capture(load_tiny(name), batch)
    block = load_tiny(name).blocks[1]
    centered = acts.readout.center

    def center(x):
        return x - x.mean(-1, keepdim=True) if centered else x

    present = (batch.label_positions >= 0)[..., None]
    for head in (il.Head(1, 0), il.Head(1, 3)):
        kappa = against_hf.constants(hf, 1)[head.head].float()
        value = center(raw.label_values(head) - kappa) * present
        assert_close(acts.label_values(head), value)
        query = center(raw.last_query(head) * block.ln1.weight)
        assert_close(acts.last_query(head), query)
