"""What majority-bias and recency-bias share: tilt and discrimination in two layouts, before and after a fix.

The same demonstrations are asked about a text of either class. Of the true label's log-odds o (the label of the class
that the two layouts treat differently), in a layout:

    tilt            mean over both questions of o                       whichever class is asked
    discrimination  half of (o when its own class is asked − o when the other one is)

The bias is the tilt in the layout that favours the true label minus that in the other one. What leaving out a
demonstration takes from discrimination is evidence lost, and no bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.drawing import WHISKERS, legend_below, mark_zeros, means, whiskers
from experiments.lab.editing import BAR, FOO, PIECE, ROW, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, of_ranking, stack, where
from experiments.lab.intervals import Estimate, Resample, clusters_of, drawn_counts, resample
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases
from experiments.lab.study import RANKINGS, Need, Ranking, Study, Variant
from experiments.lab.verdict import CHANGE, Verdict, all_of, cannot_tell, told, verdict
from icl_lens.interventions.debias import Fix
from icl_lens.metrics import is_correct, label_log_odds
from icl_lens.prompts.tasks import Layout
from icl_lens.report.palette import GREY, ORANGE
from icl_lens.report.plots import PAGE

GROUPS = {
    "none": ("no fix", GREY),
    "random": ("fix in random heads", "0.8"),
    "located": ("fix in located heads", ORANGE),
}
TRIED = (0.25, 0.5, 0.75, 1.0)
MAX_LOSS, MOST_LOSS = 0.01, 0.02
"""Of accuracy, in the layout and class that lose most: when a strength is chosen, and when it is tested."""
LEAST = 0.1
"""Of the bias: what a fix must take away."""
KEPT = 0.9
"""Of discrimination: what a fix must leave."""
HELD_OUT = 100
CRITERION = (
    f"There is a bias (tilt, over queries of both classes); the fix takes {LEAST:.0%} of it away, and more than in "
    "random heads; no "
    f"class loses {MOST_LOSS:.0%} of accuracy in either layout; {KEPT:.0%} of discrimination are kept."
)


@dataclass(frozen=True)
class BiasConfig:
    """Heads located for each label (at most one in eight), and sets of random heads."""

    heads: int = 6
    draws: int = 5


@dataclass(frozen=True)
class Bias:
    """A bias of in-context learning, and the fix that is tried on it."""

    name: str
    fix: Fix
    layouts: tuple[Layout, Layout]
    """The one that favours the true label, and the one that does not."""
    paper: float
    """The share of the bias that the paper's fix takes away."""

    def experiment(self, *, id: str, title: str, source: str, claim: str, departs: str) -> Experiment:
        """The experiment on this bias: how large it is, before and after the fix."""
        return Experiment(
            id=id,
            title=title,
            source=source,
            claim=claim,
            criterion=CRITERION,
            departs=f"{departs} A fix fails at the strength chosen: at the gentlest, where none does little harm.",
            chosen=(
                f"That {LEAST:.0%} of the bias must go was settled after results had been seen, in which a fix that "
                "took away 2 to 7 % counted as support, among them those of the models shown here."
            ),
            paper=f"bias reduced by {100 * self.paper:.0f} %",
            config=BiasConfig(),
            leaves_out="imbalanced" in self.layouts,
            needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
            table=self.table,
            verdict=self.claim,
            figure=self.figure,
        )

    def table(self, study: Study, config: BiasConfig) -> pd.DataFrame:
        """group ("none" | "located" | "random"), name (of the set), prompt, query, other, answer, layout, asked, odds,
        …

        `odds`: log-odds (nats) of the true label, whichever class is `asked` ("true" | "false"); `correct` (0–1): the
        answer scores highest; `layout`: "favoured" or "against"; `strength`: of the fix, chosen for each set of heads
        on the half on which heads are located (`chosen`: whether one was found there that loses little).
        """
        # The fixes of heads located by either ranking are tried side by side.
        return of_ranking(study.once(self.name, lambda: self._table(study, config)), study.ranking)

    def _table(self, study: Study, config: BiasConfig) -> pd.DataFrame:
        """The table by every ranking; `ranking` is None where it makes no difference."""
        cases: list[tuple[Ranking | None, str, str, list[il.Head]]] = [(None, "none", "", [])]
        for ranking in RANKINGS:
            located = located_for_both(study.ranked_by(ranking), study.few(config.heads))
            cases.append((ranking, "located", "located", located))
            for i, drawn in enumerate(study.controls(located, config.draws)):
                cases.append((ranking, "random", f"set {i}", drawn))
        held_out = Questions.of(study, study.halves[0][:HELD_OUT], self.layouts)
        tested = Questions.of(study, study.test, self.layouts)
        tried = [(heads, strength) for *_, heads in cases for strength in (TRIED if heads else (0.0,))]
        before, *held = self._answered(study, held_out, tried, what=f"{self.fix}, held out")
        chosen = [(0.0, True)]
        for _ in cases[1:]:
            chosen.append(_strength(before, held[: len(TRIED)]))
            held = held[len(TRIED) :]
        fixes = [(heads, strength) for (*_, heads), (strength, _) in zip(cases, chosen, strict=True)]
        answered = self._answered(study, tested, fixes, what=f"{self.fix}, tested")
        frames = [
            frame.assign(ranking=ranking, group=group, name=name, layer=-1, strength=strength, chosen=found)
            for (ranking, group, name, _), (strength, found), frame in zip(cases, chosen, answered, strict=True)
        ]
        return stack(*frames)

    def _answered(
        self, study: Study, questions: "Questions", wanted: Sequence[tuple[list[il.Head], float]], *, what: str
    ) -> list[pd.DataFrame]:
        """The questions' answers with the fix in some heads at some strength, each pair; equal ones are asked once."""
        different = dict.fromkeys((tuple(heads), strength) for heads, strength in wanted)
        place = {pair: i for i, pair in enumerate(different)}
        fixes = [il.LabelFix(heads, **{self.fix: strength}) for heads, strength in different]
        found = questions.answered(study, fixes, what=what)
        return [found[place[tuple(heads), strength]] for heads, strength in wanted]

    def claim(self, table: pd.DataFrame) -> Verdict:
        """There is a bias; the fix in located heads takes a tenth of it away, beyond random heads, and costs little.

        Undecided where there is no bias to be reduced.
        """
        found = Tilts.of(table)
        bias = verdict(
            found.drawn.estimate(found.bias["none"]), least=0.0, unit="nats", what=f"{self.name.lower()} without a fix"
        )
        evidence = found.evidence("none")
        lost = f"evidence lost (discrimination): {evidence.value:.3g} nats [{evidence.low:.3g}, {evidence.high:.3g}]"
        if bias.outcome != "supported":
            why = f"there is no such bias that a fix could reduce: {bias.reason}; {lost}"
            return cannot_tell(why, unit="nats", estimate=found.drawn.estimate(found.bias["none"]))
        reduced = {group: 1 - np.abs(found.bias[group]) / np.abs(found.bias["none"]) for group in ("located", "random")}
        located = where(table, group="located")
        what = f"reduction (paper: {self.paper:.0%}; random sets {reduced['random'][0]:.0%})"
        judged = all_of(
            verdict(found.drawn.estimate(reduced["located"]), least=LEAST, unit="of the bias", what=what),
            bias,
            verdict(
                found.drawn.estimate(reduced["located"] - reduced["random"]),
                least=0.0,
                unit="of the bias",
                what=f"reduction beyond {found.controls} random sets",
            ),
            verdict(
                found.drawn.estimate(found.discrimination["located"] / found.discrimination["none"]),
                least=KEPT,
                unit="of discrimination",
                what="kept",
            ),
            *(
                verdict(change, least=-MOST_LOSS, unit="of accuracy", what=f"change where {cell} is asked")
                for cell, change in found.changes.items()
            ),
        )
        notes = [lost, f"strength {located['strength'].iloc[0]:g}"]
        if not located["chosen"].iloc[0]:
            notes[-1] += ", the gentlest tried: on held-out prompts every one cost too much"
        return told(judged, *notes)

    def figure(self, table: pd.DataFrame) -> Figure:
        """Tilt, discrimination, and accuracy by class asked: no fix, fix in random and in located heads."""
        drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
        left, middle, right_ax = drawn.subplots(1, 3, width_ratios=(1, 1, 2))
        for ax, discrimination, title in (
            (left, False, f"{self.name}: tilt between\nlayouts (nats of log-odds)"),
            (middle, True, "Discrimination\n(nats of log-odds)"),
        ):
            bars = []
            for i, (group, (label, hue)) in enumerate(GROUPS.items()):
                sample = _by_prompt(where(table, group=group), discrimination=discrimination)
                ax.bar(i, sample.mean(), color=hue, width=0.8, label=label)
                ax.errorbar(i, sample.mean(), yerr=whiskers([sample]), **WHISKERS)
                bars.append((i, sample.mean()))
            ax.set_xticks([])
            ax.axhline(0, color="0.3", linewidth=0.6)
            ax.set_ylabel(title)
            mark_zeros(ax, *zip(*bars, strict=True))
        for i, (group, (_, hue)) in enumerate(GROUPS.items()):
            samples = [by_prompt(table, "correct", group=group, layout=layout, asked=asked) for layout, asked in CELLS]
            at = np.arange(len(CELLS)) + 0.27 * (i - 1)
            right_ax.bar(at, means(samples), color=hue, width=0.27)
            right_ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
        right_ax.set_xticks(range(len(CELLS)), [text.replace(" ", "\n") for text in CELLS.values()], fontsize=6)
        right_ax.set(ylabel="Accuracy (0–1)", ylim=(0, 1.04))
        legend_below(drawn, left)
        return drawn


@dataclass(frozen=True)
class Questions:
    """The same demonstrations in both layouts, with both labels, asked about either class: in one batch."""

    batch: il.PromptBatch
    frame: pd.DataFrame
    """prompt, query, other, answer, layout, asked: one row for each of the batch."""

    @classmethod
    def of(cls, study: Study, rows: Int[Tensor, " row"], layouts: tuple[Layout, Layout]) -> "Questions":
        prompts, frames = [], []
        for answer, base in zip(study.labels, (FOO, BAR), strict=True):
            for place, layout in zip(("favoured", "against"), layouts, strict=True):
                for asked in ("true", "false"):
                    every = study.prompts(Variant(layout, base.swapped, asked=asked))
                    prompts += [every[row] for row in rows.tolist()]
                    frame = pd.DataFrame({"prompt": rows.tolist(), **study.both_queries(rows)})
                    frames.append(frame.assign(answer=answer, layout=place, asked=asked))
        return cls(study.tokenize(prompts), stack(*frames))

    def answered(self, study: Study, fixes: Sequence[il.LabelFix], *, what: str) -> list[pd.DataFrame]:
        """The frame with `odds` of the true label (nats) and `correct`, under each of the fixes."""
        cost = 1 + ROW * len(fixes)
        most = max(1, int(PIECE / cost))
        pieces = [some for piece in study.pieces(self.batch) for some in piece.split(most)]

        def scored(i: int) -> Tensors:
            batch = pieces[i]
            each = il.label_log_probs_debiased(study.model, batch, fixes).unbind(1)
            odds = [label_log_odds(scores, batch.answer, choices=batch.label_mask).double() for scores in each]
            correct = [is_correct(scores, batch.answer, choices=batch.label_mask).double() for scores in each]
            return {"odds": torch.stack(odds, dim=1), "correct": torch.stack(correct, dim=1)}

        found = joined(study.passes.run(what, [round(cost * len(piece)) for piece in pieces], scored))
        sign = np.where(self.frame["asked"] == "true", 1.0, -1.0)
        return [
            self.frame.assign(odds=sign * odds, correct=correct)
            for odds, correct in zip(found["odds"].numpy().T, found["correct"].numpy().T, strict=True)
        ]


def _strength(before: pd.DataFrame, tried: Sequence[pd.DataFrame]) -> tuple[float, bool]:
    """The strength of least bias on prompts that are not tested on, at little loss in every class.

    Where none loses so little, the gentlest, which the test is then to judge; and False.
    """
    usable: dict[float, float] = {}
    for strength, after in zip(TRIED, tried, strict=True):
        loss = max(_accuracies(before)[cell] - accuracy for cell, accuracy in _accuracies(after).items())
        kept = _simple(after, discrimination=True) >= KEPT * _simple(before, discrimination=True)
        if loss <= MAX_LOSS and kept:
            usable[strength] = abs(_simple(after))
    return (min(usable, key=lambda one: usable[one]), True) if usable else (TRIED[0], False)


CELLS = {
    ("favoured", "true"): "true class, favoured",
    ("favoured", "false"): "false class, true one favoured",
    ("against", "true"): "true class, not favoured",
    ("against", "false"): "false class, true one not favoured",
}


@dataclass(frozen=True)
class Tilts:
    """Bias and discrimination without a fix and with it, in the data and in bootstrap draws."""

    bias: dict[str, Float[np.ndarray, " draw"]]
    discrimination: dict[str, Float[np.ndarray, " draw"]]
    by_layout: dict[str, Float[np.ndarray, " draw"]]
    changes: dict[str, Estimate]
    drawn: Resample
    controls: int

    @classmethod
    def of(cls, table: pd.DataFrame) -> "Tilts":
        none = where(table, group="none")
        drawn = resample(clusters_of(_by_prompt(none).index))
        sets = list(dict.fromkeys(where(table, group="random")["name"]))
        weights = np.ones((len(drawn.weights), len(sets)))
        weights[1:] = drawn_counts(len(sets), len(weights) - 1, np.random.default_rng(1))

        def means_of(discrimination: bool) -> dict[str, Float[np.ndarray, " draw"]]:
            found = {
                group: drawn.mean(_by_prompt(where(table, group=group), discrimination=discrimination).to_numpy())
                for group in ("none", "located")
            }
            each = [
                drawn.mean(
                    _by_prompt(where(table, group="random", name=name), discrimination=discrimination).to_numpy()
                )
                for name in sets
            ]
            # What is left of the bias, whichever way: sets that overcorrect must not cancel those that do nothing.
            each = each if discrimination else [np.abs(one) for one in each]
            return found | {"random": (weights * np.stack(each, axis=1)).mean(1)}

        changes = {}
        for (layout, asked), cell in CELLS.items():
            after, before = (
                by_prompt(table, "correct", group=group, layout=layout, asked=asked) for group in ("located", "none")
            )
            changes[cell] = drawn.estimate(drawn.mean((after - before).to_numpy()), bounds=CHANGE)
        by_layout = {
            layout: drawn.mean(_discrimination(where(none, layout=layout)).to_numpy())
            for layout in ("favoured", "against")
        }
        return cls(means_of(False), means_of(True), by_layout, changes, drawn, len(sets))

    def evidence(self, group: str) -> Estimate:
        """How much less the model discriminates in the layout that does not favour the true label, nats."""
        return self.drawn.estimate(self.by_layout["favoured"] - self.by_layout["against"])


def _by_prompt(table: pd.DataFrame, *, discrimination: bool = False) -> pd.Series:
    """Each prompt's bias: tilt in the layout that favours the true label minus that in the other; or discrimination."""
    if discrimination:
        return _discrimination(table)
    return by_prompt(table, "odds", layout="favoured") - by_prompt(table, "odds", layout="against")


def _discrimination(table: pd.DataFrame) -> pd.Series:
    return (by_prompt(table, "odds", asked="true") - by_prompt(table, "odds", asked="false")) / 2


def _simple(table: pd.DataFrame, *, discrimination: bool = False) -> float:
    return float(_by_prompt(table, discrimination=discrimination).mean())


def _accuracies(table: pd.DataFrame) -> dict[tuple[str, str], float]:
    """By layout and class asked."""
    return {cell: float(by_prompt(table, "correct", layout=cell[0], asked=cell[1]).mean()) for cell in CELLS}
