"""The role of every token of an in-context prompt, which aligns prompts of any length."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from icl_lens.prompts.batch import PromptBatch

Role = Literal["text", "true label", "false label", "query", "last", "other"]
ROLES: tuple[Role, ...] = get_args(Role)


EdgeRole = Role | Literal["label"]
"""A role of tokens, or "label" for labels of either kind."""
EDGE_ROLES: tuple[EdgeRole, ...] = ("text", "label", "query", "last", "other")
"""Roles that a model can tell apart without knowing the answer."""


def members(role: EdgeRole) -> tuple[int, ...]:
    """Return the roles that a role of edges stands for, as indices into `ROLES`."""
    names = ("true label", "false label") if role == "label" else (role,)
    return tuple(ROLES.index(name) for name in names)


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


def role_masks(batch: PromptBatch, roles: Sequence[EdgeRole] = EDGE_ROLES) -> Bool[Tensor, "batch role pos"]:
    """Return where the tokens of each role are."""
    found = role_indices(batch)
    members_of = [torch.tensor(members(role), device=found.device) for role in roles]
    return torch.stack([torch.isin(found, one) for one in members_of], dim=1)
