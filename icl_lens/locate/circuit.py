"""Find which earlier components some heads work through, over a task, and how faithful these edges are: resumable.

1. Means: what each sender writes to tokens of each role, over some of the prompts. To remove an edge is to replace what
   the sender wrote by this mean (`head_edges`).
2. Screening: first-order effects of all edges on the answer's log-odds, averaged over the prompts, rank them.
3. Exact effects of the first edges, on held-out prompts.
4. Faithfulness on held-out prompts: F(k) = (m(k) − m(none)) / (m(all) − m(none)), where m(k) is the mean log-odds with
   only the first k edges kept. Random rankings with as many edges of every part, role and sender's layer are controls.
5. Groups of edges, removed jointly: from early or late layers, to the query, keys or values. The same groups into
   random heads of the same layers are controls.

Source: F, CPR and CMD: Mueller et al., MIB (arXiv 2504.13151); minimality and completeness: Wang et al., IOI (arXiv
2211.00593).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from icl_lens.attribution.increases import check_target_ids
from icl_lens.display import SHOWN_ROWS, ShownAsTable, format_signed, interval_texts, json_records, plural_prompts
from icl_lens.errors import InputError, check_choice
from icl_lens.interventions.edited_scores import read_labels
from icl_lens.interventions.head_edges import estimated_edges, score_removed, sender_means
from icl_lens.locate.distributed import Distributed
from icl_lens.locate.edge_sets import EdgeSets
from icl_lens.locate.edge_space import EdgeSpace
from icl_lens.locate.run_folder import RunFolder
from icl_lens.locate.stream import BYTE_BUDGET, ChunkStream, plan_batches
from icl_lens.metrics import label_log_odds
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.progress import Progress, reported
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize

# Prompts over which senders' means are taken.
MEAN_PROMPTS = 64

Table = Literal["edges", "curve", "groups"]


@dataclass(frozen=True, repr=False, eq=False)
class Circuit(ShownAsTable):
    """The edges through which some heads work, and how much of the answer they carry; made by `locate_circuit`.

    Effects are drops in the answer's log-odds, nats, on held-out prompts; intervals are 95% bootstrap intervals over
    queries (NaN for a single query).

    Example:
        >>> prompts = il.load_task("sentiment-number", n=60, layout="random")
        >>> circuit = il.locate_circuit(model, *il.split_by_query(prompts, 16), ["L5H0"], n_edges=6, n_random=4)
        >>> len(circuit.to_frame()), circuit.n_edges
        (6, 407)
    """

    receivers: tuple[Head, ...]
    n_edges: int
    """Number of all edges into the receivers."""
    n_random: int
    n_located: int
    """Number of prompts that ranked the edges."""
    n_prompts: int
    """Number of held-out prompts, on which everything else is measured."""
    n_queries: int
    edges: pd.DataFrame = field(repr=False)
    curve: pd.DataFrame = field(repr=False)
    groups: pd.DataFrame = field(repr=False)
    scores: pd.DataFrame = field(repr=False)

    def to_frame(self, table: Table = "edges") -> pd.DataFrame:
        """Return a table.

        "edges": the first edges of the ranking, with receiver, part, sender, role, estimate (first-order, on the
        prompts that ranked them), effect, low, high (exact, held-out) and needed, needed_low, needed_high: the drop
        when the edge is removed from a model with only these edges.
        "curve": by number and share of edges kept, faithfulness, low, high; random (mean), random_low, random_high (of
        single rankings); difference, difference_low, difference_high.
        "groups": effect, low, high of removing a group of edges; control (the same into random heads of the same
        layers), difference, difference_low, difference_high.
        """
        check_choice("table", table, ("edges", "curve", "groups"))
        return getattr(self, table).copy()

    def score(self, name: str) -> tuple[float, float, float]:
        """Return the mean, low and high of a row of `scores`: "all", "none", "cpr", "cmd", "completeness", …."""
        check_choice("name", name, tuple(self.scores["name"]))
        row = self.scores.set_index("name").loc[name]
        return float(row["value"]), float(row["low"]), float(row["high"])

    @property
    def is_defined(self) -> bool:
        """Whether the edges carry anything: whether the interval of m(all) − m(none) excludes zero."""
        _, low, high = self.score("all − none")
        return low > 0 or high < 0

    def sentences(self) -> list[str]:
        """Return in words what the edges carry, whether the first ones are better than random, and by which groups."""
        all_edges, none = (self.score(name)[0] for name in ("all", "none"))
        value, low, high = self.score("all − none")
        carried = (
            f"With all {self.n_edges:,} edges into {len(self.receivers)} heads, the answer's log-odds are "
            f"{all_edges:+.2f}; with none, {none:+.2f}: the edges carry {value:+.2f} nats{_interval(low, high)}"
        )
        if not self.is_defined:
            return [f"{carried}, which is not distinguishable from nothing, so faithfulness is not defined."]
        row = self.curve[self.curve["kept"] == len(self.edges)].iloc[0]
        shown = _interval(100 * row["low"], 100 * row["high"], "{:.0f}")
        kept = (
            f"The first {len(self.edges)} edges alone keep {100 * row['faithfulness']:.0f}% of this{shown}, random "
            f"edges of the same parts, roles and layers {100 * row['random']:.0f}%"
        )
        if row["difference_low"] > 0:
            kept += "."
        else:
            difference = _interval(100 * row["difference_low"], 100 * row["difference_high"], "{:+.0f}")
            kept += f": not better than random (difference {100 * row['difference']:+.0f} points{difference})."
        above = [row for row in self.groups.to_dict("records") if min(row["low"], row["difference_low"]) > 0]
        above.sort(key=lambda row: -row["difference"])
        named = [f"{row['group']} ({row['effect']:+.2f})" for row in above]
        groups = (
            f"Removed jointly, these groups lower the log-odds more than into random heads: {', '.join(named[:4])}"
            + (f", and {len(named) - 4} more." if len(named) > 4 else ".")
            if named
            else "No group of edges lowers the log-odds more than the same group into random heads."
        )
        return [f"{carried}.", kept, groups]

    def to_dict(self) -> dict[str, Any]:
        """Return counts, receivers and tables as numbers and strings for JSON."""
        return {
            "sentences": self.sentences(),
            "receivers": [str(head) for head in self.receivers],
            **{name: getattr(self, name) for name in ("n_edges", "n_random", "n_located", "n_prompts", "n_queries")},
            **{name: json_records(getattr(self, name)) for name in ("scores", "edges", "curve", "groups")},
        }

    def _shown(self) -> tuple[str, dict[str, list[Any]], int]:
        rows = self.edges.head(SHOWN_ROWS)
        columns: dict[str, list[Any]] = {"edge": rows["edge"].tolist()}
        columns["log-odds drop"] = [format_signed(value) for value in rows["effect"]]
        columns["95% interval"] = interval_texts(rows)
        return f"Circuit: mean over {plural_prompts(self.n_prompts)}", columns, len(self.edges)


def locate_circuit(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    held_out: PromptBatch | Sequence[Prompt],
    receivers: Sequence[Head | tuple[int, int] | str],
    *,
    n_edges: int = 30,
    n_random: int = 20,
    seed: int = 0,
    batch_size: int | None = None,
    byte_budget: int = BYTE_BUDGET,
    folder: RunFolder | None = None,
    distributed: Distributed | None = None,
    progress: Progress | bool | None = None,
    warn: Callable[[str], None] | None = None,
) -> Circuit:
    """Return the edges through which heads raise the answer over other labels, ranked on `prompts`, tested on others.

    Senders are all earlier heads, FFNs and embeddings; receivers read them in their query at the last position and in
    their keys and values at tokens of each role. True and false labels are one role, because a set of edges from true
    labels alone would be given the answer. Each receiver reads the intact model's input without the removed edges, so
    what a removal changes in one receiver does not reach another. `n_random` random rankings are compared with;
    `held_out` should have other queries (`il.split_by_query`). `folder`, `distributed`, `progress` and `warn` are those
    of `locate_effects`.

    Raise InputError for unknown heads, receivers in the first layer alone, prompts without an answer or with one label,
    an unsupported family, and for a `folder` whose configuration does not have `by="circuit"`.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=60, layout="random")
        >>> circuit = il.locate_circuit(model, *il.split_by_query(prompts, 16), ["L5H0"], n_edges=4, n_random=4)
        >>> circuit.to_frame("curve").columns.tolist()[:4]
        ['kept', 'share', 'faithfulness', 'low']
    """
    ranking, testing = (one if isinstance(one, PromptBatch) else tokenize(model, one) for one in (prompts, held_out))
    distributed, view = distributed or Distributed(), ModelView.of(model)
    chosen = tuple(dict.fromkeys(view.check_head(head) for head in receivers))
    space = EdgeSpace.of(view, chosen)
    if not chosen or not len(space):
        raise InputError("receivers must name at least one head, got none; pass e.g. ['L2H1']")
    for name, value, least in (("n_edges", n_edges, 1), ("n_random", n_random, 2)):
        if value < least:
            raise InputError(f"{name} must be at least {least}, got {value}")
    for batch in (ranking, testing):
        batch.require_labels("log-odds against the other labels", "pass prompts with demonstrations")
        check_target_ids(view, batch.answer_tokens, len(batch))
        if bool((batch.label_mask.sum(1) < 2).any()):
            raise InputError("prompts must have at least two labels, whose log-odds edges change; got one")
    if folder is not None and folder.configuration.get("by") != "circuit":
        raise InputError(
            f"the folder's configuration must have by='circuit', got {folder.configuration.get('by', 'increase')!r}; "
            "set it, so that its chunks are not mistaken for others"
        )
    plans = [plan_batches(view, batch, batch_size=batch_size, byte_budget=byte_budget) for batch in (ranking, testing)]
    spaced = np.linspace(0, len(ranking) - 1, min(len(ranking), MEAN_PROMPTS)).round().astype(int)  # of every label
    means = sender_means(model, ranking[spaced.tolist()])

    with reported(progress) as report:
        streams = [ChunkStream(plan, folder, distributed, report, warn) for plan in plans]

        def estimate(number: int) -> dict[str, Any]:
            found = estimated_edges(model, ranking[plans[0][number]], chosen, means)
            return {"estimate": space.flat(found).double().sum(0).numpy()}

        total = np.zeros(len(space))
        for chunk in streams[0].chunks("estimate", range(len(plans[0])), estimate):
            total += chunk.column("estimate").to_numpy()
        ranked = distributed.run_on_main(lambda: np.argsort(-np.abs(total), kind="stable"))
        sets = EdgeSets.of(space, ranked, n_edges=n_edges, n_random=n_random, seed=seed)
        removed = sets.removed(view, seed=seed)

        def score(number: int) -> dict[str, Any]:
            rows = plans[1][number]
            batch = testing[rows]
            labels, _ = score_removed(model, batch, removed, means, read_labels(batch))
            n, count = labels.shape[:2]
            answer, choices = (x.cpu().repeat_interleave(count, 0) for x in (batch.answer, batch.label_mask))
            odds = label_log_odds(labels.cpu().flatten(0, 1), answer, choices=choices).float()
            return {
                "prompt": np.repeat(np.array(rows, np.int32), count),
                "set": np.tile(np.arange(count, dtype=np.int32), n),
                "log_odds": odds.numpy(),
            }

        log_odds = np.full((len(testing), len(sets)), np.nan)
        for rows, chunk in zip(plans[1], streams[1].chunks("circuit", range(len(plans[1])), score), strict=False):
            log_odds[rows] = chunk.column("log_odds").to_numpy().reshape(len(rows), -1)

    def collected() -> Circuit:
        queries = [prompt.query for prompt in testing.prompts]
        tables = sets.tables(log_odds, queries, total / len(ranking))
        counts = len(space), n_random, len(ranking), len(testing), len(set(queries))
        return Circuit(chosen, *counts, **tables)

    return distributed.run_on_main(collected)


def _interval(low: float, high: float, number: str = "{:+.2f}") -> str:
    return "" if low != low else f" (95% interval {number.format(low)} … {number.format(high)})"
