"""A head's query-key metric: queries and keys as two towers, and the bilinear form between their inputs."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from icl_lens.errors import InputError
from icl_lens.models import attention_scores
from icl_lens.models.head import Head
from icl_lens.models.norms import NormView
from icl_lens.models.view import ModelView


@dataclass(frozen=True)
class QueryKeyMetric:
    """How one head compares the inputs at two positions; made by `query_key_metric`.

    `scores(x, y)` are the head's exact attention scores between residual streams x [query d_model] and y [key d_model]:
    x and y pass through the norm before attention, then x through W_Q and y through W_K (the two towers), including
    norms of queries and keys; in rotary models, the query is rotated by `distance` positions. `matrix` is the bilinear
    form that scores normed inputs, without biases. The score scale, 1/√d_head in most families, is part of the query
    tower: `scores(x, y) = queries(x) @ keys(y).T`, and `query_side` contains the scale too.

    All computations are low-rank: the matrix is `query_side @ key_side.T`, and only `matrix` itself allocates d_model²
    numbers. Source: the paper, section 5; docs/howto/numbers.md.

    Example:
        >>> metric = il.query_key_metric(model, "L2H0")
        >>> metric
        QueryKeyMetric(icl-mini L2H0)
        >>> left, strength, right = metric.directions(2)
        >>> left.shape, len(acts.readout.top_tokens(left[:1], k=3)[0])
        (torch.Size([2, 96]), 3)
    """

    view: ModelView
    head: Head
    distance: int | None
    """Number of positions from key to query; None to omit rotation."""
    query_side: Float[Tensor, "d_model d_head"]
    """Product of the gain of the norm before attention, W_Q, the query norm's gain, rotation, and the score scale."""
    key_side: Float[Tensor, "d_model d_head"]
    """Product of the gain of the norm before attention, W_K, and the key norm's gain."""
    rotation: tuple[Tensor, Tensor] | None
    """Cosines and sines that rotate the queries, [d_rotary] each; None for models without rotary embedding."""
    key_rotation: Float[Tensor, "d_head d_head"] | None = None
    """Rotation applied to the keys by `with_random_rotation`."""

    def __repr__(self) -> str:
        where = "without rotation" if self.rotation is not None and self.distance is None else ""
        where = f"{self.distance} positions apart" if self.distance is not None else where
        return f"QueryKeyMetric({self.view.name} {self.head}{', ' if where else ''}{where})"

    @property
    def matrix(self) -> Float[Tensor, "d_model d_model"]:
        """Bilinear form of query inputs and key inputs, both normed without the norm's gain and shift."""
        return self.query_side @ self.key_side.T

    def queries(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_head"]:
        """Return the queries of residual streams (first tower), rotated and multiplied by the score scale."""
        scoring, queries = attention_scores.attention_scoring(self.view, self.head.layer), self.project("q", x)
        return scoring.scale * (
            queries if self.rotation is None else _turn(queries, self.rotation, scoring.interleaved)
        )

    def keys(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_head"]:
        """Return the keys of residual streams (second tower), without positional rotation."""
        keys = self.project("k", x)
        return keys if self.key_rotation is None else keys @ self.key_rotation

    def scores(
        self, queries: Float[Tensor, "*batch query d_model"], keys: Float[Tensor, "*batch key d_model"]
    ) -> Float[Tensor, "*batch query key"]:
        """Return the head's attention scores between inputs of its layer, before soft-cap and softmax."""
        return self.queries(queries) @ self.keys(keys).mT

    def inputs(self, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_model"]:
        """Return residual streams as inputs of the bilinear form: normed, without the norm's gain and shift.

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

    # Properties of the metric ----------------------------------------------------------------------------

    @cached_property
    def _core(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Orthonormal bases of both sides, and the singular value decomposition between them."""
        q_basis, q_rest = torch.linalg.qr(self.query_side)
        k_basis, k_rest = torch.linalg.qr(self.key_side)
        u, s, vh = torch.linalg.svd(q_rest @ k_rest.T)
        return q_basis, u, s, vh, k_basis

    @property
    def singular_values(self) -> Float[Tensor, " d_head"]:
        """Singular values of the bilinear form, largest first: how strongly each pair of directions is compared."""
        return self._core[2]

    @property
    def effective_rank(self) -> float:
        """Exponential of the entropy of the normalized singular values: number of directions in use, 1 to d_head.

        Source: Roy and Vetterli 2007, The effective rank.
        """
        share = self.singular_values / self.singular_values.sum()
        return float(torch.exp(-torch.special.xlogy(share, share).sum()))

    @property
    def symmetric_share(self) -> float:
        """Share of the bilinear form's squared entries in its symmetric part: 1 symmetric, ½ neither, 0 antisymmetric.

        A metric in the strict sense is symmetric; two towers need not be.
        """
        a, b = self.query_side, self.key_side
        crossed = b.T @ a
        total = ((a.T @ a) * (b.T @ b)).sum()
        return float((1 + (crossed * crossed.T).sum() / total) / 2)

    def directions(self, k: int) -> tuple[Float[Tensor, "k d_model"], Float[Tensor, " k"], Float[Tensor, "k d_model"]]:
        """Return the top `k` directions of query inputs, their singular values, and the key inputs' directions.

        Directions are unit vectors in the space of normed inputs; only the joint sign of a pair is meaningful. Raise
        InputError unless k is between 1 and d_head.
        """
        q_basis, u, s, vh, k_basis = self._core
        if not 1 <= k <= len(s):
            raise InputError(f"k must be between 1 and {len(s)} (d_head), got {k}")
        return (q_basis @ u[:, :k]).T, s[:k], (k_basis @ vh[:k].T).T

    def with_random_rotation(self, *, seed: int = 0) -> "QueryKeyMetric":
        """Return a control copy whose keys are rotated at random in head space, lengths unchanged.

        Structure that remains in its scores does not come from the match between W_Q and W_K.
        """
        generator = torch.Generator().manual_seed(seed)
        d_head = self.key_side.shape[1]
        random = torch.randn(d_head, d_head, generator=generator, dtype=torch.float64)
        turn, upper = torch.linalg.qr(random)
        turn = (turn * upper.diagonal().sign()).to(self.key_side)
        return replace(self, key_side=self.key_side @ turn, key_rotation=turn)


def part_weights(view: ModelView, layer: int, name: str) -> tuple[Tensor, Tensor | None, NormView | None]:
    """Return the weights, the bias, and the norm of a layer's queries ("q"), keys ("k") or values ("v")."""
    if name == "q":
        return view.W_Q(layer), view.b_Q(layer), view.q_norm(layer)
    if name == "k":
        return view.W_K(layer), view.b_K(layer), view.k_norm(layer)
    return view.W_V(layer), view.b_V(layer), None


def project(view: ModelView, head: Head, name: str, x: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_head"]:
    """Return a head's unrotated queries, keys or values from x, the output of the norm before attention."""
    weight, bias, own = part_weights(view, head.layer, name)
    index = head.head if name == "q" else view.kv_head(head.head)
    if own is None or own.width == view.d_head:
        y = x @ weight[index].to(x)
        y = y if bias is None else y + bias[index].to(x)
        return y if own is None else own(y)
    # One norm over all heads, so all of them are computed.
    y = einsum(x, weight.to(x), "... d_model, head d_model d_head -> ... head d_head")
    y = y if bias is None else y + bias.to(x)
    return own(y.flatten(-2)).unflatten(-1, y.shape[-2:])[..., index, :]


@torch.no_grad()
def query_key_metric(model: Any, head: Head | tuple[int, int] | str, *, distance: int | None = None) -> QueryKeyMetric:
    """Return the metric of one head: W_Q W_Kᵀ with the norms' gains, and its two towers.

    `distance`: for rotary models, the number of positions from key to query; by default rotation is omitted, so that
    only content is compared. Learned positions and ALiBi have no distance in the metric (learned positions are part of
    the residual stream). Computed in float32, or float64 for float64 models.

    For models that normalize queries and keys (Qwen3, Gemma-3, OLMo-2), `scores` applies these norms exactly; the
    bilinear form contains only their gains, because the scale of each vector is not part of any matrix.

    Raise InputError for an unknown head, a distance beyond the context, or a distance in a model without rotation.
    Source: the paper, section 5; docs/howto/numbers.md.

    Example:
        >>> metric = il.query_key_metric(model, il.Head(2, 0))
        >>> metric.matrix.shape, metric.scores(acts.resid_pre[:, 2], acts.label_resid_pre[0, 2]).shape
        (torch.Size([96, 96]), torch.Size([1, 4]))
        >>> 0 <= metric.symmetric_share <= 1 <= metric.effective_rank <= 16
        True
    """
    view = model if isinstance(model, ModelView) else ModelView.of(model)
    head = view.check_head(head)
    layer = head.layer
    rotates = attention_scores.attention_scoring(view, layer).position == "rotary"
    if distance is not None and not rotates:
        raise InputError(
            f"distance must be None for {view.architecture}, which has no rotary embedding, got {distance}"
        )
    if distance is not None and not 0 <= distance < view.cfg.n_ctx:
        raise InputError(f"distance must be between 0 and {view.cfg.n_ctx - 1} (the model's context), got {distance}")
    return build_metric(view, head, distance, _rotation(view, layer, distance) if rotates else None)


def build_metric(
    view: ModelView, head: Head, distance: int | None, rotation: tuple[Tensor, Tensor] | None
) -> QueryKeyMetric:
    """Return the metric with queries rotated by these cosines and sines; `identity_rotation` omits rotation."""
    scoring = attention_scores.attention_scoring(view, head.layer)
    query_side, key_side = _side(view, head, "q"), _side(view, head, "k")
    if rotation is not None:
        query_side = _turn(query_side, rotation, scoring.interleaved)
    return QueryKeyMetric(view, head, distance, scoring.scale * query_side, key_side, rotation)


def _side(view: ModelView, head: Head, name: str) -> Float[Tensor, "d_model d_head"]:
    """Return the weights of a head's queries or keys with the gains of the norms before and after them."""
    weight, _, own = part_weights(view, head.layer, name)
    index = head.head if name == "q" else view.kv_head(head.head)
    side = weight[index].to(view.compute_dtype)
    side = side * view.attn_input_norm(head.layer).gain_as(side.dtype).to(side.device).expand(view.d_model)[:, None]
    if own is None or own.gain is None:
        return side
    return (side - side.mean(-1, keepdim=True) if own.center else side) * head_slice(own.gain.to(side), index, view)


def head_slice(gain: Tensor, index: int, view: ModelView) -> Tensor:
    """Return one head's entries of the gain or shift of a query or key norm (over one head, or all jointly)."""
    return gain.reshape(-1, view.d_head)[index] if gain.numel() > view.d_head else gain


def _turn(x: Float[Tensor, "*n d_head"], rotation: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate vectors by one rotation, the same for all."""
    cos, sin = (angle.to(x)[None, None] for angle in rotation)
    return attention_scores.rotate(x.reshape(1, -1, 1, x.shape[-1]), cos, sin, interleaved).reshape(x.shape)


def _rotation(view: ModelView, layer: int, distance: int | None) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotation by `distance` positions, or of the identity if it is None.

    Those of a layer that does not rotate have no dimensions.
    """
    last = distance or 0
    hooks = attention_scores.rotation_hooks(view, layer)
    if hooks is None:
        cos, sin = attention_scores.rotation_table(view, layer, torch.tensor([[last]]))
        cos, sin = cos[0, 0], sin[0, 0]
    else:
        seen: dict[str, Tensor] = {}
        keep = [(name, lambda value, hook: seen.__setitem__(hook.name, value.detach()[0, last])) for name in hooks]
        tokens = torch.zeros(1, last + 1, dtype=torch.long, device=view.cfg.device)
        with view.inference_pass() as kwargs, view.model.hooks(fwd_hooks=keep):
            view.model(tokens, return_type="logits", **kwargs)
        if not seen:  # this layer does not rotate
            cos, sin = attention_scores.no_rotation(torch.empty(0, device=view.unembed_device))
            return cos[0, 0], sin[0, 0]
        cos, sin = (seen[name] for name in hooks)
    if distance is None:
        return identity_rotation(cos, sin)
    scale = (cos.square() + sin.square()).sqrt()  # applied once more, for the keys (see `identity_rotation`)
    return scale * cos, scale * sin


def identity_rotation(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the identity rotation times the square of the given rotation's scale.

    The scale is squared because some families scale both queries and keys, whereas the metric rotates only queries.
    """
    return cos.square() + sin.square(), torch.zeros_like(sin)
