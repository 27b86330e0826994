"""Do located heads attend to labels of the query's class?

1. Attention is that of the last position to each label. A head's share is its attention to labels
   of the answer's class over that to all labels: a ratio of means over prompts, because the ratio
   in a prompt where the head hardly attends to labels is noise. Every head counts alike. Prompts
   are balanced, so a head that attends to the nearest label, or to one label word, has a share of
   50%, the control.
2. The gap is the difference instead of the ratio, so that heads count by how much they attend to
   labels. Its control, like that of all further measures, is the mean over the other heads of each
   located head's layer.
3. With a query of the other class after the same demonstrations, attention should move to the other
   class's labels. The shift is half of the drop of the gap.
4. Within a prompt, attention to each label is ranked against what it adds to this label's log-odds.

    python experiments/label_attention.py --model icl-mini --task animal-country -n 200

The paper's Figures 6, 7, 19–21 and 25–27; the published version's prediction shift.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import RANKINGS, Study, Table, from_command_line, head_dots
from matplotlib.figure import Figure

import icl_lens as il

OTHER_HEADS = "other heads of the same layers"
OF_ATTENTION = "share of the attention to labels"


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Measure attention to labels, its shift with the query's class, and its rank by effects."""
    study = Study.from_command_line(
        "label-attention", "Do heads attend to labels of the query's class?", arguments
    )
    table, batch = Table(study), study.testing
    measured = {"what": "attention, effects"}
    by_head = study.read("attention and effects", batch, attention_and_effects, **measured)
    attention, effects = by_head[..., 0], by_head[..., 1]
    of_other_query = study.tokenize([prompt.with_other_query() for prompt in batch.prompts])
    to_labels = il.Activations.attention_to_labels
    after = study.read("other query", of_other_query, to_labels, what="attention")
    is_same = (batch.label_index == batch.answer[:, None]).numpy()
    to_same, to_other = by_class(attention, is_same)
    same_after, other_after = by_class(after, is_same)
    correlation = il.metrics.spearman(torch.from_numpy(attention), torch.from_numpy(effects))
    moved = (to_same - to_other - same_after + other_after) / 2
    measures = {
        "attention to the answer's class minus the other": (to_same - to_other, "%"),
        "attention to labels": (to_same + to_other, "%"),
        "attention that moves with the query's class": (moved, "%"),
        "rank correlation of attention and effect": (correlation.nan_to_num(0).numpy(), "−1 to 1"),
    }
    for ranking in RANKINGS:
        located = study.located_heads(ranking)
        controls = study.control_heads(located)
        add_share(table, to_same, to_same + to_other, located, controls, ranking)
        for measure, (values, unit) in measures.items():
            means = head_means(values, located, controls)
            table.add(measure, *means, versus=OTHER_HEADS, unit=unit, ranking=ranking)
    add_heads(study, table, to_same, to_other)
    return table.write(draw(table.to_frame()))


def attention_and_effects(acts: il.Activations) -> torch.Tensor:
    """Return attention to each label, and what it adds to this label's log-odds, nats.

    The result has the axes [prompt layer head label 2].
    """
    batch = acts.batch
    first, second = (token.expand(len(batch)) for token in batch.label_tokens)
    added = il.subhead_log_prob_increase(acts, first, against=second)
    at_labels = torch.zeros(*added.shape[:3], batch.label_index.shape[1])
    for place in range(batch.all_label_positions.shape[-1]):  # labels may have several tokens
        positions = batch.all_label_positions[..., place]
        index = positions.clamp(min=0)[:, None, None].expand_as(at_labels)
        at_labels += added.gather(-1, index).cpu() * (positions >= 0)[:, None, None]
    sign = torch.where(batch.label_index == 0, 1.0, -1.0)[:, None, None]
    return torch.stack([acts.attention_to_labels().float().cpu(), at_labels * sign], dim=-1)


def by_class(attention: np.ndarray, is_same: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return attention to labels of the answer's class, and to others, [prompt layer head]."""
    is_same = is_same[:, None, None]
    return (attention * is_same).sum(-1), (attention * ~is_same).sum(-1)


def head_means(
    values: np.ndarray, located: Sequence[il.Head], controls: dict[int, list[il.Head]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return each prompt's mean over located heads, and over their layers' control heads."""
    of_located = np.mean([values[:, head.layer, head.head] for head in located], axis=0)
    of_layer = {}
    for layer, heads in controls.items():
        of_layer[layer] = np.mean([values[:, head.layer, head.head] for head in heads], axis=0)
    return of_located, np.mean([of_layer[head.layer] for head in located], axis=0)


def add_share(
    table: Table,
    to_same: np.ndarray,
    total: np.ndarray,
    located: Sequence[il.Head],
    controls: dict[int, list[il.Head]],
    ranking: str,
) -> None:
    """Add the located heads' share, next to chance, and next to the share of other heads."""
    rows = np.stack([to_same, total], axis=-1)

    def shares(draws: np.ndarray) -> np.ndarray:
        """Return every head's share, [1 layer head]; ½ for one that never attends to a label."""
        same_mean, total_mean = draws.mean(0)[..., 0], draws.mean(0)[..., 1]
        share = np.full_like(total_mean, 0.5)
        return np.divide(same_mean, total_mean, out=share, where=total_mean > 0)[None]

    def of_located(draws: np.ndarray) -> float:
        return float(head_means(shares(draws), located, controls)[0][0])

    def of_controls(draws: np.ndarray) -> float:
        return float(head_means(shares(draws), located, controls)[1][0])

    def half(draws: np.ndarray) -> float:
        return 0.5

    about: dict[str, Any] = {"unit": "%", "ranking": ranking}
    table.add_statistic(OF_ATTENTION, rows, of_located, half, versus="chance", **about)
    name = f"{OF_ATTENTION}, beside other heads"
    table.add_statistic(name, rows, of_located, of_controls, versus=OTHER_HEADS, **about)


def add_heads(study: Study, table: Table, to_same: np.ndarray, to_other: np.ndarray) -> None:
    """Add each located head's attention to labels of the answer's class and of the other."""
    for head in study.located_heads("contrast"):
        of_same, of_other = (values[:, head.layer, head.head] for values in (to_same, to_other))
        about = {"at": str(head), "versus": "labels of the other class", "unit": "%"}
        table.add("attention of one head", of_same, of_other, **about)


def draw(table: pd.DataFrame) -> Figure:
    """Draw the attention of each located head to labels of either class."""
    of_heads = table.query("measure == 'attention of one head'")
    names = ("labels of the answer's class", "labels of the other class")
    figure, pairs = head_dots(of_heads, label="attention, %", names=names)
    for axes, _ in pairs:
        axes.set_ylim(0, 104)
    return figure


if __name__ == "__main__":
    from_command_line(main)
