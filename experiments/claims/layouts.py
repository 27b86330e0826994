"""Attention on true and false labels in two layouts: what label-attention, imbalance and order share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import icl_lens as il
from experiments.lab.controls import Comparison, beside, matched
from experiments.lab.drawing import WHISKERS, by_name, legend_below, mark_zeros, means, name_heads, whiskers
from experiments.lab.frames import by_prompt, long, stack, where
from experiments.lab.intervals import Resample
from experiments.lab.reductions import class_attention, head_increases, is_true_label
from experiments.lab.study import Need, Study, Variant
from icl_lens.prompts.tasks import Layout
from icl_lens.report.palette import BLUE, ORANGE
from icl_lens.report.plots import PAGE

CLASSES = {"true": BLUE, "false": ORANGE}


def attention_needs(layouts: Iterable[Layout]) -> tuple[Need, ...]:
    """What `attention_table` reads, for the layouts compared."""
    variants = [Variant(layout, swapped) for layout in layouts for swapped in (False, True)]
    return (Need(Variant(), head_increases), *(Need(variant, class_attention) for variant in variants))


def attention_table(study: Study, layouts: Iterable[Variant], *, heads: int, controls: int) -> pd.DataFrame:
    """layout, group ("located" | "random"), layer, name, prompt, label, attention (0–1), even (0–1).

    Attention is summed over all labels of a class; `even` is what they would get if all positions got the same. Heads
    are located in the "order" layout on the choosing half; all else is the other half, mean of both labels as the true
    one, so that no head passes that likes one of the words. "random" heads are the others of the layer.
    """
    return attention_of(study, Comparison.of(study, study.located(study.few(heads)), controls), layouts)


def attention_of(study: Study, compared: Comparison, layouts: Iterable[Variant]) -> pd.DataFrame:
    """`attention_table` for heads that were located otherwise."""
    rows = study.test.tolist()
    frames = []
    for variant in layouts:
        both = [study.get(class_attention, replace(variant, swapped=swapped))[study.test] for swapped in (False, True)]
        attention = torch.stack(both).mean(0).numpy()
        batch = study.batch(variant)[study.test]
        true = is_true_label(batch)
        counts = torch.stack([true.sum(-1), ((batch.label_index >= 0) & ~true).sum(-1)], dim=-1)
        even = (counts / batch.attention_mask.sum(-1, keepdim=True)).cpu().numpy().reshape(-1)

        def frame(
            head: il.Head, every: np.ndarray = attention, variant: Variant = variant, even: np.ndarray = even
        ) -> pd.DataFrame:
            values = long(every[:, head.layer, head.head], "attention", prompt=rows, label=list(CLASSES))
            return values.assign(layout=variant.layout, even=even)

        frames += compared.rows(frame)
    return stack(*frames)


@dataclass(frozen=True)
class Attended:
    """Attention of located and of random heads on both classes in one layout, in the data and in bootstrap draws."""

    located: dict[str, Float[np.ndarray, " draw"]]
    random: dict[str, Float[np.ndarray, " draw"]]
    even: dict[str, Float[np.ndarray, " draw"]]
    drawn: Resample
    controls: str

    @property
    def on_labels(self) -> Float[np.ndarray, " draw"]:
        """What located heads give labels of both classes together: the scale of changes."""
        return self.located["true"] + self.located["false"]

    @classmethod
    def of(cls, table: pd.DataFrame, layout: str) -> "Attended":
        found = {label: beside(table, "attention", layout=layout, label=label) for label in CLASSES}
        even = {label: beside(table, "even", layout=layout, label=label).located for label in CLASSES}
        any_of = found["true"]
        return cls(
            {label: one.located for label, one in found.items()},
            {label: one.random for label, one in found.items()},
            even,
            any_of.drawn,
            any_of.named,
        )


def attention_figure(table: pd.DataFrame, layouts: Mapping[Layout, str], *, per_head: bool) -> Figure:
    """Left: attention on true and false labels, mean of located and of random heads, by layout.

    Right: each located head, both classes: in the first layout, or (`per_head`) in either. 95 % intervals.
    """
    drawn = Figure(figsize=(PAGE, 2.6), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(5, 8), sharey=True)
    group_bars(left, table, layouts)
    head_bars(right, table, layouts if per_head else dict([*layouts.items()][:1]))
    right.set_xlabel("Located heads, best first")
    legend_below(drawn, left, right)
    return drawn


def group_bars(ax: Axes, table: pd.DataFrame, layouts: Mapping[Layout, str]) -> None:
    """Attention on true and false labels, mean of located and of random heads, by layout."""
    ticks, drawn_bars = [], []
    for i, (layout, title) in enumerate(layouts.items()):
        for j, group in enumerate(("located", "random")):
            ticks.append((3 * j + i, title))
            for k, (label, hue) in enumerate(CLASSES.items()):
                part = where(table, layout=layout, label=label)
                sample = by_prompt(part, "attention", group=group) if group == "located" else matched(part, "attention")
                at = 3 * j + i + 0.4 * (k - 0.5)
                shown = f"{label} labels" if i == j == 0 else None
                ax.bar(at, sample.mean(), width=0.4, color=hue, label=shown)
                ax.errorbar(at, sample.mean(), yerr=whiskers([sample]), **WHISKERS)
                drawn_bars.append((at, sample.mean()))
    ticks.sort()
    ax.set_xticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=6)
    for at, text in ((0.5 * (len(layouts) - 1), "located heads"), (3 + 0.5 * (len(layouts) - 1), "random heads")):
        ax.text(at, -0.22, text, transform=ax.get_xaxis_transform(), ha="center", va="top", fontsize=7)
    ax.set_ylabel("Attention from the last token,\nsum over labels (0–1)")
    mark_zeros(ax, *zip(*drawn_bars, strict=True))


def head_bars(ax: Axes, table: pd.DataFrame, layouts: Mapping[Layout, str]) -> None:
    """Attention of each located head on true and on false labels; the second layout hatched."""
    names = list(dict.fromkeys(where(table, group="located")["name"]))
    bars: list[tuple[str, Layout]] = [(label, layout) for label in CLASSES for layout in layouts]
    width = 0.8 / len(bars)
    drawn_bars = []
    for i, (label, layout) in enumerate(bars):
        samples = by_name(where(table, layout=layout, group="located", label=label), "attention", names)
        at = np.arange(len(names)) + width * (i - (len(bars) - 1) / 2)
        second = layout != next(iter(layouts))
        flat = layouts[layout].replace("\n", " ")
        look: dict[str, Any] = {"color": CLASSES[label]}
        if second:
            look = {"color": "white", "hatch": "/////"}
        shown = f"{label} labels, {flat}" if len(layouts) > 1 else f"{label} labels"
        ax.bar(at, means(samples), width=width, edgecolor=CLASSES[label], linewidth=0.6, label=shown, **look)
        ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
        drawn_bars += zip(at, means(samples), strict=True)
    mark_zeros(ax, *zip(*drawn_bars, strict=True))
    name_heads(ax, names)
