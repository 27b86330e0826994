"""What is read of the log-probabilities after each prompt: any function of them, the labels', or
those of some tokens among themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models.passes.inference import log_probs_of
from icl_lens.prompts.batch import PromptBatch

Read = Callable[[Float[Tensor, "row d_vocab"], Int[Tensor, " row"]], Float[Tensor, "row *n"]]
"""A function of log-probabilities over the vocabulary, nats, and each row's prompt in the batch."""


@dataclass(frozen=True)
class ReadAmong:
    """Read the log-probabilities of some tokens among themselves, which sum to 1.

    Rows of one token then need no logits of the rest of the vocabulary, a large part of their cost.
    """

    tokens: Int[Tensor, " n"]

    def __call__(
        self, log_probs: Float[Tensor, "*rest d_vocab"], prompt: Int[Tensor, " row"]
    ) -> Float[Tensor, "*rest n"]:
        return log_probs_of(log_probs[..., self.tokens.to(log_probs.device)])


def read_labels(batch: PromptBatch) -> Read:
    """Return a function that selects the labels' log-probabilities from those of the vocabulary."""
    tokens = batch.label_tokens
    return lambda log_probs, prompt: log_probs[:, tokens.to(log_probs.device)]


def checked_read(read: Read) -> Read:
    """Return `read` that raises InputError unless it returns a tensor with one entry per row."""
    if isinstance(read, ReadAmong):
        return read

    def checked(log_probs: Tensor, prompt: Tensor) -> Tensor:
        by_row = read(log_probs, prompt)
        if not isinstance(by_row, Tensor) or by_row.ndim < 1 or len(by_row) != len(log_probs):
            got = tuple(by_row.shape) if isinstance(by_row, Tensor) else type(by_row).__name__
            raise InputError(
                f"read must return a tensor with one entry per row, {len(log_probs)}, got {got}"
            )
        return by_row

    return checked
