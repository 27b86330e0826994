"""Remove edges between heads: what earlier components (*writers*) wrote, as read by one head (the
*reader*).

1. One pass over the prompts records what every writer wrote, and each head's queries, keys and
   values.
2. `reader_at` says at which tokens the reader acts: the last one, or those of a role, such as
   labels. These are its queries. Its keys and values are at the tokens that an edge's `role` names,
   among those up to each query.
3. The reader's queries, keys or values are rebuilt without some writers, and its z is computed from
   them, see `reader`.
4. This z replaces the reader's own at the tokens of `reader_at`; elsewhere, the reader keeps its z.
5. All later components run as usual, at all positions from there on: only the last position changes
   if the reader acts there, and otherwise also every later token that attends to what it wrote.
6. In a *chain*, the writer is itself an edge, or several into one head. This head's z without them
   is rebuilt as in 3. The difference from its own z is, after W_O, what the head writes because of
   them: the last reader of the chain, and nothing else, reads the residual stream without it.
   Nothing is removed twice: chains through one head that are read as the same queries, keys or
   values are one chain, and part of the head if this is removed as a whole.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations, capture
from icl_lens.activations.writers import vector_bytes, writer_names
from icl_lens.attribution.head_projection import require_writers
from icl_lens.edits.edit import PARTS, Edit, Part, Places
from icl_lens.edits.reader import Means, Reader
from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.head import AnyHead, Head, as_head
from icl_lens.models.memory import WRITER_BYTES
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import ROLES, PromptBatch, check_batch
from icl_lens.prompts.roles import EdgeRole, indices_in_roles, role_masks
from icl_lens.prompts.token_ids import TokenPositions, padded_ids


@dataclass(frozen=True, order=True)
class Edge:
    """What a writer adds to a reader's query, or to its keys or values at tokens of one role.

    Example:
        >>> print(il.Edge("L5H1", "k", "L2H0", "true label"))
        L2H0 → L5H1.k (true label)
        >>> print(il.Edge("L2H0", "v", "embed", "text", reader_at="label"))
        embed → L2H0.v (text) at label
        >>> written_at_label = il.Edge("L2H0", "v", "embed", "text", reader_at="label")
        >>> print(il.Edge("L5H1", "k", written_at_label, "label"))
        embed → L2H0.v (text) at label → L5H1.k (label)
    """

    reader: AnyHead
    part: Part
    """The query ("q"), keys ("k") or values ("v")."""
    writer: "str | Edge | tuple[Edge, ...]"
    """A head ("L2H0"), an FFN ("F3") or an embedding ("embed", "pos_embed"). With another edge, or
    several into one head, the edge is a *chain*: from what this head writes because of them."""
    role: EdgeRole = "last"
    """Role of the tokens whose keys or values are read (see `batch.token_roles`; "label" for both
    kinds of labels). A query is read where the reader is, so its role is `reader_at`."""
    reader_at: EdgeRole = "last"
    """Role of the tokens at which the reader acts: those that attend, and whose residual stream it
    writes to.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "reader", as_head(self.reader))
        if not isinstance(self.writer, str):
            object.__setattr__(self, "writer", chain_of(self.writer))
        if self.part == "q" and self.role == "last":
            object.__setattr__(self, "role", self.reader_at)

    def __str__(self) -> str:
        role = "" if self.part == "q" else f" ({self.role})"
        where = "" if self.reader_at == "last" else f" at {self.reader_at}"
        return f"{writer_text(self.writer)} → {self.reader}.{self.part}{role}{where}"


Chain = tuple[Edge, ...]
"""Edges into one head at the same tokens, which are together the writer of another edge."""
Writer = str | Edge | Chain
"""A component by its name, or a chain; an edge has its chain as a tuple."""


def chain_of(edges: object) -> Chain:
    """Return one or several edges as a tuple; raise InputError unless they end in one head at the
    same tokens.
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
            "writer must have edges into one head at the same tokens, got "
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


@dataclass(frozen=True, eq=False)
class ReplaceZ(Edit):
    """Another z of heads at some positions, for each prompt."""

    heads: Iterable[AnyHead]
    z: Float[Tensor, "batch z d_head"]
    back: Int[Tensor, "batch z"]
    """Where each z belongs, in tokens before the prompt's last one; -1 for nowhere."""
    index: Mapping[Head, Sequence[int]]
    """Where each head's z are in `z`."""

    what = "with other inputs"
    needs_batch = True
    at_prompt_end = True

    def is_only_last(self, batch: PromptBatch) -> bool:
        tokens_back = [self.back[:, indices] for indices in self.index.values()]
        return not any(bool((back > 0).any()) for back in tokens_back)

    def write_z(self, z: Tensor, at: Places, layer: int) -> None:
        pairs = []
        for entry, head in enumerate(at.head.tolist()):
            pairs += [(entry, number) for number in self.index[Head(layer, head)]]
        entry, number = torch.tensor(pairs, device=self.z.device).reshape(-1, 2).T
        of_entries = (at.row, at.head, at.prompt, at.last)
        row, head, prompt, last = (x.to(self.z.device)[entry] for x in of_entries)
        back = self.back[prompt, number]
        is_place = back >= 0
        row, position, head = row[is_place], (last - back)[is_place], head[is_place]
        new_z = self.z[prompt, number].to(z)[is_place.to(z.device)]
        z[row.to(z.device), position.to(z.device), head.to(z.device)] = new_z


@dataclass(frozen=True, eq=False)
class WithoutEdges(Edit):
    """All of some edges removed jointly: what writers add to readers' queries, keys or values.

    Each reader's z, at the tokens where an edge has it act, is rebuilt from a pass without edits,
    so a change in one reader does not reach another. With `reference` prompts, removed writers are
    replaced by their means over tokens of the same role instead of zero. It needs the prompts that
    are run, as `Reweight` does. For one edge, the drop equals that of `head_to_head_effects`. Raise
    InputError for unknown heads or writers, and writers that are not in a layer before the reader.

    Example:
        >>> edges = [il.Edge("L5H0", "k", "L2H0", "true label"), il.Edge("L5H0", "q", "F3")]
        >>> il.score(model, batch, [[], [il.WithoutEdges(edges)]]).shape
        torch.Size([1, 2, 2])
    """

    edges: Iterable[Edge]
    _: KW_ONLY
    reference: PromptBatch | None = None
    heads: Iterable[AnyHead] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        edges = self.edges
        if isinstance(edges, str) or not isinstance(edges, Iterable):
            edges = [edges]
        object.__setattr__(self, "edges", tuple(edges))
        for edge in self.edges:
            if not isinstance(edge, Edge):
                raise InputError(f"edges must be a list of il.Edge, got {short_repr(edge)}")
        object.__setattr__(self, "heads", tuple(dict.fromkeys(edge.reader for edge in self.edges)))

    what = "without some of their inputs"
    needs_batch = True

    def is_only_last(self, batch: PromptBatch) -> bool:
        return all(edge.reader_at == "last" for edge in self.edges)

    @classmethod
    def prepare(
        cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None
    ) -> Sequence[Edit]:
        assert batch is not None
        edits_of: dict[int, list[WithoutEdges]] = {}
        for edit in edits:
            edits_of.setdefault(id(edit.reference), []).append(edit)
        replaced: dict[int, Edit] = {}
        for group in edits_of.values():
            reference = group[0].reference
            removed, chains = removal_masks(view, [edit.edges for edit in group])
            with edits_disabled(view):
                means = None if reference is None else writer_means(view.model, reference)
                replacements = replaced_by_sets(
                    view.model, batch, removed, means, n_sets=len(group), chains=chains
                )
            for edit, replacement in zip(group, replacements, strict=True):
                replaced[id(edit)] = replacement
        return [replaced[id(edit)] for edit in edits]


RemovalMasks = dict[tuple[Head, EdgeRole], Bool[Tensor, "set part role _"]]
"""For each reader and role of the tokens at which it acts, the writers (last axis) that each set of
edges removes from its queries, keys and values. The roles at which one reader acts have no tokens
in common."""


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
            reader = view.check_head(edge.reader)
            writer = writer_index(view, edge.writer, reader, chains)
            part = PARTS.index(edge.part)
            n_writers = len(writer_names(view, reader.layer)) - 1 + len(chains)
            for at, role in role_pairs(edge):
                key = reader, ROLES[at]
                if key not in removed:
                    shape = len(sets), len(PARTS), len(ROLES), n_writers
                    removed[key] = torch.zeros(shape, dtype=torch.bool)
                removed[key][number, part, role, writer] = True
    return removed, chains


def check_edge(view: ModelView, edge: Edge) -> None:
    """Raise InputError for an edge that the model does not have."""
    check_choice("part", edge.part, PARTS)
    for name in ("role", "reader_at"):
        check_choice(name, getattr(edge, name), (*ROLES, "label"))
    reader = view.check_head(edge.reader)
    chain = edge.writer if isinstance(edge.writer, tuple) else None
    if writer_index(view, edge.writer, reader, (chain,) if chain else ()) is None:
        raise InputError(
            "writer must be a head, FFN, embedding or edge into a head in a layer before "
            f"{reader}, got {short_repr(writer_text(edge.writer))}"
        )
    if chain:
        written_at = chain[0].reader_at
        if set(indices_in_roles(edge.role)).isdisjoint(indices_in_roles(written_at)):
            raise InputError(
                f"role must be {written_at!r} like reader_at of the writer, got {edge.role!r} in "
                f"'{edge}'"
            )
    if edge.part == "q" and edge.role != edge.reader_at:
        raise InputError(
            f"role must be {edge.reader_at!r} like reader_at for a query, got {edge.role!r}"
        )


def role_pairs(edge: Edge) -> list[tuple[int, int]]:
    """Return `reader_at` and `role` as indices into `ROLES`, for each kind of labels."""
    places = indices_in_roles(edge.reader_at)
    if edge.part == "q":
        return [(place, place) for place in places]
    return list(itertools.product(places, indices_in_roles(edge.role)))


def joined_chains(edges: list[Edge]) -> list[Edge]:
    """Return edges of which no two remove the same: chains through one head as one, or none if the
    head is removed.
    """
    joined = []
    whole_writers = set()
    chain_edges: dict[tuple[AnyHead, Part, int, int, AnyHead], list[Edge]] = {}
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
    for (reader, part, at, role, head), members in chain_edges.items():
        if members and (reader, part, at, role, str(head)) not in whole_writers:
            members = _at_one_role(members, ROLES[role])
            joined.append(Edge(reader, part, tuple(dict.fromkeys(members)), ROLES[role], ROLES[at]))
    return joined


def _at_one_role(edges: list[Edge], role: EdgeRole) -> list[Edge]:
    """Return edges into one head with the same `reader_at`: if some act at "label" and others at
    one kind of labels, all act at this kind, `role`.
    """
    if len({edge.reader_at for edge in edges}) == 1:
        return edges
    at_role = []
    for edge in edges:
        read = role if edge.part == "q" else edge.role
        at_role.append(replace(edge, reader_at=role, role=read))
    return at_role


def writer_index(
    view: ModelView, writer: Writer, reader: Head, chains: Sequence[Chain]
) -> int | None:
    """Return where a writer is on a reader's axis of writers, which ends with chains; None if it is
    not before it.
    """
    names = writer_names(view, reader.layer)[:-1]
    if isinstance(writer, str):
        return names.index(writer) if writer in names else None
    chain = chain_of(writer)
    if view.check_head(chain[0].reader).layer >= reader.layer:
        return None
    return len(names) + chains.index(chain)


def chain_vectors(
    acts: Activations, chains: Sequence[Chain], means: Means | None
) -> Float[Tensor, "row chain d_model"] | None:
    """Return what each chain's head writes because of its edges, in rows of captured writers; None
    without chains.

    The scale of a norm after attention is the model's own.
    """
    if not chains:
        return None
    view, writers = acts.view, require_writers(acts)
    removed, inner_chains = removal_masks(view, chains)
    inner_vectors = chain_vectors(acts, inner_chains, means)
    shape = len(writers.z), len(chains), view.d_model
    vectors = writers.z.new_zeros(shape, dtype=view.compute_dtype)
    for (head, role), mask in removed.items():
        places = positions_in(role_masks(acts.batch, [role])[:, 0]).to(writers.row.device)
        rows = writers.rows_at(places)
        chain_numbers = mask.flatten(1).any(1).nonzero()[:, 0].to(rows.device)
        reader = Reader(acts, head, means, places, inner_vectors)
        q, k, v = mask[chain_numbers.cpu()].to(rows.device).unbind(1)
        change = reader.z[:, None] - reader.z_without_sets({"q": q, "k": k, "v": v})
        change = change.transpose(1, 2)[rows >= 0]
        rows = rows[rows >= 0]
        _, scale = writers.scaled_z(rows, head.layer)
        written = change @ view.W_O(head.layer)[head.head].to(change) * scale
        vectors[rows[:, None], chain_numbers] += written
    return vectors


def replaced_by_sets(
    model: Any,
    batch: PromptBatch,
    removed: RemovalMasks,
    means: Means | None,
    *,
    n_sets: int,
    chains: Sequence[Chain] = (),
) -> list[ReplaceZ]:
    """Return for each of `n_sets` sets of edges the edit that removes it; masks end with
    `chains`.
    """
    view = ModelView.of(model)
    index: list[dict[Head, list[int]]] = [{} for _ in range(n_sets)]
    back = [batch.last.cpu().new_empty(len(batch), 0)]
    rebuilt = list[tuple[Head, Int[Tensor, "batch place"], Bool[Tensor, "set part role _"]]]()
    n_indices = 0
    for (head, role), mask in sorted(removed.items(), key=itemgetter(0)):
        places = positions_in(role_masks(batch, [role])[:, 0])
        sets = mask.flatten(1).any(1).nonzero()[:, 0]
        if not len(sets):  # no set removes an edge into this head
            continue
        for number in sets.tolist():
            index[number].setdefault(head, []).extend(range(n_indices, n_indices + places.shape[1]))
            n_indices += places.shape[1]
        back.append(tokens_back(batch, places).repeat(1, len(sets)))
        rebuilt.append((head, places, mask[sets]))

    def rebuild_z(acts: Activations, prompts: list[int]) -> Tensor:
        pieces = [acts.z.new_empty(len(prompts), 0, view.d_head, dtype=view.compute_dtype)]
        vectors = chain_vectors(acts, chains, means)
        for head, places, mask in rebuilt:
            q, k, v = mask.to(acts.z.device).unbind(1)
            reader = Reader(acts, head, means, places[prompts], vectors)
            pieces.append(reader.z_without_sets({"q": q, "k": k, "v": v}).flatten(1, 2))
        return torch.cat(pieces, dim=1)

    new_z = torch.cat([rebuild_z(*piece) for piece in capture_pieces(model, batch, "all")])
    all_back = torch.cat(back, dim=1).to(new_z.device)
    return [ReplaceZ(list(z_of_head), new_z, all_back, z_of_head) for z_of_head in index]


def positions_in(mask: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch place"]:
    """Return the positions of each prompt at which a mask is true, padded with -1; at least one per
    prompt.
    """
    return padded_ids([row.nonzero()[:, 0].tolist() or [-1] for row in mask.cpu()])


def tokens_back(
    batch: PromptBatch, places: Int[Tensor, "batch place"]
) -> Int[Tensor, "batch place"]:
    """Return how many tokens before a prompt's last one each place is; -1 where there is none."""
    return (batch.last[:, None].to(places) - places).masked_fill(places < 0, -1)


def writer_means(model: Any, batch: PromptBatch) -> Means:
    """Return the mean of what each writer wrote to tokens of each role; 0 for roles that do not
    occur.

    True and false labels have one mean, so that it does not reveal which labels equal the answer.
    """
    check_batch(batch, "reference")
    view = ModelView.of(model)
    total = torch.zeros(
        len(ROLES), len(writer_names(view, view.n_layers)) - 1, view.d_model, dtype=torch.float64
    )
    count = torch.zeros(len(ROLES), dtype=torch.float64)
    for acts, _ in capture_pieces(model, batch, "all"):
        writers = require_writers(acts)
        roles = acts.batch.role_indices.to(writers.row.device)
        prompt, position = (roles >= 0).nonzero().unbind(1)
        rows, role_of_row = writers.row[prompt, position], roles[prompt, position].cpu()
        count += torch.bincount(role_of_row, minlength=len(ROLES))
        for piece in torch.arange(len(rows)).split(max(1, WRITER_BYTES // vector_bytes(view))):
            u = writers.vectors(rows[piece.to(rows.device)], view.n_layers)[:, :-1]
            total.index_add_(0, role_of_row[piece], u.double().cpu())
    labels = list(indices_in_roles("label"))
    total[labels], count[labels] = total[labels].sum(0), count[labels].sum()
    return (total / count.clamp(min=1)[:, None, None]).to(view.compute_dtype)


def capture_pieces(
    model: Any, batch: PromptBatch, positions: TokenPositions
) -> Iterator[tuple[Activations, list[int]]]:
    """Yield activations with the writers at `positions` for a few prompts at a time, and the
    indices of the prompts.
    """
    view = ModelView.of(model)
    bytes_per_prompt = vector_bytes(view) * (1 if positions == "last" else batch.tokens.shape[1])
    rows_per_pass = rows_at_once(view, batch.tokens.shape[1])
    size = max(1, min(WRITER_BYTES // bytes_per_prompt, rows_per_pass))
    for piece in torch.arange(len(batch)).split(size):
        # Rows that share a pass would share what chains write, although the same token can have
        # another role in each.
        own_passes = replace(batch[piece.tolist()], prompt_index=None)
        yield capture(model, own_passes, writers=positions), piece.tolist()
