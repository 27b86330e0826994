"""SmolLM2-135M-Instruct with 4-bit weights, a real model: its numbers agree with transformers and the reference."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import reference_hf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import icl_lens as il
from icl_lens.models.gguf_header import parsed_once
from icl_lens.models.installed import SMOLLM2

ATOL = 1e-4
N_PROMPTS, K = 20, 20
PROSE = (Path(__file__).parent.parent / "LICENSE").read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(SMOLLM2.status != "installed", reason=f"{SMOLLM2.name} is not installed: {SMOLLM2.command}"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The named model, converted into a cache of the module's own, which is deleted again: it takes half a gigabyte."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        loaded = il.load_model("smollm2-135m", device="cpu")
    yield loaded
    shutil.rmtree(cache)


@pytest.fixture(scope="module")
def hf():
    """The same file, loaded by transformers alone."""
    where = {"gguf_file": SMOLLM2.path.name}
    with parsed_once("the file"):  # the same numbers in a third of the time
        loaded = AutoModelForCausalLM.from_pretrained(SMOLLM2.path.parent, dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(SMOLLM2.path.parent, **where)
    loaded.set_attn_implementation("eager")
    return SimpleNamespace(model=loaded.eval(), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def acts(model):
    return il.capture(model, il.tokenize(model, il.load_task("sentiment-number", n=N_PROMPTS)))


def test_logits_are_transformers_own(model, hf):
    tokens = hf.tokenizer(PROSE, add_special_tokens=False).input_ids[:200]
    assert len(tokens) == 200
    assert model.tokenizer(PROSE, add_special_tokens=False).input_ids[:200] == tokens
    with torch.no_grad():
        theirs = hf.model(torch.tensor([tokens])).logits
        mine = model(torch.tensor([tokens]))
    assert (mine - theirs).abs().max() <= ATOL
    assert theirs.std() > 1


def test_the_papers_prompt(model):
    """The figures that the documentation states."""
    found = il.explain(model, "love : bar like : bar eight : foo two : foo one :", n_ablated=1)
    assert found.predicted == "foo"
    assert 100 * found.label_probs["foo"] == pytest.approx(52.35, abs=0.1)
    assert 100 * found.label_probs["bar"] == pytest.approx(11.5, abs=0.1)


@pytest.fixture(scope="module")
def references(hf, acts):
    rows = zip(acts.batch.tokens, acts.batch.last, strict=True)
    return [reference_hf.Reference(hf.model, tokens[: int(last) + 1]) for tokens, last in rows]


def test_heads_agree_with_the_reference(acts, references):
    """Increases of the answer, and its contrast with the other label, of all 270 heads on every prompt."""
    increases = il.head_log_prob_increase(acts, acts.batch.answer_tokens)
    contrasts = il.head_log_prob_increase(acts, acts.batch.answer_tokens, against=acts.batch.other_label_tokens)
    for i, reference in enumerate(references):
        answer, other = int(acts.batch.answer_tokens[i]), int(acts.batch.other_label_tokens[i])
        expected = reference.increase("heads", answer)
        assert (increases[i] - expected).abs().max() <= ATOL
        assert (contrasts[i] - reference.increase("heads", answer, [other])).abs().max() <= ATOL
        assert expected.abs().max() > 100 * ATOL


def test_certified_parts_are_the_largest_of_all(acts, references):
    """All parts of four prompts, 30 layers times 9 heads times every position, by the reference."""
    found = il.top_subheads(acts, acts.batch.answer_tokens, k=K)
    assert found.certified
    for i in range(4):
        everything = references[i].increase("subheads", int(acts.batch.answer_tokens[i]))
        places = everything[found.layer[i], found.head[i], found.position[i]]
        assert (found.value[i] - places).abs().max() <= ATOL
        assert (found.value[i] - everything.flatten().topk(K).values).abs().max() <= ATOL
        assert found.n_exact[i] < found.n_parts[i] == everything.numel()  # most are left out by their bounds
