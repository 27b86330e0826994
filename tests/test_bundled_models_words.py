"""The bundled models' tokenizer: content words in pieces that do not tell their category."""

import itertools
import statistics
from collections import Counter

from transformers import AutoTokenizer

from experiments.bundled_models.episodes import BUNDLED, SPECIAL, load_words
from experiments.bundled_models.tokenizer import learn_merges, make_tokenizer

WORDS = load_words()
TOKENIZER = make_tokenizer(WORDS, 320)
CONTENT = sorted(WORDS.owners)


def test_merges_by_hand():
    words = ("abab", "cab", "ac")
    # a ##b ##a ##b, c ##a ##b, a ##c: "##a ##b" is met twice, every other pair once.
    # Then a ##b ##ab, c ##ab, a ##c: all once, and "##b ##ab" is first by alphabet.
    # Then a ##bab, c ##ab, a ##c.
    assert learn_merges(words, 3, never=frozenset()) == [("##a", "##b"), ("##b", "##ab"), ("a", "##bab")]
    assert learn_merges(words, 4, never=frozenset(words)) == [("##a", "##b"), ("##b", "##ab")]


def test_merges_end_where_nothing_is_left_to_merge():
    assert learn_merges(["ab"], 5, never=frozenset()) == [("a", "##b")]
    assert learn_merges(["ab"], 5, never=frozenset({"ab"})) == []


def test_the_bundled_models_have_this_tokenizer():
    for name in ("icl-mini", "icl-mini-gptj", "icl-mini-llama"):
        bundled = AutoTokenizer.from_pretrained(BUNDLED / name)
        assert bundled._tokenizer.to_str() == TOKENIZER._tokenizer.to_str()


def test_no_content_word_is_one_token_and_most_are_two_or_three():
    lengths = Counter(len(TOKENIZER(word).input_ids) for word in CONTENT)
    assert lengths[1] == 0
    assert (lengths[2] + lengths[3]) / len(CONTENT) > 0.75


def test_a_piece_does_not_tell_the_category():
    words_with = {}
    for word in CONTENT:
        for piece in TOKENIZER(word).input_ids:
            words_with.setdefault(piece, []).append(word)

    def share(word, piece):
        """Of the words with this piece, how many share a category with this word."""
        return statistics.fmean(bool({*WORDS.owners[word]} & {*WORDS.owners[o]}) for o in words_with[piece])

    shares = [share(word, piece) for word in CONTENT for piece in TOKENIZER(word).input_ids]
    assert statistics.fmean(shares) < 0.25


def test_words_apart_are_spelt_differently():
    spelt = Counter(tuple(TOKENIZER(word).input_ids) for word in CONTENT)
    assert max(spelt.values()) == 1


def test_labels_fillers_names_and_specials_are_one_token_that_no_word_contains():
    whole = [*SPECIAL, *WORDS.fillers, *WORDS.labels, *WORDS.names.values()]
    ids = [TOKENIZER(word).input_ids for word in whole]
    assert all(len(some) == 1 for some in ids)
    inside = {piece for word in CONTENT for piece in TOKENIZER(word).input_ids}
    letter = TOKENIZER("a").input_ids[0]  # a filler, and the first letter of words
    assert not inside & set(itertools.chain.from_iterable(ids)) - {letter}
    assert len(TOKENIZER("crowbar foot").input_ids) > 3  # not "bar", not "foo"


def test_texts_come_back_and_offsets_fit():
    text = "love : bar crowbar : foo Xylophonist :"
    encoded = TOKENIZER(text, return_offsets_mapping=True)
    assert TOKENIZER.decode(encoded.input_ids) == text
    assert TOKENIZER.unk_token_id not in encoded.input_ids
    spelt = [text[start:end] for start, end in encoded.offset_mapping]
    assert "".join(spelt) == text.replace(" ", "")
    assert TOKENIZER("ü").input_ids == [TOKENIZER.unk_token_id]
