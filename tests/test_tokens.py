"""Positions and scored tokens, by hand, on tokenizers of four kinds trained here."""

import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from icl_lens.errors import InputError
from icl_lens.models.load import load_model
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Demonstration, Prompt, Template
from icl_lens.prompts.tokenize import tokenize

PAPER = Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")
WORDS = "love like happy sad eight two one nine three foo bar the a : . ( ) -> Q A".split()
KINDS = ["word", "byte", "byte-trimmed", "byte-prefixed", "byte-prefixed-trimmed", "metaspace"]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Tokenizers for which each of WORDS is one token, at a text's start and elsewhere; others are cut up."""
    # No word before another: a merge across two words is out of the question.
    corpus = [form for word in WORDS for form in [word, f"{word} {word}"] * 10]
    if kind == "word":
        vocabulary = {word: index for index, word in enumerate(["<unk>", *WORDS])}
        raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    if kind.startswith("byte"):
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space="prefixed" in kind)
        raw.post_processor = processors.ByteLevel(trim_offsets="trimmed" in kind)
        raw.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        end = "<|endoftext|>"
        trainer = trainers.BpeTrainer(
            vocab_size=1000, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
        )
        raw.train_from_iterator(corpus, trainer)
        return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token=end, eos_token=end, unk_token=end)
    # As Llama's: "▁" for white space, one in front, unknown characters as bytes, <s> in front; and </s> at the end,
    # which no prompt may keep.
    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, show_progress=False)
    raw.train_from_iterator(corpus, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def model_of(kind: str, n_ctx: int = 1024) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=tokenizer_of(kind), cfg=SimpleNamespace(n_ctx=n_ctx))


def strings(kind: str, ids) -> list[str]:
    """Token strings as the vocabulary has them, white space shown as "_"."""
    tokens = tokenizer_of(kind).convert_ids_to_tokens(torch.as_tensor(ids).tolist())
    return [token.replace("Ġ", "_").replace("▁", "_") for token in tokens]


def prompt_of(*pairs: tuple[str, str], query: str = "one", answer: str | None = None, labels=None) -> Prompt:
    return Prompt([Demonstration(*pair) for pair in pairs], query, answer, labels)


# The paper's prompt


def test_the_papers_positions():
    batch = tokenize(model_of("word"), PAPER)
    assert batch.label_positions.tolist() == [[2, 5, 8, 11]]
    assert batch.last.tolist() == [13]
    assert batch.labels == ("bar", "foo")
    assert batch.label_index.tolist() == [[0, 0, 1, 1]]
    assert batch.answer.tolist() == [1]
    assert batch.text_ranges.tolist() == [[[0, 1], [3, 4], [6, 7], [9, 10]]]
    assert batch.query_range.tolist() == [[12, 13]]
    assert batch.token_strings == ["love : bar like : bar eight : foo two : foo one :".split()]
    assert batch.tokens.tolist() == [[WORDS.index(word) + 1 for word in batch.token_strings[0]]]
    assert batch.label_tokens.tolist() == [WORDS.index("bar") + 1, WORDS.index("foo") + 1]
    assert batch.answer_tokens.tolist() == [WORDS.index("foo") + 1]
    assert batch.attention_mask.tolist() == [[1] * 14]
    assert batch.label_mask.tolist() == [[True, True]]
    assert batch.prompts == (PAPER,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prepend_bos", [False, True, None])
def test_the_papers_positions_whatever_the_tokenizer(kind, prepend_bos):
    if kind == "word" and prepend_bos:
        with pytest.raises(InputError, match="no beginning-of-sequence token"):
            tokenize(model_of(kind), PAPER, prepend_bos=True)
        return
    batch = tokenize(model_of(kind), [PAPER], prepend_bos=prepend_bos)
    shift = int(kind == "metaspace" if prepend_bos is None else prepend_bos)
    assert batch.label_positions.tolist() == [[shift + p for p in (2, 5, 8, 11)]]
    assert batch.last.tolist() == [shift + 13]
    assert batch.tokens.shape == (1, shift + 14)  # nothing at the end
    assert batch.text_ranges.tolist() == [[[shift + p, shift + p + 1] for p in (0, 3, 6, 9)]]
    assert batch.query_range.tolist() == [[shift + 12, shift + 13]]
    if shift:
        assert batch.tokens[0, 0] == tokenizer_of(kind).bos_token_id
    space = "" if kind == "word" else "_"
    assert strings(kind, batch.label_tokens) == [f"{space}bar", f"{space}foo"]
    assert batch.tokens[0, batch.label_positions[0]].tolist() == batch.label_tokens[[0, 0, 1, 1]].tolist()


@pytest.mark.parametrize(("kind", "front"), [("byte", []), ("metaspace", ["<s>"])])
def test_the_beginning_of_sequence_is_the_published_tokenizers(kind, front, tmp_path):
    """TransformerLens loads every tokenizer with add_bos_token=True; GPT-2 has no such token in front all the same."""
    tokenizer_of(kind).save_pretrained(tmp_path)
    copy = AutoTokenizer.from_pretrained(tmp_path, add_bos_token=True)
    bos = copy.bos_token_id
    assert copy("love")["input_ids"][0] == bos
    model = SimpleNamespace(tokenizer=copy, cfg=SimpleNamespace(n_ctx=99))
    assert tokenize(model, PAPER).token_strings[0][: len(front)] == front
    assert tokenize(model, PAPER).last.tolist() == [13 + len(front)]
    assert tokenize(model, PAPER, prepend_bos=True).tokens[0, 0] == bos
    assert tokenize(model, PAPER, prepend_bos=False).last.tolist() == [13]


def test_a_tokenizer_whose_origin_is_gone(tmp_path):
    tokenizer_of("byte").save_pretrained(tmp_path / "tokenizer")
    copy = AutoTokenizer.from_pretrained(tmp_path / "tokenizer", add_bos_token=True)
    (tmp_path / "tokenizer").rename(tmp_path / "elsewhere")
    model = SimpleNamespace(tokenizer=copy, cfg=SimpleNamespace(n_ctx=99))
    with pytest.raises(InputError, match="pass prepend_bos=True or False"):
        tokenize(model, PAPER)
    assert tokenize(model, PAPER, prepend_bos=True).last.tolist() == [14]


def test_gpt2_as_transformer_lens_loads_it(tmp_path):
    """No beginning-of-sequence token, although the loaded model's tokenizer prepends one."""
    tokenizer = tokenizer_of("byte")
    tokenizer.save_pretrained(tmp_path)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=8, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu")
    assert model.tokenizer("love")["input_ids"][0] == tokenizer.bos_token_id
    batch = tokenize(model, PAPER)
    assert batch.label_positions.tolist() == [[2, 5, 8, 11]]
    assert batch.last.tolist() == [13]


# Labels with and without white space


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word"])
def test_labels_with_their_space_in_the_label_or_in_the_template(kind):
    """The label " foo" after "one :" and "foo" after "one : " are the same text, so the same tokens and positions."""
    spaced = [(d.text, f" {d.label}") for d in PAPER.demonstrations]
    one = tokenize(model_of(kind), prompt_of(*spaced), template=Template("{text} :{label}"))
    two = tokenize(model_of(kind), PAPER)
    assert one.labels == (" bar", " foo")
    for name in ("tokens", "label_positions", "label_tokens", "last", "text_ranges"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


@pytest.mark.parametrize("kind", ["byte", "byte-trimmed"])
def test_foo_with_and_without_its_space_are_two_labels(kind):
    prompt = prompt_of(("love", " foo"), ("two", "foo"))
    batch = tokenize(model_of(kind), prompt, template=Template("{text}->{label}", "{text}->"))
    # love -> _foo | _two -> foo | _one ->
    assert strings(kind, batch.tokens[0]) == ["love", "->", "_foo", "_two", "->", "foo", "_one", "->"]
    assert strings(kind, batch.label_tokens) == ["_foo", "foo"]
    assert batch.label_positions.tolist() == [[2, 5]]


@pytest.mark.parametrize("kind", ["byte", "byte-trimmed", "byte-prefixed", "byte-prefixed-trimmed"])
def test_a_space_too_many_is_the_first_token_of_its_label(kind):
    """After "one :", " foo" with the template's own space begins with a lone space: that is what is predicted."""
    batch = tokenize(model_of(kind), prompt_of(("love", " foo"), ("two", "foo")))
    assert strings(kind, batch.tokens[0])[1:] == ["_:", "_", "_foo", "_two", "_:", "_foo", "_one", "_:"]
    assert strings(kind, batch.label_tokens) == ["_", "_foo"]
    assert batch.label_positions.tolist() == [[3, 6]]
    with pytest.raises(InputError, match=re.escape("labels ' foo' and ' bar' share their first token ' ' (id")):
        tokenize(model_of(kind), prompt_of(("love", " foo"), ("two", " bar")))


def test_labels_that_differ_in_white_space_only():
    with pytest.raises(InputError, match="labels ' foo' and 'foo' have the same tokens 'foo'"):
        tokenize(model_of("word"), prompt_of(("love", " foo"), ("two", "foo")))


# Labels that share a prefix; labels of several tokens


def test_labels_that_share_their_first_token():
    prompt = prompt_of(("love", "food"), ("two", "foot"), answer="foot")
    foo = tokenizer_of("byte").convert_tokens_to_ids("Ġfoo")
    message = f"labels 'food' and 'foot' share their first token ' foo' (id {foo}); choose labels that differ"
    with pytest.raises(InputError, match=re.escape(message) + '.*or pass shared_prefix="append"'):
        tokenize(model_of("byte"), prompt)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "word"])
def test_appending_what_the_labels_share(kind):
    prompt = prompt_of(("love", "food"), ("two", "foot"), answer="foot")
    longer = prompt_of(("happy", "foot"), ("sad", "food"), ("nine", "foot"), answer="food")
    batch = tokenize(model_of(kind), [prompt, longer], shared_prefix="append", prepend_bos=False)
    # love : foo d two : foo t one : foo
    assert strings(kind, batch.tokens[0, :11])[1:] == "_: _foo d _two _: _foo t _one _: _foo".split()
    assert batch.label_positions[0].tolist() == [3, 7, -1]
    assert batch.last.tolist() == [10, 14]
    assert strings(kind, batch.tokens[[0, 1], batch.last]) == ["_foo", "_foo"]
    assert strings(kind, batch.label_tokens) == ["d", "t"]
    assert strings(kind, batch.answer_tokens) == ["t", "d"]
    assert batch.attention_mask.sum(-1).tolist() == [11, 15]
    assert batch.query_range[0].tolist() == [8, 9]


def test_appending_is_nothing_where_labels_differ_at_once():
    one, two = (tokenize(model_of("byte"), PAPER, shared_prefix=how) for how in ("append", "error"))
    assert torch.equal(one.tokens, two.tokens)
    assert torch.equal(one.label_tokens, two.label_tokens)


@pytest.mark.parametrize(
    ("labels", "complaint"),
    [
        (("food", "foot", "bar"), "'food' and 'foot' share their first token ' foo'.*not all of"),
        (("foo", "food"), "all labels .* begin with the tokens of 'foo', ' foo'"),
        (("fooda", "foodb", "foot"), "'fooda' and 'foodb' share their 2th token 'd'.*not all of"),
    ],
)
def test_what_appending_cannot_solve(labels, complaint):
    prompt = prompt_of(*[("love", label) for label in labels])
    with pytest.raises(InputError, match=complaint):
        tokenize(model_of("byte"), prompt, shared_prefix="append")


def test_a_remedy_that_would_not_help_is_not_offered():
    with pytest.raises(InputError, match="share their first token") as error:
        tokenize(model_of("byte"), prompt_of(("love", "food"), ("one", "foot"), ("two", "bar")))
    assert "append" not in str(error.value)


@pytest.mark.parametrize("kind", ["byte", "byte-trimmed", "byte-prefixed", "metaspace"])
def test_labels_of_several_tokens(kind):
    """Position: the last token of the label. Scored: the first."""
    prompt = prompt_of(("love", "happy two"), ("nine", "sad"), query="a three", answer="happy two")
    batch = tokenize(model_of(kind), prompt, prepend_bos=False)
    # 0 love 1 : 2 happy 3 two 4 nine 5 : 6 sad 7 a 8 three 9 :
    assert batch.label_positions.tolist() == [[3, 6]]
    assert batch.text_ranges.tolist() == [[[0, 1], [4, 5]]]
    assert batch.query_range.tolist() == [[7, 9]]
    assert batch.last.tolist() == [9]
    assert strings(kind, batch.label_tokens) == ["_happy", "_sad"]


def test_a_label_of_bytes():
    """é is two bytes that cover the same character: the label ends with the second and is scored by the space."""
    batch = tokenize(model_of("metaspace"), prompt_of(("love", "é"), ("語", "foo")), prepend_bos=False)
    assert strings("metaspace", batch.tokens[0]) == [
        "_love", "_:", "_", "<0xC3>", "<0xA9>", "_", "<0xE8>", "<0xAA>", "<0x9E>", "_:", "_foo", "_one", "_:"
    ]  # fmt: skip
    assert batch.label_positions.tolist() == [[4, 10]]
    assert strings("metaspace", batch.label_tokens) == ["_", "_foo"]
    assert batch.text_ranges.tolist() == [[[0, 1], [6, 9]]]
    with pytest.raises(InputError, match="'é' and 'è' share their first token"):
        tokenize(model_of("metaspace"), prompt_of(("love", "é"), ("one", "è")))
    batch = tokenize(model_of("metaspace"), prompt_of(("a", "é"), ("two", "è")), shared_prefix="append")
    assert strings("metaspace", batch.tokens[0, -2:]) == ["_", "<0xC3>"]
    assert strings("metaspace", batch.label_tokens) == ["<0xA9>", "<0xA8>"]


# Texts that look like labels


@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_hold_the_label_words_and_colons(kind):
    prompt = prompt_of(("foo", "bar"), ("bar : foo", "foo"), (": :", "bar"), ("the foo", "foo"), query="bar foo : foo")
    batch = tokenize(model_of(kind), prompt, prepend_bos=False)
    #          0   1 2   3   4 5   6 7   8 9 10 11  12  13  14 15  16  17  18 19  20
    words = "foo : bar bar : foo : foo : : : bar the foo : foo bar foo : foo :".split()
    assert [string.lstrip("_") for string in strings(kind, batch.tokens[0])] == words
    assert batch.label_positions.tolist() == [[2, 7, 11, 15]]
    assert batch.text_ranges.tolist() == [[[0, 1], [3, 6], [8, 10], [12, 14]]]
    assert batch.query_range.tolist() == [[16, 20]]
    assert batch.last.tolist() == [20]


def test_a_template_with_everything():
    template = Template("Q {text}\nA ({label})", "Q {text}\nA (", separator="\n\n", prefix="the foo .\n")
    batch = tokenize(model_of("byte"), prompt_of(("love", "foo"), ("two", "bar")), template=template)
    #  0   1    2  3  4  5    6  7  8  9  10  11 12 13 14  15   16 17 18 19  20  ...
    assert strings("byte", batch.tokens[0]) == [
        "the", "_foo", "_.", "Ċ", "Q", "_love", "Ċ", "A", "_(", "foo", ")", "Ċ", "Ċ",
        "Q", "_two", "Ċ", "A", "_(", "bar", ")", "Ċ", "Ċ", "Q", "_one", "Ċ", "A", "_(",
    ]  # fmt: skip
    assert batch.label_positions.tolist() == [[9, 18]]
    assert batch.text_ranges.tolist() == [[[5, 6], [14, 15]]]
    assert batch.query_range.tolist() == [[23, 24]]
    assert strings("byte", batch.label_tokens) == ["foo", "bar"]


# Several prompts, several classes


def ragged() -> list[Prompt]:
    return [
        PAPER,
        prompt_of(("love", "sad"), query="the happy a", labels=("happy", "sad", "foo")),
        prompt_of(("a the two", "foo"), ("nine", "bar"), answer="bar"),
    ]


def test_four_classes_and_ragged_rows():
    batch = tokenize(model_of("word"), ragged())
    assert batch.labels == ("bar", "foo", "happy", "sad")
    assert batch.label_mask.tolist() == [
        [True, True, False, False],
        [False, True, True, True],  # two of them never demonstrated there
        [True, True, False, False],
    ]
    assert batch.tokens.shape == (3, 14)
    assert batch.attention_mask.sum(-1).tolist() == [14, 7, 10]
    assert batch.last.tolist() == [13, 6, 9]
    assert batch.label_positions.tolist() == [[2, 5, 8, 11], [2, -1, -1, -1], [4, 7, -1, -1]]
    assert batch.label_index.tolist() == [[0, 0, 1, 1], [3, -1, -1, -1], [1, 0, -1, -1]]
    assert batch.text_ranges[2].tolist() == [[0, 3], [5, 6], [-1, -1], [-1, -1]]
    assert batch.query_range.tolist() == [[12, 13], [3, 6], [8, 9]]
    assert batch.answer.tolist() == [1, -1, 0]
    ids = [WORDS.index(word) + 1 for word in batch.labels]
    assert batch.label_tokens.tolist() == ids
    assert batch.answer_tokens.tolist() == [ids[1], -1, ids[0]]
    assert [len(row) for row in batch.token_strings] == [14, 7, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbors(kind):
    prompts = ragged()
    batch = tokenize(model_of(kind), prompts)
    for row, prompt in enumerate(prompts):
        alone = tokenize(model_of(kind), prompt, labels=batch.labels)
        width, demos = alone.tokens.shape[1], len(prompt.demonstrations)
        assert torch.equal(batch.tokens[row, :width], alone.tokens[0])
        assert batch.attention_mask[row].tolist() == [1] * width + [0] * (batch.tokens.shape[1] - width)
        assert torch.equal(batch.last[row], alone.last[0])
        for name in ("label_positions", "label_index", "text_ranges"):
            assert torch.equal(getattr(batch, name)[row, :demos], getattr(alone, name)[0]), name
        for name in ("label_mask", "answer", "query_range", "answer_tokens"):
            assert torch.equal(getattr(batch, name)[row], getattr(alone, name)[0]), name
        assert torch.equal(batch.label_tokens, alone.label_tokens)


def test_the_order_of_labels_is_the_callers():
    batch = tokenize(model_of("word"), PAPER, labels=["sad", "foo", "bar"])
    assert batch.labels == ("sad", "foo", "bar")
    assert batch.label_index.tolist() == [[2, 2, 1, 1]]
    assert batch.answer.tolist() == [1]
    assert batch.label_mask.tolist() == [[False, True, True]]
    assert batch.label_tokens.tolist() == [WORDS.index(word) + 1 for word in ("sad", "foo", "bar")]
    with pytest.raises(InputError, match="add 'foo'"):
        tokenize(model_of("word"), PAPER, labels=["bar"])
    with pytest.raises(InputError, match="duplicates"):
        tokenize(model_of("word"), PAPER, labels=["bar", "foo", "bar"])


# Batches


def assert_same(one: PromptBatch, two: PromptBatch) -> None:
    for name in PromptBatch.__dataclass_fields__:
        left, right = getattr(one, name), getattr(two, name)
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, name


def test_slices():
    batch = tokenize(model_of("word"), ragged())
    assert len(batch) == 3
    assert_same(batch[:], batch)
    tail = batch[1:]
    assert tail.tokens.shape == (2, 10)  # padding no row needs is gone
    assert tail.attention_mask.shape == (2, 10)
    assert torch.equal(tail.tokens, batch.tokens[1:, :10])
    assert tail.labels == batch.labels
    assert torch.equal(tail.label_tokens, batch.label_tokens)
    assert tail.label_positions.tolist() == [[2, -1, -1, -1], [4, 7, -1, -1]]  # results of pieces can be joined
    assert tail.prompts == batch.prompts[1:]
    assert tail.token_strings == batch.token_strings[1:]
    assert tail.answer_tokens.tolist() == batch.answer_tokens[1:].tolist()
    assert_same(batch[1:], batch[[1, 2]])
    assert_same(batch[1:], batch[torch.tensor([1, 2])])
    assert_same(batch[1:], batch[torch.tensor([False, True, True])])
    assert_same(batch[1:], batch[[-2, -1]])
    assert_same(batch[-1], batch[2:])
    assert batch[[2, 0]].prompts == (batch.prompts[2], batch.prompts[0])
    assert [len(row) for row in batch] == [1, 1, 1]
    with pytest.raises(IndexError):
        batch[3]
    with pytest.raises(IndexError):
        batch[torch.tensor([True, False])]
    for nothing in ([], slice(3, None), torch.zeros(3, dtype=torch.bool)):
        with pytest.raises(InputError, match="must select at least one"):
            batch[nothing]


def test_split():
    batch = tokenize(model_of("word"), ragged())
    pieces = list(batch.split(2))
    assert [len(piece) for piece in pieces] == [2, 1]
    assert_same(pieces[0], batch[:2])
    assert_same(pieces[1], batch[2:])
    with pytest.raises(InputError, match="at least 1"):
        batch.split(0)


def test_devices():
    batch = tokenize(model_of("word"), ragged()).to("meta")
    assert {getattr(batch, name).device.type for name in ("tokens", "label_tokens", "text_ranges")} == {"meta"}
    model = model_of("word")
    model.cfg.device = "meta"
    there = tokenize(model, ragged())
    assert all(value.device.type == "meta" for value in vars(there).values() if isinstance(value, torch.Tensor))


# What is refused


def test_nothing_to_tokenize():
    with pytest.raises(InputError, match="at least one prompt"):
        tokenize(model_of("word"), [])


def test_a_prompt_longer_than_the_context():
    tokenize(model_of("word", n_ctx=14), PAPER)
    with pytest.raises(InputError, match="prompt 1 has 14 tokens, more than the model's context length of 13"):
        tokenize(model_of("word", n_ctx=13), [ragged()[1], PAPER])
    with pytest.raises(InputError, match="15 tokens"):
        tokenize(model_of("metaspace", n_ctx=14), PAPER)  # the beginning-of-sequence token counts


def test_unknown_words_are_named():
    prompt = prompt_of(("love", "foo"), ("zebra", "bar"), ("love yak", "bar"))
    with pytest.raises(InputError, match="got 'zebra', 'yak';"):
        tokenize(model_of("word"), prompt)
    with pytest.raises(InputError, match="got 'quux'"):
        tokenize(model_of("word"), prompt_of(("love", "foo"), labels=("foo", "quux")))
    with pytest.raises(InputError, match="'w9' and 2 more"):
        tokenize(model_of("word"), prompt_of(*[(f"w{i}", "foo") for i in range(12)]))


def test_an_unknown_letter_is_named_with_its_word():
    """Byte-pair encoding without bytes leaves single characters unknown; the user typed a word."""
    raw = Tokenizer(models.BPE({"<unk>": 0, ":": 1, "a": 2, "b": 3}, [], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    model = SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(n_ctx=99))
    with pytest.raises(InputError, match="got 'ab7a', 'bé';"):
        tokenize(model, prompt_of(("ab7a", "a"), ("b bé", "b"), query="a"))
    with pytest.raises(InputError, match="got '7';"):
        tokenize(model, prompt_of(("a" * 40 + "7", "a"), query="a"))


def test_no_word_is_unknown_to_bytes():
    """GPT-2's tokenizer has one token for the end and for unknown words; it stands in front here and nowhere else."""
    assert tokenizer_of("byte").unk_token_id == tokenizer_of("byte").bos_token_id
    batch = tokenize(model_of("byte"), prompt_of(("zebra", "foo"), ("yak", "bar")), prepend_bos=True)
    assert batch.tokens[0, 0] == tokenizer_of("byte").unk_token_id
    with pytest.raises(InputError, match=re.escape("got '<|endoftext|>'")):
        tokenize(model_of("byte"), prompt_of(("zebra", "foo"), ("a <|endoftext|>", "bar")))


def test_special_tokens_that_are_no_words_of_the_vocabulary():
    """TransformerLens names a beginning and an end for tokenizers without; their id is then that of unknown words."""
    named = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer_of("word")._tokenizer.to_str()), unk_token="<unk>"
    )
    named.bos_token = named.eos_token = "<|endoftext|>"
    assert named.bos_token_id == named.unk_token_id
    model = SimpleNamespace(tokenizer=named, cfg=SimpleNamespace(n_ctx=99))
    with pytest.raises(InputError, match="got 'zebra'"):
        tokenize(model, prompt_of(("love", "foo"), ("zebra", "bar")))
    with pytest.raises(InputError, match="no beginning-of-sequence token"):
        tokenize(model, PAPER, prepend_bos=True)
    assert tokenize(model, PAPER).last.tolist() == [13]


def test_slow_tokenizers_and_none():
    for tokenizer, message in (
        (SimpleNamespace(is_fast=False), "must be a fast tokenizer"),
        (None, "must have a tokenizer"),
    ):
        with pytest.raises(InputError, match=message):
            tokenize(SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(n_ctx=9)), PAPER)


def test_a_token_the_model_has_no_row_for():
    model = model_of("metaspace")
    model.cfg.d_vocab = 100
    with pytest.raises(InputError, match="outside the model's vocabulary of 100"):
        tokenize(model, PAPER)


def test_a_label_that_shares_a_token_with_its_neighbor():
    template = Template("{text} -{label}", "{text} -")  # "->" is one token
    with pytest.raises(InputError, match=re.escape("the label '>' shares a token with the adjacent '-'")):
        tokenize(model_of("byte"), prompt_of(("love", ">"), ("two", "foo")), template=template)
    template = Template("{text} : {label}>", "{text} :")
    with pytest.raises(InputError, match=re.escape("the label '-' shares a token with the adjacent '>'")):
        tokenize(model_of("byte"), prompt_of(("love", "-"), ("two", "foo")), template=template)


def test_a_label_that_is_not_the_same_everywhere():
    """The first text brings a space of its own to a template without one."""
    template = Template("{text}{label}", "{text}")
    with pytest.raises(InputError) as error:
        tokenize(model_of("byte"), prompt_of(("nine ", "foo"), ("two)", "bar"), query="(one)"), template=template)
    assert "the label 'foo' is 'foo' after the query of prompt 0 but ' foo' in a demonstration" in str(error.value)


def test_a_query_whose_last_token_changes_when_the_label_follows():
    template = Template("{text}{label}", "{text}")
    with pytest.raises(InputError, match="tokenized differently when the label 'foo' follows"):
        tokenize(model_of("byte"), prompt_of(("two)", "foo"), ("(a)", "bar"), query="one "), template=template)


def test_labels_and_texts_without_tokens():
    model = model_of("word")
    raw = Tokenizer.from_str(model.tokenizer._tokenizer.to_str())
    for word in ("foo", "like"):
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(word, "removed")]
        )
        model.tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
        with pytest.raises(InputError, match=f"no token for '{word}'"):
            tokenize(model, PAPER)


# Anything a user may write: byte-level tokens decode to exactly the text, so positions can be checked by decoding


anything = st.text(min_size=1, max_size=12).filter(lambda text: text.strip())


@pytest.mark.parametrize("kind", ["byte", "byte-trimmed"])
@settings(max_examples=40, deadline=None)
@example([(" 0", "foo"), ("0 ", "bar")], " 0 ")
@given(st.lists(st.tuples(anything, st.sampled_from(["foo", "bar", "qux"])), min_size=1, max_size=4), anything)
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
        position = int(batch.label_positions[0, demo])
        assert decoded(position + 1).decode() == rendered.text[:end]
        assert len(decoded(position)) > len(rendered.text[:start].encode()) - 2
    ranges = [*batch.text_ranges[0].tolist(), batch.query_range[0].tolist()]
    for (first, stop), (start, end) in zip(ranges, [*rendered.text_spans, rendered.query_span], strict=True):
        # Every token of the range holds some of the text, and they hold all of it but white space at its ends,
        # which trimmed offsets count to no token.
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


def byte_table() -> dict[str, int]:
    """The characters byte-level BPE writes bytes with: printable ones stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


to_byte = byte_table()


def test_strings_are_parsed(gpt2):
    text = "love : bar like : bar eight : foo two : foo one :"
    assert tokenize(gpt2, text).prompts == tokenize(gpt2, [text]).prompts == (Prompt.parse(text),)
