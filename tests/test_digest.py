"""Digests in result files: what they tell apart, and that stored ones stay what they were."""

import torch

import icl_lens as il
from icl_lens.digest import json_digest, weights_digest
from icl_lens.prompts.batch import prompts_digest

TENSORS = {
    "b": torch.arange(1500, dtype=torch.float32).reshape(50, 30),
    # torch.linspace(-1, 1, 7), whose last bits depend on the processor
    "a": torch.tensor(
        [-1.0, -0.6666666666666667, -0.33333333333333337, 2**-54, 0.33333333333333337, 0.6666666666666667, 1.0],
        dtype=torch.float64,
    ),
}


def test_stored_values():
    """As versions before this one wrote them: a run can be continued, a result recognized."""
    assert weights_digest(TENSORS) == "5cbdf266ccd59412"
    assert weights_digest(TENSORS, sample=64, most=64, dtype=torch.float64, digits=12) == "8ee48a723f31"
    assert json_digest([[1, 2], "x"]) == "0aa6a7ae8092abf5"


def test_other_weights_names_and_shapes():
    changed = TENSORS | {"a": TENSORS["a"] + 1e-3}
    renamed = {"c": TENSORS["b"], "a": TENSORS["a"]}
    turned = TENSORS | {"b": TENSORS["b"].reshape(30, 50)}
    found = {weights_digest(tensors) for tensors in (TENSORS, changed, renamed, turned)}
    assert len(found) == 4
    assert weights_digest(dict(reversed(TENSORS.items()))) == weights_digest(TENSORS)


def test_half_precision_is_read_as_numbers():
    half = {"w": torch.randn(9, generator=torch.Generator().manual_seed(0)).bfloat16()}
    assert weights_digest(half) == weights_digest({"w": half["w"].float()})


def test_prompts(gpt2):
    prompts = [
        il.Prompt.parse(text, answer="foo") for text in ("cat : foo the : bar a :", "love : bar one : foo two :")
    ]
    digest = prompts_digest(il.tokenize(gpt2, prompts))
    assert digest == prompts_digest(il.tokenize(gpt2, prompts))
    assert digest != prompts_digest(il.tokenize(gpt2, prompts[::-1]))
    other = [prompts[0], il.Prompt.parse("love : bar one : foo two :", answer="bar")]
    assert digest != prompts_digest(il.tokenize(gpt2, other)), "the same words, asked for another answer"
    # Padding is not part of a prompt.
    longer = il.tokenize(gpt2, [*prompts, il.Prompt.parse("cat dog the a : foo the : bar a :", answer="foo")])
    assert prompts_digest(longer[:2]) == digest
