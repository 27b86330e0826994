"""Published version: accuracy when the located heads, best for "foo" and best for "bar", are set to zero."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.controls import beside
from experiments.lab.drawing import WHISKERS, mark_zeros, whiskers
from experiments.lab.editing import BAR, FOO, how_many, located_for_both, says_without
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, stack, where
from experiments.lab.intervals import Estimate, Resample
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study
from experiments.lab.verdict import CHANGE, Verdict, all_of, any_of, told, verdict
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

CONDITIONS = {
    ("none", ""): ("nothing", GREY),
    ("random", "zero"): ("random\nto zero", BLUE),
    ("located", "zero"): ("located\nto zero", ORANGE),
    ("random", "mean"): ("random\nto mean", BLUE),
    ("located", "mean"): ("located\nto mean", ORANGE),
}
MEASURES = ["correct", "vocabulary", "odds"]
LEAST = 0.3
"""What located heads must cost beyond random ones, and random ones must not, of accuracy: that is a collapse."""
CHANCE = 0.5
"""Between the two labels of these tasks."""


@dataclass(frozen=True)
class AblationConfig:
    """Heads located for each label (together at least 1 % of all, at most one in four), and sets of random heads."""

    heads: int = 6
    draws: int = 20
    """At most as many as there are test prompts: with fewer of these it is they that make intervals wide."""
    mean_draws: int = 5
    """Sets for mean-ablation, which is told beside."""
    least: float = 0.1
    """A located head adds at least this share of what the best one adds."""


def table(study: Study, config: AblationConfig) -> pd.DataFrame:
    """group ("none" | "located" | "random"), mode ("zero" | "mean" | ""), layer, name (of the set), prompt, answer, …

    `vocabulary` (0–1): the answer is the most probable of all tokens; `correct`: the likelier label; `odds`: its
    log-odds between the labels, nats; `heads`: those located, `share` of all heads.
    """
    everything = located_for_both(study, len(study.view.heads()))
    # As many different ones as the two lists have together, also where both name the same heads.
    heads = everything[: 2 * how_many(study, config.heads)]
    chosen = study.halves[0]
    foo, bar = (study.rises(variant)[chosen].mean(0) for variant in (FOO, BAR))
    mean = foo + bar
    return removals(study, strong(heads, mean, config.least), config)


def strong(heads: list[il.Head], mean: Float[Tensor, "layer head"], least: float) -> list[il.Head]:
    """The heads that add at least this share of what the best one adds; the first, if there is none.

    Heads that add next to nothing are not located; as controls are as many, they would only blunt the comparison.
    """
    return [head for head in heads if mean[head] >= least * mean.max()] or heads[:1]


def removals(study: Study, heads: list[il.Head], config: AblationConfig) -> pd.DataFrame:
    """`table` for heads that were located otherwise."""
    rows = study.test
    draws = study.controls(heads, min(config.draws, len(rows)))
    total = len(study.view.heads())
    frames = []
    for answer, variant in zip(study.labels, (FOO, BAR), strict=True):
        for mode in ("zero", "mean"):
            cases = [("none", "", "", [])] if mode == "zero" else []
            cases.append(("located", mode, "located", heads))
            some = draws if mode == "zero" else draws[: config.mean_draws]
            cases += [("random", mode, f"set {i}", drawn) for i, drawn in enumerate(some)]
            what = f"{mode} {len(heads)} heads, {answer}"
            found = says_without(study, variant, rows, [removed for *_, removed in cases], mode=mode, what=what)
            for (group, named, name, _), frame in zip(cases, found, strict=True):
                frame = frame.assign(prompt=rows.tolist(), answer=answer, group=group, mode=named, name=name, layer=-1)
                frames.append(frame.assign(heads=" ".join(map(str, heads)), share=len(heads) / total))
    return stack(*frames)


def parts(table: pd.DataFrame) -> list[Verdict]:
    """What must hold, each by itself."""
    whole, labels, odds = (_Falls.of(table, measure, "zero") for measure in ("vocabulary", "correct", "odds"))
    unit = "of accuracy"
    what = f"fall over the vocabulary beyond that of {whole.controls}"
    return [
        verdict(whole.beyond(), least=LEAST, unit=unit, what=what),
        any_of(
            verdict(
                labels.beyond(of=CHANCE),
                least=LEAST,
                unit="of accuracy above chance",
                what="fall between labels beyond random heads",
            ),
            verdict(odds.beyond(of=0.0), least=LEAST, unit="of log-odds", what="fall of log-odds beyond random heads"),
        ),
        verdict(
            whole.drawn.estimate(whole.random - whole.none, bounds=CHANGE),
            least=-LEAST,
            unit=unit,
            what="change without random heads",
        ),
    ]


def claim(table: pd.DataFrame) -> Verdict:
    """Removing located heads costs more than removing random ones: over the vocabulary, and between the labels.

    Over the vocabulary, as in the paper, whose 24.4 % is below the chance of two labels; and of accuracy above chance
    between the labels, or of log-odds, since a model with heads set to zero may say anything. Mean-ablation is told
    beside it.
    """
    return told(all_of(*parts(table)), *notes(table))


def _heads(n: int) -> str:
    return f"{n} head{'' if n == 1 else 's'}"


def notes(table: pd.DataFrame) -> list[str]:
    """What is told beside the verdict: how many heads, and mean-ablation."""
    means = {measure: _Falls.of(table, measure, "mean") for measure in ("vocabulary", "correct")}
    beside_it = ", ".join(
        f"{name} {found.located[0]:.3g} (random {found.random[0]:.3g})"
        for name, found in zip(("over the vocabulary", "between labels"), means.values(), strict=True)
    )
    n, share = len(table["heads"].iloc[0].split()), float(table["share"].iloc[0])
    return [f"{_heads(n)}, {share:.1%} of all", f"with heads set to their mean instead: {beside_it}"]


@dataclass(frozen=True)
class _Falls:
    """A measure without edits, without located and without random sets of heads, in the data and in bootstrap draws."""

    none: Float[np.ndarray, " draw"]
    located: Float[np.ndarray, " draw"]
    random: Float[np.ndarray, " draw"]
    drawn: Resample
    controls: str

    @classmethod
    def of(cls, table: pd.DataFrame, measure: str, mode: str) -> "_Falls":
        sets = beside(table, measure, mode=mode)
        none = sets.drawn.mean(by_prompt(table, measure, group="none").to_numpy())
        return cls(none, sets.located, sets.random, sets.drawn, sets.sets)

    def beyond(self, *, of: float | None = None) -> Estimate:
        """How much more located heads cost than random ones; `of` what there is above this value, if given."""
        scale = 1.0 if of is None else self.none - of
        return self.drawn.estimate((self.random - self.located) / scale, bounds=CHANGE if of is None else None)


def figure(table: pd.DataFrame) -> Figure:
    """Accuracy without edits, and with random and located heads set to zero or to their mean; 95 % intervals.

    Bars: over the whole vocabulary; diamonds: between the labels, where chance is the dotted line.
    """
    drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
    ax = drawn.subplots()
    bars = []
    for i, ((group, mode), (_, hue)) in enumerate(CONDITIONS.items()):
        for j, (answer, hatch) in enumerate(zip(dict.fromkeys(table["answer"]), (None, "////"), strict=False)):
            part = where(table, group=group, mode=mode, answer=answer)
            sample, labels = by_prompt(part, "vocabulary"), by_prompt(part, "correct")
            at = i + 0.4 * (j - 0.5)
            shown = f"answer {answer}" if i == 0 else None
            ax.bar(at, sample.mean(), width=0.38, color=hue, hatch=hatch, edgecolor="white", label=shown)
            ax.errorbar(at, sample.mean(), yerr=whiskers([sample]), **WHISKERS)
            bars.append((at, sample.mean()))
            shown = "between labels" if i == j == 0 else None
            ax.errorbar(at, labels.mean(), yerr=whiskers([labels]), **WHISKERS)
            ax.plot(at, labels.mean(), "D", color="black", markerfacecolor="white", markersize=4, label=shown, zorder=5)
    ax.axhline(CHANCE, color="0.3", linewidth=0.6, linestyle=":")
    ax.set_xticks(range(len(CONDITIONS)), [title for title, _ in CONDITIONS.values()])
    n, share = len(table["heads"].iloc[0].split()), float(table["share"].iloc[0])
    ax.set(xlabel=f"{_heads(n)}, {share:.0%} of all", ylabel="Accuracy (0–1)", ylim=(-0.04, 1.06))
    mark_zeros(ax, *zip(*bars, strict=True))
    drawn.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return drawn


EXPERIMENT = Experiment(
    id="ablation",
    title="What located heads are worth",
    source="Published version, section 3.2",
    claim="A few heads carry in-context learning: without them accuracy collapses, without as many others it does not.",
    criterion=(
        f"Zeroing located heads costs {LEAST:.0%} of accuracy over the vocabulary beyond what random heads cost, "
        f"which is less than that; and {LEAST:.0%} of accuracy above chance between the labels, or of log-odds, beyond "
        "theirs."
    ),
    departs=(
        "The published version finds its heads by causal tracing as well, on sentence tasks of larger models; here "
        "they are those of largest increase, less than twelve where the last add next to nothing, and in small "
        "models more than 1 % of all. Random heads of the same layers, accuracy between the labels, log-odds and "
        "mean-ablation are added."
    ),
    paper="87.6 % → 24.4 % without about 1 % of the heads; little change without random ones",
    chosen=(
        "That heads adding less than a tenth of the best one's are left out, and that the fall over the vocabulary "
        "counts, was settled after results on the models bundled before, with sentiment-number. On today's models "
        "nothing was chosen, nor on any model with the other tasks on this page, but for one thing: that random heads "
        "may cost up to three tenths, where it was one tenth, which small models fail whatever located heads do, since "
        "an eighth of their heads or more is removed. The condition between labels was added before any of the results "
        "here were computed."
    ),
    config=AblationConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
