"""Measure what an earlier component (the *writer*) does to the answer through one head, the
*reader*.

1. `head_to_head_effects` removes each writer from the reader's query, keys or values (see
   `edits.edges`). The drop in the answer's score is the effect of the *edge* from the writer to
   this query, or to these keys or values.
2. `estimate_effects` has first-order estimates of all edges into some heads at once.

Several readers are rebuilt independently from the same unedited pass: a change in one does not
reach another.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.activations.writers import writer_names
from icl_lens.attribution.scored_tokens import Against
from icl_lens.edits.edges import (
    Chain,
    Edge,
    ReplaceZ,
    capture_pieces,
    chain_of,
    chain_vectors,
    positions_in,
    tokens_back,
    writer_index,
    writer_means,
    writer_text,
)
from icl_lens.edits.edit import PARTS, Part
from icl_lens.edits.reader import Means, Reader
from icl_lens.engine.gradients import z_gradients
from icl_lens.engine.score import score_sets
from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.measures.effects import AnswerTokens
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import ROLES, PromptBatch, check_batch
from icl_lens.prompts.roles import EDGE_ROLES, EdgeRole, role_masks
from icl_lens.prompts.token_ids import TokenPositions, resolve_positions
from icl_lens.result.base import Result
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS, plural_prompts
from icl_lens.result.view import View, table_view
from icl_lens.runs.progress import progress_switch, steps


@dataclass(frozen=True, repr=False)
class HeadToHeadEffects(Result):
    """What the answer loses when a writer is removed from a reader's query, keys or values, nats.

    A positive value means that the edge helps the answer. `log_prob` is the drop in log p(target),
    and `log_odds` that in log p(target) − log Σ p(against), NaN for prompts that have nothing to
    compare with. Both are 0 where the writer is not in a layer before the reader, and NaN for
    prompts that have no token of the chosen role.

    Example:
        >>> edges = il.head_to_head_effects(model, batch, ["L5H0"], part="k")
        >>> edges.log_prob.shape, edges.writers[:2]
        (torch.Size([1, 1, 30]), ('L0H0', 'L0H1'))
    """

    version: ClassVar[int] = 2
    readers: tuple[Head, ...]
    writers: tuple[str, ...]
    part: Part
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

    def to_frame(self) -> pd.DataFrame:
        """Return one row per reader and writer: reader, part, writer, log_odds and log_prob.

        The last two are the mean losses, over the prompts that have them. The largest effect on the
        log-odds comes first, or that on log p if no prompt has log-odds.
        """
        readers = np.repeat([str(head) for head in self.readers], len(self.writers))
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
        title = f"HeadToHeadEffects, nats: {over}{edits_suffix(self.edits)}"
        return table_view(title, columns, len(frame))


def head_to_head_effects(
    model: Any,
    batch: PromptBatch,
    readers: Sequence[AnyHead],
    *,
    part: Part,
    writers: Sequence[AnyHead | Edge | Chain] | None = None,
    at: EdgeRole | TokenPositions = "all",
    reader_at: EdgeRole | TokenPositions = "last",
    targets: Int[Tensor, " batch"] | None = None,
    against: Against = None,
    reference: PromptBatch | None = None,
    method: Literal["exact", "gradient"] = "exact",
    progress: bool | None = None,
) -> HeadToHeadEffects:
    """Return the effect of each writer on the answer through each reader's query, keys or values.

    1. `reader_at` are the tokens at which the reader acts: it attends from them and writes to them.
       They are the last token, those of a role (see `batch.token_roles`; "label" for true and false
       labels), positions, or "all".
    2. `part` is "q", "k" or "v". The reader's queries at `reader_at`, or its keys or values at the
       tokens `at`, are rebuilt without what the writer wrote there, with norms recomputed. `at`
       takes what `reader_at` takes.
    3. The reader's output at `reader_at` is computed from them. Elsewhere, and in other heads,
       nothing changes here.
    4. All later components run as usual on what has changed, at all later positions.

    The effects of a prompt without such tokens, or without those of a chain, are NaN: nothing was
    removed there.

    `writers` are heads, FFNs ("F3"), embeddings ("embed", "pos_embed") or edges into earlier heads,
    for *chains* (see `Edge`); by default, all heads in layers before the last reader. With
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
    """
    view = ModelView.of(model)
    check_choice("part", part, PARTS)
    check_choice("method", method, ("exact", "gradient"))
    check_batch(batch)
    heads = view.check_heads(readers)
    if not heads:
        raise InputError("readers must name at least one head, got none; pass e.g. ['L2H1']")
    if part == "q" and at != "all" and at != reader_at:
        raise InputError(
            f"at must be 'all' or {reader_at!r} like reader_at for queries, got {short_repr(at)}"
        )
    checked_writers = _checked_writers(view, heads, writers)
    means = None if reference is None else writer_means(model, reference)
    if method == "gradient":
        if targets is not None or against is not None:
            raise InputError(
                "targets and against must be omitted for method='gradient', which scores the "
                "answers"
            )
        role = reader_at if part == "q" else at
        with progress_switch(progress):
            return _estimated(model, batch, heads, checked_writers, part, role, reader_at, means)
    tokens = AnswerTokens.from_batch(view, batch, targets, against)
    inputs = _ReaderInputs.of(batch, part, at, reader_at)
    edges = _RemovedEdges.of(view, heads, checked_writers, inputs)
    with progress_switch(progress):
        sets: list[list[ReplaceZ]] = [[]]
        for edit in edges.edits(model, means):
            sets.append([edit])
        outcomes, reason = score_sets(view, batch, sets, tokens.outcomes)
    shape = len(batch), len(heads), len(checked_writers), outcomes.shape[-1]
    lost = outcomes.new_zeros(shape)
    readers_of_edges = [edge.reader for edge in edges.edges]
    writers_of_edges = [edge.writer for edge in edges.edges]
    lost[:, readers_of_edges, writers_of_edges] = outcomes[:, :1] - outcomes[:, 1:]
    is_removed = inputs.lack_a_writer(checked_writers).to(lost.device)
    lost = lost.masked_fill(~is_removed[:, None, :, None], torch.nan)
    log_prob, log_odds = lost.unbind(-1)
    names = tuple(map(writer_text, checked_writers))
    return HeadToHeadEffects(heads, names, part, log_prob, log_odds, reason, active_edits(view))


def _checked_writers(
    view: ModelView, readers: Sequence[Head], writers: Sequence[AnyHead | Edge | Chain] | None
) -> tuple[str | Chain, ...]:
    """Return the names of writers, and chains.

    The default is all heads in layers before the last reader. Raise InputError for no writers, and
    for those that the model does not have.
    """
    if writers is None:
        last_layer = max(head.layer for head in readers)
        return tuple(str(head) for head in view.heads() if head.layer < last_layer)
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
    part: Part
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
        part: Part,
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
        """Tokens whose queries, keys or values lack a writer."""
        return self.reader_tokens if self.part == "q" else self.at_tokens

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
            name, value = ("reader_at", self.reader_at) if self.part == "q" else ("at", self.at)
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
        edge_tokens = chain_tokens if edge.part == "q" else role_masks(batch, [edge.role])
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

    heads: Sequence[Head]
    edges: Sequence[_RemovedEdge]
    """By reader, then by writer."""
    chains: tuple[Chain, ...]
    inputs: _ReaderInputs

    @classmethod
    def of(
        cls,
        view: ModelView,
        heads: Sequence[Head],
        writers: Sequence[str | Chain],
        inputs: _ReaderInputs,
    ) -> "_RemovedEdges":
        """Return the pairs; raise InputError if no writer is before a reader."""
        chains = tuple(writer for writer in writers if isinstance(writer, tuple))
        inputs.check_chains(chains)
        edges = []
        for reader, head in enumerate(heads):
            for number, writer in enumerate(writers):
                index = writer_index(view, writer, head, chains)
                if index is not None:
                    edges.append(_RemovedEdge(reader, number, index))
        if not edges:
            raise InputError(
                "writers must include one in a layer before a reader, got "
                f"{', '.join(map(writer_text, writers))}"
            )
        return cls(heads, edges, chains, inputs)

    def edits(self, model: Any, means: Means | None) -> list[ReplaceZ]:
        """Return, for each pair, the edit that gives the reader its z without the writer."""
        batch = self.inputs.batch
        places = self.inputs.places
        n_places = places.shape[1]
        is_last_only = self.inputs.part == "q" and self.inputs.reader_at == "last"
        captured = "last" if is_last_only and not self.chains else "all"
        pieces = []
        with steps("rebuilding heads", len(batch)) as advance:
            for acts, prompts in capture_pieces(model, batch, captured):
                pieces.append(self._rebuilt_z(acts, prompts, places, means))
                advance(len(prompts))
        new_z = torch.cat(pieces)
        back = tokens_back(batch, places).repeat(1, len(self.edges)).to(new_z.device)
        edits = []
        for number, edge in enumerate(self.edges):
            head = self.heads[edge.reader]
            places_of_edge = range(number * n_places, (number + 1) * n_places)
            edits.append(ReplaceZ([head], new_z, back, {head: places_of_edge}))
        return edits

    def _rebuilt_z(
        self,
        acts: Activations,
        prompts: list[int],
        places: Int[Tensor, "batch place"],
        means: Means | None,
    ) -> Float[Tensor, "batch z d_head"]:
        """Return z of all pairs at all places for some prompts, pair by pair."""
        vectors = chain_vectors(acts, self.chains, means)
        tokens = self.inputs.at_tokens[prompts]
        pieces = []
        for number, head in enumerate(self.heads):
            indices = [edge.writer_of_reader for edge in self.edges if edge.reader == number]
            if indices:
                reader = Reader(acts, head, means, places[prompts], vectors)
                z = reader.z_without_each(self.inputs.part, tokens)[:, 0]
                pieces.append(z[:, indices].flatten(1, 2))
        return torch.cat(pieces, dim=1)


def _estimated(
    model: Any,
    batch: PromptBatch,
    readers: Sequence[Head],
    writers: Sequence[str | Chain],
    part: Part,
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
        earlier = writer_names(view, reader.layer)[:-1]
        by_writer = estimates[reader][:, PARTS.index(part), role_index].cpu()
        for number, writer in enumerate(writers):
            if writer in earlier:
                log_odds[:, reader_number, number] = by_writer[:, earlier.index(writer)]
    return HeadToHeadEffects(
        readers=tuple(readers),
        writers=tuple(map(writer_text, writers)),
        part=part,
        log_prob=torch.full_like(log_odds, torch.nan),
        log_odds=log_odds,
        edits=active_edits(view),
    )


def estimate_effects(
    model: Any,
    batch: PromptBatch,
    readers: Sequence[Head],
    means: Means | None,
    reader_at: EdgeRole = "last",
) -> dict[Head, Float[Tensor, "batch part edge_role _"]]:
    """Estimate the effects of single edges on the answer's log-odds, by reader.

    The last axis has the reader's writers; roles are `EDGE_ROLES`. The reader's z without the
    writer is exact; its effect on the log-odds is linearized.
    """
    view = ModelView.of(model)
    masks = role_masks(batch)
    places = positions_in(role_masks(batch, [reader_at])[:, 0])
    pieces: dict[Head, list[Tensor]] = {head: [] for head in readers}
    with steps("estimating effects", len(batch)) as advance:
        for acts, prompts in capture_pieces(model, batch, "all"):
            gradients = log_odds_gradients(view, acts.batch)
            for head in readers:
                reader = Reader(acts, head, means, places[prompts])
                gradient = gradients[head.layer][:, :, head.head]
                pieces[head].append(_estimates_of_reader(reader, gradient, masks[prompts]))
            advance(len(prompts))
    return {head: torch.cat(estimates) for head, estimates in pieces.items()}


def _estimates_of_reader(
    reader: Reader,
    gradient: Float[Tensor, "batch pos d_head"],
    masks: Bool[Tensor, "batch role pos"],
) -> Float[Tensor, "batch part role writer"]:
    """Return what the log-odds lose without each writer, if they were linear in the reader's z."""
    rows = torch.arange(len(gradient), device=reader.places.device)[:, None]
    at_places = gradient.to(reader.z)[rows, reader.places.clamp(min=0)]
    at_places = at_places.masked_fill(reader.places[..., None] < 0, 0)
    by_part = []
    for part in PARTS:
        z_without = reader.z_without_each(part, masks.to(reader.z.device))
        change = reader.z[:, None, None] - z_without
        equation = "batch place d, batch role writer place d -> batch role writer"
        by_part.append(einsum(at_places, change, equation))
    return torch.stack(by_part, dim=1)


def log_odds_gradients(
    view: ModelView, batch: PromptBatch, hooks: Iterable[tuple[str, Callable[..., Any]]] = ()
) -> Sequence[Float[Tensor, "batch pos head d_head"]]:
    """Return each layer's gradient of the answer's log-odds with respect to z.

    `hooks` are those of `z_gradients`.
    """
    tokens = AnswerTokens(batch.answer_tokens, batch.other_label_tokens)

    def log_odds(log_probs: Tensor) -> Float[Tensor, "batch 1"]:
        return tokens.log_odds(log_probs, torch.arange(len(batch)))

    (gradients,) = z_gradients(view, batch, log_odds, lambda layer, z, gradient: gradient, hooks)
    return gradients
