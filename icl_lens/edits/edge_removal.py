"""Remove edges: rebuild what readers compute without what some writers wrote.

1. One pass over the prompts records what every writer wrote, and each head's queries, keys and
   values (`captured_writers`).
2. A head's queries, keys or values are rebuilt without some writers, and its z is computed from
   them, see `head_reader`. An FFN runs on its input without some writers, see `ffn_reader`.
3. This output replaces the reader's own at the tokens at which it acts; elsewhere, the reader keeps
   its own.
4. All later components run as usual, at all positions from there on: only the last position changes
   if the reader acts there, and otherwise also every later token that attends to what it wrote.
5. Of a chain, the component in the middle is rebuilt in the same way. The difference from its own
   output is, after a head's W_O, what it writes because of the chain's edges: the last reader, and
   nothing else, reads the residual stream without it.
6. Nothing is removed twice. Chains through one component that are read as the same queries, keys,
   values or input of an FFN are one chain, and part of the component if this is removed as a whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.captured_writers import capture_writers, writer_means, writer_pieces
from icl_lens.edits.edges import (
    EDGE_PARTS,
    Chain,
    Edge,
    RemovalMasks,
    layers_of,
    removal_masks,
    roles_of,
)
from icl_lens.edits.edit import PARTS, Edit, Part, Places, Stage
from icl_lens.edits.ffn_reader import FFNReader
from icl_lens.edits.head_reader import HeadReader, Means
from icl_lens.errors import InputError, short_repr
from icl_lens.models.active_edits import edits_disabled
from icl_lens.models.head import (
    FFN,
    Component,
    Head,
)
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.roles import role_masks
from icl_lens.prompts.token_ids import padded_ids
from icl_lens.reading.activations import Activations
from icl_lens.reading.head_projection import require_writers


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
