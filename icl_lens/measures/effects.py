"""Measure what the answer loses when each head is ablated.

This is the causal counterpart of contrast and increase.

At all positions, each pass starts at the layer of the ablated heads, from the residual stream
stored there, so each head costs about half a forward pass. At the last position only, each prompt's
keys and values are computed once, and all heads are ablated in a few passes over single-token rows.
Source: the published version (causal location of heads).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.ablate import Ablate, Mode, Reference
from icl_lens.edits.edit import Positions
from icl_lens.edits.gradients import prompts_at_once, z_gradients
from icl_lens.edits.one_token_rows.prefix_cache import PrefixCache
from icl_lens.edits.read import ReadAmong
from icl_lens.edits.score import score_sets
from icl_lens.errors import InputError, check_choice, short_repr
from icl_lens.models.active_edits import active_edits, edits_suffix
from icl_lens.models.head import Head
from icl_lens.models.passes.memory import PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.batch_checks import check_batch
from icl_lens.reading.scored_tokens import (
    OUTCOMES,
    Against,
    AnswerTokens,
    Outcome,
)
from icl_lens.result.base import Result
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS, columns_first, long_frame, plural_prompts
from icl_lens.result.view import View, table_view
from icl_lens.runs.progress import progress_switch, steps

Method = Literal["exact", "gradient"]
Algorithm = Literal["partial_forward", "prefix_cache", "gradient"]
ABLATED: dict[Mode, str] = {
    "zero": "each head zeroed alone",
    "mean": "each head alone set to its mean",
    "resample": "each head alone set to what it writes on another prompt",
}
"""What was done to heads, in the title of a result."""


@dataclass(frozen=True, repr=False)
class HeadEffects(Result):
    """What the answer loses when each head is ablated, nats; positive where the head helps.

    `log_prob` is the drop in log p(target), and `log_odds` that in log p(target) − log Σ
    p(against), NaN for prompts that have nothing to compare with.

    Example:
        >>> effects = il.head_effects(model, batch)
        >>> effects.log_odds.shape, len(effects.top(3))
        (torch.Size([1, 8, 6]), 3)
    """

    log_prob: Float[Tensor, "batch layer head"]
    log_odds: Float[Tensor, "batch layer head"]
    positions: Positions = "last"
    """Ablated positions: all positions of a prompt, or the last one."""
    algorithm: Algorithm = "prefix_cache"
    """How effects were computed: "gradient" gives first-order estimates, the others are exact up to
    rounding.
    """
    fallback_reason: str = ""
    """Why the prefix cache was not used for effects at the last position; empty if it was."""
    edits: tuple[str, ...] = ()
    """What else edited the model, with and without the head: open `with` blocks, and other
    hooks.
    """
    mode: Mode = "zero"
    """What replaced the z of an ablated head."""

    @property
    def exact(self) -> bool:
        """Whether heads were actually ablated; False for first-order estimates."""
        return self.algorithm != "gradient"

    def top(self, k: int, *, outcome: Outcome | None = None) -> list[Head]:
        """Return the k heads with the largest mean effects over the prompts that have the outcome.

        The default is the log-odds, or log p if no prompt has them. Raise InputError if no prompt
        has the outcome.
        """
        return largest_means(
            {name: getattr(self, name).nanmean(0) for name in OUTCOMES}, k, outcome
        )

    def to_frame(self) -> pd.DataFrame:
        """Return one row per prompt and head: name, log_odds, log_prob (nats), prompt, layer and
        head.
        """
        frame = long_frame(self.log_prob, ("prompt", "layer", "head"), value="log_prob")
        frame["log_odds"] = self.log_odds.detach().float().cpu().flatten().numpy()
        return columns_first(frame, "name", "log_odds", "log_prob")

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        heads = self.top(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {"head": [str(head) for head in heads]}
        for name, values in (("log-odds lost", self.log_odds), ("log p lost", self.log_prob)):
            mean = values.float().nanmean(0)
            columns[name] = [signed(float(mean[head])) for head in heads]
        n = len(self.log_prob)
        over = f"mean over {plural_prompts(n)}" if n > 1 else plural_prompts(n)
        estimated = "" if self.exact else " (first-order estimates)"
        done = f"{ABLATED[self.mode]}{estimated}{edits_suffix(self.edits)}"
        title = f"HeadEffects, nats: {over}, {done}"
        return table_view(title, columns, self.log_prob[0].numel())


def largest_means(
    means: Mapping[Outcome, Float[Tensor, "layer head"]], k: int, outcome: Outcome | None
) -> list[Head]:
    """Return the heads with the k largest mean effects on an outcome.

    By default, it is the first outcome that a prompt has. Raise InputError for an unknown outcome,
    or one that no prompt has.
    """
    measured: list[Outcome] = [name for name in OUTCOMES if not bool(means[name].isnan().all())]
    if outcome is not None:
        check_choice("outcome", outcome, OUTCOMES)
    if not measured or outcome not in (None, *measured):
        required = "finite effects"
        if outcome == "log_odds":
            required = "tokens to compare with; pass against="
        raise InputError(f"outcome={outcome or OUTCOMES[-1]!r} requires {required}")
    mean = means[outcome or measured[0]]
    order = mean.flatten().argsort(descending=True, stable=True)[:k]
    return [Head.from_index(index, mean.shape[1]) for index in order.tolist()]


def head_effects(
    model: Any,
    batch: PromptBatch,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    positions: Positions = "last",
    against: Against = None,
    method: Method = "exact",
    mode: Mode = "zero",
    reference: Reference = None,
    pass_tokens: int = PASS_TOKENS,
    progress: bool | None = None,
) -> HeadEffects:
    """Return the effect of ablating each head on every prompt, at the last position or at all of
    them.

    `targets` [batch] are token ids, by default those of the answers. `against` ([batch] or [batch
    n] token ids) are the tokens that the log-odds compare them with, by default the other labels of
    each prompt; the probabilities of several tokens are summed.

    `method="exact"` equals `ablate_heads(..., positions=positions)` for one head at a time, up to
    rounding. `positions="last"` costs one pass over the prompts and one single-token row per head
    and prompt, from the head's layer on: the rows of a prompt share its cached keys and values
    (`algorithm` is "prefix_cache"). If the cache is not supported (other hooks or edits are active,
    or the model's attention is unknown), heads are ablated in partial forward passes over the full
    prompts, as for all positions; `algorithm` is then "partial_forward", and `fallback_reason` says
    why. `positions="all"` costs about half a forward pass per head and prompt. It stores each
    layer's residual stream for as many prompts at a time as fit in 64 MiB (for all prompts if other
    hooks are active). `pass_tokens` limits the tokens per forward pass.

    `method="gradient"` is a first-order estimate (`exact` is False): the drop if log p were linear
    in the head's z, z · ∂ log p/∂z. It takes one forward pass and two backward passes for all
    heads: for log p and for the log-odds, if there are any. Check its `metrics.agreement` with
    exact effects before relying on it. A backward pass runs each layer again, so that it stores one
    layer's activations; with other hooks active, it stores those of all layers.

    `mode="mean"` and `mode="resample"` replace a head's z by its mean over the last positions of
    the `reference` prompts, or by that of one of them, instead of zero (see `Ablate`); only for
    exact effects at the last position.

    If this takes longer than two seconds, a terminal or notebook shows a progress bar, unless
    `progress` is False.

    Raise InputError for invalid targets, `against` or options.

    Example:
        >>> effects = il.head_effects(model, batch)
        >>> effects.log_odds.shape, effects.algorithm
        (torch.Size([1, 8, 6]), 'prefix_cache')
        >>> estimate = il.head_effects(model, batch, method="gradient")
        >>> il.metrics.agreement(effects.log_odds.mean(0), estimate.log_odds.mean(0)).spearman > 0.5
        True
    """
    view = ModelView.of(model)
    check_choice("method", method, ("exact", "gradient"))
    ablation = Ablate([], mode=mode, reference=reference, positions=positions)
    check_batch(batch)
    if mode != "zero" and (positions != "last" or method != "exact"):
        raise InputError(
            "mode must be 'zero' unless positions='last' and method='exact', got "
            f"{short_repr(mode)} with positions={positions!r} and method={method!r}; use il.score "
            "with il.Ablate"
        )
    tokens = AnswerTokens.from_batch(view, batch, targets, against)
    with progress_switch(progress):
        if method == "gradient":
            return estimated_effects(view, batch, tokens, positions)
        return exact_effects(view, batch, tokens, ablation, pass_tokens=pass_tokens)


def exact_effects(
    view: ModelView,
    batch: PromptBatch,
    tokens: AnswerTokens,
    ablation: Ablate,
    *,
    pass_tokens: int = PASS_TOKENS,
    cached: PrefixCache | None = None,
) -> HeadEffects:
    """Return the exact effects of ablating each head as `ablation` says.

    `cached` is a cache of the whole batch that exists already.
    """
    sets: list[list[Ablate]] = [[]]
    for head in view.heads():
        sets.append([replace(ablation, heads=[head])])
    outcomes, reason = score_sets(
        view, batch, sets, tokens.outcomes, pass_tokens=pass_tokens, cached=cached
    )
    lost = (outcomes[:, :1] - outcomes[:, 1:]).unflatten(1, (view.n_layers, view.n_heads))
    log_prob, log_odds = lost.unbind(-1)
    positions: Positions = "all" if ablation.positions == "all" else "last"
    algorithm: Algorithm = "prefix_cache"
    if positions == "all" or reason:
        algorithm = "partial_forward"
    edits = active_edits(view)
    return HeadEffects(log_prob, log_odds, positions, algorithm, reason, edits, ablation.mode)


def log_odds_lost(
    view: ModelView, batch: PromptBatch, tokens: AnswerTokens
) -> Float[Tensor, "batch layer head"]:
    """Return the log-odds (nats) that the answer loses when each head alone is zeroed at the last
    position: `exact_effects(…).log_odds`, without the logits of the rest of the vocabulary.
    """
    assert tokens.against is not None
    compared = torch.cat([tokens.targets[:, None], tokens.against], dim=1).cpu()
    is_missing = compared < 0
    distinct = compared[~is_missing].unique()
    places = torch.searchsorted(distinct, compared).masked_fill(is_missing, -1)
    sets: list[list[Ablate]] = [[]]
    for head in view.heads():
        sets.append([Ablate([head], positions="last")])
    log_probs, _ = score_sets(view, batch, sets, ReadAmong(distinct))
    prompts = torch.arange(len(batch)).repeat_interleave(len(sets))
    among_distinct = AnswerTokens(places[:, 0], places[:, 1:])
    log_odds = among_distinct.log_odds(log_probs.flatten(0, 1), prompts)[:, 0]
    log_odds = log_odds.unflatten(0, (len(batch), len(sets)))
    return (log_odds[:, :1] - log_odds[:, 1:]).unflatten(1, (view.n_layers, view.n_heads))


def estimated_effects(
    view: ModelView, batch: PromptBatch, tokens: AnswerTokens, positions: Positions
) -> HeadEffects:
    """Return first-order estimates of `exact_effects`.

    Zeroing sets a head's z to 0, so log p drops by about `z · ∂ log p/∂z`: attribution patching
    towards zero. Source: Nanda, "Attribution patching: activation patching at industrial scale"
    (2023); Syed, Rager & Conmy, arXiv 2310.10348.
    """
    pieces = []
    with steps("estimating effects", len(batch)) as advance:
        for rows in torch.arange(len(batch)).split(prompts_at_once(view, batch)):
            prompts = rows.tolist()
            pieces.append(_estimates(view, batch[prompts], tokens.select(prompts), positions))
            advance(len(rows))
    estimates = torch.cat(pieces)
    log_prob = estimates[..., 0]
    log_odds = torch.full_like(log_prob, torch.nan)
    if tokens.against is not None:
        has_nothing_to_compare = (tokens.against < 0).all(1).to(log_prob.device)
        log_odds = estimates[..., 1].masked_fill(has_nothing_to_compare[:, None, None], torch.nan)
    return HeadEffects(log_prob, log_odds, positions, "gradient", edits=active_edits(view))


def _estimates(
    view: ModelView, batch: PromptBatch, tokens: AnswerTokens, positions: Positions
) -> Float[Tensor, "batch layer head outcome"]:
    """Return the estimates of prompts that fit in one backward pass.

    Without tokens to compare with, log p is the only outcome.
    """

    def outcomes(log_probs: Tensor) -> Float[Tensor, "batch outcome"]:
        of_answer = tokens.outcomes(log_probs, torch.arange(len(batch)))
        return of_answer[:, :1] if tokens.against is None else of_answer

    def lost(layer: int, z: Tensor, gradient: Tensor) -> Float[Tensor, "batch head"]:
        dtype = torch.promote_types(z.dtype, torch.float32)
        product = (z.to(dtype) * gradient.to(dtype)).sum(-1).to(view.unembed_device)
        if positions == "last":
            return product[torch.arange(len(product)), batch.last.cpu()]
        return (product * batch.attention_mask.to(product)[:, :, None]).sum(1)

    by_outcome = []
    for by_layer in z_gradients(view, batch, outcomes, lost):
        by_outcome.append(torch.stack(by_layer, dim=1))
    return torch.stack(by_outcome, dim=-1)
