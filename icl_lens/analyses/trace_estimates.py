"""Estimate to first order what exchanges at sites cost: attribution patching.

1. One pass over the prompts, and one over each source, record what is at the tokens to exchange.
2. One forward and one backward pass over the prompts give the gradient of the answer's log-odds at
   every site of every layer.
3. An exchange costs about minus the gradient times the change: −∇ · (donor − prompt), summed over
   the tokens of the role.

Source: Nanda, "Attribution patching: activation patching at industrial scale" (2023).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from icl_lens.edits.edit import Stage
from icl_lens.edits.gradients import prompts_at_once, site_gradients
from icl_lens.edits.site_positions import SitePlaces, SitePositions, aligned_places
from icl_lens.edits.sites import Site, SiteReading, record_sites
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.scored_tokens import AnswerTokens


@dataclass(frozen=True, eq=False)
class InputChange:
    """How an exchange changes what is at a site of a layer."""

    column: int
    """The exchange, as a column of the estimates."""
    places: SitePlaces
    values: Float[Tensor, "n width"]
    """What the source has minus what the prompt has, at each of the places."""


def estimated_losses(
    view: ModelView,
    batch: PromptBatch,
    sources: Sequence[PromptBatch],
    exchanges: Sequence[tuple[int, Site, SitePositions, int]],
    answers: AnswerTokens,
) -> Float[Tensor, "batch exchange"]:
    """Return what exchanges cost the answer's log-odds (nats), to first order.

    An exchange is the index of its source, a site, positions and a layer.
    """
    changes_at = _changes(view, batch, sources, exchanges)
    device = view.unembed_device
    lost = torch.zeros(len(batch), len(exchanges), device=device)
    if not exchanges:
        return lost
    for piece_rows in torch.arange(len(batch)).split(prompts_at_once(view, batch)):
        rows = piece_rows.tolist()
        _add_estimates(view, batch[rows], rows[0], changes_at, answers.select(rows), lost)
    return lost


def _changes(
    view: ModelView,
    batch: PromptBatch,
    sources: Sequence[PromptBatch],
    exchanges: Sequence[tuple[int, Site, SitePositions, int]],
) -> Mapping[tuple[Stage, int], list[InputChange]]:
    """Return (site, layer) -> the changes of the exchanges there."""
    columns_at: dict[tuple[int, Stage, SitePositions], dict[int, int]] = {}  # layer -> column
    for column, (number, site, positions, layer) in enumerate(exchanges):
        columns_at.setdefault((number, Stage[site], positions), {})[layer] = column
    by_source = sorted(columns_at.items(), key=lambda place_and_columns: place_and_columns[0][0])
    readings_of: dict[int, list[SiteReading]] = {number: [] for number in range(len(sources))}
    of_prompts: list[SiteReading] = []
    for (number, site, positions), columns in by_source:
        named = positions if isinstance(positions, str) else tuple(positions)
        places = aligned_places(batch, sources[number], range(len(batch)), named)
        readings_of[number].append(SiteReading(site, tuple(columns), places))
        in_prompts = SitePlaces(places.prompt, places.position, places.prompt, places.position)
        of_prompts.append(SiteReading(site, tuple(columns), in_prompts))
    donated: list[dict[int, Tensor]] = []
    for number, readings in readings_of.items():
        with edits_disabled(view):
            donated += record_sites(view, sources[number], readings)
    replaced = record_sites(view, batch, of_prompts)
    changes_at: dict[tuple[Stage, int], list[InputChange]] = {}
    values = zip(by_source, of_prompts, donated, replaced, strict=True)
    for ((_, site, _), columns), reading, new, old in values:
        for layer, column in columns.items():
            dtype = torch.promote_types(old[layer].dtype, torch.float32)
            difference = new[layer].to(dtype) - old[layer].to(dtype)
            change = InputChange(column, reading.places, difference)
            changes_at.setdefault((site, layer), []).append(change)
    return changes_at


def _add_estimates(
    view: ModelView,
    piece: PromptBatch,
    first: int,
    changes_at: Mapping[tuple[Stage, int], list[InputChange]],
    answers: AnswerTokens,
    lost: Float[Tensor, "batch exchange"],
) -> None:
    """Add the estimates of the prompts of `piece`, which begin at the row `first` of `lost`."""
    rows = torch.arange(len(piece))

    def log_odds(log_probs: Tensor) -> Float[Tensor, " batch"]:
        return answers.log_odds(log_probs, rows)[:, 0]

    def read(site: Stage, layer: int, gradient: Float[Tensor, "batch pos width"]) -> None:
        for change in changes_at[site, layer]:
            prompt = change.places.prompt
            is_run = (prompt >= first) & (prompt < first + len(piece))
            (entries,) = is_run.nonzero(as_tuple=True)
            place = prompt[entries] - first, change.places.position[entries]
            slopes = gradient[place].to(lost)
            values = change.values[entries.to(change.values.device)].to(lost)
            products = (slopes * values).sum(-1)
            column = lost[:, change.column]
            column.index_add_(0, prompt[entries].to(lost.device), -products)

    site_gradients(view, piece, log_odds, changes_at, read)
