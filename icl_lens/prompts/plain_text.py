"""Plain text as a value: no demonstrations, and any token as the answer.

1. The model's own tokenizer tokenizes the text.
2. An answer or comparison token given as a string is tokenized in context, after the text: the ids
   must begin with those of the text, and the next id is scored.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from icl_lens.errors import InputError, short_repr
from icl_lens.prompts.batch import PromptBatch, check_against_differs
from icl_lens.prompts.beginning import warn_of_other_beginning
from icl_lens.prompts.prompt import RenderedPrompt, check_unicode
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
from icl_lens.prompts.token_rows import fields_without_labels

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
            raise InputError(f"text must not be empty, got {short_repr(text)}")
        if answer is not None:
            _check_token(answer, "answer", text)
        if against is not None:
            against = (against,) if isinstance(against, (str, int)) else tuple(against)
            if not against:
                raise InputError("against must have at least one token, got none; omit it")
            for token in against:
                _check_token(token, "against", text)
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "answer", answer)
        object.__setattr__(self, "against", against)


def _check_token(token: object, name: str, text: str) -> None:
    """Raise InputError unless a token is a string or an id; `name` is that of the argument."""
    if not isinstance(token, (str, int)):
        raise InputError(f"{name} must be a string or a token id, got {short_repr(token)}")
    if token == "":
        raise InputError(
            f"{name} must not be empty, got ''; pass a token that may follow {text[-30:]!r}"
        )


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
    strings = [text.text for text in texts]
    check_text_length(model, tokenizer, strings)
    rendered = [RenderedPrompt(string, (), (), (0, len(string))) for string in strings]
    tokenized = tokenize_texts(tokenizer, rendered)
    prefixes = special_prefixes(tokenizer, tokenized, prepend_bos)
    rows = [[*prefix, *text.ids] for prefix, text in zip(prefixes, tokenized, strict=True)]
    warn_of_other_beginning(model, strings[0], rows[0], prepend_bos=prepend_bos)
    check_context_length(model, rows)
    ids_of_cut_strings: dict[str, list[int]] = {}

    def find_token(token: TokenSpec, text: TokenizedText, what: str) -> int:
        """Return the id that scores `token` after a text."""
        if isinstance(token, int):
            check_ids(model, [token])
            return token
        ids = _ids_after(tokenizer, text, token, what)
        if len(ids) > 1:
            ids_of_cut_strings.setdefault(token, ids)
        return ids[0]

    pairs = list(zip(texts, tokenized, strict=True))
    targets = []
    for text, tokenized_text in pairs:
        if text.answer is None:
            targets.append(-1)
        else:
            targets.append(find_token(text.answer, tokenized_text, "answer"))
    batch = PromptBatch(**fields_without_labels(tokenizer, rows, strings))
    batch = replace(batch, targets=torch.tensor(targets), prepend_bos=prepend_bos)
    if texts[0].against is not None:
        against = []
        for text, tokenized_text in pairs:
            tokens = text.against or ()
            against.append([find_token(token, tokenized_text, "comparison") for token in tokens])
        batch = replace(batch, against=padded_ids(against))
    _warn_of_cut_strings(tokenizer, ids_of_cut_strings)
    check_against_differs(batch)
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def _warn_of_cut_strings(tokenizer: Any, ids_of: Mapping[str, list[int]]) -> None:
    """Warn of each string of several tokens, which is scored by its first."""
    for string, ids in ids_of.items():
        names = name_tokens(tokenizer, [ids])[0]
        is_white_space = not tokenizer.decode(ids[:1]).strip()
        note = " (white space only)" if is_white_space else ""
        warnings.warn(
            f"{string!r} has {len(ids)} tokens, {' + '.join(map(repr, names))}; it is scored by "
            f"the first, {names[0]!r}{note}",
            stacklevel=4,
        )


def _ids_after(tokenizer: Any, text: TokenizedText, string: str, what: str) -> list[int]:
    """Return the tokens of a string after a text.

    Raise InputError if the string does not begin where the text ends or is unknown.
    """
    before, n_before = text.rendered.text, len(text.ids)
    whole = RenderedPrompt(before + string, (), (), (0, len(before + string)))
    encoded = tokenizer(
        whole.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    if ids[:n_before] != text.ids[:n_before] or len(ids) == n_before:
        raise InputError(
            f"the {what} {string!r} is not a separate token after {before[-30:]!r}; begin it with "
            "the white space that separates it from the text, end the text without white space, or "
            "pass a token id"
        )
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    if unknown_words(tokenizer, TokenizedText(whole, ids, starts, ends), n_before):
        raise InputError(
            f"the {what} {string!r} is not in the model's vocabulary; use words of the vocabulary "
            "or a token id"
        )
    return ids[n_before:]
