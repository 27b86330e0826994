"""Exchange queries, keys and values of heads at the last position for those of donor prompts.

1. `donor_passes` records the queries at the last positions of donors, and the keys and values at their labels.
2. Each exchange of a set of heads re-runs one token per prompt from the set's first layer (see `prefix_cache`): the
   set's heads use donors' queries, keys or values, several of them jointly if the exchange says so. All other heads
   run as usual on what has changed before them.

Queries and keys are exchanged before rotation, label by label, so that donors may differ in length. At all other
positions, the heads keep their own output. Source: method of interchange interventions, Geiger et al. (arXiv
2106.02997).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import last_log_probs
from icl_lens.interventions.donor_passes import LayerTensors, Part, Recorded
from icl_lens.interventions.edit_checks import checked_heads
from icl_lens.interventions.edited_scores import read_labels, score_passes, score_rows
from icl_lens.interventions.editor import AttentionState, Edit, Stage, editing, edits_disabled, group_by_layer
from icl_lens.interventions.prefix_cache import Exchange, PrefixCache, RowEdits, TokenTensors
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch


@dataclass(frozen=True, eq=False)
class Interchange:
    """What some heads take from donors at the last position; None for what they keep."""

    heads: tuple[Head, ...]
    q: Recorded | None = None
    k: Recorded | None = None
    v: Recorded | None = None


def log_probs_exchanged(
    view: ModelView,
    batch: PromptBatch,
    positions: Int[Tensor, "prompt token"],
    interchanges: Sequence[Interchange],
    cached: PrefixCache | None = None,
) -> tuple[Float[Tensor, "prompt set label"], str]:
    """Return the log-probabilities of the labels, among themselves, under each interchange; heads may be none.

    `cached` has the batch for single-token rows, restricted to its label tokens, if it has been run already.
    The second value is the reason why full forward passes were used instead of the prefix cache, "" if it was used.
    Raise InputError for families whose attention cannot be recomputed.
    """

    def edits_of(prompts: list[int]) -> RowEdits:
        return RowEdits.exchanging(view, _exchanges(view, positions, interchanges, prompts))

    def run_full_passes() -> Tensor:
        heads = {head for one in interchanges for head in one.heads}
        by_layer = checked_heads(view, heads, attention=True)
        clean_z = _record_z(view, batch, by_layer)
        exchanges = _exchanges(view, positions, interchanges, list(range(len(batch))))
        contexts = (editing(view, *_edits(view, batch, one, clean_z)) for one in exchanges)
        return torch.log_softmax(score_passes(view, batch, contexts, read_labels(batch)), dim=-1)

    return score_rows(
        view,
        batch,
        edits_of,
        read_labels(batch),
        run_full_passes,
        n_sets=len(interchanges),
        tokens=batch.label_tokens,
        cached=cached,
    )


def _exchanges(
    view: ModelView, positions: Int[Tensor, "prompt token"], interchanges: Sequence[Interchange], prompts: list[int]
) -> list[Exchange]:
    """Return the exchanges of some prompts; those that take the same from the same donor share it as one object."""
    shared: dict[tuple[int, Part], tuple[Tensor, LayerTensors]] = {}

    def of_donor(donor: Recorded, part: Part) -> tuple[Tensor, LayerTensors]:
        key = id(donor), part
        if key not in shared:
            replaced = positions[prompts].masked_fill(donor.is_kept[prompts], -1)
            shared[key] = replaced, {layer: x[prompts] for layer, x in getattr(donor, part).items()}
        return shared[key]

    found = []
    for one in interchanges:
        q, k, v = (None if donor is None else of_donor(donor, part) for donor, part in _donors(one))
        found.append(Exchange(group_by_layer(view, one.heads), None if q is None else q[1], k, v))
    return found


def _donors(interchange: Interchange) -> list[tuple[Recorded | None, Part]]:
    return [(interchange.q, "q"), (interchange.k, "k"), (interchange.v, "v")]


def _record_z(view: ModelView, batch: PromptBatch, by_layer: Mapping[int, Sequence[int]]) -> LayerTensors:
    """Return layer -> z [batch pos head d_head] of all heads, without edits."""
    found: LayerTensors = {}

    def keep(layer: int) -> Any:
        return lambda z, hook: found.__setitem__(layer, z.detach().clone())

    hooks: list[tuple[str, Any]] = [(view.hook(layer, "attn.hook_z"), keep(layer)) for layer in by_layer]
    with edits_disabled(view), view.model.hooks(fwd_hooks=hooks):
        last_log_probs(view.model, batch)
    return found


def _edits(view: ModelView, batch: PromptBatch, exchange: Exchange, clean_z: LayerTensors) -> list[Edit]:
    """Return edits of full passes over the batch that make an exchange."""
    heads = {layer: list(some) for layer, some in exchange.heads.items()}

    def exchange_inputs(attention: AttentionState, heads: list[int], layer: int) -> None:
        indices = torch.tensor(attention.indices_of(heads), device=attention.v.device)
        groups = [view.kv_head(head) for head in heads]
        inputs = attention.inputs
        assert inputs is not None
        attention.rescored.update(indices.tolist())

        def replaced(x: Tensor, tokens: TokenTensors | None) -> Tensor:
            if tokens is None:
                return x
            positions, by_layer = tokens
            rows, slots = (positions >= 0).nonzero(as_tuple=True)
            x = x.clone()
            at = rows[:, None], positions[rows, slots][:, None].to(x.device), indices
            x[at] = by_layer[layer][rows, slots][:, groups].to(x)
            return x

        inputs.k, attention.v = replaced(inputs.k, exchange.k), replaced(attention.v, exchange.v)
        if exchange.q is not None:
            inputs.q = inputs.q.clone()
            rows = torch.arange(len(inputs.q), device=inputs.q.device)[:, None]
            at = rows, attention.last.to(inputs.q.device)[:, None], indices
            inputs.q[at] = exchange.q[layer][:, heads].to(inputs.q)

    def restore_z(z: Tensor, heads: list[int], layer: int, last: Tensor) -> None:
        earlier = (torch.arange(z.shape[1], device=z.device) != last[:, None])[..., None, None]
        z[:, :, heads] = torch.where(earlier, clean_z[layer][:, :, heads].to(z), z[:, :, heads])

    return [Edit(Stage.inputs, heads, exchange_inputs, batch), Edit(Stage.z, heads, restore_z, batch)]
