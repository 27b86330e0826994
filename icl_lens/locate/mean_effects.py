"""Compute each head's mean ablation effect over any number of prompts, with intervals, in resumable chunks.

Chunks contain every prompt's effects. Means and intervals are accumulated in float64 in batch order, so memory does not
grow with the number of prompts, and a resumed run writes the same bytes. Intervals are those of
`icl_lens.metrics.bootstrap_interval` over queries: all draws are made before the first batch, and each prompt is added
to the sums of the draws that contain its query.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.attribution.increases import check_against_ids, check_target_ids, select_rows
from icl_lens.display import SHOWN_ROWS, ShownAsTable, format_signed, head_name, interval_texts, plural_prompts
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.edited_scores import score_sets
from icl_lens.interventions.editor import Positions
from icl_lens.interventions.effects import (
    SCORES,
    Algorithm,
    HeadEffects,
    Method,
    Score,
    head_effects,
    largest_means,
    logit_differences,
)
from icl_lens.locate.chunk import index_columns, read_index
from icl_lens.locate.distributed import Distributed
from icl_lens.locate.run_folder import RunFolder
from icl_lens.locate.stream import BYTE_BUDGET, ChunkStream, plan_batches
from icl_lens.metrics import draw_clusters, mean_intervals
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.progress import Progress, progress_callback
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize

# Confidence level of the intervals.
LEVEL = 0.95


def effect_columns(rows: list[int], effects: HeadEffects) -> dict[str, Any]:
    """Return a chunk's columns: prompt, layer, head, scores (nats), algorithm and fallback_reason."""
    found = {name: getattr(effects, name) for name in SCORES}
    scores = {name: values.flatten().cpu().numpy() for name, values in found.items() if values is not None}
    n_layers, n_heads = effects.log_prob.shape[1:]
    indices = pa.array(np.zeros(len(rows) * n_layers * n_heads, np.int8))
    return {
        **index_columns(np.array(rows), np.arange(n_layers * n_heads), n_heads),
        **scores,
        "algorithm": pa.DictionaryArray.from_arrays(indices, [effects.algorithm]),
        "fallback_reason": pa.DictionaryArray.from_arrays(indices, [effects.fallback_reason]),
    }


@dataclass(frozen=True)
class MeanScore:
    """Every head's mean effect on one score, nats, and its 95% bootstrap interval over queries.

    The interval is NaN if there is only one query; all values are NaN if no prompt has the score.
    """

    mean: Float[Tensor, "layer head"]
    low: Float[Tensor, "layer head"]
    high: Float[Tensor, "layer head"]


@dataclass(frozen=True, repr=False)
class MeanEffects(ShownAsTable):
    """Mean drop in the answer's score when each head is zero-ablated, nats; positive if the head helps the answer.

    The scores are those of `HeadEffects`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> found = il.locate_effects(model, many, positions="last")
        >>> found.log_prob.mean.shape, found.algorithms
        (torch.Size([8, 6]), {'prefix_cache': 20})
    """

    log_prob: MeanScore
    log_odds: MeanScore
    logit_diff: MeanScore | None
    positions: Positions
    algorithms: Mapping[Algorithm, int]
    """How many prompts each algorithm was used for."""
    fallback_reason: str
    """Why the prefix cache was not used for all effects at the last position; empty if it was used for all."""
    n_prompts: int
    n_queries: int
    """Number of distinct queries, which the intervals resample."""
    edits: tuple[str, ...] = ()
    """What else edited the model, with and without the head: open `with` blocks, and other hooks."""

    @property
    def exact(self) -> bool:
        """Whether heads were ablated; False for first-order estimates."""
        return "gradient" not in self.algorithms

    def top(self, k: int, *, by: Score = "log_prob") -> list[Head]:
        """Return the k heads with the largest mean effect on a score. Raise InputError if the score is missing."""
        check_choice("by", by, SCORES)
        score: MeanScore | None = getattr(self, by)
        return largest_means(None if score is None else score.mean, k, by=by)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per head, largest effect first, with columns for log p, log-odds and logit difference.

        The columns are rank, layer, head and name; effect, low and high (of log p); log_odds, log_odds_low and
        log_odds_high; and, with `against`, logit_diff, logit_diff_low and logit_diff_high.
        """
        heads = self.top(self.log_prob.mean.numel())
        index = tuple(np.array(heads).T)
        columns: dict[str, Any] = {
            "rank": np.arange(1, len(heads) + 1),
            "layer": index[0],
            "head": index[1],
            "name": [head_name(*head) for head in heads],
        }
        for name, mean, prefix in (
            ("log_prob", "effect", ""),
            ("log_odds", "log_odds", "log_odds_"),
            ("logit_diff", "logit_diff", "logit_diff_"),
        ):
            score: MeanScore | None = getattr(self, name)
            if score is not None:
                found = {mean: score.mean, f"{prefix}low": score.low, f"{prefix}high": score.high}
                columns |= {column: values[index].numpy() for column, values in found.items()}
        return pd.DataFrame(columns)

    def summary(self) -> str:
        """Return one or two sentences on the method, the number of prompts, and the intervals."""
        where = "at the last position" if self.positions == "last" else "at every position"
        method = "Exact: every head zeroed" if self.exact else "First-order estimates"
        n = f"{self.n_prompts:,} prompt{'s' * (self.n_prompts != 1)}"
        text = f"{method} {where} of {n}; 95% intervals over {self.n_queries:,} distinct queries."
        if self.fallback_reason:
            text += f" Partial forward passes where the prefix cache could not be used: {self.fallback_reason}."
        return text + (f" {edits_note(self.edits)}" if self.edits else "")

    def _shown(self) -> tuple[str, dict[str, list[Any]], int]:
        frame = self.to_frame().head(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {
            "head": frame["name"].tolist(),
            "log p drop": [format_signed(value) for value in frame["effect"]],
            "95% interval": interval_texts(frame),
            "log-odds drop": [format_signed(value) for value in frame["log_odds"]],
        }
        title = f"MeanEffects, nats: mean over {plural_prompts(self.n_prompts)}, each head zeroed separately"
        return title, columns, self.log_prob.mean.numel()


def locate_effects(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    *,
    targets: Int[Tensor, " prompt"] | None = None,
    against: Int[Tensor, " prompt"] | Int[Tensor, "prompt other"] | None = None,
    positions: Positions = "all",
    method: Method = "exact",
    batch_size: int | None = None,
    byte_budget: int = BYTE_BUDGET,
    folder: RunFolder | None = None,
    distributed: Distributed | None = None,
    progress: Progress | bool | None = None,
    warn: Callable[[str], None] | None = None,
) -> MeanEffects:
    """Return the mean effect of zeroing each head over any number of prompts, with intervals.

    `targets`, `against`, `positions` and `method` are those of `head_effects`. `positions="last"` is
    much faster than all positions. Intervals are 95% bootstrap intervals over queries, because prompts with the same
    query are not independent.

    Prompts run in batches, as in `locate_heads`, so memory hardly grows with their number. With a `folder`, every
    prompt's effects are stored there in chunks and existing chunks are reused; a corrupt chunk is reported through
    `warn` and recomputed. With `distributed`, each process computes a share of the batches, and all processes return
    the same result. `progress=True` shows a progress bar.

    Raise InputError for invalid `targets`, `against`, options or `batch_size`, for non-finite effects, and for a
    `folder` that is not writable or whose configuration does not have `by="effect"`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> found = il.locate_effects(model, many, against=many.other_label_tokens)
        >>> len(found.top(4, by="logit_diff")), found.exact
        (4, True)
    """
    batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    distributed = distributed or Distributed()
    view = ModelView.of(model)
    check_choice("positions", positions, ("all", "last"))
    check_choice("method", method, ("exact", "gradient"))
    targets = check_target_ids(view, batch.answer_tokens if targets is None else targets, len(batch))
    others = check_against_ids(view, targets, against)
    if folder is not None:
        folder.check_by("effect")
    plan = plan_batches(view, batch, batch_size=batch_size, byte_budget=byte_budget)

    def compute(number: int) -> dict[str, Any]:
        rows = plan[number]
        against_rows = select_rows(others, rows)
        found = head_effects(
            model, batch[rows], targets[rows], positions=positions, against=against_rows, method=method
        )
        return effect_columns(rows, found)

    counts, query_of_row = draw_clusters(batch.queries)
    counts = np.ascontiguousarray(counts.T)
    sums: dict[str, _Sums] = {}
    algorithms: dict[Algorithm, int] = {}
    fallback_reason = ""
    with progress_callback(progress) as report:
        stream = ChunkStream(plan, folder, distributed, report, warn)
        for chunk in stream.chunks("part", range(len(plan)), compute):
            rows, _ = read_index(chunk, view.n_heads)
            algorithm, reason = (chunk.column(name)[0].as_py() for name in ("algorithm", "fallback_reason"))
            algorithms[algorithm] = algorithms.get(algorithm, 0) + len(rows)
            fallback_reason = fallback_reason or reason
            present = [name for name in SCORES if name in chunk.column_names]
            scores = {name: chunk.column(name).to_numpy().reshape(len(rows), -1) for name in present}
            for i, query in enumerate(query_of_row[rows].tolist()):
                for name, values in scores.items():
                    sums.setdefault(name, _Sums(counts, values.shape[1])).add(values[i], query)

    def mean_effects() -> MeanEffects:
        means = {name: one.mean(name, view) for name, one in sums.items()}
        n_queries = len(sums["log_prob"].queries)
        scores = means["log_prob"], means["log_odds"], means.get("logit_diff")
        sizes = len(batch), n_queries
        return MeanEffects(*scores, positions, algorithms, fallback_reason, *sizes, edits=active_edits(view))

    return distributed.run_on_main(mean_effects)


def effects_of_located(
    model: Any,
    prompts: PromptBatch,
    heads: Sequence[Head],
    *,
    by: Literal["increase", "contrast"],
    batch_size: int | None = None,
    byte_budget: int = BYTE_BUDGET,
    folder: RunFolder | None = None,
    distributed: Distributed | None = None,
    progress: Progress | bool | None = None,
    warn: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Return the mean drop in the answer's score when each located head alone is zeroed at the last position.

    The table has one row per head. The score is log p(answer) for heads located `by` increase, and log p(answer) −
    log Σ p(other labels) by contrast. A head may rank first and have no effect, if later components compensate for it.
    The columns are effect (mean over prompts, nats) and its 95% interval over queries, effect_low and effect_high (NaN
    for a single query). Effects are exact. Only these heads are ablated: each costs one token per prompt, besides
    one pass over each prompt (see `head_effects`). With a `folder`, chunks named "effect" are stored and reused, as in
    `locate_heads`.
    """
    view, distributed = ModelView.of(model), distributed or Distributed()
    plan = plan_batches(view, prompts, batch_size=batch_size, byte_budget=byte_budget)
    targets = prompts.answer_tokens
    others = prompts.other_label_tokens if by == "contrast" else None

    def compute(number: int) -> dict[str, Any]:
        rows = plan[number]
        batch = prompts[rows]

        def score(log_probs: Tensor, within: Tensor) -> Tensor:
            own = log_probs.gather(1, targets[rows][within].to(log_probs.device)[:, None])
            return own if others is None else logit_differences(log_probs, own, others[rows], within)[0]

        sets = [[], *([head] for head in heads)]
        scores = score_sets(view, batch, sets, score, "last")[0][..., 0]
        drops = (scores[:, :1] - scores[:, 1:]).cpu().numpy()
        indices = np.array([head.layer * view.n_heads + head.head for head in heads])
        return index_columns(np.array(rows), indices, view.n_heads) | {"effect": drops.ravel()}

    drops = np.full((len(prompts), len(heads)), np.nan)
    with progress_callback(progress) as report:
        stream = ChunkStream(plan, folder, distributed, report, warn)
        for number, chunk in enumerate(stream.chunks("effect", range(len(plan)), compute)):
            drops[plan[number]] = chunk.column("effect").to_numpy().reshape(len(plan[number]), -1)

    def table() -> pd.DataFrame:
        mean, low, high = mean_intervals(drops, prompts.queries)
        return pd.DataFrame({"effect": mean, "effect_low": low, "effect_high": high})

    return distributed.run_on_main(table)


class _Sums:
    """Sums of one score over prompts, unweighted for the mean and weighted for every bootstrap draw.

    `counts` says how often each draw contains each query.
    """

    def __init__(self, counts: Int[np.ndarray, "query draw"], n_heads: int):
        self.counts = counts
        self.n = 0
        self.total = np.zeros(n_heads)
        self.resampled = np.zeros((counts.shape[1], n_heads))
        self.weight = np.zeros(counts.shape[1])
        self.queries: set[int] = set()

    def add(self, values: Float[np.ndarray, " head"], query: int) -> None:
        """Add one prompt's effects; a prompt without the score (all NaN) is skipped."""
        if np.isnan(values).all():
            return
        values, weights = values.astype(np.float64), self.counts[query]
        self.n += 1
        self.total += values
        # Elementwise, because the rounding of a matrix product depends on memory alignment.
        with np.errstate(invalid="ignore"):  # 0 · infinity; `mean` reports infinite effects
            self.resampled += weights[:, None] * values
        self.weight += weights
        self.queries.add(query)

    def mean(self, name: str, view: ModelView) -> MeanScore:
        """Return the means and intervals of score `name`; raise InputError if a mean is NaN or infinite."""
        shape = (view.n_layers, view.n_heads)
        missing = torch.full(shape, torch.nan, dtype=torch.float64)
        if not self.n:
            return MeanScore(missing, missing, missing)
        mean = self.total / self.n
        if not np.isfinite(mean).all():
            index = int(np.flatnonzero(~np.isfinite(mean))[0])
            raise InputError(
                f"the mean effect of {Head.from_index(index, view.n_heads)} ({name}) is NaN or infinite; load the "
                "model in bfloat16 or float32, or remove edits"
            )
        low = high = missing
        if len(self.queries) > 1:
            resampled = self.resampled[self.weight > 0] / self.weight[self.weight > 0, None]
            ends = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
            low, high = (torch.from_numpy(end).reshape(shape) for end in ends)
        return MeanScore(torch.from_numpy(mean).reshape(shape), low, high)
