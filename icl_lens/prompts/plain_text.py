"""Plain text as a value: no demonstrations, and any token as the answer.

1. The model's own tokenizer tokenizes the text.
2. An answer or comparison token given as a string is tokenized in context, after the text: the ids
   must begin with those of the text, and the next id is scored.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from icl_lens.errors import InputError
from icl_lens.prompts.batch import PromptBatch, check_against_differs, text_batch
from icl_lens.prompts.prompt import Rendered, check_unicode
from icl_lens.prompts.token_alignment import (
    TokenizedText,
    require_fast_tokenizer,
    special_prefixes,
    tokenize_texts,
    unknown_words,
)
from icl_lens.prompts.token_ids import (
    check_context_length,
    check_ids,
    check_text_length,
    name_tokens,
    padded_ids,
)

TokenSpec = str | int
"""A token given as text in context (" Mary" with its space) or as an id."""


@dataclass(frozen=True, init=False)
class Text:
    """Plain text, without demonstrations, that the model continues.

    `answer` is the token to score: a string, including the white space that separates it from the
    text (" Mary"), or a token id. `against` has one or several tokens to compare it with. A string
    of several tokens is scored by its first, with a warning.

    Raise InputError for an empty text, and for an answer or comparison that is empty or of another
    type.

    Example:
        >>> story = "When Mary and John went to the store, John gave it to"
        >>> text = il.Text(story, answer=" Mary", against=" John")
        >>> text.against
        (' John',)
    """

    text: str
    answer: TokenSpec | None
    against: tuple[TokenSpec, ...] | None

    def __init__(
        self,
        text: str,
        answer: TokenSpec | None = None,
        against: TokenSpec | Sequence[TokenSpec] | None = None,
    ) -> None:
        check_unicode(text)
        if not text.strip():
            raise InputError(f"text must not be empty, got {text!r}")
        others = (
            None
            if against is None
            else (against,)
            if isinstance(against, (str, int))
            else tuple(against)
        )
        if others == ():
            raise InputError("against must have at least one token, got none; omit it")
        for name, token in [("answer", answer), *(("against", other) for other in others or ())]:
            if token is not None and not isinstance(token, (str, int)):
                raise InputError(f"{name} must be a string or a token id, got {token!r}")
            if token == "":
                raise InputError(
                    f"{name} must not be empty, got ''; pass a token that may follow {text[-30:]!r}"
                )
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "answer", answer)
        object.__setattr__(self, "against", others)


def tokenize_plain(
    model: Any, texts: Sequence[Text], *, prepend_bos: bool | None = None
) -> PromptBatch:
    """Tokenize texts, on the model's device; see `tokenize`.

    Raise InputError for texts longer than the context, words or ids that the model does not have,
    an answer that does not begin where the text ends or equals a comparison, texts of which only
    some have comparisons, and a slow tokenizer.
    """
    if len({text.against is None for text in texts}) > 1:
        raise InputError(
            "either all texts or none must have tokens to compare with, got some; set against in "
            "all"
        )
    tokenizer = require_fast_tokenizer(model)
    check_text_length(model, tokenizer, [one.text for one in texts])
    tokenized = tokenize_texts(
        tokenizer, [Rendered(one.text, (), (), (0, len(one.text))) for one in texts]
    )
    prefixes = special_prefixes(tokenizer, tokenized, prepend_bos)
    rows = [[*prefix, *text.ids] for prefix, text in zip(prefixes, tokenized, strict=True)]
    check_context_length(model, rows)
    long: dict[str, list[int]] = {}  # strings of several tokens

    def find_token(token: TokenSpec, text: TokenizedText, what: str) -> int:
        """Return the id that scores `token` after a text."""
        if isinstance(token, int):
            check_ids(model, [token])
            return token
        ids = _ids_after(tokenizer, text, token, what)
        if len(ids) > 1:
            long.setdefault(token, ids)
        return ids[0]

    pairs = list(zip(texts, tokenized, strict=True))
    targets = [
        -1 if one.answer is None else find_token(one.answer, text, "answer") for one, text in pairs
    ]
    batch = replace(
        text_batch(tokenizer, rows, [one.text for one in texts]), targets=torch.tensor(targets)
    )
    if texts[0].against is not None:
        others = [
            [find_token(other, text, "comparison") for other in one.against or ()]
            for one, text in pairs
        ]
        batch = replace(batch, against=padded_ids(others))
    for string, ids in long.items():
        names = name_tokens(tokenizer, [ids])[0]
        bare = " (white space only)" if not tokenizer.decode(ids[:1]).strip() else ""
        warnings.warn(
            f"{string!r} has {len(ids)} tokens, {' + '.join(map(repr, names))}; it is scored by "
            f"the first, {names[0]!r}{bare}",
            stacklevel=3,
        )
    check_against_differs(batch)
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def _ids_after(tokenizer: Any, text: TokenizedText, string: str, what: str) -> list[int]:
    """Return the tokens of a string after a text.

    Raise InputError if the string does not begin where the text ends or is unknown.
    """
    before, n_before = text.rendered.text, len(text.ids)
    encoded = tokenizer(
        before + string, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    found = encoded["input_ids"]
    if found[:n_before] != text.ids[:n_before] or len(found) == n_before:
        raise InputError(
            f"the {what} {string!r} is not a separate token after {before[-30:]!r}; begin it with "
            "the white space that separates it from the text, end the text without white space, or "
            "pass a token id"
        )
    starts, ends = (list(one) for one in zip(*encoded["offset_mapping"], strict=True))
    whole = Rendered(before + string, (), (), (0, len(before + string)))
    if unknown_words(tokenizer, TokenizedText(whole, found, starts, ends), n_before):
        raise InputError(
            f"the {what} {string!r} is not in the model's vocabulary; use words of the vocabulary "
            "or a token id"
        )
    return found[n_before:]
