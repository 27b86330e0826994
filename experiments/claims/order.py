"""Figures 9, 11: attention on true and false labels when the true demonstrations come first instead of last."""

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
LEAST = 0.02


@dataclass(frozen=True)
class OrderConfig:
    """Heads located (at most one in eight) and sets of random heads."""

    heads: int = 6
    draws: int = 100


def table(study: Study, config: OrderConfig) -> pd.DataFrame:
    """layout, group, name, prompt, label ("true" | "false"), attention; see `layouts.attention_table`."""
    return attention_table(study, (Variant(), Variant("reorder")), heads=config.heads, draws=config.draws)


def claim(table: pd.DataFrame) -> Verdict:
    """In located heads attention on true labels falls when they are moved away, more than in random heads."""

    def fall(group: str) -> Float[np.ndarray, " prompt"]:
        near, far = (by_prompt(table, "attention", layout=layout, group=group, label="true") for layout in LAYOUTS)
        return near - far

    return all_of(
        judge(fall("located"), least=LEAST, unit="of attention", what="fall on true labels"),
        judge(fall("located") - fall("random"), least=0.0, unit="of attention", what="the same beyond random heads"),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Attention on both classes in both orders, located and random heads; true labels, head by head."""
    return attention_figure(table, LAYOUTS, per_head=True)


EXPERIMENT = Experiment(
    id="order",
    title="Why the order of demonstrations matters",
    source="Figures 9, 11",
    claim="With the true demonstrations far from the input, located heads attend less to true labels.",
    criterion=f"In located heads summed attention on true labels falls by {LEAST} or more, more than in random heads.",
    paper="GPT-2 large: falls in all common heads, most in L21H19 and L22H0",
    config=OrderConfig(),
    needs=attention_needs(LAYOUTS),
    table=table,
    verdict=claim,
    figure=figure,
)
