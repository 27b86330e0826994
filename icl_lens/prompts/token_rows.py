"""Rows of token ids, and the fields of a `PromptBatch` that follow from them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from icl_lens.errors import InputError, short_repr
from icl_lens.prompts.decisions import Decisions
from icl_lens.prompts.prompt import DEFAULT_TEMPLATE
from icl_lens.prompts.token_ids import (
    PAD,
    check_ids,
    check_no_padding,
    decode_tokens,
    name_tokens,
    remove_padding,
    vocabulary_digest,
)


def rows_of_ids(
    tokens: Tensor | Sequence[Sequence[int]],
    attention_mask: Tensor | Sequence[Sequence[int]] | None,
    model: Any,
) -> list[list[int]]:
    """Return the ids of each row without padding; raise InputError for empty rows and other values;
    see `PromptBatch.from_tokens`.
    """
    try:
        lists = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        rows = [list(map(int, row)) for row in lists]
    except (TypeError, ValueError):
        raise InputError(
            f"tokens must be one list of integers per prompt, got {short_repr(tokens)}"
        ) from None
    for row in rows:
        check_ids(None, row)
    if attention_mask is not None:
        rows = remove_padding(rows, attention_mask)
    elif model is not None:
        check_no_padding(getattr(model, "tokenizer", None), rows)
    if not rows or not all(rows):
        raise InputError(
            "each row of tokens must have at least one token, got an empty one; remove it"
        )
    return rows


def fields_without_labels(
    tokenizer: Any, rows: list[list[int]], texts: Sequence[str] | None
) -> dict[str, Any]:
    """Return all fields of a `PromptBatch` of rows without labels.

    `texts` are those of the rows; by default, they are decoded. Without a tokenizer, tokens are
    named by their ids.
    """
    n = len(rows)
    if texts is None:
        texts = _decoded(tokenizer, rows)
    no_labels = torch.full((n, 0), -1)
    return {
        **row_fields(tokenizer, rows),
        "label_positions": no_labels,
        "label_ranges": no_labels.new_empty((n, 0, 2)),
        "label_index": no_labels,
        "label_mask": no_labels.bool(),
        "label_tokens": no_labels.new_empty(0),
        "answer": torch.full((n,), -1),
        "text_ranges": no_labels.new_empty((n, 0, 2)),
        "demonstration_ranges": no_labels.new_empty((n, 0, 2)),
        "query_range": torch.tensor([[0, len(row)] for row in rows]),
        "labels": (),
        "prompts": (),
        "template": DEFAULT_TEMPLATE,
        "decisions": Decisions.without_labels(n),
        "texts": tuple(texts),
        "targets": torch.full((n,), -1),
    }


def _decoded(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    """Return the text of each row; without a tokenizer, its ids."""
    if tokenizer is None:
        return [" ".join(map(str, row)) for row in rows]
    texts: list[str] = tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
    return texts


def row_fields(tokenizer: Any, rows: list[list[int]]) -> dict[str, Any]:
    """Return the fields of a `PromptBatch` that depend only on its token ids, padded on the
    right.
    """
    if tokenizer is None:
        strings = names = [list(map(str, row)) for row in rows]
        vocabulary = ""
    else:
        strings, names = decode_tokens(tokenizer, rows), name_tokens(tokenizer, rows)
        vocabulary = vocabulary_digest(tokenizer)
    longest = max(map(len, rows))
    padded_ids_of_rows, masks = [], []
    for row in rows:
        n_padding = longest - len(row)
        padded_ids_of_rows.append([*row, *[PAD] * n_padding])
        masks.append([1] * len(row) + [0] * n_padding)
    return {
        "tokens": torch.tensor(padded_ids_of_rows),
        "attention_mask": torch.tensor(masks),
        "last": torch.tensor([len(row) - 1 for row in rows]),
        "token_strings": strings,
        "token_names": names,
        "vocabulary": vocabulary,
    }
