"""Figures 8, 10: attention on true and false labels when the last true demonstration is left out."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from experiments.claims.layouts import Attended, attention_figure, attention_needs, attention_table
from experiments.lab.experiment import Experiment
from experiments.lab.study import Study, Variant
from experiments.lab.verdict import CHANGE, Verdict, all_of, told, verdict
from icl_lens.prompts.tasks import Layout

LAYOUTS: dict[Layout, str] = {"order": "balanced", "imbalanced": "one true\nleft out"}


@dataclass(frozen=True)
class ImbalanceConfig:
    """Heads located (at most one in eight) and the most controls of a layer."""

    heads: int = 6
    controls: int = 20


def table(study: Study, config: ImbalanceConfig) -> pd.DataFrame:
    """layout, group, layer, name, prompt, label ("true" | "false"), attention, even; see `layouts.attention_table`."""
    return attention_table(study, (Variant(), Variant("imbalanced")), heads=config.heads, controls=config.controls)


def parts(table: pd.DataFrame) -> list[Verdict]:
    """What must hold, each by itself."""
    whole, less = (Attended.of(table, layout) for layout in LAYOUTS)
    moved = [
        (after["false"] - before["false"]) - (after["true"] - before["true"])
        for before, after in ((whole.located, less.located), (whole.random, less.random))
    ]
    return [
        fall(table, least=0.0),
        verdict(
            whole.drawn.estimate(less.located["false"] - whole.located["false"], bounds=CHANGE),
            least=0.0,
            unit="of attention",
            what="rise of that on false labels",
        ),
        verdict(
            whole.drawn.estimate(moved[0] - moved[1]),
            least=0.0,
            unit="of attention",
            what=f"both together beyond {whole.controls} of the same layers",
        ),
    ]


def fall(table: pd.DataFrame, *, least: float) -> Verdict:
    """By how much attention on true labels falls in located heads, of what it was."""
    whole, less = (Attended.of(table, layout) for layout in LAYOUTS)
    falls = (whole.located["true"] - less.located["true"]) / whole.located["true"]
    return verdict(
        whole.drawn.estimate(falls), least=least, unit="of what it was", what="fall of attention on true labels"
    )


def claim(table: pd.DataFrame) -> Verdict:
    """In located heads attention on true labels falls, that on false ones rises: together more than in the other heads
    of the layers.
    """
    whole, less = (Attended.of(table, layout) for layout in LAYOUTS)
    located, other = (
        1 - after["true"][0] / before["true"][0]
        for before, after in ((whole.located, less.located), (whole.random, less.random))
    )
    return told(
        all_of(*parts(table)),
        f"with one true label fewer, true labels lose {located:.0%} of their attention, and {other:.0%} of the little "
        "there is in other heads",
    )


def figure(table: pd.DataFrame) -> Figure:
    """Attention on both classes, balanced and not, located and random heads; and head by head."""
    return attention_figure(table, LAYOUTS, per_head=True)


EXPERIMENT = Experiment(
    id="imbalance",
    title="Why the majority label is favoured",
    source="Figures 8, 10",
    claim=(
        "With one true demonstration fewer, located heads attend less to true labels and more to false ones: "
        "summed attention follows label frequency."
    ),
    criterion=(
        "In located heads summed attention on true labels falls, and that on false ones rises; the two together by "
        "more "
        "than in the other heads of the layers."
    ),
    chosen=(
        "Until results of the models shown here had been seen, both had to change by a tenth of attention on labels, "
        "though the paper says only that one decreases and the other increases."
    ),
    departs=(
        "The verdict is on the mean of the located heads, where the paper shows L19H11 and L20H11 (Figure 8) and "
        "heads among the best 20 of both word tasks (Figure 10); both labels are the true one in turn. The paper "
        "says that attention on true labels decreases, without a number (in common heads a lot: common-heads asks "
        "for a "
        "tenth). Attention, as a share of all, must move further than in other heads of the layers: softmax alone "
        "raises it on false "
        "labels, as "
        "the paper "
        "says itself."
    ),
    paper="GPT-2 large: true falls, false rises in L19H11 and L20H11; of the common heads only L21H19 goes against it",
    classes="any",
    leaves_out=True,
    config=ImbalanceConfig(),
    needs=attention_needs(LAYOUTS),
    table=table,
    verdict=claim,
    figure=figure,
)
