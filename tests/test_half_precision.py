"""Half precision: every family has the numbers of plain Hugging Face in that dtype, and the heads of float32 lead."""

import families
import pytest
import torch
from conftest import PROMPTS
from family_tables import EXACT, NOT_HALF
from tolerance import tolerance
from transformers import AutoModelForCausalLM

import icl_lens as il

N_LEADING = 4
QUICK = {("olmo2", torch.bfloat16), ("olmo2", torch.float16), ("gpt2", torch.float16)}
CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) in QUICK else pytest.mark.slow, id=f"{name} {dtype}")
    for name in EXACT
    if name not in NOT_HALF
    for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_half_precision_gives_the_numbers_of_hugging_face_and_the_heads_of_float32(
    load_tiny, family_folder, name, dtype
):
    model, single = load_tiny(name, dtype=dtype), load_tiny(name)
    batch = il.tokenize(model, PROMPTS, prepend_bos=False)
    hf = AutoModelForCausalLM.from_pretrained(family_folder(name), dtype=dtype, **families.EAGER).eval()
    rounding = tolerance(dtype, n_terms=1)
    with torch.no_grad():
        rows = [row[None, : last + 1] for row, last in zip(batch.tokens, batch.last.tolist(), strict=True)]
        want = torch.stack([hf(row).logits[0, -1].float().log_softmax(-1) for row in rows])[:, batch.label_tokens]
    found = il.score(model, batch)
    assert (found - want).abs().max() < rounding
    ours, theirs = (_increases(one, batch) for one in (model, single))
    error = (ours - theirs).abs().max()
    assert error < rounding * (4 if name in families.MIXTURES else 1)  # rounding may choose other experts
    order = theirs.mean(0).flatten().sort(descending=True)
    margin = order.values[N_LEADING - 1] - order.values[N_LEADING]
    leading = set(ours.mean(0).flatten().topk(N_LEADING).indices.tolist())
    assert leading == set(order.indices[:N_LEADING].tolist()) or margin < 2 * error
    for positions in ("all", "last"):
        assert il.head_effects(model, batch, positions=positions).log_prob.isfinite().all()
        assert il.score(model, batch, [[], [il.Ablate([(1, 0)], positions=positions)]]).isfinite().all()
    with il.ablate_heads(model, [(0, 0)]):
        assert il.score(model, batch).isfinite().all()
    assert il.explain(model, il.Prompt.parse(families.PROMPT, answer="foo"), prepend_bos=False, k=4)


def _increases(model, batch):
    return il.head_log_prob_increase(il.capture(model, batch), batch.answer_tokens).float()
