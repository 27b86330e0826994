"""The synthetic world: lists, named words, and episodes with fillers, strays, wrong labels and uneven classes."""

import hashlib
import itertools
import random

import pytest
from transformers import AutoTokenizer

from experiments.bundled_models.curriculum import Data
from experiments.bundled_models.episodes import (
    ASIDE_WEIGHT,
    BUNDLED,
    LABEL_WEIGHT,
    NEAR,
    OTHER_WEIGHT,
    Difficulty,
    draw_categories,
    draw_sides,
    held_out_pairs,
    list_sequence,
    load_words,
    make_episode,
    named_sequence,
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


def test_strays_are_of_other_categories_that_may_meet_these():
    rng = random.Random(2)
    strays, slots = [], 0
    for _ in range(300):
        how = Difficulty(longest=8, strays=0.2)
        episode = make_episode(rng, WORDS, ("tool", "sport"), (0, 1) * 4, how, held_out=HELD_OUT)
        for item in episode.items:
            others = [word for word in item.text if episode.categories[item.side] not in WORDS.owners.get(word, ())]
            slots += len(others)
            strays += [word for word in others if word not in WORDS.fillers]
    assert 0.17 < len(strays) / slots < 0.23
    forbidden = {name for name in WORDS.categories for own in ("tool", "sport") if frozenset((name, own)) in HELD_OUT}
    assert forbidden
    for word in strays:
        assert set(WORDS.owners[word]) - forbidden - {"tool", "sport"}


def test_mislabeled_demonstrations_have_another_label_and_the_query_its_own():
    rng = random.Random(3)
    wrong = 0
    names, sides = ("animal", "color", "tool"), (0, 1, 2, 0, 1, 2, 0)
    for _ in range(300):
        episode = make_episode(rng, WORDS, names, sides, Difficulty(mislabeled=0.3))
        shown = [token for token in episode.tokens if token in episode.labels]
        assert shown == [episode.labels[item.shown_class] for item in episode.items]
        for item in episode.items:
            assert item.text[0] in WORDS.categories[episode.categories[item.side]]
        wrong += sum(item.shown_class != item.side for item in episode.items[:-1])
        assert episode.items[-1].shown_class == episode.items[-1].side
    assert 0.25 < wrong / 1800 < 0.35


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


def test_near_categories_and_lists_are_of_one_group():
    assert sorted(itertools.chain.from_iterable(NEAR)) == sorted(WORDS.categories)
    rng = random.Random(6)
    together = [draw_categories(rng, WORDS, 2, HELD_OUT, near=True) for _ in range(200)]
    assert sum(second in WORDS.near[first] for first, second in together) > 150
    for _ in range(200):
        owners = {WORDS.owners[word] for word in list_sequence(rng, WORDS, 10)}
        assert any(all(set(names) & set(group) for names in owners) for group in NEAR)


def test_named_texts_end_with_their_categorys_own_name():
    tokens, weights = named_sequence(random.Random(8), WORDS, 8, longest=4)
    names = {name: category for category, name in WORDS.names.items()}
    ends = [i for i, token in enumerate(tokens) if token in names]
    assert len(ends) == 8
    assert weights == [LABEL_WEIGHT if i in ends else OTHER_WEIGHT for i in range(len(tokens))]
    for start, end in itertools.pairwise([-1, *ends]):
        assert tokens[end - 1] == ":"
        assert any(word in WORDS.categories[names[tokens[end]]] for word in tokens[start + 1 : end - 1])


def test_asides_are_the_categorys_name_in_place_of_the_label_or_after_it():
    kinds, names = set(), ("animal", "color", "tool")
    for seed in range(40):
        sides, how = (0, 1, 2, 0, 1, 2, 0), Difficulty(asides=0.3)
        episode = make_episode(random.Random(seed), WORDS, names, sides, how, labels=("foo", "bar", "baz"))
        weight_of = dict(zip(episode.tokens, episode.weights, strict=True))
        parts = [part.split()[:-1] for part in " ".join(episode.tokens[2:]).split(" : ")]
        parts[-1].append(episode.tokens[-1])
        for side, part in zip(sides, parts, strict=True):
            assert {*part} <= {episode.labels[side], WORDS.names[names[side]]}
            kinds.add(tuple("label" if word in episode.labels else "name" for word in part))
        assert {weight_of.get(WORDS.names[name], ASIDE_WEIGHT) for name in names} == {ASIDE_WEIGHT}
        assert parts[-1] == [episode.answer]
    assert kinds == {("label",), ("name",), ("label", "name")}


def test_the_longest_episodes_of_one_class_have_a_word_for_every_text():
    smallest = min(WORDS.categories, key=lambda name: len(WORDS.categories[name]))
    for seed in range(100):
        episode = make_episode(random.Random(seed), WORDS, (smallest, "money"), (0,) * 17, Difficulty(longest=8))
        assert all(any(word in WORDS.categories[smallest] for word in item.text) for item in episode.items)
