"""The bundled models' tokenizer: content words in pieces that do not tell their category."""

import itertools
import statistics
from collections import Counter

from transformers import AutoTokenizer

from experiments.bundled_models.episodes import ALWAYS_HELD_OUT, BUNDLED, SPECIAL, held_out_pairs, load_words
from experiments.bundled_models.tokenizer import learn_merges, make_tokenizer

WORDS = load_words()
TOKENIZER = make_tokenizer(WORDS, 320)
CONTENT = sorted(WORDS.owners)


AMBIGUOUS = """
axe bitter chest cricket file fly folder gold knife lavender lilac minute mouse nickel orange plane quarter
rocket season second silver star tank teacher toast triangle violet whip
"""


def test_the_word_list_has_plain_words_in_one_role_each():
    """But for the named ambiguous words, and proper names with capitals."""
    groups, words = WORDS.categories, WORDS.vocabulary
    assert len(groups) >= 40
    assert min(map(len, groups.values())) >= 24
    count = Counter(word for group in groups.values() for word in group)
    assert {word for word, n in count.items() if n > 1} == set(AMBIGUOUS.split())
    for first, second in ALWAYS_HELD_OUT:
        assert len({*groups[first]} - {*groups[second]}) == len(groups[first]) >= 60
    roles = [*count, *WORDS.labels, *WORDS.fillers]
    assert len(roles) == len({*roles}) == len(words) - len(SPECIAL)
    assert words[: len(SPECIAL)] == SPECIAL
    assert all(word.isalpha() and word[1:] == word[1:].lower() for word in roles)
    capitals = {name for name, group in groups.items() if any(word[0].isupper() for word in group)}
    assert capitals == {"country", "city", "calendar", "space"}


def test_held_out_pairs():
    held_out, n = held_out_pairs(WORDS), len(WORDS.categories)
    assert {frozenset(pair) for pair in ALWAYS_HELD_OUT} <= held_out
    assert abs(len(held_out) - 0.1 * n * (n - 1) / 2) <= 3
    assert held_out == held_out_pairs(WORDS) != held_out_pairs(WORDS, seed=1)


def test_merges_by_hand():
    words = ("abab", "cab", "ac")
    # a ##b ##a ##b, c ##a ##b, a ##c: "##a ##b" is met twice, every other pair once.
    # Then a ##b ##ab, c ##ab, a ##c: all once, and "##b ##ab" is first by alphabet.
    # Then a ##bab, c ##ab, a ##c.
    assert learn_merges(words, 3, never=frozenset()) == [("##a", "##b"), ("##b", "##ab"), ("a", "##bab")]
    assert learn_merges(words, 4, never=frozenset(words)) == [("##a", "##b"), ("##b", "##ab")]
    assert learn_merges(["ab"], 5, never=frozenset()) == [("a", "##b")]
    assert learn_merges(["ab"], 5, never=frozenset({"ab"})) == []


def test_the_bundled_models_have_this_tokenizer():
    for name in ("icl-mini", "icl-mini-gptj", "icl-mini-llama"):
        bundled = AutoTokenizer.from_pretrained(BUNDLED / name)
        assert bundled._tokenizer.to_str() == TOKENIZER._tokenizer.to_str()


def test_a_piece_does_not_tell_the_category():
    spelled = {word: TOKENIZER(word).input_ids for word in CONTENT}
    lengths = Counter(map(len, spelled.values()))
    assert lengths[1] == 0
    assert (lengths[2] + lengths[3]) / len(CONTENT) > 0.75
    assert len({*map(tuple, spelled.values())}) == len(CONTENT)  # no two words alike
    words_with = {}
    for word, pieces in spelled.items():
        for piece in pieces:
            words_with.setdefault(piece, []).append({*WORDS.owners[word]})
    pairs = [({*WORDS.owners[word]}, piece) for word, pieces in spelled.items() for piece in pieces]
    shares = [statistics.fmean(bool(own & other) for other in words_with[piece]) for own, piece in pairs]
    assert statistics.fmean(shares) < 0.25


def test_labels_fillers_names_and_specials_are_one_token_that_no_word_contains():
    ids = [TOKENIZER(word).input_ids for word in (*SPECIAL, *WORDS.fillers, *WORDS.labels, *WORDS.names.values())]
    assert all(len(some) == 1 for some in ids)
    inside = {piece for word in CONTENT for piece in TOKENIZER(word).input_ids}
    letter = TOKENIZER("a").input_ids[0]  # a filler, and the first letter of words
    assert not inside & set(itertools.chain.from_iterable(ids)) - {letter}


def test_texts_come_back_and_offsets_fit():
    text = "love : bar crowbar : foo Xylophonist :"
    encoded = TOKENIZER(text, return_offsets_mapping=True)
    assert TOKENIZER.decode(encoded.input_ids) == text
    assert TOKENIZER.unk_token_id not in encoded.input_ids
    assert "".join(text[start:end] for start, end in encoded.offset_mapping) == text.replace(" ", "")
    assert TOKENIZER("ü").input_ids == [TOKENIZER.unk_token_id]
