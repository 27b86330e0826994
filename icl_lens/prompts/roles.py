"""The role of every token of an in-context prompt, which aligns prompts of any length."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from icl_lens.prompts.batch import PromptBatch

Role = Literal["text", "true label", "false label", "query", "last", "other"]
ROLES: tuple[Role, ...] = get_args(Role)


def token_roles(batch: PromptBatch) -> list[list[Role]]:
    """Return the role of every token of every prompt: one of `ROLES`.

    "text" and "query" are texts of demonstrations and of the query; "true label" and "false label" the last tokens of
    labels that equal the answer or do not; "last" the last token; "other" everything else: separators, a shared prefix,
    a beginning-of-sequence token. Texts without demonstrations are all "query" up to the last token.

    Example:
        >>> il.token_roles(batch)[0][-4:]
        ['true label', 'query', 'query', 'last']
    """
    return [[ROLES[role] for role in row if role >= 0] for row in role_indices(batch).tolist()]


def role_indices(batch: PromptBatch) -> Int[Tensor, "batch pos"]:
    """Return each token's role as an index into `ROLES`, -1 at padding."""
    n, width = batch.tokens.shape
    position = torch.arange(width, device=batch.tokens.device)
    roles = torch.full((n, width), ROLES.index("other"), device=position.device)
    starts_ends = {"text": batch.text_ranges, "query": batch.query_range[:, None]}
    for name, ranges in starts_ends.items():
        inside = (position >= ranges[..., :1]) & (position < ranges[..., 1:]) & (ranges[..., :1] >= 0)
        roles[inside.any(1)] = ROLES.index(name)
    is_true = batch.label_index == batch.answer[:, None]
    for name, chosen in (("true label", is_true), ("false label", ~is_true)):
        row, demonstration = ((batch.label_positions >= 0) & chosen).nonzero().unbind(1)
        roles[row, batch.label_positions[row, demonstration]] = ROLES.index(name)
    roles[torch.arange(n), batch.last] = ROLES.index("last")
    return roles.masked_fill(position > batch.last[:, None], -1)


def role_masks(batch: PromptBatch) -> Bool[Tensor, "batch role pos"]:
    """Return where the tokens of each role are."""
    return role_indices(batch)[:, None] == torch.arange(len(ROLES), device=batch.tokens.device)[:, None]
