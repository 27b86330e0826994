"""Split a head's attention scores by what earlier components wrote, to explain where it attends.

1. The input x of the head's layer is a sum over *writers* c: embeddings, earlier heads and FFNs,
   and biases.
2. With the scale of each norm frozen at the model's own value, queries and keys are linear in x, so
   they split exactly: q = Σ_c q_c at the last position and k = Σ_d k_d at each key.
3. The score is bilinear, scale · (R q) · (R k) with rotations R, so it splits into pairs: S_cd =
   scale · (R q_c) · (R k_d). The query side of c is Σ_d S_cd, the key side of d is Σ_c S_cd; each
   side sums to the score.
4. A constant added to all scores does not change the attention. Therefore, interpret contrasts
   between groups of keys, not single scores.
5. `pattern_without` returns the exact attention pattern without a writer, with norms frozen or
   recomputed.

Scores include neither a soft-cap nor ALiBi's bias, which does not depend on writers; patterns
include both. Source: docs/howto/numbers.md.
"""

from dataclasses import dataclass, field
from typing import Literal

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.errors import InputError, check_choice
from icl_lens.models import attention_scores
from icl_lens.models.active_edits import edits_suffix
from icl_lens.models.head import AnyHead, Head
from icl_lens.prompts.token_ids import TokenPositions
from icl_lens.reading.activations import Activations
from icl_lens.reading.head_projection import (
    AttentionRow,
    HeadProjection,
    check_attention,
    check_parts,
    key_positions,
    keys_of_label,
    require_writers,
)
from icl_lens.reading.queries_keys_values import head_slice
from icl_lens.reading.scored_tokens import check_activations
from icl_lens.result.base import Displayed, Result
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS, columns_first, long_frame, plural_prompts
from icl_lens.result.view import View, table_view

Side = Literal["query", "key"]


@dataclass(frozen=True, repr=False)
class ScoreContrast(Result):
    """A difference between a head's scores at two groups of keys, split by writer; made by
    `ScoreParts.contrast`.

    `query_side` and `key_side` each sum to `value` over the writers.

    Example:
        >>> parts = il.attention_score_parts(il.capture(model, batch, writers=True), "L2H0")
        >>> parts.contrast(parts.of_label(batch.answer)).top_pairs(3).columns.tolist()
        ['prompt', 'query_writer', 'key_writer', 'value']
    """

    head: Head
    writers: tuple[str, ...]
    value: Float[Tensor, " batch"]
    query_side: Float[Tensor, "batch writer"]
    key_side: Float[Tensor, "batch writer"]
    query_parts: Float[Tensor, "batch writer d_head"]
    """Each writer's part of the query, rotated, times the score scale."""
    key_parts: Float[Tensor, "batch writer d_head"]
    """Each writer's part of the difference between the mean keys of the two groups, rotated."""

    @property
    def pairs(self) -> Float[Tensor, "batch writer writer"]:
        """`value` by query writer and key writer.

        Summed over key writers, it is `query_side`; summed over query writers, `key_side`.
        """
        return einsum(
            self.query_parts, self.key_parts, "batch query d, batch key d -> batch query key"
        )

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        query, key = self.query_side.mean(0), self.key_side.mean(0)
        order = torch.maximum(query.abs(), key.abs()).argsort(descending=True)[:SHOWN_ROWS].tolist()
        columns: dict[str, list[object]] = {
            "writer": [self.writers[i] for i in order],
            "query side": [signed(float(query[i])) for i in order],
            "key side": [signed(float(key[i])) for i in order],
        }
        mean = f"difference of scores {signed(float(self.value.mean()))}"
        title = f"ScoreContrast({self.head}, mean of {plural_prompts(len(self.value))}; {mean})"
        return table_view(title, columns, len(query))

    def to_frame(self) -> pd.DataFrame:
        """Return writer, query_side, key_side and prompt: one row per prompt and writer."""
        frame = long_frame(self.query_side, ("prompt", "writer"), value="query_side")
        frame["writer"] = list(self.writers) * len(self.query_side)
        frame = frame.assign(key_side=self.key_side.flatten().cpu().numpy())
        return columns_first(frame, "writer", "query_side", "key_side")

    def top_pairs(self, k: int = 10) -> pd.DataFrame:
        """Return each prompt's k largest pairs by magnitude: prompt, query_writer, key_writer and
        value.
        """
        n, n_writers = self.query_side.shape
        pairs = self.pairs.flatten(1)
        index = pairs.abs().topk(min(k, n_writers**2), dim=-1).indices
        rows = torch.arange(n, device=index.device)[:, None].expand_as(index)
        return pd.DataFrame(
            {
                "prompt": rows.flatten().cpu().numpy(),
                "query_writer": [self.writers[i] for i in (index // n_writers).flatten().tolist()],
                "key_writer": [self.writers[i] for i in (index % n_writers).flatten().tolist()],
                "value": pairs.gather(1, index).flatten().cpu().numpy(),
            }
        )


@dataclass(frozen=True, repr=False)
class ScoreParts(Displayed):
    """One head's attention scores from the last position to some keys, split by writer; see
    `attention_score_parts`.

    Scores are those before soft-cap, ALiBi and softmax. Where a prompt has fewer keys than others,
    the missing ones have position -1 and score 0.

    Example:
        >>> acts = il.capture(model, batch, writers=True)
        >>> parts = il.attention_score_parts(acts, "L2H0")
        >>> bool((parts.query_side.sum(-1) - parts.scores).abs().max() < 1e-4)
        True
        >>> why = parts.contrast(parts.of_label(batch.answer))
        >>> bool((why.key_side.sum(-1) - why.value).abs().max() < 1e-4)
        True
    """

    acts: Activations
    head: Head
    writers: tuple[str, ...]
    """Names: "embed", "pos_embed", "L0H0", …, "F0", …, "bias" (b_O, b_Q, b_K and shifts of
    norms).
    """
    positions: Int[Tensor, "batch key"]
    scores: Float[Tensor, "batch key"]
    query_parts: Float[Tensor, "batch writer d_head"]
    """Each writer's part of the query, rotated, times the score scale."""
    key_parts: Float[Tensor, "batch key writer d_head"]
    """Each writer's part of each key, rotated."""
    row: AttentionRow
    """Scores from the last position to all positions, not only to `positions`, as `pattern` needs
    them.
    """
    query_projection: HeadProjection = field(repr=False)
    """The map from the layer's input to the query."""
    key_projection: HeadProjection = field(repr=False)
    """The map from the layer's input to the keys."""

    def to_frame(self) -> pd.DataFrame:
        """Return writer, position (of the key), query_side, key_side and prompt: one row per
        prompt, key and writer, without the padding of shorter prompts.
        """
        frame = long_frame(self.query_side, ("prompt", "position", "writer"), value="query_side")
        frame["position"] = (
            self.positions.flatten().repeat_interleave(len(self.writers)).cpu().numpy()
        )
        frame["writer"] = list(self.writers) * self.positions.numel()
        frame["key_side"] = self.key_side.detach().float().cpu().flatten().numpy()
        frame = columns_first(frame, "writer", "position", "query_side", "key_side")
        return frame.query("position >= 0").reset_index(drop=True)

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        is_key = self.positions >= 0  # the rest is padding
        n, n_keys = plural_prompts(len(self.positions)), int(is_key.sum())
        title = (
            f"ScoreParts({self.acts.view.name} {self.head}: {n_keys} keys of {n}, "
            f"{len(self.writers)} writers)"
        )
        query, key = (side[is_key].mean(0) for side in (self.query_side, self.key_side))
        order = torch.maximum(query.abs(), key.abs()).argsort(descending=True)[:SHOWN_ROWS].tolist()
        columns: dict[str, list[object]] = {
            "writer": [self.writers[i] for i in order],
            "query side, mean": [signed(float(query[i])) for i in order],
            "key side, mean": [signed(float(key[i])) for i in order],
        }
        return table_view(title + edits_suffix(self.acts.edits), columns, len(self.writers))

    @property
    def query_side(self) -> Float[Tensor, "batch key writer"]:
        """What each writer at the last position adds to the scores; its sum over writers is
        `scores`.
        """
        return einsum(
            self.query_parts,
            self.key_parts.sum(2),
            "batch writer d, batch key d -> batch key writer",
        )

    @property
    def key_side(self) -> Float[Tensor, "batch key writer"]:
        """What each writer at a key adds to the key's score; its sum over writers is `scores`."""
        return einsum(
            self.query_parts.sum(1),
            self.key_parts,
            "batch d, batch key writer d -> batch key writer",
        )

    @property
    def pattern(self) -> Float[Tensor, "batch pos"]:
        """The head's attention from the last position to all positions."""
        return self.row.pattern()[:, 0]

    def of_label(self, label: Int[Tensor, " batch"]) -> Bool[Tensor, "batch key"]:
        """Return which keys are tokens of labels equal to `label` (an index into `batch.labels`,
        one per prompt).

        Raise InputError unless all keys are tokens of labels.
        """
        return keys_of_label(self.acts.batch, self.positions, label)

    def contrast(
        self, more: Bool[Tensor, "batch key"], less: Bool[Tensor, "batch key"] | None = None
    ) -> ScoreContrast:
        """Return the mean score of the keys in `more` minus that of the keys in `less`, split by
        writer.

        `less` defaults to all other keys. Raise InputError if a group is empty in some prompt.
        """
        is_key = self.positions >= 0
        groups = (more & is_key, (~more if less is None else less) & is_key)
        if not all(bool(group.any(1).all()) for group in groups):
            raise InputError(
                "more and less must each select a key in every prompt; select other keys or prompts"
            )
        more_share, less_share = (group / group.sum(1, keepdim=True) for group in groups)
        weight = (more_share - less_share).to(self.scores)
        key = einsum(weight, self.key_parts, "batch key, batch key writer d -> batch writer d")
        return ScoreContrast(
            head=self.head,
            writers=self.writers,
            value=(weight * self.scores).sum(1),
            query_side=einsum(
                self.query_parts, key.sum(1), "batch writer d, batch d -> batch writer"
            ),
            key_side=einsum(
                self.query_parts.sum(1), key, "batch d, batch writer d -> batch writer"
            ),
            query_parts=self.query_parts,
            key_parts=key,
        )

    def pattern_without(
        self, side: Side, *, norm: Literal["frozen", "recomputed"] = "frozen"
    ) -> Float[Tensor, "batch writer pos"]:
        """For each writer, return the exact attention to all positions without its part of the
        query or keys.

        `side="key"` removes it only from the keys at `positions`. `norm="recomputed"` also
        recomputes the norms' scales without the writer. The writer "bias" is then only b_O: what
        b_O adds to the layer's input is removed, and b_Q, b_K and the shifts of norms remain.
        """
        check_choice("side", side, ("query", "key"))
        check_choice("norm", norm, ("frozen", "recomputed"))
        projection = self.query_projection if side == "query" else self.key_projection
        parts = self.query_parts[:, None] if side == "query" else self.key_parts
        change = (
            -parts if norm == "frozen" else projection.without_each() - parts.sum(2, keepdim=True)
        )
        if side == "query":
            score_change = einsum(
                change[:, 0], self.row.keys, "batch writer d, batch pos d -> batch writer pos"
            )
            return self.row.pattern(score_change)
        at_keys = einsum(
            self.query_parts.sum(1), change, "batch d, batch key writer d -> batch writer key"
        )
        at_keys = at_keys.masked_fill((self.positions < 0)[:, None], 0)
        index = self.positions.clamp(min=0)[:, None].expand_as(at_keys)
        score_change = at_keys.new_zeros(*at_keys.shape[:2], self.row.scores.shape[2]).scatter_add(
            2, index, at_keys
        )
        return self.row.pattern(score_change)

    def by_position(self, writer: AnyHead, side: Side) -> Float[Tensor, "batch key pos"]:
        """Split an earlier head's entry in `query_side` or `key_side` by the positions to which
        that head attended.

        Raise InputError unless the writer is a head of an earlier layer.
        """
        check_choice("side", side, ("query", "key"))
        source = self.acts.view.check_head(writer)
        if side == "query":
            last = self.acts.batch.last.to(self.positions)[:, None].expand_as(self.positions)
            keys = self.key_parts.sum(2)
            scale = attention_scores.attention_scoring(self.acts.view, self.head.layer).scale
            by_position = HeadProjection(self.acts, self.head, "q", last).by_position(
                source, keys * scale
            )
        else:
            query = self.query_parts.sum(1)[:, None].expand(-1, self.positions.shape[1], -1)
            by_position = self.key_projection.by_position(source, query)
        return by_position.masked_fill((self.positions < 0)[..., None], 0)

    def vectors(self, writer: str, side: Side) -> Float[Tensor, "batch key d_model"]:
        """Return a writer's part as vectors that `acts.readout.top_tokens` decodes into words.

        - `side="key"`: what the writer wrote at each key.
        - `side="query"`: the writer's part of the query, mapped back through W_K without rotation,
          as in `acts.last_query`; the key axis has one entry.
        """
        check_choice("writer", writer, self.writers)
        view = self.acts.view
        if side == "key":
            rows = self.key_projection.rows
            return self.key_projection.writers.written(
                rows.flatten(), self.head.layer, writer
            ).unflatten(0, rows.shape)
        part = self.query_projection.at_zero(self.query_projection.parts(writer)[:, :, 0])
        kv, k_norm = view.kv_head(self.head.head), view.k_norm(self.head.layer)
        if k_norm is not None:
            part = part * head_slice(k_norm.gain_as(part.dtype), kv, view).to(part.device)
            part = part - part.mean(-1, keepdim=True) if k_norm.center else part
        return part @ view.W_K(self.head.layer)[kv].to(part).T


def attention_score_parts(
    acts: Activations, head: AnyHead, *, keys: TokenPositions | None = None
) -> ScoreParts:
    """Split one head's attention scores from the last position by what earlier components wrote.

    `keys` are positions; the default is each label's scored token (`batch.label_positions`), or all
    positions if prompts have no demonstrations. The activations must include the writers at these
    positions: `il.capture(model, batch, writers=True)`.

    The scales of all norms are frozen, so that the query side and the key side each sum to the
    model's scores, up to rounding. Raise InputError for an unknown head, for positions without
    writers, and for a model family in which the parts do not sum to the scores or the attention
    does not follow from the scores.

    Example:
        >>> acts = il.capture(model, batch, writers=True)
        >>> parts = il.attention_score_parts(acts, il.Head(2, 0))
        >>> parts.scores.shape, parts.query_side.shape, len(parts.writers)
        (torch.Size([1, 4]), torch.Size([1, 4, 17]), 17)
    """
    check_activations(acts)
    writers, head = require_writers(acts), acts.view.check_head(head)
    positions = key_positions(acts, keys, acts.batch.label_positions)
    last = acts.batch.last.to(positions)[:, None]
    scoring = attention_scores.attention_scoring(acts.view, head.layer)

    query_projection = HeadProjection(acts, head, "q", last)
    query = scoring.scale * query_projection.rotate(query_projection.vectors_at(last), last)
    query_parts = scoring.scale * query_projection.rotate(query_projection.parts(), last)[:, 0]
    key_projection = HeadProjection(acts, head, "k", positions)
    row = AttentionRow.from_queries(key_projection, query, last)
    key_parts = key_projection.rotate(key_projection.parts(), positions)
    key_parts.masked_fill_((positions < 0)[..., None, None], 0)
    at_keys = row.scores[:, 0].gather(1, positions.clamp(min=0)).masked_fill(positions < 0, 0)
    parts = ScoreParts(
        acts=acts,
        head=head,
        writers=writers.names(head.layer),
        positions=positions,
        scores=at_keys,
        query_parts=query_parts,
        key_parts=key_parts,
        row=row,
        query_projection=query_projection,
        key_projection=key_projection,
    )
    size = query.norm(dim=-1) * row.keys.norm(dim=-1).amax(-1, keepdim=True)
    check_parts(
        acts,
        head,
        "query parts do not sum to the scores",
        (parts.query_side.sum(-1) - at_keys) / size,
    )
    check_attention(acts, head, row, parts.pattern)
    return parts
