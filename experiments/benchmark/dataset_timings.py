"""Timings over many prompts: locating heads, the effects of removing heads or edges, and bias fixes."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import icl_lens as il
from experiments.benchmark.report import Row
from experiments.benchmark.variants import K, forward_only, timed
from icl_lens.activations.passes import last_log_probs
from icl_lens.edits.edit import PARTS
from icl_lens.locate.locate import mean_head_increases
from icl_lens.models.memory import PASS_TOKENS
from icl_lens.models.view import ModelView
from icl_lens.runs.stream import plan_batches


def time_in_alternation(
    repeats: int, first: Callable[[], Any], second: Callable[[], Any]
) -> tuple[float, float, Any, Any]:
    """Return the median seconds of two functions, timed in alternation, and what each returned last."""
    turns = [(timed(first), timed(second)) for _ in range(repeats)]
    one, other = (statistics.median(turn[i][0] for turn in turns) for i in (0, 1))
    return one, other, turns[-1][0][1], turns[-1][1][1]


def forward_over(model: Any, batch: il.PromptBatch) -> Callable[[], None]:
    """Return a function that runs the model over the batches that location makes of `batch`; warm up on the first."""
    plan = plan_batches(ModelView.of(model), batch)
    forward_only(model, batch[plan[0]])

    def run() -> None:
        for rows in plan:
            forward_only(model, batch[rows])

    return run


def locating(model: Any, name: str, batch: il.PromptBatch, *, repeats: int, check: bool) -> Iterator[Row]:
    """Time locating heads over many prompts, relative to forward passes; with `check`, compare with all means."""
    view = ModelView.of(model)
    n_heads = view.n_layers * view.n_heads
    k = min(K, n_heads)
    prompts = f"{len(batch):,} prompts"
    forward, seconds, _, top = time_in_alternation(
        repeats, forward_over(model, batch), lambda: il.locate_heads(model, batch, k=k, by="increase")
    )
    yield Row(name, prompts, "bare forward", forward, 1.0, repeats)
    exact = f"{top.n_exact} of {n_heads} heads; {100 * top.share_evaluated:.1f}% of evaluations"
    note = f"largest bound left out {top.unevaluated_bound:.3f}, last head {float(top.value[-1]):.3f} nats"
    yield Row(
        name, prompts, f"top {k} heads by exact mean, certified", seconds, seconds / forward, repeats, exact, note
    )
    if check:
        seconds, mean = timed(lambda: mean_head_increases(model, batch))
        best = mean.flatten().topk(k)
        same = sorted(best.indices.tolist()) == sorted((top.layer * view.n_heads + top.head).tolist())
        error = float((best.values - top.value).abs().max())
        note = f"{'the same' if same else 'OTHER'} {k} heads; values differ by at most {error:.0e} nats"
        label = "every head's exact mean (W_O·W_U)"
        yield Row(name, prompts, label, seconds, seconds / forward, 1, f"{n_heads} of {n_heads} heads", note)


def mean_effects(model: Any, name: str, batch: il.PromptBatch, *, repeats: int) -> Iterator[Row]:
    """Time every head's mean effect at the last position, streamed, relative to forward passes over these batches."""
    forward, seconds, *_ = time_in_alternation(
        repeats, forward_over(model, batch), lambda: il.locate_effects(model, batch)
    )
    label = "every head's mean effect at the last position, with intervals"
    yield Row(name, f"{len(batch):,} prompts", label, seconds, seconds / forward, repeats)


def shares(model: Any, name: str, batch: il.PromptBatch) -> Iterator[Row]:
    """Measure the share of subheads evaluated for each prompt's top 20: all prompts, and those with unsure answers."""
    n_exact, n_parts, margin = [], [], []
    for chunk in batch.split(50):
        acts = il.capture(model, chunk)
        top = il.top_subheads(acts, k=K, by="increase")
        n_exact.append(top.n_exact.double())
        n_parts.append(top.n_parts.double())
        best = acts.label_log_probs.topk(min(2, acts.label_log_probs.shape[1]), dim=-1).values
        margin.append(best[:, 0] - best[:, -1])
    exact, parts, sure = torch.cat(n_exact), torch.cat(n_parts), torch.cat(margin)
    unsure = sure.argsort()[: max(1, len(sure) // 10)]
    for label, rows in (("all prompts", slice(None)), ("the tenth where the model is least sure", unsure)):
        share = 100 * float((exact[rows] / parts[rows]).mean())
        yield Row(
            name,
            f"{len(exact[rows]):,} prompts",
            f"certified top {K} subheads, {label}",
            parts=f"{float(exact[rows].mean()):.1f} of {float(parts[rows].mean()):.0f} ({share:.2f}%), "
            f"at most {int(exact[rows].max())}",
            note=f"labels' log-probabilities at most {float(sure[rows].max()):.2f} nats apart",
        )


def removing(model: Any, name: str, batch: il.PromptBatch, *, repeats: int) -> Iterator[Row]:
    """Time the effect of removing every head, relative to one full forward pass per head and prompt."""
    view = ModelView.of(model)
    rows = [row for row in range(len(batch)) for _ in range(view.n_heads)]
    pieces = list(batch[rows].split(max(1, PASS_TOKENS // batch.tokens.shape[1])))
    one_layer, restarted, *_ = time_in_alternation(
        repeats,
        lambda: [last_log_probs(model, piece) for piece in pieces],
        lambda: il.head_effects(model, batch, positions="all"),
    )
    whole = view.n_layers * one_layer
    prompts = f"{len(batch):,} prompts"
    yield Row(
        name, prompts, "one forward pass per head", whole, 1.0, repeats, note="one layer's heads timed, times layers"
    )
    note = "ratio to one forward pass per head"
    label = "effect of removing every head, restarted at its layer"
    yield Row(name, prompts, label, restarted, restarted / whole, repeats, note=note)


STRENGTHS = (0.25, 0.5, 0.75, 1.0)


def fixing(model: Any, name: str, batch: il.PromptBatch, *, repeats: int) -> Iterator[Row]:
    """Time both bias fixes in a quarter of the heads, at several strengths: one pass for each, and all in one batch."""
    heads = ModelView.of(model).heads()[::4]
    fixes = [il.debias_edits(batch, heads, majority=one) for one in STRENGTHS]
    fixes += [il.debias_edits(batch, heads, recency=one) for one in STRENGTHS]

    def one_by_one() -> list[Tensor]:
        found = []
        for fix in fixes:
            with il.edited(model, *fix, batch=batch):
                found.append(il.score(model, batch))
        return found

    whole, shared, each, found = time_in_alternation(repeats, one_by_one, lambda: il.score(model, batch, fixes))
    off = float((torch.stack(each, dim=1) - found).abs().max())
    prompts = f"{len(batch):,} × {batch.tokens.shape[1]}"
    yield Row(name, prompts, f"{len(fixes)} bias fixes, one by one", whole, 1.0, repeats)
    note = f"ratio to one by one; at most {off:.0e} nats apart"
    yield Row(name, prompts, f"{len(fixes)} bias fixes, in one batch", shared, shared / whole, repeats, note=note)


# Ways to compute every head's effect, with their labels in the table.
AT_LAST = {
    "exact": "effect of removing every head at the last position, shared keys",
    "gradient": "estimate of the same from gradients",
    "gradient all": "estimate of every head's effect at all positions from gradients",
}


def removing_at_last(model: Any, name: str, batch: il.PromptBatch, *, repeats: int) -> Iterator[Row]:
    """Time every head's effect at the last position, exact and estimated, in alternation with the bare forward pass."""
    times: dict[str, list[float]] = {}
    found: dict[str, il.results.HeadEffects] = {}
    forward_only(model, batch)
    for way in AT_LAST:
        positions, method = "all" if way == "gradient all" else "last", "exact" if way == "exact" else "gradient"
        *times[way], _, found[way] = time_in_alternation(
            repeats,
            lambda: forward_only(model, batch),
            lambda p=positions, m=method: il.head_effects(model, batch, positions=p, method=m),
        )
    exact, estimate = (found[way].log_prob.mean(0) for way in ("exact", "gradient"))
    agreed = il.metrics.agreement(exact, estimate, k=min(K, exact.numel()))
    prompts = f"{len(batch):,} × {batch.tokens.shape[1]}"
    n_heads = exact.numel()
    for way, label in AT_LAST.items():
        note = ""
        if way == "exact" and found[way].algorithm != "prefix_cache":
            note = f"{found[way].algorithm}: {found[way].fallback_reason}"
        elif way == "gradient":
            note = (
                f"Spearman with the exact effects {agreed.spearman:.3f}; {agreed.overlap} of their {agreed.k} largest"
            )
        forward, seconds = times[way]
        heads = f"{n_heads} heads" if way == "exact" else ""
        yield Row(name, prompts, label, seconds, seconds / forward, repeats, heads, note)


N_READERS = 20


def edges(model: Any, name: str, batch: il.PromptBatch, *, repeats: int) -> Iterator[Row]:
    """Time exact edges from all earlier heads into up to 20 heads of the last quarter of the layers."""
    view = ModelView.of(model)
    late = [head for head in view.heads() if 4 * head.layer >= 3 * view.n_layers]
    readers = late[:: max(1, len(late) // N_READERS)][:N_READERS]
    n_pairs = view.n_heads * sum(head.layer for head in readers)
    forward_only(model, batch)
    for part, what in zip(PARTS, ("queries", "keys", "values"), strict=True):
        forward, seconds, _, found = time_in_alternation(
            repeats,
            lambda: forward_only(model, batch),
            lambda part=part: il.head_to_head_effects(model, batch, readers, part=part),
        )
        note = f"one forward pass per pair takes {n_pairs * forward / seconds:.0f} times as long"
        if found.fallback_reason:
            note += f"; full passes: {found.fallback_reason}"
        label = f"exact edges from all earlier heads to the {what} of {len(readers)} heads"
        prompts = f"{len(batch):,} × {batch.tokens.shape[1]}"
        yield Row(name, prompts, label, seconds, seconds / forward, repeats, f"{n_pairs} pairs", note)
