"""Roles of tokens, such as label or query text, by which prompts of different lengths are
compared.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from icl_lens.prompts.batch import ROLES, PromptBatch, Role, role_indices

EdgeRole = Literal[Role, "label"]
"""A role, or "label" for both true and false labels."""
EDGE_ROLES: tuple[EdgeRole, ...] = ("text", "label", "query", "last", "other")
"""The roles that do not depend on the answer."""


def indices_in_roles(role: EdgeRole) -> tuple[int, ...]:
    """Return the role's index in `ROLES`; for "label", those of both kinds of labels."""
    names = ("true label", "false label") if role == "label" else (role,)
    return tuple(ROLES.index(name) for name in names)


def role_masks(
    batch: PromptBatch, roles: Sequence[EdgeRole] = EDGE_ROLES
) -> Bool[Tensor, "batch role pos"]:
    """Return which tokens have each role."""
    role_of_token = role_indices(batch)
    masks = []
    for role in roles:
        indices = torch.tensor(indices_in_roles(role), device=role_of_token.device)
        masks.append(torch.isin(role_of_token, indices))
    return torch.stack(masks, dim=1)
