"""Find the largest contrasts or log-probability increases exactly, without computing all of them.

A part `u` is what one head, or one head at one position, adds to the layer input `x`. `I(u | x)` is
the increase in log p(w), where `w` is the target token. `e_w` is the one-hot vector of `w`, and `N`
is the matrix of the final norm with its scale frozen.

1. With a frozen scale, logits are affine in `u`, and Jensen's inequality gives `I(u | x) ≤ u · g`,
   where `g = N W_U (e_w − softmax(logits(x)))` is one d_model vector per prompt and layer.
2. One dot product therefore bounds the increase of each (layer, head, position).
3. Parts are evaluated exactly, largest bound first, until the k-th largest exact value is at least
   as large as all remaining bounds. No other part can then be in the top k.

The contrast `C(u | x)` is the increase in log p(w) − log Σ p(w'_i). Let `b_w(u)` and `b_i(u)` be
what `u` adds to the logits of w and w'_i, and q the softmax over the w'_i at x. Jensen's inequality
then gives `C(u | x) = b_w(u) − log Σ q_i exp b_i(u) ≤ b_w(u) − Σ q_i b_i(u) = u · g`, where `g`
needs only the columns of W_U for w and the w'_i. With one w', this is an equality: the dot products
are the exact values, and no search is needed. Source: docs/howto/numbers.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError, check_integers
from icl_lens.foundation.defaults import N_TOP
from icl_lens.foundation.ranking_scores import DirectScore
from icl_lens.models.active_edits import edits_suffix
from icl_lens.models.head import Head
from icl_lens.models.readout import FinalNorm, Readout
from icl_lens.prompts.batch import count_prompts
from icl_lens.reading.activations import Activations
from icl_lens.reading.decompose import head_outputs, selected_subhead_values
from icl_lens.reading.head_parts import head_values, padding, scaled_pattern, scaled_z
from icl_lens.reading.increases import (
    every_head_increase,
    linear_direction,
    project_heads,
    project_subheads,
    subhead_log_prob_increase,
)
from icl_lens.reading.scored_tokens import (
    Against,
    CheckedAgainst,
    check_scoring,
    choose_ranking,
    select_rows,
)
from icl_lens.result.base import Result
from icl_lens.result.number_format import signed
from icl_lens.result.tables import (
    SHOWN_ROWS,
    columns_first,
    head_name,
    long_frame,
    plural_prompts,
)
from icl_lens.result.view import View, table_view

# Float32 rounding can push a bound at most this far below the exact value, in nats; tested against
# float64.
SLACK = 1e-4


@dataclass(frozen=True, repr=False)
class TopSubheads(Result):
    """The k largest (layer, head, position) contrasts, or increases, of each prompt, largest first,
    in nats.

    `n_exact` of `n_parts` parts are evaluated exactly; every other part's bound is at most
    `unevaluated_bound`, which does not exceed the k-th value, and `certified` is True. For a
    contrast with one token in `against`, the bounds are the exact values, so all parts count as
    evaluated. If no bound exists (own norm, logit soft-cap), `certified` is False: all parts are
    evaluated, and the values are just as exact.

    Example:
        >>> top = il.top_subheads(acts, k=5, by="increase")
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
    by: DirectScore = "contrast"
    """What the values are."""

    def to_frame(self) -> pd.DataFrame:
        """Return name, position, token, value (nats), prompt, rank, layer and head: one row per
        part, largest first.
        """
        frame = long_frame(self.layer, ("prompt", "rank"), value="layer")
        frame["rank"] += 1
        frame["head"] = self.head.flatten().cpu().numpy()
        frame["name"] = [
            head_name(layer, head)
            for layer, head in zip(frame["layer"], frame["head"], strict=True)
        ]
        frame["position"] = self.position.flatten().cpu().numpy()
        if self.tokens is not None:
            positions = zip(frame["prompt"], frame["position"], strict=True)
            frame["token"] = [self.tokens[row][position] for row, position in positions]
        frame["value"] = self.value.flatten().cpu().numpy()
        return columns_first(frame, "name", "position", "token", "value")

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        n = len(self.value)
        evaluated = (
            f"{float(self.n_exact.float().mean()):.0f} of {float(self.n_parts.float().mean()):.0f}"
        )
        frame = self.to_frame().head(SHOWN_ROWS)
        columns = {"prompt": frame["prompt"].tolist()} if n > 1 else {}
        columns |= {"rank": frame["rank"].tolist(), "head": frame["name"].tolist()}
        columns |= {name: frame[name].tolist() for name in ("position", "token") if name in frame}
        columns[self.by] = [signed(value) for value in frame["value"]]
        summary = (
            f"{evaluated} parts evaluated{' per prompt' if n > 1 else ''}, "
            f"{_certainty(self.certified)}"
        )
        title = f"TopSubheads of {plural_prompts(n)}, nats: {summary}"
        return table_view(title, columns, self.value.numel())


@dataclass(frozen=True, repr=False)
class TopHeads(Result):
    """The k heads with the largest mean contrast, or increase, over the prompts, largest first, in
    nats.

    `n_exact` of `n_parts` heads are evaluated exactly on every prompt; every other head's mean
    bound is at most `unevaluated_bound`. `certified` is as in `TopSubheads`.

    Example:
        >>> best = il.top_heads(acts, k=3, by="increase")
        >>> best.unevaluated_bound <= best.value[-1].item() and best.n_exact <= best.n_parts
        True
    """

    version: ClassVar[int] = 2
    value: Float[Tensor, " k"]
    layer: Int[Tensor, " k"]
    head: Int[Tensor, " k"]
    n_exact: int
    n_parts: int
    unevaluated_bound: float
    certified: bool
    n_prompts: int
    by: DirectScore = "contrast"
    """What the values are."""
    edits: tuple[str, ...] = ()
    """What edited the model when it was captured: open `with` blocks, and other hooks."""

    @property
    def heads(self) -> list[Head]:
        return [
            Head(layer, head)
            for layer, head in zip(self.layer.tolist(), self.head.tolist(), strict=True)
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per head, largest first: name, value (mean over prompts, nats), rank,
        layer and head.
        """
        return pd.DataFrame(
            {
                "name": [str(head) for head in self.heads],
                "value": self.value.cpu().numpy(),
                "rank": range(1, len(self.value) + 1),
                "layer": self.layer.cpu().numpy(),
                "head": self.head.cpu().numpy(),
            }
        )

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        frame = self.to_frame().head(SHOWN_ROWS)
        columns = {"rank": frame["rank"].tolist(), "head": frame["name"].tolist()}
        columns[f"mean {self.by}"] = [signed(value) for value in frame["value"]]
        summary = f"{self.n_exact} of {self.n_parts} heads evaluated, {_certainty(self.certified)}"
        summary += edits_suffix(self.edits)
        title = f"Heads by {self.by} over {plural_prompts(self.n_prompts)}, nats: {summary}"
        return table_view(title, columns, len(self.value))


def _certainty(certified: bool) -> str:
    return "certified" if certified else "exhaustive"


def layer_gradients(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    readout: Readout,
    *,
    against: CheckedAgainst = None,
) -> tuple[Float[Tensor, "batch layer"], Float[Tensor, "batch layer d_model"]]:
    """Return the target's log-probability at each layer's input, nats, and the direction `g` of the
    bounds.

    A part's dot product with `g` bounds its increase. With `against`, both are for log p(target) −
    log Σ p(against). Computed in pieces that fit in memory.

    Raise InputError if the readout is not affine.
    """
    x = acts.resid_pre.to(readout.dtype)
    base, g = x.new_empty(x.shape[:2]), torch.empty_like(x)
    if against is not None:
        for rows, layers in readout.contrast_pieces(len(x), x.shape[1], against.shape[1]):
            sub_readout, token_ids = readout.select_prompts(rows), (targets[rows], against[rows])
            relative = sub_readout.relative_logits(x[rows, layers], *token_ids)
            base[rows, layers] = -torch.logsumexp(relative, dim=-1)
            g[rows, layers] = sub_readout.direction(
                -relative.softmax(-1) @ sub_readout.relative_columns(*token_ids)
            )
        return base, g
    for rows, layers in readout.pieces(*x.shape[:2]):
        sub_readout = readout.select_prompts(rows)
        log_probs = sub_readout.log_probs(x[rows, layers])
        index = targets[rows, None, None].expand(-1, log_probs.shape[1], 1)
        base[rows, layers] = log_probs.gather(-1, index)[..., 0]
        # softmax − e_w, in place to save memory; its product with W_U is −g.
        weights = log_probs.exp_()
        weights.scatter_add_(-1, index, torch.full_like(index, -1, dtype=weights.dtype))
        g[rows, layers] = sub_readout.pull_back(weights).neg_()
    return base, g


def head_bounds(
    acts: Activations, g: Float[Tensor, "batch layer d_model"]
) -> Float[Tensor, "batch layer head"]:
    """Return an upper bound on every head's increase, nats."""
    return project_heads(acts.view, scaled_z(acts), g)


def subhead_bounds(
    acts: Activations, g: Float[Tensor, "batch layer d_model"]
) -> Float[Tensor, "batch layer head pos"]:
    """Return an upper bound on the increase of every (layer, head, position), nats; -inf at
    padding.
    """
    by_layer = [project_subheads(acts, g[:, layer], layer) for layer in range(acts.view.n_layers)]
    return torch.stack(by_layer, dim=1).masked_fill(padding(acts)[:, None, None], -torch.inf)


def top_subheads(
    acts: Activations,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    k: int = N_TOP,
    by: DirectScore | None = None,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    slack: float = SLACK,
) -> TopSubheads:
    """Return the k (layer, head, position) parts of each prompt that add most to the answer, exact
    and certified.

    `by` is "contrast", what a part adds to log p(target) − log Σ p(against), or "increase", what it
    adds to log p(target). `targets` defaults to the answers, `against` to the other labels of each
    prompt, and `by` to "contrast", or to "increase" if there is no token to compare with.

    With `final_norm="own"` or a logit soft-cap, there is no bound, so all parts are evaluated and
    `certified` is False. `slack` (nats) is added to every bound to allow for float32 rounding.
    `bias` is that of `Readout`. Raise InputError for invalid `targets`, `against` or `by`, or if
    `k` exceeds the number of parts.

    Example:
        >>> top = il.top_subheads(acts, k=5)
        >>> top.position.shape, top.by
        (torch.Size([1, 5]), 'contrast')
        >>> il.top_subheads(acts, k=5, by="increase").certified
        True
    """
    by, targets, against_ids, readout = choose_ranking(acts, by, targets, against, final_norm, bias)
    n_layers, n_heads, width = acts.view.n_layers, acts.view.n_heads, acts.pattern.shape[-1]
    n_parts = n_layers * n_heads * (acts.batch.last.to(readout.W_U.device) + 1)
    k = check_k(k, int(n_parts.min()), "(layer, head, position) parts")
    tokens = acts.batch.token_names
    linear = linear_direction(readout, targets, against_ids) is not None
    if linear or not readout.is_affine:
        exact = subhead_log_prob_increase(
            acts, targets, against=against_ids, final_norm=final_norm, bias=bias
        )
        best = (
            exact.masked_fill(padding(acts)[:, None, None], -torch.inf).flatten(1).topk(k, dim=-1)
        )
        layer, head, position = _unravel(best.indices, n_heads, width)
        no_bound = best.values.new_full((len(exact),), -torch.inf)
        return TopSubheads(
            best.values, layer, head, position, n_parts, n_parts, no_bound, linear, tokens, by
        )

    base, g = layer_gradients(acts, targets, readout, against=against_ids)
    bounds = subhead_bounds(acts, g).flatten(1)
    batch, n_all = bounds.shape
    rows = torch.arange(batch, device=bounds.device)[:, None]
    value, index = bounds[:, :0], rows[:, :0]
    active = torch.ones(batch, dtype=torch.bool, device=bounds.device)
    n_exact = torch.zeros(batch, dtype=torch.long, device=bounds.device)
    unevaluated_bound = bounds.new_full((batch,), -torch.inf)
    step = min(k + 2, n_all)
    while True:
        # Evaluate the `step` parts with the largest bounds; the next bound limits all remaining
        # parts.
        largest = bounds.topk(min(step + 1, n_all), dim=-1)
        part_index = largest.indices[:, :step]
        evaluated = active[:, None] & torch.isfinite(largest.values[:, :step])  # not padding
        prompt_of_part = rows.expand_as(part_index)[evaluated]
        exact = torch.full_like(part_index, -torch.inf, dtype=value.dtype)
        exact[evaluated] = _exact_subheads(
            acts, targets, against_ids, readout, base, prompt_of_part, part_index[evaluated]
        )
        bounds.scatter_(1, part_index, -torch.inf)
        value, index = torch.cat([value, exact], dim=1), torch.cat([index, part_index], dim=1)
        n_exact += evaluated.sum(-1)
        has_remaining = largest.values.shape[1] > step
        next_bound = (
            largest.values[:, step] if has_remaining else torch.full_like(value[:, 0], -torch.inf)
        )
        unevaluated_bound = torch.where(active, next_bound, unevaluated_bound)
        kth = value.topk(k, dim=-1).values[:, -1]
        active = active & (next_bound + slack > kth)
        if not bool(active.any()):
            break
        step = min(max(4, value.shape[1] // 2), n_all - value.shape[1])
    best = value.topk(k, dim=-1)
    layer, head, position = _unravel(index.gather(1, best.indices), n_heads, width)
    return TopSubheads(
        best.values, layer, head, position, n_exact, n_parts, unevaluated_bound, True, tokens, by
    )


def subhead_scores_at(
    acts: Activations,
    parts: TopSubheads,
    targets: Int[Tensor, " batch"],
    *,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
) -> Float[Tensor, "batch k"]:
    """Return the increases of parts that another score has ranked, nats, or their contrasts with
    `against`.
    """
    targets, against_ids, readout = check_scoring(acts, targets, against, final_norm, bias)
    batch, k = parts.layer.shape
    layers = parts.layer.unique()
    base = readout.scale.new_zeros(batch, acts.view.n_layers)
    x = acts.resid_pre[:, layers].to(readout.dtype)
    base[:, layers] = readout.token_log_probs(x, targets, against=against_ids)
    n_heads, width = acts.view.n_heads, acts.pattern.shape[-1]
    index = (parts.layer * n_heads + parts.head) * width + parts.position
    prompts = torch.arange(batch, device=index.device).repeat_interleave(k)
    return _exact_subheads(
        acts, targets, against_ids, readout, base, prompts, index.flatten()
    ).unflatten(0, (batch, k))


def _exact_subheads(
    acts: Activations,
    targets: Int[Tensor, " batch"],
    against: CheckedAgainst,
    readout: Readout,
    base: Float[Tensor, "batch layer"],
    rows: Int[Tensor, " n"],
    index: Int[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """Return the exact increases of the chosen parts, from one product with W_U (or its columns for
    `against`).
    """
    layer, head, key = _unravel(index, acts.view.n_heads, acts.pattern.shape[-1])
    y = acts.resid_pre[rows, layer].to(readout.dtype)
    for number in layer.unique().tolist():
        in_layer = layer == number
        y[in_layer] += selected_subhead_values(
            scaled_pattern(acts, number),
            head_values(acts, number),
            acts.view.W_O(number),
            rows[in_layer],
            head[in_layer],
            key[in_layer],
        )
    readout, against = readout.select_prompts(rows), select_rows(against, rows)
    with_part = readout.token_log_probs(y[:, None], targets[rows], against=against)[:, 0]
    return with_part - base[rows, layer]


def top_heads(
    acts: Activations,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    k: int = N_TOP,
    by: DirectScore | None = None,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    slack: float = SLACK,
) -> TopHeads:
    """Return the k heads that add most to the answer, on average over the prompts, exact and
    certified.

    The mean of a head's bounds is an upper bound on its mean, so only a few heads are evaluated
    exactly. `targets`, `by`, `against`, `final_norm`, `bias` and `slack` are those of
    `top_subheads`. Raise InputError for invalid `targets`, `against`, `by` or `k`.

    Example:
        >>> best = il.top_heads(acts, k=3)
        >>> len(best.heads), best.by, best.certified
        (3, 'contrast', True)
        >>> il.top_heads(acts, k=3, by="increase").certified
        True
    """
    by, targets, against_ids, readout = choose_ranking(acts, by, targets, against, final_norm, bias)
    n_parts = len(acts.view.heads())
    k = check_k(k, n_parts, "heads")
    means, n_prompts = HeadMeans(n_parts, by), count_prompts(acts.batch)
    linear = linear_direction(readout, targets, against_ids) is not None
    if linear or not readout.is_affine:
        increases = every_head_increase(
            acts.view, readout, acts.resid_pre, scaled_z(acts), targets, against_ids
        )
        exact = increases.flatten(1).cpu().numpy()
        means.add(exact if linear else None, np.arange(n_parts), exact)
        return replace(means.top(k, acts.view.n_heads, n_prompts), edits=acts.edits)
    base, g = layer_gradients(acts, targets, readout, against=against_ids)
    bounds = head_bounds(acts, g).flatten(1).cpu().numpy()
    means.add(bounds, heads=np.arange(0), increase=bounds[:, :0])
    step = k
    while len(heads := means.undecided_heads(k, slack)[:step]):
        means.add_exact(
            heads, exact_head_increases(acts, targets, readout, heads, base, against=against_ids)
        )
        step = max(2, int((means.n_exact > 0).sum()) // 4)  # a quarter more heads in each round
    return replace(means.top(k, acts.view.n_heads, n_prompts), edits=acts.edits)


class HeadMeans:
    """Mean bounds and increases of all heads over prompts that are added in batches, summed in
    float64.

    Heads are indexed as `layer · n_heads + head`.
    """

    def __init__(self, n_parts: int, by: DirectScore):
        self.by: DirectScore = by
        self.n_rows = 0
        self.increase_sums = np.zeros(n_parts)
        self.n_exact = np.zeros(n_parts, dtype=np.int64)
        """Number of rows on which each head is evaluated exactly."""
        self.bound_sums = np.zeros(n_parts)
        """Sums of each head's exact increase where `add` received it, else of its bound."""
        self.bounded = True

    def add(
        self,
        bound: Float[np.ndarray, "batch all_heads"] | None,
        heads: Int[np.ndarray, " head"],
        increase: Float[np.ndarray, "batch head"],
    ) -> None:
        """Add a batch: bounds of all heads (None if no bound exists), and exact increases of some
        heads.
        """
        self.n_rows += len(increase)
        if bound is None:
            self.bounded = False
        else:
            sums = bound.astype(np.float64).sum(0)
            sums[heads] = increase.astype(np.float64).sum(0)
            self.bound_sums += sums
        self.add_exact(heads, increase)

    def add_exact(
        self, heads: Int[np.ndarray, " head"], increase: Float[np.ndarray, "batch head"]
    ) -> None:
        """Add a batch's exact increases of heads for which `add` received only bounds."""
        self.increase_sums[heads] += increase.astype(np.float64).sum(0)
        self.n_exact[heads] += len(increase)

    def undecided_heads(self, k: int, slack: float) -> Int[np.ndarray, " head"]:
        """Return the heads that lack an exact mean and may still be in the top k, largest bound
        first.
        """
        complete = self.n_exact == self.n_rows
        kth = (
            np.sort(self.increase_sums[complete] / self.n_rows)[-k]
            if complete.sum() >= k
            else -np.inf
        )
        is_excluded = (
            self.bound_sums / self.n_rows + slack <= kth
        )  # False for NaN, which must be evaluated
        order = np.argsort(-self.bound_sums, kind="stable")
        return order[~(complete | is_excluded)[order]]

    def top(self, k: int, n_heads: int, n_prompts: int) -> TopHeads:
        """Return the heads with the k largest exact means over all rows, of `n_prompts` prompts.

        Raise InputError if a mean is NaN or infinite.
        """
        complete = np.flatnonzero(self.n_exact == self.n_rows)
        mean = self.increase_sums[complete] / self.n_rows
        if not np.isfinite(mean).all():
            head = Head.from_index(int(complete[~np.isfinite(mean)][0]), n_heads)
            raise InputError(
                f"the mean increase of {head} is NaN or infinite; load the model in bfloat16 or "
                "float32, or remove edits"
            )
        order = np.argsort(-mean, kind="stable")[:k]
        unevaluated = self.bound_sums[self.n_exact < self.n_rows] / self.n_rows
        return TopHeads(
            value=torch.from_numpy(mean[order]),
            layer=torch.from_numpy(complete[order] // n_heads),
            head=torch.from_numpy(complete[order] % n_heads),
            n_exact=len(complete),
            n_parts=len(self.increase_sums),
            unevaluated_bound=float(unevaluated.max()) if len(unevaluated) else -float("inf"),
            certified=self.bounded,
            n_prompts=n_prompts,
            by=self.by,
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
    """Return the exact increases of some heads, given as `layer · n_heads + head`, nats, from one
    product with W_U.

    `base` is the first result of `layer_gradients`; None computes it.
    """
    index = torch.as_tensor(heads, device=readout.W_U.device)
    layer, head = index // acts.view.n_heads, index % acts.view.n_heads
    layers = layer.unique()
    if base is None:
        base = readout.scale.new_zeros((len(targets), acts.view.n_layers))
        base[:, layers] = readout.token_log_probs(
            acts.resid_pre[:, layers].to(readout.dtype), targets, against=against
        )
    y, z = acts.resid_pre[:, layer].to(readout.dtype), scaled_z(acts)
    for number in layers.tolist():
        in_layer = layer == number
        y[:, in_layer] += head_outputs(
            z[:, number, head[in_layer]], acts.view.W_O(number)[head[in_layer]]
        )
    return (readout.token_log_probs(y, targets, against=against) - base[:, layer]).cpu().numpy()


def _unravel(index: Tensor, n_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return index // (n_heads * width), index // width % n_heads, index % width


def check_k(k: int, n_parts: int, what: str) -> int:
    """Return `k` as an integer of Python.

    Raise InputError unless it is an integer from 1 to `n_parts`; `what` names the parts in the
    message.
    """
    (k,) = check_integers(k=k)
    if not 1 <= k <= n_parts:
        raise InputError(f"k must be between 1 and {n_parts} ({what}), got {k}")
    return k
