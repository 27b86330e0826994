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
from icl_lens.prompts.token_alignment import TokenizedText, require_fast_tokenizer, special_prefix, tokenize_texts
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
    single = isinstance(texts, str)
    several = tuple(texts) if isinstance(texts, Iterable) and not single else (texts,)
    if not several:
        raise InputError("texts must contain at least one text, got none")
    for number, text in enumerate(several):
        if isinstance(text, Prompt):
            raise InputError("texts must be plain text, got an il.Prompt; use il.tokenize for prompts")
        check_unicode(text)
        if not text.strip():
            raise InputError(f"texts must not be empty, got {text!r} as text {number}; remove it")
    tokenizer = require_fast_tokenizer(model)
    read = tokenize_texts(tokenizer, [Rendered(text, (), (), (0, len(text))) for text in several])
    front = special_prefix(tokenizer, read[0], prepend_bos)
    rows = [[*front, *text.ids] for text in read]
    check_context_length(model, rows)
    batch = text_batch(tokenizer, rows, several).at("last" if positions is None else positions)
    assert batch.prompt_index is not None
    rows_at = list(zip(batch.prompt_index.tolist(), batch.last.tolist(), strict=True))
    long: dict[str, list[int]] = {}  # strings of several tokens

    def find_token(given: TokenSpec, number: int, place: int, what: str) -> int:
        """Return the id that scores `given` after position `place` of text `number`."""
        if isinstance(given, int):
            check_ids(model, [given])
            return given
        ids = _ids_after(tokenizer, read[number], max(0, place - len(front) + 1), given, what)
        if len(ids) > 1:
            long.setdefault(given, ids)
        return ids[0]

    if targets is not None:
        ids = []
        for number, target in enumerate(_by_text(targets, len(several), single, "targets")):
            places = [place for of, place in rows_at if of == number]
            wanted = [target] * len(places) if isinstance(target, (str, int)) else target
            if len(wanted) != len(places):
                raise InputError(
                    f"targets must have one token per position, got {len(wanted)} for {len(places)} positions of text "
                    f"{number}"
                )
            ids += [find_token(one, number, place, "target") for one, place in zip(wanted, places, strict=True)]
        batch = replace(batch, targets=torch.tensor(ids))
    if against is not None:
        by_text = [
            [one] if isinstance(one, (str, int)) else one for one in _by_text(against, len(several), single, "against")
        ]
        if empty := [number for number, tokens in enumerate(by_text) if not tokens]:
            raise InputError(f"against must have at least one token per text, got none for text {empty[0]}")
        others = [[find_token(one, of, place, "comparison") for one in by_text[of]] for of, place in rows_at]
        batch = replace(batch, against=padded_ids(others))
    for given, ids in long.items():
        names = name_tokens(tokenizer, [ids])[0]
        bare = " (white space only)" if not tokenizer.decode(ids[:1]).strip() else ""
        warnings.warn(
            f"{given!r} has {len(ids)} tokens, {' + '.join(map(repr, names))}; it is scored by the first, "
            f"{names[0]!r}{bare}",
            stacklevel=2,
        )
    check_against_differs(batch)
    if positions is None:
        batch = replace(batch, prompt_index=None)
    device = getattr(model.cfg, "device", None)
    return batch if device is None else batch.to(device)


def _by_text(values: Any, n: int, single: bool, what: str) -> list[Any]:
    """Return the value of each text, from one for all or one per text; a list applies to a single text as a whole."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, (str, int)):
        return [values] * n
    values = list(values)
    if single and not any(isinstance(one, (list, tuple)) for one in values):
        return [values]
    if len(values) != n:
        raise InputError(f"{what} must have one value for all {n} texts or one per text, got {values!r}")
    return values


def _ids_after(tokenizer: Any, text: TokenizedText, n_before: int, given: str, what: str) -> list[int]:
    """Return the tokens of a string after the first `n_before` tokens of a text.

    Raise InputError if the string does not begin there or is unknown.
    """
    if not isinstance(given, str):
        raise InputError(f"{what} must be a string or a token id, got {given!r}")
    before = text.rendered.text
    if n_before < len(text.ids):
        before = before[: text.ends[n_before - 1] if n_before else 0]
    shown = repr(before[-30:])
    if not given:
        raise InputError(f"{what} must not be empty, got {given!r}; pass a token that may follow {shown}")
    found = tokenizer(before + given, add_special_tokens=False, verbose=False)["input_ids"]
    if found[:n_before] != text.ids[:n_before] or len(found) == n_before:
        raise InputError(
            f"the {what} {given!r} is not a separate token after {shown}; begin it with the white space that "
            f"separates it from the text, end the text without white space, or pass a token id"
        )
    if tokenizer.unk_token_id in found[n_before:]:
        raise InputError(
            f"the {what} {given!r} is not in the model's vocabulary; use words of the vocabulary or a token id"
        )
    return found[n_before:]
