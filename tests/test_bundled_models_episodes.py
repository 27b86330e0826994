"""The synthetic world: the batches that models were trained on, an episode by hand, and pairs that are held out."""

import hashlib
import itertools
import random

import pytest
from transformers import AutoTokenizer

from experiments.bundled_models.curriculum import Data
from experiments.bundled_models.episodes import (
    BUNDLED,
    LABEL_WEIGHT,
    OTHER_WEIGHT,
    Difficulty,
    draw_categories,
    draw_sides,
    held_out_pairs,
    load_words,
    make_episode,
    seen_pairs,
)

WORDS = load_words()
HELD_OUT = held_out_pairs(WORDS)
DIGESTS = (
    "85a4228a3911456a",
    "c9405f20c725cf3b",
    "e3d117b1efd7dfbb",
    "25f0487568786521",
    "3cc522d281477261",
)
"""Of 40 batches of each level, with which the bundled models were trained."""


@pytest.mark.parametrize("level", range(len(DIGESTS)))
def test_the_recipe_draws_the_batches_that_the_bundled_models_were_trained_on(level):
    """Shares, lengths, repeats, asides and the order of classes cannot change without changing what is drawn."""
    data = Data(WORDS, AutoTokenizer.from_pretrained(BUNDLED / "icl-mini"), seed=0, n_tokens=2000)
    digest = hashlib.sha256()
    for step in range(40):
        batch = data.batch(step, level)
        digest.update(repr((batch.kind, batch.tokens.tolist(), batch.weights.tolist())).encode())
    assert digest.hexdigest()[:16] == DIGESTS[level]


def test_an_episode_by_hand():
    episode = make_episode(random.Random(0), WORDS, ("sentiment", "number"), (0, 0, 1, 0, 1), labels=("bar", "foo"))
    assert episode.tokens[1::3] == (":",) * 5
    assert episode.tokens[2::3] == ("bar", "bar", "foo", "bar", "foo")
    for token, side in zip(episode.tokens[::3], (0, 0, 1, 0, 1), strict=True):
        assert token in WORDS.categories[episode.categories[side]]
    other, label = OTHER_WEIGHT, LABEL_WEIGHT
    # The first bar and the first foo cannot be known; the second bar, the third and the query's foo can.
    assert episode.weights == (other,) * 5 + (label,) + (other,) * 5 + (label,) + (other,) * 2 + (label,)
    assert episode.answer == "foo"


def test_texts_have_fillers_and_no_content_word_twice():
    rng = random.Random(1)
    lengths = set()
    for _ in range(300):
        episode = make_episode(rng, WORDS, ("animal", "color"), draw_sides(rng, 9), Difficulty(longest=8))
        content = [word for item in episode.items for word in item.text if word not in WORDS.fillers]
        assert len(set(content)) == len(content)
        for item in episode.items:
            mine = [word for word in item.text if word in WORDS.categories[episode.categories[item.side]]]
            assert mine
            assert all(word in WORDS.fillers for word in item.text if word not in mine)
            lengths.add(len(item.text))
    assert lengths == set(range(1, 9))


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
