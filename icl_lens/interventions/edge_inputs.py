"""Rebuild one head's output at the last position when earlier components are removed from its query, keys or values.

1. The input x of the head's layer is a sum over *senders*: embeddings, earlier heads and FFNs (`Writers`), and biases.
2. To remove a sender s from a part, the query, the keys or the values are computed anew from x − u_s, where u_s is what
   s wrote at that position, or from x − (u_s − mean u_s); the norms before attention are recomputed.
3. From these, attention and z at the last position follow as in the model: rotation, mask, soft-cap and softmax.

Only this head's part changes; heads that share keys and values with it keep theirs.
"""

from typing import Literal, get_args

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.attribution.head_projection import AttentionRow, HeadProjection, check_parts, require_writers
from icl_lens.attribution.qk_metric import project
from icl_lens.models.head import Head
from icl_lens.prompts.roles import role_indices

Part = Literal["q", "k", "v"]
PARTS: tuple[Part, ...] = get_args(Part)
Means = Float[Tensor, "role sender d_model"]
"""Mean of what each sender wrote, by role of the token."""

# Vectors [row, variant, d_model] are computed in pieces of about this size.
PIECE_BYTES = 64 * 2**20


class EdgeInputs:
    """What one head reads in captured passes, and its z at the last position without some senders.

    A *variant* is one way to rebuild a part: without one sender, or without a set of senders. `means` are subtracted
    from what senders wrote; None removes it entirely.
    """

    def __init__(self, acts: Activations, head: Head, means: Means | None = None) -> None:
        """Read the head's query, keys and values; raise InputError if the family's attention is not reproduced."""
        self.acts, self.view, self.head, self.means = acts, acts.view, head, means
        self.writers = require_writers(acts)
        self.n_senders = len(self.writers.names(head.layer)) - 1  # without biases
        self.last = acts.batch.last.to(acts.z.device)[:, None]
        every = torch.arange(acts.pattern.shape[-1], device=self.last.device).expand(len(self.last), -1)
        self.every = every.masked_fill(every > self.last, -1)
        query = HeadProjection(acts, head, "q", self.last)
        self.q = query.scoring.scale * query.rotate(query.vectors_at(self.last), self.last)
        # Without positions, for which writers might not have been kept; it has the keys of all positions anyway.
        self.row = AttentionRow.from_queries(HeadProjection(acts, head, "k", every[:, :0]), self.q, self.last)
        self.k = self.row.keys[:, :, None]
        self.v = acts.values(head.layer)[:, :, self.view.kv_head(head.head), None].to(self.q)
        self.attention = self.row.pattern()[:, 0]
        self.z = acts.z[:, head.layer, head.head].to(self.q)
        check_parts(acts, head, "attention does not follow from the scores", self.attention - acts.pattern[:, *head])

    def z_from(
        self,
        q: Float[Tensor, "batch variant d_head"] | None = None,
        k: Float[Tensor, "batch pos variant d_head"] | None = None,
        v: Float[Tensor, "batch pos variant d_head"] | None = None,
    ) -> Float[Tensor, "batch variant d_head"]:
        """Return z at the last position from rebuilt parts; the others are the model's own."""
        pattern = self.attention[:, None]
        if q is not None or k is not None:
            q, k = self.q if q is None else q, self.k if k is None else k
            equation = "batch variant d, batch pos variant d -> batch variant pos"
            n = max(q.shape[1], k.shape[2])
            scores = einsum(q.expand(-1, n, -1), k.expand(-1, -1, n, -1), equation)
            pattern = self.row.pattern(scores - self.row.scores)
        v = self.v if v is None else v
        n = max(pattern.shape[1], v.shape[2])
        equation = "batch variant pos, batch pos variant d -> batch variant d"
        return einsum(pattern.expand(-1, n, -1), v.expand(-1, -1, n, -1), equation)

    def rebuilt(
        self, part: Part, removed: Bool[Tensor, "role variant sender"] | None = None
    ) -> Float[Tensor, "batch n variant d_head"]:
        """Return the query (n is 1), or the keys or values at all positions, when senders are removed.

        `removed` says which senders a variant lacks at tokens of each role; by default, every sender is one variant,
        removed alone at all tokens.
        """
        projection = HeadProjection(self.acts, self.head, part, self.last if part == "q" else self.every)
        rows, positions = projection.rows.flatten(), projection.positions
        roles = role_indices(self.acts.batch).to(rows.device).gather(1, positions.clamp(min=0))
        roles = roles.masked_fill(positions < 0, -1).flatten()
        n_variants = self.n_senders if removed is None else removed.shape[1]
        found = self.q.new_zeros(len(rows), n_variants, self.view.d_head)
        for role in roles[roles >= 0].unique().tolist():
            chosen, variant_of = None, slice(None)
            if removed is not None:  # many variants agree on most roles
                chosen, variant_of = removed[role].to(rows.device).unique(dim=0, return_inverse=True)
            each = 4 * self.view.d_model * (self.n_senders + 2 * (n_variants if chosen is None else len(chosen)))
            for some in (roles == role).nonzero()[:, 0].split(max(1, PIECE_BYTES // each)):
                u = self.writers.vectors(rows[some], self.head.layer)[:, :-1]
                if self.means is not None:
                    u = u - self.means[role, : self.n_senders].to(u)
                if chosen is not None:
                    u = chosen.to(u) @ u
                x = self.writers.resid_pre[rows[some], self.head.layer, None].to(u)
                found[some] = project(self.view, self.head, part, projection.norm(x - u))[:, variant_of]
        found = found.unflatten(0, projection.rows.shape)
        rotated = projection.rotate(found, positions)
        return rotated * projection.scoring.scale if part == "q" else rotated

    def without_each(
        self, part: Part, groups: Bool[Tensor, "batch group pos"]
    ) -> Float[Tensor, "batch group sender d_head"]:
        """Return z when each sender is removed alone, from the query, keys or values of each group of tokens."""
        new = self.rebuilt(part)
        groups = groups[..., : self.every.shape[1]]  # these prompts may be shorter
        if part == "q":
            in_group = groups.to(new.device).gather(2, self.last[:, None].expand(-1, groups.shape[1], -1))
            return torch.where(in_group[..., None], self.z_from(q=new[:, 0])[:, None], self.z[:, None, None])
        groups = groups.to(new)
        if part == "v":
            weight = self.attention[:, None] * groups
            change = einsum(weight, new - self.v, "batch group pos, batch pos sender d -> batch group sender d")
            return self.z[:, None, None] + change
        change = einsum(self.q[:, 0], new - self.k, "batch d, batch pos sender d -> batch sender pos")
        patterns = [self.row.pattern(change * group[:, None]) for group in groups.unbind(1)]
        values = self.v[:, :, 0]
        return torch.stack([einsum(one, values, "batch s pos, batch pos d -> batch s d") for one in patterns], dim=1)

    def without_sets(self, removed: dict[Part, Bool[Tensor, "set role sender"]]) -> Float[Tensor, "batch set d_head"]:
        """Return z when each set of senders is removed from the parts, jointly."""

        def rebuild(part: Part) -> Tensor | None:
            of_sets = removed[part][..., : self.n_senders]
            return self.rebuilt(part, of_sets.transpose(0, 1)) if bool(of_sets.any()) else None

        q, k, v = (rebuild(part) for part in PARTS)
        return self.z_from(q=None if q is None else q[:, 0], k=k, v=v)
