"""Measure how an earlier component (the *writer*) affects the answer through one head (the
*reader*).

Each writer is removed from the reader's query, keys or values (see `edits.edges`); the drop in the
answer's score is the effect of the *edge* from the writer to this query, or to these keys or
values.

Several readers are rebuilt independently from the same unedited pass: a change in one does not
reach another.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

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
from icl_lens.measures.effects import answer_outcomes, log_odds, outcome_tokens
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
        """Return reader, part, writer, and mean log_odds and log_prob lost over the prompts that
        have them.

        The largest effect on the log-odds comes first, or that on log p if no prompt has log-odds.
        """
        readers = [str(head) for head in self.readers for _ in self.writers]
        frame = pd.DataFrame(
            {"reader": readers, "part": self.part, "writer": self.writers * len(self.readers)}
        )
        for name in ("log_odds", "log_prob"):
            frame[name] = getattr(self, name).double().nanmean(0).flatten().cpu().numpy()
        order = ["log_odds", "log_prob"]  # all equal if no prompt has log-odds
        return frame.sort_values(order, ascending=False, ignore_index=True, kind="stable")

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        frame = self.to_frame()
        shown = frame.head(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {
            name: shown[name].tolist() for name in ("reader", "part", "writer")
        }
        columns["log-odds lost"] = [signed(value) for value in shown["log_odds"]]
        columns["log p lost"] = [signed(value) for value in shown["log_prob"]]
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
    names = chosen_writers(view, heads, writers)
    texts = tuple(map(writer_text, names))
    means = None if reference is None else writer_means(model, reference)
    if method == "gradient":
        if targets is not None or against is not None:
            raise InputError(
                "targets and against must be omitted for method='gradient', which scores the "
                "answers"
            )
        with progress_switch(progress):
            return _estimated(model, batch, heads, names, part, at, reader_at, means)
    targets, others = outcome_tokens(view, batch, targets, against)
    masks, read_by = _token_masks(batch, at), _token_masks(batch, reader_at)
    for name, value, mask in (("at", at, masks), ("reader_at", reader_at, read_by)):
        if not bool(mask.any()):
            raise InputError(
                f"{name} must be a role that a prompt has, got {short_repr(value)}; see "
                "batch.token_roles"
            )
    places = positions_in(read_by[:, 0])
    n_places = places.shape[1]
    chains = tuple(name for name in names if isinstance(name, tuple))
    read = read_by if part == "q" else masks
    for chain in chains:
        if not bool((role_masks(batch, [chain[0].reader_at]) & read).any()):
            name, got = ("reader_at", reader_at) if part == "q" else ("at", at)
            raise InputError(
                f"{name} must be {chain[0].reader_at!r} like reader_at of the writer, got "
                f"{short_repr(got)}"
            )
    index = [[writer_index(view, name, head, chains) for name in names] for head in heads]
    # Indices into `heads` and `names` of each reader and earlier writer, in the order of `new_z`.
    pairs = [
        (i, j) for i in range(len(heads)) for j in range(len(names)) if index[i][j] is not None
    ]
    if not pairs:
        raise InputError(
            f"writers must include one in a layer before a reader, got {', '.join(texts)}"
        )

    def rebuild_z(acts: Activations, prompts: list[int]) -> Tensor:
        found, more = list[Tensor](), chain_vectors(acts, chains, means)
        for head, columns in zip(heads, index, strict=True):
            if earlier := [column for column in columns if column is not None]:
                z = Reader(acts, head, means, places[prompts], more).z_without_each(
                    part, masks[prompts]
                )[:, 0]
                found.append(z[:, earlier].flatten(1, 2))
        return torch.cat(found, dim=1)

    kept = "last" if part == "q" and reader_at == "last" and not chains else "all"
    rebuilt = list[Tensor]()
    with progress_switch(progress), steps("rebuilding heads", len(batch)) as advance:
        for acts, prompts in capture_pieces(model, batch, kept):
            rebuilt.append(rebuild_z(acts, prompts))
            advance(len(prompts))
    new_z = torch.cat(rebuilt)
    back = tokens_back(batch, places).repeat(1, len(pairs)).to(new_z.device)
    replaced = [
        ReplaceZ([heads[i]], new_z, back, {heads[i]: range(row * n_places, (row + 1) * n_places)})
        for row, (i, _) in enumerate(pairs)
    ]
    with progress_switch(progress):
        scores, reason = score_sets(
            view,
            batch,
            [[], *([one] for one in replaced)],
            lambda log_probs, prompts: answer_outcomes(log_probs, targets, others, prompts),
        )
    drops = scores.new_zeros(len(batch), len(heads), len(names), scores.shape[-1])
    drops[:, [i for i, _ in pairs], [j for _, j in pairs]] = scores[:, :1] - scores[:, 1:]
    has_tokens = torch.stack(
        [_has_tokens(batch, name, read) for name in names], dim=1
    ) & read_by.any(2)
    drops = drops.masked_fill(~has_tokens.to(drops.device)[:, None, :, None], torch.nan)
    return HeadToHeadEffects(
        heads, texts, part, drops[..., 0], drops[..., 1], reason, active_edits(view)
    )


def _estimated(
    model: Any,
    batch: PromptBatch,
    readers: Sequence[Head],
    writers: Sequence[str | Chain],
    part: Part,
    at: EdgeRole | TokenPositions,
    reader_at: EdgeRole | TokenPositions,
    means: Means | None,
) -> HeadToHeadEffects:
    """Return the estimates of `estimate_effects` for some writers, 0 where a writer is not before
    the reader.
    """
    role = reader_at if part == "q" else at
    for name, value in (("reader_at", reader_at), ("at", role)):
        if value not in EDGE_ROLES:
            raise InputError(
                f"{name} must be a role for method='gradient', got {short_repr(value)}; use one of "
                f"{EDGE_ROLES}"
            )
    if any(isinstance(writer, tuple) for writer in writers):
        raise InputError(
            "writers must be heads, FFNs or embeddings for method='gradient', got a chain"
        )
    view, column = ModelView.of(model), EDGE_ROLES.index(cast(EdgeRole, role))
    effects = torch.zeros(len(batch), len(readers), len(writers))
    estimates = estimate_effects(model, batch, readers, means, cast(EdgeRole, reader_at))
    for place, reader in enumerate(readers):
        earlier = writer_names(view, reader.layer)[:-1]
        of_reader = estimates[reader][:, PARTS.index(part), column].cpu()
        for number, writer in enumerate(writers):
            if writer in earlier:
                effects[:, place, number] = of_reader[:, earlier.index(writer)]
    names = tuple(map(writer_text, writers))
    return HeadToHeadEffects(
        tuple(readers),
        names,
        part,
        torch.full_like(effects, torch.nan),
        effects,
        "",
        active_edits(view),
    )


def estimate_effects(
    model: Any,
    batch: PromptBatch,
    readers: Sequence[Head],
    means: Means | None,
    reader_at: EdgeRole = "last",
) -> dict[Head, Float[Tensor, "batch part edge_role _"]]:
    """Estimate the effects of single edges on the answer's log-odds, by reader; the last axis has
    its writers.

    The reader's z without the writer is exact; its effect on the log-odds is linearized. Roles are
    `EDGE_ROLES`.
    """
    view, masks = ModelView.of(model), role_masks(batch)
    places = positions_in(role_masks(batch, [reader_at])[:, 0])
    found: dict[Head, list[Tensor]] = {head: [] for head in readers}
    with steps("estimating effects", len(batch)) as advance:
        for acts, prompts in capture_pieces(model, batch, "all"):
            gradients = log_odds_gradients(view, acts.batch)
            for head in readers:
                reader = Reader(acts, head, means, places[prompts])
                rows = torch.arange(len(prompts), device=reader.places.device)[:, None]
                at = rows, reader.places.clamp(min=0)
                gradient = gradients[head.layer].to(reader.z)[*at, head.head]
                gradient = gradient.masked_fill(reader.places[..., None] < 0, 0)
                drops = []
                for part in PARTS:
                    rebuilt = reader.z_without_each(part, masks[prompts].to(reader.z.device))
                    change = reader.z[:, None, None] - rebuilt
                    equation = "batch place d, batch role writer place d -> batch role writer"
                    drops.append(einsum(gradient, change, equation))
                found[head].append(torch.stack(drops, dim=1))
            advance(len(prompts))
    return {head: torch.cat(pieces) for head, pieces in found.items()}


def chosen_writers(
    view: ModelView, readers: Sequence[Head], writers: Sequence[AnyHead | Edge | Chain] | None
) -> tuple[str | Chain, ...]:
    """Return the names of writers, and chains; by default, all heads in layers before the last
    reader.
    """
    if writers is None:
        last_layer = max(head.layer for head in readers)
        return tuple(str(head) for head in view.heads() if head.layer < last_layer)
    known = writer_names(view, view.n_layers)[:-1]

    def named(writer: AnyHead | Edge | Chain) -> str | Chain:
        if isinstance(writer, str):
            return writer if writer in known else str(view.check_head(writer))
        is_head = isinstance(writer, tuple) and not any(isinstance(one, Edge) for one in writer)
        return str(view.check_head(cast(Any, writer))) if is_head else chain_of(writer)

    names = list(map(named, writers))
    if not names:
        raise InputError(
            "writers must name at least one head, FFN or embedding, got none; omit it for all heads"
        )
    return tuple(dict.fromkeys(names))


def _token_masks(batch: PromptBatch, at: EdgeRole | TokenPositions) -> Bool[Tensor, "batch 1 pos"]:
    """Return which tokens `at` selects; raise InputError for positions outside a prompt."""
    if isinstance(at, str) and at in (*ROLES, "label"):
        return role_masks(batch, [cast(EdgeRole, at)])
    mask = torch.zeros_like(batch.tokens, dtype=torch.bool)
    for row, positions in enumerate(
        resolve_positions(cast(TokenPositions, at), (batch.last + 1).tolist())
    ):
        mask[row, positions] = True
    return mask[:, None]


def _has_tokens(
    batch: PromptBatch, writer: str | Chain, read: Bool[Tensor, "batch 1 pos"]
) -> Bool[Tensor, " batch"]:
    """Return for which prompts some of the tokens that are read exist, and of a chain, those of its
    edges as well.
    """
    if isinstance(writer, str):
        return read.flatten(1).any(1)
    own = read & role_masks(batch, [writer[0].reader_at])
    edges = [
        _has_tokens(
            batch,
            cast(str | Chain, edge.writer),
            own if edge.part == "q" else role_masks(batch, [edge.role]),
        )
        for edge in writer
    ]
    return own.flatten(1).any(1) & torch.stack(edges).any(0)


def log_odds_gradients(
    view: ModelView, batch: PromptBatch, hooks: Iterable[tuple[str, Callable[..., Any]]] = ()
) -> Sequence[Float[Tensor, "batch pos head d_head"]]:
    """Return each layer's gradient of the answer's log-odds with respect to z; `hooks` are those of
    `z_gradients`.
    """

    def of_answer(log_probs: Tensor) -> Float[Tensor, "batch 1"]:
        own = log_probs.gather(1, batch.answer_tokens.clone().to(log_probs.device)[:, None])
        return log_odds(log_probs, own, batch.other_label_tokens, torch.arange(len(batch)))

    (gradients,) = z_gradients(view, batch, of_answer, lambda layer, z, gradient: gradient, hooks)
    return gradients
