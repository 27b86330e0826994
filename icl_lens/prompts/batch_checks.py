"""Checks of batches that functions take: that they are batches, of this model, and have what is
needed.
"""

from itertools import compress
from typing import Any

from icl_lens.errors import InputError
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.token_ids import check_no_padding, vocabulary_digest


def check_batch(batch: Any, name: str = "batch") -> None:
    """Raise InputError for anything but a batch, such as a list of prompts; `name` is that of the
    argument.
    """
    if not isinstance(batch, PromptBatch):
        raise InputError(
            f"{name} must be a PromptBatch of tokenized prompts, got {type(batch).__name__}; pass "
            "il.tokenize(model, prompts)"
        )


def require_labels(
    batch: PromptBatch,
    what: str,
    alternative: str = "il.score(model, batch, read=…) reads other log-probabilities",
) -> None:
    """Raise InputError if the batch has no labels, without which `what` is undefined;
    `alternative` is the fix.
    """
    if not batch.labels:
        raise _no_demonstrations_error(what, alternative)


def require_demonstrations(batch: PromptBatch, what: str, alternative: str) -> None:
    """Raise InputError if no prompt shows a label, without which `what` is undefined;
    `alternative` is the fix.
    """
    if not batch.has_demonstrations:
        raise _no_demonstrations_error(what, alternative)


def _no_demonstrations_error(what: str, alternative: str) -> InputError:
    return InputError(f"the prompts have no demonstrations, so there is no {what}; {alternative}")


def check_vocabulary(model: Any, batch: PromptBatch, what: str) -> None:
    """Raise InputError if a batch was tokenized with a vocabulary other than the model's, or has
    unmasked padding.
    """
    size = getattr(model.cfg, "d_vocab", None)
    largest = int(batch.tokens.max())
    if size is not None and largest >= size:
        raise InputError(
            f"{what} was tokenized for another model: it contains token id {largest}, but the "
            f"model's vocabulary size is {size}; re-tokenize the prompts for this model"
        )
    tokenizer = getattr(model, "tokenizer", None)
    if not batch.vocabulary:  # ids that no tokenizer has checked
        rows = []
        for ids, mask in zip(batch.tokens.tolist(), batch.attention_mask.tolist(), strict=True):
            rows.append(list(compress(ids, mask)))
        check_no_padding(tokenizer, rows)
    elif tokenizer is not None and vocabulary_digest(tokenizer) != batch.vocabulary:
        raise InputError(
            f"{what} was tokenized with another vocabulary; re-tokenize the prompts for this model"
        )
