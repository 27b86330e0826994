"""Compare estimates of edges with exact effects, with what the first edges of each ranking keep, and with their cost.

All methods rank the same edges into the same located heads on the same prompts, with the same means in place of removed
writers. Exact effects, and what the first edges keep, are those of held-out prompts.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import icl_lens as il
from experiments.benchmark.edge_attribution import attribute_edges, counted
from experiments.benchmark.timing import machine
from experiments.common import Study
from experiments.markdown_table import table as markdown_table
from icl_lens.edits.edges import writer_means
from icl_lens.edits.edit import Part
from icl_lens.edits.reader import Means
from icl_lens.files import write_text
from icl_lens.intervals import percentile_ends, resampled_means
from icl_lens.locate.circuit import log_odds_without
from icl_lens.locate.edge_space import EdgeSpace
from icl_lens.measures.effects import log_odds
from icl_lens.measures.head_to_head_effects import estimate_effects
from icl_lens.models.inference import log_probs_of
from icl_lens.models.view import ModelView
from icl_lens.prompts.roles import EdgeRole, role_masks

CELLS = (
    ("icl-mini", ["--task", "sentiment-number"], 48, None, 3),
    ("smollm2-135m", "--task animal-country --labels B,A --demonstrations 4 --separator \\n".split(), 60, 300, 1),
)
"""Model, options of its task, most prompts of each half, edges whose exact effects are measured (None: all), runs."""
N_KEPT, SHARE, N_FIRST, N_RANDOM = 30, 0.01, 60, 20
"""Edges kept, as a number and as a share; first edges of each ranking in the sample; random rankings."""
SETS_AT_ONCE, PROMPTS_AT_ONCE = 400, 24
OURS, EXACT = "first order, z exact (ours)", "exact (ours)"
METHODS: dict[str, Callable[..., dict[il.Head, Tensor]]] = {
    OURS: estimate_effects,
    "EAP": attribute_edges,
    "EAP-IG, 5 steps of the model's inputs": lambda *given: attribute_edges(*given, path="inputs"),
    "EAP-IG, 5 steps of the readers' inputs": lambda *given: attribute_edges(*given, path="readers"),
}
KINDS = ("head", "FFN", "embedding")
ESTIMATES = ["forwards", "backwards", "CPU seconds", "× ours", "error, % by kind", "rank correlation, same prompts"]
HELD_OUT = ["rank correlation", *(f"{kind}s" for kind in KINDS), f"first {N_KEPT} in common"]
HELD_OUT += [f"kept by the first {N_KEPT}, % (random)", f"kept by the first {SHARE:.0%}, % (random)"]
"""Columns of the table of estimates on the prompts that rank the edges, and of that on held-out prompts."""

EXPLANATION = f"""
All methods rank the same edges: from heads, FFNs and embeddings to the queries, keys and values of the heads located by
contrast, at tokens of one role. All replace what a writer wrote by its mean over tokens of the role, and rank on the
same prompts. EAP ([Syed et al.](https://arxiv.org/abs/2310.10348)) and EAP-IG are implemented here from their formulas
(`experiments/benchmark/edge_attribution.py`). EAP-IG in steps of the model's inputs is that of
[Hanna et al.](https://arxiv.org/abs/2403.17806); steps of the readers' inputs follow the path of activations in
[MIB](https://arxiv.org/abs/2504.13151).

Forward and backward passes are counted by hooks in blocks, relative to one pass over all prompts. CPU seconds are those
of one thread (medians), without the pass for the means. *Error* is Σ|estimate − exact| ÷ Σ|exact| on the same prompts,
for edges from heads / FFNs / embeddings. *Rank correlations* (Spearman) compare estimates with exact effects, on the
prompts that rank the edges and on held-out prompts. Where not all edges are measured, they are the first {N_FIRST} of
each ranking and random others. *Kept* is the share of what all edges carry on held-out prompts when only the first
edges are kept, as in `il.locate_circuit`, and in parentheses for random edges of the same parts, roles and layers.
Brackets are 95% intervals over queries.
"""


def kinds_of(space: EdgeSpace) -> Int[np.ndarray, " edge"]:
    """Return whether each edge's writer is a head, an FFN or an embedding, as an index into `KINDS`."""
    names = [space.writers[reader][writer] for reader, writer in space.index[:, [0, 3]]]
    return np.array([0 if name.startswith("L") else 1 if name.startswith("F") else 2 for name in names])


def sampled_edges(
    kinds: Int[np.ndarray, " edge"], rankings: Sequence[Int[np.ndarray, " edge"]], n: int | None
) -> Int[np.ndarray, " n"]:
    """Return the first edges of all rankings and random others, as many of each kind as there are; all for None."""
    if n is None:
        return np.arange(len(kinds))
    first = np.unique(np.concatenate([ranked[:N_FIRST] for ranked in rankings]))
    others = np.random.default_rng(0).permutation(np.setdiff1d(np.arange(len(kinds)), first))
    for kind in np.argsort([(kinds[others] == kind).sum() for kind in range(len(KINDS))]):  # the rarest first
        missing = max(0, n // len(KINDS) - int((kinds[first] == kind).sum()))
        first = np.concatenate([first, others[kinds[others] == kind][:missing]])
    return np.sort(first)


def log_odds_of(
    view: ModelView, batch: il.PromptBatch, space: EdgeSpace, means: Means, removed: Float[np.ndarray, "set edge"]
) -> Float[np.ndarray, "batch set"]:
    """Return the answer's log-odds without each set of edges, for a few prompts and a few hundred sets at a time."""
    pieces = np.array_split(removed.astype(bool), -(-len(removed) // SETS_AT_ONCE))
    found = [
        [log_odds_without(view, some, space.removal_masks(one), means, n_sets=len(one)) for one in pieces]
        for some in batch.split(PROMPTS_AT_ONCE)
    ]
    return torch.cat([torch.cat(row, dim=1) for row in found]).double().numpy()


def with_draws(values: Float[np.ndarray, "prompt set"], batch: il.PromptBatch) -> Float[np.ndarray, "draw set"]:
    """Return means over prompts: row 0 is the data, the others are bootstrap draws of queries."""
    return np.concatenate([values.mean(0, keepdims=True), resampled_means(values, batch.queries)])


def _rank_correlation(x: Float[np.ndarray, "*#draw edge"], y: Float[np.ndarray, "*#draw edge"]) -> np.ndarray:
    return (
        il.metrics.spearman(torch.from_numpy(x), torch.from_numpy(y)).nan_to_num(0.0).numpy()
    )  # 0 where one is constant


def interval(draws: Float[np.ndarray, " draw"], spec: str = "z.2f") -> str:
    """Return the first value with the 95% interval of the others."""
    low, high = percentile_ends(draws[1:])
    return f"{draws[0]:{spec}} [{low:{spec}}, {high:{spec}}]".replace("-", "−")


def compare(
    model: Any,
    locating: il.PromptBatch,
    testing: il.PromptBatch,
    readers: Sequence[il.Head],
    *,
    n_sampled: int | None,
    repeats: int = 3,
) -> tuple[list[list[str]], list[str]]:
    """Return the rows of both tables as one, and sentences on how our estimates differ from the others."""
    view = ModelView.of(model)
    means, space = writer_means(model, locating), EdgeSpace.of(view, readers)
    kinds, n = kinds_of(space), len(space)
    sizes = (min(N_KEPT, n), max(1, round(SHARE * n)))
    by_prompt, costs = dict[str, np.ndarray](), dict[str, tuple[float, float]]()
    seconds: dict[str, list[float]] = {label: [] for label in (*METHODS, EXACT)}

    def measured(label: str, run: Callable[[], Any]) -> Any:
        start = time.process_time()
        with counted(view, locating) as passes:
            found = run()
        seconds[label].append(time.process_time() - start)
        costs[label] = passes.forwards, passes.backwards
        return found

    for label, method in [*METHODS.items()] * repeats:
        found = measured(label, lambda method=method: method(model, locating, readers, means))
        by_prompt[label] = space.flatten(found).double().numpy()
    ranked = {label: np.argsort(-np.abs(values.mean(0)), kind="stable") for label, values in by_prompt.items()}
    sample = sampled_edges(kinds, list(ranked.values()), n_sampled)
    single = np.zeros((1 + len(sample), n))
    single[np.arange(1, len(single)), sample] = 1
    own = measured(EXACT, lambda: log_odds_of(view, locating, space, means, single))
    same = {label: with_draws(values[:, sample], locating) for label, values in by_prompt.items()}  # draw, edge
    same[EXACT] = with_draws(own[:, :1] - own[:, 1:], locating)
    if len(sample) == n:
        ranked[EXACT] = np.argsort(-np.abs(same[EXACT][0]), kind="stable")

    chosen = [np.arange(n), np.array([], dtype=int)]
    for order in ranked.values():
        chosen += [order[:size] for size in sizes]
        for number in range(N_RANDOM):
            chosen += space.random_like(order, sizes, seed=number)
    removed = np.ones((len(chosen), n))
    for row, edges in enumerate(chosen):
        removed[row, edges] = 0
    draws = with_draws(log_odds_of(view, testing, space, means, np.concatenate([single, removed])), testing)
    exact, kept = draws[:, :1] - draws[:, 1 : len(single)], draws[:, len(single) :]
    kept = 100 * ((kept - kept[:, 1:2]) / (kept[:, :1] - kept[:, 1:2]))[:, 2:]
    kept = kept.reshape(len(draws), len(ranked), 1 + N_RANDOM, len(sizes))
    of_method = dict(zip(ranked, kept.swapaxes(0, 1), strict=True))  # draw, ranking (0: the method's own), size
    correlations = {
        label: (_rank_correlation(values, same[EXACT]), _rank_correlation(values[:1], exact))
        for label, values in same.items()
    }
    rows = []
    for label, values in same.items():
        by_kind, errors = [], []
        for kind in range(len(KINDS)):
            some = kinds[sample] == kind
            by_kind.append(interval(_rank_correlation(values[:1, some], exact[:, some])))
            true = same[EXACT][0, some]
            errors.append(f"{100 * np.abs(values[0, some] - true).sum() / np.abs(true).sum():.0f}")
        first, largest = (set(np.argsort(-np.abs(effects))[:N_KEPT]) for effects in (values[0], exact[0]))
        median, (forwards, backwards) = statistics.median(seconds[label]), costs[label]
        cells = [f"{label}, {len(sample):,} of {n:,} edges" if label == EXACT else label, f"{forwards:.1f}"]
        cells += [f"{backwards:.1f}", f"{median:.3g}", f"{median / statistics.median(seconds[OURS]):.2f}"]
        cells += [" / ".join(errors), *map(interval, correlations[label]), *by_kind, f"{len(first & largest)}"]
        for i in range(len(sizes)):
            shown = of_method.get(label)
            random = "" if shown is None else f" ({shown[0, 1:, i].mean():z.0f})".replace("-", "−")
            cells.append("–" if shown is None else interval(shown[:, 0, i], "z.0f") + random)
        rows.append(cells)
    sentences = [f"{len(readers)} readers, {n:,} edges, {len(locating)} + {len(testing)} prompts."]
    for label in METHODS:
        if label != OURS:
            parts = [
                f"rank correlation, {prompts}, {interval(ours - theirs, '+.3f')}"
                for prompts, ours, theirs in zip(
                    ("same prompts", "held-out"), correlations[OURS], correlations[label], strict=True
                )
            ]
            for i, size in enumerate(sizes):
                difference = of_method[OURS][:, 0, i] - of_method[label][:, 0, i]
                parts.append(f"kept by the first {size} edges {interval(difference, '+.1f')} points")
            sentences.append(f"Ours − {label}: {', '.join(parts)}.")
    return rows, sentences


def direct_path_drops(
    model: Any, batch: il.PromptBatch, reference: il.PromptBatch, source: il.Head, part: Part, role: EdgeRole
) -> Float[Tensor, "layer head"]:
    """Return TransformerLens' direct path patching from one head's mean over a role, as drops in mean log-odds, nats.

    Every later head is a reader, at all tokens, and each costs a forward pass. Only for TransformerLens 4, and for
    keys and values of models without grouped queries.
    """
    from transformer_lens import ActivationCache
    from transformer_lens.patching import get_act_patch_direct_path

    name = ModelView.of(model).hook(source.layer, "attn.hook_z")

    def z_of(prompts: il.PromptBatch) -> tuple[Tensor, Tensor]:
        _, cache = model.run_with_cache(prompts.tokens, names_filter=name, attention_mask=prompts.attention_mask)
        return cache[name], role_masks(prompts, [role])[:, 0]

    def metric(logits: Tensor) -> Tensor:
        log_probs = log_probs_of(logits[torch.arange(len(batch)), batch.last])
        own = log_probs.gather(1, batch.answer_tokens[:, None])
        return log_odds(log_probs, own, batch.other_label_tokens, torch.arange(len(batch))).mean()

    with torch.no_grad():
        (z, at), (other, other_at) = z_of(batch), z_of(reference)
        replaced = torch.where(at[..., None, None], other[other_at].mean(0), z)
        clean, corrupted = (ActivationCache({name: one}, model) for one in (replaced, z))
        patched = get_act_patch_direct_path(
            model, batch.tokens, clean, corrupted, metric, source.layer, source.head, component=part, verbose=False
        )
        own = metric(model(batch.tokens, attention_mask=batch.attention_mask, return_type="logits"))
    return own - patched


def direct_path(model: Any, locating: il.PromptBatch, testing: il.PromptBatch, readers: Sequence[il.Head]) -> str:
    """Time TransformerLens' direct path patching from one head to all later queries beside ours to the last reader."""
    view, reader = ModelView.of(model), max(readers)
    source = il.Head(reader.layer - 1, 0)
    start = time.process_time()
    theirs = float(direct_path_drops(model, testing, locating, source, "q", "last")[reader])
    seconds = time.process_time() - start
    n = (view.n_layers - reader.layer) * view.n_heads
    start = time.process_time()
    found = il.head_to_head_effects(model, testing, [reader], part="q", reference=locating)
    ours, each = found.log_odds.mean(0)[0], (time.process_time() - start) / len(found.writers)
    off = abs(theirs - float(ours[found.writers.index(str(source))]))
    return (
        f"TransformerLens' direct path patching takes {seconds / n:.3g} s per edge ({n} readers of {source}), "
        f"ours {each:.3g} s ({len(found.writers)} writers to {reader}); {source} → {reader}.q differs by {off:.0e}."
    )


def edge_methods(device: str) -> Iterator[str]:
    """Measure all cells; yield the page after each."""
    lines = ["# Benchmark of edges", "", "Made by `python -m experiments.benchmark.edge_methods`; one run.", ""]
    lines += [f"* {machine()}", EXPLANATION]
    for name, task_options, n, n_sampled, repeats in CELLS:
        options = ["--model", name, *task_options, "-n", str(n)]
        study = Study.from_command_line("edge-methods", "", options).with_model(il.load_model(name, device=device))
        locating, testing = study.halves()
        given = study.model, locating, testing, study.located_heads("contrast")
        rows, sentences = compare(*given, n_sampled=n_sampled, repeats=repeats)
        split = 1 + len(ESTIMATES)
        of_estimates = markdown_table(["", *ESTIMATES], [row[:split] for row in rows])
        held_out = markdown_table(["", *HELD_OUT], [[row[0], *row[split:]] for row in rows])
        lines += [f"## {name}, {study.task_name}", "", of_estimates, "", "On held-out prompts:", "", held_out, ""]
        lines += [*(f"* {sentence}" for sentence in [*sentences, direct_path(*given)]), ""]
        yield "\n".join(lines)


PAGE = Path(__file__).parents[2] / "docs" / "benchmark-edges.md"


def main() -> None:
    """Measure all methods and write the page, again after each model."""
    for page in edge_methods("cuda" if torch.cuda.is_available() else "cpu"):
        write_text(PAGE, page)


if __name__ == "__main__":
    main()
