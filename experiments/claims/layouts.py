"""Attention on true and false labels in two layouts: what label-attention, imbalance and order share."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from experiments.lab.controls import Comparison
from experiments.lab.drawing import WHISKERS, legend_below, name_heads, whiskers
from experiments.lab.frames import by_prompt, long, stack, where, wide
from experiments.lab.reductions import class_attention, head_increases
from experiments.lab.study import Need, Study, Variant
from icl_lens.prompts.tasks import Layout
from icl_lens.report.palette import BLUE, GREEN, GREY, ORANGE
from icl_lens.report.plots import PAGE

CLASSES = {"true": BLUE, "false": ORANGE}


def attention_needs(layouts: Iterable[Layout]) -> tuple[Need, ...]:
    """What `attention_table` reads, for the layouts compared."""
    variants = [Variant(layout, swapped) for layout in layouts for swapped in (False, True)]
    return (Need(Variant(), head_increases), *(Need(variant, class_attention) for variant in variants))


def attention_table(study: Study, layouts: Iterable[Variant], *, heads: int, draws: int) -> pd.DataFrame:
    """layout, group ("located" | "random"), name (of the located head), prompt, label, attention (0–1).

    Attention is summed over all labels of a class. Heads are located in the "order" layout on the choosing half; all
    else is the other half, mean of both labels as the true one, so that no head passes that likes one of the words.
    "random" is the mean over all draws of a head of the same layer.
    """
    compared = Comparison.of(study, study.located(study.few(heads)), draws)
    rows = study.test.tolist()
    frames = []
    for variant in layouts:
        both = [study.get(class_attention, replace(variant, swapped=swapped))[study.test] for swapped in (False, True)]
        attention = torch.stack(both).mean(0).numpy()
        for head, group, values in compared.groups(lambda head, every=attention: every[:, head.layer, head.head]):
            axes = {"layout": [variant.layout], "group": [group], "name": [str(head)]}
            frames.append(long(values[None, None, None], "attention", **axes, prompt=rows, label=list(CLASSES)))
    return stack(*frames)


def attention_figure(table: pd.DataFrame, layouts: Mapping[Layout, str], *, per_head: bool) -> Figure:
    """Left: attention on true and false labels, mean of located and of random heads, by layout.

    Right: each located head, by layout: on both classes, or (`per_head`) on true labels only. 95 % intervals.
    """
    drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
    left, right = drawn.subplots(1, 2, width_ratios=(2, 3), sharey=True)
    ticks = []
    for i, (layout, title) in enumerate(layouts.items()):
        for j, group in enumerate(("located", "random")):
            ticks.append((3 * j + i, title))
            for k, (label, hue) in enumerate(CLASSES.items()):
                sample = by_prompt(table, "attention", layout=layout, group=group, label=label)
                at = 3 * j + i + 0.4 * (k - 0.5)
                shown = f"{label} labels" if i == j == 0 else None
                left.bar(at, sample.mean(), width=0.4, color=hue, label=shown)
                left.errorbar(at, sample.mean(), yerr=whiskers([sample]), **WHISKERS)
    ticks.sort()
    left.set_xticks([at for at, _ in ticks], [text for _, text in ticks], fontsize=6)
    for at, text in ((0.5 * (len(layouts) - 1), "located heads"), (3 + 0.5 * (len(layouts) - 1), "random heads")):
        left.text(at, -0.22, text, transform=left.get_xaxis_transform(), ha="center", va="top", fontsize=7)
    left.set_ylabel("Attention from the last token,\nsum over labels (0–1)")

    names = list(dict.fromkeys(table["name"]))
    shades = [GREEN, GREY] if per_head else [BLUE, ORANGE]
    bars: list[tuple[Layout, str]] = [(layout, "true") for layout in layouts]
    if not per_head:
        bars = [(next(iter(layouts)), label) for label in CLASSES]
    for i, ((layout, label), hue) in enumerate(zip(bars, shades, strict=True)):
        part = where(table, layout=layout, group="located", label=label)
        values = wide(part, "attention", index="name", columns="prompt").to_numpy()
        at = np.arange(len(names)) + 0.4 * (i - 0.5)
        flat = layouts[layout].replace("\n", " ")
        shown = f"{label} labels, {flat}" if per_head else f"{label} labels"
        right.bar(at, values.mean(1), width=0.4, color=hue, label=shown)
        right.errorbar(at, values.mean(1), yerr=whiskers(values), **WHISKERS)
    name_heads(right, names)
    right.set_xlabel("Located heads, best first")
    legend_below(drawn, left, right)
    return drawn
