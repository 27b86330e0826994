"""Remove edges: what earlier components (*writers*) wrote, as read by one head or FFN (the
*reader*).

1. One pass over the prompts records what every writer wrote, and each head's queries, keys and
   values.
2. `reader_at` says at which tokens the reader acts: the last one, or those of a role, such as
   labels. These are a head's queries. Its keys and values are at the tokens that an edge's `role`
   names, among those up to each query. An FFN reads at the tokens at which it acts.
3. A head's queries, keys or values are rebuilt without some writers, and its z is computed from
   them, see `head_reader`. An FFN runs on its input without some writers, see `ffn_reader`.
4. This output replaces the reader's own at the tokens of `reader_at`; elsewhere, the reader keeps
   its own.
5. All later components run as usual, at all positions from there on: only the last position changes
   if the reader acts there, and otherwise also every later token that attends to what it wrote.
6. In a *chain*, the writer is itself an edge, or several into one component. This component's output
   without them is rebuilt as in 3. The difference from its own is, after a head's W_O, what the
   component writes because of them: the last reader of the chain, and nothing else, reads the
   residual stream without it. Nothing is removed twice: chains through one component that are read
   as the same queries, keys, values or input of an FFN are one chain, and part of the component if
   this is removed as a whole.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.edit import PARTS, Edit, Part, Places, Stage
from icl_lens.edits.ffn_reader import FFNReader
from icl_lens.edits.head_reader import HeadReader, Means
from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.head import (
    FFN,
    AnyComponent,
    Component,
    Head,
    as_component,
)
from icl_lens.models.passes.memory import WRITER_BYTES
from icl_lens.models.sizes import rows_at_once
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import ROLES, PromptBatch, role_indices
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.prompts.roles import EdgeRole, indices_in_roles, role_masks
from icl_lens.prompts.token_ids import TokenPositions, padded_ids
from icl_lens.reading.activations import Activations
from icl_lens.reading.capture import capture_with_hooks
from icl_lens.reading.decompose import head_outputs
from icl_lens.reading.head_projection import require_writers
from icl_lens.reading.passes import last_logits
from icl_lens.reading.writers import (
    has_pos_embed,
    names_before_ffn,
    vector_bytes,
    writer_names,
    z_and_norm_scale,
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


@dataclass(frozen=True, eq=False)
class ReplaceOutputs(Edit):
    """Other outputs of readers at some positions, for each prompt: z of heads, and what FFNs write."""

    z: Float[Tensor, "batch z d_head"]
    z_back: Int[Tensor, "batch z"]
    """Where each z belongs, in tokens before the prompt's last one; -1 for nowhere."""
    z_index: Mapping[Head, Sequence[int]]
    """Where each head's z are in `z`."""
    ffn: Float[Tensor, "batch output d_model"]
    ffn_back: Int[Tensor, "batch output"]
    ffn_index: Mapping[FFN, Sequence[int]]
    """Where each FFN's outputs are in `ffn`."""

    description = "with other inputs"
    needs_batch = True
    at_prompt_end = True

    def __post_init__(self) -> None:
        """Check nothing: the readers are those of the model."""

    @classmethod
    def of(
        cls,
        outputs: Float[Tensor, "batch output width"],
        back: Int[Tensor, "batch output"],
        index: Mapping[Component, Sequence[int]],
    ) -> "ReplaceOutputs":
        """Return the edit of readers that are all heads, or all FFNs."""
        heads = {reader: places for reader, places in index.items() if isinstance(reader, Head)}
        ffns = {reader: places for reader, places in index.items() if isinstance(reader, FFN)}
        return cls(outputs, back, heads, outputs, back, ffns)

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple(self.z_index)

    @property
    def stages(self) -> tuple[Stage, ...]:
        z_stages = (Stage.z,) if self.z_index else ()
        return (*z_stages, Stage.mlp_out) if self.ffn_index else z_stages

    def by_layer(self, view: ModelView) -> dict[int, list[int]]:
        by_layer = super().by_layer(view)
        for ffn in self.ffn_index:
            by_layer.setdefault(ffn.layer, [])
        return by_layer

    def changes_only_last(self, batch: PromptBatch) -> bool:
        backs = [self.z_back[:, indices] for indices in self.z_index.values()]
        backs += [self.ffn_back[:, indices] for indices in self.ffn_index.values()]
        return not any(bool((back > 0).any()) for back in backs)

    def write_z(self, z: Tensor, at: Places, layer: int) -> None:
        pairs = []
        for entry, head in enumerate(at.head.tolist()):
            pairs += [(entry, number) for number in self.z_index.get(Head(layer, head), ())]
        if not pairs:  # FFNs alone have other outputs in this layer
            return
        entry, number = torch.tensor(pairs, device=self.z.device).T
        of_entries = (at.row, at.head, at.prompt, at.last)
        row, head, prompt, last = (x.to(self.z.device)[entry] for x in of_entries)
        back = self.z_back[prompt, number]
        is_place = back >= 0
        row, position, head = row[is_place], (last - back)[is_place], head[is_place]
        new_z = self.z[prompt, number].to(z)[is_place.to(z.device)]
        z[row.to(z.device), position.to(z.device), head.to(z.device)] = new_z

    def write_site(self, x: Tensor, at: Places, layer: int) -> None:
        indices = self.ffn_index.get(FFN(layer), ())
        if not len(indices) or not len(at.row):
            return
        # Rows have an entry for each edited head of the layer; one of them is enough.
        is_first_head = at.head == at.head[0]
        row, prompt, last = (
            x[is_first_head].to(self.ffn.device) for x in (at.row, at.prompt, at.last)
        )
        back = self.ffn_back[prompt][:, indices]
        entry, place = (back >= 0).nonzero(as_tuple=True)
        position = last[entry] - back[entry, place]
        written = self.ffn[prompt[entry], torch.tensor(indices).to(place)[place]]
        x[row[entry].to(x.device), position.to(x.device)] = written.to(x)


@dataclass(frozen=True, eq=False)
class WithoutEdges(Edit):
    """All of some edges removed jointly: what writers add to heads' queries, keys or values, and to
    what FFNs read.

    Each reader's output, at the tokens where an edge has it act, is rebuilt from a pass without
    edits, so a change in one reader does not reach another. With `reference` prompts, removed writers are
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
    heads: Iterable[Head] = field(init=False, repr=False, default=())

    def __post_init__(self) -> None:
        edges = self.edges
        if isinstance(edges, str) or not isinstance(edges, Iterable):
            edges = [edges]
        object.__setattr__(self, "edges", tuple(edges))
        for edge in self.edges:
            if not isinstance(edge, Edge):
                raise InputError(f"edges must be a list of il.Edge, got {short_repr(edge)}")
        readers = dict.fromkeys(edge.reader for edge in self.edges)
        heads = tuple(reader for reader in readers if isinstance(reader, Head))
        object.__setattr__(self, "heads", heads)

    description = "without some of their inputs"
    needs_batch = True

    def changes_only_last(self, batch: PromptBatch) -> bool:
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


def chain_vectors(
    acts: Activations, chains: Sequence[Chain], means: Means | None
) -> Float[Tensor, "row chain d_model"] | None:
    """Return what each chain's component writes because of its edges, in rows of captured writers;
    None without chains.

    The scale of a norm after attention is the model's own.
    """
    if not chains:
        return None
    view, writers = acts.view, require_writers(acts)
    removed, inner_chains = removal_masks(view, chains)
    inner_vectors = chain_vectors(acts, inner_chains, means)
    shape = len(writers.z), len(chains), view.d_model
    vectors = writers.z.new_zeros(shape, dtype=view.compute_dtype)
    for (component, role), mask in removed.items():
        places = positions_in(role_masks(acts.batch, [role])[:, 0]).to(writers.row.device)
        rows = writers.rows_at(places)
        chain_numbers = mask.flatten(1).any(1).nonzero()[:, 0]
        sets = mask[chain_numbers].to(rows.device)
        if isinstance(component, FFN):
            ffn = FFNReader(acts, component, means, places, inner_vectors)
            change = ffn.output[:, None] - ffn.output_without_sets(_ffn_sets(sets))
        else:
            head = HeadReader(acts, component, means, places, inner_vectors)
            change = head.z[:, None] - head.z_without_sets(_head_sets(sets))
        change = change.transpose(1, 2)[rows >= 0]
        rows = rows[rows >= 0]
        if isinstance(component, Head):
            _, scale = writers.z_and_norm_scale(rows, component.layer)
            change = change @ view.W_O(component.layer)[component.head].to(change) * scale
        vectors[rows[:, None], chain_numbers.to(rows.device)] += change
    return vectors


def _head_sets(
    sets: Bool[Tensor, "set part role writer"],
) -> dict[Part, Bool[Tensor, "set role writer"]]:
    """Return what sets remove from a head's queries, keys and values."""
    return {part: sets[:, EDGE_PARTS.index(part)] for part in PARTS}


def _ffn_sets(sets: Bool[Tensor, "set part role writer"]) -> Bool[Tensor, "role set writer"]:
    """Return what sets remove from an FFN's input."""
    return sets[:, EDGE_PARTS.index("mlp_in")].transpose(0, 1)


@dataclass(frozen=True, eq=False)
class _SetsOfReader:
    """The sets of edges that change a reader at the tokens of one role."""

    component: Component
    places: Int[Tensor, "batch place"]
    sets: Bool[Tensor, "set part role writer"]

    def outputs(
        self,
        acts: Activations,
        prompts: list[int],
        means: Means | None,
        vectors: Float[Tensor, "row chain d_model"] | None,
    ) -> Float[Tensor, "prompt output width"]:
        """Return the reader's outputs under each set at all places, set by set."""
        places, sets = self.places[prompts], self.sets.to(acts.z.device)
        if isinstance(self.component, FFN):
            ffn = FFNReader(acts, self.component, means, places, vectors)
            return ffn.output_without_sets(_ffn_sets(sets)).flatten(1, 2)
        head = HeadReader(acts, self.component, means, places, vectors)
        return head.z_without_sets(_head_sets(sets)).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class _OutputsOfSets:
    """The outputs of heads, or of FFNs, under all sets of edges, one after another."""

    width: int
    readers: list[_SetsOfReader] = field(default_factory=list)
    index: list[dict[Any, list[int]]] = field(default_factory=list)
    """For each set, where each reader's outputs are."""
    back: list[Int[Tensor, "batch output"]] = field(default_factory=list)

    @classmethod
    def of(
        cls, batch: PromptBatch, removed: RemovalMasks, kind: type, width: int, n_sets: int
    ) -> "_OutputsOfSets":
        """Return what sets change in readers of a kind, `Head` or `FFN`."""
        outputs = cls(width, index=[{} for _ in range(n_sets)])
        outputs.back.append(batch.last.cpu().new_empty(len(batch), 0))
        n_outputs = 0
        for (component, role), mask in sorted(removed.items(), key=itemgetter(0)):
            sets = mask.flatten(1).any(1).nonzero()[:, 0]
            if not isinstance(component, kind) or not len(sets):
                continue
            places = positions_in(role_masks(batch, [role])[:, 0])
            n_places = places.shape[1]
            for number in sets.tolist():
                of_set = outputs.index[number].setdefault(component, [])
                of_set.extend(range(n_outputs, n_outputs + n_places))
                n_outputs += n_places
            outputs.back.append(tokens_back(batch, places).repeat(1, len(sets)))
            outputs.readers.append(_SetsOfReader(component, places, mask[sets]))
        return outputs

    def values(
        self, acts: Activations, prompts: list[int], means: Means | None, vectors: Tensor | None
    ) -> Float[Tensor, "prompt output width"]:
        """Return the outputs of some prompts."""
        pieces = [acts.z.new_empty(len(prompts), 0, self.width, dtype=acts.view.compute_dtype)]
        for reader in self.readers:
            pieces.append(reader.outputs(acts, prompts, means, vectors))
        return torch.cat(pieces, dim=1)


def replaced_by_sets(
    model: Any,
    batch: PromptBatch,
    removed: RemovalMasks,
    means: Means | None,
    *,
    n_sets: int,
    chains: Sequence[Chain] = (),
) -> list[ReplaceOutputs]:
    """Return for each of `n_sets` sets of edges the edit that removes it; masks end with
    `chains`.
    """
    view = ModelView.of(model)
    heads = _OutputsOfSets.of(batch, removed, Head, view.d_head, n_sets)
    ffns = _OutputsOfSets.of(batch, removed, FFN, view.d_model, n_sets)
    layers = layers_of([component for component, _ in removed], chains)
    roles = roles_of(view, removed, chains)

    def outputs_of(prompts: list[int]) -> tuple[Tensor, Tensor]:
        places = positions_in(role_masks(batch[prompts], roles).any(1))
        positions = [row[row >= 0].tolist() or [-1] for row in places]
        acts = capture_writers(model, batch[prompts], positions, layers)
        vectors = chain_vectors(acts, chains, means)
        return (
            heads.values(acts, prompts, means, vectors),
            ffns.values(acts, prompts, means, vectors),
        )

    z, ffn = zip(*map(outputs_of, writer_pieces(view, batch, "all")), strict=True)
    new_z, new_ffn = torch.cat(z), torch.cat(ffn)
    z_back, ffn_back = (
        torch.cat(outputs.back, dim=1).to(new_z.device) for outputs in (heads, ffns)
    )
    edits = []
    for z_index, ffn_index in zip(heads.index, ffns.index, strict=True):
        edits.append(ReplaceOutputs(new_z, z_back, z_index, new_ffn, ffn_back, ffn_index))
    return edits


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
    sums = _RoleSums(view)
    for prompts in batch.split(rows_at_once(view, batch.tokens.shape[1])):
        sums.add(prompts)
    total, count = sums.total(), sums.count
    labels = list(indices_in_roles("label"))
    total[labels], count[labels] = total[labels].sum(0), count[labels].sum()
    return (total / count.clamp(min=1)[:, None, None]).to(view.compute_dtype, copy=True)


class _RoleSums:
    """Sums of what writers wrote to tokens of each role, in float64; passes keep nothing else.

    What a head writes is linear in its z, of which the sums are kept.
    """

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.count = torch.zeros(len(ROLES), dtype=torch.float64)
        self.by_name: dict[str, Float[Tensor, "role *width"]] = {}
        """Sums of embeddings, of each layer's z ("z3") and of what its FFN wrote ("F3")."""

    def add(self, prompts: PromptBatch) -> None:
        """Run prompts and add what they have."""
        view = self.view
        roles = role_indices(prompts).cpu()
        row, position = (roles >= 0).nonzero().unbind(1)
        role_of_token = roles[row, position]
        self.count += torch.bincount(role_of_token, minlength=len(ROLES))

        def add_tokens(x: Tensor, hook: Any, name: str, layer: int | None = None) -> None:
            row_of_x = row if len(x) > 1 else torch.zeros_like(row)  # positions have one row
            tokens = x.detach()[row_of_x.to(x.device), position.to(x.device)]
            if layer is not None:
                tokens, _ = z_and_norm_scale(view, layer, tokens)
            if name not in self.by_name:
                shape = len(ROLES), *tokens.shape[1:]
                self.by_name[name] = torch.zeros(shape, dtype=torch.float64)
            self.by_name[name].index_add_(0, role_of_token, tokens.double().cpu())

        hooks: list[tuple[str, Any]] = []
        if has_pos_embed(view):
            hooks.append(("hook_pos_embed", partial(add_tokens, name="pos_embed")))
        hooks.append((view.hook(0, "hook_resid_pre"), partial(add_tokens, name="input")))
        for layer in range(view.n_layers):
            add_z = partial(add_tokens, name=f"z{layer}", layer=layer)
            hooks.append((view.hook(layer, "attn.hook_z"), add_z))
            add_ffn = partial(add_tokens, name=f"F{layer}")
            hooks.append((view.hook(layer, "hook_mlp_out"), add_ffn))
        last_logits(view.model, prompts, hooks)

    def total(self) -> Float[Tensor, "role writer d_model"]:
        """Return the sums of all writers but the biases, in the order of `writer_names`."""
        by_writer = [self.by_name["input"]]
        if "pos_embed" in self.by_name:
            position = self.by_name["pos_embed"]
            by_writer = [self.by_name["input"] - position, position]
        for layer in range(self.view.n_layers):
            heads = head_outputs(self.by_name[f"z{layer}"], self.view.W_O(layer).double().cpu())
            by_writer += [*heads.unbind(1), self.by_name[f"F{layer}"]]
        return torch.stack(by_writer, dim=1)


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


def writer_pieces(
    view: ModelView, batch: PromptBatch, positions: TokenPositions
) -> list[list[int]]:
    """Return the indices of the prompts whose writers at `positions` are captured at a time."""
    bytes_per_prompt = vector_bytes(view) * (1 if positions == "last" else batch.tokens.shape[1])
    rows_per_pass = rows_at_once(view, batch.tokens.shape[1])
    size = max(1, min(WRITER_BYTES // bytes_per_prompt, rows_per_pass))
    return [piece.tolist() for piece in torch.arange(len(batch)).split(size)]


def capture_writers(
    model: Any, batch: PromptBatch, positions: TokenPositions, layers: Iterable[int]
) -> Activations:
    """Return activations with the writers at `positions` that components of some layers read."""
    # Rows that share a pass would share what chains write, although the same token can have
    # another role in each.
    own_passes = replace(batch, prompt_index=None)
    return capture_with_hooks(model, own_passes, [], writers=positions, readers=list(layers))
