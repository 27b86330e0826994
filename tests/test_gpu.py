"""The same numbers on a GPU as on the CPU: on a real GPU if there is one, and on a pretended one."""

from contextlib import nullcontext

import pandas as pd
import pytest
import torch
from pretend_gpu import on_a_pretended_gpu
from tolerance import assert_close, tolerance

import icl_lens as il
from icl_lens.prompts.tasks import load_task

pytestmark = pytest.mark.slow

HEADS = [(2, 0), (3, 1), (5, 2)]
TEXT = "love : bar like : bar eight : foo two : foo one :"
REAL = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(
    scope="module",
    params=[
        ("icl-mini", "pretended"),
        ("icl-mini-llama", "pretended"),
        pytest.param(("icl-mini", "real"), marks=REAL),
        pytest.param(("icl-mini-llama", "real"), marks=REAL),
        pytest.param(("icl-mini-gptj", "real"), marks=REAL),
    ],
    ids="-".join,
)
def pair(request):
    """A bundled model on the CPU and on a GPU, each with the same prompts."""
    name, kind = request.param
    ours, theirs = (il.load_model(name, device=device) for device in ("cpu", "cuda" if kind == "real" else "cpu"))
    with on_a_pretended_gpu(theirs) if kind == "pretended" else nullcontext():
        yield [(model, il.tokenize(model, load_task("sentiment-number", n=12))) for model in (ours, theirs)]


def test_what_a_gpu_refuses_is_refused(pair):
    """Otherwise the tests below would say nothing."""
    there, here = pair[1][1].answer_tokens, pair[0][1].answer_tokens
    assert there.device.type == "cuda"
    assert here.device.type == "cpu"
    assert (there + 1).cpu().device.type == "cpu"
    assert torch.zeros(3, device=there.device).device.type == "cuda"
    for mixed in (lambda: here + there, lambda: here[there.clamp(max=3)], lambda: torch.where(there > 0, here, here)):
        with pytest.raises((RuntimeError, IndexError)):
            mixed()
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


def same(pair, compute, scale=1.0):
    """Assert that both models give the same tensor, on any device."""
    ours, theirs = (compute(model, batch) for model, batch in pair)
    assert_close(theirs.float(), ours.float(), scale=scale)


def test_increases_and_searches_are_equal(pair):
    same(pair, lambda m, b: il.head_log_prob_increase(il.capture(m, b), b.answer_tokens))
    same(
        pair,
        lambda m, b: il.head_log_prob_increase(il.capture(m, b), b.answer_tokens, against=b.other_label_tokens),
    )
    for by in ("contrast", "increase"):
        same(pair, lambda m, b, by=by: il.top_subheads(il.capture(m, b), k=9, by=by).value)
        same(pair, lambda m, b, by=by: il.locate_heads(m, b, k=6, by=by).value)


@pytest.mark.parametrize("positions", ["last", "all"])
@pytest.mark.parametrize("method", ["exact", "gradient"])
def test_effects_are_equal(pair, positions, method):
    same(pair, lambda m, b: il.head_effects(m, b, positions=positions, method=method).log_prob)


def test_edits_are_equal(pair):
    def ablated(model, batch):
        with il.ablate_heads(model, HEADS, mode="mean", reference=batch):
            return il.score(model, batch)

    def fixed(model, batch):
        fixes = [il.debias_edits(batch, HEADS, majority=0.5), il.debias_edits(batch, HEADS, recency=0.5)]
        return il.score(model, batch, fixes)

    def patched(model, batch, what):
        other = batch[[*range(1, len(batch)), 0]]
        return il.score(
            model,
            batch,
            [
                [il.Patch(HEADS, other, activation=what, align="labels", positions="last")],
                [il.Patch(HEADS[:1], other, activation=what, align="labels", positions="last")],
            ],
        )

    same(pair, ablated)
    same(pair, fixed)
    for positions in ("last", "all"):
        same(pair, lambda m, b, at=positions: il.score(m, b, [[], [il.Ablate(HEADS, positions=at)]]))
    for what in ("k", "v"):
        same(pair, lambda m, b, what=what: patched(m, b, what))


def test_chosen_strengths_are_equal(pair):
    found = [
        il.choose_strength(model, batch[:8], batch[:8], HEADS, fix="majority", strengths=(0.5, 1.0))
        for model, batch in pair
    ]
    assert found[0].strength == found[1].strength
    assert_close(found[0].bias, found[1].bias)


def test_explanations_are_equal(pair):
    ours, theirs = (il.explain(model, il.Prompt.parse(TEXT, answer="foo")) for model, _ in pair)
    assert repr(ours) == repr(theirs)
    for table in ("heads", "layers", "subheads", "labels", "similarity"):  # words may swap places by rounding
        expected = ours.to_frame(table)
        assert len(expected) > 1
        pd.testing.assert_frame_equal(theirs.to_frame(table), expected, rtol=0, atol=tolerance(scale=10))


def test_metrics_vectors_and_saliency_are_equal(pair):
    same(pair, lambda m, b: il.label_similarity(m, b, HEADS), scale=10)
    same(pair, lambda m, b: il.head_copying(m, (3, 0), b.label_tokens).logits)
    same(pair, lambda m, b: il.function_vector(m, b, HEADS))
    same(pair, lambda m, b: il.attention_saliency(m, b))
    same(pair, lambda m, b: il.capture(m, b).own_label_ranks(HEADS[0]))
    same(pair, lambda m, b: il.whole_label_log_probs(m, b))
    same(pair, lambda m, b: torch.as_tensor(il.locate_effects(m, b).to_frame()["effect"].to_numpy()))
