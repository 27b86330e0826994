"""The tokenizer that a user passes is the one that is used, whatever was changed in memory, in
every kind of family.
"""

import copy
import re
import warnings
from functools import cache
from types import SimpleNamespace

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import icl_lens as il

CORPUS = ["love : bar eight 12 : foo one"] * 3
PROMPT = il.Prompt(
    [il.Demonstration("love", "bar"), il.Demonstration("eight 12", "foo")], "one", "foo"
)
TEMPLATE = il.Template("{text} <sep> {label}", "{text} <sep>", " ")
TEXT = "love <sep> bar eight 12 <sep> foo one <sep>"
QWEN_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Without the part for contractions."""


def byte_level(before=(), use_regex=True, post_processor=True):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(False, use_regex=use_regex)]
    )
    if post_processor:
        raw.post_processor = processors.ByteLevel(trim_offsets=False)
    raw.decoder = decoders.ByteLevel()
    return raw


def pieces(*normalizer):
    raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([*normalizer, normalizers.Replace(" ", "▁")])
    raw.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return raw


@cache
def build(kind):
    """A small tokenizer built as those of a family: special tokens, normalizer, pre-tokenizer, and
    what it adds.
    """
    end, adds = "<|endoftext|>", ""
    names = {"bos_token": end, "eos_token": end, "unk_token": end}
    if kind in ("gpt2", "gptj"):
        raw = byte_level()
    elif kind == "pythia":
        raw = byte_level()
        raw.normalizer = normalizers.NFC()
    elif kind == "qwen":
        raw = byte_level([pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")], use_regex=False)
        raw.normalizer = normalizers.NFC()
        names = {"eos_token": "<|im_end|>", "pad_token": end}
    elif kind == "smollm2":
        raw = byte_level([pre_tokenizers.Digits(individual_digits=True)], post_processor=False)
        names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": end}
    else:
        raw = pieces(normalizers.Prepend("▁")) if kind == "llama2" else pieces()
        adds = "<s>" if kind == "llama2" else "<bos>"
        names = {"bos_token": adds, "eos_token": "</s>", "unk_token": "<unk>"}
    special = list(dict.fromkeys(names.values()))
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=[chr(33 + i) for i in range(90)] + ["Ġ", "Ċ"],
        ),
    )
    if adds:
        raw.post_processor = processors.TemplateProcessing(
            single=f"{adds} $A", special_tokens=[(adds, raw.token_to_id(adds))]
        )
    if kind == "gptj":  # its vocabulary is filled up with tokens that no text has
        raw.add_tokens([f"<|extratoken_{i}|>" for i in range(1, 4)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, **names)


KINDS = ("gpt2", "gptj", "pythia", "llama2", "qwen", "gemma", "smollm2")
ADD_BOS = ("llama2", "gemma")


def change_every_part(tokenizer):
    """Another token, normalizer, pre-tokenizer and post-processor: two ends of the text are put in
    front of it.
    """
    backend, end = tokenizer.backend_tokenizer, tokenizer.eos_token
    parts = [
        normalizers.Replace("love", "one"),
        *([backend.normalizer] if backend.normalizer else []),
    ]
    backend.normalizer = normalizers.Sequence(parts)
    parts = [
        pre_tokenizers.Split("o", "isolated"),
        *([backend.pre_tokenizer] if backend.pre_tokenizer else []),
    ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{end} {end} $A", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tokenizer.add_tokens(["<sep>"])
    return tokenizer


def train_anew(tokenizer):
    """Other ids for the same names, as `train_new_from_iterator` gives them; the origin's name
    remains.
    """
    trained = tokenizer.train_new_from_iterator(
        ["one one love bar bar : 12 eight foo <sep>"] * 3, 330
    )
    assert trained.name_or_path == tokenizer.name_or_path
    assert trained.get_vocab() != tokenizer.get_vocab()
    return trained


@cache
def hf_model():
    config = LlamaConfig(
        vocab_size=600,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def load(tokenizer):
    return il.load_model("mine", hf_model=hf_model(), tokenizer=tokenizer, device="cpu")


def state(tokenizer):
    plain = {
        name: value for name, value in vars(tokenizer).items() if not name.startswith("_tokenizer")
    }
    return (
        repr(plain),
        tokenizer.backend_tokenizer.to_str(),
        len(tokenizer),
        repr(tokenizer.special_tokens_map),
    )


@pytest.fixture(scope="module", params=KINDS)
def published(request, tmp_path_factory):
    """A family's tokenizer as it is read from a folder, where TransformerLens would read it
    again.
    """
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(folder)
    return SimpleNamespace(kind=request.param, folder=folder)


def test_what_was_changed_in_memory_is_used(published):
    as_published = AutoTokenizer.from_pretrained(published.folder)
    before = as_published(TEXT)["input_ids"]
    assert (before[0] == as_published.bos_token_id) == (published.kind in ADD_BOS)
    assert il.tokenize(load(as_published), [PROMPT], template=TEMPLATE).tokens[0].tolist() == before
    for change in (change_every_part, train_anew):
        tokenizer = change(AutoTokenizer.from_pretrained(published.folder))
        expected = tokenizer(TEXT)["input_ids"]
        assert expected != before, change.__name__
        untouched = state(tokenizer)
        batch = il.tokenize(load(tokenizer), [PROMPT], template=TEMPLATE)
        assert batch.tokens[0].tolist() == expected, change.__name__
        assert state(tokenizer) == untouched, change.__name__
        labels = [
            tokenizer.decode(batch.tokens[0, start:end]).strip()
            for start, end in batch.label_ranges[0].tolist()
        ]
        assert labels == ["bar", "foo"], change.__name__


def test_the_same_beginning_of_sequence_by_name_and_given(published, tmp_path):
    """Given, by the model's folder, and forced: `prepend_bos` does what it did with the tokenizer
    in the folder.
    """
    hf_model().save_pretrained(tmp_path)
    build(published.kind).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    own_ids = tokenizer(TEXT)["input_ids"]
    bare = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    first = tokenizer.eos_token_id if published.kind == "qwen" else tokenizer.bos_token_id
    for model in (load(tokenizer), il.load_model(tmp_path, device="cpu")):
        for prepend_bos, expected in ((None, own_ids), (True, [first, *bare]), (False, bare)):
            batch = il.tokenize(model, [PROMPT], template=TEMPLATE, prepend_bos=prepend_bos)
            assert batch.tokens[0].tolist() == expected, prepend_bos
        if published.kind != "qwen":  # TransformerLens itself puts the token in front
            assert model.to_tokens("love")[0, 0] == first


def test_a_tokenizer_asked_to_add_its_token_adds_it(tmp_path):
    build("gpt2").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, add_bos_token=True)
    batch = il.tokenize(load(tokenizer), [PROMPT], template=TEMPLATE)
    assert batch.tokens[0].tolist() == tokenizer(TEXT)["input_ids"]
    assert batch.tokens[0, 0] == tokenizer.bos_token_id


def test_tokenizers_without_a_folder_and_with_parts_in_python():
    """One that was never saved, and one whose pre-tokenizer is a Python object, which no copy can
    hold.
    """
    tokenizer = copy.deepcopy(build("gpt2"))
    assert not tokenizer.name_or_path

    class LetterI:
        def pre_tokenize(self, text):
            text.split(lambda _, part: part.split("i", "isolated"))

    python = copy.deepcopy(tokenizer)
    python.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [python.backend_tokenizer.pre_tokenizer, pre_tokenizers.PreTokenizer.custom(LetterI())]
    )
    ids = [user_tokenizer(TEXT)["input_ids"] for user_tokenizer in (tokenizer, python)]
    assert ids[0] != ids[1]
    for passed, expected in zip((tokenizer, python), ids, strict=True):
        names = repr(passed.special_tokens_map)
        assert il.tokenize(load(passed), [PROMPT], template=TEMPLATE).tokens[0].tolist() == expected
        assert repr(passed.special_tokens_map) == names


def test_tokens_added_to_a_bridges_tokenizer_keep_the_published_beginning(tmp_path):
    """TransformerLens' own loader has add_bos_token=True: the published tokenizer says what is
    prepended, no more.
    """
    build("gpt2").save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, add_bos_token=True)
    tokenizer.add_tokens(["<sep>"])
    model = SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(n_ctx=100))
    tokens = il.tokenize(model, [PROMPT], template=TEMPLATE).tokens[0].tolist()
    assert tokens == tokenizer(TEXT, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "default", "sentence"),
    [
        (
            "gpt2",
            True,
            r"a prompt begins without '<\|endoftext\|>', .* pass prepend_bos=True for those",
        ),
        ("gpt2", False, None),
        ("llama2", True, None),
        (
            "llama2",
            False,
            r"a prompt begins with '<s>', .* pass prepend_bos=False for those .* prepend_bos=True\)",
        ),
    ],
)
def test_a_bridge_that_begins_its_texts_otherwise_is_warned_of_once(
    tmp_path, kind, default, sentence
):
    hf_model().save_pretrained(tmp_path)
    build(kind).save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    bridge.cfg.default_prepend_bos = default
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        il.tokenize(load(build(kind)), [PROMPT])  # not made by the user
        batches = [il.tokenize(bridge, "love : bar one :") for _ in range(2)]
    said = [str(warning.message) for warning in caught if "prepend_bos" in str(warning.message)]
    assert len(said) == (sentence is not None)
    own_ids = bridge.to_tokens("love : bar one :").tolist()
    assert (batches[0].tokens.tolist() == own_ids) == (sentence is None)
    for message in said:
        assert re.search(sentence, message)
        remedy = "prepend_bos=True for" in message
        assert (
            il.tokenize(bridge, "love : bar one :", prepend_bos=remedy).tokens.tolist() == own_ids
        )


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            "gpt2",
            r"tokenizer must be a tokenizer of transformers, got str; pass AutoTokenizer.from_pretrained",
        ),
        (
            Tokenizer(models.BPE()),
            r"got Tokenizer; pass .*PreTrainedTokenizerFast\(tokenizer_object=tokenizer\)",
        ),
        (
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"love": 0}))),
            r"tokenizer must encode every text, got the error '.*' for the text 'a'; give it an unknown token",
        ),
    ],
)
def test_what_is_no_tokenizer_is_said(tokenizer, message):
    with pytest.raises(il.InputError, match=message):
        load(tokenizer)
