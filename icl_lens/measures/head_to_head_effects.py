"""Measure what an earlier component (the *writer*) does to the answer through one head or FFN, the
*reader*.

1. `head_to_head_effects` removes each writer from a head's query, keys or values, or from what an
   FFN reads (see `edits.edge_removal`). The drop in the answer's score is the effect of the *edge* from
   the writer to this query, to these keys or values, or to this FFN.
2. `estimate_effects` has first-order estimates of all edges into some heads at once.

Several readers are rebuilt independently from the same unedited pass: a change in one does not
reach another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.captured_writers import capture_writers, writer_means, writer_pieces
from icl_lens.edits.edge_removal import ReplaceOutputs, chain_vectors, positions_in, tokens_back
from icl_lens.edits.edges import (
    EDGE_PARTS,
    OWN_TOKENS,
    Chain,
    Edge,
    EdgePart,
    chain_of,
    check_part,
    layers_of,
    names_before,
    writer_index,
    writer_text,
)
from icl_lens.edits.edit import PARTS, Part, Stage
from icl_lens.edits.ffn_reader import FFNReader
from icl_lens.edits.gradients import site_gradients, z_gradients
from icl_lens.edits.head_reader import HeadReader, Means
from icl_lens.edits.score import score_sets
from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.measures.effects import Method
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.head import FFN, AnyComponent, AnyHead, Component, Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import ROLES, PromptBatch
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.prompts.roles import EDGE_ROLES, EdgeRole, role_masks
from icl_lens.prompts.token_ids import TokenPositions, resolve_positions
from icl_lens.reading.scored_tokens import Against, AnswerTokens
from icl_lens.reading.writers import writer_names
from icl_lens.result.base import Result
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS, plural_prompts
from icl_lens.result.view import View, table_view
from icl_lens.runs.progress import progress_switch, steps


@dataclass(frozen=True, repr=False)
class HeadToHeadEffects(Result):
    """What the answer loses when a writer is removed from a head's query, keys or values, or from
    what an FFN reads, nats.

    A positive value means that the edge helps the answer. `log_prob` is the drop in log p(target),
    and `log_odds` that in log p(target) − log Σ p(against), NaN for prompts that have nothing to
    compare with. Both are 0 where the writer does not write before the reader reads, and NaN for
    prompts that have no token of the chosen role.

    Example:
        >>> edges = il.head_to_head_effects(model, batch, ["L5H0"], part="k")
        >>> edges.log_prob.shape, edges.writers[:2]
        (torch.Size([1, 1, 30]), ('L0H0', 'L0H1'))
    """

    version: ClassVar[int] = 3
    readers: tuple[str, ...]
    """Heads ("L5H0") or FFNs ("F3")."""
    writers: tuple[str, ...]
    part: EdgePart
    log_prob: Float[Tensor, "batch reader writer"]
    log_odds: Float[Tensor, "batch reader writer"]
    fallback_reason: str = ""
    """Why readers at the last token took full forward passes instead of the prefix cache; empty if
    they did not.
    """
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks. Empty if nothing
    edits it.
    """
    method: Method = "exact"
    """"gradient" for first-order estimates, which there are of the log-odds alone."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row per reader and writer: reader, part, writer, log_odds and log_prob.

        The last two are the mean losses, over the prompts that have them. The largest effect on the
        log-odds comes first, or that on log p if no prompt has log-odds.
        """
        readers = np.repeat(list(self.readers), len(self.writers))
        writers = self.writers * len(self.readers)
        frame = pd.DataFrame({"reader": readers, "part": self.part, "writer": writers})
        for name in ("log_odds", "log_prob"):
            frame[name] = getattr(self, name).double().nanmean(0).flatten().cpu().numpy()
        order = ["log_odds", "log_prob"]  # all equal if no prompt has log-odds
        return frame.sort_values(order, ascending=False, ignore_index=True, kind="stable")

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        frame = self.to_frame()
        strongest = frame.head(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {}
        for name in ("reader", "part", "writer"):
            columns[name] = strongest[name].tolist()
        columns["log-odds lost"] = [signed(value) for value in strongest["log_odds"]]
        columns["log p lost"] = [signed(value) for value in strongest["log_prob"]]
        n = len(self.log_prob)
        over = f"mean over {plural_prompts(n)}" if n > 1 else plural_prompts(n)
        estimated = ", first-order estimates" if self.method == "gradient" else ""
        title = f"HeadToHeadEffects, nats: {over}{estimated}{edits_suffix(self.edits)}"
        return table_view(title, columns, len(frame))


def head_to_head_effects(
    model: Any,
    batch: PromptBatch,
    readers: Sequence[AnyComponent],
    *,
    part: EdgePart,
    writers: Sequence[AnyHead | Edge | Chain] | None = None,
    at: EdgeRole | TokenPositions = "all",
    reader_at: EdgeRole | TokenPositions = "last",
    targets: Int[Tensor, " batch"] | None = None,
    against: Against = None,
    reference: PromptBatch | None = None,
    method: Method = "exact",
    progress: bool | None = None,
) -> HeadToHeadEffects:
    """Return the effect of each writer on the answer through each reader: a head's query, keys or
    values, or what an FFN reads.

    1. `reader_at` are the tokens at which the reader acts: it attends from them and writes to them.
       They are the last token, those of a role (see `batch.token_roles`; "label" for true and false
       labels), positions, or "all".
    2. `part` is "q", "k" or "v". The reader's queries at `reader_at`, or its keys or values at the
       tokens `at`, are rebuilt without what the writer wrote there, with norms recomputed. `at`
       takes what `reader_at` takes.
    3. The reader's output at `reader_at` is computed from them. Elsewhere, and in other heads,
       nothing changes here.
    4. For FFNs ("F3"), `part` is "mlp_in": what the FFN reads at `reader_at`, the residual stream
       before its norm, is without the writer, and its output is computed from this.
    5. All later components run as usual on what has changed, at all later positions.

    The effects of a prompt without such tokens, or without those of a chain, are NaN: nothing was
    removed there.

    `writers` are heads, FFNs ("F3"), embeddings ("embed", "pos_embed") or edges into earlier heads,
    for *chains* (see `Edge`); by default, all heads that write before the last reader reads. With
    `reference` prompts, a writer's output is replaced by its mean over their tokens of the same
    role instead of zero. `targets` and `against` are those of `head_effects`.

    With `method="gradient"`, the reader's output without the writer is exact, but its effect on the
    log-odds is a first-order estimate: one forward and one backward pass for all pairs. Keys and
    values must then be at tokens of one role, writers must not be chains, and `log_prob` is NaN.

    Otherwise, each pair of reader and writer costs a pass from the reader's layer on: over one
    token per prompt, if readers act at the last one and the prefix cache is supported (see
    `head_effects`), otherwise over whole prompts. If this takes longer than two seconds, a terminal
    or notebook shows a progress bar, unless `progress` is False. Raise InputError for unknown heads
    or writers, invalid targets, a role that no prompt has, and model families whose attention
    cannot be reproduced.

    Example:
        >>> writers = ["L2H0", "F3"]
        >>> edges = il.head_to_head_effects(model, batch, ["L5H0"], part="q", writers=writers)
        >>> edges.log_prob.shape, edges.fallback_reason
        (torch.Size([1, 1, 2]), '')
        >>> moved = il.head_to_head_effects(
        ...     model, batch, ["L2H0"], part="v", writers=["embed"], at="text", reader_at="label"
        ... )
        >>> moved.log_prob.shape
        torch.Size([1, 1, 1])
        >>> into_ffn = il.head_to_head_effects(model, batch, ["F5"], part="mlp_in", writers=writers)
        >>> into_ffn.log_prob.shape
        torch.Size([1, 1, 2])
    """
    view = ModelView.of(model)
    check_choice("part", part, EDGE_PARTS)
    check_choice("method", method, ("exact", "gradient"))
    check_batch(batch)
    components = _checked_readers(view, readers, part)
    if part in OWN_TOKENS and at != "all" and at != reader_at:
        what = "queries" if part == "q" else "FFNs"
        raise InputError(
            f"at must be 'all' or {reader_at!r} like reader_at for {what}, got {short_repr(at)}"
        )
    checked_writers = _checked_writers(view, components, writers)
    means = None if reference is None else writer_means(model, reference)
    if method == "gradient":
        if targets is not None or against is not None:
            raise InputError(
                "targets and against must be omitted for method='gradient', which scores the "
                "answers"
            )
        role = reader_at if part in OWN_TOKENS else at
        with progress_switch(progress):
            return _estimated(
                model, batch, components, checked_writers, part, role, reader_at, means
            )
    tokens = AnswerTokens.from_batch(view, batch, targets, against)
    inputs = _ReaderInputs.of(batch, part, at, reader_at)
    edges = _RemovedEdges.of(view, components, checked_writers, inputs)
    with progress_switch(progress):
        sets: list[list[ReplaceOutputs]] = [[]]
        for edit in edges.edits(model, means):
            sets.append([edit])
        outcomes, reason = score_sets(view, batch, sets, tokens.outcomes)
    shape = len(batch), len(components), len(checked_writers), outcomes.shape[-1]
    lost = outcomes.new_zeros(shape)
    readers_of_edges = [edge.reader for edge in edges.edges]
    writers_of_edges = [edge.writer for edge in edges.edges]
    lost[:, readers_of_edges, writers_of_edges] = outcomes[:, :1] - outcomes[:, 1:]
    is_removed = inputs.lack_a_writer(checked_writers).to(lost.device)
    lost = lost.masked_fill(~is_removed[:, None, :, None], torch.nan)
    log_prob, log_odds = lost.unbind(-1)
    names = tuple(map(writer_text, checked_writers))
    reader_names = tuple(map(str, components))
    return HeadToHeadEffects(
        reader_names, names, part, log_prob, log_odds, reason, active_edits(view)
    )


def _checked_readers(
    view: ModelView, readers: Sequence[AnyComponent], part: EdgePart
) -> tuple[Component, ...]:
    """Return readers; raise InputError for none, and for those that do not have this part."""
    components = view.check_components(readers)
    if not components:
        raise InputError("readers must name at least one head or FFN, got none; pass e.g. ['L2H1']")
    for component in components:
        check_part(part, component)
    return components


def _checked_writers(
    view: ModelView, readers: Sequence[Component], writers: Sequence[AnyHead | Edge | Chain] | None
) -> tuple[str | Chain, ...]:
    """Return the names of writers, and chains.

    The default is all heads that write before the last reader reads. Raise InputError for no
    writers, and for those that the model does not have.
    """
    if writers is None:
        earlier = max((names_before(view, reader) for reader in readers), key=len)
        return tuple(str(head) for head in view.heads() if str(head) in earlier)
    component_names = writer_names(view, view.n_layers)[:-1]
    checked: list[str | Chain] = []
    for writer in writers:
        if isinstance(writer, str) and writer in component_names:
            checked.append(writer)
        elif isinstance(writer, str) or _is_head(writer):
            checked.append(str(view.check_head(cast(AnyHead, writer))))
        else:
            checked.append(chain_of(writer))
    if not checked:
        raise InputError(
            "writers must name at least one head, FFN or embedding, got none; omit it for all heads"
        )
    return tuple(dict.fromkeys(checked))


def _is_head(writer: object) -> bool:
    """Return whether a writer is a head as a pair, rather than an edge or a chain."""
    return isinstance(writer, tuple) and not any(isinstance(member, Edge) for member in writer)


@dataclass(frozen=True, eq=False)
class _ReaderInputs:
    """The tokens at which readers act, and those of their inputs that lack a writer."""

    batch: PromptBatch
    part: EdgePart
    at: EdgeRole | TokenPositions
    """The tokens of keys or values, as the caller names them."""
    reader_at: EdgeRole | TokenPositions
    """The tokens at which readers act, as the caller names them."""
    at_tokens: Bool[Tensor, "batch 1 pos"]
    reader_tokens: Bool[Tensor, "batch 1 pos"]

    @classmethod
    def of(
        cls,
        batch: PromptBatch,
        part: EdgePart,
        at: EdgeRole | TokenPositions,
        reader_at: EdgeRole | TokenPositions,
    ) -> "_ReaderInputs":
        """Find the tokens in a batch; raise InputError for those that no prompt has."""
        at_tokens = _token_masks(batch, at)
        reader_tokens = _token_masks(batch, reader_at)
        for name, value, tokens in (
            ("at", at, at_tokens),
            ("reader_at", reader_at, reader_tokens),
        ):
            if not bool(tokens.any()):
                raise InputError(
                    f"{name} must be a role that a prompt has, got {short_repr(value)}; see "
                    "batch.token_roles"
                )
        return cls(batch, part, at, reader_at, at_tokens, reader_tokens)

    @property
    def changed_tokens(self) -> Bool[Tensor, "batch 1 pos"]:
        """Tokens whose queries, keys, values or FFN's input lack a writer."""
        return self.reader_tokens if self.part in OWN_TOKENS else self.at_tokens

    @property
    def places(self) -> Int[Tensor, "batch place"]:
        """Positions at which readers act, -1 where a prompt has fewer."""
        return positions_in(self.reader_tokens[:, 0])

    def check_chains(self, chains: Sequence[Chain]) -> None:
        """Raise InputError for a chain that writes to no token where it is read."""
        for chain in chains:
            written_at = chain[0].reader_at
            if bool((role_masks(self.batch, [written_at]) & self.changed_tokens).any()):
                continue
            name, value = "at", self.at
            if self.part in OWN_TOKENS:
                name, value = "reader_at", self.reader_at
            raise InputError(
                f"{name} must be {written_at!r} like reader_at of the writer, got "
                f"{short_repr(value)}"
            )

    def lack_a_writer(self, writers: Sequence[str | Chain]) -> Bool[Tensor, "batch writer"]:
        """Return for which prompts each writer is removed from a token that readers read."""
        by_writer = [_has_tokens(self.batch, writer, self.changed_tokens) for writer in writers]
        return torch.stack(by_writer, dim=1) & self.reader_tokens.any(2)


def _token_masks(batch: PromptBatch, at: EdgeRole | TokenPositions) -> Bool[Tensor, "batch 1 pos"]:
    """Return which tokens `at` selects; raise InputError for positions outside a prompt."""
    if isinstance(at, str) and at in (*ROLES, "label"):
        return role_masks(batch, [cast(EdgeRole, at)])
    mask = torch.zeros_like(batch.tokens, dtype=torch.bool)
    lengths = (batch.last + 1).tolist()
    for row, positions in enumerate(resolve_positions(cast(TokenPositions, at), lengths)):
        mask[row, positions] = True
    return mask[:, None]


def _has_tokens(
    batch: PromptBatch, writer: str | Chain, read_tokens: Bool[Tensor, "batch 1 pos"]
) -> Bool[Tensor, " batch"]:
    """Return which prompts have a token where a writer is read.

    A chain also needs tokens where one of its own edges is read.
    """
    if isinstance(writer, str):
        return read_tokens.flatten(1).any(1)
    chain_tokens = read_tokens & role_masks(batch, [writer[0].reader_at])
    by_edge = []
    for edge in writer:
        is_own = edge.part in OWN_TOKENS
        edge_tokens = chain_tokens if is_own else role_masks(batch, [edge.role])
        by_edge.append(_has_tokens(batch, cast(str | Chain, edge.writer), edge_tokens))
    return chain_tokens.flatten(1).any(1) & torch.stack(by_edge).any(0)


class _RemovedEdge(NamedTuple):
    """A reader and an earlier writer that is removed from it."""

    reader: int
    """Its place among the readers."""
    writer: int
    """Its place among the writers."""
    writer_of_reader: int
    """The writer's place on the axis of this reader's own writers, see `writer_index`."""


@dataclass(frozen=True, eq=False)
class _RemovedEdges:
    """All pairs of a reader and an earlier writer, each of which is removed alone."""

    readers: Sequence[Component]
    edges: Sequence[_RemovedEdge]
    """By reader, then by writer."""
    chains: tuple[Chain, ...]
    inputs: _ReaderInputs

    @classmethod
    def of(
        cls,
        view: ModelView,
        readers: Sequence[Component],
        writers: Sequence[str | Chain],
        inputs: _ReaderInputs,
    ) -> "_RemovedEdges":
        """Return the pairs; raise InputError if no writer is before a reader."""
        chains = tuple(writer for writer in writers if isinstance(writer, tuple))
        inputs.check_chains(chains)
        edges = []
        for reader, component in enumerate(readers):
            for number, writer in enumerate(writers):
                index = writer_index(view, writer, component, chains)
                if index is not None:
                    edges.append(_RemovedEdge(reader, number, index))
        if not edges:
            raise InputError(
                "writers must include one that writes before a reader reads, got "
                f"{', '.join(map(writer_text, writers))}"
            )
        return cls(readers, edges, chains, inputs)

    def edits(self, model: Any, means: Means | None) -> list[ReplaceOutputs]:
        """Return, for each pair, the edit that gives the reader its output without the writer."""
        batch = self.inputs.batch
        places = self.inputs.places
        n_places = places.shape[1]
        is_last_only = self.inputs.part in OWN_TOKENS and self.inputs.reader_at == "last"
        captured = "last" if is_last_only and not self.chains else "all"
        pieces = []
        with steps("rebuilding readers", len(batch)) as advance:
            for prompts in writer_pieces(ModelView.of(model), batch, captured):
                pieces.append(self._rebuilt_outputs(model, prompts, captured, places, means))
                advance(len(prompts))
        outputs = torch.cat(pieces)
        back = tokens_back(batch, places).repeat(1, len(self.edges)).to(outputs.device)
        edits = []
        for number, edge in enumerate(self.edges):
            places_of_edge = range(number * n_places, (number + 1) * n_places)
            index = {self.readers[edge.reader]: places_of_edge}
            edits.append(ReplaceOutputs.of(outputs, back, index))
        return edits

    def _rebuilt_outputs(
        self,
        model: Any,
        prompts: list[int],
        captured: TokenPositions,
        places: Int[Tensor, "batch place"],
        means: Means | None,
    ) -> Float[Tensor, "prompt output width"]:
        """Return the outputs of all pairs at all places for some prompts, pair by pair: z of heads,
        or what FFNs write.
        """
        layers = layers_of(self.readers, self.chains)
        acts = capture_writers(model, self.inputs.batch[prompts], captured, layers)
        vectors = chain_vectors(acts, self.chains, means)
        tokens = self.inputs.at_tokens[prompts]
        pieces = []
        for number, component in enumerate(self.readers):
            indices = [edge.writer_of_reader for edge in self.edges if edge.reader == number]
            if not indices:
                continue
            if isinstance(component, FFN):
                ffn = FFNReader(acts, component, means, places[prompts], vectors)
                outputs = ffn.output_without_each()
            else:
                head = HeadReader(acts, component, means, places[prompts], vectors)
                outputs = head.z_without_each(cast(Part, self.inputs.part), tokens)[:, 0]
            pieces.append(outputs[:, indices].flatten(1, 2))
        return torch.cat(pieces, dim=1)


def _estimated(
    model: Any,
    batch: PromptBatch,
    readers: Sequence[Component],
    writers: Sequence[str | Chain],
    part: EdgePart,
    role: EdgeRole | TokenPositions,
    reader_at: EdgeRole | TokenPositions,
    means: Means | None,
) -> HeadToHeadEffects:
    """Return estimates of `estimate_effects` for some writers of one part at tokens of one role.

    They are 0 where a writer is not before the reader.
    """
    for name, value in (("reader_at", reader_at), ("at", role)):
        if value not in EDGE_ROLES:
            raise InputError(
                f"{name} must be a role for method='gradient', got {short_repr(value)}; use one "
                f"of {EDGE_ROLES}"
            )
    if any(isinstance(writer, tuple) for writer in writers):
        raise InputError(
            "writers must be heads, FFNs or embeddings for method='gradient', got a chain"
        )
    view = ModelView.of(model)
    role_index = EDGE_ROLES.index(cast(EdgeRole, role))
    estimates = estimate_effects(model, batch, readers, means, cast(EdgeRole, reader_at))
    log_odds = torch.zeros(len(batch), len(readers), len(writers))
    for reader_number, reader in enumerate(readers):
        earlier = names_before(view, reader)
        by_writer = estimates[reader][:, EDGE_PARTS.index(part), role_index].cpu()
        for number, writer in enumerate(writers):
            if writer in earlier:
                log_odds[:, reader_number, number] = by_writer[:, earlier.index(writer)]
    return HeadToHeadEffects(
        readers=tuple(map(str, readers)),
        writers=tuple(map(writer_text, writers)),
        part=part,
        log_prob=torch.full_like(log_odds, torch.nan),
        log_odds=log_odds,
        edits=active_edits(view),
        method="gradient",
    )


def estimate_effects(
    model: Any,
    batch: PromptBatch,
    readers: Sequence[Component],
    means: Means | None,
    reader_at: EdgeRole = "last",
) -> dict[Component, Float[Tensor, "batch part edge_role _"]]:
    """Estimate the effects of single edges on the answer's log-odds, by reader.

    The last axis has the reader's writers; parts are `EDGE_PARTS`, roles `EDGE_ROLES`. The reader's
    output without the writer is exact; its effect on the log-odds is linearized.
    """
    view = ModelView.of(model)
    masks = role_masks(batch)
    places = positions_in(role_masks(batch, [reader_at])[:, 0])
    heads = [reader for reader in readers if isinstance(reader, Head)]
    ffns = [reader for reader in readers if isinstance(reader, FFN)]

    def estimates_of(prompts: list[int]) -> dict[Component, Tensor]:
        # Gradients come first: a backward pass takes as much memory as the writers.
        own_passes = replace(batch[prompts], prompt_index=None)
        gradients = _head_gradients(view, own_passes, heads)
        ffn_gradients = _ffn_gradients(view, own_passes, ffns)
        acts = capture_writers(model, batch[prompts], "all", layers_of(readers))
        estimates: dict[Component, Tensor] = {}
        for head in heads:
            reader = HeadReader(acts, head, means, places[prompts])
            estimates[head] = _estimates_of_head(reader, gradients[head], masks[prompts])
        for ffn in ffns:
            ffn_reader = FFNReader(acts, ffn, means, places[prompts])
            estimates[ffn] = _estimates_of_ffn(ffn_reader, ffn_gradients[ffn], reader_at)
        return estimates

    pieces: dict[Component, list[Tensor]] = {reader: [] for reader in readers}
    with steps("estimating effects", len(batch)) as advance:
        for prompts in writer_pieces(view, batch, "all"):
            for reader, estimates in estimates_of(prompts).items():
                pieces[reader].append(estimates)
            advance(len(prompts))
    return {reader: torch.cat(estimates) for reader, estimates in pieces.items()}


def _estimates_of_head(
    reader: HeadReader,
    gradient: Float[Tensor, "batch pos d_head"],
    masks: Bool[Tensor, "batch role pos"],
) -> Float[Tensor, "batch part role writer"]:
    """Return what the log-odds lose without each writer, if they were linear in the reader's z; 0
    for parts that a head does not have.
    """
    at_places = _at_places(gradient.to(reader.z), reader.places)
    shape = len(gradient), len(EDGE_PARTS), masks.shape[1], reader.n_writers
    estimates = reader.z.new_zeros(shape)
    for part in PARTS:
        z_without = reader.z_without_each(part, masks.to(reader.z.device))
        change = reader.z[:, None, None] - z_without
        equation = "batch place d, batch role writer place d -> batch role writer"
        estimates[:, EDGE_PARTS.index(part)] = einsum(at_places, change, equation)
    return estimates


def _estimates_of_ffn(
    reader: FFNReader, gradient: Float[Tensor, "batch pos d_model"], reader_at: EdgeRole
) -> Float[Tensor, "batch part role writer"]:
    """Return what the log-odds lose without each writer, if they were linear in the FFN's output; 0
    for parts and roles that it does not read.
    """
    output = reader.output
    at_places = _at_places(gradient.to(output), reader.places)
    shape = len(gradient), len(EDGE_PARTS), len(EDGE_ROLES), reader.n_writers
    estimates = output.new_zeros(shape)
    change = output[:, None] - reader.output_without_each()
    equation = "batch place d, batch writer place d -> batch writer"
    lost = einsum(at_places, change, equation)
    estimates[:, EDGE_PARTS.index("mlp_in"), EDGE_ROLES.index(reader_at)] = lost
    return estimates


def _at_places(
    gradient: Float[Tensor, "batch pos d"], places: Int[Tensor, "batch place"]
) -> Float[Tensor, "batch place d"]:
    """Return a gradient at places, 0 where a place is -1."""
    rows = torch.arange(len(gradient), device=places.device)[:, None]
    return gradient[rows, places.clamp(min=0)].masked_fill(places[..., None] < 0, 0)


def _head_gradients(
    view: ModelView, batch: PromptBatch, heads: Sequence[Head]
) -> Mapping[Head, Float[Tensor, "batch pos d_head"]]:
    """Return the gradient of the answer's log-odds with respect to each head's z."""
    if not heads:
        return {}
    of_layer: dict[int, list[Head]] = {}
    for head in heads:
        of_layer.setdefault(head.layer, []).append(head)
    gradients: dict[Head, Tensor] = {}

    def keep(layer: int, z: Tensor, gradient: Tensor) -> None:
        for head in of_layer.get(layer, ()):
            gradients[head] = gradient[:, :, head.head].clone()

    z_gradients(view, batch, log_odds_of(batch), keep)
    return gradients


def _ffn_gradients(
    view: ModelView, batch: PromptBatch, ffns: Sequence[FFN]
) -> Mapping[FFN, Float[Tensor, "batch pos d_model"]]:
    """Return the gradient of the answer's log-odds with respect to what each FFN writes."""
    if not ffns:
        return {}
    tokens = AnswerTokens(batch.answer_tokens, batch.other_label_tokens)
    gradients: dict[FFN, Tensor] = {}

    def log_odds(log_probs: Tensor) -> Float[Tensor, " batch"]:
        return tokens.log_odds(log_probs, torch.arange(len(batch)))[:, 0]

    def keep(site: Stage, layer: int, gradient: Tensor) -> None:
        gradients[FFN(layer)] = gradient.to(view.unembed_device)

    site_gradients(view, batch, log_odds, [(Stage.mlp_out, ffn.layer) for ffn in ffns], keep)
    return gradients


def log_odds_of(batch: PromptBatch) -> Callable[[Tensor], Float[Tensor, "batch 1"]]:
    """Return the function that reads the answer's log-odds from log-probabilities."""
    tokens = AnswerTokens(batch.answer_tokens, batch.other_label_tokens)
    return lambda log_probs: tokens.log_odds(log_probs, torch.arange(len(batch)))
