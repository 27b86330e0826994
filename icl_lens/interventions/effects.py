"""Measure the effect of ablating each head on the answer, the causal counterpart of the log-probability increase.

At all positions, each pass starts at the layer of the ablated heads, from the residual stream stored there, so ablating
all heads one by one costs about half as much as a full forward pass for each. At the last position only, each prompt's
keys and values are computed once, and all heads are ablated in a few passes over single-token rows.
Source: the published version (causal location of heads).
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.attribution.increases import check_target_ids
from icl_lens.display import SHOWN_ROWS, format_signed, html_table, long_frame, plural_prompts, text_table
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.ablation import every_head, mean_z
from icl_lens.interventions.editor import Positions
from icl_lens.interventions.gradients import first_order_drops
from icl_lens.interventions.gradients import prompts_at_once as graphs_at_once
from icl_lens.interventions.memory_budget import layer_chunks, max_prompts
from icl_lens.interventions.partial_forward import Replacement, map_ablated_sets
from icl_lens.interventions.prefix_cache import PrefixCache, PrefixCacheUnsupported
from icl_lens.metrics import label_log_odds, spearman
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Tokens per forward pass: enough for efficient matrix products, few enough to fit in small memory.
PASS_TOKENS = 4096
# Tolerance between a row without ablation and the model's own log-probability, nats. Some families compute norms and
# softmax in float32 even in float64 models.
CLEAN_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}

Score = Literal["log_prob", "log_odds", "logit_diff"]
Method = Literal["exact", "gradient"]
Mode = Literal["zero", "mean"]
Algorithm = Literal["partial_forward", "prefix_cache", "gradient"]


@dataclass(frozen=True)
class HeadEffects:
    """Drop of the answer's score when each head is ablated, nats; positive where the head helps.

    `log_prob` is the drop of log p(target); `log_odds` that of the answer's log-odds versus the prompt's other labels,
    NaN for prompts without an answer and for gradient estimates; `logit_diff` that of log p(target) − log p(against),
    None without `against`.

    Example:
        >>> effects = il.head_effects(model, batch)
        >>> effects.log_prob.shape, len(effects.top(3))
        (torch.Size([1, 8, 6]), 3)
    """

    log_prob: Float[Tensor, "batch layer head"]
    log_odds: Float[Tensor, "batch layer head"]
    logit_diff: Float[Tensor, "batch layer head"] | None = None
    positions: Positions = "all"
    """Ablated positions: all positions of a prompt, or the last one."""
    algorithm: Algorithm = "partial_forward"
    """How effects were computed: "gradient" gives first-order estimates, the others are exact up to rounding."""
    fallback_reason: str = ""
    """Why the prefix cache was not used for effects at the last position; empty if it was."""

    @property
    def exact(self) -> bool:
        """Whether heads were actually ablated; False for first-order estimates."""
        return self.algorithm != "gradient"

    def top(self, k: int, *, by: Score = "log_prob") -> list[Head]:
        """Return the k heads with the largest mean effect over prompts; raise InputError for a missing score."""
        check_choice("by", by, ("log_prob", "log_odds", "logit_diff"))
        effect = getattr(self, by)
        if effect is None:
            raise InputError("by must be 'log_prob' or 'log_odds', got 'logit_diff', which requires against=")
        mean = effect.mean(0)
        order = mean.flatten().argsort(descending=True)[:k]
        return [Head.from_index(index, mean.shape[1]) for index in order.tolist()]

    def to_frame(self) -> pd.DataFrame:
        """Return prompt, layer, head, name, log_prob and log_odds (nats), one row per prompt and head."""
        frame = long_frame(self.log_prob, ("prompt", "layer", "head"), value="log_prob")
        frame["log_odds"] = self.log_odds.detach().float().cpu().flatten().numpy()
        return frame

    def __repr__(self) -> str:
        title, columns = self._shown()
        return text_table(title, columns, total=self.log_prob[0].numel())

    def _repr_html_(self) -> str:
        title, columns = self._shown()
        return html_table(title, columns, total=self.log_prob[0].numel())

    def _shown(self) -> tuple[str, dict[str, list[Any]]]:
        heads = self.top(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {"head": [str(head) for head in heads]}
        for name, values in (("log p drop", self.log_prob), ("log-odds drop", self.log_odds)):
            mean = values.float().nanmean(0)
            columns[name] = [format_signed(float(mean[head])) for head in heads]
        n = len(self.log_prob)
        return f"HeadEffects, nats: {'mean over ' * (n > 1)}{plural_prompts(n)}, heads removed one by one", columns


@dataclass(frozen=True)
class Agreement:
    """Agreement of two head rankings: rank correlation over all heads, and overlap of the top k.

    Example:
        >>> increase = il.head_log_prob_increase(acts, targets)[0]
        >>> agreed = il.agreement(increase, increase, k=4)
        >>> round(agreed.spearman, 3), agreed.overlap
        (1.0, 4)
    """

    spearman: float
    k: int
    overlap: int
    """Number of heads in both top k."""
    expected_overlap: float
    """Expected overlap of two random sets of k heads."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row with spearman, k, overlap and expected_overlap."""
        return pd.DataFrame([asdict(self)])


def head_effects(
    model: Any,
    batch: PromptBatch,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    positions: Positions = "all",
    against: Int[Tensor, "batch *n"] | None = None,
    method: Method = "exact",
    mode: Mode = "zero",
    reference: PromptBatch | Iterable[PromptBatch] | None = None,
    pass_tokens: int = PASS_TOKENS,
) -> HeadEffects:
    """Return the effect of ablating each head on every prompt, at all positions or at the last one.

    `targets` [batch] are token ids, by default those of the answers. With `against` ([batch] or [batch n] token ids),
    `logit_diff` holds the effect on log p(target) − log p(against), where several tokens' probabilities are summed.

    `method="exact"` equals `ablate_heads(..., positions=positions)` for one head at a time, up to rounding.
    `positions="all"` costs about half a forward pass per head and prompt; memory is three tensors of the size of the
    residual stream per layer and prompt, so split large datasets. `positions="last"` costs one pass over the prompts
    and one single-token row per head and prompt, from the head's layer on: the rows of a prompt share its cached keys
    and values (`algorithm` is "prefix_cache"). If the cache is not supported (other hooks or interventions are active,
    or the model's attention is unknown), heads are ablated in partial forward passes over the full prompts, as for all
    positions; `algorithm` is then "partial_forward", and `fallback_reason` gives the reason.

    `method="gradient"` is a first-order estimate (`exact` is False): the drop if log p were linear in the head's z,
    z · ∂ log p/∂z. It takes one forward and one backward pass for all heads, plus a backward pass for `against`, and
    gives no `log_odds`. Check its `agreement` with exact effects before relying on it. It stores every layer's
    activations of at least one prompt for the backward pass.

    `mode="mean"` replaces a head's z by its mean over the last positions of the `reference` prompts instead of zero, as
    in `ablate_heads`; only for exact effects at the last position.

    Raise InputError for invalid targets, `against` or options.

    Example:
        >>> effects = il.head_effects(model, batch, positions="last")
        >>> effects.log_odds.shape, effects.algorithm
        (torch.Size([1, 8, 6]), 'prefix_cache')
        >>> estimate = il.head_effects(model, batch, positions="last", method="gradient")
        >>> il.agreement(effects.log_prob.mean(0), estimate.log_prob.mean(0)).spearman > 0.5
        True
    """
    view = ModelView.of(model)
    check_choice("positions", positions, ("all", "last"))
    check_choice("method", method, ("exact", "gradient"))
    targets = check_target_ids(view, batch.answer_tokens if targets is None else targets, len(batch))
    against = None if against is None else _against_tokens(view, against, targets)
    if pass_tokens < 1:
        raise InputError(f"pass_tokens must be at least 1, got {pass_tokens!r}")
    check_choice("mode", mode, ("zero", "mean"))
    if (mode == "mean") != (reference is not None):
        raise InputError(
            f"reference must be {'given for' if mode == 'mean' else 'omitted for'} mode={mode!r}, got "
            f"{'None' if reference is None else type(reference).__name__}"
        )
    replacement = None
    if reference is not None:
        if positions != "last" or method != "exact":
            raise InputError(
                f"mode must be 'zero' unless positions='last' and method='exact', got 'mean' with positions="
                f"{positions!r} and method={method!r}; use ablate_heads"
            )
        replacement = mean_z(
            view, every_head(view), [reference] if isinstance(reference, PromptBatch) else [*reference], "last"
        )
    scoring = _Scoring(batch, targets, against)
    algorithm: Algorithm = "gradient"
    fallback_reason = ""
    if method == "gradient":
        effects = _estimated(view, scoring, positions)
    elif positions == "all":
        effects, algorithm = _restarted(view, scoring, positions, pass_tokens, None), "partial_forward"
    else:
        try:
            effects, algorithm = _by_prefix_cache(view, scoring, pass_tokens, replacement), "prefix_cache"
        except PrefixCacheUnsupported as error:
            effects = _restarted(view, scoring, positions, pass_tokens, replacement)
            algorithm, fallback_reason = "partial_forward", str(error)
    log_prob, log_odds, logit_diff = effects.unbind(-1)
    logit_diff = None if against is None else logit_diff
    return HeadEffects(log_prob, log_odds, logit_diff, positions, algorithm, fallback_reason)


def agreement(one: Float[Tensor, "layer head"], other: Float[Tensor, "layer head"], *, k: int = 20) -> Agreement:
    """Return how well two scores of the same heads agree in ranking, such as causal effects and increases.

    Scores are means over prompts. Ties share their mean rank. Raise InputError if k is not between 1 and the number of
    heads, or if the shapes differ.

    Example:
        >>> increase = il.head_log_prob_increase(acts, targets)[0]
        >>> il.agreement(increase, il.head_effects(model, batch).log_prob[0], k=4).expected_overlap
        0.3333333333333333
    """
    n = one.numel()
    if one.shape != other.shape:
        raise InputError(f"one and other must have the same shape, got {tuple(one.shape)} and {tuple(other.shape)}")
    if not 1 <= k <= n:
        raise InputError(f"k must be between 1 and {n} (heads), got {k!r}")
    first, second = (scores.flatten().double().cpu() for scores in (one, other))
    best = [set(scores.flatten().topk(k).indices.tolist()) for scores in (one, other)]
    return Agreement(spearman(first, second), k, len(best[0] & best[1]), k * k / n)


class _Scoring(NamedTuple):
    """Prompts, and the tokens to score after each."""

    batch: PromptBatch
    targets: Int[Tensor, " batch"]
    against: Int[Tensor, "batch n"] | None

    def of(self, rows: Any) -> "_Scoring":
        """Select prompts; indices in `rows` may repeat."""
        return _Scoring(self.batch[rows], self.targets[rows], None if self.against is None else self.against[rows])


def _against_tokens(view: ModelView, against: Tensor, targets: Int[Tensor, " batch"]) -> Int[Tensor, "batch n"]:
    """Return `against` as [batch n]; raise InputError unless it holds token ids different from the target."""
    against = torch.as_tensor(against, device=view.unembed_device)
    n, d_vocab = len(targets), view.model.W_U.shape[1]
    if against.ndim not in (1, 2) or len(against) != n or not against.numel() or against.is_floating_point():
        raise InputError(
            f"against must be token ids of shape ({n},), one per prompt, or ({n}, n_tokens), got shape "
            f"{tuple(against.shape)} {against.dtype}"
        )
    against = against.reshape(n, -1)
    if bool(((against < 0) | (against >= d_vocab)).any()):
        raise InputError(
            f"against must be between 0 and {d_vocab - 1}, got {int(against.min())} to {int(against.max())}; drop "
            "prompts without other tokens"
        )
    same = (against == targets[:, None]).any(1)
    if bool(same.any()):
        row = int(same.nonzero()[0])
        raise InputError(f"against must differ from the target, got token {int(targets[row])} for both in prompt {row}")
    return against


def _log_diff(log_probs: Tensor, scoring: _Scoring) -> Float[Tensor, " batch"]:
    """log p(target) − log p(against)."""
    assert scoring.against is not None
    targets, against = (tokens.clone().to(log_probs.device) for tokens in (scoring.targets, scoring.against))
    return log_probs.gather(1, targets[:, None])[:, 0] - log_probs.gather(1, against).logsumexp(-1)


def _score_log_probs(log_probs: Float[Tensor, "batch d_vocab"], scoring: _Scoring) -> Float[Tensor, "batch 3"]:
    """Return log p(target), the answer's log-odds (NaN without an answer) and the logit difference (or NaN)."""
    batch = scoring.batch
    own = log_probs.gather(1, scoring.targets.to(log_probs.device)[:, None])[:, 0]
    labels = log_probs[:, batch.label_tokens.to(log_probs.device)]
    choices, answer = batch.label_mask.to(labels.device), batch.answer.to(labels.device)
    odds = torch.full_like(own, torch.nan)
    usable = (answer >= 0) & (choices.sum(-1) > 1)
    if bool(usable.any()):
        odds[usable] = label_log_odds(labels[usable], answer[usable], choices=choices[usable])
    differ = torch.full_like(own, torch.nan) if scoring.against is None else _log_diff(log_probs, scoring)
    return torch.stack([own, odds, differ], dim=-1)


def _estimated(view: ModelView, scoring: _Scoring, positions: Positions) -> Float[Tensor, "batch layer head 3"]:
    """Return first-order estimates; log-odds are NaN."""
    pieces = []
    size = graphs_at_once(view, scoring.batch)
    for start in range(0, len(scoring.batch), size):
        some = scoring.of(list(range(start, min(start + size, len(scoring.batch)))))

        def scores(log_probs: Tensor, some: _Scoring = some) -> Tensor:
            own = log_probs.gather(1, some.targets.clone().to(log_probs.device)[:, None])
            return own if some.against is None else torch.cat([own, _log_diff(log_probs, some)[:, None]], dim=1)

        drops = first_order_drops(view, some.batch, scores, last_only=positions == "last")
        missing = torch.full_like(drops[..., 0], torch.nan)
        pieces.append(torch.stack([drops[..., 0], missing, drops[..., 1] if drops.shape[-1] > 1 else missing], dim=-1))
    return torch.cat(pieces)


# Log-probabilities of rows are computed and reduced in pieces of about this size.
LOG_PROB_BYTES = 16 * 2**20


def _by_prefix_cache(
    view: ModelView, scoring: _Scoring, pass_tokens: int, replacement: Replacement
) -> Float[Tensor, "batch layer head 3"]:
    """Return every head's effect at the last position, from the prefix cache; raise PrefixCacheUnsupported."""
    size = max_prompts(view, scoring.batch, pass_tokens=pass_tokens)
    # Prompts of similar length share a pass, to minimize padding.
    order = scoring.batch.last.argsort(stable=True).tolist()
    effects: Tensor | None = None
    for start in range(0, len(order), size):
        prompts = order[start : start + size]
        some = scoring.of(prompts)
        try:
            pieces = list(layer_chunks(view, len(prompts)))
            resumed: dict[range, Tensor] = {}
            for kept in PrefixCache.by_layer_stage(view, some.batch):
                for layers in (one for one in pieces if one.start < kept.layers.stop):
                    rows = kept.ablate_each_head(layers, replacement, resumed.pop(layers, None))
                    if kept.resid_after is not None:
                        resumed[layers] = rows
                        continue
                    clean, edited = _score_log_probs(kept.log_probs, some), _judged_rows(rows, some)
                    off = float((edited[:, 0, 0] - clean[:, 0]).abs().max())
                    if not off <= CLEAN_TOLERANCE.get(view.model.W_U.dtype, 1e-3):
                        raise PrefixCacheUnsupported(
                            f"rows of {view.architecture} without ablation deviate by {off:.1e} nats"
                        )
                    if effects is None:
                        effects = clean.new_empty(len(order), view.n_layers, view.n_heads, 3)
                    drops = clean[:, None] - edited[:, 1:]
                    effects[prompts, layers.start : layers.stop] = drops.unflatten(1, (len(layers), view.n_heads))
        except InputError as error:  # a hook or score input that the family does not expose
            raise PrefixCacheUnsupported(str(error)) from error
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            text = str(error).splitlines()[0]
            raise PrefixCacheUnsupported(f"{view.architecture} does not support single-token rows ({text})") from error
    assert effects is not None
    return effects


def _judged_rows(logits: Float[Tensor, "batch row d_vocab"], scoring: _Scoring) -> Float[Tensor, "batch row 3"]:
    """Return `_score_log_probs` for several rows per prompt, computed in pieces."""
    n_rows = logits.shape[1]
    flat = logits.flatten(0, 1)
    dtype = torch.promote_types(flat.dtype, torch.float32)
    step = max(1, LOG_PROB_BYTES // (4 * flat.shape[1]))
    found = []
    for start in range(0, len(flat), step):
        some = flat[start : start + step].to(dtype)
        prompts = [(start + i) // n_rows for i in range(len(some))]
        found.append(_score_log_probs(torch.log_softmax(some, dim=-1), scoring.of(prompts)))
    return torch.cat(found).unflatten(0, (-1, n_rows))


def _restarted(
    view: ModelView, scoring: _Scoring, positions: Positions, pass_tokens: int, replacement: Replacement
) -> Float[Tensor, "batch layer head 3"]:
    """Return every head's effect from partial forward passes over full prompts that start at the head's layer."""
    n_layers, n_heads = view.n_layers, view.n_heads
    nothing = torch.zeros(1, n_layers, n_heads, dtype=torch.bool)
    each = torch.eye(n_layers * n_heads, dtype=torch.bool).unflatten(1, (n_layers, n_heads))
    found = map_ablated_sets(
        view,
        scoring.batch,
        torch.cat([nothing, each]),
        lambda log_probs, rows: _score_log_probs(log_probs, scoring.of(rows)),
        replacement,
        positions=positions,
        pass_tokens=pass_tokens,
    )
    return (found[:, :1] - found[:, 1:]).unflatten(1, (n_layers, n_heads))
