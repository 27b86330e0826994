"""Warn of an answer that lacks the space before it, or has one too many, where the other form is
the likely one.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.prompts.batch import PromptBatch

SPACE_MARKS = ("\u0120", "\u2581")
"""How vocabularies write a space at the beginning of a token: byte-level BPE and SentencePiece."""
MIN_PROBABILITY, MIN_RATIO = 0.05, 20.0
"""The other form is the likely one if it has this probability and is this many times as
probable.
"""


def warn_of_answer_spacing(
    tokenizer: Any,
    batch: PromptBatch,
    log_probs_of: Callable[[Int[Tensor, " batch"]], Float[Tensor, " batch"]],
) -> None:
    """Warn, once for a batch, if an answer's token with or without its space is the likely one.

    `log_probs_of` returns the log-probability of one token per prompt, nats. An answer such as
    "Paris" after "The capital of France is" is a token that hardly ever follows a word; " Paris" is
    the one that the model predicts.
    """
    answers = batch.answer_tokens
    other_forms = torch.tensor([other_spacing(tokenizer, token) for token in answers.tolist()])
    rows = (other_forms >= 0).nonzero()[:, 0]
    if not len(rows):
        return
    asked = log_probs_of(answers.clamp(min=0)).detach().cpu().exp()
    likely = log_probs_of(other_forms.clamp(min=0).to(answers.device)).detach().cpu().exp()
    is_likely = (other_forms >= 0) & (likely >= MIN_PROBABILITY) & (likely >= MIN_RATIO * asked)
    if not bool(is_likely.any()):
        return
    row = int(is_likely.nonzero()[0])
    token, other_form = (tokenizer.decode([int(ids[row])]) for ids in (answers, other_forms))
    more = f" (prompt {row}, and {int(is_likely.sum()) - 1} others)" if len(batch) > 1 else ""
    remedy = "check the spaces around {label} in the template"
    if batch.targets is not None:
        remedy = f"pass answer={other_form!r} if this is meant"
    warnings.warn(
        f"the answer {token!r} has a probability of {float(asked[row]):.2%}, and {other_form!r}, "
        f"which differs in the space before it, {float(likely[row]):.1%}{more}; {remedy}",
        stacklevel=3,
    )


def other_spacing(tokenizer: Any, token: int) -> int:
    """Return the id of a token with a space before it, or without it if it has one; -1 if there is
    no such token.
    """
    text = None if token < 0 else tokenizer.convert_ids_to_tokens(token)
    if not isinstance(text, str):
        return -1
    bare = text.lstrip("".join(SPACE_MARKS))
    forms = [bare] if bare != text else [mark + text for mark in SPACE_MARKS]
    unknown = tokenizer.unk_token_id
    for form in forms:
        form_token = tokenizer.convert_tokens_to_ids(form) if form else None
        if (
            form_token is not None
            and form_token != unknown
            and tokenizer.convert_ids_to_tokens(form_token) == form
        ):
            return int(form_token)
    return -1
