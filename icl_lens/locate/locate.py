"""Locate the heads with the largest mean contrast or increase over many prompts, streamed, exact and certified.

1. A pilot batch, which covers all prompt lengths, selects candidates: its top heads.
2. Every batch yields a bound on every head's increase, and the exact increases of the candidates and of the batch's own
   top heads.
3. A head's mean is at most the mean of its exact increases and, in batches where it was not evaluated, its bounds.
4. Heads whose mean could still reach the top k are evaluated in a second pass over the batches that skipped them.

Neither batches nor candidates depend on stored chunks or the number of processes, and sums are taken in float64 in
batch order. A resumed run therefore gives the same numbers, and a run on several processes the same within rounding.
Source: docs/howto/numbers.md.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.activations.activations import Activations, capture
from icl_lens.attribution.increases import every_head_increase, linear_direction, min_prompts_to_fold
from icl_lens.attribution.scored_tokens import (
    Against,
    CheckedAgainst,
    check_against_ids,
    check_targets,
    choose_tokens,
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
from icl_lens.engine.score import score
from icl_lens.head_scores import SCORES, DirectScore, Score, choose_score
from icl_lens.intervals import draw_clusters
from icl_lens.locate.chunk import increase_columns, read_increases
from icl_lens.locate.located_heads import heads_result, heads_table
from icl_lens.locate.mean_effects import effects_of_located, locate_effects
from icl_lens.locate.mean_exchanges import locate_towers
from icl_lens.locate.streamed_means import ResampledSums
from icl_lens.metrics import most_probable
from icl_lens.models.active_edits import active_edits
from icl_lens.models.head import Head
from icl_lens.models.memory import LOGIT_BYTES, MAX_ROWS
from icl_lens.models.readout import FinalNorm, Readout
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, with_answers
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize
from icl_lens.runs.configuration import tensors_digest
from icl_lens.runs.run import Run
from icl_lens.runs.stream import ChunkStream, plan_batches, start

# Number of candidates beyond k. More candidates cost a little time on every batch; fewer may cause a second pass.
MARGIN = 20


def locate_heads(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    *,
    k: int = 20,
    by: DirectScore | None = None,
    targets: Int[Tensor, " prompt"] | None = None,
    against: Against = None,
    final_norm: FinalNorm = "frozen",
    bias: bool = True,
    slack: float = SLACK,
    run: Run | None = None,
) -> TopHeads:
    """Locate the k heads that add most to the answer, on average over any number of prompts, certified exact.

    `by` is "contrast", what a head adds to log p(target) − log Σ p(against), or "increase", what it adds to
    log p(target), as in the paper. `targets` defaults to the answers, `against` to the other labels of each prompt, and
    `by` to "contrast", or to "increase" if there is no token to compare with. For the other scores, see
    `locate_effects` and `locate_towers`. If there are several queries, intervals (`low`, `high`) resample them, and
    `selected` says how firm each place is: in which share of these draws the head is among the first k.

    Activations are kept for one batch at a time, so memory hardly grows with the number of prompts. `slack` (nats)
    allows for float32 rounding of the bounds. With `final_norm="own"` or a logit soft-cap, no bound exists, so every
    head is evaluated on every prompt and the result is not `certified`. With two labels, a single pass gives exact
    contrasts for all heads.

    `run` says where chunks are stored, how large batches are, and which processes share the work. Its folder holds
    every prompt's bounds and values, heads.parquet and heads.csv (the table), and result.json.

    Raise InputError for invalid `by`, `targets`, `against` or `k`, and like `Run`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> top = il.locate_heads(model, many, k=4)
        >>> top.value.shape, top.n_prompts, top.by
        (torch.Size([4]), 20, 'contrast')
        >>> il.locate_heads(model, many, k=4, by="increase").certified
        True
    """
    readout = {"final_norm": final_norm, "bias": bias}
    with _searching(model, prompts, k=k, by=by, targets=targets, against=against, slack=slack, run=run, **readout) as (
        search,
        stream,
    ):
        top = search.top(stream)
        stream.write_result({"heads": heads_table(top)}, heads_result(top))
    return top


def locate_with_effects(
    model: Any, batch: PromptBatch, *, k: int, by: DirectScore, final_norm: FinalNorm, bias: bool, run: Run
) -> tuple[TopHeads, pd.DataFrame]:
    """Return `locate_heads` and its table, with the columns of `effects_of_located`; both are those of one run."""
    with _searching(model, batch, k=k, by=by, final_norm=final_norm, bias=bias, run=run) as (search, stream):
        top = search.top(stream)
        drops = effects_of_located(model, batch, top.heads, stream, by=top.by)
        table = pd.concat([heads_table(top), drops], axis=1)
        stream.write_result({"heads": table}, heads_result(top, table))
    return top, table


@contextmanager
def _searching(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    *,
    k: int,
    by: DirectScore | None,
    run: Run | None,
    targets: Int[Tensor, " prompt"] | None = None,
    against: Against = None,
    slack: float = SLACK,
    **readout: Any,
) -> Iterator[tuple["_Search", ChunkStream]]:
    """Yield the checked search of `locate_heads`, and the stream of its run."""
    batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    by, chosen, others = choose_tokens(ModelView.of(model), batch, by, targets, against)
    asked = tensors_digest(targets=targets, against=batch.against if against is None else against)
    k = check_k(k, len(ModelView.of(model).heads()), "heads")
    search = _Search(model, batch, chosen, others, by=by, k=k, slack=slack, **readout)
    options = {"k": k, **readout, **({} if slack == SLACK else {"slack": slack})}
    with start(run, model, batch, by, options | asked) as stream:
        yield search, stream


def mean_head_increases(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    *,
    against: Against = None,
    run: Run | None = None,
) -> Float[Tensor, "layer head"]:
    """Return every head's exact mean log-probability increase over any number of prompts, nats, in float64.

    All heads are evaluated on all prompts. With enough prompts (68 for GPT-2 large), W_O · W_U is multiplied out once
    per group of prompts, which is faster; fewer prompts and soft-caps take the slower path. With `against`, return mean
    contrasts, which need no projection onto the vocabulary. `run` is that of `locate_heads`; its folder holds the sums
    of each group. Raise InputError for invalid `against`, and like `Run`.
    """
    batch, view = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts), ModelView.of(model)
    readout_options = {"final_norm": "frozen", "bias": True}
    options = {**readout_options, **tensors_digest(targets=None, against=against)}
    targets = check_targets(view, batch)
    search = _Search(model, batch, targets, check_against_ids(view, targets, against), **readout_options)
    n_logit_rows = LOGIT_BYTES // (view.model.W_U.shape[1] * 4)
    group_size = max(4 * min_prompts_to_fold(view.d_head, view.d_model), n_logit_rows)
    groups: list[list[list[int]]] = [[]]
    for rows in plan_batches(view, batch, run):
        if sum(map(len, groups[-1])) >= group_size:
            groups.append([])
        groups[-1].append(rows)
    plan = [list(chain.from_iterable(group)) for group in groups]

    def compute(number: int) -> dict[str, Any]:
        captured: list[tuple[Readout, Tensor, Tensor]] = []
        for rows in groups[number]:
            acts, readout = search.capture(rows)
            captured.append((readout, acts.resid_pre, acts.scaled_z))
            del acts
        readouts, x, z = zip(*captured, strict=True)
        readout = replace(readout, scale=torch.cat([one.scale for one in readouts]))
        increases = every_head_increase(view, readout, torch.cat(x), torch.cat(z), *search.tokens(plan[number]))
        return {"sum": increases.double().sum(0).flatten().cpu().numpy()}

    total = np.zeros(view.n_layers * view.n_heads)
    with start(run, model, batch, "all increases", options, plan=plan) as stream:
        for _, chunk in stream.chunks("heads", range(len(plan)), compute):
            total += chunk.column("sum").to_numpy()
    mean = stream.distributed.broadcast(torch.from_numpy(total / len(batch)))
    return mean.unflatten(0, (view.n_layers, view.n_heads))


def top_heads_by(
    model: Any,
    batch: PromptBatch,
    k: int,
    *,
    by: Score | None = None,
    run: Run | None = None,
) -> list[Head]:
    """Return the k heads with the largest mean score (see `icl_lens.head_scores`).

    The default is contrast, or increase for prompts without other labels. For prompts without an answer, the model's
    most probable label is used. Raise InputError if `k` exceeds the number of heads and, for "towers", for prompts that
    do not demonstrate their answer and another label.
    """
    view = ModelView.of(model)
    k = check_k(k, view.n_layers * view.n_heads, "heads")
    by = choose_score(by, SCORES, comparable=batch.has_several_labels)
    if bool((batch.answer < 0).any()):
        predicted = torch.cat([most_probable(score(model, rows), rows.label_mask) for rows in batch.split(MAX_ROWS)])
        batch = with_answers(batch, torch.where(batch.answer < 0, predicted.to(batch.answer.device), batch.answer))
    if by == "effect":
        return locate_effects(model, batch, k=k, run=run).top(k)
    if by == "towers":
        return locate_towers(model, batch, k=k, run=run).top(k)
    return locate_heads(model, batch, k=k, by=by, run=run).heads


class _Search:
    """Checked inputs of a search, and what it computes from one batch."""

    def __init__(
        self,
        model: Any,
        batch: PromptBatch,
        targets: Int[Tensor, " prompt"],
        against: CheckedAgainst,
        *,
        by: DirectScore = "increase",
        k: int = 0,
        slack: float = SLACK,
        **readout_options: Any,
    ):
        self.model, self.view, self.readout_options = model, ModelView.of(model), readout_options
        self.by: DirectScore = by
        self.k, self.slack = k, slack
        self.batch, self.targets, self.against = batch, targets, against

    def top(self, stream: ChunkStream) -> TopHeads:
        """Return the k heads with the largest mean scores, in every process."""
        n_heads = self.view.n_layers * self.view.n_heads
        plan, k = stream.plan, self.k
        means, evaluated = HeadMeans(n_heads, self.by), list[np.ndarray]()
        counts, query_of = draw_clusters(self.batch.queries)
        resampled = ResampledSums(counts, n_heads)

        def add_to_draws(number: int, heads: np.ndarray, increase: np.ndarray) -> None:
            for row, values in zip(plan[number], increase, strict=True):
                resampled.add(values, int(query_of[row]), heads)

        # The pilot batch selects the candidates, so all processes need it.
        pilot = stream.first(lambda number: self.first_pass(plan[number], k + MARGIN))
        candidates = read_increases(pilot, self.view.n_heads)[1]
        rest = stream.chunks(
            "part",
            range(1, len(plan)),
            lambda number: self.first_pass(plan[number], k, candidates),
            done=len(plan[0]),
        )
        for number, chunk in chain([(0, pilot)], rest):
            bound, heads, increase = read_increases(chunk, self.view.n_heads)
            means.add(bound, heads, increase)
            add_to_draws(number, heads, increase)
            evaluated.append(heads)

        def heads_to_refine() -> dict[int, np.ndarray]:
            undecided = means.undecided_heads(k, self.slack)
            lacking = {number: np.setdiff1d(undecided, heads) for number, heads in enumerate(evaluated)}
            return {number: heads for number, heads in lacking.items() if len(heads)}

        lacking = stream.distributed.run_on_main(heads_to_refine)
        for number, chunk in stream.chunks(
            "refined", sorted(lacking), lambda number: self.second_pass(plan[number], lacking[number])
        ):
            heads, increase = read_increases(chunk, self.view.n_heads)[1:]
            means.add_exact(heads, increase)
            add_to_draws(number, heads, increase)

        def top() -> TopHeads:
            found = means.top(k, self.view.n_heads, self.batch.n_prompts)
            if counts.shape[1] < 2:
                return found
            located = (found.layer * self.view.n_heads + found.head).numpy()
            n_prompts = np.bincount(query_of, minlength=counts.shape[1])
            # Sums of other heads lack prompts.
            complete = np.flatnonzero(means.n_exact == means.n_rows)
            shares = *resampled.ends(n_prompts, located), resampled.selected(k, n_prompts, complete)[located]
            return replace(found, **dict(zip(("low", "high", "selected"), map(torch.from_numpy, shares), strict=True)))

        return replace(stream.distributed.run_on_main(top), edits=active_edits(self.view))

    def capture(self, rows: list[int]) -> tuple[Activations, Readout]:
        """Return the activations of some prompts, and their readout with the options of the search."""
        acts = capture(self.model, self.batch[rows])
        return acts, acts.readout.using(**self.readout_options)

    def tokens(self, rows: list[int]) -> tuple[Int[Tensor, " row"], CheckedAgainst]:
        """Return the targets of some prompts, and their tokens in `against`."""
        return self.targets[rows], select_rows(self.against, rows)

    def first_pass(
        self, rows: list[int], n_leading: int, candidates: Sequence[int] | np.ndarray = ()
    ) -> dict[str, Any]:
        """Return bounds for all heads, and exact increases of the candidates and of the batch's `n_leading` top heads.

        If bounds are exact (a linear contrast) or do not exist, all heads are evaluated exactly.
        """
        acts, readout = self.capture(rows)
        targets, against = self.tokens(rows)
        linear = linear_direction(readout, targets, against) is not None
        if linear or not readout.is_affine:
            found = every_head_increase(acts.view, readout, acts.resid_pre, acts.scaled_z, targets, against)
            exact = found.flatten(1).cpu().numpy()
            return self.columns(rows, exact if linear else None, np.arange(exact.shape[1]), exact)
        base, g = layer_gradients(acts, targets, readout, against=against)
        bound = head_bounds(acts, g).flatten(1)
        leading = bound.double().mean(0).topk(min(n_leading, bound.shape[1])).indices.cpu().numpy()
        heads = np.union1d(np.asarray(candidates, dtype=leading.dtype), leading)
        increase = exact_head_increases(acts, targets, readout, heads, base, against=against)
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
