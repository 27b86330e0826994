"""A head's query-key metric: queries and keys as two towers, and the bilinear form between their
inputs.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError, check_integers
from icl_lens.models import attention_scores
from icl_lens.models.attention_scores import AttentionScoring
from icl_lens.models.head import AnyHead, Head
from icl_lens.models.norms import NormView
from icl_lens.models.passes.independent_rows import rotations_by_length
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.reading.activations import Activations
from icl_lens.reading.capture import capture
from icl_lens.reading.head_projection import attention_row, check_parts, rotation_angles
from icl_lens.reading.queries_keys_values import (
    head_index,
    head_slice,
    project,
    project_all,
    projection_weights,
)
from icl_lens.result.base import Displayed
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS
from icl_lens.result.view import View, table_view


@dataclass(frozen=True, repr=False)
class QueryKeyMetric(Displayed):
    """How one head compares the inputs at two positions; made by `query_key_metric`.

    `scores(x, y)` are the head's exact attention scores between residual streams x [query d_model]
    and y [key d_model]: x and y pass through the norm before attention, then x through W_Q and y
    through W_K (the two towers), including norms of queries and keys; in rotary models, the query
    is rotated by `distance` positions. `matrix` is the bilinear form that scores normed inputs,
    without biases. The score scale, 1/√d_head in most families, is part of the query tower:
    `scores(x, y) = queries(x) @ keys(y).T`, and `query_side` contains the scale too.

    All computations are low-rank: the matrix is `query_side @ key_side.T`, and only `matrix` itself
    allocates d_model² numbers. Source: the paper, section 5; docs/howto/numbers.md.

    Example:
        >>> metric = il.query_key_metric(model, "L2H0")
        >>> metric.to_frame().columns.tolist()
        ['direction', 'singular_value', 'share']
        >>> left, strength, right = metric.directions(2)
        >>> left.shape, len(acts.readout.top_tokens(left[:1], k=3)[0])
        (torch.Size([2, 96]), 3)
    """

    view: ModelView
    head: Head
    distance: int | None
    """Number of positions from key to query; None to omit rotation."""
    query_side: Float[Tensor, "d_model d_head"]
    """Product of the gain of the norm before attention, W_Q, the query norm's gain, rotation, and
    the score scale.
    """
    key_side: Float[Tensor, "d_model d_head"]
    """Product of the gain of the norm before attention, W_K, and the key norm's gain."""
    rotation: tuple[Tensor, Tensor] | None
    """Cosines and sines that rotate the queries, [d_rotary] each; None for models without rotary
    embedding.
    """
    key_rotation: Float[Tensor, "d_head d_head"] | None = None
    """Rotation applied to the keys by `with_random_rotation`."""

    def to_frame(self) -> pd.DataFrame:
        """Return direction, singular_value and share (of their sum): one row per pair of
        directions, largest first.
        """
        values = self.singular_values.float().cpu()
        share = (values / values.sum()).numpy()
        return pd.DataFrame(
            {
                "direction": range(1, len(values) + 1),
                "singular_value": values.numpy(),
                "share": share,
            }
        )

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        where = ""
        if self.distance is not None:
            where = f", {self.distance} positions apart"
        elif self.rotation is not None:
            where = ", without rotation"
        title = (
            f"QueryKeyMetric({self.view.name} {self.head}{where}; effective rank "
            f"{self.effective_rank:.1f}, symmetric share {self.symmetric_share:.2f})"
        )
        rows = self.to_frame().head(SHOWN_ROWS // 2)
        columns: dict[str, list[object]] = {
            "direction": rows["direction"].tolist(),
            "singular value": list(map(signed, rows["singular_value"])),
            "share": [f"{share:.1%}" for share in rows["share"]],
        }
        return table_view(title, columns, len(self.singular_values))

    @property
    def matrix(self) -> Float[Tensor, "d_model d_model"]:
        """Bilinear form of query inputs and key inputs, both normed without the norm's gain and
        shift.
        """
        return self.query_side @ self.key_side.T

    def queries(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_head"]:
        """Return the queries of residual streams (first tower), rotated and multiplied by the score
        scale.
        """
        scoring = attention_scores.attention_scoring(self.view, self.head.layer)
        queries = self.project("q", x)
        if self.rotation is not None:
            queries = _rotated(queries, self.rotation, scoring)
        return scoring.scale * queries

    def keys(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_head"]:
        """Return the keys of residual streams (second tower), without positional rotation."""
        keys = self.project("k", x)
        return keys if self.key_rotation is None else keys @ self.key_rotation

    def scores(
        self,
        queries: Float[Tensor, "*batch query d_model"],
        keys: Float[Tensor, "*batch key d_model"],
    ) -> Float[Tensor, "*batch query key"]:
        """Return the head's attention scores between inputs of its layer, before soft-cap and
        softmax.
        """
        return self.queries(queries) @ self.keys(keys).mT

    def inputs(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_model"]:
        """Return residual streams as inputs of the bilinear form: normed, without the norm's gain
        and shift.

        Their cosine similarity is the baseline for W_Q and W_K.
        """
        return self._norm._replace(gain=None, shift=None)(x)

    @cached_property
    def _norm(self) -> NormView:
        """The norm before attention, cached because inferring it takes a few calls."""
        return self.view.attn_input_norm(self.head.layer)

    def project(self, name: str, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_head"]:
        """Return the head's queries ("q") or keys ("k") of residual streams, before rotation."""
        return project(self.view, self.head, name, self._norm(x.to(self.query_side)))

    # Properties of the metric
    # ----------------------------------------------------------------------------

    @cached_property
    def _core(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Orthonormal bases of both sides, and the singular value decomposition between them."""
        q_basis, q_rest = torch.linalg.qr(self.query_side)
        k_basis, k_rest = torch.linalg.qr(self.key_side)
        u, s, vh = torch.linalg.svd(q_rest @ k_rest.T)
        return q_basis, u, s, vh, k_basis

    @property
    def singular_values(self) -> Float[Tensor, " d_head"]:
        """Singular values of the bilinear form, largest first: how strongly each pair of directions
        is compared.
        """
        return self._core[2]

    @property
    def effective_rank(self) -> float:
        """Exponential of the entropy of the normalized singular values: number of directions in
        use, 1 to d_head.

        Source: Roy and Vetterli 2007, The effective rank.
        """
        share = self.singular_values / self.singular_values.sum()
        return float(torch.exp(-torch.special.xlogy(share, share).sum()))

    @property
    def symmetric_share(self) -> float:
        """Share of the bilinear form's squared entries in its symmetric part: 1 symmetric, ½
        neither, 0 antisymmetric.

        A metric in the strict sense is symmetric; two towers need not be.
        """
        a, b = self.query_side, self.key_side
        crossed = b.T @ a
        total = ((a.T @ a) * (b.T @ b)).sum()
        return float((1 + (crossed * crossed.T).sum() / total) / 2)

    def directions(
        self, k: int
    ) -> tuple[Float[Tensor, "k d_model"], Float[Tensor, " k"], Float[Tensor, "k d_model"]]:
        """Return the top `k` directions of query inputs, their singular values, and the key inputs'
        directions.

        Directions are unit vectors in the space of normed inputs; only the joint sign of a pair is
        meaningful. Raise InputError unless k is between 1 and d_head.
        """
        q_basis, u, s, vh, k_basis = self._core
        if not 1 <= k <= len(s):
            raise InputError(f"k must be between 1 and {len(s)} (d_head), got {k}")
        return (q_basis @ u[:, :k]).T, s[:k], (k_basis @ vh[:k].T).T

    def with_random_rotation(self, *, seed: int = 0) -> "QueryKeyMetric":
        """Return a control copy whose keys are rotated at random in head space, lengths unchanged.

        Structure that remains in its scores does not come from the match between W_Q and W_K.
        """
        (seed,) = check_integers(seed=seed)
        generator = torch.Generator().manual_seed(seed)
        d_head = self.key_side.shape[1]
        random = torch.randn(d_head, d_head, generator=generator, dtype=torch.float64)
        turn, upper = torch.linalg.qr(random)
        turn = (turn * upper.diagonal().sign()).to(self.key_side)
        return replace(self, key_side=self.key_side @ turn, key_rotation=turn)


@torch.no_grad()
def query_key_metric(model: Any, head: AnyHead, *, distance: int | None = None) -> QueryKeyMetric:
    """Return the metric of one head: W_Q W_Kᵀ with the norms' gains, and its two towers.

    `distance`: for rotary models, the number of positions from key to query; by default rotation is
    omitted, so that only content is compared. Learned positions and ALiBi have no distance in the
    metric (learned positions are part of the residual stream). Computed in float32, or float64 for
    float64 models.

    For models that normalize queries and keys (Qwen3, Gemma-3, OLMo-2), `scores` applies these
    norms exactly; the bilinear form contains only their gains, because the scale of each vector is
    not part of any matrix. In the same way, only `scores` clips queries and keys (OLMo with
    `clip_qkv`).

    A pass over a few random tokens checks that the scores are the model's: up to a constant, ALiBi
    and soft-cap, the logarithm of its attention. Raise InputError if they are not, for an unknown
    head, a distance beyond the context, a distance in a model without rotation, and a distance in a
    model whose scores depend on more than the distance (HunYuan norms queries and keys after
    rotation; longrope and dynamic NTK depend on the prompt's length). Source: the paper, section 5;
    docs/howto/numbers.md.

    Example:
        >>> metric = il.query_key_metric(model, il.Head(2, 0))
        >>> metric.matrix.shape
        torch.Size([96, 96])
        >>> metric.scores(acts.resid_pre[:, 2], acts.label_resid_pre[0, 2]).shape
        torch.Size([1, 4])
        >>> 0 <= metric.symmetric_share <= 1 <= metric.effective_rank <= 16
        True
    """
    view = model if isinstance(model, ModelView) else ModelView.of(model)
    head = view.check_head(head)
    scoring = attention_scores.attention_scoring(view, head.layer)
    if distance is not None and scoring.position != "rotary":
        raise InputError(
            f"distance must be None for {view.architecture}, which has no rotary embedding, got "
            f"{distance}"
        )
    if distance is not None and not 0 <= distance < view.cfg.n_ctx:
        raise InputError(
            f"distance must be between 0 and {view.cfg.n_ctx - 1} (the model's context), got "
            f"{distance}"
        )
    if distance is not None and scoring.norms_rotated:
        raise InputError(
            f"distance must be None for {view.architecture}, which norms queries and keys after "
            f"rotation, so that scores depend on both positions, got {distance}; use "
            "il.attention_score_parts for the scores in a prompt"
        )
    if distance is not None and len(set(rotations_by_length(view.model, [2, view.cfg.n_ctx]))) > 1:
        raise InputError(
            f"distance must be None for {view.name}, whose rotation depends on the length of the "
            f"prompt, got {distance}; use il.attention_score_parts for the scores in a prompt"
        )
    probe = _probe(view, distance)
    metric = metric_with_rotation(
        view, head, distance, rotation_between(probe, head.layer, distance)
    )
    check_metric(metric, probe)
    return metric


# Length of the random text on which a metric is checked; a larger distance needs a longer one.
N_PROBED = 12


def _probe(view: ModelView, distance: int | None) -> Activations:
    """Return the activations of random tokens, with writers at the last position and `distance`
    before it.

    No hooks are active in this pass.
    """
    last = min(max(distance or 0, N_PROBED - 1), view.cfg.n_ctx - 1)
    tokens = torch.randint(
        view.model.W_U.shape[1], (1, last + 1), generator=torch.Generator().manual_seed(0)
    )
    batch = PromptBatch.from_tokens(tokens.to(view.cfg.device))
    with view.hooks_disabled():
        return capture(view.model, batch, writers=[last - (distance or 0), last], check=False)


def check_metric(metric: QueryKeyMetric, acts: Activations) -> None:
    """Raise InputError unless the model's attention from every prompt's last position follows from
    the metric.

    The activations must hold writers at the last position and `metric.distance` positions before
    it.
    """
    assert acts.writers is not None
    last = acts.batch.last.to(acts.z.device)[:, None]
    row = attention_row(acts, metric.head, last[:, :0])
    if attention_scores.attention_scoring(metric.view, metric.head.layer).norms_rotated:
        return  # scores without rotation are nowhere in the model
    keys = last - (metric.distance or 0)
    positions = torch.cat([last, keys], dim=1)
    x, y = acts.writers.inputs(metric.head.layer)[acts.writers.rows_at(positions)].split(1, dim=1)
    error = metric.scores(x, y)[:, 0] - row.scores[:, -1].gather(1, keys)
    size = (metric.queries(x).norm(dim=-1) * metric.keys(y).norm(dim=-1)).amax() + 1e-30
    check_parts(
        acts, metric.head, "scores differ from the products of queries and keys", error / size
    )


def rotation_between(
    acts: Activations, layer: int, distance: int | None
) -> tuple[Tensor, Tensor] | None:
    """Return cosines and sines of the rotation between positions that are `distance` apart.

    If `distance` is None, it is the rotation by nothing, scaled like the others. None for a layer
    without rotation.
    """
    angles = rotation_angles(acts, layer, torch.tensor([[distance or 0]], device=acts.z.device))
    if angles is None:
        return None
    cos, sin = (angle[0, 0] for angle in angles)
    # The scale is squared because some families scale both queries and keys, whereas the metric
    # rotates only queries.
    if distance is None:
        return cos.square() + sin.square(), torch.zeros_like(sin)
    scale = (cos.square() + sin.square()).sqrt()
    return scale * cos, scale * sin


def metric_with_rotation(
    view: ModelView, head: Head, distance: int | None, rotation: tuple[Tensor, Tensor] | None
) -> QueryKeyMetric:
    """Return a head's metric, in which queries are rotated by these cosines and sines."""
    scoring = attention_scores.attention_scoring(view, head.layer)
    rotation = _scaled_as_in(scoring, rotation)
    query_side, key_side = _tower(view, head, "q"), _tower(view, head, "k")
    if rotation is not None:
        query_side = _rotated(query_side, rotation, scoring)
    return QueryKeyMetric(view, head, distance, scoring.scale * query_side, key_side, rotation)


def _scaled_as_in(
    scoring: AttentionScoring, rotation: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor] | None:
    """Return a rotation without its scale, if a norm after it removes the scale."""
    if rotation is None or not scoring.norms_rotated:
        return rotation
    cos, sin = rotation
    scale = (cos.square() + sin.square()).sqrt()
    return cos / scale, sin / scale


def layer_scores(
    view: ModelView,
    layer: int,
    queries: Float[Tensor, "batch query d_model"],
    keys: Float[Tensor, "batch key d_model"],
    rotation: tuple[Tensor, Tensor] | None,
) -> Float[Tensor, "batch head query key"]:
    """Return `QueryKeyMetric.scores` of all heads of a layer, with queries rotated by these cosines
    and sines.
    """
    scoring, norm = attention_scores.attention_scoring(view, layer), view.attn_input_norm(layer)
    q = project_all(view, layer, "q", norm(queries.to(view.compute_dtype)))
    k = project_all(view, layer, "k", norm(keys.to(view.compute_dtype)))
    rotation = _scaled_as_in(scoring, rotation)
    if rotation is not None:
        cos, sin = (angle.to(q)[None, None] for angle in rotation)
        q = attention_scores.rotate(q, cos, sin, scoring)
    k = k[:, :, list(map(view.kv_head, range(view.n_heads)))]
    return scoring.scale * einsum(
        q, k, "batch query head d_head, batch key head d_head -> batch head query key"
    )


def _tower(view: ModelView, head: Head, name: str) -> Float[Tensor, "d_model d_head"]:
    """Return the weights of a head's queries or keys with the gains of the norms before and after
    them.
    """
    weight, _, norm = projection_weights(view, head.layer, name)
    index = head_index(view, head, name)
    head_weight = weight[index].to(view.compute_dtype)
    input_gain = view.attn_input_norm(head.layer).gain_as(head_weight.dtype).to(head_weight.device)
    tower = head_weight * input_gain.expand(view.d_model)[:, None]
    if norm is None or norm.gain is None:
        return tower
    if norm.center:
        tower = tower - tower.mean(-1, keepdim=True)
    return tower * head_slice(norm.gain.to(tower), index, view)


def _rotated(
    x: Float[Tensor, "*n d_head"], rotation: tuple[Tensor, Tensor], scoring: AttentionScoring
) -> Tensor:
    """Rotate vectors by one rotation, the same for all."""
    cos, sin = (angle.to(x)[None, None] for angle in rotation)
    one_head = x.reshape(1, -1, 1, x.shape[-1])  # [batch pos head d_head]
    return attention_scores.rotate(one_head, cos, sin, scoring).reshape(x.shape)
