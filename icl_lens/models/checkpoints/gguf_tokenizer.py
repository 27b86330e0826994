"""Rebuild the tokenizer of a GGUF file, with what transformers' GGUF loader leaves out.

1. transformers builds it from the file's tokens and merges, with the classes of its architectures.
2. `tokenizer.ggml.pre` names how a byte-level tokenizer splits text before it merges. transformers
   knows some names and splits like GPT-2 under all others. The names of llama.cpp that mean GPT-2's
   split, or single digits and then GPT-2's split, are added here. A tokenizer of another name is
   not rebuilt. Files from before the setting are read by their architecture.
3. `tokenizer.ggml.add_space_prefix` says whether a space is put before the text.
4. The result is stored unchanged: the tokenizer classes of transformers' architectures would
   replace parts of it.

Source: llama.cpp, `llama_vocab` (names of pre-tokenizers, and the regular expressions they stand
for).
"""

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

_LIKE_GPT2 = frozenset(
    "a.x-4.0 gigachat gpt-2 granite-docling jais jina-de jina-es jina-v2-de jina-v2-es mellum "
    "modern-bert mpt olmo phi-2 trillion".split()
)
_SINGLE_DIGITS = frozenset("codeshell command-r exaone minerva-7b refact smollm starcoder".split())
_UNNAMED = (None, "", "default")
_OF_ARCHITECTURE = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2", "starcoder2": "starcoder"}
"""The split of the architecture's own models, for files that name none."""
_NO_SPACE = ("gemma2", "gemma3")
"""Architectures in whose SentencePiece tokenizers transformers puts no space before the text."""
_NORMALIZES_UNICODE = ("qwen2", "qwen3")
"""Architectures whose published tokenizers compose characters (NFC), which no setting of a file
says.
"""


def split_is_known(model: str | None, pre: str | None) -> bool:
    """Return whether text can be split as the file's settings tokenizer.ggml.model and
    tokenizer.ggml.pre say.
    """
    if model != "gpt2" or pre in _UNNAMED:  # other tokenizers do not split text, or not by name
        return True
    return pre in _LIKE_GPT2 or pre in _SINGLE_DIGITS or pre in _splits_of_transformers()


def save_tokenizer(
    tokenizer: Any, folder: Path, *, file: str, architecture: str, settings: dict[str, Any]
) -> None:
    """Write a file's tokenizer, as transformers rebuilt it, to `folder`, with its split and its
    space before the text.

    `settings` are the file's settings whose names begin with "tokenizer.ggml.", without these
    beginnings.
    """
    from tokenizers import normalizers
    from transformers import PreTrainedTokenizerFast

    backend = tokenizer.backend_tokenizer
    add_space = settings.get("add_space_prefix")
    if settings.get("model") == "gpt2":
        _set_split(backend, file, architecture, settings.get("pre"))
        before = [normalizers.Prepend(" ")] if add_space else []
        composed = [normalizers.NFC()] if architecture in _NORMALIZES_UNICODE else []
        if before or composed:
            backend.normalizer = normalizers.Sequence([*before, *composed])
    elif add_space is not None and add_space != (architecture not in _NO_SPACE):
        _set_space_before_pieces(backend, add_space)
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=tokenizer.chat_template,
        model_input_names=["input_ids", "attention_mask"],
        **tokenizer.special_tokens_map,
    ).save_pretrained(folder)


def _set_split(backend: Any, file: str, architecture: str, pre: str | None) -> None:
    """Split text as `pre` says: single digits and then GPT-2's way here, the others as transformers
    does.
    """
    from tokenizers import Regex, pre_tokenizers

    if pre in _UNNAMED:
        pre = _OF_ARCHITECTURE.get(architecture)
        if pre is None:
            logging.getLogger("icl_lens").warning(
                "%s does not say how its tokenizer splits text (tokenizer.ggml.pre), so it is "
                "split like GPT-2's; if the original tokenizer differs, pass it to "
                "il.load_model(..., tokenizer=)",
                file,
            )
            pre = "gpt-2"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _LIKE_GPT2:
        backend.pre_tokenizer = byte_level
    elif pre in _SINGLE_DIGITS:
        digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        split = pre_tokenizers.Split(Regex(_splits_of_transformers()[pre]), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])


def _set_space_before_pieces(backend: Any, add_space: bool) -> None:
    """Put a space before the text, or none, in a tokenizer of SentencePiece, which writes spaces as
    "▁".
    """
    from tokenizers import decoders, normalizers

    marks_spaces = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = None
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), marks_spaces])
        if add_space
        else marks_spaces
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if add_space else parts)


def _splits_of_transformers() -> dict[str, str]:
    """Return the regular expressions of the names that transformers knows; none before it named
    them.
    """
    try:
        module = import_module("transformers.integrations.gguf.gguf_tokenizer_mapping")
    except ImportError:
        return {}
    return dict(module.GGUF_PRE_TOKENIZER_SPLITS)
