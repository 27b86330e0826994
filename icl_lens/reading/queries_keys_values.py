"""Queries, keys and values of one head, or of all heads of a layer, from the inputs of the layer,
before rotation.
"""

from einops import einsum
from jaxtyping import Float
from torch import Tensor

from icl_lens.models import attention_scores
from icl_lens.models.attention_scores import AttentionScoring
from icl_lens.models.head import Head
from icl_lens.models.norms import NormView
from icl_lens.models.view import ModelView


def projection_weights(
    view: ModelView, layer: int, name: str
) -> tuple[Tensor, Tensor | None, NormView | None]:
    """Return the weights, the bias, and the norm of a layer's queries ("q"), keys ("k") or values
    ("v").
    """
    if name == "q":
        return view.W_Q(layer), view.b_Q(layer), view.q_norm(layer)
    if name == "k":
        return view.W_K(layer), view.b_K(layer), view.k_norm(layer)
    return view.W_V(layer), view.b_V(layer), None


def project(
    view: ModelView,
    head: Head,
    name: str,
    x: Float[Tensor, "*n d_model"],
    *,
    rotates_later: bool = False,
) -> Float[Tensor, "*n d_head"]:
    """Return a head's unrotated queries, keys or values from x, the output of the norm before
    attention.

    `rotates_later` leaves out the gain of a norm that follows rotation.
    """
    weight, bias, norm = projection_weights(view, head.layer, name)
    index, scoring = (
        head_index(view, head, name),
        attention_scores.attention_scoring(view, head.layer),
    )
    if norm is None or norm.width == view.d_head:
        y = x @ weight[index].to(x)
        return normed(
            y if bias is None else y + bias[index].to(x), norm, scoring, rotates_later=rotates_later
        )
    # One norm over all heads, so all of them are computed.
    return project_all(view, head.layer, name, x, rotates_later=rotates_later)[..., index, :]


def project_all(
    view: ModelView,
    layer: int,
    name: str,
    x: Float[Tensor, "*n d_model"],
    *,
    rotates_later: bool = False,
) -> Float[Tensor, "*n head d_head"]:
    """Return `project` of all heads of a layer, or of all key-value heads for keys and values."""
    weight, bias, norm = projection_weights(view, layer, name)
    scoring = attention_scores.attention_scoring(view, layer)
    y = einsum(x, weight.to(x), "... d_model, head d_model d_head -> ... head d_head")
    y = y if bias is None else y + bias.to(x)
    if norm is None or norm.width == view.d_head:
        return normed(y, norm, scoring, rotates_later=rotates_later)
    y = normed(y.flatten(-2), norm, scoring, rotates_later=rotates_later)
    return y.unflatten(-1, weight.shape[::2])


def normed(
    y: Float[Tensor, "*n d"],
    norm: NormView | None,
    scoring: AttentionScoring,
    *,
    rotates_later: bool = False,
) -> Float[Tensor, "*n d"]:
    """Return queries, keys or values after their own norm and clipping.

    `rotates_later` leaves out the gain of a norm that follows rotation.
    """
    if norm is not None:
        y = norm._replace(gain=None)(y) if rotates_later and scoring.norms_rotated else norm(y)
    return scoring.clipped(y)


def head_index(view: ModelView, head: Head, name: str) -> int:
    """Return the index of a head's queries, or of the keys or values that it uses."""
    return head.head if name == "q" else view.kv_head(head.head)


def head_slice(gain: Tensor, index: int, view: ModelView) -> Tensor:
    """Return one head's entries of the gain or shift of a query or key norm (over one head, or all
    jointly).
    """
    return gain.reshape(-1, view.d_head)[index] if gain.numel() > view.d_head else gain
