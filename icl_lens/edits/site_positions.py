"""Positions of prompts at which sites are edited, by name, number or role, and those of other
prompts that correspond to them.

Positions of a role form stretches, such as one demonstration's text or label. The stretches of two
prompts are paired in order, and the tokens of a pair from their ends: the last token of a text,
which has read the others, corresponds to the last. A token without a counterpart is not edited.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from icl_lens.errors import InputError, check_integers, short_repr
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.roles import EdgeRole, role_masks

TokenRole = Literal["texts", "labels", "query", "separators"]
"""Tokens of the demonstrations' texts, of their labels, of the query's text, or all other tokens
before the last.
"""
ROLE_NAMES: dict[TokenRole, EdgeRole] = {
    "texts": "text",
    "labels": "label",
    "query": "query",
    "separators": "other",
}
SitePositions = Literal["all", "last"] | TokenRole | Sequence[int]
NAMES = ("all", "last", *get_args(TokenRole))


@dataclass(frozen=True, eq=False)
class SitePlaces:
    """Positions to edit, one entry for each, and the corresponding positions of other prompts."""

    prompt: Int[Tensor, " n"]
    """The prompt, as an index of the batch."""
    position: Int[Tensor, " n"]
    source_prompt: Int[Tensor, " n"]
    """The other prompt, as an index of its batch."""
    source_position: Int[Tensor, " n"]


def checked_positions(positions: object) -> str | tuple[int, ...]:
    """Return the name of positions, or listed ones as a tuple; raise InputError for others."""
    if isinstance(positions, str):
        if positions not in NAMES:
            raise InputError(
                f"positions must be one of {', '.join(map(repr, NAMES))}, or a list of positions, "
                f"got {positions!r}"
            )
        return positions
    if not isinstance(positions, Sequence):
        raise InputError(
            f"positions must be one of {', '.join(map(repr, NAMES))}, or a list of positions, got "
            f"{short_repr(positions)}"
        )
    names = [f"positions[{number}]" for number in range(len(positions))]
    listed = check_integers(**dict(zip(names, positions, strict=True)))
    if not listed or len(set(listed)) < len(listed):
        raise InputError(
            f"positions must be different positions, at least one, got {short_repr(positions)}"
        )
    return tuple(listed)


def stretches(
    batch: PromptBatch, rows: Iterable[int], positions: str | tuple[int, ...]
) -> dict[int, list[list[int]]]:
    """Return row -> the positions of its prompt, one list for each stretch of neighbors of a role.

    Raise InputError for listed positions outside a prompt, and for roles that it does not have.
    """
    by_row: dict[int, list[list[int]]] = {}
    if positions in ROLE_NAMES:
        role = ROLE_NAMES[cast(TokenRole, positions)]
        has_role = role_masks(batch, [role])[:, 0].tolist()
        for row in rows:
            by_row[row] = _neighbors(has_role[row])
            if not by_row[row] and not batch.has_demonstrations:
                raise InputError(
                    "positions must be 'all', 'last', 'query' or a list for prompts without "
                    f"demonstrations, got {positions!r}"
                )
        return by_row
    n_tokens_of = (batch.last + 1).tolist()
    for row in rows:
        by_row[row] = _listed(positions, row, n_tokens_of[row])
    return by_row


def _neighbors(has_role: Sequence[bool]) -> list[list[int]]:
    """Return the positions of a role, one list for each stretch."""
    by_stretch: list[list[int]] = []
    for position, is_in_role in enumerate(has_role):
        if is_in_role and (position == 0 or not has_role[position - 1]):
            by_stretch.append([])
        if is_in_role:
            by_stretch[-1].append(position)
    return by_stretch


def _listed(positions: str | tuple[int, ...], row: int, n_tokens: int) -> list[list[int]]:
    """Return all positions of a prompt as one stretch, or the last, or listed ones as one each."""
    if positions == "all":
        return [list(range(n_tokens))]
    if isinstance(positions, str):
        return [[n_tokens - 1]]
    if any(not -n_tokens <= position < n_tokens for position in positions):
        raise InputError(
            f"positions must be in every prompt, prompt {row} with {n_tokens} tokens, got "
            f"{list(positions)}"
        )
    return [[position % n_tokens] for position in positions]


def places_of(batch: PromptBatch, positions: str | tuple[int, ...]) -> SitePlaces:
    """Return the places of positions in every prompt, each its own source."""
    return aligned_places(batch, batch, range(len(batch)), positions)


def first_changes(
    batch: PromptBatch, source: PromptBatch, places: SitePlaces
) -> Int[Tensor, " prompt"]:
    """Return the first place of each prompt whose value may differ from that of its source: in
    models whose tokens read only earlier ones, some token up to it differs. Prompts without such a
    place have the position after their last.
    """
    ours, theirs = batch.tokens[places.prompt], source.tokens[places.source_prompt]
    width = min(ours.shape[1], theirs.shape[1])
    is_same = ours[:, :width] == theirs[:, :width]
    n_same = is_same.long().cumprod(1).sum(1).cpu()  # tokens before the first that differs
    is_moved = places.position != places.source_position
    may_differ = is_moved | (places.position >= n_same)
    return first_positions(batch, places.prompt[may_differ], places.position[may_differ])


def first_positions(
    batch: PromptBatch, prompt: Int[Tensor, " n"], position: Int[Tensor, " n"]
) -> Int[Tensor, " prompt"]:
    """Return the first of each prompt's positions, or the one after its last if it has none."""
    return (batch.last.cpu() + 1).scatter_reduce(0, prompt, position, "amin")


def aligned_places(
    batch: PromptBatch,
    source: PromptBatch,
    source_rows: Sequence[int],
    positions: str | tuple[int, ...],
) -> SitePlaces:
    """Return the places of positions in every prompt, with those of the source row of each prompt.

    Raise InputError if a prompt and its source differ in length, for all positions, or in the
    number of stretches of a role.
    """
    places: list[tuple[int, int, int, int]] = []
    by_row = stretches(batch, range(len(batch)), positions)
    by_source_row = stretches(source, dict.fromkeys(source_rows), positions)
    for row, source_row in enumerate(source_rows):
        ours, theirs = by_row[row], by_source_row[source_row]
        if len(ours) != len(theirs):
            raise InputError(
                f"source and prompt must have the same number of {positions}, got {len(theirs)} "
                f"and {len(ours)} in prompt {row}; use prompts with as many demonstrations"
            )
        if positions == "all" and len(ours[0]) != len(theirs[0]):
            raise InputError(
                f"source and prompt must have the same number of tokens, got {len(theirs[0])} "
                f"and {len(ours[0])} in prompt {row}; use prompts of the same length, or positions "
                "such as 'texts' or 'last'"
            )
        for to_stretch, from_stretch in zip(ours, theirs, strict=True):
            pairs = zip(reversed(to_stretch), reversed(from_stretch), strict=False)
            for position, source_position in pairs:
                places.append((row, position, source_row, source_position))
    if not places:
        raise InputError(
            f"positions must be in at least one prompt, got {positions!r}, which none of them has"
        )
    return SitePlaces(*torch.tensor(places).unbind(1))
