"""Mean score parts and value parts of some heads over any number of prompts, with intervals: in chunks, resumable.

1. First pass, per prompt and head: the score of true labels (those equal to the answer) minus that of false labels, by
   writer at the last position and by writer at the labels; and what values add to the answer from either, by writer.
2. The strongest writers of a side are those of largest mean part. Second pass: the parts of their pairs.
3. Means and 95% bootstrap intervals over queries, each with all its prompts.

Chunks hold every prompt's parts, so a resumed run writes the same bytes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from icl_lens.activations.activations import Activations, capture
from icl_lens.activations.writers import writer_names
from icl_lens.attribution.increases import check_target_ids
from icl_lens.attribution.reasons import because
from icl_lens.attribution.score_parts import attention_score_parts
from icl_lens.attribution.value_parts import value_parts
from icl_lens.attribution.writer_groups import GROUPS, group_of
from icl_lens.display import (
    SHOWN_ROWS,
    ShownAsTable,
    format_signed,
    interval_suffix,
    interval_texts,
    json_records,
    plural_prompts,
)
from icl_lens.errors import InputError, check_choice
from icl_lens.locate.distributed import Distributed
from icl_lens.locate.run_folder import RunFolder
from icl_lens.locate.stream import BYTE_BUDGET, ChunkStream, plan_batches
from icl_lens.metrics import mean_intervals
from icl_lens.models.head import Head
from icl_lens.models.view import ModelView
from icl_lens.progress import Progress, reported
from icl_lens.prompts.batch import PromptBatch
from icl_lens.prompts.prompt import Prompt
from icl_lens.prompts.tokenize import tokenize

SIDES = ("query", "key", "value of true labels", "value of false labels")
"""Sides in chunks and tables: parts of the score difference, by writer at the last position and at the labels; parts of
what values add to the answer from either kind of label, nats."""


@dataclass(frozen=True, repr=False, eq=False)
class MeanScoreParts(ShownAsTable):
    """Why heads attend to true labels rather than false ones, and what their values carry: means over prompts.

    True labels are those equal to the answer. Score parts of a side sum to the score difference; value parts, in nats,
    to what the head adds to the answer. Intervals are 95% bootstrap intervals over queries; NaN for a single query.

    Example:
        >>> found = il.mean_score_parts(model, il.load_task("sentiment-number", n=20, layout="random"), heads=["L5H0"])
        >>> found.to_frame().columns.tolist()
        ['name', 'side', 'writer', 'value', 'low', 'high']
    """

    heads: tuple[Head, ...]
    n_prompts: int
    n_queries: int
    """Number of distinct queries, which the intervals resample."""
    values_are_exact: bool
    """Whether value parts are exact (two labels) or first-order."""
    writers: pd.DataFrame = field(repr=False)
    groups: pd.DataFrame = field(repr=False)

    def to_frame(self, table: Literal["writers", "groups"] = "writers") -> pd.DataFrame:
        """Return name, side, writer, value (mean), low and high, largest magnitude first within a head and side.

        "writers": sides "query", "key", "value of true labels" and "value of false labels" have all writers; "pair" has
        the pairs ("F20 × L22H1") of the strongest query and key writers; "total" has the score difference ("score") and
        what values add in total. "groups": the sides by kind and depth of writers ("early FFNs": of the first half of
        the layers).
        """
        check_choice("table", table, ("writers", "groups"))
        return (self.writers if table == "writers" else self.groups).copy()

    def total(self, head: Head | tuple[int, int] | str, what: str = "score") -> tuple[float, float, float]:
        """Return the mean, low and high of a head's "score" difference, or of a side of values, nats."""
        name = str(head if isinstance(head, str) else Head(*head))
        totals = self.writers[self.writers["side"] == "total"].set_index(["name", "writer"])
        if (name, what) not in totals.index:
            raise InputError(
                f"what must be 'score' or a side of values, and head one of {self.heads}, got {what!r}, {name}"
            )
        return tuple(totals.loc[(name, what), ["value", "low", "high"]])

    def strongest(self, head: Head | tuple[int, int] | str, side: str, n: int = 6) -> pd.DataFrame:
        """Return a head's n strongest writers or pairs of a side: writer, value, low, high."""
        name = str(head if isinstance(head, str) else Head(*head))
        rows = pd.DataFrame(self.writers[(self.writers["name"] == name) & (self.writers["side"] == side)])
        return pd.DataFrame(rows[["writer", "value", "low", "high"]].head(n).reset_index(drop=True))

    def sentence(self, head: Head | str) -> str:
        """Return, in words, why a head attends to true labels rather than false ones, or that it does not."""
        value, low, high = self.total(head)
        interval = interval_suffix(low, high)
        if low <= 0 <= high:
            return f"{head} scores true and false labels alike: difference {value:+.2f}{interval}."
        strongest = (self.strongest(head, side) for side in ("query", "key"))
        sides = [list(zip(rows["writer"], rows["value"], strict=True)) for rows in strongest]
        above = "above" if value > 0 else "below"
        scored = f"{head} scores true labels {above} false labels by {abs(value):.2f}{interval}"
        return f"{scored}. Largest parts: {because(*sides, above=value > 0)}."

    def to_dict(self) -> dict[str, Any]:
        """Return the counts, each head's sentence and both tables as numbers and strings for JSON."""
        return {
            "n_prompts": self.n_prompts,
            "n_queries": self.n_queries,
            "values_are_exact": self.values_are_exact,
            "sentences": {str(head): self.sentence(head) for head in self.heads},
            "writers": json_records(self.writers),
            "groups": json_records(self.groups),
        }

    def _shown(self) -> tuple[str, dict[str, list[Any]], int]:
        rows = self.writers.groupby(["name", "side"], sort=False).head(3).head(SHOWN_ROWS)
        columns: dict[str, list[Any]] = {name: rows[name].tolist() for name in ("name", "side", "writer")}
        columns["mean"] = [format_signed(value) for value in rows["value"]]
        columns["95% interval"] = interval_texts(rows)
        return f"MeanScoreParts: mean over {plural_prompts(self.n_prompts)}", columns, len(self.writers)


def mean_score_parts(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    heads: Sequence[Head | tuple[int, int] | str],
    *,
    n_strongest: int = 6,
    batch_size: int | None = None,
    byte_budget: int = BYTE_BUDGET,
    folder: RunFolder | None = None,
    distributed: Distributed | None = None,
    progress: Progress | bool | None = None,
    warn: Callable[[str], None] | None = None,
) -> MeanScoreParts:
    """Return mean `attention_score_parts` and `value_parts` of heads over prompts with demonstrations, with intervals.

    Scores are those from the last position: the mean over true labels (those equal to the answer) minus that over false
    labels. `n_strongest` writers of each side are paired. Values count against all other labels; models with a logit
    soft-cap have none. Memory grows with the number of prompts by four numbers per head and writer. `folder`,
    `distributed`, `progress` and `warn` are those of `locate_effects`.

    Raise InputError for unknown heads, prompts without an answer or without true or false labels, an unsupported
    family, and for a `folder` that is not writable or whose configuration does not have `by="score parts"`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20, layout="random"))
        >>> found = il.mean_score_parts(model, many, ["L5H0"])
        >>> found.n_prompts, len(found.total("L5H0"))
        (20, 3)
    """
    batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    distributed, view = distributed or Distributed(), ModelView.of(model)
    chosen = tuple(dict.fromkeys(view.check_head(head) for head in heads))
    if not chosen:
        raise InputError("heads must name at least one head, got none; pass e.g. ['L2H1']")
    if n_strongest < 1:
        raise InputError(f"n_strongest must be at least 1, got {n_strongest}")
    batch.require_labels("true label", "pass prompts with demonstrations")
    check_target_ids(view, batch.answer_tokens, len(batch))
    if folder is not None:
        folder.check_by("score parts")
    plan = plan_batches(view, batch, batch_size=batch_size, byte_budget=byte_budget)
    names = {head: writer_names(view, head.layer) for head in chosen}

    with reported(progress) as report:
        stream = ChunkStream(plan, folder, distributed, report, warn)

        def chunks(kind: str, columns: Callable[[Activations, list[int]], dict[str, Any]]) -> Any:
            """Yield the rows and the chunk of every batch, in the main process."""

            def compute(number: int) -> dict[str, Any]:
                return columns(capture(model, batch[plan[number]], writers=True), plan[number])

            return zip(plan, stream.chunks(kind, range(len(plan)), compute), strict=False)

        values = {head: np.empty((len(SIDES), len(batch), len(names[head])), np.float32) for head in chosen}
        is_exact = True
        for rows, chunk in chunks("part", lambda acts, rows: _part_columns(acts, rows, chosen)):
            _fill(values, rows, chunk, SIDES)
            is_exact = bool(chunk.column("is_exact")[0].as_py())
        selected = distributed.run_on_main(
            lambda: {head: _strongest(of_head, n_strongest) for head, of_head in values.items()}
        )
        pairs = {
            head: np.empty((1, len(batch), len(query) * len(key)), np.float32)
            for head, (query, key) in selected.items()
        }
        for rows, chunk in chunks("pairs", lambda acts, rows: _pair_columns(acts, rows, selected)):
            _fill(pairs, rows, chunk, ("value",))

    def collected() -> MeanScoreParts:
        queries = [prompt.query for prompt in batch.prompts]
        writers, groups = list[pd.DataFrame](), list[pd.DataFrame]()
        for head in chosen:
            of_head = dict(zip(SIDES, values[head].astype(np.float64), strict=True))
            if np.isnan(of_head[SIDES[2]]).all():  # no values with a soft-cap
                of_head = {side: of_head[side] for side in SIDES[:2]}
            totals = {
                "score" if side == "query" else side: rows.sum(1) for side, rows in of_head.items() if side != "key"
            }
            writers.append(_mean_rows(head, "total", list(totals), np.stack(list(totals.values()), 1), queries))
            query, key = ([names[head][i] for i in side] for side in selected[head])
            of_pairs = pairs[head][0].astype(np.float64)
            pair_names = [f"{one} × {other}" for one in query for other in key]
            for side, side_names, rows in [
                *((side, names[head], rows) for side, rows in of_head.items()),
                ("pair", pair_names, of_pairs),
            ]:
                found = _mean_rows(head, side, side_names, rows, queries)
                writers.append(found.sort_values("value", key=abs, ascending=False, kind="stable"))
            group = np.array([GROUPS.index(group_of(name, view.n_layers)) for name in names[head]])
            for side, rows in of_head.items():
                by_group = np.stack([rows[:, group == number].sum(1) for number in range(len(GROUPS))], axis=1)
                groups.append(_mean_rows(head, side, GROUPS, by_group, queries))
        tables = (pd.concat(frames, ignore_index=True) for frames in (writers, groups))
        return MeanScoreParts(chosen, len(batch), len(set(queries)), is_exact, *tables)

    return distributed.run_on_main(collected)


def _part_columns(acts: Activations, rows: list[int], heads: Sequence[Head]) -> dict[str, Any]:
    """Return a chunk's columns: the parts of every prompt, one row per head, prompt and writer."""
    batch, found, is_exact = acts.batch, list[dict[str, Any]](), True
    for head in heads:
        parts = attention_score_parts(acts, head)
        is_true = parts.of_label(batch.answer)
        contrast = parts.contrast(is_true)
        sides = [contrast.query_side, contrast.key_side]
        with suppress(InputError):  # raised for models with a logit soft-cap
            values = value_parts(acts, head, batch.answer_tokens, against=batch.other_label_tokens)
            is_exact = values.is_exact
            sides += [(values.parts * role[..., None]).sum(1) for role in (is_true, ~is_true)]
        sides += [torch.full_like(sides[0], torch.nan)] * (len(SIDES) - len(sides))
        found.append(_columns(head, rows, dict(zip(SIDES, sides, strict=True))))
    joined = _joined(found)
    return {**joined, "is_exact": np.full(len(joined["prompt"]), is_exact)}


def _pair_columns(acts: Activations, rows: list[int], selected: dict[Head, list[list[int]]]) -> dict[str, Any]:
    """Return a chunk's columns: the parts of pairs of the selected query and key writers of every prompt."""
    found = list[dict[str, Any]]()
    for head, (query, key) in selected.items():
        parts = attention_score_parts(acts, head)
        contrast = parts.contrast(parts.of_label(acts.batch.answer))
        pairs = einsum(
            contrast.query_parts[:, query], contrast.key_parts[:, key], "row query d, row key d -> row query key"
        )
        found.append(_columns(head, rows, {"value": pairs.flatten(1)}))
    return _joined(found)


def _columns(head: Head, rows: list[int], values: dict[str, Float[Tensor, "row number"]]) -> dict[str, Any]:
    """Return the columns prompt, layer, head, number (of the writer or pair) and values."""
    n, count = next(iter(values.values())).shape
    return {
        "prompt": np.repeat(np.array(rows, np.int32), count),
        "layer": np.full(n * count, head.layer, np.int16),
        "head": np.full(n * count, head.head, np.int16),
        "number": np.tile(np.arange(count, dtype=np.int32), n),
        **{name: one.flatten().float().cpu().numpy() for name, one in values.items()},
    }


def _joined(columns: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}


def _fill(by_head: dict[Head, np.ndarray], rows: list[int], chunk: pa.Table, names: Sequence[str]) -> None:
    """Write a chunk's values into each head's table [name prompt number]."""
    start = 0
    for table in by_head.values():
        n = len(rows) * table.shape[2]
        for values, name in zip(table, names, strict=True):
            values[rows] = chunk.column(name).slice(start, n).to_numpy().reshape(len(rows), -1)
        start += n


def _strongest(values: Float[np.ndarray, "side prompt writer"], n: int) -> list[list[int]]:
    """Return the indices of the n query writers and key writers of largest mean part, strongest first."""
    means = np.abs(values[:2].astype(np.float64).mean(1))
    return [np.argsort(-side, kind="stable")[:n].tolist() for side in means]


def _mean_rows(
    head: Head, side: str, writers: Sequence[str], rows: Float[np.ndarray, "prompt writer"], queries: list[str]
) -> pd.DataFrame:
    mean, low, high = mean_intervals(rows, queries)
    return pd.DataFrame(
        {"name": str(head), "side": side, "writer": list(writers), "value": mean, "low": low, "high": high}
    )
