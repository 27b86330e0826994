"""Split heads' scores of true labels, and what their values add to the answer, into mean parts by
writer.

1. First pass, for each prompt and head: the score of true labels (those equal to the answer) minus
   that of false labels is split by writer at the last position ("query") and by writer at the
   labels ("key"), which are read at their scored tokens. What the head adds to the answer by
   reading true labels, and by reading false labels, is split by writer at all tokens of these
   labels.
2. Second pass: the part of each pair of a query writer and a key writer, among those with the
   largest means.
3. Means, and 95% bootstrap intervals that resample queries, each with all its prompts.

A run is stored in chunks that hold every prompt's parts, so an interrupted run resumes and writes
the same bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.errors import InputError, check_at_least, check_choice
from icl_lens.foundation.intervals import mean_intervals
from icl_lens.models.active_edits import active_edits, edits_note
from icl_lens.models.head import AnyHead, Head, as_head
from icl_lens.models.view import ModelView
from icl_lens.prompts.batch import PromptBatch, count_prompts
from icl_lens.prompts.batch_checks import require_demonstrations
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize
from icl_lens.reading.activations import Activations
from icl_lens.reading.attention_score_parts import attention_score_parts
from icl_lens.reading.capture import capture
from icl_lens.reading.reasons import WRITER_NAMES, because
from icl_lens.reading.scored_tokens import check_targets
from icl_lens.reading.value_parts import value_parts
from icl_lens.reading.writer_groups import GROUPS, group_of
from icl_lens.reading.writers import writer_names
from icl_lens.result.base import Result
from icl_lens.result.number_format import interval_text, signed_ends
from icl_lens.result.tables import intervals_note, json_records, plural_prompts
from icl_lens.result.view import Cell, Column, Section, View
from icl_lens.runs.run import Run
from icl_lens.runs.stream import ChunkStream, start

SIDES = ("query", "key", "value of true labels", "value of false labels")
"""What is split by writer: the score difference, by writers at the last position and at the labels;
and what the head adds to the answer by reading labels of either kind, nats.
"""
SIDE_NAMES = {
    "query": "at the last token",
    "key": "at the labels",
    "pair": "pairs",
    SIDES[2]: "values, true labels",
    SIDES[3]: "values, false labels",
}
"""What tables call each side, in their order."""
N_SHOWN = 5
"""Writers that are shown per side; three for pairs and for false labels."""


@dataclass(frozen=True, repr=False, eq=False)
class MeanScoreParts(Result):
    """Mean parts of heads' scores and values by writer; made by `mean_score_parts`.

    They show why heads attend to true labels (those equal to the answer) rather than to false ones,
    and what their values carry. The query parts sum to the score difference, and so do the key
    parts. The value parts sum to what the head adds to the answer, nats. Intervals are 95%
    bootstrap intervals over queries; NaN for fewer than four queries.

    Example:
        >>> prompts = il.load_task("sentiment-number", n=20)
        >>> parts = il.mean_score_parts(model, prompts, heads=["L5H0"])
        >>> parts.to_frame().columns.tolist()
        ['name', 'side', 'writer', 'value', 'low', 'high']
    """

    heads: tuple[Head, ...]
    n_prompts: int
    n_queries: int
    """Number of distinct queries, which the intervals resample."""
    values_are_exact: bool
    """Whether value parts are exact (two labels) or first-order."""
    writers: pd.DataFrame = field(repr=False)
    """See `to_frame`, also for `groups`."""
    groups: pd.DataFrame = field(repr=False)
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks. Empty if nothing
    edits it.
    """

    def to_frame(self, table: Literal["writers", "groups"] = "writers") -> pd.DataFrame:
        """Return name (of the head), side, writer, value (mean), low and high.

        - "writers": all writers of the sides "query", "key", "value of true labels" and "value of
          false labels", the largest magnitude first. Side "pair" has pairs of a query writer and a
          key writer ("F20 × L22H1"). Side "total" has the score difference ("score") and the total
          of each side of values.
        - "groups": the same sides, summed over embeddings, early heads, early FFNs, late heads,
          late FFNs and biases. Early ones are in the first half of the layers.
        """
        check_choice("table", table, ("writers", "groups"))
        return (self.writers if table == "writers" else self.groups).copy()

    def total(self, head: AnyHead, what: str = "score") -> tuple[float, float, float]:
        """Return the mean, low and high of a head's total.

        `what` is "score" (the score difference), "value of true labels" or "value of false labels"
        (nats).
        """
        check_choice("head", _name(head), tuple(map(str, self.heads)))
        rows = self.writers[
            (self.writers["name"] == _name(head)) & (self.writers["side"] == "total")
        ]
        check_choice("what", what, tuple(rows["writer"]))
        row = rows.set_index("writer").loc[what]
        return float(row["value"]), float(row["low"]), float(row["high"])

    def strongest(self, head: AnyHead, side: str, n: int = 6) -> pd.DataFrame:
        """Return a head's n strongest writers of a side, or its pairs for "pair": writer, value,
        low, high.
        """
        rows = pd.DataFrame(
            self.writers[(self.writers["name"] == _name(head)) & (self.writers["side"] == side)]
        )
        return pd.DataFrame(rows[["writer", "value", "low", "high"]].head(n).reset_index(drop=True))

    def sentence(self, head: AnyHead) -> str:
        """Return in words why a head scores true labels above or below false labels, or that it
        is not shown to.
        """
        (value, low, high), head = self.total(head), _name(head)
        if not (low > 0 or high < 0):
            difference = interval_text(value, low, high)
            return (
                f"{head} is not shown to score true labels above or below false labels: difference "
                f"{difference}."
            )
        strongest = (self.strongest(head, side) for side in ("query", "key"))
        sides = [list(zip(rows["writer"], rows["value"], strict=True)) for rows in strongest]
        above = "above" if value > 0 else "below"
        difference = interval_text(value, low, high)
        scored = f"{head} scores true labels {above} false labels: difference {difference}"
        return f"{scored}. Largest parts: {because(*sides, above=value > 0)}."

    def to_dict(self) -> dict[str, Any]:
        """Return the counts, each head's sentence and both tables as numbers and strings for
        JSON.
        """
        return {
            "n_prompts": self.n_prompts,
            "n_queries": self.n_queries,
            "values_are_exact": self.values_are_exact,
            "edits": list(self.edits),
            "sentences": {str(head): self.sentence(head) for head in self.heads},
            "writers": json_records(self.writers),
            "groups": json_records(self.groups),
        }

    def to_view(self) -> View:
        """Return a sentence and a table of the strongest writers for each head."""
        sentences = [self.sentence(head) for head in self.heads]
        sentences += [edits_note(self.edits)] if self.edits else []
        sections = [self._head_section(head) for head in self.heads]
        sections[-1] = replace(sections[-1], notes=(self._note(),))
        n_prompts = plural_prompts(self.n_prompts)
        return View(f"Mean score parts over {n_prompts}", tuple(sentences), tuple(sections))

    def _head_section(self, head: Head) -> Section:
        rows: list[tuple[Cell, ...]] = []
        for side, name in SIDE_NAMES.items():
            n_writers = 3 if side in ("pair", SIDES[3]) else N_SHOWN
            writers = self.strongest(head, side, n_writers).to_dict("records")
            if writers and side in SIDES[2:]:
                value, low, high = self.total(head, side)
                writers = [{"writer": "all", "value": value, "low": low, "high": high}, *writers]
            for writer in writers:
                interval = signed_ends(writer["low"], writer["high"])
                rows.append((name, writer["writer"], writer["value"], interval))
                name = ""  # the side is named only in its first row
        columns = (
            Column("side", is_number=False),
            Column("writer", is_number=False),
            Column("mean", has_bars=True),
            Column("95% interval"),
        )
        return Section(str(head), columns=columns, rows=tuple(rows))

    def _note(self) -> str:
        first_order = "" if self.values_are_exact else " (first-order)"
        means = f"Means over {plural_prompts(self.n_prompts)}."
        intervals = f"95% intervals are over {self.n_queries:,} distinct queries."
        return (
            f"{means} {intervals_note(self.n_queries, intervals)} True labels are those equal to "
            "the answer. The strongest writers are chosen on these prompts: check them on others "
            "(--seed). Over all writers, each side sums to the score difference, and value parts "
            "sum to what the head adds to the "
            f"answer from these labels, nats{first_order}. {WRITER_NAMES}; pairs: query writer × "
            "key writer."
        )


def mean_score_parts(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    heads: Sequence[AnyHead],
    *,
    n_strongest: int = 6,
    run: Run | None = None,
) -> MeanScoreParts:
    """Return heads' mean `attention_score_parts` and `value_parts` over prompts, with intervals.

    Score parts split the mean score of true labels (those equal to the answer) minus that of false
    labels, from the last position. Value parts split what the head adds to log p(answer) − log
    p(other labels); models with a logit soft-cap have none. Pairs are those of the `n_strongest`
    query writers and key writers. Memory grows by four numbers per prompt, head and writer. `run`
    is that of `locate`; its folder also holds both tables.

    Raise InputError for unknown heads, prompts without an answer or without true or false labels,
    an unsupported family, and like `Run`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> parts = il.mean_score_parts(model, many, ["L5H0"])
        >>> parts.n_prompts, len(parts.total("L5H0"))
        (20, 3)
    """
    batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    view = ModelView.of(model)
    checked_heads = view.check_heads(heads)
    if not checked_heads:
        raise InputError("heads must name at least one head, got none; pass e.g. ['L2H1']")
    check_at_least(1, n_strongest=n_strongest)
    require_demonstrations(batch, "true label", "pass prompts with demonstrations")
    for prompt in batch.prompts:
        if prompt.has_own_answer:
            raise InputError(
                f"every prompt must demonstrate its answer, got {prompt.answer!r}, which none "
                "shows; use prompts with classes, or il.attention_score_parts(acts, head), which "
                "has the score of each demonstration"
            )
    check_targets(view, batch)
    options = {"heads": list(map(str, checked_heads)), "n_strongest": n_strongest}
    with start(run, model, batch, "score parts", options) as stream:
        parts, is_exact = _parts_of_heads(stream, model, checked_heads)
        strongest = stream.distributed.run_on_main(
            lambda: {head: _strongest(parts[head], n_strongest) for head in checked_heads}
        )
        pairs = _pairs_of_heads(stream, model, strongest)

    def make_tables() -> MeanScoreParts:
        writer_tables: list[pd.DataFrame] = []
        group_tables: list[pd.DataFrame] = []
        for head in checked_heads:
            head_parts = _HeadParts.of(view, head, parts[head], strongest[head], pairs[head][0])
            writer_tables += head_parts.writer_tables(batch.queries)
            group_tables += head_parts.group_tables(batch.queries)
        result = MeanScoreParts(
            heads=checked_heads,
            n_prompts=count_prompts(batch),
            n_queries=len(set(batch.queries)),
            values_are_exact=is_exact,
            writers=pd.concat(writer_tables, ignore_index=True),
            groups=pd.concat(group_tables, ignore_index=True),
            edits=active_edits(view),
        )
        stream.write_result({"writers": result.writers, "groups": result.groups}, result.to_dict())
        return result

    return stream.distributed.run_on_main(make_tables)


class _StrongestWriters(NamedTuple):
    """The writers of largest mean parts of a head, as indices, strongest first."""

    query: list[int]
    key: list[int]


def _chunks(
    stream: ChunkStream,
    model: Any,
    kind: str,
    columns: Callable[[Activations, list[int]], dict[str, Any]],
) -> Iterator[tuple[list[int], pa.Table]]:
    """Yield the rows and the chunk of every batch, in the main process."""

    def compute(number: int) -> dict[str, Any]:
        rows = stream.plan[number]
        return columns(capture(model, stream.batch[rows], writers=True), rows)

    for number, chunk in stream.chunks(kind, range(len(stream.plan)), compute):
        yield stream.plan[number], chunk


def _parts_of_heads(
    stream: ChunkStream, model: Any, heads: Sequence[Head]
) -> tuple[dict[Head, Float[np.ndarray, "side prompt writer"]], bool]:
    """Return each head's parts from the first pass, and whether those of values are exact."""
    view = ModelView.of(model)
    parts: dict[Head, np.ndarray] = {}
    for head in heads:
        n_writers = len(writer_names(view, head.layer))
        parts[head] = np.empty((len(SIDES), len(stream.batch), n_writers), np.float32)
    is_exact = True

    def columns(acts: Activations, rows: list[int]) -> dict[str, Any]:
        return _part_columns(acts, rows, heads)

    for rows, chunk in _chunks(stream, model, "part", columns):
        _fill(parts, rows, chunk, SIDES)
        is_exact = bool(chunk.column("is_exact")[0].as_py())
    return parts, is_exact


def _pairs_of_heads(
    stream: ChunkStream, model: Any, strongest: dict[Head, _StrongestWriters]
) -> dict[Head, Float[np.ndarray, "1 prompt pair"]]:
    """Return the parts of each head's pairs of strongest writers, from the second pass."""
    pairs: dict[Head, np.ndarray] = {}
    for head, (query, key) in strongest.items():
        pairs[head] = np.empty((1, len(stream.batch), len(query) * len(key)), np.float32)

    def columns(acts: Activations, rows: list[int]) -> dict[str, Any]:
        return _pair_columns(acts, rows, strongest)

    for rows, chunk in _chunks(stream, model, "pairs", columns):
        _fill(pairs, rows, chunk, ("value",))
    return pairs


@dataclass(frozen=True, eq=False)
class _HeadParts:
    """The parts of one head on all prompts."""

    head: Head
    writers: Sequence[str]
    group_indices: Int[np.ndarray, " writer"]
    """Each writer's group, as an index into `GROUPS`."""
    sides: dict[str, Float[np.ndarray, "prompt writer"]]
    pair_names: list[str]
    pairs: Float[np.ndarray, "prompt pair"]

    @classmethod
    def of(
        cls,
        view: ModelView,
        head: Head,
        parts: Float[np.ndarray, "side prompt writer"],
        strongest: _StrongestWriters,
        pairs: Float[np.ndarray, "prompt pair"],
    ) -> "_HeadParts":
        writers = writer_names(view, head.layer)
        sides: dict[str, np.ndarray] = dict(zip(SIDES, parts.astype(np.float64), strict=True))
        if np.isnan(sides["value of true labels"]).all():  # the model has a logit soft-cap
            sides = {side: sides[side] for side in ("query", "key")}
        pair_names = []
        for query in strongest.query:
            pair_names += [f"{writers[query]} × {writers[key]}" for key in strongest.key]
        groups = [GROUPS.index(group_of(name, view.n_layers)) for name in writers]
        return cls(head, writers, np.array(groups), sides, pair_names, pairs.astype(np.float64))

    def writer_tables(self, queries: Sequence[str]) -> list[pd.DataFrame]:
        """Return the totals, and the means of each side's writers and of pairs."""
        totals = {"score": self.sides["query"].sum(1)}  # the key parts have the same sum
        for side, parts in self.sides.items():
            if side not in ("query", "key"):
                totals[side] = parts.sum(1)
        columns = np.stack(list(totals.values()), 1)
        tables = [_mean_rows(self.head, "total", list(totals), columns, queries)]
        for side, parts in self.sides.items():
            tables.append(_sorted_rows(self.head, side, self.writers, parts, queries))
        tables.append(_sorted_rows(self.head, "pair", self.pair_names, self.pairs, queries))
        return tables

    def group_tables(self, queries: Sequence[str]) -> list[pd.DataFrame]:
        """Return the means of each side, summed over groups of writers."""
        tables = []
        for side, parts in self.sides.items():
            sums = []
            for number in range(len(GROUPS)):
                sums.append(parts[:, self.group_indices == number].sum(1))
            by_group = np.stack(sums, axis=1)
            tables.append(_mean_rows(self.head, side, GROUPS, by_group, queries))
        return tables


def _part_columns(acts: Activations, rows: list[int], heads: Sequence[Head]) -> dict[str, Any]:
    """Return a chunk of the first pass as columns, with one row per head, prompt and writer."""
    batch = acts.batch
    columns_of_heads: list[dict[str, Any]] = []
    is_exact = True
    for head in heads:
        parts = attention_score_parts(acts, head)
        contrast = parts.contrast(parts.of_label(batch.answer))
        sides = [contrast.query_side, contrast.key_side]
        with suppress(InputError):  # raised for models with a logit soft-cap
            values = value_parts(acts, head, batch.answer_tokens, against=batch.other_label_tokens)
            is_exact, is_true = values.is_exact, values.of_label(batch.answer)
            sides += [(values.parts * role[..., None]).sum(1) for role in (is_true, ~is_true)]
        sides += [torch.full_like(sides[0], torch.nan)] * (len(SIDES) - len(sides))
        columns_of_heads.append(_columns(head, rows, dict(zip(SIDES, sides, strict=True))))
    columns = _concatenate(columns_of_heads)
    return {**columns, "is_exact": np.full(len(columns["prompt"]), is_exact)}


def _pair_columns(
    acts: Activations, rows: list[int], strongest: dict[Head, _StrongestWriters]
) -> dict[str, Any]:
    """Return a chunk of the second pass as columns, with one row per head, prompt and pair."""
    columns_of_heads: list[dict[str, Any]] = []
    for head, (query, key) in strongest.items():
        parts = attention_score_parts(acts, head)
        contrast = parts.contrast(parts.of_label(acts.batch.answer))
        pairs = einsum(
            contrast.query_parts[:, query],
            contrast.key_parts[:, key],
            "batch query d, batch key d -> batch query key",
        )
        columns_of_heads.append(_columns(head, rows, {"value": pairs.flatten(1)}))
    return _concatenate(columns_of_heads)


def _columns(
    head: Head, rows: list[int], values: dict[str, Float[Tensor, "row number"]]
) -> dict[str, Any]:
    """Return the columns prompt, layer, head, number (of the writer or pair) and values."""
    n_rows, n_numbers = next(iter(values.values())).shape
    columns: dict[str, Any] = {
        "prompt": np.repeat(np.array(rows, np.int32), n_numbers),
        "layer": np.full(n_rows * n_numbers, head.layer, np.int16),
        "head": np.full(n_rows * n_numbers, head.head, np.int16),
        "number": np.tile(np.arange(n_numbers, dtype=np.int32), n_rows),
    }
    for name, tensor in values.items():
        columns[name] = tensor.flatten().float().cpu().numpy()
    return columns


def _concatenate(columns_of_heads: list[dict[str, Any]]) -> dict[str, Any]:
    joined = {}
    for name in columns_of_heads[0]:
        joined[name] = np.concatenate([columns[name] for columns in columns_of_heads])
    return joined


def _name(head: AnyHead) -> str:
    return str(as_head(head))


def _fill(
    by_head: dict[Head, np.ndarray], rows: list[int], chunk: pa.Table, names: Sequence[str]
) -> None:
    """Write a chunk's values into each head's table [name prompt number]."""
    start = 0
    for table in by_head.values():
        n = len(rows) * table.shape[2]
        for values, name in zip(table, names, strict=True):
            values[rows] = chunk.column(name).slice(start, n).to_numpy().reshape(len(rows), -1)
        start += n


def _strongest(parts: Float[np.ndarray, "side prompt writer"], n: int) -> _StrongestWriters:
    """Return the n query writers and key writers with the largest mean parts."""
    query, key = np.abs(parts[:2].astype(np.float64).mean(1))
    return _StrongestWriters(_largest(query, n), _largest(key, n))


def _largest(values: Float[np.ndarray, " writer"], n: int) -> list[int]:
    return np.argsort(-values, kind="stable")[:n].tolist()


def _sorted_rows(
    head: Head,
    side: str,
    writers: Sequence[str],
    parts: Float[np.ndarray, "prompt writer"],
    queries: Sequence[str],
) -> pd.DataFrame:
    """Return mean parts, the largest magnitude first."""
    rows = _mean_rows(head, side, writers, parts, queries)
    return rows.sort_values("value", key=abs, ascending=False, kind="stable")


def _mean_rows(
    head: Head,
    side: str,
    writers: Sequence[str],
    rows: Float[np.ndarray, "prompt writer"],
    queries: Sequence[str],
) -> pd.DataFrame:
    mean, low, high = mean_intervals(rows, queries)
    return pd.DataFrame(
        {
            "name": str(head),
            "side": side,
            "writer": list(writers),
            "value": mean,
            "low": low,
            "high": high,
        }
    )
