"""Ways of finding heads side by side: ranked on one half of the queries, judged on the other by what is kept and lost.

1. Every way ranks all heads on the same prompts: the paper's increase, the logit difference, exact effects at the last
   and at all positions, the gradient's estimate, attention to labels, the induction score, and chance.
2. Of every ranking the best 1, 2, 4, … heads are kept alone or removed, on prompts about other texts.
3. Faithfulness of a set C is (m(C) − m(none)) / (m(all) − m(none)), with m the answer's log-odds when all other heads
   are set to zero (or to their mean); what is lost of it when C is removed is its cost. The better the ranking, the
   larger the areas under both curves (Mueller et al. 2025, MIB: CPR and CMD; Marks et al. 2024: completeness).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.claims.heads_in_order import (
    CHANCE,
    METHODS,
    PAPERS,
    RIVAL,
    SETTINGS,
    LocationMethodsConfig,
    table,
    timed,
)
from experiments.lab.drawing import legend_below
from experiments.lab.experiment import OWN_RANKINGS, Experiment
from experiments.lab.frames import levels, where
from experiments.lab.intervals import Estimate, Resample, clusters_of, drawn_counts, resample
from experiments.lab.verdict import Verdict, adjusted, all_of, cannot_tell, told, verdict
from experiments.lab.work import SHARED, WHOLE
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE


@dataclass(frozen=True)
class Curves:
    """Of one setting, in the data (first) and in bootstrap draws: faithfulness kept, and cost of removal, by count."""

    kept: dict[tuple[str, str], Float[np.ndarray, "draw count"]]
    removed: dict[tuple[str, str], Float[np.ndarray, "draw count"]]
    scale: Float[np.ndarray, " draw"]
    """What all heads together add to the answer's log-odds, nats."""
    drawn: Resample
    counts: list[int]
    total: int

    @classmethod
    def of(cls, table: pd.DataFrame, positions: str, mode: str) -> "Curves":
        """Curves by method and group; random orders are drawn as well, and averaged."""
        part = where(table, positions=positions, mode=mode)
        wide = part.pivot_table(
            "odds", index=levels(part), columns=["method", "group", "name", "edit", "count"], aggfunc="mean", sort=False
        )
        drawn = resample(clusters_of(wide.index))
        means = dict(zip(wide.columns, drawn.mean(wide.to_numpy()).T, strict=True))
        whole, none = (means["model", "", "", edit, 0] for edit in ("all", "none"))
        counts = sorted({int(count) for count in part["count"]} - {0})
        shares = where(part, count=counts[0])["share"]
        rng = np.random.default_rng(1)
        curves: dict[str, dict[tuple[str, str], Float[np.ndarray, "draw count"]]] = {"kept": {}, "removed": {}}
        names: dict[tuple[str, str], list[str]] = {}
        for method, group, name, *_ in wide.columns:
            if method != "model" and name not in names.setdefault((method, group), []):
                names[method, group].append(name)
        for (method, group), own in names.items():
            weights = np.ones((len(whole), len(own)))
            if len(own) > 1:
                weights[1:] = drawn_counts(len(own), len(whole) - 1, rng)
            for edit, found in curves.items():
                odds = np.stack(
                    [[means[method, group, name, edit, count] for count in counts] for name in own]
                )  # name count draw
                mean = np.einsum("dn,ncd->dc", weights, odds) / len(own)
                faithful = (mean - none[:, None]) / (whole - none)[:, None]
                found[method, group] = faithful if edit == "kept" else 1 - faithful
        total = round(counts[0] / float(shares.iloc[0]))
        return cls(curves["kept"], curves["removed"], whole - none, drawn, counts, total)

    def area(self, edit: str, method: str, group: str = "located") -> Float[np.ndarray, " draw"]:
        """The mean height of a curve, numbers of heads at equal distances."""
        weights = np.ones(len(self.counts))
        if len(weights) > 1:
            weights[[0, -1]] = 0.5
        return self._of(edit)[method, group] @ (weights / weights.sum())

    def cpr(self, method: str, group: str = "located") -> tuple[float, float]:
        """CPR and CMD: the area under faithfulness over shares of all heads, and that between it and 1."""
        x = np.array([0, *self.counts, self.total]) / self.total
        y = np.array([0.0, *self.kept[method, group][0], 1.0])
        return float(np.trapezoid(y, x)), float(np.trapezoid(np.abs(1 - y), x))

    def _of(self, edit: str) -> dict[tuple[str, str], Float[np.ndarray, "draw count"]]:
        return self.kept if edit == "kept" else self.removed

    def against_random(self, method: str) -> list[Verdict]:
        """What is kept and what is lost, beyond random orders: of the method's own layers where there are such."""
        beside, of = (method, "of the same layers") if (method, "random") in self.kept else (CHANCE, "")
        name = f"{method} over random orders {of}".strip()
        return [self._gap(edit, method, (beside, "random"), name) for edit in ("kept", "removed")]

    def against(self, method: str, rival: str) -> list[Verdict]:
        """The same beyond another method."""
        return [self._gap(edit, method, (rival, "located"), f"{method} over {rival}") for edit in ("kept", "removed")]

    def _gap(self, edit: str, method: str, other: tuple[str, str], name: str) -> Verdict:
        gap = self.area(edit, method) - self.area(edit, *other)
        what = f"{name}, {'faithfulness of heads kept' if edit == 'kept' else 'cost of heads removed'}"
        return verdict(self.drawn.estimate(gap), least=0.0, unit="of what all heads add", what=what)

    def matters(self) -> Estimate:
        """What all heads together add, nats."""
        return self.drawn.estimate(self.scale)


def claim(table: pd.DataFrame) -> Verdict:
    """The paper's increase ranks heads better than chance, and better than attention to labels.

    Both when they are kept alone and when they are removed, at the last position and set to zero, over all numbers of
    heads. Every other method's verdicts, mean-ablation and all positions are told beside it.
    """
    curves = Curves.of(table, *SETTINGS[0])
    scale = curves.matters()
    if not scale.low > 0:
        return cannot_tell(
            f"all heads together add {scale.value:.3g} nats to the answer's log-odds: none can be better than others",
            unit="nats",
            estimate=scale,
        )
    judged = all_of(*curves.against_random(PAPERS), *curves.against(PAPERS, RIVAL))
    return told(judged, *_beaten(curves), _areas(curves, "at the last position, to zero"), *_elsewhere(table))


def by_method(curves: Curves) -> dict[tuple[str, str], tuple[str, float]]:
    """Each method against chance and against attention: outcome and p-value, with their number allowed for (Holm)."""
    asked = [(method, CHANCE) for method in METHODS]
    asked += [(method, RIVAL) for method in METHODS if method != RIVAL]
    judged = [
        all_of(*(curves.against_random(method) if other == CHANCE else curves.against(method, other)))
        for method, other in asked
    ]
    return dict(zip(asked, adjusted(judged), strict=True))


def _beaten(curves: Curves) -> list[str]:
    """Which methods beat what, in words."""
    found = by_method(curves)
    words = {"supported": "beaten by", "not supported": "not by", "undecided": "undecided for"}
    lines = []
    for other, name in ((CHANCE, "random orders of the same layers"), (RIVAL, "attention to labels")):
        of = {
            outcome: [method for method in METHODS if found.get((method, other), ("",))[0] == outcome]
            for outcome in words
        }
        parts = [f"{word} {_listed(of[outcome])}" for outcome, word in words.items() if of[outcome]]
        lines.append(f"{name}, with the number of methods allowed for: {', '.join(parts)}")
    return lines


def _listed(names: Sequence[str]) -> str:
    """Names that hold commas themselves."""
    return " and ".join(f"{name!r}" if "," in name else name for name in names)


def _areas(curves: Curves, name: str, methods: Sequence[str] = (*METHODS, CHANCE)) -> str:
    """Areas and, over shares of heads, CPR and CMD of each method."""
    parts = []
    for method in methods:
        group = "random" if method == CHANCE else "located"
        kept, lost = (curves.area(edit, method, group)[0] for edit in ("kept", "removed"))
        cpr, cmd = curves.cpr(method, group)
        named = "random, of any layer," if method == CHANCE else _listed([method])
        parts.append(f"{named} {kept:.2f}/{lost:.2f} ({cpr:.2f}, {cmd:.2f})")
    return f"areas kept/lost and (CPR, CMD) {name}: {', '.join(parts)}"


def _elsewhere(table: pd.DataFrame) -> list[str]:
    """The other settings, where they were tried."""
    names = {("last", "mean"): "to their mean", ("all", "zero"): "at all positions, to zero"}
    there = {*zip(table["positions"], table["mode"], strict=True)}
    found = []
    for setting, name in names.items():
        if setting not in there:
            continue
        curves = Curves.of(table, *setting)
        beats = [
            method
            for method in METHODS
            if all_of(*curves.against_random(method)).outcome == "supported" and curves.matters().low > 0
        ]
        found += [_areas(curves, name), f"beyond random orders {name}: {_listed(beats) or 'none'}"]
    return found


def figure(table: pd.DataFrame) -> Figure:
    """Faithfulness of the best heads kept, and what is left without them, by their number; areas with intervals."""
    curves = Curves.of(table, *SETTINGS[0])
    drawn = Figure(figsize=(PAGE, 3.4), layout="constrained")
    kept, removed, areas = drawn.subplots(1, 3)
    at = np.arange(len(curves.counts))
    lines = {**{(method, "located"): style for method, style in METHODS.items()}, (CHANCE, "random"): (GREY, "x:")}
    for (method, group), (hue, style) in lines.items():
        shown = {"color": hue, "markersize": 3, "linewidth": 1, "label": method}
        kept.plot(at, curves.kept[method, group][0], style, **shown)
        removed.plot(at, 1 - curves.removed[method, group][0], style, **shown)
    for ax in (kept, removed):
        ax.axhline(1, color="0.3", linewidth=0.5, linestyle=":")
        ax.axhline(0, color="0.3", linewidth=0.5)
        ax.set_xticks(at, [str(count) for count in curves.counts])
        low, high = ax.get_ylim()
        ax.set_ylim(max(low, -1.5), min(high, 2.5))
    kept.set(
        xlabel="Heads kept", ylabel="Share of what all heads add\nto the answer's log-odds", title="Only these kept"
    )
    removed.set(xlabel="Heads removed", title="These removed")
    for place, (method, group) in enumerate(lines):
        for edit, hue, shift in (("kept", BLUE, -0.17), ("removed", ORANGE, 0.17)):
            found = curves.drawn.estimate(curves.area(edit, method, group))
            reach = [[max(0.0, found.value - found.low)], [max(0.0, found.high - found.value)]]
            label = {"kept": "kept", "removed": "lost without"}[edit] if place == 0 else None
            areas.errorbar(
                found.value,
                place + shift,
                xerr=np.nan_to_num(reach),
                fmt="o",
                color=hue,
                markersize=3,
                elinewidth=0.8,
                label=label,
            )
    areas.set_yticks(range(len(lines)), [method for method, _ in lines])
    areas.invert_yaxis()
    areas.axvline(0, color="0.3", linewidth=0.5)
    areas.set(xlabel="Area under the curve\n(kept: left; lost: 1 − middle)", title="Areas, 95 % intervals")
    legend_below(drawn, kept, areas)
    return drawn


EXPERIMENT = Experiment(
    id="location-methods",
    title="Which way of finding heads is right",
    source="Open (the paper's ranking beside others, by one yardstick)",
    claim="Log-probability increases find the heads that answer: better than chance, and than attention to labels.",
    criterion=(
        "Ranked by increase on one half of the queries, heads keep more of the answer's log-odds on the other half, "
        "and cost more of them when removed, than heads of the same layers in random order, and than heads ranked by "
        "attention to labels; over 1, 2, 4, … heads, set to zero at the last position; both labels, both orders, "
        "queries of both classes."
    ),
    about=OWN_RANKINGS,
    paper=None,
    departs=(
        "The paper ranks heads by increases and, in the published version, by causal tracing; it compares what they "
        "cost "
        "(section 6.2), not what they find. The yardstick is that of later work (MIB's areas), at the last position. "
        "Effects at all "
        f"positions cost a whole pass each: of models with more than {WHOLE} heads, fewer prompts are edited there, "
        f"of those with more than {4 * WHOLE} rankings are judged at the last position only, and of those with more "
        f"than {SHARED} on fewer prompts."
    ),
    config=LocationMethodsConfig(),
    table=table,
    verdict=claim,
    figure=figure,
    timed=timed,
)
