"""Figures 3, 4, 12–15: the heads of largest mean log-probability increase, chosen on one half, shown on the other."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import icl_lens as il
from experiments.lab.controls import Comparison, beside, matched
from experiments.lab.drawing import WHISKERS, added_to, by_name, legend_below, means, name_heads, whiskers
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, by_prompt, long, stack, where
from experiments.lab.intervals import clusters_of, resample
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import SHARE, Verdict, all_of, verdict
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE

NEARLY_ALL = 0.9


@dataclass(frozen=True)
class TopHeadsConfig:
    """How many heads are shown (the paper: 20 of 720; at most one in eight), and the most controls of a layer."""

    heads: int = 20
    controls: int = 20


def table(study: Study, config: TopHeadsConfig) -> pd.DataFrame:
    """prompt, increase (nats), group, rank (0 but for located), layer, depth, name.

    By contrast, `increase` is that of the answer's log-odds, the mean over both labels as the answer.
    Groups: "located" heads; "random" ones: the others of their layers; "all": the sum of all heads' positive increases.
    """
    increases = study.ranked()[study.test]
    compared = Comparison.of(study, study.located(study.few(config.heads)), config.controls)
    rows, deepest = study.test.tolist(), max(study.view.n_layers - 1, 1)
    rank = {head: place for place, head in enumerate(compared.located, start=1)}

    def frame(head: il.Head) -> pd.DataFrame:
        values = long(increases[:, head.layer, head.head], "increase", prompt=rows)
        return values.assign(rank=rank.get(head, 0), depth=head.layer / deepest)

    every = long(increases.clamp(min=0).sum((1, 2)), "increase", prompt=rows)
    return stack(*compared.rows(frame), every.assign(group="all", rank=0, layer=-1, depth=np.nan, name=""))


def claim(table: pd.DataFrame) -> Verdict:
    """Located heads lie deep, beat other heads of their layers, and hold much of what all heads add."""
    located = where(table, group="located")
    gain = located.assign(increase=np.maximum(array(located, "increase"), 0))
    deep = gain.assign(increase=gain["increase"] * (gain["depth"] > 0.5))
    count = located["rank"].nunique()
    every = by_prompt(table, "increase", group="all")
    drawn = resample(clusters_of(every.index))
    of_all, of_located, of_deep = (
        drawn.mean(sample.to_numpy()) for sample in (every, by_prompt(gain, "increase"), by_prompt(deep, "increase"))
    )
    heads = beside(table.loc[table["group"] != "all"], "increase", these=True)
    return all_of(
        verdict(
            # Where all located heads lie deep, no prompt can say otherwise.
            drawn.estimate(of_deep / of_located, bounds=SHARE if array(gain, "depth").min() <= 0.5 else None),
            least=NEARLY_ALL,
            unit="of their increases",
            what="share of located heads in the deeper half",
        ),
        verdict(
            heads.drawn.estimate(heads.located - heads.random),
            least=0.0,
            unit="nats a head",
            what=f"located heads minus {heads.named} of the same layers",
        ),
        verdict(
            drawn.estimate(of_located * count / of_all, bounds=SHARE),
            least=0.5,
            unit="of all heads' positive increases",
            what=f"share of the {count} located heads",
        ),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Mean increase of each located head on the other half, 95 % intervals; diamonds: other heads of its layer."""
    located = where(table, group="located").drop_duplicates("name")
    values = by_name(where(table, group="located"), "increase", located["name"])
    control = [matched(where(table, layer=layer), "increase").mean() for layer in located["layer"]]
    deep = array(located, "depth") > 0.5
    drawn = Figure(figsize=(PAGE, 2.3), layout="constrained")
    ax = drawn.subplots()
    at = np.arange(len(values))
    for chosen, hue, label in ((deep, BLUE, "deeper half of layers"), (~deep, ORANGE, "shallower half")):
        if chosen.any():
            ax.bar(at[chosen], np.array(means(values))[chosen], color=hue, width=0.7, label=label)
    ax.errorbar(at, means(values), yerr=whiskers(values), **WHISKERS)
    ax.plot(at, control, "D", color=GREY, markeredgecolor="0.2", markersize=3.5, label="other heads, same layer")
    ax.axhline(0, color="0.3", linewidth=0.6)
    ax.set(xlabel="Located heads, best first", ylabel=f"Mean {added_to(table)}\nincrease (nats)")
    name_heads(ax, list(located["name"]))
    legend_below(drawn, ax)
    return drawn


EXPERIMENT = Experiment(
    id="top-heads",
    title="Which heads raise the answer",
    source="Figures 3, 4, 12–15",
    claim="A few heads, nearly all in deep layers, raise the answer most.",
    criterion=(
        "Of the located heads' positive increases nine tenths are in the deeper half of layers; on prompts they were "
        "not chosen on they exceed the other heads of their layers; and they hold more than half of all heads' "
        "positive "
        "increases."
    ),
    departs=(
        "The paper shows the 20 best of 720 heads and that most are in deep layers; here the deeper half's share of "
        "their increases is asked for, and they are at most one in eight of a model's. Figures 12–15 "
        "count only cases that the model answers rightly, here all prompts count; and that located heads exceed the "
        "others of their layers, and hold half of all increases, is asked here and not in the paper. By contrast "
        "increases are means over both labels as the answer, in which what pushes one label cancels."
    ),
    chosen=(
        "That a list without a shallow head leaves no doubt about its depth was settled after results had been seen, "
        "in "
        "which few query words left it undecided."
    ),
    paper="GPT-2 large: the 20 best of 720 heads lie in layers 18–31 of 36",
    classes="any",
    config=TopHeadsConfig(),
    needs=(Need(Variant(), head_increases),),
    table=table,
    verdict=claim,
    figure=figure,
)
