"""Small tokenizers of the kinds that models have, in which every given word is one token."""

from functools import cache
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = "love like happy sad eight two one nine three foo bar the a : . ( ) -> Q A"
KINDS = ["word", "byte", "byte-trimmed", "byte-prefixed", "byte-prefixed-trimmed", "metaspace"]
END = "<|endoftext|>"


@cache
def tokenizer_of(kind: str, words: str = WORDS) -> PreTrainedTokenizerFast:
    """A tokenizer of one of `KINDS`; `words` are tokens at a text's start and elsewhere."""
    # A word follows itself only, so that no merge spans two different words.
    corpus = [form for word in words.split() for form in [word, f"{word} {word}"] * 10]
    if kind == "word":
        raw = Tokenizer(
            models.WordLevel({word: i for i, word in enumerate(["<unk>", *words.split()])}, "<unk>")
        )
        raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    if kind.startswith("byte"):  # as GPT-2's
        raw = Tokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space="prefixed" in kind)
        raw.post_processor = processors.ByteLevel(trim_offsets="trimmed" in kind)
        raw.decoder = decoders.ByteLevel()
        special, alphabet = [END], sorted(pre_tokenizers.ByteLevel.alphabet())
        names = {"bos_token": END, "eos_token": END, "unk_token": END}
    else:
        # As Llama's: "▁" for white space, one in front, unknown characters as bytes, <s> in front;
        # and </s> at the end, which no prompt may keep.
        raw = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        raw.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special, alphabet = (
            ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
            [],
        )
        names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(corpus, trainer)
    if kind == "metaspace":
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=raw, **names)


def model_of(
    tokenizer: str | PreTrainedTokenizerFast | None, n_ctx: int = 1024, **cfg: int | str
) -> SimpleNamespace:
    """Return what `tokenize` needs of a model: a tokenizer (given, or one of `KINDS`) and a
    configuration.
    """
    tokenizer = tokenizer_of(tokenizer) if isinstance(tokenizer, str) else tokenizer
    return SimpleNamespace(tokenizer=tokenizer, cfg=SimpleNamespace(n_ctx=n_ctx, **cfg))
