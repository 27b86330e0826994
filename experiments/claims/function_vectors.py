"""Function vectors (Todd et al. 2023): mean outputs of chosen heads, added where no demonstration is shown.

With labels such as "foo" and "bar" a prompt without demonstrations has nothing to know: words belong to either label as
the vector says, and both assignments are tried. What comes back is the assignment, or nothing. With the categories' own
names as labels the model may know the answer by itself, and what comes back is told beside.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.claims.vectors_added import (
    BESIDE,
    LABELS,
    OWN,
    VECTORS,
    FunctionVectorsConfig,
    table,
)
from experiments.lab.drawing import WHISKERS, legend_below, mark_zeros, means, whiskers
from experiments.lab.editing import BAR, FOO
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, where
from experiments.lab.intervals import Resample, clusters_of, resample
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need
from experiments.lab.verdict import Verdict, all_of, cannot_tell, told, verdict
from experiments.lab.work import MOST_LAYERS
from icl_lens.report.palette import BLUE, GREEN, GREY, ORANGE
from icl_lens.report.plots import PAGE

LEAST = 0.3
"""Of the log-odds that demonstrations give: the smallest share given back that is worth the claim."""


def claim(table: pd.DataFrame) -> Verdict:
    """Both vectors give back enough of what demonstrations give, and more than random heads' vectors do.

    Label words raise both labels alike, whatever the word: with both classes counted alike they give no log-odds, in
    any model; nor do means over shuffled labels, but for chance. Both are told beside, and decide nothing.
    """
    unit = "of what demonstrations give"
    own = where(table, labels=OWN)
    balance = _Balance.of(own)
    whole = balance.mean(own, "demonstrations")
    if balance.drawn.estimate(whole).low <= 0:
        return cannot_tell("demonstrations give the answer no log-odds", unit=unit)
    parts = []
    for group in VECTORS:
        share, random = balance.mean(own, group) / whole, balance.mean(own, BESIDE[group]) / whole
        what = f"log-odds given back by the {group} heads' vector"
        parts += [
            verdict(balance.drawn.estimate(share), least=LEAST, unit=unit, what=what),
            verdict(balance.drawn.estimate(share - random), least=0.0, unit=unit, what=f"{what}, beyond random heads'"),
        ]
    return told(all_of(*parts), *_notes(table))


@dataclass(frozen=True)
class _Balance:
    """Means in which both classes of words count alike, with one set of bootstrap draws for all groups."""

    drawn: Resample
    prompts: pd.Index

    @classmethod
    def of(cls, table: pd.DataFrame) -> "_Balance":
        index = by_prompt(where(table, group="demonstrations"), "odds").index
        return cls(resample(clusters_of(index)), index)

    def mean(self, table: pd.DataFrame, group: str, value: str = "odds") -> Float[np.ndarray, " draw"]:
        """A column's mean over labels and sets, then words, then classes; words not asked with demonstrations apart."""
        classes = []
        for true in (True, False):
            values = by_prompt(table, value, group=group, true=true).reindex(self.prompts)
            classes.append(self.drawn.mean(values.to_numpy()))
        return np.mean(classes, axis=0)


def _notes(table: pd.DataFrame) -> list[str]:
    """What is told beside: accuracies and log-probability, also where labels are the categories' names."""
    notes = []
    for kind, part in table.groupby("labels", sort=False):
        balance = _Balance.of(part)
        said = []
        for group, name in GROUPS.items():
            first, right, log_prob = (balance.mean(part, group, value)[0] for value in ("first", "right", "log_prob"))
            said.append(f"{name} {first:.0%} ({right:.0%}, {log_prob:.2g})")
        what = "accuracy over the vocabulary (between the labels, log p(answer) in nats)"
        notes.append(f"with {LABELLED[str(kind)]} as labels, {what}: {', '.join(said)}")
    return notes


LABELLED = {OWN: "the study's own words", "names": "the categories' names"}
GROUPS = {
    "demonstrations": "demonstrations",
    "none": "nothing added",
    "effect": "effect heads",
    "shuffled, effect": "these, labels shuffled",
    "random, effect": "random for these",
    "located": "located heads",
    "shuffled, located": "those, labels shuffled",
    "random, located": "random for those",
    LABELS: "label words",
}


def figure(table: pd.DataFrame) -> Figure:
    """The answer's log-odds and log-probability without demonstrations by what is added; 95 % intervals over words."""
    drawn = Figure(figsize=(PAGE, 2.7), layout="constrained")
    axes = drawn.subplots(1, 2)
    kinds = list(dict.fromkeys(table["labels"]))
    hues = {"demonstrations": GREEN, "effect": ORANGE, "located": BLUE}
    titles = {
        "odds": "Answer's log-odds against\nthe other label (nats)",
        "log_prob": "Answer's log-probability\n(nats)",
    }
    for ax, (value, title) in zip(axes, titles.items(), strict=True):
        bars = []
        for i, kind in enumerate(kinds):
            samples = [by_prompt(where(table, labels=kind), value, group=group) for group in GROUPS]
            at = np.arange(len(GROUPS)) + (0.8 / len(kinds)) * (i - 0.5 * (len(kinds) - 1))
            colors = [hues.get(group, GREY) for group in GROUPS]
            ax.bar(at, means(samples), width=0.8 / len(kinds), color=colors, alpha=1.0 if i == 0 else 0.5)
            ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
            bars += zip(at, means(samples), strict=True)
        ax.axhline(0, color="0.3", linewidth=0.4)
        mark_zeros(ax, *zip(*bars, strict=True))
        ax.set_xticks(range(len(GROUPS)), list(GROUPS.values()), rotation=40, ha="right", rotation_mode="anchor")
        ax.set_ylabel(title)
    for i, kind in enumerate(kinds):
        said = f"{LABELLED[kind]}, either way" if kind == OWN else LABELLED[kind]
        axes[0].bar([0], [0], color=GREY, alpha=1.0 if i == 0 else 0.5, label=f"labels: {said}")
    legend_below(drawn, axes[0])
    return drawn


EXPERIMENT = Experiment(
    id="function-vectors",
    title="Function vectors, for labels without meaning",
    source="Todd et al. 2023 (arXiv 2310.15213)",
    claim="The mean outputs of a few heads add up to a vector that carries the task to prompts without demonstrations.",
    criterion=(
        "Added to prompts without demonstrations, behind the layer that is best on other words, the sum of the mean "
        "outputs of the heads of largest indirect effect, and that of located heads, each give back "
        f"{LEAST:.0%} of the log-odds that demonstrations give, and more than random heads of the same layers. Both "
        "labels are the answer in turn and both classes count alike, so that a vector that only says a label gives "
        "nothing; without demonstrations a word belongs to neither label."
    ),
    paper=None,
    chosen=(
        "After a trial on icl-mini with 100 prompts of sentiment-number, a vector's layer came to be chosen for both "
        "assignments of the labels together, and no longer for each, which had let label words seem to know the class. "
        "Label words themselves, and the same heads' means over shuffled labels, by construction give no log-odds "
        "but by chance; they were taken out of the verdict before its results on these models. That at most "
        f"{MOST_LAYERS} layers are tried, and that of layers as good as one another (to 0.00001 nats) the first is "
        "taken, came after results had been seen, to save time; it changed no verdict on these models."
    ),
    departs=(
        "Not a claim of the paper, but of a neighbouring one, on tasks with known answers. Labels without meaning "
        "leave a prompt without demonstrations nothing to know, so both assignments of the labels are tried and "
        "classes count alike, beside this paper's located heads. "
        f"Of models with more than {MOST_LAYERS} layers, so many at equal distances are tried."
    ),
    config=FunctionVectorsConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
