"""Measure how an earlier component (the *sender*) affects the answer through one head (the *receiver*).

1. One pass over the prompts records what every sender wrote, and each head's queries, keys and values.
2. The receiver's query, keys or values are rebuilt without the sender, and its z is computed from them (see the module
   `receiver`).
3. This z replaces the receiver's own at the last position; all later components run as usual (see `engine`). The
   drop in the answer's score is the effect of the *edge* from the sender to this query, or to these keys or values.

Several receivers are rebuilt independently from the same unedited pass: a change in one does not reach another.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations, capture
from icl_lens.activations.writers import vector_bytes, writer_names
from icl_lens.attribution.head_projection import require_writers
from icl_lens.attribution.scored_tokens import Against
from icl_lens.display import SHOWN_ROWS, Result, format_signed, plural_prompts
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.edit import Edit, Places
from icl_lens.interventions.effects import answer_outcomes, log_odds, outcome_tokens
from icl_lens.interventions.engine import score_sets
from icl_lens.interventions.gradients import z_gradients
from icl_lens.interventions.receiver import PARTS, Means, Part, Receiver
from icl_lens.models.active_edits import active_edits, edits_disabled, edits_suffix
from icl_lens.models.head import AnyHead, Head, as_head
from icl_lens.models.memory import WRITER_BYTES
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import ROLES, PromptBatch
from icl_lens.prompts.roles import EdgeRole, indices_in_roles, role_masks
from icl_lens.prompts.token_ids import TokenPositions, resolve_positions


@dataclass(frozen=True, order=True)
class Edge:
    """What a sender wrote to tokens of one role, as read by a receiver's query, keys or values.

    Example:
        >>> print(il.Edge("L5H1", "k", "L2H0", "true label"))
        L2H0 → L5H1.k (true label)
    """

    receiver: AnyHead
    part: Part
    """The query ("q"), keys ("k") or values ("v")."""
    sender: str
    """A head ("L2H0"), an FFN ("F3") or an embedding ("embed", "pos_embed")."""
    role: EdgeRole = "last"
    """Role of the tokens whose keys or values are read (see `batch.token_roles`; "label" for both kinds of labels). For
    a query, which is read at the last token, it must be "last"."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "receiver", as_head(self.receiver))

    def __str__(self) -> str:
        where = "" if self.part == "q" else f" ({self.role})"
        return f"{self.sender} → {self.receiver}.{self.part}{where}"


@dataclass(frozen=True, repr=False)
class HeadToHeadEffects(Result):
    """What the answer loses when a sender is removed from a receiver's query, keys or values, nats.

    A positive value means that the edge helps the answer. `log_prob` is the drop in log p(target), and `log_odds` that
    in log p(target) − log Σ p(against), NaN for prompts that have nothing to compare with. Both are 0 where the sender
    is not in a layer before the receiver, and NaN for prompts that have no token of the chosen role.

    Example:
        >>> edges = il.head_to_head_effects(model, batch, ["L5H0"], part="k")
        >>> edges.log_prob.shape, edges.senders[:2]
        (torch.Size([1, 1, 30]), ('L0H0', 'L0H1'))
    """

    receivers: tuple[Head, ...]
    senders: tuple[str, ...]
    part: Part
    log_prob: Float[Tensor, "batch receiver sender"]
    log_odds: Float[Tensor, "batch receiver sender"]
    fallback_reason: str = ""
    """Why full forward passes were used instead of the prefix cache; empty if it was used."""
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks. Empty if nothing edits it."""

    def to_frame(self) -> pd.DataFrame:
        """Return receiver, part, sender, and mean log_odds and log_prob lost over the prompts that have them.

        The largest effect on the log-odds comes first, or that on log p if no prompt has log-odds.
        """
        receivers = [str(head) for head in self.receivers for _ in self.senders]
        frame = pd.DataFrame({"receiver": receivers, "part": self.part, "sender": self.senders * len(self.receivers)})
        for name in ("log_odds", "log_prob"):
            frame[name] = getattr(self, name).double().nanmean(0).flatten().cpu().numpy()
        order = ["log_odds", "log_prob"]  # all equal if no prompt has log-odds
        return frame.sort_values(order, ascending=False, ignore_index=True, kind="stable")

    def _shown(self) -> tuple[str, dict[str, list[Any]], int]:
        frame = self.to_frame()
        shown = frame.head(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {name: shown[name].tolist() for name in ("receiver", "part", "sender")}
        columns["log-odds lost"] = [format_signed(value) for value in shown["log_odds"]]
        columns["log p lost"] = [format_signed(value) for value in shown["log_prob"]]
        n = len(self.log_prob)
        title = f"HeadToHeadEffects, nats: {'mean over ' * (n > 1)}{plural_prompts(n)}{edits_suffix(self.edits)}"
        return title, columns, len(frame)


def head_to_head_effects(
    model: Any,
    batch: PromptBatch,
    receivers: Sequence[AnyHead],
    *,
    part: Part,
    senders: Sequence[AnyHead] | None = None,
    at: EdgeRole | TokenPositions = "all",
    targets: Int[Tensor, " batch"] | None = None,
    against: Against = None,
    reference: PromptBatch | None = None,
) -> HeadToHeadEffects:
    """Return the exact effect of each sender on the answer through each receiver's query, keys or values.

    `part` is "q", "k" or "v". The receiver's query at the last position, or its keys or values at the tokens `at`, are
    rebuilt without what the sender wrote there, with norms recomputed. `at` is a role (see `batch.token_roles`; "label"
    for true and false labels), positions, or "all". Only this receiver's output at the last position changes; all later
    components run as usual. The effects of a prompt without a token of the role are NaN: nothing was removed there.

    `senders` are heads, FFNs ("F3") or embeddings ("embed", "pos_embed"); by default, all heads in layers before the
    last receiver. With `reference` prompts, a sender's output is replaced by its mean over their tokens of the same
    role instead of zero. `targets` and `against` are those of `head_effects`.

    If the prefix cache is supported (see `head_effects`), each pair of receiver and sender costs a pass over one token
    per prompt, from the receiver's layer on; otherwise, one full forward pass. Raise InputError for unknown heads or
    senders, invalid targets, a role that no prompt has, and model families whose attention cannot be reproduced.

    Example:
        >>> edges = il.head_to_head_effects(model, batch, ["L5H0"], part="q", senders=["L2H0", "F3"])
        >>> edges.log_prob.shape, edges.fallback_reason
        (torch.Size([1, 1, 2]), '')
    """
    view = ModelView.of(model)
    check_choice("part", part, PARTS)
    heads = view.check_heads(receivers)
    if not heads:
        raise InputError("receivers must name at least one head, got none; pass e.g. ['L2H1']")
    if part == "q" and at not in ("all", "last"):
        raise InputError(f"at must be 'all' or 'last' for queries, got {at!r}")
    names = sender_names(view, heads, senders)
    targets, others = outcome_tokens(view, batch, targets, against)
    means = None if reference is None else sender_means(model, reference)
    masks = _token_masks(batch, at)
    has_tokens = masks.flatten(1).any(1)
    if not bool(has_tokens.any()):
        raise InputError(f"at must be a role that a prompt has, got {at!r}; see batch.token_roles")
    all_names = writer_names(view, view.n_layers)
    writer_index = torch.tensor([all_names.index(name) for name in names])
    # Indices into `heads` and `names` of each receiver and earlier sender, in the order of `new_z`.
    pairs = [
        (i, j)
        for i, head in enumerate(heads)
        for j, index in enumerate(writer_index)
        if index < len(writer_names(view, head.layer)) - 1
    ]
    if not pairs:
        raise InputError(f"senders must include one in a layer before a receiver, got {', '.join(names)}")

    def rebuild_z(acts: Activations, prompts: list[int]) -> Tensor:
        found = list[Tensor]()
        for i, head in enumerate(heads):
            if earlier := [j for receiver, j in pairs if receiver == i]:
                z = Receiver(acts, head, means).z_without_each(part, masks[prompts])[:, 0]
                found.append(z[:, writer_index[earlier].to(z.device)])
        return torch.cat(found, dim=1)

    new_z = torch.cat([rebuild_z(*piece) for piece in _capture_pieces(model, batch, "last" if part == "q" else "all")])
    replaced = [ReplaceZ([heads[i]], new_z, {heads[i]: row}) for row, (i, _) in enumerate(pairs)]
    scores, reason = score_sets(
        view,
        batch,
        [[], *([one] for one in replaced)],
        lambda log_probs, prompts: answer_outcomes(log_probs, targets, others, prompts),
    )
    drops = scores.new_zeros(len(batch), len(heads), len(names), scores.shape[-1])
    drops[:, [i for i, _ in pairs], [j for _, j in pairs]] = scores[:, :1] - scores[:, 1:]
    drops[~has_tokens.to(drops.device)] = torch.nan
    return HeadToHeadEffects(heads, names, part, drops[..., 0], drops[..., 1], reason, active_edits(view))


@dataclass(frozen=True, eq=False)
class ReplaceZ(Edit):
    """Another z of heads at the last position, for each prompt."""

    heads: Iterable[AnyHead]
    z: Float[Tensor, "batch z d_head"]
    index: Mapping[Head, int]
    """Where each head's z is in `z`."""

    @property
    def what(self) -> str:
        return "with other inputs"

    @property
    def needs_batch(self) -> bool:
        return True

    @property
    def at_prompt_end(self) -> bool:
        return True

    def is_only_last(self, batch: PromptBatch) -> bool:
        return True

    def write_z(self, z: Tensor, at: Places, layer: int) -> None:
        index = torch.tensor([self.index[Head(layer, head)] for head in at.head.tolist()], device=self.z.device)
        z[at.row, at.last, at.head] = self.z[at.prompt.to(self.z.device), index].to(z)


@dataclass(frozen=True, eq=False)
class WithoutEdges(Edit):
    """All of some edges removed jointly: what senders wrote, as read by receivers' queries, keys or values.

    Each receiver's z at the last position is rebuilt from a pass without edits, so a change in one receiver does not
    reach another. With `reference` prompts, removed senders are replaced by their means over tokens of the same role
    instead of zero. It needs the prompts that are run, as `Reweight` does. For one edge, the drop equals that of
    `head_to_head_effects`. Raise InputError for unknown heads or senders, and senders that are not in a layer before
    the receiver.

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
        edges = self.edges if isinstance(self.edges, Iterable) and not isinstance(self.edges, str) else [self.edges]
        object.__setattr__(self, "edges", tuple(edges))
        if wrong := [edge for edge in self.edges if not isinstance(edge, Edge)]:
            raise InputError(f"edges must be a list of il.Edge, got {wrong[0]!r}")
        object.__setattr__(self, "heads", tuple(dict.fromkeys(edge.receiver for edge in self.edges)))

    @property
    def what(self) -> str:
        return "without some of their inputs"

    @property
    def needs_batch(self) -> bool:
        return True

    def is_only_last(self, batch: PromptBatch) -> bool:
        return True

    @classmethod
    def prepare(cls, view: ModelView, edits: Sequence[Any], batch: PromptBatch | None) -> Sequence[Edit]:
        assert batch is not None
        found: dict[int, Edit] = {}
        for reference in {id(edit.reference): edit.reference for edit in edits}.values():
            some = [edit for edit in edits if edit.reference is reference]
            removed = removal_masks(view, [edit.edges for edit in some])
            with edits_disabled(view):
                means = None if reference is None else sender_means(view.model, reference)
                replaced = replaced_by_sets(view.model, batch, removed, means, n_sets=len(some))
            found |= {id(edit): one for edit, one in zip(some, replaced, strict=True)}
        return [found[id(edit)] for edit in edits]


RemovalMasks = dict[Head, Bool[Tensor, "set part role _"]]
"""For each receiver, the senders (last axis) that each set of edges removes from its query, keys and values."""


def removal_masks(view: ModelView, edge_sets: Sequence[Iterable[Edge]]) -> RemovalMasks:
    """Return sets of edges as masks; raise InputError for edges that the model does not have."""
    sets = [list(edges) for edges in edge_sets]
    heads = sorted({view.check_head(edge.receiver) for edges in sets for edge in edges})
    names = {head: writer_names(view, head.layer)[:-1] for head in heads}
    removed = {
        head: torch.zeros(len(sets), len(PARTS), len(ROLES), len(names[head]), dtype=torch.bool) for head in heads
    }
    for number, edges in enumerate(sets):
        for edge in edges:
            check_choice("part", edge.part, PARTS)
            check_choice("role", edge.role, (*ROLES, "label"))
            receiver = view.check_head(edge.receiver)
            check_choice("sender", edge.sender, names[receiver])
            if edge.part == "q" and edge.role != "last":
                raise InputError(f"role must be 'last' for a query, got {edge.role!r}")
            sender = names[receiver].index(edge.sender)
            for role in indices_in_roles(edge.role):
                removed[receiver][number, PARTS.index(edge.part), role, sender] = True
    return removed


def replaced_by_sets(
    model: Any, batch: PromptBatch, removed: RemovalMasks, means: Means | None, *, n_sets: int
) -> list[ReplaceZ]:
    """Return for each of `n_sets` sets of edges the edit that removes it."""
    view = ModelView.of(model)
    index: list[dict[Head, int]] = [{} for _ in range(n_sets)]
    sets_of_head: dict[Head, Tensor] = {}
    n_indices = 0
    for head, mask in sorted(removed.items()):
        sets_of_head[head] = mask.flatten(1).any(1).nonzero()[:, 0]
        for number in sets_of_head[head].tolist():
            index[number][head] = n_indices
            n_indices += 1

    def rebuild_z(acts: Activations, prompts: list[int]) -> Tensor:
        found = list[Tensor]()
        for head, numbers in sets_of_head.items():
            q, k, v = removed[head][numbers].to(acts.z.device).unbind(1)
            found.append(Receiver(acts, head, means).z_without_sets({"q": q, "k": k, "v": v}))
        return torch.cat(found, dim=1) if found else acts.z.new_empty(len(prompts), 0, view.d_head)

    new_z = torch.cat([rebuild_z(*piece) for piece in _capture_pieces(model, batch, "all")])
    return [ReplaceZ(list(one), new_z, one) for one in index]


def sender_means(model: Any, batch: PromptBatch) -> Means:
    """Return the mean of what each sender wrote to tokens of each role; 0 for roles that do not occur.

    True and false labels have one mean, so that it does not reveal which labels equal the answer.
    """
    view = ModelView.of(model)
    total = torch.zeros(len(ROLES), len(writer_names(view, view.n_layers)) - 1, view.d_model, dtype=torch.float64)
    count = torch.zeros(len(ROLES), dtype=torch.float64)
    for acts, _ in _capture_pieces(model, batch, "all"):
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


def estimate_effects(
    model: Any, batch: PromptBatch, receivers: Sequence[Head], means: Means | None
) -> dict[Head, Float[Tensor, "batch part edge_role _"]]:
    """Estimate the effects of single edges on the answer's log-odds, by receiver; the last axis has its senders.

    The receiver's z without the sender is exact; its effect on the log-odds is linearized. Roles are `EDGE_ROLES`.
    """
    view, masks = ModelView.of(model), role_masks(batch)
    found: dict[Head, list[Tensor]] = {head: [] for head in receivers}
    for acts, prompts in _capture_pieces(model, batch, "all"):
        gradients = _log_odds_gradients(view, acts.batch)
        for head in receivers:
            receiver = Receiver(acts, head, means)
            drops = []
            for part in PARTS:
                rebuilt = receiver.z_without_each(part, masks[prompts].to(receiver.z.device))
                change = receiver.z[:, None, None] - rebuilt
                gradient = gradients[head.layer][:, head.head].to(change)
                drops.append(einsum(gradient, change, "batch d, batch role sender d -> batch role sender"))
            found[head].append(torch.stack(drops, dim=1))
    return {head: torch.cat(pieces) for head, pieces in found.items()}


def sender_names(view: ModelView, receivers: Sequence[Head], senders: Sequence[AnyHead] | None) -> tuple[str, ...]:
    """Return the names of senders; by default, all heads in layers before the last receiver."""
    if senders is None:
        last_layer = max(head.layer for head in receivers)
        return tuple(str(head) for head in view.heads() if head.layer < last_layer)
    known = writer_names(view, view.n_layers)[:-1]
    names = [
        sender if isinstance(sender, str) and sender in known else str(view.check_head(sender)) for sender in senders
    ]
    if not names:
        raise InputError("senders must name at least one head, FFN or embedding, got none; omit it for all heads")
    return tuple(dict.fromkeys(names))


def _token_masks(batch: PromptBatch, at: EdgeRole | TokenPositions) -> Bool[Tensor, "batch 1 pos"]:
    """Return which tokens `at` selects; raise InputError for positions outside a prompt."""
    if isinstance(at, str) and at in (*ROLES, "label"):
        return role_masks(batch, [cast(EdgeRole, at)])
    mask = torch.zeros_like(batch.tokens, dtype=torch.bool)
    for row, positions in enumerate(resolve_positions(cast(TokenPositions, at), (batch.last + 1).tolist())):
        mask[row, positions] = True
    return mask[:, None]


def _capture_pieces(
    model: Any, batch: PromptBatch, positions: TokenPositions
) -> Iterator[tuple[Activations, list[int]]]:
    """Yield activations with the writers at `positions` for a few prompts at a time, and the indices of the prompts."""
    view = ModelView.of(model)
    bytes_per_prompt = vector_bytes(view) * (1 if positions == "last" else batch.tokens.shape[1])
    for piece in torch.arange(len(batch)).split(max(1, WRITER_BYTES // bytes_per_prompt)):
        yield capture(model, batch[piece.tolist()], writers=positions), piece.tolist()


def _log_odds_gradients(view: ModelView, batch: PromptBatch) -> dict[int, Float[Tensor, "batch head d_head"]]:
    """Return each layer's gradient of the answer's log-odds with respect to z at the last position."""

    def of_answer(log_probs: Tensor) -> Float[Tensor, "batch 1"]:
        own = log_probs.gather(1, batch.answer_tokens.clone().to(log_probs.device)[:, None])
        return log_odds(log_probs, own, batch.other_label_tokens, torch.arange(len(batch)))

    _, (gradients,) = z_gradients(view, batch, of_answer)
    prompts, last = torch.arange(len(batch)), batch.last.cpu()
    return {layer: gradient[prompts, last] for layer, gradient in enumerate(gradients)}
