"""The bundled word list keeps its promises: sizes, plain words, nothing in two roles."""

from collections import Counter

from experiments.bundled_models.episodes import SPECIAL, held_out_pairs, load_words

AMBIGUOUS = """
axe bitter chest cricket file fly folder gold knife lavender lilac minute mouse nickel orange plane quarter
rocket season second silver star tank teacher toast triangle violet whip
"""
WORDS = load_words()


def test_sizes():
    assert len(WORDS.categories) >= 40
    assert min(map(len, WORDS.categories.values())) >= 24
    for name in ("sentiment", "number", "animal", "country"):
        assert len(WORDS.categories[name]) >= 60
    assert len(WORDS.labels) >= 32


def test_no_word_twice_in_a_group():
    for group in [*WORDS.categories.values(), WORDS.labels, WORDS.fillers]:
        assert len(set(group)) == len(group)


def test_groups_are_disjoint_but_for_the_named_ambiguous_words():
    count = Counter(word for group in WORDS.categories.values() for word in group)
    assert {word for word, n in count.items() if n > 1} == set(AMBIGUOUS.split())
    assert max(count.values()) == 2
    content = set(count)
    assert not content & set(WORDS.labels)
    assert not content & set(WORDS.fillers)
    assert not set(WORDS.labels) & set(WORDS.fillers)


def test_the_word_tasks_share_no_word():
    for first, second in (("sentiment", "number"), ("animal", "country")):
        assert not set(WORDS.categories[first]) & set(WORDS.categories[second])


def test_words_are_plain():
    for word in WORDS.vocabulary[len(SPECIAL) :]:
        assert word.isalpha()
        assert word[1:] == word[1:].lower()
    capitals = {name for name, group in WORDS.categories.items() if any(w[0].isupper() for w in group)}
    assert capitals == {"country", "city", "calendar", "space"}  # proper names


def test_ids_are_unique_and_start_with_the_special_tokens():
    vocabulary = WORDS.vocabulary
    assert vocabulary[: len(SPECIAL)] == SPECIAL
    assert len(set(vocabulary)) == len(vocabulary)


def test_held_out_pairs():
    held_out = held_out_pairs(WORDS)
    n = len(WORDS.categories)
    assert {frozenset({"sentiment", "number"}), frozenset({"animal", "country"})} <= held_out
    assert abs(len(held_out) - 0.1 * n * (n - 1) / 2) <= 3
    assert held_out == held_out_pairs(WORDS)
    assert held_out != held_out_pairs(WORDS, seed=1)
