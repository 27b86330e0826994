"""Exchange queries, keys and values of heads at the last position for those of donor prompts.

1. `interchange_donors` records the queries at the last positions of donors, and the keys and values at
   their labels.
2. Each exchange of a set of heads re-runs one token per prompt from the set's first layer (see
   `one_token_rows`): the set's heads use donors' queries, keys or values, several of them jointly if the
   exchange says so. All other heads run as usual on what has changed before them.

Queries and keys are exchanged before rotation, label by label, so that donors may differ in length.
At all other positions, the heads keep their own output. Source: method of interchange
interventions, Geiger et al. (arXiv 2106.02997).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.edit import Attention, Edit, Part, Stage
from icl_lens.edits.one_token_rows.layer_attention import LayerRows, per_kv_head
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

LayerTensors = dict[int, Tensor]
"""Layer -> one tensor."""


@dataclass(frozen=True, eq=False)
class DonorRecording:
    """What heads of some layers have at a donor's last positions (queries) and label tokens (keys
    and values).
    """

    is_kept: Bool[Tensor, "prompt token"]
    """Tokens at which prompts keep their own keys and values."""
    q: LayerTensors = field(default_factory=dict)
    """Layer -> [prompt head d_head], before rotation."""
    k: LayerTensors = field(default_factory=dict)
    """Layer -> [prompt token kv_head d_head], before rotation."""
    v: LayerTensors = field(default_factory=dict)
    log_probs: Float[Tensor, "prompt label"] | None = None
    """The donors' own log-probabilities of the labels, nats; None for donors that end at labels."""


@dataclass(frozen=True, eq=False)
class Interchange(Edit):
    """What some heads take from donors at the last position; None for what they keep."""

    heads: tuple[Head, ...]
    tokens: Int[Tensor, "prompt token"]
    """Positions of the label tokens whose keys and values are exchanged, -1 for none."""
    q: DonorRecording | None = None
    k: DonorRecording | None = None
    v: DonorRecording | None = None
    _kv_heads: tuple[int, ...] = field(default=(), repr=False)
    """For each head of a layer, its key-value head."""

    stages = (Stage.inputs,)
    description = "with exchanged queries, keys or values"
    needs_batch = True
    positions = "last"

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        kv_heads = tuple(map(view.kv_head, range(view.n_heads)))
        return [replace(edit, _kv_heads=kv_heads) for edit in edits]

    def exchanged(
        self, part: Part, layer: int, prompt: Int[Tensor, " row"]
    ) -> tuple[Int[Tensor, "row token"], Float[Tensor, "row token kv_head d_head"]]:
        """Return the positions of the exchanged tokens, -1 for none, and the donor's keys or values
        for them.
        """
        donor = self.k if part == "k" else self.v
        assert donor is not None
        by_layer = donor.k if part == "k" else donor.v
        return self.tokens[prompt].masked_fill(donor.is_kept[prompt], -1), by_layer[layer][prompt]

    def write_attention(self, attention: Attention, heads: list[int], layer: int) -> None:
        inputs, prompt = attention.inputs, attention.prompt.cpu()
        assert inputs is not None
        indices = torch.tensor(attention.indices_of(heads), device=attention.v.device)
        groups = [self._kv_heads[head] for head in heads]

        def replaced(x: Tensor, part: Part) -> Tensor:
            tokens, values = self.exchanged(part, layer, prompt)
            rows, slots = (tokens >= 0).nonzero(as_tuple=True)
            x = x.clone()
            at = rows[:, None], tokens[rows, slots][:, None].to(x.device), indices
            x[at] = values[rows, slots][:, groups].to(x)
            return x

        if self.k is not None:
            inputs.k = replaced(inputs.k, "k")
        if self.v is not None:
            attention.v = replaced(attention.v, "v")
        if self.q is not None:
            inputs.q = inputs.q.clone()
            rows, last = attention.last_queries
            inputs.q[rows[:, None], last[:, None], indices] = self.q.q[layer][prompt][:, heads].to(
                inputs.q
            )

    @staticmethod
    def write_rows(
        z: Float[Tensor, "batch row head d_head"],
        members: Sequence[tuple[int, "Interchange", list[int]]],
        layer: int,
        rows: LayerRows,
    ) -> None:
        """Write z of all rows with exchanges; rows in which a head has the same keys and values
        attend together.
        """
        n_heads, n_groups = z.shape[2], rows.cache.k.shape[1]
        groups: dict[tuple[int, int, int], list[tuple[int, Interchange]]] = {}
        for row, edit, heads in members:
            for head in heads:
                groups.setdefault((head, id(edit.k), id(edit.v)), []).append((row, edit))
        for (head, _, _), rows_and_edits in groups.items():
            _, first = rows_and_edits[0]
            group = first._kv_heads[head]
            cache = rows.cache.of_head(head, n_heads)
            for part in ("k", "v"):
                if getattr(first, part) is not None:
                    tokens, values = first.exchanged(part, layer, rows.prompt)
                    cache = cache.with_tokens(
                        tokens.to(z.device), **{part: values[:, :, group, None].to(z.device)}
                    )
            row_numbers = [row for row, _ in rows_and_edits]
            q = rows.q[:, row_numbers, head].clone()
            for place, (_, edit) in enumerate(rows_and_edits):
                if edit.q is not None:
                    q[:, place] = edit.q.q[layer][rows.prompt][:, head].to(q)
            key = per_kv_head(rows.k, n_groups)[:, row_numbers, group, None]
            value = per_kv_head(rows.v, n_groups)[:, row_numbers, group, None]
            z[:, row_numbers, head] = cache.attend(q[:, :, None], key, value)[:, :, 0].to(z)
