"""Edges: what earlier components (*writers*) wrote, as read by one head or FFN (the *reader*).

1. `reader_at` says at which tokens the reader acts: the last one, or those of a role, such as
   labels. These are a head's queries. Its keys and values are at the tokens that an edge's `role`
   names, among those up to each query. An FFN reads at the tokens at which it acts.
2. In a *chain*, the writer is itself an edge, or several into one component: "embed → L2H0.v →
   L5H0.q" is what L5H0 reads of what L2H0 writes because its values read the embedding.
3. `removal_masks` says which writers sets of edges remove from which reader; `edge_removal` removes
   them.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.models.head import (
    FFN,
    AnyComponent,
    Component,
    as_component,
)
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import ROLES
from icl_lens.prompts.roles import EdgeRole, indices_in_roles
from icl_lens.reading.writers import (
    names_before_ffn,
    writer_names,
)

EdgePart = Literal["q", "k", "v", "mlp_in"]
"""What a reader reads: a head its query ("q"), keys ("k") and values ("v"), an FFN its input."""
EDGE_PARTS: tuple[EdgePart, ...] = get_args(EdgePart)
OWN_TOKENS: tuple[EdgePart, ...] = ("q", "mlp_in")
"""What a reader reads at the tokens at which it acts."""


@dataclass(frozen=True, order=True)
class Edge:
    """What a writer adds to a head's query, to its keys or values at tokens of one role, or to an
    FFN's input.

    Example:
        >>> print(il.Edge("L5H1", "k", "L2H0", "true label"))
        L2H0 → L5H1.k (true label)
        >>> print(il.Edge("L2H0", "v", "embed", "text", reader_at="label"))
        embed → L2H0.v (text) at label
        >>> written_at_label = il.Edge("L2H0", "v", "embed", "text", reader_at="label")
        >>> print(il.Edge("L5H1", "k", written_at_label, "label"))
        embed → L2H0.v (text) at label → L5H1.k (label)
        >>> print(il.Edge("F3", "mlp_in", "L2H0", reader_at="label"))
        L2H0 → F3 at label
    """

    reader: AnyComponent
    """A head ("L5H1") or an FFN ("F3")."""
    part: EdgePart
    """The query ("q"), keys ("k") or values ("v") of a head, or what an FFN reads ("mlp_in")."""
    writer: "str | Edge | tuple[Edge, ...]"
    """A head ("L2H0"), an FFN ("F3") or an embedding ("embed", "pos_embed"). With another edge, or
    several into one component, the edge is a *chain*: from what this component writes because of
    them."""
    role: EdgeRole = "last"
    """Role of the tokens whose keys or values are read (see `batch.token_roles`; "label" for both
    kinds of labels). A query and an FFN's input are read where the reader is, so that their role is
    `reader_at`."""
    reader_at: EdgeRole = "last"
    """Role of the tokens at which the reader acts: those that attend, and whose residual stream it
    writes to.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "reader", as_component(self.reader))
        if not isinstance(self.writer, str):
            object.__setattr__(self, "writer", chain_of(self.writer))
        if self.part in OWN_TOKENS and self.role == "last":
            object.__setattr__(self, "role", self.reader_at)

    def __str__(self) -> str:
        part = "" if self.part == "mlp_in" else f".{self.part}"
        role = "" if self.part in OWN_TOKENS else f" ({self.role})"
        where = "" if self.reader_at == "last" else f" at {self.reader_at}"
        return f"{writer_text(self.writer)} → {self.reader}{part}{role}{where}"


Chain = tuple[Edge, ...]
"""Edges into one component at the same tokens, which are together the writer of another edge."""
Writer = str | Edge | Chain
"""A component by its name, or a chain; an edge has its chain as a tuple."""


def chain_of(edges: object) -> Chain:
    """Return one or several edges as a tuple; raise InputError unless they end in one component at
    the same tokens.
    """
    chain: tuple[Any, ...] = ()
    if isinstance(edges, Edge):
        chain = (edges,)
    elif isinstance(edges, Iterable):
        chain = tuple(edges)
    if not chain or not all(isinstance(edge, Edge) for edge in chain):
        raise InputError(
            f"writer must be a name such as 'L2H0', an edge or edges, got {short_repr(edges)}"
        )
    if len({(edge.reader, edge.reader_at) for edge in chain}) > 1:
        raise InputError(
            "writer must have edges into one head or FFN at the same tokens, got "
            f"{', '.join(map(str, chain))}"
        )
    return chain


def writer_text(writer: Writer) -> str:
    """Return a writer in words, such as "L2H0", "embed → L2H0.v (text) at label" or "12 edges →
    L2H0 at label".
    """
    if isinstance(writer, str):
        return writer
    chain = chain_of(writer)
    edge = chain[0]
    if len(chain) == 1:
        return str(edge)
    where = "" if edge.reader_at == "last" else f" at {edge.reader_at}"
    return f"{len(chain)} edges → {edge.reader}{where}"


RemovalMasks = dict[tuple[Component, EdgeRole], Bool[Tensor, "set part role _"]]
"""For each reader and role of the tokens at which it acts, the writers (last axis) that each set of
edges removes from each of `EDGE_PARTS`. The roles at which one reader acts have no tokens in
common."""


def removal_masks(
    view: ModelView, edge_sets: Sequence[Iterable[Edge]]
) -> tuple[RemovalMasks, tuple[Chain, ...]]:
    """Return sets of edges as masks, whose last axis ends with chains, and these chains.

    Raise InputError for edges that the model does not have.
    """
    sets = [list(edges) for edges in edge_sets]
    for edge in itertools.chain.from_iterable(sets):
        check_edge(view, edge)
    sets = list(map(joined_chains, sets))
    writers = [edge.writer for edge in itertools.chain.from_iterable(sets)]
    chains = tuple(dict.fromkeys(writer for writer in writers if isinstance(writer, tuple)))
    removed: RemovalMasks = {}
    for number, edges in enumerate(sets):
        for edge in edges:
            reader = view.check_component(edge.reader)
            writer = writer_index(view, edge.writer, reader, chains)
            part = EDGE_PARTS.index(edge.part)
            n_writers = len(names_before(view, reader)) + len(chains)
            for at, role in role_pairs(edge):
                key = reader, ROLES[at]
                if key not in removed:
                    shape = len(sets), len(EDGE_PARTS), len(ROLES), n_writers
                    removed[key] = torch.zeros(shape, dtype=torch.bool)
                removed[key][number, part, role, writer] = True
    return removed, chains


def check_edge(view: ModelView, edge: Edge) -> None:
    """Raise InputError unless the model has the edge's reader and writer, the writer writes before
    the reader reads, and part and roles fit both. The edges of a chain are checked one by one when
    the chain is.
    """
    check_choice("part", edge.part, EDGE_PARTS)
    for name in ("role", "reader_at"):
        check_choice(name, getattr(edge, name), (*ROLES, "label"))
    reader = view.check_component(edge.reader)
    check_part(edge.part, reader)
    chain = edge.writer if isinstance(edge.writer, tuple) else None
    if writer_index(view, edge.writer, reader, (chain,) if chain else ()) is None:
        raise InputError(
            "writer must be a head, FFN, embedding or edge that writes before "
            f"{reader} reads, got {short_repr(writer_text(edge.writer))}"
        )
    if chain:
        chain_role = chain[0].reader_at
        if set(indices_in_roles(edge.role)).isdisjoint(indices_in_roles(chain_role)):
            raise InputError(
                f"role must be {chain_role!r} like reader_at of the writer, got {edge.role!r} in "
                f"'{edge}'"
            )
    if edge.part in OWN_TOKENS and edge.role != edge.reader_at:
        what = "a query" if edge.part == "q" else "an FFN"
        raise InputError(
            f"role must be {edge.reader_at!r} like reader_at for {what}, got {edge.role!r}"
        )


def check_part(part: EdgePart, reader: Component) -> None:
    """Raise InputError unless a reader has this part."""
    if (part == "mlp_in") != isinstance(reader, FFN):
        expected = (
            "'mlp_in' for an FFN" if isinstance(reader, FFN) else "'q', 'k' or 'v' for a head"
        )
        raise InputError(f"part must be {expected}, got {part!r} for {reader}")


def role_pairs(edge: Edge) -> list[tuple[int, int]]:
    """Return `reader_at` and `role` as indices into `ROLES`, for each kind of labels."""
    places = indices_in_roles(edge.reader_at)
    if edge.part in OWN_TOKENS:
        return [(place, place) for place in places]
    return list(itertools.product(places, indices_in_roles(edge.role)))


def joined_chains(edges: list[Edge]) -> list[Edge]:
    """Return edges of which no two remove the same: chains through one component as one, or none if
    the component is removed.
    """
    joined = []
    whole_writers = set()
    chain_edges: dict[tuple[AnyComponent, EdgePart, int, int, AnyComponent], list[Edge]] = {}
    for edge in edges:
        if isinstance(edge.writer, str):
            joined.append(edge)
            for at, role in role_pairs(edge):
                whole_writers.add((edge.reader, edge.part, at, role, edge.writer))
            continue
        chain = chain_of(edge.writer)
        for at, role in role_pairs(edge):
            key = (edge.reader, edge.part, at, role, chain[0].reader)
            members = chain_edges.setdefault(key, [])
            members += [member for member in chain if role in indices_in_roles(member.reader_at)]
    for (reader, part, at, role, middle), members in chain_edges.items():
        if members and (reader, part, at, role, str(middle)) not in whole_writers:
            members = _at_one_role(members, ROLES[role])
            joined.append(Edge(reader, part, tuple(dict.fromkeys(members)), ROLES[role], ROLES[at]))
    return joined


def _at_one_role(edges: list[Edge], role: EdgeRole) -> list[Edge]:
    """Return edges into one component with the same `reader_at`: if some act at "label" and others
    at one kind of labels, all act at this kind, `role`.
    """
    if len({edge.reader_at for edge in edges}) == 1:
        return edges
    at_role = []
    for edge in edges:
        read = role if edge.part in OWN_TOKENS else edge.role
        at_role.append(replace(edge, reader_at=role, role=read))
    return at_role


def names_before(view: ModelView, reader: Component) -> tuple[str, ...]:
    """Return the writers of what a head or an FFN reads, without biases."""
    if isinstance(reader, FFN):
        return names_before_ffn(view, reader.layer)
    return writer_names(view, reader.layer)[:-1]


def writer_index(
    view: ModelView, writer: Writer, reader: Component, chains: Sequence[Chain]
) -> int | None:
    """Return where a writer is on a reader's axis of writers, which ends with chains; None if it is
    not before it.
    """
    names = names_before(view, reader)
    if isinstance(writer, str):
        return names.index(writer) if writer in names else None
    chain = chain_of(writer)
    if str(view.check_component(chain[0].reader)) not in names:
        return None
    return len(names) + chains.index(chain)


def layers_of(components: Iterable[Component], chains: Sequence[Chain] = ()) -> set[int]:
    """Return the layers whose inputs are rebuilt: those of readers, and of components in chains."""
    layers = {component.layer for component in components}
    for edge in itertools.chain.from_iterable(chains):
        inner = (edge.writer,) if isinstance(edge.writer, tuple) else ()
        layers |= layers_of([as_component(edge.reader)], inner)
    return layers


def roles_of(
    view: ModelView, removed: RemovalMasks, chains: Sequence[Chain] = ()
) -> list[EdgeRole]:
    """Return the roles of the tokens whose writers are read: those of removed edges, at which
    readers act, and the same of chains.
    """
    roles: set[EdgeRole] = {"last"}
    for (_, reader_at), mask in removed.items():
        roles.add(reader_at)
        is_removed = mask.any(3).flatten(0, 1).any(0)
        roles |= {ROLES[number] for number in is_removed.nonzero()[:, 0].tolist()}
    if chains:
        roles.update(roles_of(view, *removal_masks(view, chains)))
    return sorted(roles)
