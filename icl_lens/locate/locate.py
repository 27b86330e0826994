"""Locate heads over many prompts: batches are streamed, and the top k of the mean is exact and certified.

Each batch yields a bound of every head's increase and exact increases of a generous candidate set: the top heads of a
pilot batch that covers all prompt lengths, and the top heads of the batch itself. A head's mean is bounded by the mean
of exact values where available and bounds elsewhere. Heads whose bound could still reach the top k are evaluated in a
second pass over the batches that lack them.

Batches and candidates depend only on the prompts, and sums are in float64 in batch order: a resumed run gives the same
numbers, and a run on several processes the same within rounding.
Source: docs/howto/numbers.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations, capture
from icl_lens.attribution.increases import (
    CheckedAgainst,
    check_against_ids,
    check_target_ids,
    every_head_increase,
    linear_direction,
    min_prompts_to_fold,
    select_rows,
)
from icl_lens.attribution.search import SLACK, TopHeads, check_k, exact_head_increases, head_bounds, layer_gradients
from icl_lens.errors import InputError
from icl_lens.locate.chunk import HeadChunk, chunk_from, columns_of
from icl_lens.locate.distributed import Distributed
from icl_lens.locate.progress import Progress, as_callback, shows_progress
from icl_lens.locate.run_folder import RunFolder
from icl_lens.locate.runner import BatchRunner, ChunkFormat, Runner
from icl_lens.models.readout import LOGIT_BYTES, FinalNorm, Readout
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize

# Memory limit of a batch's activations, as estimated by `prompt_bytes`.
BYTE_BUDGET = 64 * 2**20
# More rows do not speed up matrix products and make a lost chunk more expensive.
MOST_ROWS = 64
# Candidates beyond k: more cost a little on every batch; fewer may cost a second pass.
MARGIN = 20


@dataclass(frozen=True)
class _Convention:
    final_norm: FinalNorm
    bias: bool
    slack: float


def prompt_bytes(view: ModelView, width: int) -> int:
    """Estimate the memory of a prompt of `width` tokens while its batch is captured, bytes."""
    layers, d_model, heads = view.n_layers, view.d_model, view.n_heads
    d_mlp = int(getattr(view.cfg, "d_mlp", None) or 4 * d_model)
    kept = layers * (7 * d_model + 2 * heads * view.d_head + d_mlp + width * (view.n_kv_heads * view.d_head + heads))
    passing = width * (4 * d_mlp + 8 * d_model) + 4 * heads * width**2
    return (kept + passing) * view.model.W_U.element_size()


def plan_batches(
    view: ModelView, batch: PromptBatch, *, batch_size: int | None = None, byte_budget: int = BYTE_BUDGET
) -> list[list[int]]:
    """Return the rows of each batch: prompts of similar length, as many as fit into `byte_budget`.

    The first batch covers all lengths and selects the candidates. The plan depends only on prompt lengths. Raises
    InputError if `batch_size` or `byte_budget` is below 1.
    """
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if byte_budget < 1:
        raise InputError(f"byte_budget must be at least 1, got {byte_budget}")

    def rows_of(width: int) -> int:
        return batch_size or max(1, min(MOST_ROWS, byte_budget // prompt_bytes(view, width)))

    lengths = (batch.last + 1).tolist()
    order = sorted(range(len(batch)), key=lambda row: (lengths[row], row))
    pilot_size = min(rows_of(max(lengths)), len(order))
    pilot = [order[(2 * i + 1) * len(order) // (2 * pilot_size)] for i in range(pilot_size)]
    rest = sorted(set(order) - set(pilot), key=lambda row: (lengths[row], row), reverse=True)
    batches = [pilot]
    while rest:
        size = rows_of(lengths[rest[0]])
        batches.append(rest[:size])
        rest = rest[size:]
    return batches


@shows_progress
def locate_heads(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    *,
    k: int = 20,
    targets: Int[Tensor, " prompt"] | None = None,
    against: Int[Tensor, " prompt"] | Int[Tensor, "prompt other"] | None = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    batch_size: int | None = None,
    byte_budget: int = BYTE_BUDGET,
    slack: float = SLACK,
    folder: RunFolder | None = None,
    distributed: Distributed | None = None,
    progress: Progress | bool | None = None,
    warn: Callable[[str], None] | None = None,
) -> TopHeads:
    """Locate the k heads with the largest mean log-probability increase over any number of prompts, certified exact.

    `targets` defaults to the answers. Memory grows with the number of prompts only by their tokens. `slack` (nats)
    allows for float32 rounding of the bounds. With `final_norm="own"` or a logit soft-cap, no bound exists, so every
    head is evaluated on every prompt and the result is not `certified`. With a `folder`, chunks are stored there and
    existing chunks are reused; a corrupt chunk is reported through `warn` and recomputed. With `distributed`, each
    process computes a share of the batches, and all return the same result. `progress=True` shows a progress bar.

    With `against`, locate the heads that contribute most to log p(target) − log Σ p(against), for instance
    `against=batch.other_label_tokens` for heads that distinguish the answer from the other labels. With one other token
    per prompt, a single pass gives exact values of every head. A `folder`'s configuration must then have an entry
    "against", so that chunks of different runs are not mixed.

    Raises InputError for invalid targets, against, k or batch sizes, and if the folder is not writable.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> top = il.locate_heads(model, many, k=4)
        >>> top.value.shape, top.n_prompts
        (torch.Size([4]), 20)
        >>> il.locate_heads(model, many, k=4, against=many.other_label_tokens).certified
        True
    """
    batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    distributed = distributed or Distributed()
    view = ModelView.of(model)
    n_parts = view.n_layers * view.n_heads
    check_k(k, n_parts, "heads")
    targets = check_target_ids(view, batch.answer_tokens if targets is None else targets, len(batch))
    others = check_against_ids(view, targets, against)
    _check_folder(folder, others)
    convention = _Convention(final_norm, bias, slack)
    plan = plan_batches(view, batch, batch_size=batch_size, byte_budget=byte_budget)
    n_candidates = min(n_parts, k + MARGIN)
    form = ChunkFormat[HeadChunk](
        lambda chunk: columns_of(chunk, view.n_heads), lambda table: chunk_from(table, view.n_heads)
    )
    chunks = Runner(form, folder, distributed, warn or (lambda _: None))
    runner = BatchRunner(chunks, plan, len(batch), as_callback(progress))

    def first_pass(number: int, candidates: np.ndarray | None) -> HeadChunk:
        acts, its = _captured(model, batch, targets, others, plan[number])
        return _bounds_and_candidates(acts, *its, convention, plan[number], candidates, n_candidates, k)

    sums = _Sums(n_parts)
    # The first batch selects the candidates, so all processes need it.
    pilot = runner.chunk("part", 0, lambda: first_pass(0, None))
    candidates = pilot.heads
    for chunk in runner.chunks("part", range(1, len(plan)), lambda number: first_pass(number, candidates), [pilot]):
        sums.add(chunk)

    wanted, numbers = distributed.broadcast(sums.heads_to_refine(k, slack) if distributed.is_main else None)

    def second_pass(number: int) -> HeadChunk:
        acts, its = _captured(model, batch, targets, others, plan[number])
        return _refine(acts, *its, convention, plan[number], numbers[number])

    for chunk in runner.chunks("refined", sorted(numbers), second_pass):
        sums.add_refined(chunk)
    return distributed.broadcast(sums.top(k, view.n_heads, wanted) if distributed.is_main else None)


@shows_progress
def mean_head_increases(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    *,
    targets: Int[Tensor, " prompt"] | None = None,
    against: Int[Tensor, " prompt"] | Int[Tensor, "prompt other"] | None = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    batch_size: int | None = None,
    byte_budget: int = BYTE_BUDGET,
    progress: Progress | bool | None = None,
) -> Float[Tensor, "layer head"]:
    """Return every head's exact mean log-probability increase over any number of prompts, nats, in float64.

    The computation is exhaustive. From `attribution.min_prompts_to_fold` prompts (68 for GPT-2 large), prompts are
    grouped so that z is projected through W_O·W_U, folded once per group; smaller datasets, own norms and soft-caps use
    the slower unfolded path. With `against`, returns mean contributions to log p(target) − log Σ p(against), which need
    no projection onto the vocabulary. `progress=True` shows a progress bar. Raises InputError for invalid targets,
    against or batch sizes.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> il.mean_head_increases(model, many).shape
        torch.Size([8, 6])
        >>> il.mean_head_increases(model, many, against=many.other_label_tokens).shape
        torch.Size([8, 6])
    """
    batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    view = ModelView.of(model)
    targets = check_target_ids(view, batch.answer_tokens if targets is None else targets, len(batch))
    others = check_against_ids(view, targets, against)
    plan = plan_batches(view, batch, batch_size=batch_size, byte_budget=byte_budget)
    logits = LOGIT_BYTES // (view.model.W_U.shape[1] * 4)
    group_size = max(4 * min_prompts_to_fold(view.d_head, view.d_model), logits)
    total = torch.zeros(view.n_layers, view.n_heads, dtype=torch.float64)
    held: list[_Held] = []
    done, report = 0, as_callback(progress)
    for number, rows in enumerate(plan):
        acts, its = _captured(model, batch, targets, others, rows)
        readout = acts.readout.using(final_norm=final_norm, bias=bias)
        held.append(_Held(readout, acts.resid_pre, acts.head_inputs, *its))
        del acts
        if sum(len(one.targets) for one in held) >= group_size or number == len(plan) - 1:
            total += _sum_of(view, held)
            held = []
        done += len(rows)
        report("heads", done, len(batch))
    return total / len(batch)


@dataclass(frozen=True)
class _Held:
    """Inputs of `every_head_increase` from one batch."""

    readout: Readout
    x: Float[Tensor, "batch layer d_model"]
    z: Float[Tensor, "batch layer head d_head"]
    targets: Int[Tensor, " batch"]
    against: CheckedAgainst


def _sum_of(view: ModelView, held: list[_Held]) -> Float[Tensor, "layer head"]:
    readout = replace(held[0].readout, scale=torch.cat([one.readout.scale for one in held]))
    x, z, targets = (torch.cat([getattr(one, name) for one in held]) for name in ("x", "z", "targets"))
    others = [one.against for one in held if one.against is not None]
    against = torch.cat(others) if others else None
    return every_head_increase(view, readout, x, z, targets, against).double().sum(0).cpu()


def _captured(
    model: Any, batch: PromptBatch, targets: Tensor, against: CheckedAgainst, rows: list[int]
) -> tuple[Activations, tuple[Tensor, Tensor | None]]:
    return capture(model, batch[rows]), (targets[rows], select_rows(against, rows))


def _check_folder(folder: RunFolder | None, against: CheckedAgainst) -> None:
    """Raise InputError if a folder could mix chunks of increases with chunks of contrasts or effects."""
    if folder is None:
        return
    if folder.configuration.get("by") == "effect":
        raise InputError(
            "folder must be of a run of increases, got a configuration with by='effect'; pass it to locate_effects"
        )
    if (folder.configuration.get("against") is None) == (against is None):
        return
    wanted = "None" if against is None else "the tokens' name"
    raise InputError(
        f'the entry "against" of the folder\'s configuration must be {wanted}, got '
        f"{folder.configuration.get('against')!r}; set it, so that chunks of different runs are not mixed"
    )


def _bounds_and_candidates(
    acts: Activations,
    targets: Tensor,
    against: CheckedAgainst,
    convention: _Convention,
    rows: list[int],
    candidates: np.ndarray | None,
    n_candidates: int,
    k: int,
) -> HeadChunk:
    """Return bounds of all heads, and exact increases of the candidates and of this batch's top heads.

    All heads are evaluated exactly if bounds are exact (a linear contrast) or do not exist.
    """
    readout = acts.readout.using(final_norm=convention.final_norm, bias=convention.bias)
    linear = linear_direction(readout, targets, against) is not None
    if linear or not readout.is_affine:
        found = every_head_increase(acts.view, readout, acts.resid_pre, acts.head_inputs, targets, against)
        exact = found.flatten(1).cpu().numpy()
        return HeadChunk(np.array(rows), exact if linear else None, np.arange(exact.shape[1]), exact)
    gradients = layer_gradients(acts, targets, readout, against=against)
    bound = head_bounds(acts, gradients).flatten(1)
    # With given candidates, add this batch's top k, so that heads of few prompts do not need the second pass.
    leading = bound.double().mean(0).topk(n_candidates if candidates is None else min(k, bound.shape[1])).indices
    heads = leading.cpu().numpy() if candidates is None else np.union1d(candidates, leading.cpu().numpy())
    heads = np.sort(heads)
    index = torch.as_tensor(heads, device=bound.device)
    increase = exact_head_increases(acts, targets, readout, gradients.base, index, against=against)
    return HeadChunk(np.array(rows), bound.cpu().numpy(), heads, increase.cpu().numpy())


def _refine(
    acts: Activations,
    targets: Tensor,
    against: CheckedAgainst,
    convention: _Convention,
    rows: list[int],
    heads: np.ndarray,
) -> HeadChunk:
    """Return exact increases of heads that were not evaluated on this batch."""
    readout = acts.readout.using(final_norm=convention.final_norm, bias=convention.bias)
    index = torch.as_tensor(heads, device=readout.W_U.device)
    layers = index.div(acts.view.n_heads, rounding_mode="floor").unique()
    base = readout.scale.new_zeros((len(rows), acts.view.n_layers))
    x = acts.resid_pre[:, layers].to(readout.dtype)
    base[:, layers] = readout.token_log_probs(x, targets, against=against)
    increase = exact_head_increases(acts, targets, readout, base, index, against=against)
    return HeadChunk(np.array(rows), None, heads, increase.cpu().numpy())


class _Sums:
    """Float64 sums over batches in order, with constant memory per head."""

    def __init__(self, n_heads: int):
        self.n = 0
        self.exact = np.zeros(n_heads)
        self.n_exact = np.zeros(n_heads, dtype=np.int64)
        self.upper = np.zeros(n_heads)
        self.evaluated: list[np.ndarray] = []
        self.bounded = True

    def add(self, chunk: HeadChunk) -> None:
        known = chunk.increase.astype(np.float64).sum(0)
        self.n += len(chunk.rows)
        if chunk.bound is None:
            self.bounded = False
        else:
            upper = chunk.bound.astype(np.float64).sum(0)
            upper[chunk.heads] = known
            self.upper += upper
        self.exact[chunk.heads] += known
        self.n_exact[chunk.heads] += len(chunk.rows)
        self.evaluated.append(chunk.heads)

    def add_refined(self, chunk: HeadChunk) -> None:
        self.exact[chunk.heads] += chunk.increase.astype(np.float64).sum(0)
        self.n_exact[chunk.heads] += len(chunk.rows)

    def heads_to_refine(self, k: int, slack: float) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Return the heads that may still be among the top k, and those that each batch lacks."""
        complete = self.n_exact == self.n
        # The candidates of the first batch are complete, and there are at least k.
        kth = np.sort(self.exact[complete] / self.n)[-k]
        wanted = np.flatnonzero(~complete & (self.upper / self.n + slack > kth))
        lacking = {i: np.setdiff1d(wanted, heads) for i, heads in enumerate(self.evaluated)}
        return wanted, {i: heads for i, heads in lacking.items() if len(heads)}

    def top(self, k: int, n_heads: int, wanted: np.ndarray) -> TopHeads:
        complete = np.flatnonzero(self.n_exact == self.n)
        if not np.isfinite(self.exact[complete]).all():
            some = int(complete[~np.isfinite(self.exact[complete])][0])
            raise InputError(
                f"the mean increase of L{some // n_heads}H{some % n_heads} is NaN or infinite; load the model in "
                "bfloat16 or float32, or remove edits"
            )
        assert set(wanted) <= set(complete), "the second pass completes all heads"
        mean = self.exact[complete] / self.n
        order = np.argsort(-mean, kind="stable")[:k]
        found = complete[order]
        open_ = self.upper[self.n_exact < self.n] / self.n
        return TopHeads(
            value=torch.from_numpy(mean[order]),
            layer=torch.from_numpy(found // n_heads),
            head=torch.from_numpy(found % n_heads),
            n_exact=len(complete),
            n_parts=len(self.exact),
            unevaluated_bound=float(open_.max()) if len(open_) else -float("inf"),
            certified=self.bounded,
            n_evaluations=int(self.n_exact.sum()),
            n_prompts=self.n,
        )
