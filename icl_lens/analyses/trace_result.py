"""What exchanges at each site, layer and token role cost, and the sentence that follows from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import pandas as pd
from jaxtyping import Float

from icl_lens.intervals import MIN_CLUSTERS, Interval, mean_intervals
from icl_lens.models.active_edits import edits_note
from icl_lens.result.base import Result
from icl_lens.result.number_format import interval_text, joined, signed, signed_ends
from icl_lens.result.tables import plural_prompts
from icl_lens.result.view import Column, Section, View

SUBJECTS = {
    "query": "The query's class",
    "texts": "Which texts have which class",
    "labels": "Which label stands where",
}
"""What donors exchange."""
MIN_SHARE = 0.1
"""Least share of what donors themselves cost that an exchange must cost to be said."""
PLACES = {
    "texts": "in the texts of the demonstrations",
    "labels": "at the labels",
    "query": "in the query text",
    "separators": "at the separators",
    "last": "at the last position",
}


@dataclass(frozen=True, repr=False, eq=False)
class Trace(Result):
    """What exchanging each site, layer and token role costs; made by `trace`.

    `lost` has the values of every prompt; intervals resample queries, since prompts with the same
    query are not independent.

    Example:
        >>> traced = il.trace(model, il.load_task("sentiment-number", n=8), "labels", layers=[1, 7])
        >>> traced.lost.shape  # [prompt site role layer]
        (8, 1, 5, 2)
    """

    version: ClassVar[int] = 1
    model: str
    donors: str
    """What the donors exchange: "query", "texts", "labels", or "your donors"."""
    sites: tuple[str, ...]
    roles: tuple[str, ...]
    """Token roles or, for plain texts, positions with the token of the first text."""
    layers: tuple[int, ...]
    n_layers: int
    """Number of the model's layers, of which `layers` are some or all."""
    lost: Float[np.ndarray, "prompt site role layer"]
    """Log-odds that the answer loses, nats; 0 where no token differs up to the role's last."""
    control_lost: Float[np.ndarray, "prompt site role layer"] | None
    """The same with control donors; None for donors of your own without controls."""
    log_odds: Float[np.ndarray, " prompt"]
    """The answer's log-odds without exchange, nats."""
    donor_log_odds: Float[np.ndarray, " prompt"]
    """The same tokens' log-odds after the donor itself, nats: what exchanging everything gives."""
    queries: tuple[str, ...]
    answers: tuple[str, ...]
    text: str
    """The first prompt."""
    edits: tuple[str, ...] = ()
    """What edited the model: edits of open `with` blocks, and hooks. Empty for the plain model."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row per site, role and layer: means over prompts with 95% intervals, nats.

        Columns: site, role, layer, log_odds_lost, low, high; with a control also control, and the
        difference from it, with difference_low and difference_high.
        """
        index = pd.MultiIndex.from_product(
            [self.sites, self.roles, self.layers], names=["site", "role", "layer"]
        )
        frame = index.to_frame(index=False)
        mean, low, high = self._intervals(self.lost)
        frame = frame.assign(log_odds_lost=mean, low=low, high=high)
        if self.control_lost is None:
            return frame
        difference, difference_low, difference_high = self._intervals(self._beyond_control)
        return frame.assign(
            control=self.control_lost.mean(0).flatten(),
            difference=difference,
            difference_low=difference_low,
            difference_high=difference_high,
        )

    @property
    def _beyond_control(self) -> Float[np.ndarray, "prompt site role layer"]:
        return self.lost if self.control_lost is None else self.lost - self.control_lost

    def _intervals(
        self, values: Float[np.ndarray, "prompt site role layer"]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the mean and the interval's ends of each column, in the order of `to_frame`."""
        return mean_intervals(values.reshape(len(values), -1), self.queries)

    @cached_property
    def carried(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """(site, role) -> the layers at which it carries what the donors exchange.

        There, the exchange costs more than the control (the interval of the difference is above
        zero), at least half of the largest such difference of the site, and at least `MIN_SHARE` of
        what the donors themselves cost.
        """
        whole = self.whole
        least = MIN_SHARE * whole.value
        shape = self.lost.shape[1:]
        difference, low, _ = (
            column.reshape(shape) for column in self._intervals(self._beyond_control)
        )
        is_above = (low > 0) & (whole.low > 0)
        carried = {}
        for number, site in enumerate(self.sites):
            largest = difference[number].max(where=is_above[number], initial=0.0)
            is_large = difference[number] >= max(least, largest / 2)
            for role_number, role in enumerate(self.roles):
                is_carried = is_above[number, role_number] & is_large[role_number]
                (places,) = is_carried.nonzero()
                carried[site, role] = tuple(self.layers[place] for place in places)
        return carried

    @property
    def whole(self) -> Interval:
        """Log-odds that the donors themselves give less than the prompts, nats."""
        lost = self.log_odds - self.donor_log_odds
        value, low, high = mean_intervals(lost[:, None], self.queries)
        return Interval(float(value[0]), float(low[0]), float(high[0]))

    @property
    def _donor_difference(self) -> str:
        """The donors' log-odds minus those of the prompts, in words."""
        return interval_text(-self.whole.value, -self.whole.high, -self.whole.low)

    @property
    def finding(self) -> str:
        """Where the first site carries what the donors exchange, in one sentence."""
        site = self.sites[0]
        if len(set(self.queries)) < MIN_CLUSTERS:
            return (
                f"{plural_prompts(len(self.queries))} with fewer than {MIN_CLUSTERS} different "
                "queries give no intervals, so that nothing is concluded."
            )
        if not self.whole.low > 0:
            return (
                "It is not shown that the donors themselves lower the answer's log-odds, so that "
                f"there is nothing to trace (difference, nats: {self._donor_difference})."
            )
        compared = "zero" if self.control_lost is None else "the control"
        clauses = []
        for role in self.roles:
            layers = self.carried[site, role]
            if layers:
                place = PLACES.get(role, f"at position {role}")
                clauses.append(f"{place} {layers_in_words(layers, self.layers)}")
        subject = SUBJECTS.get(self.donors, "What your donors exchange")
        if not clauses:
            return (
                f"No exchange at {site} is shown to cost the answer much more than {compared}: "
                f"where the model holds {_lower_first(subject)} is not found."
            )
        return f"{subject} is {joined(clauses)} ({site})."

    def to_view(self) -> View:
        """Return the finding, and a table per site: the largest loss of each role, and the layers
        that carry what is exchanged.
        """
        compared = "zero" if self.control_lost is None else "the control"
        sentences = (
            self.finding,
            f"A layer is named if the exchange there costs more than {compared} (the interval of "
            "the difference is above zero), at least half of the largest such difference of the "
            f"site, and {MIN_SHARE:.0%} of what the donors themselves cost.",
            f"Without exchange, the answer's log-odds are {signed(self.log_odds.mean())} nats; the "
            f"donors themselves give {signed(self.donor_log_odds.mean())} (difference "
            f"{self._donor_difference}).",
            *([edits_note(self.edits)] if self.edits else []),
        )
        frame = self.to_frame()
        sections = []
        for number, site in enumerate(self.sites):
            of_site = frame.query("site == @site")
            sections.append(self._section(site, of_site, figure="map" if number == 0 else ""))
        title = f"Trace of {self.donors} over {plural_prompts(len(self.queries))}"
        return View(title, sentences, tuple(sections), about=f"trace · {self.model}")

    def _section(self, site: str, frame: pd.DataFrame, *, figure: str) -> Section:
        columns = [
            Column("role", is_number=False),
            Column("largest loss, nats"),
            Column("95%", is_number=False),
            Column("in layer"),
        ]
        if self.control_lost is not None:
            columns.append(Column("control there"))
        columns.append(Column("carried in layers", is_number=False))
        rows = []
        for role in self.roles:
            of_role = frame.query("role == @role")
            best = of_role.iloc[int(of_role["log_odds_lost"].to_numpy().argmax())]
            ends = signed_ends(best["low"], best["high"])
            cells = [role, float(best["log_odds_lost"]), ends, int(best["layer"])]
            if self.control_lost is not None:
                cells.append(float(best["control"]))
            carried = self.carried[site, role]
            words = layers_in_words(carried, self.layers) if carried else "–"
            rows.append((*cells, words))
        notes = []
        if len(self.layers) < self.n_layers:
            listed = ", ".join(map(str, self.layers))
            notes.append(f"Measured in layers {listed} of {self.n_layers}.")
        return Section(
            f"Exchanged at {site}",
            "What exchanging a role's tokens in one layer costs the answer.",
            tuple(columns),
            tuple(rows),
            notes=tuple(notes),
            figure=figure,
        )


def layers_in_words(carried: Sequence[int], measured: Sequence[int]) -> str:
    """Return layers as words: "in layer 3" or "in layers 3–5 and 9"; layers that follow each other
    among those measured are one stretch.
    """
    stretches: list[list[int]] = []
    for layer in carried:
        place = measured.index(layer)
        if stretches and place and stretches[-1][-1] == measured[place - 1]:
            stretches[-1].append(layer)
        else:
            stretches.append([layer])
    names = [
        str(stretch[0]) if len(stretch) == 1 else f"{stretch[0]}–{stretch[-1]}"
        for stretch in stretches
    ]
    return f"in layer{'s' * (len(carried) > 1)} {joined(names)}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
