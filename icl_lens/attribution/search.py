"""Finding the largest log-probability increases exactly, without computing all of them.

With a frozen scale the logits are affine in a part `u`, and Jensen's inequality gives
`I(u | x) ≤ u · g`, where `g = N W_U (e_w − softmax(logits(x)))` is one d_model vector for each prompt and layer.
A dot product then bounds each (layer, head, position); evaluating parts exactly in the order of their bounds
until the k-th exact value reaches the next bound gives the exact top k, with a certificate.
Source: docs/howto/numbers.md.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.activations.decompose import chosen_subhead_values, head_outputs
from icl_lens.attribution.increases import check_targets, head_log_prob_increase, subhead_log_prob_increase
from icl_lens.errors import InputError
from icl_lens.models.head import Head
from icl_lens.models.readout import FinalNorm, Readout

if TYPE_CHECKING:
    import pandas as pd

# Nats by which a float32 bound may fall below the exact value it bounds; tested against float64.
SLACK = 1e-4


@dataclass(frozen=True)
class TopSubheads:
    """The k largest (layer, head, position) increases of each prompt, largest first, in nats.

    `n_exact` of `n_parts` parts were evaluated exactly; every other part's bound is at most `left_out`, which
    does not exceed the k-th value. `certified` is False where no bound exists (own norm, logit soft-cap) and the
    search was exhaustive: the answer is exact either way.

    Example:
        >>> top = il.top_subheads(acts, targets, k=5)
        >>> top.value.shape, top.certified
        (torch.Size([1, 5]), True)
        >>> bool((top.left_out <= top.value[:, -1]).all())
        True
    """

    value: Float[Tensor, "batch k"]
    layer: Int[Tensor, "batch k"]
    head: Int[Tensor, "batch k"]
    position: Int[Tensor, "batch k"]
    n_exact: Int[Tensor, " batch"]
    n_parts: Int[Tensor, " batch"]
    left_out: Float[Tensor, " batch"]
    certified: bool


@dataclass(frozen=True)
class TopHeads:
    """The k heads of largest mean increase over the prompts, largest first, in nats.

    `n_exact` of `n_parts` heads were evaluated exactly on every prompt; every other head's mean bound is at most
    `left_out`. `certified` is False where the search was exhaustive (own norm, logit soft-cap). `n_pairs` counts the
    exact evaluations, one for a head on a prompt: those of heads evaluated on some prompts only are among them.

    Example:
        >>> best = il.top_heads(acts, targets, k=3)
        >>> best.left_out <= best.value[-1].item() and best.n_exact <= best.n_parts
        True
    """

    value: Float[Tensor, " k"]
    layer: Int[Tensor, " k"]
    head: Int[Tensor, " k"]
    n_exact: int
    n_parts: int
    left_out: float
    certified: bool
    n_pairs: int
    n_prompts: int

    @property
    def share(self) -> float:
        """Share of all (prompt, head) pairs that were evaluated exactly, 0 to 1."""
        return self.n_pairs / (self.n_parts * self.n_prompts)

    @property
    def heads(self) -> list[Head]:
        return [Head(layer, head) for layer, head in zip(self.layer.tolist(), self.head.tolist(), strict=True)]

    def to_frame(self) -> "pd.DataFrame":
        """One row per head: rank, layer, head, name, increase (mean over prompts, nats)."""
        import pandas as pd

        return pd.DataFrame(
            {
                "rank": range(1, len(self.value) + 1),
                "layer": self.layer.cpu().numpy(),
                "head": self.head.cpu().numpy(),
                "name": [str(head) for head in self.heads],
                "increase": self.value.cpu().numpy(),
            }
        )


@dataclass(frozen=True)
class LayerGradients:
    """For each prompt and layer: log p of the target at the layer's input, and the bound's direction `g`."""

    base: Float[Tensor, "batch layer"]
    g: Float[Tensor, "batch layer d_model"]


def layer_gradients(acts: Activations, targets: Int[Tensor, " batch"], readout: Readout) -> LayerGradients:
    """Bases and bound directions of all layers: one product with W_U and one back, in bounded pieces.

    Raises InputError if the readout is not affine.
    """
    x = acts.resid_pre.to(readout.dtype)
    base, g = x.new_empty(x.shape[:2]), torch.empty_like(x)
    for rows, layers in readout.pieces(*x.shape[:2]):
        part = readout.rows(rows)
        log_probs = part.log_probs(x[rows, layers])
        index = targets[rows, None, None].expand(-1, log_probs.shape[1], 1)
        base[rows, layers] = log_probs.gather(-1, index)[..., 0]
        # In place, and the sign turned on the short side: softmax(logits) − e_w is as large as the logits.
        weights = log_probs.exp_()
        weights.scatter_add_(-1, index, torch.full_like(index, -1, dtype=weights.dtype))
        g[rows, layers] = part.pull_back(weights).neg_()
    return LayerGradients(base, g)


def head_bounds(acts: Activations, gradients: LayerGradients) -> Float[Tensor, "batch layer head"]:
    """Upper bound of every head's increase, nats."""
    columns = []
    for layer in range(acts.view.n_layers):
        in_head = _gradient_in_head(acts, gradients, layer)
        z = acts.z[:, layer].to(in_head.dtype)
        bound = (z * in_head).sum(-1)
        columns.append(bound if acts.attn_scale is None else bound * acts.attn_scale[:, layer, None])
    return torch.stack(columns, dim=1)


def subhead_bounds(acts: Activations, gradients: LayerGradients) -> Float[Tensor, "batch layer head pos"]:
    """Upper bound of every (layer, head, position)'s increase, nats; -inf at padding."""
    keys = torch.arange(acts.pattern.shape[-1], device=acts.pattern.device)
    padding = keys > acts.batch.last.to(keys.device)[:, None]
    columns = []
    for layer in range(acts.view.n_layers):
        in_head = _gradient_in_head(acts, gradients, layer)
        group = acts.view.n_heads // acts.view.n_kv_heads
        by_group = in_head.unflatten(1, (acts.view.n_kv_heads, group))
        along = einsum(
            acts.v[:, layer].to(in_head.dtype),
            by_group,
            "batch key kv d_head, batch kv group d_head -> batch kv group key",
        ).flatten(1, 2)
        columns.append(acts.head_pattern(layer) * along)
    return torch.stack(columns, dim=1).masked_fill(padding[:, None, None], -torch.inf)


def _gradient_in_head(acts: Activations, gradients: LayerGradients, layer: int) -> Float[Tensor, "batch head d_head"]:
    g = gradients.g[:, layer]
    return einsum(g, acts.view.W_O(layer).to(g.dtype), "batch d_model, head d_head d_model -> batch head d_head")


def top_subheads(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    *,
    k: int = 20,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    slack: float = SLACK,
) -> TopSubheads:
    """The k largest (layer, head, position) log-probability increases of each prompt: exact, certified.

    `slack` (nats) is added to every bound to allow for float32 rounding. With `final_norm="own"` or a logit
    soft-cap there is no bound; the search is then exhaustive, and the result says so.
    Raises InputError for bad targets or a k larger than the number of parts.

    Example:
        >>> top = il.top_subheads(acts, targets, k=5)
        >>> top.position.shape
        torch.Size([1, 5])
    """
    targets = check_targets(acts, targets)
    readout = acts.readout.using(final_norm=final_norm, bias=bias)
    n_layers, n_heads, width = acts.view.n_layers, acts.view.n_heads, acts.pattern.shape[-1]
    n_parts = n_layers * n_heads * (acts.batch.last.to(readout.W_U.device) + 1)
    check_k(k, int(n_parts.min()), "(layer, head, position) parts")
    if not readout.is_affine:
        return _exhaustive_subheads(acts, targets, k, n_parts, final_norm=final_norm, bias=bias)

    gradients = layer_gradients(acts, targets, readout)
    bounds = subhead_bounds(acts, gradients).flatten(1)
    batch, n_all = bounds.shape
    m = min(k + 2, n_all)
    value = bounds.new_full((batch, m), -torch.inf)
    active = torch.ones(batch, dtype=torch.bool, device=bounds.device)
    n_exact = torch.zeros(batch, dtype=torch.long, device=bounds.device)
    left_out = bounds.new_full((batch,), -torch.inf)
    done = 0
    while True:
        # One more than is evaluated: its bound is the largest left out.
        order = bounds.topk(min(m + 1, n_all), dim=-1)
        index = order.indices[active, done:m]
        rows = torch.nonzero(active)[:, :1].expand_as(index)
        fresh = torch.isfinite(bounds[rows, index])
        exact = torch.full_like(index, -torch.inf, dtype=value.dtype)
        exact[fresh] = _exact_subheads(acts, targets, readout, gradients, rows[fresh], index[fresh])
        value[active, done:m] = exact
        n_exact[active] += fresh.sum(-1)
        next_bound = order.values[:, m] if m < n_all else value.new_full((batch,), -torch.inf)
        left_out = torch.where(active, next_bound, left_out)
        kth = value.topk(k, dim=-1).values[:, -1]
        active = active & (next_bound + slack > kth)
        if not bool(active.any()):
            break
        done, m = m, min(m + max(4, m // 2), n_all)
        value = torch.cat([value, value.new_full((batch, m - done), -torch.inf)], dim=1)
    best = value.topk(k, dim=-1)
    part = bounds.topk(value.shape[1], dim=-1).indices.gather(1, best.indices)
    layer, head, position = _unravel(part, n_heads, width)
    return TopSubheads(best.values, layer, head, position, n_exact, n_parts, left_out, certified=True)


def _exact_subheads(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    readout: Readout,
    gradients: LayerGradients,
    rows: Int[Tensor, " n"],
    index: Int[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """The exact increase of chosen parts, in one product with W_U."""
    layer, head, key = _unravel(index, acts.view.n_heads, acts.pattern.shape[-1])
    y = acts.resid_pre[rows, layer].to(readout.dtype)
    for one in layer.unique().tolist():
        here = layer == one
        y[here] += chosen_subhead_values(
            acts.head_pattern(one),
            acts.head_values(one),
            acts.view.W_O(one),
            rows[here],
            head[here],
            key[here],
        )
    after = readout.rows(rows).token_log_probs(y[:, None], targets[rows])[:, 0]
    return after - gradients.base[rows, layer]


def _exhaustive_subheads(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    k: int,
    n_parts: Int[Tensor, " batch"],
    *,
    final_norm: FinalNorm,
    bias: bool,
) -> TopSubheads:
    increase = subhead_log_prob_increase(acts, targets, final_norm=final_norm, bias=bias)
    keys = torch.arange(increase.shape[-1], device=increase.device)
    padding: Bool[Tensor, "batch 1 1 pos"] = (keys > acts.batch.last.to(keys.device)[:, None])[:, None, None]
    best = increase.masked_fill(padding, -torch.inf).flatten(1).topk(k, dim=-1)
    layer, head, position = _unravel(best.indices, acts.view.n_heads, increase.shape[-1])
    left_out = best.values.new_full((len(increase),), -torch.inf)
    return TopSubheads(best.values, layer, head, position, n_parts, n_parts, left_out, certified=False)


def top_heads(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    *,
    k: int = 20,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    slack: float = SLACK,
) -> TopHeads:
    """The k heads with the largest mean log-probability increase over the prompts: exact, certified.

    The mean of the bounds bounds the mean, so only a few heads are evaluated. With `final_norm="own"` or a logit
    soft-cap the search is exhaustive, and the result says so. Raises InputError for bad targets or k.

    Example:
        >>> best = il.top_heads(acts, targets, k=3)
        >>> len(best.heads), best.certified
        (3, True)
    """
    targets = check_targets(acts, targets)
    readout = acts.readout.using(final_norm=final_norm, bias=bias)
    n_heads = acts.view.n_heads
    n_parts = acts.view.n_layers * n_heads
    check_k(k, n_parts, "heads")
    if not readout.is_affine:
        mean = head_log_prob_increase(acts, targets, final_norm=final_norm, bias=bias).mean(0).flatten()
        best = mean.topk(k)
        return TopHeads(
            best.values,
            best.indices // n_heads,
            best.indices % n_heads,
            n_parts,
            n_parts,
            -torch.inf,
            False,
            n_parts * len(targets),
            len(targets),
        )
    gradients = layer_gradients(acts, targets, readout)
    bounds = head_bounds(acts, gradients).mean(0).flatten()
    order = bounds.argsort(descending=True)
    value: list[Tensor] = []
    m = k
    while True:
        fresh = order[len(value) : m]
        value += exact_heads(acts, targets, readout, gradients.base, fresh).mean(0)
        left_out = float(bounds[order[m]]) if m < n_parts else -torch.inf
        best = torch.stack(value).topk(k)
        if left_out + slack <= float(best.values[-1]) or m == n_parts:
            break
        m = min(m + max(2, m // 4), n_parts)
    found = order[best.indices]
    n_pairs = m * len(targets)
    return TopHeads(best.values, found // n_heads, found % n_heads, m, n_parts, left_out, True, n_pairs, len(targets))


def exact_heads(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    readout: Readout,
    base: Float[Tensor, "batch layer"],
    index: Int[Tensor, " n"],
) -> Float[Tensor, "batch n"]:
    """The exact increases of chosen heads (`layer · n_heads + head`), nats, in one product with W_U.

    `base` is the target's log-probability at each layer's input (`LayerGradients.base`).
    """
    layer, head = index // acts.view.n_heads, index % acts.view.n_heads
    y = acts.resid_pre[:, layer].to(readout.dtype)
    for one in layer.unique().tolist():
        here = layer == one
        z = acts.z[:, one, head[here]].to(readout.dtype)
        if acts.attn_scale is not None:
            z = z * acts.attn_scale[:, one, None, None]
        y[:, here] += head_outputs(z, acts.view.W_O(one)[head[here]])
    return readout.token_log_probs(y, targets) - base[:, layer]


def _unravel(index: Tensor, n_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return index // (n_heads * width), index // width % n_heads, index % width


def check_k(k: int, n_parts: int, what: str) -> None:
    """Raises InputError unless there are `k` of them."""
    if not 1 <= k <= n_parts:
        raise InputError(f"k={k} asks for more than there is: choose 1 to {n_parts} {what}")
