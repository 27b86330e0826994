"""Rank the edges into some heads and FFNs over a task, and test on held-out prompts how much of the
answer the top ones carry.

An edge is what an earlier component (the writer) wrote, as read by a reader: by the query, keys or
values of a head, or by an FFN.

1. Average what each writer writes to tokens of the same role, such as labels. Removing an edge
   means rebuilding the reader with this mean instead of what the writer wrote.
2. Rank all edges by the size of their mean first-order effect on the answer's log-odds.
3. On held-out prompts, measure the exact effect of removing each of the first edges of this
   ranking, the *circuit*.
4. Measure faithfulness F(k) = (m(k) − m(none)) / (m(all) − m(none)), where m(k) is the mean
   log-odds when only the first k edges are kept. CPR is the area under F, and CMD the area under |1
   − F|, over the share of edges kept. The controls are random rankings with the same number of
   edges for each combination of part (query, keys or values), role and writer's layer.
5. Remove groups of edges jointly, such as those from the first third of the layers to queries. The
   controls are the same groups into random heads of the same layers; edges into FFNs have none. The
   same is done layer by layer, without controls.

Source: F, CPR and CMD: Mueller et al., MIB (arXiv 2504.13151); minimality (`needed`) and
completeness: Wang et al., IOI (arXiv 2211.00593).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.edits.captured_writers import writer_means
from icl_lens.edits.edge_removal import replaced_by_sets
from icl_lens.edits.edges import RemovalMasks
from icl_lens.edits.head_reader import Means
from icl_lens.edits.read import read_labels
from icl_lens.edits.score import score_sets
from icl_lens.errors import InputError, check_at_least, check_choice, check_integers, short_repr
from icl_lens.foundation.defaults import N_RANDOM_SETS
from icl_lens.foundation.intervals import MIN_CLUSTERS, MIN_RANDOM_SETS, Interval
from icl_lens.measures.edge_sets import EdgeSets
from icl_lens.measures.edge_space import EdgeSpace
from icl_lens.measures.head_to_head_effects import estimate_effects
from icl_lens.measures.ranking_means import selected_shares
from icl_lens.metrics import label_log_odds
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.head import AnyComponent, is_ffn_name
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, count_prompts, prompts_digest
from icl_lens.prompts.batch_checks import require_labels
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.roles import EDGE_ROLES, EdgeRole, role_masks
from icl_lens.prompts.tokenize import tokenize
from icl_lens.reading.scored_tokens import check_targets
from icl_lens.result.base import Result
from icl_lens.result.number_format import interval_text, joined, signed, signed_ends, whole_percent
from icl_lens.result.tables import (
    columns_first,
    format_share,
    intervals_note,
    json_records,
    selected_note,
)
from icl_lens.result.view import Column, Section, View
from icl_lens.runs.run import Run
from icl_lens.runs.stream import ChunkStream, plan_batches, start

# Maximum number of prompts over which writers' means are taken.
MEAN_PROMPTS = 64
# Smallest drop of a group of edges that is named, nats, rounded as sentences write it: less is
# written as zero.
SMALLEST_DROP = 0.01

Table = Literal["edges", "curve", "groups", "layers"]


@dataclass(frozen=True, repr=False, eq=False)
class Circuit(Result):
    """The strongest edges into some heads and FFNs, and how much of the answer they carry; made by
    `locate_circuit`.

    Effects are drops in the answer's log-odds, nats, on held-out prompts: positive if the edge
    helps. `low` and `high` are the ends of 95% bootstrap intervals over queries (NaN for fewer
    than four queries).

    Example:
        >>> prompts = il.load_task("sentiment-number", n=60)
        >>> ranking, held_out = il.split_by_query(prompts, 16)
        >>> circuit = il.locate_circuit(
        ...     model, ranking, held_out, ["L5H0"], n_edges=6, n_random=4
        ... )
        >>> len(circuit.to_frame()), circuit.n_all_edges
        (6, 407)
    """

    version: ClassVar[int] = 5
    readers: tuple[str, ...]
    """Heads ("L5H0") and FFNs ("F3")."""
    n_all_edges: int
    """Number of all edges into the readers, of which `edges` are the first."""
    n_random: int
    """Number of random rankings."""
    n_ranking: int
    """Number of prompts on which edges are ranked."""
    n_prompts: int
    """Number of held-out prompts, on which everything else is measured."""
    n_queries: int
    """Number of distinct queries of the held-out prompts."""
    edges: pd.DataFrame = field(repr=False)
    """See `to_frame`, also for `curve`, `groups` and `layers`."""
    curve: pd.DataFrame = field(repr=False)
    groups: pd.DataFrame = field(repr=False)
    layers: pd.DataFrame = field(repr=False)
    scores: pd.DataFrame = field(repr=False)
    """See `score`."""
    reader_at: EdgeRole = "last"
    """Role of the tokens at which the readers act."""
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks. Empty if nothing
    edits it.
    """

    def to_frame(self, table: Table = "edges") -> pd.DataFrame:
        """Return a table.

        - "edges", one row per edge of the circuit, strongest first: edge; effect, low, high (exact,
          held-out); selected; reader, part, writer, role; estimate (the first-order effect, on the
          prompts that rank the edges); needed, needed_low, needed_high (the drop when, with only
          the circuit kept, this edge is removed too). `selected` says how firm an edge's place is:
          it is the share of draws of these prompts' queries, 0 to 1, in which the edge is among the
          first, NaN for fewer than three queries.
        - "curve", one row per number of edges kept: kept, share (of all edges); faithfulness, low,
          high; random, random_low, random_high (mean, lowest and highest of the random rankings);
          difference, difference_low, difference_high (from the mean of the random rankings).
        - "groups", one row per group of edges, removed jointly: group; effect, low, high; control
          (for the same group into random heads of the same layers; NaN for edges into FFNs);
          difference, difference_low, difference_high (from the control).
        - "layers", one row per input and layer, whose edges are removed jointly: input ("query",
          "keys at the labels", "keys at demonstrations' texts", "values at the labels", "FFNs");
          layer (of the writers; −1: embeddings); effect, low, high. Inputs without edges are left
          out.
        """
        check_choice("table", table, get_args(Table))
        rows = getattr(self, table).copy()
        return (
            columns_first(rows, "edge", "effect", "low", "high", "selected")
            if table == "edges"
            else rows
        )

    def score(self, name: str) -> tuple[float, float, float]:
        """Return a score, with the low and high end of its interval.

        - "all", "none", "all − none": mean log-odds with all edges kept, with none, and their
          difference, nats.
        - "cpr", "cmd": the areas under faithfulness F and under its distance from 1; "cpr, random"
          and "cmd, random": for random rankings; "cpr, difference" and "cmd, difference".
        - "completeness": mean absolute difference of the log-odds between the model and the circuit
          when the same random half of the circuit is removed from both, nats. 0 is best.
        - "largest estimate left out": largest size of a first-order effect outside the circuit,
          nats (no interval).
        """
        check_choice("name", name, tuple(self.scores["name"]))
        row = self.scores.set_index("name").loc[name]
        return float(row["value"]), float(row["low"]), float(row["high"])

    @property
    def is_defined(self) -> bool:
        """Whether faithfulness is defined: whether the interval of m(all) − m(none) excludes
        zero.
        """
        _, low, high = self.score("all − none")
        return low > 0 or high < 0

    @property
    def is_undecided(self) -> bool:
        """Whether the intervals that the sentences name include zero, or are missing for lack of
        queries: of what all edges carry, or of the first edges beside random ones.
        """
        if not self.is_defined:
            return True
        row = self.curve[self.curve["kept"] == len(self.edges)].iloc[0]
        ends = row["difference"], row["difference_low"], row["difference_high"]
        return Interval(*map(float, ends)).is_undecided

    def sentences(self) -> list[str]:
        """Return in words what all edges carry, how much of it the circuit keeps, and which groups
        of edges matter.

        The last sentence names the edits of an edited model.
        """
        return [*self._sentences(), *([edits_note(self.edits)] if self.edits else [])]

    @property
    def readers_in_words(self) -> str:
        """How many heads and FFNs are readers and, unless they read at the last token, where they
        do, such as "2 heads at label tokens".
        """
        n_ffns = sum(map(is_ffn_name, self.readers))
        counts = []
        for n, name in ((len(self.readers) - n_ffns, "head"), (n_ffns, "FFN")):
            if n:
                counts.append(f"{n} {name}{'s' * (n > 1)}")
        where = "" if self.reader_at == "last" else f" at {self.reader_at} tokens"
        return f"{' and '.join(counts)}{where}"

    def _sentences(self) -> list[str]:
        all_edges, none = (self.score(name)[0] for name in ("all", "none"))
        value, low, high = self.score("all − none")
        carried = (
            f"With all {self.n_all_edges:,} edges into {self.readers_in_words}, the answer's log-odds "
            f"are {signed(all_edges, 2)}; with none, {signed(none, 2)}: the edges carry "
            f"{interval_text(value, low, high)} nats"
        )
        if math.isnan(low):
            return [
                f"{carried}. Prompts with fewer than {MIN_CLUSTERS} queries give no interval, so it is "
                "not known whether this differs from zero, and faithfulness is not defined."
            ]
        if not self.is_defined:
            return [
                f"{carried}, which is not distinguishable from zero, so faithfulness is not "
                "defined."
            ]
        row = self.curve[self.curve["kept"] == len(self.edges)].iloc[0]
        share = whole_percent(row["faithfulness"])
        if row["low"] == row["low"]:
            share += f" (95% interval {share_ends(row['low'], row['high'])})"
        carried_by_first = (
            f"The first {len(self.edges)} edges alone keep {share} of this; random edges of the "
            f"same parts, roles and layers keep {whole_percent(row['random'])}"
        )
        if row["difference_low"] > 0:
            carried_by_first += "."
        else:
            ends = row["difference"], row["difference_low"], row["difference_high"]
            difference = interval_text(*ends, times=100)
            carried_by_first += (
                f". It is not shown that they keep more: the difference is {difference} points."
            )
        return [f"{carried}.", carried_by_first, self._groups_sentence()]

    def _groups_sentence(self) -> str:
        """Return in words which groups of edges have a drop above zero and above that of the same
        group into random heads, the largest drops first.

        The smallest drop that is named is said if it leaves out a group.
        """
        groups = self.groups.sort_values("effect", ascending=False, kind="stable")
        compared = [row for row in groups.to_dict("records") if not math.isnan(row["control"])]
        if not compared:
            return (
                "No group of edges was compared with the same group into random heads: groups into "
                "FFNs have no control."
            )
        above = [row for row in compared if row["low"] > 0 and row["difference_low"] > 0]
        named = [row for row in above if round(row["effect"], 2) >= SMALLEST_DROP]
        rounds = into_heads = others = ""
        if len(named) < len(above):
            rounds = f"rounds to {SMALLEST_DROP} nats or more and "
        if not named:
            if len(compared) < len(groups):
                into_heads, others = " into heads", "; groups into FFNs have no control"
            return (
                f"No group of edges{into_heads} has a drop that {rounds}is shown to be above zero "
                f"and above that of the same group into random heads{others}."
            )
        texts = [f"{row['group']} ({signed(row['effect'], 2)})" for row in named]
        if len(texts) > 4:
            texts = [*texts[:4], f"{len(texts) - 4} more"]
        return (
            f"Groups of edges whose drop, when they are removed, {rounds}is shown to be above zero "
            f"and above that of the same groups into random heads: {joined(texts)}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return counts, readers and tables as numbers and strings for JSON."""
        return {
            "sentences": self.sentences(),
            "edits": list(self.edits),
            "readers": list(self.readers),
            "reader_at": self.reader_at,
            "expected_selected": len(self.edges) / self.n_all_edges,
            **{
                name: getattr(self, name)
                for name in ("n_all_edges", "n_random", "n_ranking", "n_prompts", "n_queries")
            },
            **{name: json_records(table) for name, table in self.tables.items()},
        }

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """All tables by name."""
        return {
            name: getattr(self, name) for name in ("scores", "edges", "curve", "groups", "layers")
        }

    def to_view(self) -> View:
        """Return what the edges carry, and tables of edges, of how much the first ones keep, and of
        groups.
        """
        sections = [self._edges_section()]
        if self.is_defined:
            sections.append(self._curve_section())
            n_edges = f"{len(self.edges)} of {self.n_all_edges:,} edges"
            title = f"The first {n_edges} into {self.readers_in_words}"
        elif math.isnan(self.score("all − none")[1]):
            title = f"Edges into {self.readers_in_words}: too few queries to say what they carry"
        else:
            title = f"Edges into {self.readers_in_words} that carry nothing distinguishable"
        sections.append(self._groups_section())
        return View(title, tuple(self.sentences()), tuple(sections), about="circuit")

    def _edges_section(self) -> Section:
        columns = (
            Column("edge", is_number=False),
            Column("log-odds drop, nats"),
            Column("95% interval"),
            Column("kept-only drop, nats"),
            Column("selected"),
        )
        rows = []
        for edge in self.edges.to_dict("records"):
            interval = signed_ends(edge["low"], edge["high"])
            selected = format_share(edge["selected"])
            rows.append((edge["edge"], edge["effect"], interval, edge["needed"], selected))
        role = "the last token" if self.reader_at == "last" else f"{self.reader_at} tokens"
        n_mean, n_edges = min(self.n_ranking, MEAN_PROMPTS), len(self.edges)
        selected = selected_note(n_edges, self.n_all_edges, "edge").capitalize()
        intervals = intervals_note(self.n_queries, "95% intervals resample these queries.")
        notes = (
            f"Readers: {', '.join(self.readers)}.",
            "An edge, such as F0 → L4H1.k (label), is what a writer wrote to tokens of one role, "
            "as read by a head's query (q), keys (k) or values (v), or by an FFN, such as L4H1 → "
            "F5. F0 is the FFN of layer 0, L4H1 head 1 of layer 4. Labels are taken together, "
            "whether they equal the answer or not.",
            "Removing an edge replaces what the writer wrote by its mean over tokens of the same "
            f"role in {n_mean} prompts. Edges are ranked on {self.n_ranking} prompts and tested on "
            f"{self.n_prompts} others with {self.n_queries} queries. {intervals}"
            f"{self._left_out_note}",
            "Log-odds drop: the drop in the answer's log-odds against the other labels when the "
            f"edge is removed. Kept-only drop: the same in a model that keeps only the {n_edges} "
            f"edges. {selected}, on the prompts that rank edges.",
        )
        return Section(
            "The edges",
            "What earlier components wrote to tokens of each role, as read by the readers at "
            f"{role}.",
            columns,
            tuple(rows),
            notes=notes,
            figure="graph",
        )

    @property
    def _left_out_note(self) -> str:
        """The largest first-order effect outside the circuit, in words; empty if it has all
        edges.
        """
        n_others = self.n_all_edges - len(self.edges)
        if not n_others:
            return ""
        others = f"the other {n_others:,} edges" if n_others > 1 else "the other edge"
        largest = self.score("largest estimate left out")[0]
        return f" The largest first-order effect of {others} is {largest:.3f} nats."

    def _curve_section(self) -> Section:
        columns = (
            Column("edges kept"),
            Column("% of edges"),
            Column("faithfulness"),
            Column("95% interval"),
            Column("random: mean (range)"),
        )
        rows = []
        for point in self.curve.to_dict("records"):
            range_text = share_ends(point["random_low"], point["random_high"])
            rows.append(
                (
                    f"{point['kept']:,}",
                    f"{100 * point['share']:.2g}%" if point["share"] < 1 else "100%",
                    whole_percent(point["faithfulness"]),
                    share_ends(point["low"], point["high"]),
                    f"{whole_percent(point['random'])} ({range_text})",
                )
            )
        note = (
            "Faithfulness: the log-odds with only the first edges kept, on a scale from no edge "
            f"(0%) to all (100%). Random: {self.n_random} rankings with the same number of edges "
            "for each part, role and writer's layer."
        )
        return Section(
            "How much the first edges carry",
            "The edges are a circuit if a few of them alone keep the answer, and random ones do "
            "not.",
            columns,
            tuple(rows),
            notes=(note,),
            figure="curve",
        )

    def _groups_section(self) -> Section:
        columns = (
            Column("edges", is_number=False),
            Column("log-odds drop, nats", has_bars=True),
            Column("95% interval"),
            Column("random heads, nats"),
            Column("difference, 95% interval"),
        )
        rows = []
        for group in self.groups.to_dict("records"):
            interval = signed_ends(group["low"], group["high"])
            difference = signed_ends(group["difference_low"], group["difference_high"])
            control = group["control"]
            control_cell = "–" if math.isnan(control) else control
            rows.append((group["group"], group["effect"], interval, control_cell, difference))
        note = (
            "Groups: edges from a third of the layers; embeddings are in the first third. Random "
            "heads: the drop when the same group is removed from random heads of the same layers. "
            "Difference: the drop minus that of random heads."
        )
        if any(map(is_ffn_name, self.readers)):
            note += " Edges into FFNs have no control: a layer has a single FFN."
        return Section(
            "Groups of edges",
            "A group matters if removing it lowers the log-odds more than the same group into "
            "random heads does.",
            columns,
            tuple(rows),
            notes=(note,),
        )


def share_ends(low: float, high: float) -> str:
    """Format the ends of an interval of shares as "12% … 34%", and NaN as "–"."""
    return "–" if math.isnan(low) else f"{whole_percent(low)} … {whole_percent(high)}"


def log_odds_without(
    view: ModelView, batch: PromptBatch, removed: RemovalMasks, means: Means, *, n_sets: int
) -> Float[Tensor, "batch set"]:
    """Return the answer's log-odds against the other labels, nats, when each set of edges is
    replaced by means.
    """
    edits = replaced_by_sets(view.model, batch, removed, means, n_sets=n_sets)
    labels, _ = score_sets(view, batch, [[edit] for edit in edits], read_labels(batch))
    answer, choices = (
        x.cpu().repeat_interleave(n_sets, 0) for x in (batch.answer, batch.label_mask)
    )
    return (
        label_log_odds(labels.cpu().flatten(0, 1), answer, choices=choices)
        .float()
        .unflatten(0, (-1, n_sets))
    )


def locate_circuit(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    held_out: PromptBatch | Sequence[Prompt],
    readers: Sequence[AnyComponent],
    *,
    reader_at: EdgeRole = "last",
    n_edges: int = 30,
    n_random: int = N_RANDOM_SETS,
    seed: int = 0,
    run: Run | None = None,
) -> Circuit:
    """Rank all edges into some heads and FFNs on `prompts`, and test on `held_out` how much of the
    answer the top ones carry.

    An edge leads from an earlier head, FFN or embedding to a head's queries at the tokens of the
    role `reader_at`, to its keys or values at tokens of one role up to there, or to what an FFN
    ("F3") reads at the tokens of `reader_at`. By default, readers act at the last token; with
    "label", the edges are those through which heads and FFNs write to labels. Labels that equal the
    answer and other labels are one role, because a set of edges that kept only the former would
    reveal the answer. The readers are rebuilt independently from an unedited pass, so a change in
    one does not reach another.

    The first `n_edges` edges, the circuit, are tested one by one, and `n_random` random rankings
    are the control. Bootstrap draws of the queries of `prompts` are ranked, too (`selected`), which
    keeps 8 bytes per edge and query. `held_out` should have other queries than `prompts` (see
    `il.split_by_query`). `run` is that of `locate`; its folder also holds all tables.

    Raise InputError for unknown heads or FFNs, more than half of the model's heads, prompts without
    an answer or with one label, an unsupported family, and like `Run`.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=60)
        >>> ranking, held_out = il.split_by_query(prompts, 16)
        >>> circuit = il.locate_circuit(
        ...     model, ranking, held_out, ["L5H0"], n_edges=4, n_random=4
        ... )
        >>> circuit.to_frame("curve").columns.tolist()[:4]
        ['kept', 'share', 'faithfulness', 'low']
    """
    ranking = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    testing = held_out if isinstance(held_out, PromptBatch) else tokenize(model, held_out)
    view = ModelView.of(model)
    components = view.check_components(readers)
    if not components:
        raise InputError("readers must name at least one head or FFN, got none; pass e.g. ['L2H1']")
    check_choice("reader_at", reader_at, EDGE_ROLES)
    (n_edges,) = check_at_least(1, n_edges=n_edges)
    (n_random,) = check_at_least(MIN_RANDOM_SETS, n_random=n_random)
    (seed,) = check_integers(seed=seed)
    _check_prompts(view, ranking, reader_at)
    _check_prompts(view, testing, reader_at)
    options = {
        "readers": list(map(str, components)),
        "reader_at": reader_at,
        "n_edges": n_edges,
        "n_random": n_random,
        "seed": seed,
        "held_out": prompts_digest(testing),
    }
    # Evenly spaced, because prompts may be sorted by label.
    mean_prompts = (
        np.linspace(0, len(ranking) - 1, min(len(ranking), MEAN_PROMPTS)).round().astype(int)
    )
    means = writer_means(model, ranking[mean_prompts.tolist()])
    space = EdgeSpace.of(view, components, reader_at)
    with start(run, model, ranking, "circuit", options) as stream:
        ranked = _ranked(view, ranking, space, means, stream, n_edges=n_edges)
        sets = EdgeSets.of(space, ranked.order, n_edges=n_edges, n_random=n_random, seed=seed)
        removed = sets.removal_masks(view, seed=seed)
        testing_stream = replace(stream, batch=testing, plan=plan_batches(view, testing, run))
        log_odds = _log_odds_of_sets(
            view, testing, removed, means, testing_stream, n_sets=len(sets)
        )

    def make_circuit() -> Circuit:
        queries = testing.queries
        result = Circuit(
            readers=tuple(map(str, components)),
            n_all_edges=len(space),
            n_random=n_random,
            n_ranking=count_prompts(ranking),
            n_prompts=count_prompts(testing),
            n_queries=len(set(queries)),
            reader_at=reader_at,
            edits=active_edits(view),
            **sets.tables(log_odds, queries, ranked.effect, ranked.selected),
        )
        stream.write_result(result.tables, result.to_dict())
        return result

    return stream.distributed.run_on_main(make_circuit)


def _check_prompts(view: ModelView, batch: PromptBatch, reader_at: EdgeRole) -> None:
    require_labels(batch, "log-odds against the other labels", "pass prompts with demonstrations")
    check_targets(view, batch)
    if bool((batch.label_mask.sum(1) < 2).any()):
        raise InputError("prompts must have at least two labels to compare, got one")
    if not bool(role_masks(batch, [reader_at]).any()):
        raise InputError(
            f"reader_at must be a role that a prompt has, got {short_repr(reader_at)}; see "
            "batch.token_roles"
        )


@dataclass(frozen=True)
class _Ranked:
    """All edges: their mean estimated effects, their order, and how often a draw has each among its
    first.
    """

    effect: Float[np.ndarray, " edge"]
    order: Int[np.ndarray, " edge"]
    selected: Float[np.ndarray, " edge"]


def _ranked(
    view: ModelView,
    batch: PromptBatch,
    space: EdgeSpace,
    means: Means,
    stream: ChunkStream,
    *,
    n_edges: int,
) -> _Ranked:
    """Rank all edges (item 2 above), in every process."""

    def estimate(rows: list[int]) -> dict[str, Tensor]:
        readers, reader_at = space.readers, space.reader_at
        by_reader = estimate_effects(view.model, batch[rows], readers, means, reader_at)
        return {"estimate": space.flatten(by_reader).float()}

    estimates = stream.map("estimates", estimate)["estimate"].astype(np.float64)

    def rank() -> _Ranked:
        effect = estimates.mean(0)
        n_selected = min(n_edges, len(space))
        selected = selected_shares(estimates, batch.queries, n_selected, absolute=True)
        return _Ranked(effect, np.argsort(-np.abs(effect), kind="stable"), selected)

    return stream.distributed.run_on_main(rank)


def _log_odds_of_sets(
    view: ModelView,
    batch: PromptBatch,
    removed: RemovalMasks,
    means: Means,
    stream: ChunkStream,
    *,
    n_sets: int,
) -> Float[np.ndarray, "prompt set"]:
    """Return `log_odds_without` of all prompts, in every process."""

    def score(rows: list[int]) -> dict[str, Tensor]:
        return {"log_odds": log_odds_without(view, batch[rows], removed, means, n_sets=n_sets)}

    return stream.map("removals", score)["log_odds"].astype(np.float64)
