"""Token ids: their names, checks, and the resolution of ids and positions given by the user."""

from collections.abc import Sequence
from itertools import compress, takewhile
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.errors import InputError, short_repr
from icl_lens.foundation.digest import json_digest

# Padding is masked and never shown, so any valid id works; the tokenizer's own pad token may be
# outside the model's vocabulary (TransformerLens adds one to tokenizers without it).
PAD = 0

TokenPositions = int | Literal["last", "all"] | Sequence[int] | Sequence[Sequence[int]]
"""Positions in each row: one, "last", "all", several for all rows, or a list per row; -1 is the
last.
"""


def decode_tokens(tokenizer: Any, rows: list[list[int]]) -> list[list[str]]:
    """Return the text of each token, decoded alone."""
    ids = _distinct_ids(rows)
    strings = tokenizer.batch_decode([[token] for token in ids], clean_up_tokenization_spaces=False)
    return _looked_up(rows, dict(zip(ids, strings, strict=True)))


def name_tokens(tokenizer: Any, rows: list[list[int]]) -> list[list[str]]:
    """Return token names with visible white space: "␣to" versus "to", "⏎" for a line break.

    "␣" is a space, however the vocabulary marks it: "Ġ", or "▁" as for Llama, whose tokens lose
    their space when decoded alone. A token that is part of a character is named as in the
    vocabulary.
    """
    ids = _distinct_ids(rows)
    entries = tokenizer.convert_ids_to_tokens(ids)
    (strings,) = decode_tokens(tokenizer, [ids])
    name_of = {}
    for token, entry, string in zip(ids, entries, strings, strict=True):
        name_of[token] = _visible(entry or "", string)
    return _looked_up(rows, name_of)


def _distinct_ids(rows: list[list[int]]) -> list[int]:
    """Return the different ids of all rows, in increasing order."""
    return sorted(set().union(*rows))


def _looked_up(rows: list[list[int]], text_of: dict[int, str]) -> list[list[str]]:
    """Return the text of each id."""
    return [list(map(text_of.__getitem__, row)) for row in rows]


def _visible(raw: str, text: str) -> str:
    """Return a token's name from its vocabulary entry `raw` and its decoded text."""
    if "▁" in raw:
        return raw.replace("▁", "␣")
    if not text or "\ufffd" in text:
        return raw
    return text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


def check_ids(model: Any, ids: list[int]) -> None:
    """Raise InputError for ids outside the model's vocabulary; without a model, for negative
    ids.
    """
    size = getattr(getattr(model, "cfg", None), "d_vocab", None)
    wrong = [token for token in ids if token < 0 or (size is not None and token >= size)]
    if wrong:
        valid = "valid ids are not negative" if size is None else f"valid ids are 0–{size - 1}"
        raise InputError(f"token id {wrong[0]} is out of range; {valid}")


def remove_padding(
    rows: list[list[int]], attention_mask: Tensor | Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the ids where the mask is 1; raise InputError if it has another shape or values, or a
    hole in a row.
    """
    if isinstance(attention_mask, Tensor):
        masks = attention_mask.tolist()
    else:
        masks = [list(mask) for mask in attention_mask]
    if list(map(len, masks)) != list(map(len, rows)):
        raise InputError(
            "attention_mask must have the shape of tokens; pass both as the tokenizer returned them"
        )
    for number, mask in enumerate(masks):
        digits = "".join(map(str, map(int, mask)))
        has_hole = bool(digits.strip("0").strip("1"))
        if has_hole or not set(mask) <= {0, 1}:
            raise InputError(
                f"attention_mask must be 1 on one run of tokens and 0 elsewhere, got {mask} in row "
                f"{number}"
            )
    return [list(compress(row, mask)) for row, mask in zip(rows, masks, strict=True)]


def check_no_padding(tokenizer: Any, rows: list[list[int]]) -> None:
    """Raise InputError if a row begins or ends with padding.

    One padding token is allowed if it is also the tokenizer's beginning- or end-of-sequence token.
    """
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return
    bos, eos = getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None)
    n_allowed = int(pad in (bos, eos))
    for number, row in enumerate(rows):
        for side, tokens in (("begins", row), ("ends", row[::-1])):
            n_padding = sum(1 for _ in takewhile(lambda token: token == pad, tokens))
            if n_padding > n_allowed:
                raise InputError(
                    f"row {number} {side} with {n_padding} padding tokens (id {pad}), which the "
                    "model would read; pass attention_mask= as the tokenizer returned it"
                )


def padded_ids(rows: Sequence[Sequence[int]]) -> Int[Tensor, "batch n"]:
    """Return lists of ids as one tensor, padded with -1."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows]).reshape(
        len(rows), width
    )


def resolve_positions(positions: TokenPositions, lengths: list[int]) -> list[list[int]]:
    """Return each row's positions, counted from its start; raise InputError for a position out of
    range.
    """
    if isinstance(positions, Tensor):
        positions = positions.tolist()
    if positions == "last":
        positions = -1
    if positions == "all":
        return list(map(list, map(range, lengths)))
    if isinstance(positions, str):
        raise InputError(
            f"positions must be 'last', 'all' or integers, got {short_repr(positions)}"
        )
    positions_of_rows: Any = [positions] if isinstance(positions, int) else positions
    if all(isinstance(position, int) for position in positions_of_rows):
        positions_of_rows = [positions_of_rows] * len(lengths)
    are_lists = all(isinstance(row, Sequence) and row for row in positions_of_rows)
    if len(positions_of_rows) != len(lengths) or not are_lists:
        raise InputError(
            f"positions must be one position, a list for all {len(lengths)} prompts or a non-empty "
            f"list per prompt, got {short_repr(positions)}"
        )
    resolved = []
    for number, (row, length) in enumerate(zip(positions_of_rows, lengths, strict=True)):
        _check_in_range(row, length, number)
        resolved.append([position % length for position in row])
    return resolved


def _check_in_range(positions: Sequence[int], length: int, number: int) -> None:
    """Raise InputError for a position outside prompt `number`, which has `length` tokens."""
    for position in positions:
        if not -length <= position < length:
            raise InputError(
                f"position {position} is out of range for prompt {number}; valid are 0–{length - 1}"
            )


def ids_per_row(ids: Any, n: int, what: str, *, lists: bool = False) -> list[list[int]] | None:
    """Return each row's ids, given one id for all rows, one per row or, with `lists`, a list per
    row padded with -1.
    """
    if ids is None:
        return None
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    rows = [ids] * n if isinstance(ids, int) else ids
    ids_of_rows: list[list[int]] = []
    for row in rows:
        if isinstance(row, int):
            ids_of_rows.append([row])
        elif lists:
            ids_of_rows.append([token for token in row if token != -1])
        else:
            ids_of_rows.append(list(row))
    has_lists = any(len(row) != 1 for row in ids_of_rows)
    if len(ids_of_rows) != n or not all(ids_of_rows) or (has_lists and not lists):
        condition = "one token id or one per row"
        if lists:
            condition = "one token id, or one id or a list of ids per row"
        raise InputError(f"{what} must be {condition} ({n}), got {short_repr(ids)}")
    return ids_of_rows


_DIGESTS: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a hexadecimal digest of the vocabulary's size and 256 to 511 of its entries; empty if
    unknown.

    Tokens added later, such as the padding token that TransformerLens adds, are ignored.
    """
    try:
        if tokenizer not in _DIGESTS:
            size = int(tokenizer.vocab_size)
            ids = list(range(0, size, max(1, size // 256)))
            _DIGESTS[tokenizer] = json_digest([size, tokenizer.convert_ids_to_tokens(ids)])
        return _DIGESTS[tokenizer]
    except (AttributeError, TypeError, NotImplementedError):  # not a Hugging Face tokenizer
        return ""


CHARACTERS_PER_TOKEN = 8
"""More than text has on average; only longer texts are measured by their beginning."""


def check_text_length(model: Any, tokenizer: Any, texts: Sequence[str]) -> None:
    """Raise InputError for a text whose beginning alone is longer than the model's context, before
    all is tokenized.
    """
    n_context = model.cfg.n_ctx
    n_characters = CHARACTERS_PER_TOKEN * n_context
    for number, text in enumerate(texts):
        if len(text) <= 2 * n_characters:
            continue
        beginning = tokenizer(text[:n_characters], add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        if len(beginning) > n_context:
            raise InputError(
                f"prompt {number} has {len(text):,} characters, whose first {n_characters:,} are "
                f"{len(beginning):,} tokens, more than the model's context length of "
                f"{n_context:,}; shorten its texts or use fewer demonstrations"
            )


def check_context_length(model: Any, rows: list[list[int]]) -> None:
    """Raise InputError if a row is longer than the model's context or has an id outside its
    vocabulary.
    """
    longest = max(range(len(rows)), key=lambda row: len(rows[row]))
    if len(rows[longest]) > model.cfg.n_ctx:
        raise InputError(
            f"prompt {longest} has {len(rows[longest])} tokens, more than the model's context "
            f"length of {model.cfg.n_ctx}; shorten its texts or use fewer demonstrations"
        )
    size = getattr(model.cfg, "d_vocab", None)
    largest = max(map(max, rows))
    if size is not None and largest >= size:
        raise InputError(
            f"token id {largest} is outside the model's vocabulary of {size} (another model's "
            "tokenizer, or a beginning-of-sequence token that the model lacks); use the model's "
            "own tokenizer or prepend_bos=False (--no-bos)"
        )
