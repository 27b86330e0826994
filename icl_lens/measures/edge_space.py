"""All edges into some heads and FFNs (the readers), in a fixed order, and sets of them as masks.

True and false labels are one role here: a set that kept edges at true labels but not at false ones
would reveal the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.edges import EDGE_PARTS, OWN_TOKENS, Edge, EdgePart, RemovalMasks, names_before
from icl_lens.edits.edit import PARTS
from icl_lens.models.head import FFN, Component
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import ROLES
from icl_lens.prompts.roles import EDGE_ROLES, EdgeRole, indices_in_roles
from icl_lens.reading.writer_groups import layer_of

TOKEN_GROUPS = {
    "the labels": ("label",),
    "demonstrations' texts": ("text",),
    "other tokens": ("query", "last", "other"),
}
"""Roles of the tokens whose keys or values are read, by the words that name them in groups of
edges.
"""
LATER_ROLES: dict[EdgeRole, tuple[EdgeRole, ...]] = {
    "last": (),
    "text": ("query", "last"),
    "label": ("query", "last"),
}
"""Roles whose tokens come after all tokens of a role; for roles that are not listed, this is the
last token.
"""
THIRDS = ("first", "middle", "last")
CURVE_INPUTS = (
    "query",
    "keys at the labels",
    "keys at demonstrations' texts",
    "values at the labels",
)
"""The inputs whose edges are shown layer by layer."""
FFNS = "FFNs"
"""The name of what FFNs read, as an input in which edges end."""


def parts_of(reader: Component) -> tuple[EdgePart, ...]:
    """Return what a reader reads."""
    return ("mlp_in",) if isinstance(reader, FFN) else PARTS


@dataclass(frozen=True, eq=False)
class EdgeSpace:
    """Every edge from an earlier component to a head's query, to its keys or values at tokens of one
    role, or to what an FFN reads.
    """

    readers: tuple[Component, ...]
    n_layers: int
    writers: tuple[tuple[str, ...], ...]
    """Names of each reader's writers."""
    index: Int[np.ndarray, "edge 4"]
    """Reader, part, role and writer of each edge, as indices."""
    reader_at: EdgeRole = "last"
    """Role of the tokens at which the readers act."""

    @classmethod
    def of(
        cls, view: ModelView, readers: Sequence[Component], reader_at: EdgeRole = "last"
    ) -> "EdgeSpace":
        """Return all edges into the readers, without those from tokens that never come before
        them.
        """
        writers = tuple(names_before(view, reader) for reader in readers)
        later_roles = LATER_ROLES.get(reader_at, ("last",))
        roles = [role for role, name in enumerate(EDGE_ROLES) if name not in later_roles]
        rows = []
        for reader, names in enumerate(writers):
            for part in parts_of(readers[reader]):
                is_own = part in OWN_TOKENS  # read where the reader acts
                for role in [EDGE_ROLES.index(reader_at)] if is_own else roles:
                    place = reader, EDGE_PARTS.index(part), role
                    rows += [(*place, writer) for writer in range(len(names))]
        index = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return cls(tuple(readers), view.n_layers, writers, index, reader_at)

    def __len__(self) -> int:
        return len(self.index)

    def edge(self, number: int) -> Edge:
        """Return an edge by its position in the order."""
        reader, part, role, writer = self.index[number]
        return Edge(
            self.readers[reader],
            EDGE_PARTS[part],
            self.writers[reader][writer],
            EDGE_ROLES[role],
            self.reader_at,
        )

    @cached_property
    def writer_layer(self) -> Int[np.ndarray, " edge"]:
        """The layer of each edge's writer; -1 for embeddings."""
        all_writers = max(self.writers, key=len)  # those of other readers are the first of these
        return np.array([layer_of(name) for name in all_writers])[self.index[:, 3]]

    @cached_property
    def stratum(self) -> Int[np.ndarray, " edge"]:
        """Number of each edge's stratum: edges with the same part, role and layer of the writer."""
        keys = np.column_stack([self.index[:, 1:3], self.writer_layer])
        return np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)

    def flatten(
        self, values: dict[Component, Float[Tensor, "batch part edge_role _"]]
    ) -> Float[Tensor, "batch edge"]:
        """Return the value of each edge; the last axis of `values` is each reader's writers."""
        reader, part, role, writer = torch.from_numpy(self.index).unbind(1)
        pieces = []
        for number, component in enumerate(self.readers):
            is_of_reader = reader == number
            index = part[is_of_reader], role[is_of_reader], writer[is_of_reader]
            pieces.append(values[component].cpu()[:, *index])
        return torch.cat(pieces, dim=1)

    def removal_masks(self, removed: Bool[np.ndarray, "set edge"]) -> RemovalMasks:
        """Return sets of removed edges in the form that `score_without_edges` needs."""
        masks = {}
        for number, (component, names) in enumerate(zip(self.readers, self.writers, strict=True)):
            mask = np.zeros((len(removed), len(EDGE_PARTS), len(ROLES), len(names)), dtype=bool)
            for role, name in enumerate(EDGE_ROLES):
                edges = (self.index[:, 0] == number) & (self.index[:, 2] == role)
                for i in indices_in_roles(name):
                    mask[:, self.index[edges, 1], i, self.index[edges, 3]] = removed[:, edges]
            masks[component, self.reader_at] = torch.from_numpy(mask)
        return masks

    def random_like(
        self, ranked: Int[np.ndarray, " edge"], sizes: Sequence[int], seed: int
    ) -> list[np.ndarray]:
        """For each size, return random edges, as many of every stratum as in the first `size` edges
        of `ranked`.

        Smaller sets are subsets of larger ones, so they follow one random ranking.
        """
        order = np.random.default_rng(seed).permutation(len(self))
        order = order[np.argsort(self.stratum[order], kind="stable")]
        stratum_sizes = np.bincount(self.stratum)
        rank_in_stratum = np.empty(len(self), dtype=np.int64)  # random
        rank_in_stratum[order] = np.concatenate([np.arange(n) for n in stratum_sizes])
        sets = []
        for size in sizes:
            wanted = np.bincount(self.stratum[ranked[:size]], minlength=len(stratum_sizes))
            sets.append(np.flatnonzero(rank_in_stratum < wanted[self.stratum]))
        return sets

    @cached_property
    def edges_by_input(self) -> dict[str, Bool[np.ndarray, " edge"]]:
        """Edges by the input that they end in, such as "query" and "keys at the labels"."""
        edges = {"query": self.index[:, 1] == EDGE_PARTS.index("q")}
        for part, name in (("k", "keys"), ("v", "values")):
            for tokens, roles in TOKEN_GROUPS.items():
                has_role = np.isin(self.index[:, 2], [EDGE_ROLES.index(role) for role in roles])
                is_of_part = self.index[:, 1] == EDGE_PARTS.index(part)
                edges[f"{name} at {tokens}"] = is_of_part & has_role
        edges[FFNS] = self.index[:, 1] == EDGE_PARTS.index("mlp_in")
        return edges

    @cached_property
    def groups(self) -> dict[str, Bool[np.ndarray, " edge"]]:
        """Groups of edges by name, such as "first third → query", without empty ones.

        Embeddings are in the first third of the layers.
        """
        third = np.clip(3 * self.writer_layer // self.n_layers, 0, 2)
        groups = {}
        for end, ends_here in self.edges_by_input.items():
            for number, name in enumerate(THIRDS):
                in_group = (third == number) & ends_here
                if in_group.any():
                    groups[f"{name} third → {end}"] = in_group
        return groups

    def has_control(self, group: str) -> bool:
        """Return whether a group may be compared with the same group into random heads."""
        return not bool((self.groups[group] & self.edges_by_input[FFNS]).any())

    @cached_property
    def layers(self) -> dict[tuple[str, int], Bool[np.ndarray, " edge"]]:
        """Edges by the input that they end in and by the writer's layer, for `CURVE_INPUTS` and FFNs,
        without inputs that no edge ends in.

        Embeddings have layer −1.
        """
        layers = {}
        for end in (*CURVE_INPUTS, FFNS):
            if not self.edges_by_input[end].any():
                continue
            for layer in np.unique(self.writer_layer).tolist():
                layers[end, layer] = self.edges_by_input[end] & (self.writer_layer == layer)
        return layers
