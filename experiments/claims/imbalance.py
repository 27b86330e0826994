"""Figures 8, 10: attention on true and false labels when the last true demonstration is left out."""

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

LAYOUTS: dict[Layout, str] = {"order": "balanced", "imbalanced": "one true\nleft out"}
LEAST = 0.02


@dataclass(frozen=True)
class ImbalanceConfig:
    """Heads located (at most one in eight) and sets of random heads."""

    heads: int = 6
    draws: int = 100


def table(study: Study, config: ImbalanceConfig) -> pd.DataFrame:
    """layout, group, name, prompt, label ("true" | "false"), attention; see `layouts.attention_table`."""
    return attention_table(study, (Variant(), Variant("imbalanced")), heads=config.heads, draws=config.draws)


def claim(table: pd.DataFrame) -> Verdict:
    """In located heads attention on true labels falls, and that on false labels rises, more than in random heads."""

    def change(label: str, group: str = "located") -> Float[np.ndarray, " prompt"]:
        before, after = (by_prompt(table, "attention", layout=layout, group=group, label=label) for layout in LAYOUTS)
        return after - before

    moved = {group: change("false", group) - change("true", group) for group in ("located", "random")}
    return all_of(
        judge(-change("true"), least=LEAST, unit="of attention", what="fall on true labels"),
        judge(change("false"), least=LEAST, unit="of attention", what="rise on false labels"),
        judge(moved["located"] - moved["random"], least=0.0, unit="of attention", what="both beyond random heads"),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Attention on both classes, balanced and not, located and random heads; true labels, head by head."""
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
        f"In located heads summed attention on true labels falls, and that on false ones rises, by {LEAST}; the two "
        "together by more than in random heads."
    ),
    paper="GPT-2 large: true falls, false rises in L19H11 and L20H11; of the common heads only L21H19 goes against it",
    config=ImbalanceConfig(),
    needs=attention_needs(LAYOUTS),
    table=table,
    verdict=claim,
    figure=figure,
)
