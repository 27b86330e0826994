"""One score of every head, with its definition, intervals, and the heads that have its kind."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from icl_lens.analyses.atlas.definitions import ScoreDefinition
from icl_lens.analyses.atlas.kinds import discoveries, q_values
from icl_lens.errors import check_at_least
from icl_lens.models.head import Head
from icl_lens.result.base import Displayed
from icl_lens.result.number_format import decimal, signed
from icl_lens.result.tables import SHOWN_ROWS, columns_first, format_share, long_frame
from icl_lens.result.view import View, table_view

NOT_MEANS = {
    "weights": "from weights",
    "published": "from a published list",
    "file": "read from a file",
    "given": "given as numbers",
}
"""What a score that is no mean was measured on, in words."""


@dataclass(frozen=True)
class AttentionElsewhere:
    """What heads attend to most, of all numbers of tokens back but that of a kind.

    Only random tokens shown twice are measured, without attention to the first token.
    """

    share: Float[Tensor, "layer head"]
    """Mean attention, 0 to 1."""
    n_back: Int[Tensor, "layer head"]
    """How many tokens back it goes."""
    n_tokens: int
    """After how many tokens the same token is shown again."""

    def token(self, head: Head) -> str:
        """Return in words which token a head attends to most elsewhere."""
        n_back = int(self.n_back[head])
        if n_back == 0:
            return "the token itself"
        if n_back == 1:
            return "the token before"
        if n_back == self.n_tokens:
            return "the earlier copy of the same token"
        if n_back == self.n_tokens - 1:
            return "the token after the earlier copy"
        if n_back == self.n_tokens - 2:
            return "the second token after the earlier copy"
        return f"the token {n_back} back"


@dataclass(frozen=True, repr=False)
class HeadScore(Displayed):
    """One score of every head, with its definition and source.

    Example:
        >>> atlas = il.head_atlas(model, n_sequences=8)
        >>> induction = atlas["induction"]
        >>> induction.unit, induction.n, induction.over, len(induction.top(3))
        ('share', 8, 'sequences', 3)
        >>> induction.to_frame().columns.tolist()
        ['name', 'mean', 'low', 'high', 'selected', 'layer', 'head']
    """

    name: str
    title: str
    definition: str
    """One sentence."""
    source: str
    """Papers, by their numbers on arXiv; the name of the file for a score that was read from
    one.
    """
    unit: str
    over: str
    """What `mean` is a mean over: "prompts", "sequences", "texts" or "tokens"; "weights",
    "published", "file" or "given" for a number that is no mean.
    """
    n: int
    """How many of them; 1 for weights and files."""
    cost: str
    """In forward passes, beside those that other scores share with it."""
    mean: Float[Tensor, "layer head"]
    """NaN for heads that a file does not list."""
    low: Float[Tensor, "layer head"]
    """The low end of the 95% interval; NaN where there is none."""
    high: Float[Tensor, "layer head"]
    selected: Float[Tensor, "layer head"]
    """In which share of draws of queries, sequences or texts the head is among the first `k` of the
    atlas; NaN where there are fewer than three.
    """
    kind: str = ""
    """What heads are called that stand out by this score; empty if it was not tested."""
    p_value: Float[Tensor, "layer head"] | None = None
    """The p-value of each head against the null of the kind (`icl_lens.analyses.atlas.kinds`); None if it
    was not tested.
    """
    elsewhere: AttentionElsewhere | None = None
    """What heads attend to besides, for kinds of attention: a head that attends to it more than to
    the token of the kind does not have it.
    """

    @classmethod
    def of(cls, definition: ScoreDefinition, mean: Tensor, **fields: Any) -> "HeadScore":
        """Return a score; without `low`, `high` and `selected`, these are NaN."""
        missing = torch.full_like(mean, torch.nan)
        columns = {name: fields.pop(name, missing) for name in ("low", "high", "selected")}
        return cls(
            definition.name,
            definition.title,
            definition.definition,
            definition.source,
            definition.unit,
            definition.over,
            fields.pop("n", 1),
            definition.cost,
            mean,
            **columns,
            **fields,
        )

    def top(self, k: int) -> list[Head]:
        """Return the k heads with the largest means, largest first; heads without a number are left
        out.

        Example:
            >>> atlas = il.head_atlas(model, n_sequences=2)
            >>> len(atlas["copying"].top(2))
            2
        """
        (k,) = check_at_least(1, k=k)
        values = self.mean.flatten()
        order = values.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        order = order[: min(k, int((~values.isnan()).sum()))]
        return [Head.from_index(index, self.mean.shape[1]) for index in order.tolist()]

    def heads_of_kind(self, rate: float) -> list[Head]:
        """Return the heads that stand out, largest means first, at a rate of false discoveries."""
        if self.p_value is None:
            return []
        has_kind = discoveries(self.p_value, rate)
        return [head for head in self.top(self.mean.numel()) if has_kind[head]]

    def rank(self, head: Head) -> int | None:
        """Return the place of a head among all heads, 1 for the largest mean; heads with the same
        mean share the first place. None for a head without a number.
        """
        value = self.mean[head]
        return None if value.isnan() else 1 + int((self.mean > value).sum())

    @cached_property
    def q_value(self) -> Float[Tensor, "layer head"] | None:
        """The smallest rate of false discoveries at which each head has the kind; None if it was
        not tested.
        """
        return None if self.p_value is None else q_values(self.p_value)

    def to_frame(self) -> pd.DataFrame:
        """Return name, mean, low, high, selected, layer and head: one row a head, largest first."""
        frame = long_frame(self.mean, ("layer", "head"), value="mean")
        for name in ("low", "high", "selected"):
            frame[name] = getattr(self, name).flatten().numpy()
        frame = columns_first(frame, "name", "mean", "low", "high", "selected")
        return frame.sort_values("mean", ascending=False, kind="stable", ignore_index=True)

    def format(self, value: float) -> str:
        """Return a value of the score as text, in its unit."""
        if self.unit in ("share", "AUROC", "score"):
            return decimal(value, 2)
        if self.unit == "probability":  # one head adds little to it
            return decimal(value, 3)
        if self.unit in ("nats", "logit"):
            return signed(value, 2)
        return "–" if math.isnan(value) else f"{value:.3g}".replace("-", "−")

    def to_view(self) -> View:
        """Return the title and the table that `print` shows."""
        frame = self.to_frame().head(SHOWN_ROWS // 2)
        columns: dict[str, list[Any]] = {"head": frame["name"].tolist()}
        columns[self.title] = list(map(self.format, frame["mean"]))
        if not bool(self.low.isnan().all()):
            ends = zip(frame["low"], frame["high"], strict=True)
            columns["95% interval"] = [f"{self.format(a)} … {self.format(b)}" for a, b in ends]
            columns["selected"] = list(map(format_share, frame["selected"]))
        title = f"HeadScore({self.title}{f', {self.unit}' * bool(self.unit)}; {self.samples})"
        return table_view(title, columns, self.mean.numel())

    @property
    def samples(self) -> str:
        """What the score was measured on, in words."""
        if self.over in NOT_MEANS:
            return NOT_MEANS[self.over]
        return f"mean over {self.n:,} {self.over.removesuffix('s') if self.n == 1 else self.over}"
