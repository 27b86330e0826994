"""What exchanges at each site, layer and token role cost, and the sentence that follows from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from icl_lens.foundation.intervals import MIN_CLUSTERS, Interval, mean_intervals
from icl_lens.models.active_edits import edits_note
from icl_lens.result.base import Result
from icl_lens.result.number_format import decimal, interval_text, joined, signed, signed_ends
from icl_lens.result.tables import plural_prompts
from icl_lens.result.view import Column, Section, View

SUBJECTS = {
    "query": "The query's class",
    "texts": "Which texts have which class",
    "labels": "Which label stands where",
    "means": "What the mean over other prompts lacks",
}
"""What donors exchange."""
MIN_SHARE = 0.1
"""Least share of what donors themselves cost that an exchange must cost to be said."""
MIN_CORRELATION = 0.9
"""Least correlation with exact losses at which estimates say where something is held."""
MAX_ERROR = 0.5
"""Largest error of such estimates, as a share of what donors themselves cost."""
SMALLEST_ERROR = 0.001
"""Nats of the smallest error whose place is said: less may be written as zero."""
PLACES = {
    "texts": "in the texts of the demonstrations",
    "labels": "at the labels",
    "query": "in the query text",
    "separators": "at the separators",
    "last": "at the last position",
}


@dataclass(frozen=True)
class EstimateError:
    """How far estimates are from exact losses, as means over the same prompts."""

    n_prompts: int
    n_exchanges: int
    """Sites, roles and layers at which an exchange may change something."""
    correlation: float
    """Pearson correlation over these; NaN for fewer than two, and if all estimates or all losses
    are equal.
    """
    site: str
    """With `role` and `layer`, where the difference is largest."""
    role: str
    layer: int
    estimated: float
    """The estimate there, nats."""
    exact: float
    """The loss there, nats."""

    @property
    def largest(self) -> float:
        """The largest difference, nats."""
        return abs(self.estimated - self.exact)

    @property
    def correlation_text(self) -> str:
        """The correlation with two decimals, or as many as tell it from `MIN_CORRELATION`; "–" if
        it is not defined.
        """
        digits = 2
        if self.correlation < MIN_CORRELATION:
            while round(self.correlation, digits) >= MIN_CORRELATION:
                digits += 1
        return decimal(self.correlation, digits)

    @classmethod
    def from_frame(cls, losses: pd.DataFrame, n_prompts: int) -> "EstimateError":
        """Return the error of a table with site, role, layer, estimated and exact."""
        losses_of_places = losses[["estimated", "exact"]].to_numpy(float)
        (changing,) = (losses_of_places != 0).any(1).nonzero()
        correlation = float("nan")
        if len(changing) > 1 and np.ptp(losses_of_places[changing], axis=0).min() > 0:
            correlation = float(np.corrcoef(losses_of_places[changing].T)[0, 1])
        largest = int(np.abs(losses_of_places[:, 0] - losses_of_places[:, 1]).argmax())
        (place,) = losses.iloc[[largest]].to_dict("records")
        return cls(
            n_prompts,
            len(changing),
            correlation,
            place["site"],
            place["role"],
            place["layer"],
            place["estimated"],
            place["exact"],
        )


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
    """What the donors exchange: "query", "texts", "labels", "your donors", or "means" of other
    prompts.
    """
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
    method: Literal["exact", "gradient"] = "exact"
    """Whether losses are those of exchanges, or first-order estimates of them."""
    exact_lost: Float[np.ndarray, "checked site role layer"] | None = None
    """With estimates, what exchanges cost the first prompts; None for losses of exchanges."""
    reference: str = ""
    """Over which prompts means are taken, in words; empty for donors."""

    def to_frame(self) -> pd.DataFrame:
        """Return one row per site, role and layer: means over prompts with 95% intervals, nats.

        Columns: site, role, layer, log_odds_lost, low, high; with a control also control, and the
        difference from it, with difference_low and difference_high. With estimates, of which all
        these are, also estimated and exact: means over the prompts that were exchanged, too.
        """
        frame = self._places.to_frame(index=False)
        mean, low, high = self._intervals(self.lost)
        frame = frame.assign(log_odds_lost=mean, low=low, high=high)
        if self._n_checked:
            frame = frame.assign(**self._checked_losses[["estimated", "exact"]])
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
    def _places(self) -> pd.MultiIndex:
        return pd.MultiIndex.from_product(
            [self.sites, self.roles, self.layers], names=["site", "role", "layer"]
        )

    @property
    def _n_checked(self) -> int:
        """Number of prompts with estimates that were exchanged, too."""
        return 0 if self.exact_lost is None else len(self.exact_lost)

    @property
    def _checked_losses(self) -> pd.DataFrame:
        """Site, role and layer with means over the prompts that were exchanged, too: estimated and
        exact.
        """
        assert self.exact_lost is not None
        estimated = self.lost[: self._n_checked].mean(0).flatten()
        exact = self.exact_lost.mean(0).flatten()
        return self._places.to_frame(index=False).assign(estimated=estimated, exact=exact)

    @cached_property
    def estimate_error(self) -> EstimateError | None:
        """How far the estimates are off; None for exact losses, or if no prompt was exchanged."""
        if not self._n_checked:
            return None
        return EstimateError.from_frame(self._checked_losses, self._n_checked)

    @property
    def _is_far_off(self) -> bool:
        """Whether estimates are known to be too far from exact losses to say where something is
        held: by their correlation, if it is defined, and by the largest difference.
        """
        error = self.estimate_error
        if error is None:
            return False
        has_low_correlation = error.correlation < MIN_CORRELATION  # not if it is not defined
        return has_low_correlation or error.largest > MAX_ERROR * abs(self.whole.value)

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
        what the donors themselves cost. Estimates that are far off name no layers.
        """
        return self._layers_where(self._is_large & self._is_above_zero)

    @cached_property
    def undecided(self) -> dict[tuple[str, str], tuple[int, ...]]:
        """(site, role) -> the layers with differences as large as those of `carried`, whose
        intervals include zero.
        """
        return self._layers_where(self._is_large & ~self._is_above_zero)

    @cached_property
    def _excess(self) -> Float[np.ndarray, "2 site role layer"]:
        """What an exchange costs more than the control, or at all without controls: its mean, and
        the lower end of its interval.
        """
        mean, low, _ = self._intervals(self._beyond_control)
        return np.stack([mean, low]).reshape(2, *self.lost.shape[1:])

    @property
    def _says_something(self) -> bool:
        """Whether the donors themselves are shown to cost something, and no estimate is far off."""
        return self.whole.low > 0 and not self._is_far_off

    @cached_property
    def _is_above_zero(self) -> Bool[np.ndarray, "site role layer"]:
        """Whether the interval of the excess is above zero; False where nothing can be
        said.
        """
        _, low = self._excess
        return (low > 0) & self._says_something

    @cached_property
    def _is_large(self) -> Bool[np.ndarray, "site role layer"]:
        """Whether the excess is at least half of the site's largest that is above zero, and at
        least `MIN_SHARE` of what the donors themselves cost; False where nothing can be said.
        """
        mean, _ = self._excess
        largest = mean.max(axis=(1, 2), where=self._is_above_zero, initial=0.0)
        least = np.maximum(MIN_SHARE * self.whole.value, largest / 2)
        return (mean >= least[:, None, None]) & self._says_something

    def _layers_where(
        self, is_named: Bool[np.ndarray, "site role layer"]
    ) -> dict[tuple[str, str], tuple[int, ...]]:
        """Return (site, role) -> the layers at which it is named."""
        layers_at = {}
        for number, site in enumerate(self.sites):
            for role_number, role in enumerate(self.roles):
                (places,) = is_named[number, role_number].nonzero()
                layers_at[site, role] = tuple(self.layers[place] for place in places)
        return layers_at

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
    def _whole_exchange(self) -> str:
        """What is in place of everything that the exchanges replace piece by piece, in words."""
        if self.reference:
            return f"means over {self.reference}, at all roles of the first layer,"
        return "the donors themselves"

    @property
    def finding(self) -> str:
        """Where the first site carries what the donors exchange, in one sentence."""
        site = self.sites[0]
        if len(set(self.queries)) < MIN_CLUSTERS:
            give = "gives" if len(self.queries) == 1 else "give"
            return (
                f"{plural_prompts(len(self.queries))} with fewer than {MIN_CLUSTERS} different "
                f"queries {give} no intervals, so that nothing is concluded."
            )
        if not self.whole.low > 0:
            return (
                f"It is not shown that {self._whole_exchange} lower the answer's log-odds, so that there is "
                f"nothing to trace (difference, nats: {self._donor_difference})."
            )
        compared = "zero" if self.control_lost is None else "the control"
        subject = SUBJECTS.get(self.donors, "What your donors exchange")
        if self._is_far_off:
            return (
                "The estimates are too far from the exact losses to say where the model holds "
                f"{_lower_first(subject)}: exchange all prompts (method='exact', --method exact)."
            )
        clauses = self._clauses(self.carried, site)
        is_estimate = self.method == "gradient"
        if not clauses:
            known = "estimated" if is_estimate else "shown"
            return (
                f"No exchange at {site} is {known} to cost the answer much more than {compared}: "
                f"where the model holds {_lower_first(subject)} is not found."
            )
        if is_estimate:
            subject = f"By estimate, {_lower_first(subject)}"
        return f"{subject} is {joined(clauses)} ({site})."

    def _clauses(self, layers_at: dict[tuple[str, str], tuple[int, ...]], site: str) -> list[str]:
        """Return the roles of a site that have layers, with these, in words."""
        clauses = []
        for role in self.roles:
            layers = layers_at[site, role]
            if layers:
                clauses.append(f"{_place(role)} {layers_in_words(layers, self.layers)}")
        return clauses

    @property
    def _undecided_sentences(self) -> tuple[str, ...]:
        """Which layers the finding leaves out for want of prompts; nothing if there are none."""
        site = self.sites[0]
        clauses = self._clauses(self.undecided, site)
        if not clauses or not self._clauses(self.carried, site):
            return ()
        return (
            f"The difference is as large {joined(clauses)}, but its interval includes zero "
            f"({site}); more prompts may decide.",
        )

    @property
    def _estimate_sentences(self) -> tuple[str, ...]:
        """How estimates were made and how far they are off; nothing for exact losses."""
        if self.method == "exact":
            return ()
        made = "Losses are first-order estimates from gradients (attribution patching)"
        error = self.estimate_error
        if error is None:
            return (f"{made}; no prompt was exchanged to check them.",)
        checked = f"first {error.n_prompts} prompts were"
        if error.n_prompts == 1:
            checked = "first prompt was"
        exchanges = f"{error.n_exchanges} exchange{'s' * (error.n_exchanges != 1)}"
        if math.isnan(error.correlation):
            correlation = "the correlation of estimates and exact losses is not defined, and they"
            rule = "Without a correlation, estimates say where something is held if"
        else:
            correlation = (
                f"estimates and exact losses have a correlation of {error.correlation_text}, and"
            )
            rule = (
                "Estimates say where something is held if the correlation is at least "
                f"{MIN_CORRELATION} and"
            )
        difference = f"differ nowhere by {SMALLEST_ERROR} nats or more"
        if error.largest >= SMALLEST_ERROR:
            difference = (
                f"differ most {_place(error.role)} in layer {error.layer} ({error.site}): estimate "
                f"{signed(error.estimated)}, exact {signed(error.exact)} nats"
            )
        return (
            f"{made}. The {checked} exchanged, too: over {exchanges}, {correlation} {difference}.",
            f"{rule} no estimate is off by more than {MAX_ERROR:.0%} of what the donors themselves "
            "cost.",
        )

    def to_view(self) -> View:
        """Return the finding, and a table per site: the largest loss of each role, and the layers
        that carry what is exchanged.
        """
        compared = "zero" if self.control_lost is None else "the control"
        sentences = (
            self.finding,
            *self._undecided_sentences,
            *self._estimate_sentences,
            f"A layer is named if the exchange there costs more than {compared} (the interval of "
            "the difference is above zero), at least half of the largest such difference of the "
            f"site, and {MIN_SHARE:.0%} of what {self._whole_exchange} cost.",
            f"Without exchange, the answer's log-odds are {signed(self.log_odds.mean())} nats; "
            f"{self._whole_exchange} give {signed(self.donor_log_odds.mean())} (difference "
            f"{self._donor_difference}).",
            *([edits_note(self.edits)] if self.edits else []),
        )
        frame = self.to_frame()
        sections = []
        for number, site in enumerate(self.sites):
            of_site = frame.query("site == @site")
            sections.append(self._section(site, of_site, figure="map" if number == 0 else ""))
        if self.estimate_error is not None:
            sections.append(self._check_section())
        title = f"Trace of {self.donors} over {plural_prompts(len(self.queries))}"
        return View(title, sentences, tuple(sections), about=f"trace · {self.model}")

    def _check_section(self) -> Section:
        """Return the estimates of each site and role beside exact losses."""
        losses = self._checked_losses
        rows = []
        for site in self.sites:
            for role in self.roles:
                of_role = losses.query("site == @site and role == @role")
                error = EstimateError.from_frame(of_role, self._n_checked)
                correlation = decimal(error.correlation, 2)
                rows.append((site, role, correlation, error.estimated, error.exact, error.layer))
        columns = (
            Column("site", is_number=False),
            Column("role", is_number=False),
            Column("correlation over layers"),
            Column("estimate, nats"),
            Column("exact, nats"),
            Column("in layer"),
        )
        return Section(
            "Estimates beside exact losses",
            "How far the estimates are off, in the prompts that were exchanged, too.",
            columns,
            tuple(rows),
            notes=("Estimate and exact loss are those of the layer in which they differ most.",),
        )

    def _section(self, site: str, frame: pd.DataFrame, *, figure: str) -> Section:
        columns = [
            Column("role", is_number=False),
            Column("largest loss, nats" if self.method == "exact" else "largest estimate, nats"),
            Column("95%", is_number=False),
            Column("in layer"),
        ]
        if self.control_lost is not None:
            columns.append(Column("control there"))
        columns.append(Column("held in layers", is_number=False))
        rows = []
        for role in self.roles:
            of_role = frame.query("role == @role")
            best = of_role.iloc[int(of_role["log_odds_lost"].to_numpy().argmax())]
            ends = signed_ends(best["low"], best["high"])
            cells = [role, float(best["log_odds_lost"]), ends, int(best["layer"])]
            if self.control_lost is not None:
                cells.append(float(best["control"]))
            carried = self.carried[site, role]
            rows.append((*cells, stretches_in_words(carried, self.layers) if carried else "–"))
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
    """Return layers as words: "in layer 3" or "in layers 3–5 and 9"."""
    return f"in layer{'s' * (len(carried) > 1)} {stretches_in_words(carried, measured)}"


def stretches_in_words(carried: Sequence[int], measured: Sequence[int]) -> str:
    """Return layers as words: "3–5 and 9"; layers that follow each other among those measured are
    one stretch.
    """
    stretches: list[list[int]] = []
    for layer in carried:
        place = measured.index(layer)
        if stretches and place and stretches[-1][-1] == measured[place - 1]:
            stretches[-1].append(layer)
        else:
            stretches.append([layer])
    names = []
    for stretch in stretches:
        is_single = len(stretch) == 1
        names.append(str(stretch[0]) if is_single else f"{stretch[0]}–{stretch[-1]}")
    return joined(names)


def _place(role: str) -> str:
    """Return where a role is, in words."""
    return PLACES.get(role, f"at position {role}")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
