"""The two corrections for label biases of the paper's published version.

Both edit only the attention of the last position. After one pass over the prompts, each strength or
set of heads therefore costs only one more single-token row per prompt (see `edits.one_token_rows`).
"""

from collections.abc import Iterable

from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.attention_edits import RemovePosition, Reweight
from icl_lens.edits.edit import Edit
from icl_lens.errors import InputError, short_repr
from icl_lens.models.head import AnyHead, head_tuple
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch, require_demonstrations


def debias_edits(
    batch: PromptBatch,
    heads: Iterable[AnyHead],
    *,
    majority: float = 0.0,
    recency: float = 0.0,
    renormalize: bool = True,
) -> list[Edit]:
    """Return the edits that reduce the label bias carried by `heads`, for `edited` and `score` over
    `batch`.

    `majority`: the attention from the last position to each label is divided by the label's
    frequency to this power; 0 is no change, 1 treats all labels as equally frequent (`Reweight`).
    `recency`: share of the position term removed from the last position's attention, 0 to 1
    (`RemovePosition`). Raise InputError for a negative `majority` and a `recency` outside 0 to 1.
    Source: the published version, sections 4.1 and 4.2.

    Example:
        >>> edits = il.debias_edits(batch, ["L2H0"], majority=1.0, recency=0.5)
        >>> with il.edited(model, *edits, batch=batch):
        ...     fairer = il.score(model, batch)
        >>> sets = []
        >>> for strength in (0.0, 0.5, 1.0):
        ...     sets.append(il.debias_edits(batch, ["L2H0"], majority=strength))
        >>> il.score(model, batch, sets).shape
        torch.Size([1, 3, 2])
    """
    if not majority >= 0:
        raise InputError(
            f"majority must be non-negative, got {short_repr(majority)}; 0 is no change"
        )
    if not 0 <= recency <= 1:
        raise InputError(f"recency must be between 0 (no change) and 1, got {short_repr(recency)}")
    check_batch(batch)
    heads = head_tuple(heads)
    edits: list[Edit] = (
        [RemovePosition(heads, strength=recency, positions="last")] if recency else []
    )
    if majority:
        edits.append(Reweight(heads, balancing_weights(batch, majority), renormalize=renormalize))
    return edits


def balancing_weights(batch: PromptBatch, strength: float = 1.0) -> Float[Tensor, "batch demo"]:
    """Return a factor per demonstration: (mean label frequency / its label's frequency) **
    strength, within a prompt.

    All factors are 1 where labels are equally frequent. Raise InputError for a negative strength,
    and for prompts without demonstrations.
    """
    if not strength >= 0:
        raise InputError(
            f"strength must be non-negative, got {short_repr(strength)}; 0 is no change"
        )
    require_demonstrations(
        batch, "label to balance", "pass prompts with demonstrations (il.tokenize)"
    )
    index = batch.label_index
    exists = index >= 0
    same_label = (index[:, :, None] == index[:, None, :]) & exists[:, None, :]
    count = same_label.sum(-1).clamp(min=1).double()
    # Each demonstration contributes 1 / count, so each label contributes 1.
    n_labels = (exists / count).sum(-1, keepdim=True)
    mean = exists.sum(-1, keepdim=True) / n_labels
    return ((mean / count) ** strength).masked_fill(~exists, 1.0).float()
