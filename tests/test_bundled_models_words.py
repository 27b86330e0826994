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
