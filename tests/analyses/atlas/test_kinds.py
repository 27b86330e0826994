"""Heads have kinds where they stand out: none in models of random weights, the planted ones in others."""

import math

import families
import numpy as np
import planted.heads
import pytest
import scipy.stats
import torch
from planted import build
from transformers import PreTrainedTokenizerFast

import icl_lens as il
from icl_lens.analyses.atlas import turned_heads
from icl_lens.analyses.atlas.kind_reasons import P_AT_NULL
from icl_lens.analyses.atlas.kinds import (
    average_head_p_values,
    binomial_tail,
    copying_p_values,
    discoveries,
    turned_p_values,
)
from icl_lens.analyses.atlas.turned_heads import random_rotation
from icl_lens.models.attention_scores import attention_scoring
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView


def test_discoveries_are_those_of_benjamini_and_hochberg():
    p_values = torch.tensor([[0.001, 0.04, 0.011], [0.9, 0.02, 0.3]])
    by_rank = sorted(p_values.flatten().tolist())
    largest = max(i for i, p in enumerate(by_rank) if p <= 0.05 * (i + 1) / 6)
    expected = p_values <= by_rank[largest]
    assert torch.equal(discoveries(p_values, 0.05), expected)
    assert expected.sum() == 3
    assert not discoveries(torch.full((2, 3), 0.06), 0.05).any()


def test_a_turned_p_value_is_the_share_of_turned_heads_as_high():
    scores, turned = torch.tensor([[0.9, 0.2]]), torch.tensor([[[0.1, 0.2]], [[0.3, 0.4]]])
    assert turned_p_values(scores, turned)[0].tolist() == pytest.approx([1 / 5, 4 / 5])


def test_where_all_heads_have_the_same_effect_none_has_a_name_beyond_the_rate():
    generator = np.random.default_rng(0)
    queries, n_draws, n_with_names = [str(i) for i in range(20)], 40, 0
    for _ in range(n_draws):
        scores = 1 + 0.1 * generator.standard_normal((20, 3, 4))
        p_values = average_head_p_values(scores, queries, 0)
        assert p_values is not None
        n_with_names += bool(discoveries(p_values, 0.05).any())
    assert n_with_names <= 0.05 * n_draws + 2 * math.sqrt(0.05 * 0.95 * n_draws)
    scores[:, 1, 2] += 1
    p_values = average_head_p_values(scores, queries, 0)
    assert p_values is not None
    assert discoveries(p_values, 0.05).nonzero().tolist() == [[1, 2]]
    assert average_head_p_values(scores[:7], queries[:7], 0) is None


def test_the_sign_flip_test_is_exact_for_few_queries():
    scores = np.random.default_rng(1).standard_normal((8, 1, 3))
    excess = scores[:, 0] - np.abs(scores[:, 0]).mean(1, keepdims=True)
    flips = np.array(np.meshgrid(*[[-1, 1]] * 8)).reshape(8, -1).T
    expected = (flips @ excess >= excess.sum(0) - 1e-12).mean(0)
    p_values = average_head_p_values(scores, [str(i) for i in range(8)], 0)
    assert np.abs(p_values[0].numpy() - expected).max() < 0.02


def test_the_binomial_tail_is_that_of_scipy():
    counts = torch.arange(41.0).double().reshape(1, 41)
    expected = scipy.stats.binom.sf(counts.numpy() - 1, 40, 1 / 40)
    assert np.abs(binomial_tail(counts, 40, 1 / 40).numpy() - expected).max() < 1e-12


def test_heads_copy_by_the_larger_of_both_p_values():
    """Three heads near chance, one of which is above the other two; a fourth far above all."""
    counts = torch.tensor([[1, 2], [1, 9]])
    is_promoted = torch.arange(50)[:, None, None] < counts
    sizes = np.arcsin(np.sqrt(counts.numpy() / 50))
    middle = np.sort(sizes.flatten())[1]  # the lower one of the two in the middle, as in torch
    spread = 1.4826 * np.sort(np.abs(sizes - middle).flatten())[1]
    spread = max(spread, 0.5 / np.sqrt(50))
    by_heads = scipy.stats.norm.sf((sizes - middle) / spread)
    by_chance = scipy.stats.binom.sf(counts.numpy() - 1, 50, 1 / 50)
    expected = np.maximum(by_heads, by_chance)
    assert np.abs(copying_p_values(is_promoted).numpy() - expected).max() < 1e-6


def test_where_heads_copy_alike_few_have_the_name_and_one_that_copies_more_has_it():
    generator, n_draws, n_with_names = np.random.default_rng(0), 60, 0
    for _ in range(n_draws):
        shares = np.sin(0.4 + 0.1 * generator.standard_normal((6, 8))) ** 2  # 15%, far above chance
        is_promoted = torch.from_numpy(generator.random((200, 6, 8)) < shares)
        n_with_names += bool(discoveries(copying_p_values(is_promoted), 0.05).any())
        is_promoted[:180, 2, 3] = True
        assert discoveries(copying_p_values(is_promoted), 0.05)[2, 3]
    assert n_with_names <= 0.05 * n_draws + 2 * math.sqrt(0.05 * 0.95 * n_draws)


@pytest.mark.slow
def test_heads_that_are_built_to_copy_are_those_that_have_the_name(tmp_path):
    """Their output is the transpose of their values, so that they write what they read."""
    hf = families.build("gpt2")
    families.randomize(hf, seed=3)
    generator = torch.Generator().manual_seed(0)
    planted_heads, d_head = [il.Head(0, 2), il.Head(2, 1)], families.D_MODEL // families.N_HEADS
    for layer, head in planted_heads:
        attention = hf.transformer.h[layer].attn
        columns = slice(head * d_head, (head + 1) * d_head)
        values = torch.linalg.qr(torch.randn(families.D_MODEL, d_head, generator=generator))[0]
        start = 2 * families.D_MODEL
        attention.c_attn.weight.data[:, start + columns.start : start + columns.stop] = values
        attention.c_proj.weight.data[columns] = 3 * values.T
    hf.save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    model = il.load_model(str(tmp_path), device="cpu", tokenizer=tokenizer)
    atlas = il.head_atlas(model, text=["love like love hate"], n_sequences=2)
    precision, recall = precision_and_recall(atlas.kinds["copying"], planted_heads)
    assert (precision, recall) == (1, 1)


def test_turning_keeps_products_of_a_head_and_the_pairs_that_rotate_together(gpt2):
    generator = torch.Generator().manual_seed(0)
    rotation = random_rotation(5, generator)
    assert torch.allclose(rotation @ rotation.T, torch.eye(5).double())
    queries = torch.randn(2, 3, 4, 6, generator=generator)
    scoring = attention_scoring(ModelView.of(gpt2), 0)
    for n_rotary in (0, 4, 6):
        turned = turned_heads.turn(queries, n_rotary, scoring, generator)
        products = torch.einsum("bphd,cqhd->hbpcq", turned, turned)
        expected = torch.einsum("bphd,cqhd->hbpcq", queries, queries)
        assert torch.allclose(products, expected, atol=1e-4)
        assert (turned - queries).abs().max() > 0.5
        pairs = (
            turned[..., [0, n_rotary // 2]].norm(dim=-1),
            queries[..., [0, n_rotary // 2]].norm(dim=-1),
        )
        assert torch.allclose(*pairs, atol=1e-4) == (n_rotary > 0)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.rotating) for seed in range(1, 6))]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama_gqa"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_weights_get_almost_no_names(tmp_path, family, seed):
    hf = families.build(family)
    families.randomize(hf, seed=seed)
    hf.save_pretrained(tmp_path)
    families.tokenizer().save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    model = il.load_model(str(tmp_path), device="cpu", tokenizer=tokenizer)
    atlas = il.head_atlas(model, text=["love like love hate"], n_sequences=10)
    assert len(atlas.kinds) == 5
    n_named = sum(map(len, atlas.kinds.values()))
    assert n_named <= math.ceil(atlas.rate * 5 * atlas.n_heads)


@pytest.fixture(scope="module")
def planted_atlas(tmp_path_factory):
    """The atlas of a two-tower model, its planted heads, and what its heads of noise attend by."""
    drawn = []
    draw_terms = planted.heads._draw_terms

    def record(stream, scale, generator):
        state = generator.get_state()
        choice, distance, _ = (
            planted.heads._draw(n, generator) for n in (4, planted.heads.MAX_DISTANCE + 1, 3)
        )
        generator.set_state(state)
        drawn.append(
            "distance" * (choice == 1) + str(distance) * (choice == 1) + "first" * (choice == 2)
        )
        return draw_terms(stream, scale, generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted.heads, "_draw_terms", record)
        truth = build("two-tower", tmp_path_factory.mktemp("planted"))
    noise = {
        Head.from_index(index, planted.heads.N_HEADS): what for index, what in enumerate(drawn)
    }
    for heads in truth.heads.values():
        for head in heads:
            noise[head] = ""  # written over
    model = il.load_model(str(truth.folder), device="cpu")
    prompts = il.load_task("sentiment-number", n=24, path=truth.words, demonstrations=4)
    return il.head_atlas(model, prompts, n_sequences=10), truth, noise


def precision_and_recall(named, true):
    return len(set(named) & set(true)) / max(1, len(named)), len(set(named) & set(true)) / len(true)


@pytest.mark.slow
def test_planted_heads_have_their_kind(planted_atlas):
    atlas, truth, noise = planted_atlas
    kinds = atlas.kinds
    for kind, planted_kind in (("previous token", "distance1"), ("sink", "first")):
        true = [head for head, what in noise.items() if what == planted_kind]
        precision, recall = precision_and_recall(kinds[kind], true)
        assert len(true) >= 2
        assert precision >= 0.8, (kind, kinds[kind], true)
        assert recall >= 0.7, (kind, kinds[kind], true)
    towers = truth.heads["two-tower"]
    for kind in (
        "writes the answer",
        "needed",
        "compares",
        "carries labels",
        "attends to true labels",
    ):
        precision, recall = precision_and_recall(kinds[kind], towers)
        assert precision >= 0.8, (kind, kinds[kind], towers)
        assert recall >= 0.75, (kind, kinds[kind], towers)


def test_a_head_above_the_mean_but_not_the_mean_absolute_score_lies_below_the_null():
    """Heads that lower the answer as much as others raise it do not make an average head special."""
    one_prompt = np.array([[1.0, -1.0, 1.0, -1.0, 0.5]])
    scores = np.repeat(one_prompt[None], 12, axis=0)
    p_values = average_head_p_values(scores, [str(i) for i in range(12)], 0)
    assert one_prompt[0, 4] > one_prompt.mean()
    assert float(p_values[0, 4]) > P_AT_NULL
    assert float(p_values[0, 0]) < 0.01
