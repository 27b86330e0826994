"""Do located heads attend to labels of the query's class?

1. a_same and a_other are a head's attention from the last position, summed over the labels of the answer's class and
   over those of the other one. The head's share is mean(a_same) / mean(a_same + a_other) over prompts: a ratio of
   means, since the ratio in a prompt where the head hardly attends to labels is noise. Every head counts alike; the
   gap a_same − a_other counts heads by their attention to labels.
2. Prompts show both classes equally often in random order, and both labels and both classes are the answer equally
   often, so that a head that attends to the nearest label, or to one label word, has a share of 50%.
3. With a query of the other class after the same demonstrations, attention should move to the other class's labels.
   The shift is half of the drop of a_same − a_other, where "same" is the class of the first query in both prompts.
4. Within a prompt, the labels' attention is ranked against what each label adds to its own log-odds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.framework.estimate import compare_same_heads, ratio_of_means
from experiments.framework.finding import Finding, Measure, Measured, Row, percent, rows_of
from experiments.framework.plotting import COLORS, panels
from experiments.framework.projections import label_effects
from experiments.framework.sentences import by_outcome, each
from experiments.framework.study import Study, label_classes

PLACES = ("best", "second", "third")
"""Heads whose attention is drawn against its effect, as in the paper's Figure 7."""

HEADS = "located heads", "other heads of the same layers"
UNIT = "% of the attention to labels"
MEASURES = (
    percent("chance", "share in located heads", "chance", UNIT),
    percent("share", "share in located heads", "share in other heads", UNIT),
    percent("gap", *HEADS, "attention to the answer's class minus the other, points"),
    percent("mass", *HEADS, "attention to labels, %"),
    percent("shift", *HEADS, "attention that moves with the query's class, points"),
    Measure("dose", *HEADS, "rank correlation of attention and its effect, −1 to 1"),
)


def measure(study: Study) -> Measured:
    """Measure attention to either class's labels, its shift with the query's class, and its rank against effects."""
    batch = study.held_out
    parts = study.map(batch, lambda acts: torch.stack([acts.attention_to_labels(), label_effects(acts)], dim=-1))
    attention, effects = parts.double().unbind(-1)
    after = study.map(study.with_other_query, il.Activations.attention_to_labels).double()
    classes = label_classes(batch)
    of_same, of_other = class_sums(attention, *classes)
    share = shares(of_same, of_other)
    values = {
        "share": (share, (0, 1)),
        "gap": (of_same - of_other, (-1, 1)),
        "mass": (of_same + of_other, (0, 1)),
        "shift": (shifts(attention, after, *classes), (-1, 1)),
        "dose": (il.metrics.spearman(attention, effects).nan_to_num(0.0), (-1, 1)),  # 0 where either is constant
    }
    rows: list[Row] = []
    for ranked in study.by_ranking():
        found = {"chance": compare_same_heads(ranked.of_located(share), 0.5, study.clusters, bounds=(0, 1))}
        found |= {name: ranked.compare_heads(numbers, bounds=bounds) for name, (numbers, bounds) in values.items()}
        rows += rows_of(found, ranking=ranked.ranking)
    return Measured(rows, pd.concat([_heads(study, of_same, of_other), _effects(study, attention, effects)]))


def class_sums(
    attention: Float[Tensor, "row layer head demo"], same: Bool[Tensor, "row demo"], other: Bool[Tensor, "row demo"]
) -> tuple[Float[Tensor, "row layer head"], Float[Tensor, "row layer head"]]:
    """Return attention summed over labels of the answer's class, and over those of the other."""
    of_same, of_other = ((attention * chosen[:, None, None]).sum(-1) for chosen in (same, other))
    return of_same, of_other


def shares(
    of_same: Float[Tensor, "row layer head"], of_other: Float[Tensor, "row layer head"]
) -> Float[Tensor, "row layer head"]:
    """Return numbers whose mean over rows is each head's share (0–1); ½ for a head that never attends to a label."""
    ratio = ratio_of_means(of_same.numpy(), (of_same + of_other).numpy())
    return torch.from_numpy(np.where(np.isnan(ratio), 0.5, ratio))


def shifts(
    before: Float[Tensor, "row layer head demo"],
    after: Float[Tensor, "row layer head demo"],
    same: Bool[Tensor, "row demo"],
    other: Bool[Tensor, "row demo"],
) -> Float[Tensor, "row layer head"]:
    """Return the mean (0–1) of what attention labels of the first query's class lose and the other labels gain."""
    of_same, of_other = class_sums(before - after, same, other)
    return (of_same - of_other) / 2


def _heads(
    study: Study, of_same: Float[Tensor, "row layer head"], of_other: Float[Tensor, "row layer head"]
) -> pd.DataFrame:
    """Return the mean attention (%) of each located head to labels of the answer's class and of the other."""
    same, other = (100 * one.mean(0) for one in (of_same, of_other))
    return pd.DataFrame(
        {"part": "attention", "head": str(head), "same": float(same[*head]), "other": float(other[*head])}
        for head in study.located
    )


def _effects(
    study: Study, attention: Float[Tensor, "row layer head demo"], effects: Float[Tensor, "row layer head demo"]
) -> pd.DataFrame:
    """Return attention (%) to labels of the answer's class and its effect (nats): up to 200 labels per best head."""
    same, found = label_classes(study.held_out)[0], []
    for place, head in zip(PLACES, study.located, strict=False):
        x, y = (one[:, *head][same][:200].numpy() for one in (attention, effects))
        found.append(pd.DataFrame({"place": place, "head": str(head), "attention": 100 * x, "effect": y}))
    return pd.concat(found).assign(part="effect")


def draw(details: pd.DataFrame) -> Figure:
    """Draw attention to labels of either class by located head, and attention against its effect in the best heads."""
    figure, parts = panels(details.sort_values("part", kind="stable"), by=("part", "model", "task"))
    handles, n_attention = {}, details.loc[details["part"] == "attention", ["model", "task"]].drop_duplicates().shape[0]
    for i, (axes, part) in enumerate(parts):
        axes.set_title("\n".join(part[["model", "task"]].iloc[0]), fontsize=8)
        if part["part"].iloc[0] == "attention":
            axes.plot(part["head"], part["same"], "o", color=COLORS[0], label="labels of the answer's class")
            axes.plot(part["head"], part["other"], "o", mfc="none", mec=COLORS[1], ms=7, label="of the other class")
            axes.tick_params(axis="x", rotation=60, labelsize=7)
            axes.set_ylim(0, 104)
            axes.set_ylabel("" if i % 3 else "attention, %", fontsize=8)
        else:
            for color, place in zip(COLORS[2:], PLACES, strict=False):
                dots = part[part["place"] == place]
                axes.plot(dots["attention"], dots["effect"], ".", ms=3, color=color, label=f"{place} head")
            axes.axhline(0, color="#bbbbbb", lw=0.8)
            axes.set_xlabel("attention to a label, %", fontsize=8)
            axes.set_ylabel("" if i % 3 and i != n_attention else "log-odds added, nats", fontsize=8)
        handles |= {str(line.get_label()): line for line in axes.get_lines() if str(line.get_label())[0] != "_"}
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def answer(cells: Sequence[Any]) -> str:
    """Return the answer in one or two sentences."""
    said = by_outcome(cells, "chance", "Located heads attend more to labels of the query's class {where}")
    shares = each(cells, "chance", "{q}% of their attention to labels")
    others = by_outcome(
        cells,
        "share",
        "Other heads of the same layers do so less {where}",
        none="Other heads of the same layers do so as much",
    )
    return f"{said}: {shares} (chance: 50%). {others}."


FINDING = Finding(
    id="label-attention",
    title="Do located heads attend to labels of the query's class?",
    question="In balanced random order, does more of located heads' attention to labels go to the query's class?",
    answer=answer,
    claim="In all located heads of GPT-2 large and Llama, attention to labels of the query's class is much larger than "
    "to the others, with the query's class last; more attention brings a larger increase, though not linearly. The "
    "published version finds that attention moves from foo to bar positions when the input makes the prediction flip. "
    "The text gives no numbers.",
    covers="Figures 6, 7, 19–21 and 25–27; the published version's prediction shift",
    measures=MEASURES,
    measure=measure,
    look_for="Left panels: attention of each located head to labels of either class. Others: attention to a label and "
    "what it adds to that label's log-odds.",
    method="Attention from the last position to label positions, in balanced random order. A head's share is a ratio "
    "of means over prompts, so that prompts in which it hardly attends to labels hardly count; a head that attends to "
    "the nearest label or to one label word has 50%. The shift is half the change of the difference between classes "
    "when the query changes its class and the demonstrations stay. The effect of a label is what attention times value "
    "adds to its own log-odds, ranked against attention over the labels of each prompt.",
    caveats=(
        "A share says nothing about how much a head attends to labels: other heads may also prefer true labels but "
        "hardly attend to labels at all. See the gap below.",
        "Attention times a value that is the same everywhere grows with attention by arithmetic, so that a high rank "
        "correlation shows that values differ less than attention, not that attention decides.",
        "Where labels name the classes, attention may follow the label word rather than its demonstration.",
    ),
    post_hoc="Chance became the main control, in place of other heads, after both had been seen on the real model: the "
    "paper compares true labels with false ones. Other heads are in the table of other measures.",
    earlier="share",
    draw=draw,
)
