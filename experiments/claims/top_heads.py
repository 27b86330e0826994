"""Figures 3, 4, 12–15: the heads of largest mean log-probability increase, chosen on one half, shown on the other."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.lab.controls import Comparison
from experiments.lab.drawing import WHISKERS, legend_below, name_heads, whiskers
from experiments.lab.experiment import Experiment
from experiments.lab.frames import array, by_prompt, long, stack, where, wide
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, all_of, judge
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import PAGE


@dataclass(frozen=True)
class TopHeadsConfig:
    """How many heads are shown (the paper: 20 of 720; at most one in eight), and how many random sets."""

    heads: int = 20
    draws: int = 100


def table(study: Study, config: TopHeadsConfig) -> pd.DataFrame:
    """prompt, increase (nats), kind, rank, layer, depth (0–1), name.

    Kinds: "located" heads; "random" heads of the same layer as the located one of that rank, mean of all draws; "all":
    the sum of all heads' positive increases.
    """
    increases = study.get(head_increases)[study.test]
    compared = Comparison.of(study, study.located(study.few(config.heads)), config.draws)
    rows, deepest = study.test.tolist(), max(study.view.n_layers - 1, 1)
    frames = []
    for head, kind, values in compared.groups(lambda head: increases[:, head.layer, head.head].numpy()):
        frame = long(values, "increase", prompt=rows).assign(kind=kind, rank=compared.located.index(head) + 1)
        name = str(head) if kind == "located" else f"random L{head.layer}"
        frames.append(frame.assign(layer=head.layer, depth=head.layer / deepest, name=name))
    every = long(increases.clamp(min=0).sum((1, 2)), "increase", prompt=rows)
    return stack(*frames, every.assign(kind="all", rank=0, layer=-1, depth=np.nan, name=""))


def claim(table: pd.DataFrame) -> Verdict:
    """Located heads lie deep, beat random heads of their layers, and hold much of what all heads add."""
    located = where(table, kind="located")
    gain = located.assign(increase=np.maximum(array(located, "increase"), 0))
    deep = gain.assign(increase=gain["increase"] * (gain["depth"] > 0.5))
    count = located["rank"].nunique()
    with np.errstate(invalid="ignore", divide="ignore"):
        deep_share = by_prompt(deep, "increase") / by_prompt(gain, "increase")
        share = by_prompt(gain, "increase") * count / by_prompt(table, "increase", kind="all")
    above = by_prompt(table, "increase", kind="located") - by_prompt(table, "increase", kind="random")
    return all_of(
        judge(deep_share, least=0.5, unit="of their increases", what="share of located heads in the deeper half"),
        judge(above, least=0.0, unit="nats a head", what="located minus random heads of the same layers"),
        judge(share, least=0.5, unit="of all heads' positive increases", what=f"share of the {count} located heads"),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Mean increase of each located head on the other half, 95 % intervals; diamonds: random heads of its layer."""
    values = wide(where(table, kind="located"), "increase", index="name", columns="prompt").to_numpy()
    control = [part["increase"].mean() for _, part in where(table, kind="random").groupby("rank")]
    located = where(table, kind="located").drop_duplicates("name")
    deep = array(located, "depth") > 0.5
    drawn = Figure(figsize=(PAGE, 2.3), layout="constrained")
    ax = drawn.subplots()
    at = np.arange(len(values))
    for chosen, hue, label in ((deep, BLUE, "deeper half of layers"), (~deep, ORANGE, "shallower half")):
        if chosen.any():
            ax.bar(at[chosen], values[chosen].mean(1), color=hue, width=0.7, label=label)
    ax.errorbar(at, values.mean(1), yerr=whiskers(values), **WHISKERS)
    ax.plot(at, control, "D", color=GREY, markeredgecolor="0.2", markersize=3.5, label="random heads, same layer")
    ax.axhline(0, color="0.3", linewidth=0.6)
    ax.set(xlabel="Located heads, best first", ylabel="Mean log-probability\nincrease (nats)")
    name_heads(ax, list(located["name"]))
    legend_below(drawn, ax)
    return drawn


EXPERIMENT = Experiment(
    id="top-heads",
    title="Which heads raise the answer",
    source="Figures 3, 4, 12–15",
    claim="A few heads, all in deep layers, raise the answer most.",
    criterion=(
        "Of the located heads' positive increases more than half is in the deeper half of layers; on prompts they were "
        "not chosen on they exceed random heads of their layers; and they hold more than half of all heads' positive "
        "increases."
    ),
    paper="GPT-2 large: the 20 best of 720 heads lie in layers 18–31 of 36",
    config=TopHeadsConfig(),
    needs=(Need(Variant(), head_increases),),
    table=table,
    verdict=claim,
    figure=figure,
)
