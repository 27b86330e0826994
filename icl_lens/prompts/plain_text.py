"""Plain text as prompts: no demonstrations, any target token, any position.

1. The model's own tokenizer tokenizes the text.
2. A target or comparison token given as a string is tokenized in context, after the text up to its position: the ids
   must begin with those of the text, and the next id is scored.
3. Each selected position becomes a row that ends there (`PromptBatch.at`).
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.prompts.batch import PromptBatch, check_against_differs, text_batch
from icl_lens.prompts.prompt import Prompt, Rendered, check_unicode
from icl_lens.prompts.token_alignment import (
    TokenizedText,
    require_fast_tokenizer,
    special_prefixes,
    tokenize_texts,
    unknown_words,
)
from icl_lens.prompts.token_ids import TokenPositions, check_context_length, check_ids, name_tokens, padded_ids

TokenSpec = str | int
"""A token given as text in context (" Mary" with its space) or as an id."""


def tokenize_text(
    model: Any,
    texts: str | Sequence[str],
    *,
    targets: TokenSpec | Sequence[TokenSpec | Sequence[TokenSpec]] | Tensor | None = None,
    against: TokenSpec | Sequence[TokenSpec | Sequence[TokenSpec]] | Tensor | None = None,
    positions: TokenPositions | None = None,
    prepend_bos: bool | None = None,
) -> PromptBatch:
    """Tokenize texts without demonstrations, on the model's device, for any target token and position.

    `targets` are strings, including the white space that separates them from the text (" Mary"), or token ids: one for
    all texts, one per text (also as a tensor [text]), or for each text a list with one per position. A string of
    several tokens is scored by its first, with a warning that lists them. By default each position is scored by the
    next token of the text, and the last position has no target. `against` has the tokens to compare targets with: one
    for all texts, or one or a list per text. If `texts` is a single string, lists are those of this text.

    `positions` (default: the last) is one or several positions for all texts, a list per text, or "all"
    (`PromptBatch.at`); they count from the start of the row, including prepended tokens. Each position is a row;
    `capture` runs the rows of a text in one pass. `prepend_bos` is as in `tokenize`.

    Raise InputError for missing or empty texts, texts longer than the context, words or ids that the model does not
    have, a target that does not begin where the text ends, a target that equals its comparison, and a slow tokenizer.

    Example:
        >>> batch = il.tokenize_text(model, "love : bar one : foo two :", targets=" foo", against=" bar")
        >>> il.head_log_prob_increase(il.capture(model, batch), batch.answer_tokens).shape
        torch.Size([1, 8, 6])
    """
    is_single = isinstance(texts, str)
    all_texts = tuple(texts) if isinstance(texts, Iterable) and not is_single else (texts,)
    if not all_texts:
        raise InputError("texts must contain at least one text, got none")
    for number, text in enumerate(all_texts):
        if isinstance(text, Prompt):
            raise InputError("texts must be plain text, got an il.Prompt; use il.tokenize for prompts")
        check_unicode(text)
        if not text.strip():
            raise InputError(f"texts must not be empty, got {text!r} as text {number}; remove it")
    tokenizer = require_fast_tokenizer(model)
    tokenized = tokenize_texts(tokenizer, [Rendered(text, (), (), (0, len(text))) for text in all_texts])
    prefixes = special_prefixes(tokenizer, tokenized, prepend_bos)
    rows = [[*prefix, *text.ids] for prefix, text in zip(prefixes, tokenized, strict=True)]
    check_context_length(model, rows)
    batch = text_batch(tokenizer, rows, all_texts).at("last" if positions is None else positions)
    assert batch.prompt_index is not None
    text_positions = list(zip(batch.prompt_index.tolist(), batch.last.tolist(), strict=True))
    long: dict[str, list[int]] = {}  # strings of several tokens

    def find_token(token: TokenSpec, number: int, position: int, what: str) -> int:
        """Return the id that scores `token` after a position of text `number`."""
        if isinstance(token, int):
            check_ids(model, [token])
            return token
        n_before = max(0, position - len(prefixes[number]) + 1)
        ids = _ids_after(tokenizer, tokenized[number], n_before, token, what)
        if len(ids) > 1:
            long.setdefault(token, ids)
        return ids[0]

    if targets is not None:
        ids = []
        for number, target in enumerate(_by_text(targets, len(all_texts), is_single, "targets")):
            ends = [position for text, position in text_positions if text == number]
            tokens = [target] * len(ends) if isinstance(target, (str, int)) else target
            if len(tokens) != len(ends):
                raise InputError(
                    f"targets must have one token per position, got {len(tokens)} for {len(ends)} positions of text "
                    f"{number}"
                )
            ids += [find_token(token, number, end, "target") for token, end in zip(tokens, ends, strict=True)]
        batch = replace(batch, targets=torch.tensor(ids))
    if against is not None:
        by_text = [
            [one] if isinstance(one, (str, int)) else one
            for one in _by_text(against, len(all_texts), is_single, "against")
        ]
        if empty := [number for number, tokens in enumerate(by_text) if not tokens]:
            raise InputError(f"against must have at least one token per text, got none for text {empty[0]}")
        others = [[find_token(one, text, end, "comparison") for one in by_text[text]] for text, end in text_positions]
        batch = replace(batch, against=padded_ids(others))
    for string, ids in long.items():
        names = name_tokens(tokenizer, [ids])[0]
        bare = " (white space only)" if not tokenizer.decode(ids[:1]).strip() else ""
        warnings.warn(
            f"{string!r} has {len(ids)} tokens, {' + '.join(map(repr, names))}; it is scored by the first, "
            f"{names[0]!r}{bare}",
            stacklevel=2,
        )
    check_against_differs(batch)
    if positions is None:
        batch = replace(batch, prompt_index=None)
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def _by_text(values: Any, n: int, is_single: bool, what: str) -> list[Any]:
    """Return one value per text, given one for all texts or one per text; a list is the value of a single text."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, (str, int)):
        return [values] * n
    values = list(values)
    if is_single and not any(isinstance(one, (list, tuple)) for one in values):
        return [values]
    if len(values) != n:
        raise InputError(f"{what} must have one value for all {n} texts or one per text, got {values!r}")
    return values


def _ids_after(tokenizer: Any, text: TokenizedText, n_before: int, string: str, what: str) -> list[int]:
    """Return the tokens of a string after the first `n_before` tokens of a text.

    Raise InputError if the string does not begin there or is unknown.
    """
    if not isinstance(string, str):
        raise InputError(f"{what} must be a string or a token id, got {string!r}")
    before = text.rendered.text
    if n_before < len(text.ids):
        before = before[: text.ends[n_before - 1] if n_before else 0]
    shown = repr(before[-30:])
    if not string:
        raise InputError(f"{what} must not be empty, got {string!r}; pass a token that may follow {shown}")
    encoded = tokenizer(before + string, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    found = encoded["input_ids"]
    if found[:n_before] != text.ids[:n_before] or len(found) == n_before:
        raise InputError(
            f"the {what} {string!r} is not a separate token after {shown}; begin it with the white space that "
            f"separates it from the text, end the text without white space, or pass a token id"
        )
    starts, ends = (list(one) for one in zip(*encoded["offset_mapping"], strict=True))
    whole = Rendered(before + string, (), (), (0, len(before + string)))
    if unknown_words(tokenizer, TokenizedText(whole, found, starts, ends), n_before):
        raise InputError(
            f"the {what} {string!r} is not in the model's vocabulary; use words of the vocabulary or a token id"
        )
    return found[n_before:]
