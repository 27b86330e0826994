"""All edges into some heads, in a fixed order, and sets of them as masks.

An edge from labels is from labels of either kind: a set of edges that keeps those that equal the answer, and not the
others, would be given the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.writers import writer_names
from icl_lens.attribution.writer_groups import layer_of
from icl_lens.interventions.edge_inputs import PARTS
from icl_lens.interventions.head_edges import Edge, Removed
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.roles import EDGE_ROLES, ROLES, members

PLACES = {
    "the labels": ("label",),
    "demonstrations' texts": ("text",),
    "other tokens": ("query", "last", "other"),
}
"""Where keys and values are read, in groups of edges."""
DEPTHS = ("early", "late")
"""Senders of the first half of the layers, embeddings included, and those of the second half."""


@dataclass(frozen=True, eq=False)
class EdgeSpace:
    """Every edge into each receiver: from each earlier component to its query, and to its keys and values by role."""

    receivers: tuple[Head, ...]
    n_layers: int
    senders: tuple[tuple[str, ...], ...]
    """Names of each receiver's senders."""
    index: Int[np.ndarray, "edge 4"]
    """Each edge's receiver, part, role and sender, as indices."""

    @classmethod
    def of(cls, view: ModelView, receivers: Sequence[Head]) -> "EdgeSpace":
        """Return the edges of a model into receivers, without those that the model's layers rule out."""
        senders = tuple(writer_names(view, head.layer)[:-1] for head in receivers)
        last = EDGE_ROLES.index("last")
        rows = [
            (receiver, part, role, sender)
            for receiver, names in enumerate(senders)
            for part, name in enumerate(PARTS)
            for role in ([last] if name == "q" else range(len(EDGE_ROLES)))
            for sender in range(len(names))
        ]
        return cls(tuple(receivers), view.n_layers, senders, np.array(rows, dtype=np.int64).reshape(-1, 4))

    def __len__(self) -> int:
        return len(self.index)

    def edge(self, number: int) -> Edge:
        """Return one edge by its number."""
        receiver, part, role, sender = self.index[number]
        return Edge(self.receivers[receiver], PARTS[part], self.senders[receiver][sender], EDGE_ROLES[role])

    @cached_property
    def sender_layer(self) -> Int[np.ndarray, " edge"]:
        """The layer of each edge's sender; -1 for embeddings."""
        longest = max(self.senders, key=len)
        return np.array([layer_of(name) for name in longest])[self.index[:, 3]]

    @cached_property
    def stratum(self) -> Int[np.ndarray, " edge"]:
        """A number for each edge's part, role and sender's layer, within which random sets are drawn."""
        keys = np.column_stack([self.index[:, 1:3], self.sender_layer])
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)

    def flat(self, values: dict[Head, Float[Tensor, "batch part edge_role _"]]) -> Float[Tensor, "batch edge"]:
        """Return values by receiver, part, role and sender in the order of the edges."""
        receiver, part, role, sender = torch.from_numpy(self.index).unbind(1)
        pieces = []
        for number, head in enumerate(self.receivers):
            own = receiver == number
            pieces.append(values[head].cpu()[:, part[own], role[own], sender[own]])
        return torch.cat(pieces, dim=1)

    def removing(self, chosen: Bool[np.ndarray, "set edge"]) -> Removed:
        """Return masks that remove each set's chosen edges."""
        removed = {}
        for number, (head, names) in enumerate(zip(self.receivers, self.senders, strict=True)):
            own = self.index[:, 0] == number
            mask = np.zeros((len(chosen), len(PARTS), len(ROLES), len(names)), dtype=bool)
            for place, role in enumerate(EDGE_ROLES):
                here = own & (self.index[:, 2] == place)
                for member in members(role):
                    mask[:, self.index[here, 1], member, self.index[here, 3]] = chosen[:, here]
            removed[head] = torch.from_numpy(mask)
        return removed

    def random_like(self, ranked: Int[np.ndarray, " edge"], sizes: Sequence[int], seed: int) -> list[np.ndarray]:
        """Return a random set for the first `sizes` of `ranked` edges, each with as many edges of every stratum.

        They are nested, so they make one random ranking. A stratum is a part, a role and the layer of the sender;
        receivers and senders within it are random.
        """
        order = np.random.default_rng(seed).permutation(len(self))
        order = order[np.argsort(self.stratum[order], kind="stable")]
        counts = np.bincount(self.stratum)
        rank = np.empty(len(self), dtype=np.int64)
        rank[order] = np.concatenate([np.arange(count) for count in counts])
        return [
            np.flatnonzero(rank < np.bincount(self.stratum[ranked[:size]], minlength=len(counts))[self.stratum])
            for size in sizes
        ]

    @cached_property
    def groups(self) -> dict[str, Bool[np.ndarray, " edge"]]:
        """Edges by the depth of the sender, the part, and where keys and values are read ("early → keys at …")."""
        is_early = 2 * self.sender_layer < self.n_layers
        of_depth = dict(zip(DEPTHS, (is_early, ~is_early), strict=True))
        groups = {f"{depth} → query": own & (self.index[:, 1] == PARTS.index("q")) for depth, own in of_depth.items()}
        for part, name in (("k", "keys"), ("v", "values")):
            for place, roles in PLACES.items():
                here = np.isin(self.index[:, 2], [EDGE_ROLES.index(role) for role in roles])
                here &= self.index[:, 1] == PARTS.index(part)
                groups |= {f"{depth} → {name} at {place}": own & here for depth, own in of_depth.items()}
        return {name: chosen for name, chosen in groups.items() if chosen.any()}
