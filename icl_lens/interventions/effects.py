"""What removing each head does to the answer, measured: the causal counterpart of the log-probability increase.

At all positions, a pass starts again at the first layer whose heads it edits, from the residual stream kept there, so
that removing all heads one by one costs about half as much as running the model anew for each. At the last position
only, keys and values of the prompt are made once, and all heads are removed in a few passes over rows of one token.
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
from icl_lens.interventions.gradients import first_order_drops
from icl_lens.interventions.gradients import prompts_at_once as graphs_at_once
from icl_lens.interventions.memory_budget import layer_chunks, max_prompts
from icl_lens.interventions.partial_forward import Replacement, map_ablated_sets
from icl_lens.interventions.prefix_cache import PrefixCache, PrefixCacheUnsupported
from icl_lens.interventions.selection import Positions
from icl_lens.metrics import label_log_odds, spearman
from icl_lens.models.head import Head
from icl_lens.models.locking import locks_model
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Tokens in one forward pass: many enough for large products, few enough for small memories.
PASS_TOKENS = 4096
# How far a row that lost nothing may be from the model's own log-probability, nats. Norms and softmax of some families
# go through float32 in float64 models as well.
CLEAN_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}

Score = Literal["log_prob", "log_odds", "logit_diff"]
Method = Literal["exact", "gradient"]
Mode = Literal["zero", "mean"]
Algorithm = Literal["partial_forward", "prefix_cache", "gradient"]


@dataclass(frozen=True)
class HeadEffects:
    """How much worse the answer does when a head is zeroed, nats: positive where the head helps.

    `log_prob` is the fall of log p(target); `log_odds` that of the answer's log-odds against the prompt's other
    labels, NaN for prompts without an answer and in estimates; `logit_diff` that of log p(target) − log p(against),
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
    """Where heads were zeroed: at every position of a prompt, or at its last one."""
    algorithm: Algorithm = "partial_forward"
    """How the numbers were made. "gradient": first-order estimates; the others are exact within rounding."""
    fallback_reason: str = ""
    """Why effects at the last position were not made with shared keys; empty where they were."""

    @property
    def exact(self) -> bool:
        """Heads really were removed; False for first-order estimates."""
        return self.algorithm != "gradient"

    def top(self, k: int, *, by: Score = "log_prob") -> list[Head]:
        """The k heads whose removal costs the most, on average over prompts; raises InputError for a missing score."""
        check_choice("by", by, ("log_prob", "log_odds", "logit_diff"))
        effect = getattr(self, by)
        if effect is None:
            raise InputError("there is no logit_diff here; give head_effects the tokens to compare with, against=")
        mean = effect.mean(0)
        order = mean.flatten().argsort(descending=True)[:k]
        return [Head.from_index(index, mean.shape[1]) for index in order.tolist()]

    def to_frame(self) -> pd.DataFrame:
        """prompt, layer, head, name, log_prob, log_odds (nats): one row a prompt and head."""
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
        for name, values in (("log p lost", self.log_prob), ("log-odds lost", self.log_odds)):
            mean = values.float().nanmean(0)
            columns[name] = [format_signed(float(mean[head])) for head in heads]
        n = len(self.log_prob)
        return f"HeadEffects, nats: {'mean over ' * (n > 1)}{plural_prompts(n)}, heads removed one by one", columns


@dataclass(frozen=True)
class Agreement:
    """How far two ways of locating heads agree: rank correlation over all heads, and overlap of the best k.

    Example:
        >>> increase = il.head_log_prob_increase(acts, targets)[0]
        >>> agreed = il.agreement(increase, increase, k=4)
        >>> round(agreed.spearman, 3), agreed.overlap
        (1.0, 4)
    """

    spearman: float
    k: int
    overlap: int
    """Heads among the best k of both."""
    expected_overlap: float
    """What the overlap of k heads drawn at random is on average."""

    def to_frame(self) -> pd.DataFrame:
        """One row: spearman, k, overlap, expected_overlap."""
        return pd.DataFrame([asdict(self)])


@locks_model
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
    """The effect of zeroing each head, on every prompt: at all its positions, or at its last one.

    `targets` [batch] are token ids, left out: the answers'. `against` [batch] or [batch n] token ids: the effect on
    log p(target) − log p(against) as well (of several: their summed probability), in `logit_diff`.

    `method="exact"` gives the same numbers as `ablate_heads(..., positions=positions)`, one head at a time, within
    rounding. `positions="all"` costs about half a forward pass a head and prompt; memory: three tensors of the size
    of the residual stream for each layer and prompt; split large datasets. `positions="last"` costs a pass over the
    prompts and a row of one token a head and prompt, from the head's layer on: keys and values of a prompt are kept
    once, and its rows share them (`algorithm` is "prefix_cache"). Where that is not possible (other hooks or interventions
    are at work on the model, or its attention is not known), heads are removed in passes over whole prompts as
    for all positions, `algorithm` is "partial_forward", and `fallback_reason` says why.

    `method="gradient"` is an estimate and says so (`way`, `exact`): what the fall would be if log p were linear in the
    head's z, z · ∂ log p/∂z, for all heads in one forward and one backward pass, and one more backward pass for
    `against`; no `log_odds`. See how far it agrees with exact effects (`agreement`) before relying on it. It keeps
    every layer's activations of at least one prompt for the way back.

    `mode="mean"` puts a head's mean z over the `reference` prompts in place of its own instead of zero, as
    `ablate_heads` does; for exact effects at the last position, where the mean is over the prompts' last ones.

    Raises InputError for bad targets, `against` or options.

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
        raise InputError(f"pass_tokens={pass_tokens} must be at least 1")
    check_choice("mode", mode, ("zero", "mean"))
    if (mode == "mean") != (reference is not None):
        raise InputError(
            f"mode={mode!r} {'needs' if mode == 'mean' else 'takes no'} reference= prompts to average over"
        )
    replacement = None
    if reference is not None:
        if positions != "last" or method != "exact":
            raise InputError(
                f'mode="mean" is for exact effects at the last position; got positions={positions!r}, '
                f"method={method!r}: use ablate_heads for others"
            )
        replacement = mean_z(
            view, every_head(view), [reference] if isinstance(reference, PromptBatch) else [*reference], "last"
        )
    asked = _Scoring(batch, targets, against)
    way: Algorithm = "gradient"
    because = ""
    if method == "gradient":
        effects = _estimated(view, asked, positions)
    elif positions == "all":
        effects, way = _restarted(view, asked, positions, pass_tokens, None), "partial_forward"
    else:
        try:
            effects, way = _by_prefix_cache(view, asked, pass_tokens, replacement), "prefix_cache"
        except PrefixCacheUnsupported as error:
            effects = _restarted(view, asked, positions, pass_tokens, replacement)
            way, because = "partial_forward", str(error)
    log_prob, log_odds, logit_diff = effects.unbind(-1)
    return HeadEffects(log_prob, log_odds, None if against is None else logit_diff, positions, way, because)


def agreement(one: Float[Tensor, "layer head"], other: Float[Tensor, "layer head"], *, k: int = 20) -> Agreement:
    """Whether two scores of the same heads order them alike: causal effects against log-probability increases.

    Scores are means over prompts. Ties share their mean rank. Raises InputError for a k that is no number of heads.

    Example:
        >>> increase = il.head_log_prob_increase(acts, targets)[0]
        >>> il.agreement(increase, il.head_effects(model, batch).log_prob[0], k=4).expected_overlap
        0.3333333333333333
    """
    n = one.numel()
    if one.shape != other.shape or not 1 <= k <= n:
        raise InputError(f"cannot compare scores of shapes {tuple(one.shape)} and {tuple(other.shape)} at k={k}")
    first, second = (scores.flatten().double().cpu() for scores in (one, other))
    best = [set(scores.flatten().topk(k).indices.tolist()) for scores in (one, other)]
    return Agreement(spearman(first, second), k, len(best[0] & best[1]), k * k / n)


class _Scoring(NamedTuple):
    """Prompts, and the tokens whose log-probabilities are asked for."""

    batch: PromptBatch
    targets: Int[Tensor, " batch"]
    against: Int[Tensor, "batch n"] | None

    def of(self, rows: Any) -> "_Scoring":
        """Some of the prompts, repeated where `rows` repeats them."""
        return _Scoring(self.batch[rows], self.targets[rows], None if self.against is None else self.against[rows])


def _against_tokens(view: ModelView, against: Tensor, targets: Int[Tensor, " batch"]) -> Int[Tensor, "batch n"]:
    """`against` as [batch n]; raises InputError where it is not token ids, or holds the target itself."""
    against = torch.as_tensor(against, device=view.unembed_device)
    n, d_vocab = len(targets), view.model.W_U.shape[1]
    if against.ndim not in (1, 2) or len(against) != n or not against.numel() or against.is_floating_point():
        raise InputError(
            f"against must be token ids, one or several a prompt, shape ({n},) or ({n}, n); got "
            f"{tuple(against.shape)} {against.dtype}"
        )
    against = against.reshape(n, -1)
    if bool(((against < 0) | (against >= d_vocab)).any()):
        raise InputError(f"against must lie in 0–{d_vocab - 1}; leave out prompts that have nothing to compare with")
    if bool((against == targets[:, None]).any()):
        raise InputError("against holds a prompt's own target, from which it cannot differ; give other tokens")
    return against


def _log_diff(log_probs: Tensor, asked: _Scoring) -> Float[Tensor, " batch"]:
    """log p(target) − log p(against)."""
    assert asked.against is not None
    targets, against = (tokens.clone().to(log_probs.device) for tokens in (asked.targets, asked.against))
    return log_probs.gather(1, targets[:, None])[:, 0] - log_probs.gather(1, against).logsumexp(-1)


def _score_log_probs(log_probs: Float[Tensor, "batch d_vocab"], asked: _Scoring) -> Float[Tensor, "batch 3"]:
    """log p(target), the log-odds of the answer's label (NaN without an answer), the log difference (or NaN)."""
    batch = asked.batch
    own = log_probs.gather(1, asked.targets.to(log_probs.device)[:, None])[:, 0]
    labels = log_probs[:, batch.label_tokens.to(log_probs.device)]
    choices, answer = batch.label_mask.to(labels.device), batch.answer.to(labels.device)
    odds = torch.full_like(own, torch.nan)
    usable = (answer >= 0) & (choices.sum(-1) > 1)
    if bool(usable.any()):
        odds[usable] = label_log_odds(labels[usable], answer[usable], choices=choices[usable])
    differ = torch.full_like(own, torch.nan) if asked.against is None else _log_diff(log_probs, asked)
    return torch.stack([own, odds, differ], dim=-1)


def _estimated(view: ModelView, asked: _Scoring, positions: Positions) -> Float[Tensor, "batch layer head 3"]:
    """First-order estimates; log-odds are not estimated."""
    pieces = []
    size = graphs_at_once(view, asked.batch)
    for start in range(0, len(asked.batch), size):
        some = asked.of(list(range(start, min(start + size, len(asked.batch)))))

        def scores(log_probs: Tensor, some: _Scoring = some) -> Tensor:
            own = log_probs.gather(1, some.targets.clone().to(log_probs.device)[:, None])
            return own if some.against is None else torch.cat([own, _log_diff(log_probs, some)[:, None]], dim=1)

        drops = first_order_drops(view, some.batch, scores, last_only=positions == "last")
        missing = torch.full_like(drops[..., 0], torch.nan)
        pieces.append(torch.stack([drops[..., 0], missing, drops[..., 1] if drops.shape[-1] > 1 else missing], dim=-1))
    return torch.cat(pieces)


# Log-probabilities of rows are made and read in pieces of about this size.
LOG_PROB_BYTES = 16 * 2**20


def _by_prefix_cache(
    view: ModelView, asked: _Scoring, pass_tokens: int, replacement: Replacement
) -> Float[Tensor, "batch layer head 3"]:
    """Every head's effect at the last position, from rows that share their prompt's keys; raises NotShared."""
    size = max_prompts(view, asked.batch, pass_tokens=pass_tokens)
    # Prompts of about one length share a pass, so that none is padded for nothing.
    order = asked.batch.last.argsort(stable=True).tolist()
    effects: Tensor | None = None
    for start in range(0, len(order), size):
        prompts = order[start : start + size]
        some = asked.of(prompts)
        try:
            pieces = list(layer_chunks(view, len(prompts)))
            begun: dict[range, Tensor] = {}
            for kept in PrefixCache.by_layer_stage(view, some.batch):
                for layers in (one for one in pieces if one.start < kept.layers.stop):
                    rows = kept.ablate_each_head(layers, replacement, begun.pop(layers, None))
                    if kept.resid_after is not None:
                        begun[layers] = rows
                        continue
                    clean, edited = _score_log_probs(kept.log_probs, some), _judged_rows(rows, some)
                    off = float((edited[:, 0, 0] - clean[:, 0]).abs().max())
                    if not off <= CLEAN_TOLERANCE.get(view.model.W_U.dtype, 1e-3):
                        raise PrefixCacheUnsupported(
                            f"a row of {view.architecture} without any removal is off by {off:.1e} nats"
                        )
                    if effects is None:
                        effects = clean.new_empty(len(order), view.n_layers, view.n_heads, 3)
                    drops = clean[:, None] - edited[:, 1:]
                    effects[prompts, layers.start : layers.stop] = drops.unflatten(1, (len(layers), view.n_heads))
        except InputError as error:  # a hook or a score that the family does not show
            raise PrefixCacheUnsupported(str(error)) from error
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            text = str(error).splitlines()[0]
            raise PrefixCacheUnsupported(f"{view.architecture} does not run on rows of one token ({text})") from error
    assert effects is not None
    return effects


def _judged_rows(logits: Float[Tensor, "batch row d_vocab"], asked: _Scoring) -> Float[Tensor, "batch row 3"]:
    """`_judged` for several rows a prompt, a few at a time."""
    n_rows = logits.shape[1]
    flat = logits.flatten(0, 1)
    dtype = torch.promote_types(flat.dtype, torch.float32)
    step = max(1, LOG_PROB_BYTES // (4 * flat.shape[1]))
    found = []
    for start in range(0, len(flat), step):
        some = flat[start : start + step].to(dtype)
        prompts = [(start + i) // n_rows for i in range(len(some))]
        found.append(_score_log_probs(torch.log_softmax(some, dim=-1), asked.of(prompts)))
    return torch.cat(found).unflatten(0, (-1, n_rows))


def _restarted(
    view: ModelView, asked: _Scoring, positions: Positions, pass_tokens: int, replacement: Replacement
) -> Float[Tensor, "batch layer head 3"]:
    """Every head's effect from passes over whole prompts that begin at the head's layer."""
    n_layers, n_heads = view.n_layers, view.n_heads
    nothing = torch.zeros(1, n_layers, n_heads, dtype=torch.bool)
    each = torch.eye(n_layers * n_heads, dtype=torch.bool).unflatten(1, (n_layers, n_heads))
    found = map_ablated_sets(
        view,
        asked.batch,
        torch.cat([nothing, each]),
        lambda log_probs, rows: _score_log_probs(log_probs, asked.of(rows)),
        replacement,
        positions=positions,
        pass_tokens=pass_tokens,
    )
    return (found[:, :1] - found[:, 1:]).unflatten(1, (n_layers, n_heads))
