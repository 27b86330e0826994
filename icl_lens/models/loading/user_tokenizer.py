"""Give TransformerLens a tokenizer unchanged.

A tokenizer that has a beginning-of-sequence token and does not add it (GPT-2, GPT-J, Pythia, Qwen,
SmolLM2) is read again by TransformerLens from its `name_or_path`, with `add_bos_token=True`. What
was changed in memory is then lost: added tokens, a new vocabulary, another normalizer,
pre-tokenizer or post-processor.

1. `copy_tokenizer` copies the user's tokenizer, since TransformerLens sets missing special tokens.
2. `not_read_again` marks the copy, while the bridge is made, as one that adds its token;
   TransformerLens then uses it.
3. `not_read_again` also tells `il.tokenize` that this tokenizer itself, not its folder, says what
   is prepended.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from icl_lens.errors import InputError, first_line
from icl_lens.prompts.token_alignment import trust_special_tokens


def copy_tokenizer(tokenizer: Any) -> Any:
    """Return a copy of a tokenizer of transformers; raise InputError for anything else."""
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError(
            f"tokenizer must be a tokenizer of transformers, got {type(tokenizer).__name__}; pass "
            "AutoTokenizer.from_pretrained(name), or "
            "PreTrainedTokenizerFast(tokenizer_object=tokenizer)"
        )
    try:
        tokenizer.encode("a")
    except Exception as error:  # the tokenizers package raises plain exceptions
        raise InputError(
            f"tokenizer must encode every text, got the error {first_line(error)!r} for the text "
            "'a'; give it an unknown token (unk_token=)"
        ) from error
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # its backend has a part written in Python, which cannot be copied
        shared = copy.copy(tokenizer)
        for name, value in vars(tokenizer).items():
            if name != "_tokenizer":
                vars(shared)[name] = copy.deepcopy(value)
        return shared


@contextmanager
def not_read_again(tokenizer: Any) -> Iterator[None]:
    """Keep TransformerLens from reading a tokenizer again from its folder inside the `with`
    block.
    """
    if tokenizer is None:
        yield
        return
    settings = tokenizer.init_kwargs
    # TransformerLens reads both settings; tokenizers built in memory have no name.
    tokenizer.init_kwargs = {"name_or_path": "", **settings, "add_bos_token": True}
    try:
        yield
    finally:
        tokenizer.init_kwargs = settings
    trust_special_tokens(tokenizer)
