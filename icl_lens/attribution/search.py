"""Find the largest log-probability increases exactly, without computing all of them.

A part `u` is what one head, or one head at one position, adds to the layer input `x`. `I(u | x)` is the increase in
log p(w), where `w` is the target token. `e_w` is the one-hot vector of `w`, and `N` is the frozen final norm.

1. With a frozen norm scale, logits are affine in `u`, and Jensen's inequality gives `I(u | x) ≤ u · g`, where
   `g = N W_U (e_w − softmax(logits(x)))` is one d_model vector per prompt and layer.
2. One dot product therefore bounds each (layer, head, position).
3. Parts are evaluated exactly, largest bound first, until the k-th largest exact value is at least the next bound. The
   top k are then exact, and that bound certifies them.

The contrast `C(u | x)` is the increase in log p(w) − log Σ p(w'_i). It has the same bound, with the tokens w'_i
instead of the vocabulary: `C(u | x) = b_w(u) − log Σ q_i exp b_i(u) ≤ b_w(u) − Σ q_i b_i(u) = u · g`. Here, b_w(u) and
b_i(u) are what `u` adds to the logits of w and w'_i, and q is the softmax over the w'_i at x, so `g` needs only the
columns of W_U for w and the w'_i. With one w', this is an equality: the dot products are the exact values, and no
search is needed.
Source: docs/howto/numbers.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations
from icl_lens.activations.decompose import head_outputs, selected_subhead_values
from icl_lens.attribution.increases import (
    Against,
    CheckedAgainst,
    check_scoring,
    every_head_increase,
    linear_direction,
    project_heads,
    project_subheads,
    select_rows,
    subhead_log_prob_increase,
)
from icl_lens.display import SHOWN_ROWS, ShownAsTable, format_signed, head_name, plural_prompts
from icl_lens.errors import InputError, check_integers
from icl_lens.models.head import Head
from icl_lens.models.readout import FinalNorm, Readout

# Float32 rounding can push a bound at most this far below the exact value, in nats; tested against float64.
SLACK = 1e-4


@dataclass(frozen=True, repr=False)
class TopSubheads(ShownAsTable):
    """The k largest (layer, head, position) increases of each prompt, largest first, in nats.

    `n_exact` of `n_parts` parts are evaluated exactly; every other part's bound is at most `unevaluated_bound`, which
    does not exceed the k-th value. If no bound exists (own norm, logit soft-cap), the search is exhaustive and
    `certified` is False; the result is exact either way. For a linear contrast (one token in `against`), the bounds are
    the exact values, so all parts count as evaluated, at the cost of one dot product each.

    Example:
        >>> top = il.top_subheads(acts, targets, k=5)
        >>> top.value.shape, top.certified
        (torch.Size([1, 5]), True)
        >>> bool((top.unevaluated_bound <= top.value[:, -1]).all())
        True
    """

    value: Float[Tensor, "batch k"]
    layer: Int[Tensor, "batch k"]
    head: Int[Tensor, "batch k"]
    position: Int[Tensor, "batch k"]
    n_exact: Int[Tensor, " batch"]
    n_parts: Int[Tensor, " batch"]
    unevaluated_bound: Float[Tensor, " batch"]
    certified: bool
    tokens: Sequence[Sequence[str]] | None = None
    """Each prompt's tokens, with white space visible."""

    def to_frame(self) -> pd.DataFrame:
        """Return prompt, rank, layer, head, name, position, token and value (nats), one row per part, largest first."""
        n, k = self.value.shape
        frame = pd.DataFrame(
            {
                "prompt": torch.arange(n).repeat_interleave(k).numpy(),
                "rank": torch.arange(1, k + 1).repeat(n).numpy(),
                "layer": self.layer.flatten().cpu().numpy(),
                "head": self.head.flatten().cpu().numpy(),
            }
        )
        frame["name"] = [head_name(layer, head) for layer, head in zip(frame["layer"], frame["head"], strict=True)]
        frame["position"] = self.position.flatten().cpu().numpy()
        if self.tokens is not None:
            positions = zip(frame["prompt"], frame["position"], strict=True)
            frame["token"] = [self.tokens[row][position] for row, position in positions]
        frame["value"] = self.value.flatten().cpu().numpy()
        return frame

    def _shown(self) -> tuple[str, dict[str, list[Any]], int]:
        n = len(self.value)
        evaluated = f"{float(self.n_exact.float().mean()):.0f} of {float(self.n_parts.float().mean()):.0f}"
        frame = self.to_frame().head(SHOWN_ROWS)
        columns = {"prompt": frame["prompt"].tolist()} if n > 1 else {}
        columns |= {"rank": frame["rank"].tolist(), "head": frame["name"].tolist()}
        columns |= {name: frame[name].tolist() for name in ("position", "token") if name in frame}
        columns["increase"] = [format_signed(value) for value in frame["value"]]
        how = f"{evaluated} parts evaluated{' per prompt' * (n > 1)}, {_certainty(self.certified)}"
        return f"TopSubheads of {plural_prompts(n)}, nats: {how}", columns, self.value.numel()


@dataclass(frozen=True, repr=False)
class TopHeads(ShownAsTable):
    """The k heads with the largest mean increase over the prompts, largest first, in nats.

    `n_exact` of `n_parts` heads are evaluated exactly on every prompt; every other head's mean bound is at most
    `unevaluated_bound`. `certified` is False if the search is exhaustive (own norm, logit soft-cap). `n_evaluations`
    counts exact evaluations of a head on a prompt, including those of heads evaluated on only some prompts. For a
    linear contrast (one token in `against`), the bounds are the exact values, so all heads count as evaluated and
    certified.

    Example:
        >>> best = il.top_heads(acts, targets, k=3)
        >>> best.unevaluated_bound <= best.value[-1].item() and best.n_exact <= best.n_parts
        True
    """

    value: Float[Tensor, " k"]
    layer: Int[Tensor, " k"]
    head: Int[Tensor, " k"]
    n_exact: int
    n_parts: int
    unevaluated_bound: float
    certified: bool
    n_evaluations: int
    n_prompts: int

    @property
    def share_evaluated(self) -> float:
        """Share of all (prompt, head) pairs that are evaluated exactly, 0 to 1."""
        return self.n_evaluations / (self.n_parts * self.n_prompts)

    @property
    def heads(self) -> list[Head]:
        return [Head(layer, head) for layer, head in zip(self.layer.tolist(), self.head.tolist(), strict=True)]

    def to_frame(self) -> pd.DataFrame:
        """Return rank, layer, head, name and value (mean over prompts, nats), one row per head, largest first."""
        return pd.DataFrame(
            {
                "rank": range(1, len(self.value) + 1),
                "layer": self.layer.cpu().numpy(),
                "head": self.head.cpu().numpy(),
                "name": [str(head) for head in self.heads],
                "value": self.value.cpu().numpy(),
            }
        )

    def _shown(self) -> tuple[str, dict[str, list[Any]], int]:
        frame = self.to_frame().head(SHOWN_ROWS)
        columns = {"rank": frame["rank"].tolist(), "head": frame["name"].tolist()}
        columns["mean increase"] = [format_signed(value) for value in frame["value"]]
        how = f"{self.n_exact} of {self.n_parts} heads evaluated, {_certainty(self.certified)}"
        return f"TopHeads over {plural_prompts(self.n_prompts)}, nats: {how}", columns, len(self.value)


def _certainty(certified: bool) -> str:
    return "certified" if certified else "exhaustive"


@dataclass(frozen=True)
class LayerGradients:
    """Per prompt and layer: log p (or contrast) of the target at the layer's input, and the bound's direction `g`."""

    base: Float[Tensor, "batch layer"]
    g: Float[Tensor, "batch layer d_model"]


def layer_gradients(
    acts: Activations, targets: Int[Tensor, " batch"], readout: Readout, *, against: CheckedAgainst = None
) -> LayerGradients:
    """Return the base values and bound directions of all layers, computed in memory-sized pieces.

    With `against`, return those of the contrast, which need only the columns of W_U for the target and `against`.
    Raise InputError if the readout is not affine.
    """
    x = acts.resid_pre.to(readout.dtype)
    base, g = x.new_empty(x.shape[:2]), torch.empty_like(x)
    if against is not None:
        for rows, layers in readout.contrast_pieces(len(x), x.shape[1], against.shape[1]):
            sub_readout, token_ids = readout.select_prompts(rows), (targets[rows], against[rows])
            relative = sub_readout.relative_logits(x[rows, layers], *token_ids)
            base[rows, layers] = -torch.logsumexp(relative, dim=-1)
            g[rows, layers] = sub_readout.direction(-relative.softmax(-1) @ sub_readout.relative_columns(*token_ids))
        return LayerGradients(base, g)
    for rows, layers in readout.pieces(*x.shape[:2]):
        sub_readout = readout.select_prompts(rows)
        log_probs = sub_readout.log_probs(x[rows, layers])
        index = targets[rows, None, None].expand(-1, log_probs.shape[1], 1)
        base[rows, layers] = log_probs.gather(-1, index)[..., 0]
        # In place, because softmax(logits) − e_w needs as much memory as the logits; the much smaller g is negated.
        weights = log_probs.exp_()
        weights.scatter_add_(-1, index, torch.full_like(index, -1, dtype=weights.dtype))
        g[rows, layers] = sub_readout.pull_back(weights).neg_()
    return LayerGradients(base, g)


def head_bounds(acts: Activations, gradients: LayerGradients) -> Float[Tensor, "batch layer head"]:
    """Return an upper bound on every head's increase, nats."""
    return project_heads(acts.view, acts.head_inputs, gradients.g)


def subhead_bounds(acts: Activations, gradients: LayerGradients) -> Float[Tensor, "batch layer head pos"]:
    """Return an upper bound on the increase of every (layer, head, position), nats; -inf at padding."""
    columns = [project_subheads(acts, gradients.g[:, layer], layer) for layer in range(acts.view.n_layers)]
    return torch.stack(columns, dim=1).masked_fill(acts.padding[:, None, None], -torch.inf)


def top_subheads(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    *,
    k: int = 20,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    slack: float = SLACK,
) -> TopSubheads:
    """Return the k largest (layer, head, position) log-probability increases of each prompt, exact and certified.

    `slack` (nats) is added to every bound to allow for float32 rounding. With `final_norm="own"` or a logit soft-cap,
    there is no bound, so the search is exhaustive and `certified` is False. With `against`, return the k largest
    contributions to log p(target) − log Σ p(against). With one token in `against`, all values are computed exactly and
    no search is needed; with several, the search is the same. Raise InputError for invalid `targets` or `against`, or
    if `k` exceeds the number of parts.

    Example:
        >>> top = il.top_subheads(acts, targets, k=5)
        >>> top.position.shape
        torch.Size([1, 5])
        >>> il.top_subheads(acts, targets, k=5, against=batch.other_label_tokens).certified
        True
    """
    targets, others, readout = check_scoring(acts, targets, against, final_norm, bias)
    n_layers, n_heads, width = acts.view.n_layers, acts.view.n_heads, acts.pattern.shape[-1]
    n_parts = n_layers * n_heads * (acts.batch.last.to(readout.W_U.device) + 1)
    check_k(k, int(n_parts.min()), "(layer, head, position) parts")
    tokens = acts.batch.token_names
    linear = linear_direction(readout, targets, others) is not None
    if linear or not readout.is_affine:
        exact = subhead_log_prob_increase(acts, targets, against=against, final_norm=final_norm, bias=bias)
        best = exact.masked_fill(acts.padding[:, None, None], -torch.inf).flatten(1).topk(k, dim=-1)
        layer, head, position = _unravel(best.indices, n_heads, width)
        no_bound = best.values.new_full((len(exact),), -torch.inf)
        return TopSubheads(best.values, layer, head, position, n_parts, n_parts, no_bound, linear, tokens)

    gradients = layer_gradients(acts, targets, readout, against=others)
    bounds = subhead_bounds(acts, gradients).flatten(1)
    batch, n_all = bounds.shape
    m = min(k + 2, n_all)
    value = bounds.new_full((batch, m), -torch.inf)
    active = torch.ones(batch, dtype=torch.bool, device=bounds.device)
    n_exact = torch.zeros(batch, dtype=torch.long, device=bounds.device)
    unevaluated_bound = bounds.new_full((batch,), -torch.inf)
    done = 0
    while True:
        # Take one more part than is evaluated: its bound is the largest of the remaining ones.
        order = bounds.topk(min(m + 1, n_all), dim=-1)
        index = order.indices[active, done:m]
        rows = torch.nonzero(active)[:, :1].expand_as(index)
        is_token = torch.isfinite(bounds[rows, index])
        exact = torch.full_like(index, -torch.inf, dtype=value.dtype)
        exact[is_token] = _exact_subheads(acts, targets, others, readout, gradients, rows[is_token], index[is_token])
        value[active, done:m] = exact
        n_exact[active] += is_token.sum(-1)
        next_bound = order.values[:, m] if m < n_all else value.new_full((batch,), -torch.inf)
        unevaluated_bound = torch.where(active, next_bound, unevaluated_bound)
        kth = value.topk(k, dim=-1).values[:, -1]
        active = active & (next_bound + slack > kth)
        if not bool(active.any()):
            break
        done, m = m, min(m + max(4, m // 2), n_all)
        value = torch.cat([value, value.new_full((batch, m - done), -torch.inf)], dim=1)
    best = value.topk(k, dim=-1)
    flat_index = bounds.topk(value.shape[1], dim=-1).indices.gather(1, best.indices)
    layer, head, position = _unravel(flat_index, n_heads, width)
    return TopSubheads(best.values, layer, head, position, n_exact, n_parts, unevaluated_bound, True, tokens)


def _exact_subheads(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    against: CheckedAgainst,
    readout: Readout,
    gradients: LayerGradients,
    rows: Int[Tensor, " n"],
    index: Int[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """Return the exact increases of the chosen parts, with one product with W_U (or its columns for `against`)."""
    layer, head, key = _unravel(index, acts.view.n_heads, acts.pattern.shape[-1])
    y = acts.resid_pre[rows, layer].to(readout.dtype)
    for number in layer.unique().tolist():
        in_layer = layer == number
        y[in_layer] += selected_subhead_values(
            acts.head_pattern(number),
            acts.head_values(number),
            acts.view.W_O(number),
            rows[in_layer],
            head[in_layer],
            key[in_layer],
        )
    readout, against = readout.select_prompts(rows), select_rows(against, rows)
    with_part = readout.token_log_probs(y[:, None], targets[rows], against=against)[:, 0]
    return with_part - gradients.base[rows, layer]


def top_heads(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    *,
    k: int = 20,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    slack: float = SLACK,
) -> TopHeads:
    """Return the k heads with the largest mean log-probability increase over the prompts, exact and certified.

    The mean of a head's bounds is an upper bound on its mean increase, so only a few heads are evaluated exactly. With
    `final_norm="own"` or a logit soft-cap, the search is exhaustive and `certified` is False. With `against`, return
    the heads that contribute most to log p(target) − log Σ p(against); see `top_subheads`. Raise InputError for
    invalid `targets`, `against` or `k`.

    Example:
        >>> best = il.top_heads(acts, targets, k=3)
        >>> len(best.heads), best.certified
        (3, True)
        >>> il.top_heads(acts, targets, k=3, against=batch.other_label_tokens).certified
        True
    """
    targets, others, readout = check_scoring(acts, targets, against, final_norm, bias)
    n_parts = len(acts.view.heads())
    check_k(k, n_parts, "heads")
    means = HeadMeans(n_parts)
    linear = linear_direction(readout, targets, others) is not None
    if linear or not readout.is_affine:
        every = every_head_increase(acts.view, readout, acts.resid_pre, acts.head_inputs, targets, others)
        exact = every.flatten(1).cpu().numpy()
        means.add(exact if linear else None, np.arange(n_parts), exact)
        return means.top(k, acts.view.n_heads)
    gradients = layer_gradients(acts, targets, readout, against=others)
    bounds = head_bounds(acts, gradients).flatten(1).cpu().numpy()
    means.add(bounds, np.arange(0), bounds[:, :0])
    step = k
    while len(heads := means.open_heads(k, slack)[:step]):
        means.add_exact(heads, exact_head_increases(acts, targets, readout, heads, gradients.base, against=others))
        step = max(2, int((means.n_exact > 0).sum()) // 4)
    return means.top(k, acts.view.n_heads)


class HeadMeans:
    """Running means of the bounds and increases of heads, in float64 and in batch order, in constant memory per head.

    Heads are indexed as `layer · n_heads + head`.
    """

    def __init__(self, n_parts: int):
        self.n = 0
        self.exact = np.zeros(n_parts)
        self.n_exact = np.zeros(n_parts, dtype=np.int64)
        self.upper = np.zeros(n_parts)
        self.bounded = True

    def add(
        self,
        bound: Float[np.ndarray, "batch all_heads"] | None,
        heads: Int[np.ndarray, " head"],
        increase: Float[np.ndarray, "batch head"],
    ) -> None:
        """Add a batch: bounds of all heads (None if no bound exists), and exact increases of some heads."""
        self.n += len(increase)
        if bound is None:
            self.bounded = False
        else:
            upper = bound.astype(np.float64).sum(0)
            upper[heads] = increase.astype(np.float64).sum(0)
            self.upper += upper
        self.add_exact(heads, increase)

    def add_exact(self, heads: Int[np.ndarray, " head"], increase: Float[np.ndarray, "batch head"]) -> None:
        """Add a batch's exact increases of heads for which `add` received only bounds."""
        self.exact[heads] += increase.astype(np.float64).sum(0)
        self.n_exact[heads] += len(increase)

    def open_heads(self, k: int, slack: float) -> Int[np.ndarray, " head"]:
        """Return the heads that lack an exact mean and may still be in the top k, largest bound first."""
        complete = self.n_exact == self.n
        kth = np.sort(self.exact[complete] / self.n)[-k] if complete.sum() >= k else -np.inf
        order = np.argsort(-self.upper, kind="stable")
        return order[(~complete & ~(self.upper / self.n + slack <= kth))[order]]

    def top(self, k: int, n_heads: int) -> TopHeads:
        """Return the heads with the k largest exact means. Raise InputError if a mean is NaN or infinite."""
        complete = np.flatnonzero(self.n_exact == self.n)
        mean = self.exact[complete] / self.n
        if not np.isfinite(mean).all():
            head = Head.from_index(int(complete[~np.isfinite(mean)][0]), n_heads)
            raise InputError(
                f"the mean increase of {head} is NaN or infinite; load the model in bfloat16 or float32, or remove "
                "edits"
            )
        order = np.argsort(-mean, kind="stable")[:k]
        unevaluated = self.upper[self.n_exact < self.n] / self.n
        return TopHeads(
            value=torch.from_numpy(mean[order]),
            layer=torch.from_numpy(complete[order] // n_heads),
            head=torch.from_numpy(complete[order] % n_heads),
            n_exact=len(complete),
            n_parts=len(self.exact),
            unevaluated_bound=float(unevaluated.max()) if len(unevaluated) else -float("inf"),
            certified=self.bounded,
            n_evaluations=int(self.n_exact.sum()),
            n_prompts=self.n,
        )


def exact_head_increases(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    readout: Readout,
    heads: Int[np.ndarray, " n"],
    base: Float[Tensor, "batch layer"] | None = None,
    *,
    against: CheckedAgainst = None,
) -> Float[np.ndarray, "batch n"]:
    """Return the exact increases of the chosen heads (`layer · n_heads + head`), nats, with one product with W_U.

    `base` is the target's log-probability (or contrast) at each layer's input, `LayerGradients.base`; it is computed if
    None.
    """
    index = torch.as_tensor(heads, device=readout.W_U.device)
    layer, head = index // acts.view.n_heads, index % acts.view.n_heads
    layers = layer.unique()
    if base is None:
        base = readout.scale.new_zeros((len(targets), acts.view.n_layers))
        base[:, layers] = readout.token_log_probs(acts.resid_pre[:, layers].to(readout.dtype), targets, against=against)
    y, z = acts.resid_pre[:, layer].to(readout.dtype), acts.head_inputs
    for number in layers.tolist():
        in_layer = layer == number
        y[:, in_layer] += head_outputs(z[:, number, head[in_layer]], acts.view.W_O(number)[head[in_layer]])
    return (readout.token_log_probs(y, targets, against=against) - base[:, layer]).cpu().numpy()


def _unravel(index: Tensor, n_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return index // (n_heads * width), index // width % n_heads, index % width


def check_k(k: int, n_parts: int, what: str) -> None:
    """Raise InputError unless `k` is an integer from 1 to `n_parts`."""
    check_integers(k=k)
    if not 1 <= k <= n_parts:
        raise InputError(f"k must be between 1 and {n_parts} ({what}), got {k}")
