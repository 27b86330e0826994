"""Positions and scored tokens, by hand, on tokenizers of six kinds trained here."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from same_values import same, tensors_of
from small_tokenizers import END, KINDS, WORDS, model_of, tokenizer_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from icl_lens.errors import InputError
from icl_lens.prompts.plain_text import Text
from icl_lens.prompts.prompt import Demonstration, Prompt, Template
from icl_lens.prompts.tokenize import tokenize

PAPER = Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")
SPACED = [kind for kind in KINDS if kind != "word"]
JOINED = Template("{text}{label}", "{text}")


def strings(kind: str, ids) -> list[str]:
    """Token strings as the vocabulary has them, white space shown as "_"."""
    tokens = tokenizer_of(kind).convert_ids_to_tokens(torch.as_tensor(ids).tolist())
    return [token.replace("Ġ", "_").replace("▁", "_") for token in tokens]


def prompt_of(
    *pairs: tuple[str, str], query: str = "one", answer: str | None = None, labels=None
) -> Prompt:
    return Prompt([Demonstration(*pair) for pair in pairs], query, answer, labels)


def labeled(*labels: str) -> Prompt:
    return prompt_of(*[("love", label) for label in labels])


# Positions


def test_a_tokenizer_without_a_beginning_of_sequence_token_cannot_prepend_it():
    with pytest.raises(InputError, match="no beginning-of-sequence token"):
        tokenize(model_of("word"), PAPER, prepend_bos=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prepend_bos", [False, True, None])
def test_the_papers_positions_whatever_the_tokenizer(kind, prepend_bos):
    if kind == "word" and prepend_bos:
        return  # it has no beginning-of-sequence token
    batch = tokenize(model_of(kind), [PAPER], prepend_bos=prepend_bos)
    shift = int(kind == "metaspace" if prepend_bos is None else prepend_bos)

    def shifted(*positions):
        return (torch.tensor([positions]) + shift).tolist()

    assert batch.label_positions.tolist() == shifted(2, 5, 8, 11)
    assert batch.demonstration_ranges.tolist() == shifted([0, 3], [3, 6], [6, 9], [9, 12])
    assert batch.text_ranges.tolist() == shifted([0, 1], [3, 4], [6, 7], [9, 10])
    assert batch.query_range.tolist() == shifted(12, 13)
    assert batch.last.tolist() == [shift + 13]
    assert batch.tokens.shape == (1, shift + 14)  # nothing at the end
    if shift:
        assert batch.tokens[0, 0] == tokenizer_of(kind).bos_token_id
    space = "" if kind == "word" else "_"
    assert strings(kind, batch.label_tokens) == [f"{space}bar", f"{space}foo"]
    read = batch.tokens[0, batch.label_positions[0]].tolist()
    assert read == batch.label_tokens[[0, 0, 1, 1]].tolist()


@pytest.mark.parametrize(("kind", "front"), [("byte", []), ("metaspace", ["<s>"])])
def test_the_beginning_of_sequence_is_the_published_tokenizers(kind, front, tmp_path):
    """TransformerLens loads every tokenizer with add_bos_token=True, although GPT-2's own adds no
    such token.
    """
    tokenizer_of(kind).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, add_bos_token=True)
    assert loaded("love")["input_ids"][0] == loaded.bos_token_id
    batch = tokenize(model_of(loaded), PAPER)
    assert batch.token_strings[0][: len(front)] == front
    assert batch.last.tolist() == [13 + len(front)]
    assert tokenize(model_of(loaded), PAPER, prepend_bos=True).tokens[0, 0] == loaded.bos_token_id
    assert tokenize(model_of(loaded), PAPER, prepend_bos=False).last.tolist() == [13]


def test_a_tokenizer_whose_origin_is_gone_needs_to_be_told(tmp_path):
    tokenizer_of("byte").save_pretrained(tmp_path / "published")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "published", add_bos_token=True)
    (tmp_path / "published").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="pass prepend_bos=True or False"):
        tokenize(model_of(loaded), PAPER)
    assert tokenize(model_of(loaded), PAPER, prepend_bos=True).last.tolist() == [14]


@pytest.mark.parametrize("separator", [" ", "\n", "\r\n", "\t"])
@pytest.mark.parametrize("kind", ["byte", "metaspace"])
def test_the_tokens_of_a_written_prompt_are_the_tokenizers_own(kind, separator):
    model = model_of(kind)
    text = separator.join(["love : bar", "like : bar", "eight : foo", "a two : foo", "one :"])
    own_ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    for prompts in (text, Prompt.parse(text), [text, text]):
        assert tokenize(model, prompts, prepend_bos=False).tokens[0].tolist() == own_ids


@pytest.mark.parametrize("kind", SPACED)
def test_labels_with_their_space_in_the_label_or_in_the_template(kind):
    """The label " foo" after "one :" and "foo" after "one : " are the same text, so the same tokens
    and positions.
    """
    spaced = prompt_of(*[(d.text, f" {d.label}") for d in PAPER.demonstrations])
    tokenized = tokenize(model_of(kind), spaced, template=Template("{text} :{label}"))
    two = tokenize(model_of(kind), PAPER)
    assert tokenized.labels == (" bar", " foo")
    for name in ("tokens", "label_positions", "label_tokens", "last", "text_ranges"):
        assert torch.equal(getattr(tokenized, name), getattr(two, name)), name


@pytest.mark.parametrize("kind", ["byte", "byte-trimmed"])
def test_foo_with_and_without_its_space_are_two_labels(kind):
    prompt = prompt_of(("love", " foo"), ("two", "foo"))
    batch = tokenize(model_of(kind), prompt, template=Template("{text}->{label}", "{text}->"))
    # love -> _foo | _two -> foo | _one ->
    assert strings(kind, batch.tokens[0]) == [
        "love",
        "->",
        "_foo",
        "_two",
        "->",
        "foo",
        "_one",
        "->",
    ]
    assert strings(kind, batch.label_tokens) == ["_foo", "foo"]
    assert batch.label_positions.tolist() == [[2, 5]]


@pytest.mark.parametrize("kind", SPACED)
def test_appending_what_the_labels_share(kind):
    prompt = prompt_of(("love", "food"), ("two", "foot"), answer="foot")
    longer = prompt_of(("happy", "foot"), ("sad", "food"), ("nine", "foot"), answer="food")
    batch = tokenize(model_of(kind), [prompt, longer], prepend_bos=False)
    assert (
        strings(kind, batch.tokens[0, :11])[1:] == "_: _foo d _two _: _foo t _one _: _foo".split()
    )
    assert batch.label_positions[0].tolist() == [3, 7, -1]
    assert batch.last.tolist() == [10, 14]
    assert strings(kind, batch.tokens[[0, 1], batch.last]) == ["_foo", "_foo"]
    assert strings(kind, batch.label_tokens) == ["d", "t"]
    assert strings(kind, batch.answer_tokens) == ["t", "d"]
    assert batch.attention_mask.sum(-1).tolist() == [11, 15]
    assert batch.query_range[0].tolist() == [8, 9]


@pytest.mark.parametrize("kind", ["byte", "byte-trimmed", "byte-prefixed", "metaspace"])
def test_labels_of_several_tokens_are_scored_and_read_at_the_first(kind):
    """A label's position is that of its first token, which is scored; its range holds all
    tokens.
    """
    prompt = prompt_of(("love", "happy two"), ("nine", "sad"), query="a three", answer="happy two")
    batch = tokenize(model_of(kind), prompt, prepend_bos=False)
    # 0 love 1 : 2 happy 3 two 4 nine 5 : 6 sad 7 a 8 three 9 :
    assert batch.label_positions.tolist() == [[2, 6]]
    assert batch.label_ranges.tolist() == [[[2, 4], [6, 7]]]
    assert batch.all_label_positions.tolist() == [[[2, 3], [6, -1]]]
    assert batch.prediction_positions.tolist() == [[1, 5]]
    assert batch.text_ranges.tolist() == [[[0, 1], [4, 5]]]
    assert batch.query_range.tolist() == [[7, 9]]
    assert batch.last.tolist() == [9]
    assert strings(kind, batch.label_tokens) == ["_happy", "_sad"]


def test_a_label_of_bytes_ends_with_its_last_byte():
    """é is two bytes that cover the same character: the label ends with the second. It is scored by
    the space.

    If all labels begin with that space, it separates text and label, and does not belong to the
    label.
    """
    batch = tokenize(
        model_of("metaspace"), prompt_of(("love", "é"), ("語", "foo")), prepend_bos=False
    )
    expected = "_love _: _ <0xC3> <0xA9> _ <0xE8> <0xAA> <0x9E> _: _foo _one _:"
    assert strings("metaspace", batch.tokens[0]) == expected.split()
    assert batch.label_positions.tolist() == [[2, 10]]
    assert batch.label_ranges.tolist() == [[[2, 5], [10, 11]]]
    assert strings("metaspace", batch.label_tokens) == ["_foo", "_"]
    assert batch.text_ranges.tolist() == [[[0, 1], [6, 9]]]
    batch = tokenize(model_of("metaspace"), prompt_of(("a", "é"), ("two", "è")))
    assert strings("metaspace", batch.tokens[0, -2:]) == ["_", "<0xC3>"]
    assert strings("metaspace", batch.label_tokens) == ["<0xA8>", "<0xA9>"]
    assert (batch.label_positions[:, None] - batch.label_ranges[..., 0]).tolist() == [[[1, 1]]]
    held = [
        strings("metaspace", batch.tokens[0, slice(*tokens)])
        for tokens in batch.label_ranges[0].tolist()
    ]
    assert held == [["<0xC3>", "<0xA9>"], ["<0xC3>", "<0xA8>"]]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_hold_the_label_words_and_colons(kind):
    prompt = prompt_of(
        ("foo", "bar"),
        ("bar : foo", "foo"),
        (": :", "bar"),
        ("the foo", "foo"),
        query="bar foo : foo",
    )
    batch = tokenize(model_of(kind), prompt, prepend_bos=False)
    #          0   1 2   3   4 5   6 7   8 9 10 11  12  13  14 15  16  17  18 19  20
    words = "foo : bar bar : foo : foo : : : bar the foo : foo bar foo : foo :".split()
    assert [string.lstrip("_") for string in strings(kind, batch.tokens[0])] == words
    assert batch.label_positions.tolist() == [[2, 7, 11, 15]]
    assert batch.text_ranges.tolist() == [[[0, 1], [3, 6], [8, 10], [12, 14]]]
    assert batch.query_range.tolist() == [[16, 20]]
    assert batch.last.tolist() == [20]


# Batches of several prompts and classes


RAGGED = [
    PAPER,
    prompt_of(("love", "sad"), query="the happy a", labels=("happy", "sad", "foo")),
    prompt_of(("a the two", "foo"), ("nine", "bar"), answer="bar"),
]


ID_OF = {word: index for index, word in enumerate(WORDS.split(), 1)}


def test_ragged_rows_have_their_own_tokens_and_lengths():
    batch = tokenize(model_of("word"), RAGGED)
    assert batch.token_strings[0] == "love : bar like : bar eight : foo two : foo one :".split()
    assert batch.tokens[0].tolist() == [ID_OF[word] for word in batch.token_strings[0]]
    assert batch.tokens.shape == (3, 14)
    assert batch.attention_mask.sum(-1).tolist() == [14, 7, 10]
    assert batch.last.tolist() == [13, 6, 9]
    assert [len(row) for row in batch.token_strings] == [14, 7, 10]


def test_four_classes_and_ragged_rows_keep_their_places():
    batch = tokenize(model_of("word"), RAGGED)
    assert batch.label_positions.tolist() == [[2, 5, 8, 11], [2, -1, -1, -1], [4, 7, -1, -1]]
    assert batch.label_index.tolist() == [[0, 0, 1, 1], [3, -1, -1, -1], [1, 0, -1, -1]]
    assert batch.text_ranges[2].tolist() == [[0, 3], [5, 6], [-1, -1], [-1, -1]]
    assert batch.query_range.tolist() == [[12, 13], [3, 6], [8, 9]]


def test_ragged_rows_have_their_own_choices_and_answers():
    batch = tokenize(model_of("word"), RAGGED)
    assert batch.labels == ("bar", "foo", "happy", "sad")
    assert batch.label_mask.tolist() == [
        [True, True, False, False],
        [False, True, True, True],  # two of them never demonstrated there
        [True, True, False, False],
    ]
    assert batch.answer.tolist() == [1, -1, 0]
    assert batch.label_tokens.tolist() == [ID_OF[word] for word in batch.labels]
    assert batch.answer_tokens.tolist() == [ID_OF["foo"], -1, ID_OF["bar"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbors(kind):
    batch = tokenize(model_of(kind), RAGGED)
    for row, prompt in enumerate(RAGGED):
        alone = tokenize(model_of(kind), prompt, labels=batch.labels)
        width, demos = alone.tokens.shape[1], len(prompt.demonstrations)
        assert torch.equal(batch.tokens[row, :width], alone.tokens[0])
        assert batch.attention_mask[row].tolist() == [1] * width + [0] * (
            batch.tokens.shape[1] - width
        )
        for name in ("label_positions", "label_index", "text_ranges"):
            assert torch.equal(getattr(batch, name)[row, :demos], getattr(alone, name)[0]), name
        for name in ("last", "label_mask", "answer", "query_range", "answer_tokens"):
            assert torch.equal(getattr(batch, name)[row], getattr(alone, name)[0]), name
        assert torch.equal(batch.label_tokens, alone.label_tokens)


@pytest.fixture(scope="module")
def ragged():
    return tokenize(model_of("word"), RAGGED)


def test_slices_are_batches_of_their_prompts(ragged):
    tail = ragged[1:]
    assert same(ragged[:], ragged)
    assert tail.prompts == ragged.prompts[1:]
    assert tail.token_strings == ragged.token_strings[1:]
    assert tail.answer_tokens.tolist() == ragged.answer_tokens[1:].tolist()
    assert ragged[[2, 0]].prompts == (ragged.prompts[2], ragged.prompts[0])


def test_slices_lose_padding_that_no_row_needs(ragged):
    tail = ragged[1:]
    assert tail.tokens.shape == tail.attention_mask.shape == (2, 10)
    assert torch.equal(tail.tokens, ragged.tokens[1:, :10])


def test_slices_keep_labels_and_demonstrations_so_that_results_can_be_joined(ragged):
    tail = ragged[1:]
    assert tail.labels == ragged.labels
    assert torch.equal(tail.label_tokens, ragged.label_tokens)
    assert tail.label_positions.tolist() == [[2, -1, -1, -1], [4, 7, -1, -1]]


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ([0, 1, 2], "1 to 4 demonstrations"),
        ([1, 2], "1 to 2 demonstrations"),
        ([1], "1 demonstration"),
    ],
)
def test_a_batch_says_how_many_demonstrations_it_has(ragged, rows, number):
    assert f"{number}, labels" in repr(ragged[rows])


def test_rows_are_selected_like_those_of_a_tensor(ragged):
    for index in ([1, 2], [-2, -1], torch.tensor([1, 2]), torch.tensor([False, True, True])):
        assert same(ragged[1:], ragged[index])
    for last in (-1, np.int64(2), torch.tensor(2)):
        assert same(ragged[last], ragged[2:])
    assert [len(row) for row in ragged] == [1, 1, 1]
    for piece, expected in zip(ragged.split(2), [ragged[:2], ragged[2:]], strict=True):
        assert same(piece, expected)


def test_missing_rows_and_empty_selections_are_refused(ragged):
    for missing in (3, torch.tensor([True, False])):
        with pytest.raises(IndexError):
            ragged[missing]
    for nothing in ([], slice(3, None), torch.zeros(3, dtype=torch.bool)):
        with pytest.raises(InputError, match="must select at least one"):
            ragged[nothing]


def test_batches_lie_on_the_models_device():
    moved = tokenize(model_of("word"), RAGGED).to("meta")
    there = tokenize(model_of("word", device="meta"), RAGGED)
    for batch in (moved, there):
        tensors = tensors_of(batch)
        assert "decisions.n_appended" in tensors
        assert {tensor.device.type for tensor in tensors.values()} == {"meta"}


# What is refused


def joined_without(word: str):
    """A model whose tokenizer removes a word."""
    raw = Tokenizer.from_str(tokenizer_of("word").backend_tokenizer.to_str())
    split = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(word, "removed")]
    raw.pre_tokenizer = pre_tokenizers.Sequence(split)
    return model_of(PreTrainedTokenizerFast(tokenizer_object=raw))


REFUSED = [
    ("word", [], {}, "at least one prompt"),
    ("word", PAPER, {"labels": ["bar"]}, "add 'foo'"),
    (
        "word",
        prompt_of(("love", " foo"), ("two", "foo")),
        {},
        "label ' foo' begins with a space, which the template",
    ),
    ("word", prompt_of(("love", "foo"), ("two", "foo ")), {}, "have the same tokens 'foo'"),
    # one begins with the tokens of another, and a text follows it
    (
        "byte",
        labeled("foo", "food"),
        {},
        "'foo' begin those of another label, and the template has no token",
    ),
    ("byte", Prompt([], "a", "food", ("foo", "food")), {}, "'foo' begin those of another label"),
    # words that the tokenizer does not know
    (
        "word",
        prompt_of(("love", "foo"), ("zebra", "bar"), ("love yak", "bar")),
        {},
        "got 'zebra', 'yak';",
    ),
    ("word", prompt_of(*[(f"w{i}", "foo") for i in range(12)]), {}, "'w9' and 2 more"),
    # labels and texts without tokens of their own: "->" is one token
    (joined_without("foo"), PAPER, {}, "no token for 'foo'"),
    (joined_without("like"), PAPER, {}, "no token for 'like'"),
    (
        "byte",
        labeled(">", "foo"),
        {"template": Template("{text} -{label}", "{text} -")},
        "'>' shares a token .* '-'",
    ),
    (
        "byte",
        labeled("-", "foo"),
        {"template": Template("{text} : {label}>", "{text} :")},
        "'-' shares a token .* '>'",
    ),
    # the first text, or the query, brings a space of its own to a template without one
    (
        "byte",
        prompt_of(("nine ", "foo"), ("two)", "bar"), query="(one)"),
        {"template": JOINED},
        "'foo' is 'foo' after the query of prompt 0 but ' foo' in a demonstration",
    ),
    (
        "byte",
        prompt_of(("two)", "foo"), ("(a)", "bar"), query="one "),
        {"template": JOINED},
        "tokenized differently when the label 'foo' follows",
    ),
    # the model's side
    (
        model_of("word", n_ctx=13),
        [RAGGED[1], PAPER],
        {},
        "prompt 1 has 14 tokens, .* context length of 13",
    ),
    # a long text is measured by its beginning, before all of it is tokenized
    (
        model_of("word", n_ctx=13),
        prompt_of(("love", "foo"), query="one " * 10**5),
        {},
        "prompt 0 has 400,0.. characters, whose first 104 are 2. tokens, .* context length of 13",
    ),
    (model_of("metaspace", d_vocab=100), PAPER, {}, "outside the model's vocabulary of 100"),
    (model_of(SimpleNamespace(is_fast=False)), PAPER, {}, "must be a fast tokenizer"),
    (model_of(None), PAPER, {}, "must have a tokenizer"),
]


@pytest.mark.parametrize(("model", "prompts", "options", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_tokenized_is_refused(model, prompts, options, words):
    with pytest.raises(InputError, match=words):
        tokenize(model_of(model) if isinstance(model, str) else model, prompts, **options)


def test_an_unknown_letter_is_named_with_its_word():
    """Byte-pair encoding without bytes leaves single characters unknown; the user typed a word."""
    raw = Tokenizer(models.BPE({"<unk>": 0, ":": 1, "a": 2, "b": 3}, [], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = model_of(PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"))
    with pytest.raises(InputError, match="got 'ab7a', 'bé';"):
        tokenize(model, prompt_of(("ab7a", "a"), ("b bé", "b"), query="a"))
    with pytest.raises(InputError, match="got '7';"):
        tokenize(model, prompt_of(("a" * 40 + "7", "a"), query="a"))


def test_special_tokens_that_are_no_words_of_the_vocabulary():
    """TransformerLens names bos and eos tokens for tokenizers without; their id is then that of
    unknown words.
    """
    raw = Tokenizer.from_str(tokenizer_of("word").backend_tokenizer.to_str())
    named = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    named.bos_token = named.eos_token = END
    assert named.bos_token_id == named.unk_token_id
    with pytest.raises(InputError, match="got 'zebra'"):
        tokenize(model_of(named), prompt_of(("love", "foo"), ("zebra", "bar")))
    with pytest.raises(InputError, match="no beginning-of-sequence token"):
        tokenize(model_of(named), PAPER, prepend_bos=True)
    assert tokenize(model_of(named), PAPER).last.tolist() == [13]


@pytest.mark.parametrize("kind", ["word", "byte", "byte-trimmed", "metaspace"])
def test_a_special_token_in_a_text_is_that_token_although_it_is_the_unknown_one(kind):
    tokenizer = tokenizer_of(kind)
    marker = tokenizer.unk_token
    template = Template("{text} : {label} " + marker, "{text} :")
    batch = tokenize(
        model_of(kind), prompt_of(("love", "foo"), ("eight", "bar"), query="two"), template=template
    )
    assert batch.tokens[0].tolist().count(tokenizer.unk_token_id) == 2
    text = f"love {marker} eight"
    plain = tokenize(model_of(kind), Text(text, answer=f" {marker}"), prepend_bos=False)
    assert plain.tokens[0].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (
        int(tokenize(model_of(kind), Text(text, answer=marker)).targets) == tokenizer.unk_token_id
    )
    if kind == "word":
        with pytest.raises(InputError, match="got 'zebra'"):
            tokenize(model_of(kind), Text(f"{marker} zebra"))
        with pytest.raises(
            InputError, match="the answer ' zebra' is not in the model's vocabulary"
        ):
            tokenize(model_of(kind), Text(text, answer=" zebra"))


@pytest.mark.parametrize("prepend_bos", [None, True])
def test_a_text_that_begins_with_its_bos_gets_no_second_one(prepend_bos):
    """Chat text has its BOS already."""
    model = model_of("metaspace")
    bos = model.tokenizer.bos_token_id
    texts = [Text(text, answer=" sad") for text in ("<s> love like happy", "love like happy")]
    batch = tokenize(model, texts, prepend_bos=prepend_bos)
    rows = [
        row[: last + 1]
        for row, last in zip(batch.tokens.tolist(), batch.last.tolist(), strict=True)
    ]
    assert [(row[0], row.count(bos)) for row in rows] == [(bos, 1)] * 2
    assert strings("metaspace", batch.targets) == ["_sad"] * 2
    prompts = [
        prompt_of(("love", "foo"), ("<s> eight", "bar")),
        prompt_of(("<s> love", "foo"), ("eight", "bar")),
    ]
    batch = tokenize(model, prompts, prepend_bos=prepend_bos)
    assert [row.count(bos) for row in batch.tokens.tolist()] == [2, 1]
    for row in range(2):
        assert strings("metaspace", batch.tokens[row, batch.label_positions[row]]) == [
            "_foo",
            "_bar",
        ]
        start, stop = batch.query_range[row].tolist()
        assert strings("metaspace", batch.tokens[row, start:stop]) == ["_one"]


# Anything a user may write: byte-level tokens decode to exactly the text, so positions can be
# checked by decoding


anything = st.text(min_size=1, max_size=12).filter(lambda text: text.strip())
to_byte = {character: byte for byte, character in bytes_to_unicode().items()}


@pytest.mark.parametrize("kind", ["byte", "byte-trimmed"])
@settings(max_examples=40, deadline=None)
@example([(" 0", "foo"), ("0 ", "bar")], " 0 ")
@example([("Sentences : foo, of every\nlength. " * 9, "foo"), ("zebra " * 40, "bar")], "one\n")
@given(
    st.lists(st.tuples(anything, st.sampled_from(["foo", "bar", "qux"])), min_size=1, max_size=4),
    anything,
)
def test_positions_by_decoding(kind, pairs, query):
    prompt = prompt_of(*pairs, query=query, labels=("foo", "bar", "qux"))
    batch = tokenize(model_of(kind), prompt, prepend_bos=False)
    template, tokenizer = Template(), tokenizer_of(kind)
    rendered = template.render(prompt)
    ids = batch.tokens[0].tolist()

    def decoded(count: int) -> bytes:
        pieces = tokenizer.convert_ids_to_tokens(ids[:count])
        return b"".join(bytes(to_byte[character] for character in piece) for piece in pieces)

    assert decoded(len(ids)).decode() == rendered.text
    for demo, (start, end) in enumerate(rendered.label_spans):
        first, stop = batch.label_ranges[0, demo].tolist()
        assert decoded(stop).decode() == rendered.text[:end]
        assert len(decoded(first)) > len(rendered.text[:start].encode()) - 2
        assert int(batch.label_positions[0, demo]) == first  # nothing shared
    ranges = [*batch.text_ranges[0].tolist(), batch.query_range[0].tolist()]
    for (first, stop), (start, end) in zip(
        ranges, [*rendered.text_spans, rendered.query_span], strict=True
    ):
        # Every token of the range holds some of the text, and they hold all of it but white space
        # at its ends, which trimmed offsets count to no token.
        text = rendered.text[start:end]
        lower, upper = len(rendered.text[:start].encode()), len(rendered.text[:end].encode())
        held = decoded(stop)[len(decoded(first)) :]
        assert text.strip().encode() in held
        assert len(decoded(first + 1)) > lower
        assert len(decoded(stop - 1)) < upper
    for label, token in zip(batch.labels, batch.label_tokens.tolist(), strict=True):
        whole = tokenizer(template.continuation(prompt, label).text)["input_ids"]
        assert whole[: len(ids)] == ids
        assert whole[len(ids)] == token
