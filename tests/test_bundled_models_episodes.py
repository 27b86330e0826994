"""The synthetic world: lists, named words, and episodes with fillers, strays, wrong labels and uneven classes."""

import itertools
import random
import statistics

from experiments.bundled_models.episodes import (
    ASIDE_WEIGHT,
    LABEL_WEIGHT,
    NEAR,
    OTHER_WEIGHT,
    Difficulty,
    draw_categories,
    draw_episode,
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
    n_content, n_words, first_is_filler, lengths = 0, 0, 0, set()
    for _ in range(300):
        episode = make_episode(rng, WORDS, ("animal", "color"), draw_sides(rng, 9), Difficulty(longest=8))
        content = [word for item in episode.items for word in item.text if word not in WORDS.fillers]
        assert len(set(content)) == len(content)
        for item in episode.items:
            mine = [word for word in item.text if word in WORDS.categories[episode.categories[item.side]]]
            assert mine
            assert all(word in WORDS.fillers for word in item.text if word not in mine)
            first_is_filler += item.text[0] in WORDS.fillers
            lengths.add(len(item.text))
        n_content += len(content)
        n_words += sum(len(item.text) for item in episode.items)
    assert lengths == set(range(1, 9))
    assert 0.4 < n_content / n_words < 0.65
    assert first_is_filler > 0.25 * 300 * 9


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
    for _ in range(300):
        episode = make_episode(
            rng, WORDS, ("animal", "color", "tool"), (0, 1, 2, 0, 1, 2, 0), Difficulty(mislabeled=0.3)
        )
        shown = [token for token in episode.tokens if token in episode.labels]
        assert shown == [episode.labels[item.shown_class] for item in episode.items]
        for item in episode.items:
            assert item.text[0] in WORDS.categories[episode.categories[item.side]]
        wrong += sum(item.shown_class != item.side for item in episode.items[:-1])
        assert episode.items[-1].shown_class == episode.items[-1].side
    assert 0.25 < wrong / 1800 < 0.35


def test_repeats_show_an_earlier_text_of_the_class_again():
    rng = random.Random(4)
    for repeats, low, high in ((0.0, 0, 0), (0.5, 0.3, 0.5)):
        again = 0
        for _ in range(200):
            episode = make_episode(rng, WORDS, ("animal", "color"), (0, 1) * 5, Difficulty(repeats=repeats))
            sides = {}
            for item in episode.items:
                again += item.text in sides
                assert sides.setdefault(item.text, item.side) == item.side
        assert low <= again / 2000 <= high


def test_an_ambiguous_word_can_stand_for_either_of_its_categories():
    sides_of_orange = set()
    for seed in range(400):
        episode = make_episode(random.Random(seed), WORDS, ("color", "fruit"), (0, 1) * 4)
        sides_of_orange |= {item.side for item in episode.items if "orange" in item.text}
    assert sides_of_orange == {0, 1}


def test_unequal_classes_and_repeats_are_common():
    rng = random.Random(2)
    drawn = [draw_sides(rng, 9) for _ in range(2000)]
    shares = [statistics.fmean(sides) for sides in drawn]
    stays = statistics.fmean(a == b for sides in drawn for a, b in itertools.pairwise(sides))
    assert abs(statistics.fmean(shares) - 0.5) < 0.03
    assert statistics.fmean(abs(share - 0.5) > 0.25 for share in shares) > 0.25
    assert 0.65 < stays < 0.75
    even = [draw_sides(rng, 9, uneven=False, stay=0.0) for _ in range(2000)]
    assert abs(statistics.fmean(a == b for sides in even for a, b in itertools.pairwise(sides)) - 0.5) < 0.02
    assert {side for _ in range(50) for side in draw_sides(rng, 9, 4)} == {0, 1, 2, 3}


def test_drawn_categories_avoid_held_out_pairs():
    rng = random.Random(5)
    for near in (False, True):
        for _ in range(200):
            drawn = draw_categories(rng, WORDS, 6, HELD_OUT, near=near)
            assert len(set(drawn)) == 6
            assert not {frozenset(pair) for pair in itertools.combinations(drawn, 2)} & HELD_OUT


def test_near_categories_are_of_one_group():
    assert sorted(itertools.chain.from_iterable(NEAR)) == sorted(WORDS.categories)
    rng = random.Random(6)
    together = 0
    for _ in range(200):
        first, second = draw_categories(rng, WORDS, 2, HELD_OUT, near=True)
        possible = [other for other in WORDS.near[first] if frozenset((first, other)) not in HELD_OUT]
        together += second in WORDS.near[first]
        assert second in WORDS.near[first] or first not in WORDS.near[second] or not possible
    assert together > 150


def test_seen_pairs_and_held_out_pairs_are_all_pairs():
    pairs = {frozenset(pair) for pair in seen_pairs(WORDS, HELD_OUT)}
    assert not pairs & HELD_OUT
    n = len(WORDS.categories)
    assert len(pairs) + len(HELD_OUT) == n * (n - 1) / 2


def test_a_drawn_episode_is_as_difficult_as_asked_for():
    rng = random.Random(7)
    how = Difficulty((2, 4), (3, 6), longest=2, mislabeled=0.5)
    drawn = [draw_episode(rng, WORDS, how, HELD_OUT, 5) for _ in range(200)]
    assert {len(episode.categories) for episode in drawn} == {2, 3, 4}
    assert {len(item.text) for episode in drawn for item in episode.items} == {1, 2}
    wrong = statistics.fmean(any(item.shown_class != item.side for item in episode.items) for episode in drawn)
    assert 0.3 < wrong < 0.6  # in half of the episodes none is


def test_a_list_is_of_one_category_or_of_near_ones():
    rng = random.Random(4)
    single = 0
    for _ in range(200):
        words = list_sequence(rng, WORDS, 10)
        assert len(set(words)) == 10
        single += any(set(words) <= set(group) for group in WORDS.categories.values())
        owners = {WORDS.owners[word] for word in words}
        assert any(all(set(names) & set(group) for names in owners) for group in NEAR)
    assert 140 < single < 190


def test_named_texts_end_with_their_categorys_own_name():
    tokens, weights = named_sequence(random.Random(8), WORDS, 8, longest=4)
    names = {name: category for category, name in WORDS.names.items()}
    text, n = [], 0
    for token, weight in zip(tokens, weights, strict=True):
        if token in names:
            assert any(word in WORDS.categories[names[token]] for word in text[:-1])
            assert text[-1] == ":"
            assert weight == LABEL_WEIGHT
            text, n = [], n + 1
        else:
            assert weight == OTHER_WEIGHT
            text.append(token)
    assert n == 8
    assert not text


def test_asides_are_the_categorys_name_in_place_of_the_label_or_after_it():
    kinds = set()
    for seed in range(40):
        names = ("animal", "color", "tool")
        sides, how = (0, 1, 2, 0, 1, 2, 0), Difficulty(asides=0.3)
        episode = make_episode(random.Random(seed), WORDS, names, sides, how, labels=("foo", "bar", "baz"))
        tokens, weights = list(episode.tokens), list(episode.weights)
        shown = set()
        for n, item in enumerate(episode.items):
            assert tokens[:2] == [item.text[0], ":"]
            tokens, weights = tokens[2:], weights[2:]
            kind = []
            while tokens and tokens[0] in (episode.labels[item.side], WORDS.names[names[item.side]]):
                if tokens[0] in episode.labels:
                    assert weights[0] == (LABEL_WEIGHT if item.side in shown else OTHER_WEIGHT)
                    shown.add(item.side)
                else:
                    assert weights[0] == ASIDE_WEIGHT
                kind.append("label" if tokens[0] in episode.labels else "name")
                tokens, weights = tokens[1:], weights[1:]
            kinds.add(tuple(kind))
            assert n < 6 or kind == ["label"]
        assert not tokens
    assert kinds == {("label",), ("name",), ("label", "name")}


def test_the_longest_episodes_of_one_class_have_a_word_for_every_text():
    smallest = min(WORDS.categories, key=lambda name: len(WORDS.categories[name]))
    for seed in range(100):
        episode = make_episode(random.Random(seed), WORDS, (smallest, "money"), (0,) * 17, Difficulty(longest=8))
        assert all(any(word in WORDS.categories[smallest] for word in item.text) for item in episode.items)
