"""Ways of finding heads side by side: ranked on one half of the queries, judged on the other by what is kept and lost.

1. Every way ranks all heads on the same prompts: the paper's increase, the logit difference, exact effects at the last
   and at all positions, the gradient's estimate, attention to labels, the induction score, and chance.
2. Of every ranking the best 1, 2, 4, … heads are kept alone or removed, on prompts about other texts.
3. Faithfulness of a set C is (m(C) − m(none)) / (m(all) − m(none)), with m the answer's log-odds when all other heads
   are set to zero (or to their mean); what is lost of it when C is removed is its cost. The better the ranking, the
   larger the areas under both curves (Mueller et al. 2025, MIB: CPR and CMD; Marks et al. 2024: completeness).
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Shaped
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.claims.head_atlas import repeated
from experiments.lab.competence import VARIANTS
from experiments.lab.drawing import legend_below
from experiments.lab.editing import BAR, FOO, REFERENCE
from experiments.lab.experiment import OWN_RANKINGS, Experiment
from experiments.lab.frames import levels, stack, where
from experiments.lab.intervals import Estimate, Resample, clusters_of, drawn_counts, resample
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_contrasts, head_increases
from experiments.lab.study import Study, Variant
from experiments.lab.verdict import Verdict, adjusted, all_of, cannot_tell, told, verdict
from icl_lens.metrics import label_log_odds
from icl_lens.report.palette import AMBER, BLUE, GREEN, GREY, INK, ORANGE, PINK, SKY
from icl_lens.report.plots import PAGE

METHODS = {
    "increase": (BLUE, "o-"),
    "logit difference": (SKY, "o--"),
    "effect, last": (ORANGE, "^-"),
    "effect, all": (AMBER, "^--"),
    "gradient": (PINK, "v-"),
    "attention": (GREEN, "s-"),
    "induction": (INK, "s--"),
}
"""The ways of ranking, chance aside, and how they are drawn."""
PAPERS, RIVAL, CHANCE = "increase", "attention", "random"
SETTINGS = (("last", "zero"), ("last", "mean"), ("all", "zero"))
"""Where heads are removed, and what stands in their place. The first decides."""
Order = list[il.Head]


@dataclass(frozen=True)
class LocationMethodsConfig:
    """Prompts to rank on and to judge on, each in eight cells; those judged with heads edited at all positions; orders.

    Cells are both labels as the answer, both orders of the demonstrations, queries of both classes.
    """

    ranked: int = 24
    judged: int = 40
    judged_at_all: int = 8
    controls: int = 4
    """Random orders beside each method's, with its layers in the same places."""
    draws: int = 6
    """Random orders of all heads."""
    timed: int = 16
    """Prompts on which the methods' times are measured."""


def table(study: Study, config: LocationMethodsConfig) -> pd.DataFrame:
    """positions, mode, method, group, name (of the order), layer, edit, count, share (of all heads), prompt, odds.

    `odds`: the answer's log-odds, nats, over the prompt's cells. Group "located" is a method's own order, "random" one
    of random heads: beside a method, with its layers in the same places. `edit`: only the first `count` heads "kept",
    or these "removed". Method "model": nothing removed ("all") or everything ("none").
    """
    scores = rankings(study, study.halves[0][: config.ranked])
    orders = list(_orders(study, scores, config))
    fair = [one for one in orders if one[1] == "located" or one[0] == CHANCE]
    frames = []
    for positions, mode in SETTINGS:
        rows = study.test[: config.judged if positions == "last" else config.judged_at_all]
        frames.append(_curves(study, rows, orders if (positions, mode) == SETTINGS[0] else fair, positions, mode))
    return stack(*frames)


def rankings(study: Study, rows: Int[Tensor, " row"]) -> dict[str, Float[Tensor, "layer head"]]:
    """The mean score of every head by each method, over prompts in all cells; the best is the largest."""
    scored = _in_all_cells(study, rows, lambda batch: _scores(study, batch), what="heads ranked")
    found = {name: values.double().mean((0, 1)) for name, values in scored.items()}
    shuffled = study.passes.run(
        "tokens shuffled and repeated", [2] * len(rows), lambda i: repeated(study, int(rows[i]))
    )
    found["induction"] = joined(shuffled)["induction"].double().mean(0)
    return {name: found[name] for name in METHODS}


def _in_all_cells(
    study: Study, rows: Int[Tensor, " row"], compute: Callable[[il.PromptBatch], Tensors], *, what: str
) -> dict[str, Shaped[Tensor, "cell row ..."]]:
    """A pass over some rows in every cell, all in the same batches."""
    prompts = [study.prompts(cell)[row] for cell in VARIANTS for row in rows.tolist()]
    pieces = study.pieces(study.tokenize(prompts))
    found = joined(study.passes.run(what, [len(piece) for piece in pieces], lambda i: compute(pieces[i])))
    return {name: values.unflatten(0, (len(VARIANTS), len(rows))) for name, values in found.items()}


def _scores(study: Study, batch: il.PromptBatch) -> Tensors:
    """[prompt layer head] by every method that scores prompts."""
    return {name: method(study, batch) for name, method in SCORES.items()}


def _effects(study: Study, batch: il.PromptBatch, positions: str) -> Float[Tensor, "prompt layer head"]:
    """By how much the answer's log-odds fall without each head, measured."""
    return il.head_effects(study.model, batch, positions="last" if positions == "last" else "all").log_odds.float()


def _estimates(study: Study, batch: il.PromptBatch) -> Float[Tensor, "prompt layer head"]:
    """The same at the last position, to first order."""
    against = batch.other_label_tokens
    found = il.head_effects(study.model, batch, positions="last", method="gradient", against=against).log_diff
    assert found is not None
    return found.float()


SCORES = {
    "increase": lambda study, batch: head_increases(il.capture(study.model, batch)).float(),
    "logit difference": lambda study, batch: head_contrasts(il.capture(study.model, batch)).float(),
    "effect, last": lambda study, batch: _effects(study, batch, "last"),
    "effect, all": lambda study, batch: _effects(study, batch, "all"),
    "gradient": _estimates,
    "attention": lambda study, batch: il.attention_to_labels(il.capture(study.model, batch)).sum(-1).float(),
}
"""How each method scores heads, prompt by prompt."""


def timed(study: Study, config: LocationMethodsConfig) -> dict[str, float]:
    """Seconds that every method takes for 100 prompts, one of few batches at a time."""
    rows = study.halves[0][: config.timed]
    seconds = {}
    for name in METHODS:
        start = time.perf_counter()
        if name in SCORES:
            for batch in study.batches(FOO, rows):
                SCORES[name](study, batch)
        else:
            for row in rows.tolist():
                repeated(study, row)
        seconds[name] = (time.perf_counter() - start) * 100 / len(rows)
    return seconds


def _orders(
    study: Study, scores: Mapping[str, Float[Tensor, "layer head"]], config: LocationMethodsConfig
) -> Iterator[tuple[str, str, str, Order]]:
    """Method, group, name and order of all heads, best first."""
    rng = random.Random(study.settings.seed)
    for method, score in scores.items():
        best = [il.Head.at(i, score.shape[1]) for i in score.flatten().argsort(descending=True, stable=True).tolist()]
        yield method, "located", "own", best
        for i in range(config.controls):
            yield method, "random", f"set {i}", same_layers(best, rng)
    for i in range(config.draws):
        everything = study.view.heads()
        yield CHANCE, "random", f"set {i}", rng.sample(everything, len(everything))


def same_layers(order: Sequence[il.Head], rng: random.Random) -> Order:
    """The heads of every layer exchanged at random among the places that the layer has in an order."""
    left: dict[int, Order] = {}
    for head in order:
        left.setdefault(head.layer, []).append(head)
    for heads in left.values():
        rng.shuffle(heads)
    return [left[head.layer].pop() for head in order]


def counts_of(n: int) -> list[int]:
    """1, 2, 4, … heads, fewer than all."""
    return [2**i for i in range(n.bit_length()) if 2**i < n]


def _curves(
    study: Study, rows: Int[Tensor, " row"], orders: Sequence[tuple[str, str, str, Order]], positions: str, mode: str
) -> pd.DataFrame:
    """The table's rows of one setting. Equal sets of heads are removed once."""
    everything = frozenset(study.view.heads())
    place: dict[frozenset[il.Head], int] = {frozenset(): 0, everything: 1}
    asked: list[tuple[dict[str, object], int]] = []
    for edit, removed in (("all", frozenset()), ("none", everything)):
        asked.append(({"method": "model", "group": "", "name": "", "edit": edit, "count": 0}, place[removed]))
    for method, group, name, order in orders:
        for count in counts_of(len(order)):
            for edit, heads in (("kept", order[count:]), ("removed", order[:count])):
                at = place.setdefault(frozenset(heads), len(place))
                asked.append(({"method": method, "group": group, "name": name, "edit": edit, "count": count}, at))
    found = _odds(study, rows, [sorted(heads) for heads in place], positions, mode)
    common = {"positions": positions, "mode": mode, "layer": -1, "prompt": rows.tolist(), **study.both_queries(rows)}
    frames = [pd.DataFrame({**common, **columns, "odds": found[:, at]}) for columns, at in asked]
    return stack(*frames).assign(share=lambda made: made["count"] / len(everything))


def _odds(
    study: Study, rows: Int[Tensor, " row"], sets: list[Order], positions: str, mode: str
) -> Float[np.ndarray, "row set"]:
    """The answer's log-odds without each set of heads, nats, over all cells."""
    variants = [Variant(swapped=one.swapped, asked=asked) for one in (FOO, BAR) for asked in ("true", "false")]
    reference = [study.batch(variant)[study.halves[0][:REFERENCE]] for variant in variants]

    def without(batch: il.PromptBatch) -> Tensors:
        if positions == "last":
            averaged = reference if mode == "mean" else None
            found = il.label_log_probs_without(
                study.model, batch, sets, mode="mean" if averaged else "zero", reference=averaged
            )
        else:
            each = []
            for heads in sets:
                with il.ablate_heads(study.model, heads):
                    each.append(il.label_log_probs(study.model, batch))
            found = torch.stack(each, dim=1)
        own = [label_log_odds(one, batch.answer, choices=batch.label_mask) for one in found.unbind(1)]
        return {"odds": torch.stack(own, dim=1).float()}

    what = f"heads kept and removed, {positions}, {mode}"
    return _in_all_cells(study, rows, without, what=what)["odds"].double().mean(0).numpy()


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
        lines.append(f"{name}: {', '.join(parts)}")
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
        parts.append(f"{_listed([method])} {kept:.2f}/{lost:.2f} ({cpr:.2f}, {cmd:.2f})")
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
    areas.legend(loc="lower right")
    legend_below(drawn, kept)
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
        "The paper ranks heads by increases and, in the published version, by causal tracing; it compares no ways of "
        "finding heads. The yardstick is that of later work (MIB's areas), at the last position. The halves ask about "
        "other texts of the true class; a text of the false class may be asked about in both."
    ),
    config=LocationMethodsConfig(),
    table=table,
    verdict=claim,
    figure=figure,
    timed=timed,
)
