"""Token ids before they are a batch: their names, and which ids and positions were asked for."""

from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.digest import json_digest
from icl_lens.errors import InputError

# Padding is masked, never read and never shown, so any id of the vocabulary will do; a tokenizer's own pad
# token may lie outside it (TransformerLens adds one where there is none).
PAD = 0

TokenPositions = int | Literal["last", "all"] | Sequence[int] | Sequence[Sequence[int]]
"""Where in each row: one position, "last", "all", several for every row, or a list of several a row; -1 is the last."""


def decode_tokens(tokenizer: Any, rows: list[list[int]]) -> list[list[str]]:
    distinct = sorted({token for row in rows for token in row})
    strings = tokenizer.batch_decode([[token] for token in distinct], clean_up_tokenization_spaces=False)
    string = dict(zip(distinct, strings, strict=True))
    return [[string[token] for token in row] for row in rows]


def name_tokens(tokenizer: Any, rows: list[list[int]]) -> list[list[str]]:
    """Tokens as a reader can tell them apart: "▁to" or "␣to" is not "to", a line break is "⏎".

    "▁" stands where the vocabulary itself writes it (Llama, whose tokens lose their blank when decoded alone), "␣"
    where a token decodes to a blank. A token that is part of a character is named as the vocabulary writes it.
    """
    distinct = sorted({token for row in rows for token in row})
    raw = tokenizer.convert_ids_to_tokens(distinct)
    strings = tokenizer.batch_decode([[token] for token in distinct], clean_up_tokenization_spaces=False)
    name = {token: visible(one or "", text) for token, one, text in zip(distinct, raw, strings, strict=True)}
    return [[name[token] for token in row] for row in rows]


def visible(raw: str, decode_tokens: str) -> str:
    """A token's name from how its vocabulary writes it and what it decodes to alone."""
    if "▁" in raw:
        return raw
    if not decode_tokens or "\ufffd" in decode_tokens:
        return raw
    return decode_tokens.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍")


def check_ids(model: Any, ids: list[int]) -> None:
    """Raises InputError for ids that are no tokens of the model; without a model, for negative ones."""
    size = getattr(getattr(model, "cfg", None), "d_vocab", None)
    wrong = [token for token in ids if token < 0 or (size is not None and token >= size)]
    if wrong:
        known = "there are no negative ones" if size is None else f"the model has 0–{size - 1}"
        raise InputError(f"{wrong[0]} is no token id: {known}")


def padded_ids(rows: Sequence[Sequence[int]]) -> Int[Tensor, "batch n"]:
    """Lists of ids as one tensor, -1 where a row has fewer."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows]).reshape(len(rows), width)


def resolve_positions(positions: TokenPositions, lengths: list[int]) -> list[list[int]]:
    """Each row's positions, counted from its start; raises InputError for one that is not there."""
    if isinstance(positions, Tensor):
        positions = positions.tolist()
    if positions == "last":
        positions = -1
    if isinstance(positions, str) and positions != "all":
        raise InputError(f"positions={positions!r} is not known; use 'last', 'all', or positions as integers")
    if positions == "all":
        return [list(range(length)) for length in lengths]
    if isinstance(positions, int):
        positions = [positions]
    for_all = [place for place in positions if isinstance(place, int)]
    by_row = [list(places) for places in positions if isinstance(places, Sequence)]
    if for_all and not by_row:
        by_row = [for_all for _ in lengths]
    if len(by_row) != len(lengths) or not all(by_row) or (for_all and by_row[0] is not for_all):
        raise InputError(
            f"positions={positions!r} do not fit {len(lengths)} prompts; give one position, a list for all prompts, or "
            "a list for each, none of them empty"
        )
    for row, (places, length) in enumerate(zip(by_row, lengths, strict=True)):
        wrong = [place for place in places if not -length <= place < length]
        if wrong:
            raise InputError(f"prompt {row} has no position {wrong[0]}: it has {length} tokens, 0–{length - 1}")
    return [[place % length for place in places] for places, length in zip(by_row, lengths, strict=True)]


def ids_per_row(ids: int | Sequence[int] | Tensor | None, n: int, what: str) -> list[int] | None:
    if ids is None:
        return None
    if isinstance(ids, Tensor):
        ids = list(ids.reshape(-1).tolist())
    listed_ids = [ids] * n if isinstance(ids, int) else list(ids)
    if len(listed_ids) != n or not all(isinstance(token, int) for token in listed_ids):
        raise InputError(f"{what}={ids!r} must be one token id, or one for each of the {n} rows")
    return listed_ids


def id_lists_per_row(
    ids: int | Sequence[int] | Sequence[Sequence[int]] | Tensor | None, n: int
) -> list[list[int]] | None:
    if ids is None:
        return None
    if isinstance(ids, Tensor):
        ids = list(ids.tolist())
    rows = [ids] * n if isinstance(ids, int) else list(ids)
    several = [[one] if isinstance(one, int) else [token for token in one if token != -1] for one in rows]
    if len(several) != n or not all(several):
        raise InputError(f"against={ids!r} must be one token id, or for each of the {n} rows one or a list of them")
    return several


_DIGESTS: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()


def vocabulary_digest(tokenizer: Any) -> str:
    """Hexadecimal digits that differ for other vocabularies: of their size and up to 256 words; empty if unknown.

    Tokens added later, such as the padding that TransformerLens adds, do not count.
    """
    try:
        if tokenizer not in _DIGESTS:
            size = int(tokenizer.vocab_size)
            some = list(range(0, size, max(1, size // 256)))
            _DIGESTS[tokenizer] = json_digest([size, tokenizer.convert_ids_to_tokens(some)])
        return _DIGESTS[tokenizer]
    except (AttributeError, TypeError, NotImplementedError):  # something that tokenizes, but no Hugging Face tokenizer
        return ""


def check_context_length(model: Any, rows: list[list[int]]) -> None:
    longest = max(range(len(rows)), key=lambda row: len(rows[row]))
    if len(rows[longest]) > model.cfg.n_ctx:
        raise InputError(
            f"prompt {longest} has {len(rows[longest])} tokens, more than the {model.cfg.n_ctx} of the "
            "model's context; shorten its texts, or show fewer demonstrations"
        )
    size = getattr(model.cfg, "d_vocab", None)
    largest = max(map(max, rows))
    if size is not None and largest >= size:
        raise InputError(
            f"token id {largest} lies outside the model's vocabulary of {size}: the tokenizer is another "
            "model's, or its beginning-of-sequence token is one the model never had; use the model's own "
            "tokenizer, or prepend_bos=False"
        )
