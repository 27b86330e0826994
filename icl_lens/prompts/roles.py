"""Roles of tokens, such as label or query text, by which prompts of different lengths are compared."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from icl_lens.prompts.batch import PromptBatch

Role = Literal["text", "true label", "false label", "query", "last", "other"]
ROLES: tuple[Role, ...] = get_args(Role)
EdgeRole = Role | Literal["label"]
"""A role, or "label" for both true and false labels."""
EDGE_ROLES: tuple[EdgeRole, ...] = ("text", "label", "query", "last", "other")
"""The roles that do not depend on the answer."""


def indices_in_roles(role: EdgeRole) -> tuple[int, ...]:
    """Return the role's index in `ROLES`; for "label", those of both kinds of labels."""
    names = ("true label", "false label") if role == "label" else (role,)
    return tuple(ROLES.index(name) for name in names)


def token_roles(batch: PromptBatch) -> list[list[Role]]:
    """Return the role of every token of every prompt.

    - "text": a demonstration's text.
    - "true label", "false label": all tokens of a label that equals the answer, or of one that does not.
    - "query": the query's text. In a text without demonstrations, all tokens but the last have this role.
    - "last": the prompt's last token, whatever it is.
    - "other": everything else, such as separators, an appended shared prefix, and the beginning-of-sequence token.

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
    for name, ranges in (("text", batch.text_ranges), ("query", batch.query_range[:, None])):
        start, end = ranges[..., :1], ranges[..., 1:]
        inside = (position >= start) & (position < end) & (start >= 0)
        roles[inside.any(1)] = ROLES.index(name)
    of_labels = batch.label_token_positions
    is_true = batch.label_index == batch.answer[:, None]
    for name, is_kind in (("true label", is_true), ("false label", ~is_true)):
        row, demonstration, token = ((of_labels >= 0) & is_kind[..., None]).nonzero().unbind(1)
        roles[row, of_labels[row, demonstration, token]] = ROLES.index(name)
    roles[torch.arange(n), batch.last] = ROLES.index("last")
    return roles.masked_fill(position > batch.last[:, None], -1)


def role_masks(batch: PromptBatch, roles: Sequence[EdgeRole] = EDGE_ROLES) -> Bool[Tensor, "batch role pos"]:
    """Return which tokens have each role."""
    found = role_indices(batch)
    indices = [torch.tensor(indices_in_roles(role), device=found.device) for role in roles]
    return torch.stack([torch.isin(found, index) for index in indices], dim=1)
