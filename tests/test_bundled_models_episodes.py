"""The synthetic world: the tokenizer and batches that models were trained with, and what pieces must not reveal."""

import hashlib
import itertools
import random
import statistics

import pytest
from transformers import AutoTokenizer

from experiments.bundled_models.curriculum import Data
from experiments.bundled_models.episodes import (
    BUNDLED,
    draw_categories,
    held_out_pairs,
    load_words,
    seen_pairs,
)
from experiments.bundled_models.tokenizer import make_tokenizer

WORDS = load_words()
HELD_OUT = held_out_pairs(WORDS)
DIGESTS = (
    "85a4228a3911456a",
    "c9405f20c725cf3b",
    "e3d117b1efd7dfbb",
    "25f0487568786521",
    "3cc522d281477261",
)
"""Digests of 40 batches of each level, drawn by the recipe that the bundled models were trained with."""


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(level, marks=pytest.mark.slow) if 0 < level < len(DIGESTS) - 1 else level
        for level in range(len(DIGESTS))
    ],
)
def test_the_recipe_draws_the_batches_that_the_bundled_models_were_trained_on(level):
    """Shares, lengths, repeats, asides and the order of classes cannot change without changing what is drawn."""
    data = Data(WORDS, AutoTokenizer.from_pretrained(BUNDLED / "icl-mini"), seed=0, n_tokens=2000)
    digest = hashlib.sha256()
    for step in range(40):
        batch = data.batch(step, level)
        digest.update(repr((batch.kind, batch.tokens.tolist(), batch.weights.tolist())).encode())
    assert digest.hexdigest()[:16] == DIGESTS[level]


def test_drawn_categories_avoid_held_out_pairs():
    rng = random.Random(5)
    for near in (False, True):
        for _ in range(200):
            drawn = draw_categories(rng, WORDS, 6, HELD_OUT, near=near)
            assert len(set(drawn)) == 6
            assert not {frozenset(pair) for pair in itertools.combinations(drawn, 2)} & HELD_OUT
    pairs = {frozenset(pair) for pair in seen_pairs(WORDS, HELD_OUT)}
    n = len(WORDS.categories)
    assert not pairs & HELD_OUT
    assert len(pairs) + len(HELD_OUT) == n * (n - 1) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["icl-mini", "icl-mini-gptj", "icl-mini-llama"])
def test_the_bundled_models_have_the_tokenizer_that_training_makes(name, trained_tokenizer):
    assert AutoTokenizer.from_pretrained(BUNDLED / name)._tokenizer.to_str() == trained_tokenizer


@pytest.fixture(scope="module")
def trained_tokenizer():
    return make_tokenizer(WORDS, 320)._tokenizer.to_str()


def test_pieces_of_the_bundled_tokenizer_do_not_tell_the_category():
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED / "icl-mini")
    spelled = {word: tokenizer(word).input_ids for word in WORDS.categories_of}
    assert min(map(len, spelled.values())) == 2
    words_with = {}
    for word, pieces in spelled.items():
        for piece in pieces:
            words_with.setdefault(piece, []).append({*WORDS.categories_of[word]})
    pairs = [({*WORDS.categories_of[word]}, piece) for word, pieces in spelled.items() for piece in pieces]
    shares = [statistics.fmean(bool(own & other) for other in words_with[piece]) for own, piece in pairs]
    assert statistics.fmean(shares) < 0.25
