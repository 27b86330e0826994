"""The metric of a head and what it copies, against the model's own attention and slow code on its
own weights.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from tolerance import assert_close
from transformers import AutoModelForCausalLM

import icl_lens as il
from icl_lens.metrics import auroc, precision_at_1

LAST = -1


@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama_gqa", "qwen2", "gemma2", "neox"])
def test_the_matrix_is_what_is_bilinear_in_the_scores(family, load_tiny):
    """Scores of normed inputs differ from the bilinear form by terms that depend on one of the two
    only.
    """
    model = load_tiny(family)
    metric = il.query_key_metric(model, (1, 3), distance=3 if family in ("gptj", "neox") else None)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, metric.matrix.shape[0], generator=generator) for _ in range(2))
    remainder = metric.scores(x, y) - metric.inputs(x) @ metric.matrix @ metric.inputs(y).T
    crossed = remainder - remainder.mean(0) - remainder.mean(1, keepdim=True) + remainder.mean()
    assert_close(crossed, torch.zeros_like(crossed))
    assert metric.scores(x, y).std() > 0.05


@pytest.mark.parametrize("family", ["gpt2", "llama_gqa"])
def test_shape_of_the_metric_agrees_with_the_dense_matrix(family, load_tiny):
    metric = il.query_key_metric(load_tiny(family), (1, 2))
    dense = metric.matrix.double()
    values = torch.linalg.svdvals(dense)[: len(metric.singular_values)]
    assert_close(metric.singular_values, values)
    share = values / values.sum()
    assert_close(metric.effective_rank, math.exp(-sum(p * math.log(p) for p in share.tolist())))
    symmetric = (dense + dense.T) / 2
    assert_close(metric.symmetric_share, symmetric.square().sum() / dense.square().sum())
    left, strength, right = metric.directions(3)
    for i in range(3):
        assert_close(left[i].double() @ dense @ right[i].double(), strength[i])
    with pytest.raises(il.InputError, match=r"k must be between 1 and 8 .*got 99"):
        metric.directions(99)


def test_the_untrained_metric_keeps_lengths_and_loses_the_rest(load_tiny):
    metric = il.query_key_metric(load_tiny("gpt2"), (1, 0))
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    strange = metric.with_random_rotation(seed=3)
    assert_close(strange.keys(x).norm(dim=-1), metric.keys(x).norm(dim=-1))
    assert_close(strange.queries(x), metric.queries(x))
    assert not torch.allclose(strange.scores(x, x), metric.scores(x, x), atol=0.1)
    assert_close(strange.key_side @ strange.key_side.T, metric.key_side @ metric.key_side.T)
    assert torch.equal(metric.with_random_rotation(seed=3).key_side, strange.key_side)
    assert not torch.equal(metric.with_random_rotation(seed=4).key_side, strange.key_side)


@pytest.mark.parametrize(
    ("family", "head", "distance", "message"),
    [
        ("gpt2", (9, 0), None, "got L9H0"),
        ("gpt2", (0, 0), 3, "no rotary embedding, got 3"),
        ("llama_gqa", (0, 0), -1, "distance must be between 0 and .* got -1"),
        ("llama_gqa", (0, 0), 10**6, "distance must be between 0 and .* got 1000000"),
        ("gptj", (0, 0), 10**6, "distance must be between 0 and .* got 1000000"),
    ],
)
def test_what_has_no_metric_is_refused(family, head, distance, message, load_tiny):
    with pytest.raises(il.InputError, match=message):
        il.query_key_metric(load_tiny(family), head, distance=distance)


# A head made by hand: it compares two categories and copies two labels.

WORDS = ("love", "like", "happy", "sad", "eight", "two", "three", "nine")
LABELS = ("foo", "bar")


@pytest.fixture(scope="module")
def made(family_folder):
    """Tiny GPT-2 whose head L0H0 distinguishes words of kinds 0 and 1 and writes the label that it
    reads.
    """
    folder = family_folder("gpt2")
    model: Any = il.load_model(str(folder), device="cpu")
    ids = [
        model.tokenizer.encode(" " + word, add_special_tokens=False)[LAST]
        for word in (*WORDS, *LABELS)
    ]
    transformer: Any = model.original_model.transformer
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        block, d = transformer.h[0], 32
        block.ln_1.weight.fill_(1.0)
        block.ln_1.bias.zero_()
        transformer.ln_f.weight.fill_(1.0)
        block.attn.c_attn.bias.zero_()
        transformer.wte.weight[ids] = 0.3 * torch.randn(len(ids), d, generator=generator)
        for place, token in enumerate(ids):
            feature = 2 + place - 8 if place >= 8 else int(place >= 4)
            transformer.wte.weight[token, feature] += 3.0
        block.attn.c_attn.weight[:, [*range(8), *range(32, 40), *range(64, 72)]] = 0.0
        block.attn.c_proj.weight[:8] = 0.0
        for feature in range(2):  # queries, keys: kinds of words; values, output: labels
            block.attn.c_attn.weight[feature, feature] = block.attn.c_attn.weight[
                feature, 32 + feature
            ] = 4.0
            block.attn.c_attn.weight[2 + feature, 64 + feature] = 1.0
            block.attn.c_proj.weight[feature, 2 + feature] = 1.0
    return model, torch.tensor(ids)


def test_a_head_made_to_compare_retrieves_every_word_of_its_kind(made):
    model, ids = made
    x = model.W_E.detach()[ids[:8]]
    kind = torch.tensor([0] * 4 + [1] * 4)
    same = kind[:, None] == kind
    alone = torch.eye(8, dtype=torch.bool)
    metric = il.query_key_metric(model, (0, 0))
    scores = metric.scores(x, x).masked_fill(alone, -math.inf)
    assert precision_at_1(scores, same) == 1.0
    assert auroc(scores[~alone], same[~alone]) == 1.0
    rotated_scores = [metric.with_random_rotation(seed=seed).scores(x, x) for seed in range(40)]
    mean = sum(auroc(rotated[~alone], same[~alone]) for rotated in rotated_scores) / len(
        rotated_scores
    )
    assert 0.3 < mean < 0.7


def test_a_head_made_to_copy_has_a_score_of_one(made):
    model, ids = made
    copying = il.head_copying(model, "L0H0", ids[8:])
    assert (copying.copy_score, copying.discrimination) == (1.0, 1.0)
    assert copying.eigenvalue_score == pytest.approx(1.0, abs=0.01)


def test_a_head_that_likes_one_label_copies_nothing():
    """It writes the first label most, whatever it reads, and does not write a label more when it
    reads that label.
    """
    logits = torch.tensor([[5.0, 0.0], [5.1, 0.0]])
    copying = il.results.HeadCopying(torch.tensor([0, 1]), logits)
    assert copying.copy_score == 0.5
    assert (
        copying.discrimination == 0.25
    )  # label 0 is higher if it reads 1; label 1 is the same either way


@pytest.mark.parametrize("family", ["bloom", "gpt2"])
def test_copying_reads_tokens_as_the_first_layer_does(family, load_tiny, family_folder):
    """Normed in BLOOM; without learned positions. Other families: the sweep."""
    hf: Any = AutoModelForCausalLM.from_pretrained(family_folder(family)).eval()
    model, tokens = load_tiny(family), [6, 12, 21, 30]
    with torch.no_grad():
        x = hf(torch.tensor(tokens)[:, None], output_hidden_states=True).hidden_states[0][:, 0]
        if family == "gpt2":
            x = x - hf.transformer.wpe.weight[0]
    copying, expected = (
        il.head_copying(model, (0, 1), tokens),
        il.head_copying(model, (0, 1), tokens, inputs=x),
    )
    assert_close(copying.logits, expected.logits)
    if family == "bloom":
        unnormed = il.head_copying(
            model, (0, 1), tokens, inputs=hf.transformer.word_embeddings.weight[tokens].detach()
        )
        assert (copying.logits - unnormed.logits).abs().max() > 0.05
    with model.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: 2 * x + 1)]):
        assert torch.equal(il.head_copying(model, (0, 1), tokens).logits, copying.logits)


# The yardsticks.


def test_auroc_is_the_share_of_pairs():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        values = torch.randint(5, (9,), generator=generator).float()
        positive = torch.rand(9, generator=generator) < 0.5
        positive[:2] = torch.tensor([True, False])
        pairs = list(itertools.product(values[positive].tolist(), values[~positive].tolist()))
        expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
        assert auroc(values, positive) == pytest.approx(expected)
    assert math.isnan(auroc(torch.tensor([1.0, 2.0]), torch.tensor([True, True])))


def test_precision_counts_ties_by_their_share():
    scores = torch.tensor([[2.0, 2.0, 1.0], [0.0, 5.0, -math.inf]])
    same = torch.tensor([[True, False, True], [False, True, False]])
    assert precision_at_1(scores, same) == 0.75
    with pytest.raises(il.InputError, match="query 0 has no finite score"):
        precision_at_1(torch.full((1, 2), -math.inf), torch.ones(1, 2, dtype=torch.bool))
