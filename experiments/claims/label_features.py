"""Published version: what value-output vectors of located heads say at "foo" positions and at "bar" positions."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.lab.controls import Comparison, beside, matched
from experiments.lab.drawing import WHISKERS, by_name, legend_below, means, name_heads, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both
from experiments.lab.experiment import Experiment
from experiments.lab.frames import long, stack, where
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study
from experiments.lab.verdict import SHARE, Verdict, all_of, verdict
from icl_lens.report.palette import BLUE, ORANGE
from icl_lens.report.plots import PAGE

HUES = (BLUE, ORANGE)
"""Of the first label and of the second one, "foo" and "bar" unless others are asked for."""


@dataclass(frozen=True)
class LabelFeaturesConfig:
    """Heads located for each label (at most one in eight), and the most controls of a layer."""

    heads: int = 6
    controls: int = 20


@dataclass(frozen=True)
class LabelDifferences:
    """log p(foo) − log p(bar) of heads' label values, and whether its sign is that of the label.

    Means over "foo" and over "bar" positions. Read out without biases, which would favour one label wherever it stands.
    """

    heads: tuple[il.Head, ...]

    def __call__(self, acts: il.Activations) -> Float[Tensor, "prompt head 2 2"]:
        readout = acts.readout.using(final_norm="frozen", bias=False)
        index = acts.batch.label_index.to(readout.W_U.device)
        foo, bar = acts.batch.label_tokens.to(index.device)[:, None].expand(-1, len(index))
        columns = []
        for head in self.heads:
            difference = readout.relative_logits(il.label_values(acts, head), bar, foo[:, None])[..., 0]
            both = torch.stack([difference, ((difference > 0) == (index == 0)).to(difference)], dim=-1)
            kinds = [(index == label)[..., None] for label in range(2)]
            columns.append(torch.stack([(both * kind).sum(1) / kind.sum(1) for kind in kinds], dim=1))
        return torch.stack(columns, dim=1).float()


def table(study: Study, config: LabelFeaturesConfig) -> pd.DataFrame:
    """group ("located" | "random": the others of the layer), layer, name, prompt, label, difference (nats), follows.

    `follows`: share of positions (0–1) whose sign is that of their label. Mean of both labels as the true one, since a
    label's class and place would otherwise be told from the same positions.
    """
    compared = Comparison.of(study, located_for_both(study, study.few(config.heads)), config.controls)
    reduction = LabelDifferences(compared.heads)
    both = [study.reduce(reduction, variant, study.test, what=f"label values, {variant}") for variant in (FOO, BAR)]
    differences = torch.stack(both).mean(0).numpy()

    def frame(head: il.Head) -> pd.DataFrame:
        values = differences[:, compared.heads.index(head)]
        values_of = long(values[..., 0], "difference", prompt=study.test.tolist(), label=list(study.labels))
        return values_of.assign(follows=values[..., 1].reshape(-1))

    return stack(*compared.rows(frame))


def claim(table: pd.DataFrame) -> Verdict:
    """The sign follows the label, in located heads, and more so than in the other heads of their layers."""
    signs = beside(table, "follows")
    foo, bar = (beside(table, "difference", label=label) for label in dict.fromkeys(table["label"]))
    gap = (foo.located - bar.located) - (foo.random - bar.random)
    return all_of(
        verdict(
            signs.drawn.estimate(signs.located, bounds=SHARE),
            least=0.75,
            unit="of values",
            what="share of right signs",
        ),
        verdict(
            foo.drawn.estimate(gap),
            least=0.0,
            unit="nats",
            what=f"gap between labels beyond {foo.named} of the same layers",
        ),
    )


def figure(table: pd.DataFrame) -> Figure:
    """log p(foo) − log p(bar) of values at "foo" and "bar" positions, by head; hollow: the other heads of its layer."""
    drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
    ax = drawn.subplots()
    located = where(table, group="located").drop_duplicates("name")
    names = list(located["name"])
    labels = list(dict.fromkeys(table["label"]))
    for i, (label, hue) in enumerate(zip(labels, HUES, strict=True)):
        own = by_name(where(table, label=label, group="located"), "difference", names)
        other = [matched(where(table, label=label, layer=layer), "difference") for layer in located["layer"]]
        for group, samples, face, shift in (("located", own, hue, -0.12), ("other", other, "white", 0.12)):
            at = np.arange(len(names)) + shift
            ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
            marker = "os"[i]
            shown = f"at {label} positions, {group} heads"
            ax.plot(at, means(samples), marker, color=hue, markerfacecolor=face, markersize=5, label=shown)
    ax.axhline(0, color="0.3", linewidth=0.6)
    ax.set(xlabel="Located heads, best first", ylabel=f"log p({labels[0]}) − log p({labels[1]})\nof the value (nats)")
    name_heads(ax, names)
    legend_below(drawn, ax, columns=2)
    return drawn


EXPERIMENT = Experiment(
    id="label-features",
    title="Values carry the label",
    source="Published version, section 3.3",
    claim="Value-output vectors of located heads hold the label of their position: foo at foo, bar at bar.",
    criterion="Three in four have the sign of their label, and the gap between labels exceeds that of the other heads.",
    departs=(
        "The published version says which sign the values have; here a share of right signs and a gap beyond other "
        "heads decide. Values are read out without the final norm's shift and the unembedding's bias, which would "
        "favour one label wherever it stands."
    ),
    paper="the sign follows the label in located heads",
    config=LabelFeaturesConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
)
