"""Figures 6, 19–21, 25–27: attention from the last token to true and to false labels in located heads."""

from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure

from experiments.claims.layouts import Attended, attention_figure, attention_needs, attention_table
from experiments.lab.experiment import Experiment
from experiments.lab.frames import mean_by, where
from experiments.lab.study import Study, Variant
from experiments.lab.verdict import CHANGE, Verdict, all_of, told, verdict
from icl_lens.prompts.tasks import Layout

LAYOUTS: dict[Layout, str] = {"order": "true\nlast", "reorder": "true\nfirst"}


TWICE = 1 / 3
"""(true − false) / (true + false), where true labels get twice as much as false ones."""


@dataclass(frozen=True)
class LabelAttentionConfig:
    """Heads located (the paper shows four; at most one in eight) and the most controls of a layer."""

    heads: int = 6
    controls: int = 20


def table(study: Study, config: LabelAttentionConfig) -> pd.DataFrame:
    """layout, group, layer, name, prompt, label ("true" | "false"), attention, even; see `layouts.attention_table`."""
    return attention_table(study, (Variant(), Variant("reorder")), heads=config.heads, controls=config.controls)


def parts(table: pd.DataFrame) -> list[Verdict]:
    """What must hold, each by itself."""
    near, far = (Attended.of(table, layout) for layout in LAYOUTS)
    preference = (near.located["true"] - near.located["false"]) / (near.located["true"] + near.located["false"])
    gaps = [one.located["true"] - one.located["false"] for one in (near, far)]
    other = near.random["true"] - near.random["false"]
    return [
        verdict(
            near.drawn.estimate(preference, bounds=CHANGE),
            least=TWICE,
            unit="of attention on labels",
            what="true minus false, true ones last",
        ),
        verdict(
            near.drawn.estimate(near.located["true"] - near.even["true"], bounds=CHANGE),
            least=0.0,
            unit="of attention",
            what="attention on true labels minus what even attention would give them",
        ),
        verdict(
            far.drawn.estimate(gaps[1], bounds=CHANGE),
            least=0.0,
            unit="of attention",
            what="true minus false, true ones first",
        ),
        verdict(
            near.drawn.estimate(gaps[0] - other, bounds=(-2.0, 2.0)),
            least=0.0,
            unit="of attention",
            what=f"true minus false beyond {near.controls} of the same layers",
        ),
    ]


def claim(table: pd.DataFrame) -> Verdict:
    """True labels get twice the attention of false ones, and more than even attention would give them.

    They get more where they come first, too; and the difference is larger than in the other heads of the layers.
    """
    mass = Attended.of(table, "order").on_labels[0]
    near = where(table, layout="order", group="located")
    true, false = (mean_by(where(near, label=label), "attention", "name") for label in ("true", "false"))
    twice = int((true >= 2 * false).sum())
    return told(
        all_of(*parts(table)),
        f"true labels get twice as much in {twice} of {len(true)} heads",
        f"located heads give labels {mass:.3g} of their attention",
    )


def figure(table: pd.DataFrame) -> Figure:
    """Attention on true and false labels: located and random heads in both orders, and each located head."""
    return attention_figure(table, LAYOUTS, per_head=False)


EXPERIMENT = Experiment(
    id="label-attention",
    title="Do located heads look at the right label",
    source="Figures 6, 19–21, 25–27",
    claim="On average over located heads the last token attends far more to true labels than to false ones.",
    criterion=(
        "In located heads true labels get twice the attention of false ones, and more than evenly spread attention "
        "would "
        "give them; still more where the true demonstrations come first (the paper shows the order in which they "
        "also are the nearest); and the difference is larger than in the other heads of the layers."
    ),
    departs=(
        "The verdict is on the mean of the best located heads, where the paper shows four by name and says it of "
        "all; in "
        "how many true labels get twice as much is told. Both labels are the true one "
        "in turn. The paper shows true demonstrations last only; here true labels must get more attention where they "
        "come "
        "first, too, and more than evenly spread attention would give them."
    ),
    paper="GPT-2 large: much larger on true labels in all in-context heads",
    config=LabelAttentionConfig(),
    needs=attention_needs(LAYOUTS),
    table=table,
    verdict=claim,
    figure=figure,
)
