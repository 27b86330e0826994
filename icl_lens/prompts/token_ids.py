"""Token ids: their names, checks, and the resolution of ids and positions given by the user."""

from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.digest import json_digest
from icl_lens.errors import InputError

# Padding is masked and never shown, so any valid id works; the tokenizer's own pad token may be
# outside the model's vocabulary (TransformerLens adds one to tokenizers without it).
PAD = 0

TokenPositions = int | Literal["last", "all"] | Sequence[int] | Sequence[Sequence[int]]
"""Positions in each row: one, "last", "all", several for all rows, or a list per row; -1 is the
last.
"""


def decode_tokens(tokenizer: Any, rows: list[list[int]]) -> list[list[str]]:
    """Return the text of each token, decoded alone."""
    distinct = sorted({token for row in rows for token in row})
    strings = tokenizer.batch_decode(
        [[token] for token in distinct], clean_up_tokenization_spaces=False
    )
    string = dict(zip(distinct, strings, strict=True))
    return [[string[token] for token in row] for row in rows]


def name_tokens(tokenizer: Any, rows: list[list[int]]) -> list[list[str]]:
    """Return token names with visible white space: "␣to" versus "to", "⏎" for a line break.

    "␣" is a space, however the vocabulary marks it: "Ġ", or "▁" as for Llama, whose tokens lose
    their space when decoded alone. A token that is part of a character is named as in the
    vocabulary.
    """
    distinct = sorted({token for row in rows for token in row})
    raw = tokenizer.convert_ids_to_tokens(distinct)
    (strings,) = decode_tokens(tokenizer, [distinct])
    name = {
        token: _visible(one or "", text)
        for token, one, text in zip(distinct, raw, strings, strict=True)
    }
    return [[name[token] for token in row] for row in rows]


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
    mask = (
        attention_mask.tolist()
        if isinstance(attention_mask, Tensor)
        else [list(row) for row in attention_mask]
    )
    if [len(row) for row in mask] != [len(row) for row in rows]:
        raise InputError(
            "attention_mask must have the shape of tokens; pass both as the tokenizer returned them"
        )
    for number, row in enumerate(mask):
        if "".join(map(str, map(int, row))).strip("0").strip("1") or not set(row) <= {0, 1}:
            raise InputError(
                f"attention_mask must be 1 on one run of tokens and 0 elsewhere, got {row} in row "
                f"{number}"
            )
    return [
        [token for token, real in zip(*pair, strict=True) if real]
        for pair in zip(rows, mask, strict=True)
    ]


def check_no_padding(tokenizer: Any, rows: list[list[int]]) -> None:
    """Raise InputError if a row begins or ends with padding.

    One padding token is allowed if it is also the tokenizer's beginning- or end-of-sequence token.
    """
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return
    n_allowed = int(
        pad in (getattr(tokenizer, "bos_token_id", None), getattr(tokenizer, "eos_token_id", None))
    )
    for number, row in enumerate(rows):
        for side, tokens in (("begins", row), ("ends", row[::-1])):
            count = next((i for i, token in enumerate(tokens) if token != pad), len(tokens))
            if count > n_allowed:
                raise InputError(
                    f"row {number} {side} with {count} padding tokens (id {pad}), which the model "
                    "would read; pass attention_mask= as the tokenizer returned it"
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
        return [list(range(length)) for length in lengths]
    if isinstance(positions, str):
        raise InputError(f"positions must be 'last', 'all' or integers, got {positions!r}")
    by_row: Any = [positions] if isinstance(positions, int) else positions
    if all(isinstance(position, int) for position in by_row):
        by_row = [by_row for _ in lengths]
    if len(by_row) != len(lengths) or not all(isinstance(row, Sequence) and row for row in by_row):
        raise InputError(
            f"positions must be one position, a list for all {len(lengths)} prompts or a non-empty "
            f"list per prompt, got {positions!r}"
        )
    for number, (row, length) in enumerate(zip(by_row, lengths, strict=True)):
        wrong = [position for position in row if not -length <= position < length]
        if wrong:
            raise InputError(
                f"position {wrong[0]} is out of range for prompt {number}; valid are 0–{length - 1}"
            )
    return [
        [position % length for position in row] for row, length in zip(by_row, lengths, strict=True)
    ]


def ids_per_row(ids: Any, n: int, what: str, *, lists: bool = False) -> list[list[int]] | None:
    """Return each row's ids, given one id for all rows, one per row or, with `lists`, a list per
    row padded with -1.
    """
    if ids is None:
        return None
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    rows = [ids] * n if isinstance(ids, int) else ids
    several = [
        [row] if isinstance(row, int) else [token for token in row if token != -1 or not lists]
        for row in rows
    ]
    if (
        len(several) != n
        or not all(several)
        or not (lists or all(len(row) == 1 for row in several))
    ):
        condition = (
            "one token id or one per row"
            if not lists
            else "one token id, or one id or a list of ids per row"
        )
        raise InputError(f"{what} must be {condition} ({n}), got {ids!r}")
    return several


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
