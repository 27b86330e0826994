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
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations, capture, label_log_probs
from icl_lens.attribution.increases import (
    CheckedAgainst,
    check_against_ids,
    check_target_ids,
    every_head_increase,
    linear_direction,
    min_prompts_to_fold,
    select_rows,
)
from icl_lens.attribution.search import (
    SLACK,
    HeadMeans,
    TopHeads,
    check_k,
    exact_head_increases,
    head_bounds,
    layer_gradients,
)
from icl_lens.errors import InputError, check_choice
from icl_lens.locate.chunk import increase_columns, read_increases
from icl_lens.locate.distributed import Distributed
from icl_lens.locate.mean_effects import locate_effects
from icl_lens.locate.run_folder import RunFolder
from icl_lens.locate.stream import BYTE_BUDGET, MAX_ROWS, ChunkStream, plan_batches
from icl_lens.models.head import Head
from icl_lens.models.readout import LOGIT_BYTES, FinalNorm, Readout
from icl_lens.models.view import ModelView
from icl_lens.progress import Progress, reported
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize

# Candidates beyond k: more cost a little on every batch; fewer may cost a second pass.
MARGIN = 20

RankBy = Literal["increase", "contrast", "effect"]


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
    search = _Search.of(model, prompts, targets, against, final_norm, bias)
    view, n_heads = search.view, search.view.n_layers * search.view.n_heads
    check_k(k, n_heads, "heads")
    _check_folder(folder, search.against)
    distributed = distributed or Distributed()
    plan = plan_batches(view, search.batch, batch_size=batch_size, byte_budget=byte_budget)
    means, evaluated = HeadMeans(n_heads), list[np.ndarray]()
    with reported(progress) as report:
        stream = ChunkStream(plan, folder, distributed, report, warn)
        # The first batch selects the candidates, so all processes need it.
        pilot = stream.first(lambda number: search.first_pass(plan[number], k + MARGIN))
        candidates = read_increases(pilot, view.n_heads)[1]
        rest = stream.chunks(
            "part",
            range(1, len(plan)),
            lambda number: search.first_pass(plan[number], k, candidates),
            done=len(plan[0]),
        )
        for chunk in chain([pilot], rest):
            bound, heads, increase = read_increases(chunk, view.n_heads)
            means.add(bound, heads, increase)
            evaluated.append(heads)

        def heads_to_refine() -> dict[int, np.ndarray]:
            still_open = means.open_heads(k, slack)
            lacking = {number: np.setdiff1d(still_open, heads) for number, heads in enumerate(evaluated)}
            return {number: heads for number, heads in lacking.items() if len(heads)}

        lacking = distributed.run_on_main(heads_to_refine)
        refined = stream.chunks(
            "refined", sorted(lacking), lambda number: search.second_pass(plan[number], lacking[number])
        )
        for chunk in refined:
            means.add_exact(*read_increases(chunk, view.n_heads)[1:])
    return distributed.run_on_main(lambda: means.top(k, view.n_heads))


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
    search = _Search.of(model, prompts, targets, against, final_norm, bias)
    view = search.view
    plan = plan_batches(view, search.batch, batch_size=batch_size, byte_budget=byte_budget)
    logits = LOGIT_BYTES // (view.model.W_U.shape[1] * 4)
    group_size = max(4 * min_prompts_to_fold(view.d_head, view.d_model), logits)
    total = torch.zeros(view.n_layers, view.n_heads, dtype=torch.float64)
    group: list[int] = []
    held: list[tuple[Readout, Tensor, Tensor]] = []
    done = 0
    with reported(progress) as report:
        for rows in plan:
            acts, readout = search.capture(rows)
            held.append((readout, acts.resid_pre, acts.head_inputs))
            del acts
            group += rows
            done += len(rows)
            if len(group) >= group_size or done == len(search.batch):
                readouts, x, z = zip(*held, strict=True)
                readout = replace(readout, scale=torch.cat([one.scale for one in readouts]))
                every = every_head_increase(view, readout, torch.cat(x), torch.cat(z), *search.tokens(group))
                total += every.double().sum(0).cpu()
                group, held = [], []
            report("heads", done, len(search.batch))
    return total / len(search.batch)


def top_heads_by(
    model: Any,
    batch: PromptBatch,
    k: int,
    *,
    by: RankBy = "increase",
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    progress: Progress | bool | None = None,
) -> list[Head]:
    """Return the k heads with the largest mean increase, contrast or ablation effect, largest first.

    For the answer of each prompt, or the model's most probable label where a prompt has none: "increase" is that of
    log p(answer); "contrast" that of log p(answer) − log Σ p(other labels); "effect" is the drop of log p(answer) when
    the head is zeroed at the last position. Raise InputError if k exceeds the number of heads.
    """
    check_choice("by", by, get_args(RankBy))
    view = ModelView.of(model)
    check_k(k, view.n_layers * view.n_heads, "heads")
    answer = batch.answer
    if bool((answer < 0).any()):
        predicted = torch.cat([label_log_probs(model, rows).argmax(-1) for rows in batch.split(MAX_ROWS)])
        answer = torch.where(answer < 0, predicted.to(answer.device), answer)
    targets = batch.label_tokens[answer]
    if by == "effect":
        return locate_effects(model, batch, targets=targets, positions="last", progress=progress).top(k)
    others = batch.label_tokens_except(answer) if by == "contrast" else None
    convention: dict[str, Any] = {"final_norm": final_norm, "bias": bias}
    return locate_heads(model, batch, k=k, targets=targets, against=others, progress=progress, **convention).heads


def _check_folder(folder: RunFolder | None, against: CheckedAgainst) -> None:
    """Raise InputError if a folder could mix chunks of increases with chunks of contrasts or effects."""
    if folder is None:
        return
    functions = {"effect": "locate_effects", "score parts": "mean_score_parts"}
    if (by := folder.configuration.get("by")) in functions:
        raise InputError(
            f"folder must be of a run of increases, got a configuration with by={by!r}; pass it to {functions[by]}"
        )
    if (folder.configuration.get("against") is None) == (against is None):
        return
    wanted = "None" if against is None else "the tokens' name"
    raise InputError(
        f'the entry "against" of the folder\'s configuration must be {wanted}, got '
        f"{folder.configuration.get('against')!r}; set it, so that chunks of different runs are not mixed"
    )


@dataclass(frozen=True)
class _Search:
    """Checked inputs of a search, and what it computes from one batch."""

    model: Any
    view: ModelView
    batch: PromptBatch
    targets: Int[Tensor, " prompt"]
    against: CheckedAgainst
    final_norm: FinalNorm
    bias: bool

    @classmethod
    def of(
        cls,
        model: Any,
        prompts: PromptBatch | Sequence[Prompt],
        targets: Int[Tensor, " prompt"] | None,
        against: Int[Tensor, " prompt"] | Int[Tensor, "prompt other"] | None,
        final_norm: FinalNorm,
        bias: bool,
    ) -> "_Search":
        batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
        view = ModelView.of(model)
        targets = check_target_ids(view, batch.answer_tokens if targets is None else targets, len(batch))
        return cls(model, view, batch, targets, check_against_ids(view, targets, against), final_norm, bias)

    def capture(self, rows: list[int]) -> tuple[Activations, Readout]:
        acts = capture(self.model, self.batch[rows])
        return acts, acts.readout.using(final_norm=self.final_norm, bias=self.bias)

    def tokens(self, rows: list[int]) -> tuple[Int[Tensor, " row"], CheckedAgainst]:
        """Return the targets of some prompts, and the tokens they are compared with."""
        return self.targets[rows], select_rows(self.against, rows)

    def first_pass(
        self, rows: list[int], n_leading: int, candidates: Sequence[int] | np.ndarray = ()
    ) -> dict[str, Any]:
        """Return bounds of all heads, and exact increases of the candidates and of the batch's `n_leading` top heads.

        All heads are evaluated exactly if bounds are exact (a linear contrast) or do not exist.
        """
        acts, readout = self.capture(rows)
        targets, against = self.tokens(rows)
        linear = linear_direction(readout, targets, against) is not None
        if linear or not readout.is_affine:
            found = every_head_increase(acts.view, readout, acts.resid_pre, acts.head_inputs, targets, against)
            exact = found.flatten(1).cpu().numpy()
            return self.columns(rows, exact if linear else None, np.arange(exact.shape[1]), exact)
        gradients = layer_gradients(acts, targets, readout, against=against)
        bound = head_bounds(acts, gradients).flatten(1)
        leading = bound.double().mean(0).topk(min(n_leading, bound.shape[1])).indices.cpu().numpy()
        heads = np.union1d(np.asarray(candidates, dtype=leading.dtype), leading)
        increase = exact_head_increases(acts, targets, readout, heads, gradients.base, against=against)
        return self.columns(rows, bound.cpu().numpy(), heads, increase)

    def second_pass(self, rows: list[int], heads: np.ndarray) -> dict[str, Any]:
        """Return exact increases of heads that the first pass did not evaluate on this batch."""
        acts, readout = self.capture(rows)
        targets, against = self.tokens(rows)
        return self.columns(rows, None, heads, exact_head_increases(acts, targets, readout, heads, against=against))

    def columns(
        self, rows: list[int], bound: np.ndarray | None, heads: np.ndarray, increase: np.ndarray
    ) -> dict[str, Any]:
        return increase_columns(np.array(rows), bound, heads, increase, self.view.n_heads)
