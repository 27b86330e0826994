"""Compute each head's mean ablation effect over any number of prompts, with intervals, in resumable chunks.

Chunks contain every prompt's effects; `streamed_means` adds them up in batch order, so memory does not grow with the
number of prompts, and a resumed run writes the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from jaxtyping import Int
from torch import Tensor

from icl_lens.attribution.scored_tokens import Against, select_rows
from icl_lens.edits.ablate import Ablate
from icl_lens.edits.edit import Positions
from icl_lens.engine.score import score_sets
from icl_lens.errors import check_choice
from icl_lens.head_scores import DirectScore
from icl_lens.intervals import mean_intervals
from icl_lens.locate.chunk import index_columns, repeated_column
from icl_lens.locate.streamed_means import MeanScore, StreamedMeans, heads_frame
from icl_lens.measures.effects import (
    OUTCOMES,
    Algorithm,
    HeadEffects,
    Method,
    Outcome,
    answer_outcomes,
    estimated_effects,
    exact_effects,
    largest_means,
    outcome_tokens,
)
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize
from icl_lens.result.base import Result
from icl_lens.result.head_findings import list_finding
from icl_lens.result.number_format import signed
from icl_lens.result.tables import SHOWN_ROWS, format_share, interval_texts, plural_prompts, selected_note
from icl_lens.result.view import View, table_view
from icl_lens.runs.configuration import tensors_digest
from icl_lens.runs.run import Run
from icl_lens.runs.stream import ChunkStream, start


def effect_columns(rows: list[int], effects: HeadEffects) -> dict[str, Any]:
    """Return a chunk's columns: prompt, layer, head, log_odds, log_prob, algorithm and fallback_reason."""
    n_layers, n_heads = effects.log_prob.shape[1:]
    n_rows = len(rows) * n_layers * n_heads
    return {
        **index_columns(np.array(rows), np.arange(n_layers * n_heads), n_heads),
        **{name: getattr(effects, name).flatten().cpu().numpy() for name in OUTCOMES},
        "algorithm": repeated_column(effects.algorithm, n_rows),
        "fallback_reason": repeated_column(effects.fallback_reason, n_rows),
    }


@dataclass(frozen=True, repr=False)
class MeanEffects(Result):
    """What the answer loses on average when each head is zero-ablated, nats; positive if the head helps the answer.

    `log_prob` and `log_odds` are those of `HeadEffects`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> found = il.locate_effects(model, many)
        >>> found.log_odds.mean.shape, found.algorithms
        (torch.Size([8, 6]), {'prefix_cache': 20})
    """

    version: ClassVar[int] = 2
    log_prob: MeanScore
    log_odds: MeanScore
    positions: Positions
    algorithms: Mapping[Algorithm, int]
    """How many prompts each algorithm was used for."""
    fallback_reason: str
    """Why the prefix cache was not used for all effects at the last position; empty if it was used for all."""
    n_prompts: int
    n_queries: int
    """Number of distinct queries, which the intervals resample."""
    k: int
    """Number of heads of the list that `selected` refers to."""
    edits: tuple[str, ...] = ()
    """What else edited the model, with and without the head: open `with` blocks, and other hooks."""

    @property
    def exact(self) -> bool:
        """Whether heads were ablated; False for first-order estimates."""
        return "gradient" not in self.algorithms

    @property
    def has_log_odds(self) -> bool:
        """Whether any prompt has log-odds, that is, tokens to compare the answer with."""
        return not bool(self.log_odds.mean.isnan().all())

    def top(self, k: int, *, outcome: Outcome | None = None) -> list[Head]:
        """Return the k heads with the largest mean effects on an outcome, as in `HeadEffects.top`."""
        return largest_means({name: getattr(self, name).mean for name in OUTCOMES}, k, outcome)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per head, largest effect first.

        The columns are name; effect, low and high: the log-odds lost or, if no prompt has log-odds, log p; selected:
        the share of draws of queries in which the head is among the first `k` by effect; log_prob, log_prob_low and
        log_prob_high: log p lost; rank, layer and head.
        """
        heads = self.top(self.log_prob.mean.numel())
        effect, log_prob = self.log_odds if self.has_log_odds else self.log_prob, self.log_prob
        scores = {"effect": effect.mean, "low": effect.low, "high": effect.high, "selected": effect.selected}
        scores |= {"log_prob": log_prob.mean, "log_prob_low": log_prob.low, "log_prob_high": log_prob.high}
        return heads_frame(heads, scores)

    @property
    def finding(self) -> str:
        """How many of the first `k` heads have an effect whose interval excludes zero."""
        return list_finding(self.to_frame(), self.k, "effect", n_heads=self.log_prob.mean.numel())

    def summary(self) -> str:
        """Return one or two sentences on the method, the number of prompts, and the intervals."""
        where = "at the last position" if self.positions == "last" else "at every position"
        method = "Exact: every head zeroed" if self.exact else "First-order estimates"
        n = f"{self.n_prompts:,} prompt{'s' * (self.n_prompts != 1)}"
        lost = "log-odds" if self.has_log_odds else "log p"
        text = f"{method} {where} of {n}; {lost} lost, with 95% intervals over {self.n_queries:,} distinct queries."
        if self.fallback_reason:
            text += f" Partial forward passes where the prefix cache could not be used: {self.fallback_reason}."
        text += f" {selected_note(self.k, self.log_prob.mean.numel()).capitalize()}."
        return text + (f" {edits_note(self.edits)}" if self.edits else "")

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        frame = self.to_frame().head(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {
            "head": frame["name"].tolist(),
            "log-odds lost" if self.has_log_odds else "log p lost": list(map(signed, frame["effect"])),
            "95% interval": interval_texts(frame),
            "selected": list(map(format_share, frame["selected"])),
        }
        if self.has_log_odds:
            columns["log p lost"] = list(map(signed, frame["log_prob"]))
        title = f"Effects of heads, nats: mean over {plural_prompts(self.n_prompts)}, each head zeroed separately"
        n = self.log_prob.mean.numel()
        title += f"; {selected_note(self.k, n)}"
        return table_view(title, columns, n, finding=self.finding)


def locate_effects(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    *,
    targets: Int[Tensor, " prompt"] | None = None,
    against: Against = None,
    positions: Positions = "last",
    method: Method = "exact",
    k: int | None = None,
    run: Run | None = None,
) -> MeanEffects:
    """Return the mean effect of zeroing each head over any number of prompts, with intervals.

    `targets`, `against`, `positions` and `method` are those of `head_effects`; all positions take much longer than the
    last. Intervals are 95% bootstrap intervals over queries, because prompts with the same query are not independent.
    `selected` says how firm the list of the first `k` heads is (default: 20, or all if fewer): in which share of these
    draws each head is in it.

    Prompts run in batches, as in `locate_heads`, so memory hardly grows with their number. `run` says how; its folder
    holds every prompt's effects, heads.parquet and heads.csv (the table), and result.json.

    Raise InputError for invalid `targets`, `against`, `k` or options, for non-finite effects, and like `Run`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> found = il.locate_effects(model, many)
        >>> len(found.top(4)), found.exact
        (4, True)
    """
    batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    view = ModelView.of(model)
    check_choice("positions", positions, ("all", "last"))
    check_choice("method", method, ("exact", "gradient"))
    chosen, others = outcome_tokens(view, batch, targets, against)
    options = {"positions": positions, "method": method, **tensors_digest(targets=targets, against=against)}

    def compute(number: int) -> dict[str, Any]:
        rows = stream.plan[number]
        some = view, batch[rows], chosen[rows], select_rows(others, rows)
        if method == "gradient":
            return effect_columns(rows, estimated_effects(*some, positions))
        return effect_columns(rows, exact_effects(*some, Ablate([], positions=positions)))

    means = StreamedMeans(view, batch.queries, k)
    algorithms: dict[Algorithm, int] = {}
    with start(run, model, batch, "effect", options) as stream:
        for _, chunk in stream.chunks("part", range(len(stream.plan)), compute):
            algorithm = chunk.column("algorithm")[0].as_py()
            algorithms[algorithm] = algorithms.get(algorithm, 0) + means.add(chunk, OUTCOMES)

    def mean_effects() -> MeanEffects:
        found, sizes = means.means(), (batch.n_prompts, means.n_queries("log_prob"), means.k)
        scores = found["log_prob"], found["log_odds"]
        result = MeanEffects(*scores, positions, algorithms, means.fallback_reason, *sizes, edits=active_edits(view))
        counts = {
            "finding": result.finding,
            "exact": result.exact,
            "positions": positions,
            **means.counts(batch.n_prompts, "log_prob"),
            "prompts_by_algorithm": algorithms,
            "fallback_reason": means.fallback_reason or None,
        }
        stream.write_result({"heads": result.to_frame()}, counts)
        return result

    return stream.distributed.run_on_main(mean_effects)


def effects_of_located(
    model: Any, prompts: PromptBatch, heads: Sequence[Head], stream: ChunkStream, *, by: DirectScore
) -> pd.DataFrame:
    """Return what the answer loses on average when each located head alone is zeroed at the last position.

    The table has one row per head. The answer loses log p for heads located `by` increase, and log-odds against the
    other labels by contrast. A head may rank first and have no effect, if later components compensate for it.
    The columns are effect (mean over prompts, nats) and its 95% interval over queries, effect_low and effect_high (NaN
    for a single query). Effects are exact. Only these heads are ablated: each costs one token per prompt, besides
    one pass over each prompt (see `head_effects`). Chunks are named "effect".
    """
    view = ModelView.of(model)
    targets, others = outcome_tokens(view, prompts, None, None)

    def compute(number: int) -> dict[str, Any]:
        rows = stream.plan[number]
        tokens = targets[rows], select_rows(others, rows)

        def outcomes(log_probs: Tensor, within: Tensor) -> Tensor:
            return answer_outcomes(log_probs, *tokens, within)

        sets = [[], *([Ablate([head], positions="last")] for head in heads)]
        scores = score_sets(view, prompts[rows], sets, outcomes)[0][..., int(by == "contrast")]
        drops = (scores[:, :1] - scores[:, 1:]).cpu().numpy()
        indices = np.array([head.layer * view.n_heads + head.head for head in heads])
        return index_columns(np.array(rows), indices, view.n_heads) | {"effect": drops.ravel()}

    drops = np.full((len(prompts), len(heads)), np.nan)
    for number, chunk in stream.chunks("effect", range(len(stream.plan)), compute):
        rows = stream.plan[number]
        drops[rows] = chunk.column("effect").to_numpy().reshape(len(rows), -1)

    def table() -> pd.DataFrame:
        mean, low, high = mean_intervals(drops, prompts.queries)
        return pd.DataFrame({"effect": mean, "effect_low": low, "effect_high": high})

    return stream.distributed.run_on_main(table)
