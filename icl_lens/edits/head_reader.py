"""Rebuild one head's z at some positions when earlier components are removed from its query, keys
or values.

1. The input x of the head's layer is the sum of what *writers* (embeddings, earlier heads and FFNs)
   and biases wrote.
2. To remove writer w from the query, keys or values, they are recomputed from x − u_w, norms
   included. u_w is what w wrote at that position. If w is replaced by its mean instead of zero,
   they are recomputed from x − (u_w − mean u_w).
3. Attention and z follow as in the model, from each position where z is rebuilt (a *place*) to
   itself and the positions before it: rotation, mask, soft-cap and softmax.

Heads that share keys and values with the reader keep theirs, and so does the reader at positions
that are no places.

| axis | has |
|---|---|
| place | positions at which z is rebuilt, -1 where a prompt has fewer |
| pos | positions of keys and values |
| writer | writers before the head's layer, then `more`: parts of what some of them wrote |
| variant | versions of queries, keys or values: without one writer, or without a set of writers |
"""

from dataclasses import replace

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.edits.edit import PARTS, Part
from icl_lens.models.freed_memory import release_after_large_pass
from icl_lens.models.head import Head
from icl_lens.models.passes.memory import PIECE_BYTES
from icl_lens.prompts.batch import role_indices
from icl_lens.reading.activations import Activations
from icl_lens.reading.head_projection import (
    AttentionRow,
    HeadProjection,
    check_attention,
    check_parts,
    require_writers,
)

Means = Float[Tensor, "role writer d_model"]
"""Mean of what each writer wrote to tokens of each role."""


class HeadReader:
    """A head in captured passes, whose z at some places can be rebuilt without some writers.

    A removed writer's output is replaced by its mean in `means`, or by zero if that is None; what
    is in `more` is subtracted unchanged.
    """

    def __init__(
        self,
        acts: Activations,
        head: Head,
        means: Means | None = None,
        places: Int[Tensor, "batch place"] | None = None,
        more: Float[Tensor, "row more d_model"] | None = None,
    ) -> None:
        """Read the head's query at places, by default the last position, and its keys and values at
        all positions.

        Raise InputError if its attention or z cannot be reproduced from them.
        """
        self.acts, self.view, self.head, self.means = acts, acts.view, head, means
        self.writers = require_writers(acts)
        self.more = self.writers.resid_pre[:, :0] if more is None else more
        self.n_components = len(self.writers.names(head.layer)) - 1  # without biases
        self.n_writers = self.n_components + self.more.shape[1]
        last = acts.batch.last.to(acts.z.device)[:, None]
        self.places = last if places is None else places.to(last)
        positions = torch.arange(acts.pattern.shape[-1], device=last.device).expand(len(last), -1)
        self.key_positions = positions.masked_fill(positions > last, -1)
        queries = torch.cat(
            [self.places, last], dim=1
        )  # the model's attention is known from the last position only
        query = HeadProjection(acts, head, "q", queries)
        x = self.writers.inputs(head.layer)[query.rows].to(self.view.compute_dtype)
        q = torch.where((queries == last)[..., None], query.vectors_at(queries), query.project(x))
        q = query.scoring.scale * query.rotate(q, queries)
        # Only the model's own keys are read here, and writers may be captured at the last position
        # only.
        no_positions = positions[:, :0]
        row = AttentionRow.from_queries(HeadProjection(acts, head, "k", no_positions), q, queries)
        check_attention(acts, head, row, row.pattern()[:, -1])
        self.q = q[:, :-1]
        self.row = replace(row, scores=row.scores[:, :-1], bias=row.bias[:, :-1])
        self.k = self.row.keys[:, :, None]
        self.v = acts.values.of_layer(head.layer)[:, :, self.view.kv_head(head.head), None].to(
            self.q
        )
        self.attention = self.row.pattern()
        self.z = self.writers.z[query.rows[:, :-1], head.layer, head.head].to(self.q)
        error = (self.z_from()[:, 0] - self.z).masked_fill(self.places[..., None] < 0, 0)
        if not acts.edits:  # an edit may have written z, and writes it again when it is rebuilt
            check_parts(
                acts, head, "z does not follow from attention", error / (1 + self.z.abs().amax())
            )

    def z_from(
        self,
        q: Float[Tensor, "batch place variant d_head"] | None = None,
        k: Float[Tensor, "batch pos variant d_head"] | None = None,
        v: Float[Tensor, "batch pos variant d_head"] | None = None,
    ) -> Float[Tensor, "batch variant place d_head"]:
        """Return z at the places from rebuilt queries, keys or values; those not given are the
        model's own.
        """
        pattern = self.attention[:, None]
        if q is not None or k is not None:
            q, k = self.q[:, :, None] if q is None else q, self.k if k is None else k
            n_variants = max(q.shape[2], k.shape[2])
            q, k = (x.expand(-1, -1, n_variants, -1) for x in (q, k))
            scores = einsum(
                q, k, "batch place variant d, batch pos variant d -> batch variant place pos"
            )
            pattern = self.row.pattern(scores - self.row.scores[:, None])
        v = self.v if v is None else v
        n_variants = max(pattern.shape[1], v.shape[2])
        pattern, v = pattern.expand(-1, n_variants, -1, -1), v.expand(-1, -1, n_variants, -1)
        return einsum(
            pattern, v, "batch variant place pos, batch pos variant d -> batch variant place d"
        )

    def rebuild(
        self,
        part: Part,
        removed: Bool[Tensor, "role variant writer"] | None = None,
        columns: slice = slice(None),
    ) -> Float[Tensor, "batch n variant d_head"]:
        """Return the queries at all places, or the keys or values at all positions, when writers
        are removed; `columns` selects n of them.

        `removed` says which writers each variant lacks at tokens of each role. By default, there is
        one variant per writer, which lacks this writer at all tokens.
        """
        release_after_large_pass(self.view, self.key_positions.shape[1])
        positions = (self.places if part == "q" else self.key_positions)[:, columns]
        roles = role_indices(self.acts.batch).to(positions.device)
        roles = roles.gather(1, positions.clamp(min=0)).masked_fill(positions < 0, -1)
        if part != "q" and removed is not None:  # other keys and values are the model's own
            is_changed = removed.flatten(1).any(1).to(roles.device)[roles] & (roles >= 0)
            roles = roles.masked_fill(~is_changed, -1)
        projection = HeadProjection(
            self.acts, self.head, part, positions.masked_fill(roles < 0, -1)
        )
        rows, roles = projection.rows.flatten(), roles.flatten()
        n_variants = self.n_writers if removed is None else removed.shape[1]
        rebuilt = self.q.new_zeros(len(rows), n_variants, self.view.d_head)
        if part != "q":
            rebuilt += projection.vectors_at(positions).flatten(0, 1)[:, None]
        for role in roles[roles >= 0].unique().tolist():
            distinct, index_of_variant = None, slice(None)
            if removed is not None:  # for most roles, many variants lack the same writers
                of_role = removed[role].to(rows.device)
                distinct, index_of_variant = of_role.unique(dim=0, return_inverse=True)
            n_distinct = n_variants if distinct is None else len(distinct)
            bytes_per_row = 4 * self.view.d_model * (self.n_writers + 3 * n_distinct)
            with_role = (roles == role).nonzero()[:, 0]
            for piece in with_role.split(max(1, PIECE_BYTES // (2 * bytes_per_row))):
                x = self.writers.inputs(self.head.layer)[rows[piece], None].to(rebuilt)
                if distinct is None:
                    x = x - self._removable(rows[piece], role)
                elif bool(distinct.any()):
                    u = self._removable(rows[piece], role)
                    x = x - distinct.to(u) @ u
                rebuilt[piece] = projection.project(x)[:, index_of_variant]
        rebuilt = rebuilt.unflatten(0, projection.rows.shape)
        rotated = projection.rotate(rebuilt, positions)
        return rotated * projection.scoring.scale if part == "q" else rotated

    def _removable(
        self, rows: Int[Tensor, " row"], role: int
    ) -> Float[Tensor, "row writer d_model"]:
        """Return what each writer wrote, minus its mean over tokens of a role if it is replaced by
        this.
        """
        u = self.writers.vectors(rows, self.head.layer)[:, :-1]
        if self.means is not None:
            u -= self.means[role, : self.n_components].to(u)
        return torch.cat([u, self.more[rows].to(u)], dim=1) if self.more.shape[1] else u

    def z_without_each(
        self, part: Part, groups: Bool[Tensor, "batch group pos"]
    ) -> Float[Tensor, "batch group writer place d_head"]:
        """Return z without each writer in the queries, keys or values at the tokens of each
        group.
        """
        unedited = self.z[:, None, None]
        groups = groups[..., : self.key_positions.shape[1]]  # the captured prompts may be shorter
        if part == "q":
            places = self.places.clamp(min=0)[:, None].expand(-1, groups.shape[1], -1)
            in_group = groups.to(self.z.device).gather(2, places)[:, :, None, :, None]
            return torch.where(in_group, self.z_from(q=self.rebuild(part))[:, None], unedited)
        groups = groups.to(self.z)
        if part == "v":
            return unedited + self._z_lost_by_values(groups)
        change = self._score_changes()
        patterns = [self.row.pattern(change * group[:, None, None]) for group in groups.unbind(1)]
        equation = "batch writer place pos, batch pos d -> batch writer place d"
        return torch.stack(
            [einsum(pattern, self.v[:, :, 0], equation) for pattern in patterns], dim=1
        )

    def _position_pieces(self) -> list[slice]:
        """Return the positions whose keys or values without each writer are computed at a time."""
        n_positions = self.key_positions.shape[1]
        bytes_per_position = 4 * len(self.z) * self.n_writers * self.view.d_head
        size = max(1, PIECE_BYTES // (4 * bytes_per_position))
        return [slice(start, start + size) for start in range(0, n_positions, size)]

    def _z_lost_by_values(
        self, groups: Float[Tensor, "batch group pos"]
    ) -> Float[Tensor, "batch group writer place d_head"]:
        """Return how z changes without each writer in the values at the tokens of each group."""
        shape = *groups.shape[:2], self.n_writers, *self.z.shape[1:]
        change = self.z.new_zeros(shape)
        equation = "batch group place pos, batch pos writer d -> batch group writer place d"
        for columns in self._position_pieces():
            new = self.rebuild("v", columns=columns)
            new -= self.v[:, columns]  # in place, as these are the largest tensors
            weight = self.attention[:, None, :, columns] * groups[:, :, None, columns]
            change += einsum(weight, new, equation)
        return change

    def _score_changes(self) -> Float[Tensor, "batch writer place pos"]:
        """Return how scores change without each writer in the keys."""
        pieces = []
        equation = "batch place d, batch pos writer d -> batch writer place pos"
        for columns in self._position_pieces():
            new = self.rebuild("k", columns=columns)
            new -= self.k[:, columns]
            pieces.append(einsum(self.q, new, equation))
        return torch.cat(pieces, dim=-1)

    def z_without_sets(
        self, removed: dict[Part, Bool[Tensor, "set role writer"]]
    ) -> Float[Tensor, "batch set place d_head"]:
        """Return z for each set, with its writers removed jointly from the queries, keys and
        values.

        A few sets at a time have keys and values of their own, and rotations take as much again.
        """
        bytes_per_set = 4 * self.k[:, :, 0].numel()
        size = max(1, PIECE_BYTES // (4 * bytes_per_set))
        pieces = []
        for sets in torch.arange(len(removed["q"])).split(size):
            removed_by_sets: dict[Part, Tensor] = {
                part: removed[part][sets.to(removed[part].device)] for part in PARTS
            }
            z = self._z_of_sets(removed_by_sets)
            pieces.append(z.expand(-1, len(sets), -1, -1))
        return torch.cat(pieces, dim=1)

    def _z_of_sets(
        self, removed: dict[Part, Bool[Tensor, "set role writer"]]
    ) -> Float[Tensor, "batch variant place d_head"]:
        """Return z for each set; one for all of them if they remove nothing."""

        def rebuild_if_removed(part: Part) -> Tensor | None:
            return (
                self.rebuild(part, removed[part].transpose(0, 1))
                if bool(removed[part].any())
                else None
            )

        q, k, v = (rebuild_if_removed(part) for part in PARTS)
        return self.z_from(q=q, k=k, v=v)
