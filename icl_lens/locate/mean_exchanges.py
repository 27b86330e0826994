"""Compute what exchanging each head's query, keys or values costs the answer, on average, in resumable chunks.

1. Donors are made once, from all prompts: the query that takes a prompt's place comes from another one (see
   `prompts.donors`). What a batch computes therefore does not depend on how prompts are divided into batches.
2. Each batch's chunk has the log-odds that the exchanges of `exchanges.SINGLE` cost every prompt in each single head;
   `streamed_means` adds them up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from icl_lens.locate.chunk import index_columns, repeated_column
from icl_lens.locate.exchanges import SINGLE, single_exchanges, tower_prompts
from icl_lens.locate.streamed_means import MeanScore, StreamedMeans, heads_frame
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
from icl_lens.runs.run import Run, as_run
from icl_lens.runs.stream import start

NAMES = tuple(exchange.name for exchange in SINGLE)


@dataclass(frozen=True, repr=False)
class MeanExchanges(Result):
    """Mean log-odds (nats) that the answer loses if one head alone takes its query, keys or values from a donor prompt.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> found = il.locate_towers(model, many)
        >>> found.query.mean.shape, found.to_frame().columns.tolist()[:6]
        (torch.Size([8, 6]), ['name', 'query', 'low', 'high', 'selected', 'keys'])
    """

    version: ClassVar[int] = 2
    query: MeanScore
    """The query at the last position is that of the same demonstrations with a query of the other class."""
    keys: MeanScore
    """The keys at the labels are those of the prompt with the texts of the two classes exchanged."""
    values: MeanScore
    """The values at the labels are those of the prompt with the two labels exchanged."""
    n_prompts: int
    n_queries: int
    """Number of distinct queries, which the intervals resample."""
    k: int
    """Number of heads of the list that `selected` refers to."""
    fallback_reason: str = ""
    """Why full forward passes were used instead of the prefix cache; empty if it was used for all prompts."""
    edits: tuple[str, ...] = ()
    """What edited the model, in words: edits of open `with` blocks, and hooks. Empty if nothing edits it."""

    def top(self, k: int) -> list[Head]:
        """Return the k heads whose query costs most, largest first."""
        order = self.query.mean.flatten().argsort(descending=True, stable=True)[:k]
        return [Head.from_index(index, self.query.mean.shape[1]) for index in order.tolist()]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per head, largest effect of the query first.

        The columns are name; query, low and high (its interval); selected, the share of draws of queries in which the
        head is among the first `k` by query; keys and values; rank, layer and head.
        """
        heads = self.top(self.query.mean.numel())
        scores = {"query": self.query.mean, "low": self.query.low, "high": self.query.high}
        scores["selected"] = self.query.selected
        return heads_frame(heads, scores | {"keys": self.keys.mean, "values": self.values.mean})

    @property
    def finding(self) -> str:
        """How many of the first `k` heads have an effect of the query whose interval excludes zero."""
        return list_finding(
            self.to_frame(),
            self.k,
            "effect of exchanging the query",
            n_heads=self.query.mean.numel(),
        )

    def summary(self) -> str:
        """Return one or two sentences on what is exchanged, the number of prompts, and the intervals."""
        text = (
            "Log-odds that the answer loses if, at the last position, one head alone takes its query from the prompt "
            "with a query of the other class, its keys from the prompt with exchanged texts, or its values from the "
            f"prompt with exchanged labels: mean over {plural_prompts(self.n_prompts)}; 95% intervals over "
            f"{self.n_queries:,} distinct queries."
        )
        if self.fallback_reason:
            text += f" Full forward passes where the prefix cache could not be used: {self.fallback_reason}."
        text += f" {selected_note(self.k, self.query.mean.numel()).capitalize()}."
        return text + (f" {edits_note(self.edits)}" if self.edits else "")

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        frame = self.to_frame().head(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {"head": frame["name"].tolist()}
        columns |= {"query": list(map(signed, frame["query"])), "95% interval": interval_texts(frame)}
        columns["selected"] = list(map(format_share, frame["selected"]))
        columns |= {name: list(map(signed, frame[name])) for name in ("keys", "values")}
        title = f"Exchanges of single heads, log-odds lost, nats: mean over {plural_prompts(self.n_prompts)}"
        n = self.query.mean.numel()
        title += f"; {selected_note(self.k, n)}"
        return table_view(title, columns, n, finding=self.finding)


def locate_towers(
    model: Any,
    prompts: PromptBatch | Sequence[Prompt],
    *,
    k: int | None = None,
    run: Run | None = None,
) -> MeanExchanges:
    """Return what exchanging each single head's query, keys or values costs the answer, over any number of prompts.

    This is the scan by which `two_towers` finds heads: its exchanges "query", "keys" and "values", each in one head at
    a time. The query costs most in heads that need to know its class, such as those that match it with demonstrations.

    `k` and `run` are those of `locate_effects`. Donors are made from all prompts before the first batch. An exchange
    costs one token per prompt and head, from the head's layer on (see `head_effects`), or a full forward pass if the
    prefix cache is not supported.

    Raise InputError for an invalid `k`, prompts that do not demonstrate their answer and another label, families whose
    attention cannot be recomputed, and like `Run`.

    Example:
        >>> many = il.tokenize(model, il.load_task("sentiment-number", n=20))
        >>> found = il.locate_towers(model, many)
        >>> len(found.top(4)), found.n_prompts
        (4, 20)
    """
    batch = prompts if isinstance(prompts, PromptBatch) else tokenize(model, prompts)
    view = ModelView.of(model)
    all_prompts = tower_prompts(model, batch, own_texts=False)

    def compute(number: int) -> dict[str, Any]:
        rows = stream.plan[number]
        lost, reason = single_exchanges(view, all_prompts.select(rows), memory=as_run(run).memory)
        n = len(rows) * len(view.heads())
        return {
            **index_columns(np.array(rows), np.arange(len(view.heads())), view.n_heads),
            **{name: lost[:, i].flatten().numpy() for i, name in enumerate(NAMES)},
            "fallback_reason": repeated_column(reason, n),
        }

    means = StreamedMeans(view, batch.queries, k)
    with start(run, model, batch, "towers", {}) as stream:
        for _, chunk in stream.chunks("part", range(len(stream.plan)), compute):
            means.add(chunk, NAMES)

    def mean_exchanges() -> MeanExchanges:
        found, sizes = means.means(), (batch.n_prompts, means.n_queries("query"), means.k)
        scores = found["query"], found["keys"], found["values"]
        result = MeanExchanges(*scores, *sizes, means.fallback_reason, edits=active_edits(view))
        counts = means.counts(batch.n_prompts, "query") | {"fallback_reason": means.fallback_reason or None}
        stream.write_result({"heads": result.to_frame()}, counts)
        return result

    return stream.distributed.run_on_main(mean_exchanges)
