"""Figures 5, 16–18, 22–24: how high labels rank among their own values' projections, located against random heads."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

import icl_lens as il
from experiments.lab.controls import Comparison, beside, matched
from experiments.lab.drawing import WHISKERS, by_name, legend_below, mark_zeros, means, name_heads, whiskers
from experiments.lab.editing import BAR, FOO
from experiments.lab.experiment import Experiment
from experiments.lab.frames import long, stack, where
from experiments.lab.reductions import LabelRanks, head_increases
from experiments.lab.study import Need, Study, Variant
from experiments.lab.verdict import Verdict, cannot_tell, told, verdict
from icl_lens.report.palette import BLUE, ORANGE
from icl_lens.report.plots import PAGE

KINDS = {"true": BLUE, "false": ORANGE}


BIT = 1.0
"""One bit of log rank: half the rank."""


@dataclass(frozen=True)
class LabelRankConfig:
    """Heads located (the paper shows four; at most one in eight) and the most controls of a layer."""

    heads: int = 6
    controls: int = 20


def table(study: Study, config: LabelRankConfig) -> pd.DataFrame:
    """group ("located" | "random"), layer, name, prompt, label ("true" | "false"), mrr (0–1), bits (log2 of the rank).

    Mean of both labels as the true one. "random" heads are the others of the layer.
    """
    return ranks_of(study, Comparison.of(study, study.located(study.few(config.heads)), config.controls))


def ranks_of(study: Study, compared: Comparison) -> pd.DataFrame:
    """`table` for heads that were located otherwise."""
    reduction = LabelRanks(compared.heads)
    both = [study.reduce(reduction, variant, study.test, what=f"ranks of labels, {variant}") for variant in (FOO, BAR)]
    ranks = torch.stack(both).mean(0).numpy()
    column = {head: ranks[:, i] for i, head in enumerate(compared.heads)}
    rows = study.test.tolist()

    def frame(head: il.Head) -> pd.DataFrame:
        values = long(column[head][..., 0], "mrr", prompt=rows, label=list(KINDS))
        return values.assign(bits=column[head][..., 1].reshape(-1))

    return stack(*compared.rows(frame))


def claim(table: pd.DataFrame) -> Verdict:
    """Mean log rank in located heads is one bit lower than in the other heads of their layers: half the rank.

    Where those leave less than one bit, no head could be so much better, and the claim cannot be told from this.
    """
    heads = beside(table, "bits")
    mrr = beside(table, "mrr")
    gap = heads.drawn.estimate(heads.random - heads.located)
    note = f"MRR {mrr.located[0]:.3g} against {mrr.random[0]:.3g}"
    least = f"bits of log rank by which located heads are before {heads.named}"
    better = verdict(gap, least=0.0, unit="bits", what=least)
    if heads.random[0] < BIT and better.outcome != "not supported":
        why = (
            f"the label's mean rank in other heads of the layers is {2 ** heads.random[0]:.2f} already, so that none "
            "could "
            f"have half of it; {better.reason}; {note}"
        )
        return cannot_tell(why, unit="bits", estimate=gap)
    return told(verdict(gap, least=BIT, unit="bits", what=least), note)


def figure(table: pd.DataFrame) -> Figure:
    """MRR of true and false labels by head, 95 % intervals; hatched: the other heads of the same layer."""
    drawn = Figure(figsize=(PAGE, 2.3), layout="constrained")
    ax = drawn.subplots()
    located = where(table, group="located").drop_duplicates("name")
    bars: list[tuple[float, float]] = []
    for i, (label, hue) in enumerate(KINDS.items()):
        own = by_name(where(table, group="located", label=label), "mrr", located["name"])
        other = [matched(where(table, label=label, layer=layer), "mrr") for layer in located["layer"]]
        for j, (samples, group, fill, hatch) in enumerate(
            ((own, "located heads", hue, None), (other, "other heads", "white", "/////"))
        ):
            at = np.arange(len(samples)) + 0.2 * (2 * i + j - 1.5)
            shown = f"{label} labels, {group}"
            ax.bar(at, means(samples), width=0.2, color=fill, hatch=hatch, edgecolor=hue, linewidth=0.6, label=shown)
            ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
            bars += zip(at, means(samples), strict=True)
    mark_zeros(ax, *zip(*bars, strict=True))
    ax.set(xlabel="Located heads, best first", ylabel="Mean reciprocal rank of\nthe label in its value (0–1)")
    name_heads(ax, list(located["name"]))
    legend_below(drawn, ax)
    return drawn


EXPERIMENT = Experiment(
    id="label-rank",
    title="Do located heads' values name the label",
    source="Figures 5, 16–18, 22–24",
    claim="The value-output matrices of located heads extract the label: its own word ranks far higher than elsewhere.",
    criterion=(
        "The label's mean log rank in located heads is one bit lower (half the rank) than in the other heads of their "
        "layers, with either label as the true one. Undecided where those leave less than one bit."
    ),
    departs=(
        "The heads are the best located ones, at most six, and not the paper's four; both labels are the true one in "
        "turn, where it has “foo”; and log ranks decide, since a mean reciprocal rank is that of the best few. (Its "
        "section 4.3 and the caption of its Figure 5 disagree on the first of the four: 18-7 in the text, 19-11 in "
        "the caption, which the text's own numbers for 19-11 go with.)"
    ),
    paper="GPT-2 large: much higher than in random heads; least MRR 0.0033 (L19H11), that is rank 303 of 50,257",
    classes="any",
    config=LabelRankConfig(),
    needs=(Need(Variant(), head_increases),),
    table=table,
    verdict=claim,
    figure=figure,
)
