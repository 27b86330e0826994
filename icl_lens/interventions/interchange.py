"""Exchange queries, keys and values of heads at the last position for those of donor prompts.

1. Each donor batch runs once; the queries at its last positions, and the keys and values at its labels, are recorded.
2. Each exchange of a set of heads re-runs one token per prompt from the set's first layer (see `prefix_cache`): the
   set's heads use donors' queries, keys or values, several of them jointly if the exchange says so. All other heads
   run as usual on what has changed before them.

Queries and keys are exchanged before rotation, label by label, so that donors may differ in length. At all other
positions, the heads keep their own output. Source: method of interchange interventions, Geiger et al. (arXiv
2106.02997).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.activations import last_log_probs
from icl_lens.interventions.edit_checks import checked_heads
from icl_lens.interventions.edited_scores import PASS_TOKENS, read_labels, score_passes, score_rows
from icl_lens.interventions.editor import AttentionState, Edit, Stage, editing, edits_disabled, group_by_layer
from icl_lens.interventions.kv_cache import per_kv_head
from icl_lens.interventions.pattern import LayerValues, recording_hooks
from icl_lens.interventions.prefix_cache import Exchange, RowEdits
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

Part = Literal["q", "k", "v"]
PARTS: tuple[Part, ...] = get_args(Part)
LayerTensors = dict[int, Tensor]
"""Layer -> one tensor."""


@dataclass(frozen=True, eq=False)
class Donor:
    """Prompts whose queries, keys or values others take: one prompt per row or, with `rows`, one per label of a row."""

    batch: PromptBatch
    rows: Int[Tensor, "prompt demo"] | None = None
    """The row of `batch` that ends at each label of each prompt; -1 where a prompt keeps its own key and value."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """What heads of some layers have at a donor's last positions (queries) and labels (keys and values)."""

    q: LayerTensors = field(default_factory=dict)
    """Layer -> [prompt head d_head], before rotation."""
    k: LayerTensors = field(default_factory=dict)
    """Layer -> [prompt demo kv_head d_head], before rotation."""
    v: LayerTensors = field(default_factory=dict)
    is_kept: Bool[Tensor, "prompt demo"] | None = None
    """Labels at which prompts keep their own keys and values; None for no label."""
    log_probs: Float[Tensor, "prompt label"] | None = None
    """The donors' own log-probabilities of the labels, nats; None for donors that end at a label."""


@dataclass(frozen=True, eq=False)
class Interchange:
    """What some heads take from donors at the last position; None for what they keep."""

    heads: tuple[Head, ...]
    q: Recorded | None = None
    k: Recorded | None = None
    v: Recorded | None = None

    def exchange(self, view: ModelView, batch: PromptBatch, select: "Select") -> Exchange:
        """Return the exchange for the prompts of `batch`, for which `select` selects the recorded tensors."""
        positions = batch.label_positions
        for donor in (self.k, self.v):
            if donor is not None and donor.is_kept is not None:
                positions = positions.masked_fill(select({0: donor.is_kept})[0].to(positions.device), -1)
        tensors = {part: getattr(donor, part) for part in PARTS if (donor := getattr(self, part)) is not None}
        return Exchange(
            group_by_layer(view, self.heads), positions, **{part: select(found) for part, found in tensors.items()}
        )


Select = Callable[[LayerTensors], LayerTensors]
"""Function that returns the rows of some prompts, the same object for the same argument."""


def record(view: ModelView, donor: Donor, layers: Sequence[int], parts: Iterable[Part]) -> Recorded:
    """Run donor prompts and record queries, keys or values of all heads of some layers.

    Raise InputError for families without the hooks of queries, keys and values.
    """
    batch, parts = donor.batch, tuple(parts)
    pieces: list[dict[tuple[str, int], Tensor]] = []
    # Rows of similar length share a pass, to minimize padding.
    order = batch.last.argsort(stable=True)
    for rows in order.split(max(1, PASS_TOKENS // batch.tokens.shape[1])):
        piece = batch[rows.tolist()]
        pieces.append(_record_piece(view, piece, layers, parts, ends_at_label=donor.rows is not None))
    place = order.argsort().cpu()
    found = {key: torch.cat([one[key] for one in pieces])[place] for key in pieces[0]}
    if donor.rows is not None:
        rows = donor.rows.clamp(min=0)
        found = {key: x[rows] for key, x in found.items()}
    by_part = {part: {layer: found[part, layer] for layer in layers} for part in parts}
    is_kept = None if donor.rows is None else donor.rows < 0
    return Recorded(**by_part, is_kept=is_kept, log_probs=found.get(("labels", -1)))


def _record_piece(
    view: ModelView, batch: PromptBatch, layers: Sequence[int], parts: Sequence[Part], *, ends_at_label: bool
) -> dict[tuple[str, int], Tensor]:
    """Return (part, layer) -> what is recorded of each row and, at ("labels", -1), the labels' log-probabilities."""
    values = {layer: LayerValues(view, layer) for layer in layers}
    found: dict[tuple[str, int], Tensor] = {}
    rows = torch.arange(len(batch))

    def keep(layer: int) -> Any:
        def hook_fn(z: Tensor, hook: Any) -> None:
            for part in parts:
                x = values[layer].seen[part]
                x = x if part == "q" else per_kv_head(x, view.n_kv_heads)
                if part == "q" or ends_at_label:
                    found[part, layer] = x[rows, batch.last.to(x.device)].clone()
                else:  # a missing label is a copy of the last position, which no prompt reads
                    at = batch.label_positions.to(x.device)
                    found[part, layer] = x[rows[:, None], at].clone()
            values[layer].seen.clear()

        return hook_fn

    hooks: list[tuple[str, Any]] = []
    for layer, one in values.items():
        hooks += [*recording_hooks(one, *parts), (view.hook(layer, "attn.hook_z"), keep(layer))]
    with edits_disabled(view), view.model.hooks(fwd_hooks=hooks):
        log_probs = last_log_probs(view.model, batch)
    if not ends_at_label:
        found["labels", -1] = log_probs[:, batch.label_tokens.to(log_probs.device)]
    return found


def log_probs_exchanged(
    view: ModelView, batch: PromptBatch, interchanges: Sequence[Interchange]
) -> tuple[Float[Tensor, "prompt set label"], str]:
    """Return the log-probabilities of the labels, among themselves, under each interchange; heads may be none.

    The second value is the reason why full forward passes were used instead of the prefix cache, "" if it was used.
    Raise InputError for families whose attention cannot be recomputed.
    """

    def edits_of(prompts: list[int]) -> RowEdits:
        selected: dict[int, LayerTensors] = {}

        def select(tensors: LayerTensors) -> LayerTensors:
            if id(tensors) not in selected:
                selected[id(tensors)] = {layer: x[prompts] for layer, x in tensors.items()}
            return selected[id(tensors)]

        rows = batch[prompts]
        return RowEdits.exchanging(view, [one.exchange(view, rows, select) for one in interchanges])

    def run_full_passes() -> Tensor:
        exchanges = [one.exchange(view, batch, lambda tensors: tensors) for one in interchanges]
        heads = {head for one in interchanges for head in one.heads}
        by_layer = checked_heads(view, heads, attention=True)
        clean_z = _record_z(view, batch, by_layer)
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
    )


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
    positions = exchange.positions

    def exchange_inputs(attention: AttentionState, heads: list[int], layer: int) -> None:
        indices = torch.tensor(attention.indices_of(heads), device=attention.v.device)
        groups = [view.kv_head(head) for head in heads]
        assert attention.inputs is not None
        attention.rescored.update(indices.tolist())
        if exchange.q is not None:
            q = attention.inputs.q.clone()
            rows = torch.arange(len(q), device=q.device)
            q[rows[:, None], attention.last.to(q.device)[:, None], indices] = exchange.q[layer][:, heads].to(q)
            attention.inputs.q = q
        rows, labels = (positions >= 0).nonzero(as_tuple=True)
        at = rows[:, None], positions[rows, labels][:, None], indices
        if exchange.k is not None:
            k = attention.inputs.k.clone()
            k[at] = exchange.k[layer][rows, labels][:, groups].to(k)
            attention.inputs.k = k
        if exchange.v is not None:
            attention.v = attention.v.clone()
            attention.v[at] = exchange.v[layer][rows, labels][:, groups].to(attention.v)

    def restore_z(z: Tensor, heads: list[int], layer: int, last: Tensor) -> None:
        earlier = (torch.arange(z.shape[1], device=z.device) != last[:, None])[..., None, None]
        z[:, :, heads] = torch.where(earlier, clean_z[layer][:, :, heads].to(z), z[:, :, heads])

    return [Edit(Stage.inputs, heads, exchange_inputs, batch), Edit(Stage.z, heads, restore_z, batch)]
