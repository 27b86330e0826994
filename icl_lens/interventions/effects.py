"""What removing each head does to the answer, measured: the causal counterpart of the log-probability increase.

Every pass starts again at the layer whose heads it edits, from the residual stream kept there, so that removing all
heads one by one costs about half as much as running the model anew for each. Source: the published version (causal
location of heads).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import last_log_probs
from icl_lens.attribution.increases import target_tokens
from icl_lens.errors import InputError
from icl_lens.metrics import label_log_odds
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch

# Tokens in one forward pass: many enough for large products, few enough for small memories.
PASS_TOKENS = 4096


@dataclass(frozen=True)
class HeadEffects:
    """How much worse the answer does when a head is zeroed, nats: positive where the head helps.

    `log_prob` is the fall of log p(answer); `log_odds` that of the answer's log-odds against the prompt's other
    labels, NaN for prompts without an answer.

    Example:
        >>> effects = il.head_effects(model, batch)
        >>> effects.log_prob.shape, len(effects.top(3))
        (torch.Size([1, 6, 8]), 3)
    """

    log_prob: Float[Tensor, "batch layer head"]
    log_odds: Float[Tensor, "batch layer head"]

    def top(self, k: int) -> list[Head]:
        """The k heads whose removal costs the most log-probability, on average over prompts."""
        mean = self.log_prob.mean(0)
        order = mean.flatten().argsort(descending=True)[:k]
        return [Head.at(index, mean.shape[1]) for index in order.tolist()]


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
    by_chance: float
    """What the overlap of k heads drawn at random is on average."""


def head_effects(
    model: Any,
    batch: PromptBatch,
    targets: Int[Tensor, " batch"] | None = None,
    *,
    pass_tokens: int = PASS_TOKENS,
) -> HeadEffects:
    """The effect of zeroing each head, at all positions, on every prompt.

    `targets` [batch] are token ids, left out: the answers'. Exact: the same numbers as `ablate_heads`, one head at a
    time, within rounding. Cost: about half a forward pass per head and prompt. Memory: three tensors of the size of
    the residual stream for each layer and prompt; split large datasets. Raises InputError for bad targets.

    Example:
        >>> effects = il.head_effects(model, batch)
        >>> effects.log_odds.shape
        torch.Size([1, 6, 8])
    """
    view = ModelView.of(model)
    if targets is None:
        targets = batch.answer_tokens
    targets = target_tokens(view, targets, len(batch))
    if pass_tokens < 1:
        raise InputError(f"pass_tokens={pass_tokens} must be at least 1")
    stream = _run_through(view, batch)
    clean = _scores(model, batch, targets)
    effects = clean.new_empty(len(batch), view.n_layers, view.n_heads, 2)
    pairs = [(row, head) for row in range(len(batch)) for head in range(view.n_heads)]
    size = max(1, pass_tokens // batch.tokens.shape[1])
    for layer in range(view.n_layers):
        for start in range(0, len(pairs), size):
            rows, heads = (list(part) for part in zip(*pairs[start : start + size], strict=True))
            some = batch[rows]
            # The piece may need less padding than the whole batch does.
            width = some.tokens.shape[1]
            with _starting_at(view, layer, stream, rows, heads, width):
                effects[rows, layer, heads] = clean[rows] - _scores(model, some, targets[rows])
    return HeadEffects(*effects.unbind(-1))


def agreement(one: Float[Tensor, "layer head"], other: Float[Tensor, "layer head"], *, k: int = 20) -> Agreement:
    """Whether two scores of the same heads order them alike: causal effects against log-probability increases.

    Scores are means over prompts. Ties share their mean rank. Raises InputError for a k that is no number of heads.

    Example:
        >>> increase = il.head_log_prob_increase(acts, targets)[0]
        >>> il.agreement(increase, il.head_effects(model, batch).log_prob[0], k=4).by_chance
        0.3333333333333333
    """
    n = one.numel()
    if one.shape != other.shape or not 1 <= k <= n:
        raise InputError(f"cannot compare scores of shapes {tuple(one.shape)} and {tuple(other.shape)} at k={k}")
    first, second = (_ranks(scores.flatten().double().cpu()) for scores in (one, other))
    best = [set(scores.flatten().topk(k).indices.tolist()) for scores in (one, other)]
    spearman = torch.corrcoef(torch.stack([first, second]))[0, 1]
    return Agreement(float(spearman), k, len(best[0] & best[1]), k * k / n)


def _ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Ranks from 0, ties at their mean."""
    below = (values[None, :] < values[:, None]).sum(1)
    equal = (values[None, :] == values[:, None]).sum(1)
    return below + (equal - 1) / 2


def _scores(model: Any, batch: PromptBatch, targets: Int[Tensor, " batch"]) -> Float[Tensor, "batch 2"]:
    """log p(target), and the log-odds of the answer's label (NaN without an answer)."""
    log_probs = last_log_probs(model, batch)
    own = log_probs.gather(1, targets.to(log_probs.device)[:, None])[:, 0]
    labels = log_probs[:, batch.label_tokens.to(log_probs.device)]
    choices, answer = batch.label_mask.to(labels.device), batch.answer.to(labels.device)
    odds = torch.full_like(own, torch.nan)
    usable = (answer >= 0) & (choices.sum(-1) > 1)
    if bool(usable.any()):
        odds[usable] = label_log_odds(labels[usable], answer[usable], choices=choices[usable])
    return torch.stack([own, odds], dim=-1)


class _Layer(NamedTuple):
    """What one layer took in and its attention gave out, at every position."""

    resid_pre: Float[Tensor, "batch pos d_model"]
    z: Float[Tensor, "batch pos head d_head"]
    attn: Float[Tensor, "batch pos d_model"]
    """What the attention module returns: its output before any norm or multiplier that follows (Bloom: plus x)."""
    attn_returns: int | None
    """How many things it returns; None for a bare tensor."""
    block_returns: int | None


def _run_through(view: ModelView, batch: PromptBatch) -> list[_Layer]:
    """One pass over the batch, keeping every layer's part of it."""
    seen: list[dict[str, Any]] = [{} for _ in range(view.n_layers)]

    def keep(layer: int, name: str) -> Any:
        def hook_fn(value: Tensor, hook: Any) -> None:
            seen[layer][name] = value.detach().clone()  # some families add to it in place afterwards

        return hook_fn

    def keep_output(layer: int, name: str) -> Any:
        def hook_fn(module: Any, args: Any, output: Any) -> None:
            seen[layer][f"{name}_returns"] = len(output) if isinstance(output, tuple) else None
            if name == "attn":
                seen[layer][name] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook_fn

    hooks, handles = [], []
    for layer, block in enumerate(view.model.blocks):
        hooks.append((view.hook(layer, "hook_resid_pre"), keep(layer, "resid_pre")))
        hooks.append((view.hook(layer, "attn.hook_z"), keep(layer, "z")))
        handles.append(block.register_forward_hook(keep_output(layer, "block")))
        handles.append(block.attn.register_forward_hook(keep_output(layer, "attn")))
    try:
        with view.model.hooks(fwd_hooks=hooks):
            last_log_probs(view.model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return [_Layer(**part) for part in seen]


@contextmanager
def _starting_at(
    view: ModelView, layer: int, stream: list[_Layer], rows: list[int], heads: list[int], width: int
) -> Iterator[None]:
    """Forward passes in the block start at a layer, each row without one of its heads.

    Row i is prompt `rows[i]` without head `heads[i]`. The blocks before the layer are not run: their `forward` hands
    the kept residual stream on. Neither is the layer's attention: what it gave is known, and the head's part of it
    is taken off. Masks and rotations are the model's own, since it makes them before its first block.
    """
    kept = stream[layer]
    residual = kept.resid_pre[rows, :width]
    z = kept.z[rows, :width][torch.arange(len(rows)), :, heads]
    part = torch.bmm(z, view.raw_W_O(layer).to(z.device)[heads])
    attn = kept.attn[rows, :width] - part

    def hand_on(value: Tensor, count: int | None) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return value if count is None else (value, *[None] * (count - 1))

        return forward

    blocks = view.model.blocks
    swapped = [(blocks[i], hand_on(residual, stream[i].block_returns)) for i in range(layer)]
    swapped.append((blocks[layer].attn, hand_on(attn, kept.attn_returns)))
    # The first block's input is made anew, and is the same as what was kept.
    before = [vars(module).get("forward") for module, _ in swapped]
    try:
        for module, forward in swapped:
            vars(module)["forward"] = forward
        yield
    finally:
        for (module, _), own in zip(swapped, before, strict=True):
            if own is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = own
