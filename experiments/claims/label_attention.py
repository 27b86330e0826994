"""Figures 6, 19–21, 25–27: attention from the last token to true and to false labels in located heads."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.claims.layouts import attention_figure, attention_needs, attention_table
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt
from experiments.lab.study import Study, Variant
from experiments.lab.verdict import Verdict, all_of, judge
from icl_lens.prompts.tasks import Layout

LAYOUTS: dict[Layout, str] = {"order": "true\nlast", "reorder": "true\nfirst"}


@dataclass(frozen=True)
class LabelAttentionConfig:
    """Heads located (the paper shows four; at most one in eight) and sets of random heads."""

    heads: int = 6
    draws: int = 100


def table(study: Study, config: LabelAttentionConfig) -> pd.DataFrame:
    """layout, group, name, prompt, label ("true" | "false"), attention; see `layouts.attention_table`."""
    return attention_table(study, (Variant(), Variant("reorder")), heads=config.heads, draws=config.draws)


def claim(table: pd.DataFrame) -> Verdict:
    """More attention on true than on false labels, in both orders, and more so than in random heads."""

    def difference(layout: str, group: str) -> Float[np.ndarray, " prompt"]:
        true, false = (
            by_prompt(table, "attention", layout=layout, group=group, label=label) for label in ("true", "false")
        )
        return true - false

    located = {layout: difference(layout, "located") for layout in LAYOUTS}
    return all_of(
        judge(located["order"], least=0.1, unit="of attention", what="true minus false, true ones last"),
        judge(located["reorder"], least=0.0, unit="of attention", what="true minus false, true ones first"),
        judge(
            located["order"] - difference("order", "random"),
            least=0.0,
            unit="of attention",
            what="the same minus random heads",
        ),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Attention on true and false labels: located and random heads in both orders, and each located head."""
    return attention_figure(table, LAYOUTS, per_head=False)


EXPERIMENT = Experiment(
    id="label-attention",
    title="Do located heads look at the right label",
    source="Figures 6, 19–21, 25–27",
    claim="In located heads the last token attends far more to true labels than to false ones.",
    criterion=(
        "In located heads true labels get 0.1 more attention than false ones, more than in random heads of the same "
        "layers; and still more where the true demonstrations come first. (The paper shows the order in which they "
        "also are the nearest.)"
    ),
    paper="GPT-2 large: much larger on true labels in all heads shown",
    config=LabelAttentionConfig(),
    needs=attention_needs(LAYOUTS),
    table=table,
    verdict=claim,
    figure=figure,
)
