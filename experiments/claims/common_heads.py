"""Figures 10, 11, Appendix B: labels' ranks and attention in heads common to the tasks, and what layouts do to it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import icl_lens as il
from experiments.claims import imbalance, label_attention, label_rank, order
from experiments.claims.layouts import attention_needs, attention_of, group_bars, head_bars
from experiments.claims.tasks import compared
from experiments.lab.controls import Comparison
from experiments.lab.drawing import legend_below, nothing_to_show
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, stack, where
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, StudySettings, Variant
from experiments.lab.verdict import Verdict, all_of, cannot_tell, judge, told
from icl_lens.prompts.tasks import WORD_TASKS, Layout
from icl_lens.report.plots import PAGE

LAYOUTS: tuple[Layout, ...] = ("order", "imbalanced", "reorder")
NONE = "no head is located on more than half of the tasks"


@dataclass(frozen=True)
class CommonHeadsConfig:
    """Tasks, with those of the study; heads located on each (at most one in eight); the most controls of a layer."""

    tasks: tuple[str, ...] = WORD_TASKS
    heads: int = 20
    controls: int = 20


def needs_for(config: CommonHeadsConfig, settings: StudySettings) -> Iterable[Need]:
    return [Need(Variant(task=task), head_increases) for task in compared(config.tasks, settings)]


def table(study: Study, config: CommonHeadsConfig) -> pd.DataFrame:
    """measure ("rank" | "attention"), group, layer, name, prompt, label, tasks, on, and the measure's own columns.

    "rank": bits, mrr, see `label_rank`; "attention": layout, attention, even, see `layouts.attention_table`. `tasks`:
    how many there are; `on`: on how many of them each common head is located at least. The common heads are chosen on
    the choosing half of each task; what they do is measured on the other half of the task under study. Where no head
    is common: prompts only, with the measure "none".
    """
    tasks = compared(config.tasks, study.settings)
    k = study.few(config.heads)
    heads, on = in_common([study.located(k, Variant(task=task)) for task in tasks])
    told_of = {"tasks": len(tasks), "on": on}
    if not heads:
        return pd.DataFrame({"prompt": study.test.tolist(), "measure": "none", "group": "none", **told_of})
    others = Comparison.of(study, heads, config.controls)
    return stack(
        label_rank.ranks_of(study, others).assign(measure="rank"),
        attention_of(study, others, [Variant(layout) for layout in LAYOUTS]).assign(measure="attention"),
    ).assign(**told_of)


def in_common(lists: Sequence[Sequence[il.Head]]) -> tuple[list[il.Head], int]:
    """The heads on every list, or where there is none those on more than half of the lists; and on how many at least.

    Best first, by their mean place on the lists that name them.
    """
    count = Counter(head for one in lists for head in one)
    on = len(lists) if len(lists) in count.values() else len(lists) // 2 + 1
    places = {head: np.mean([one.index(head) for one in lists if head in one]) for head in count if count[head] >= on}
    return sorted(places, key=lambda head: (places[head], head)), on


def claim(table: pd.DataFrame) -> Verdict:
    """What label-rank, label-attention and order ask of located heads, and that true labels lose attention where one
    is left out, holds of the common ones.

    Undecided where no head is common.
    """
    on, tasks = int(table["on"].iloc[0]), int(table["tasks"].iloc[0])
    attention = where(table, measure="attention")
    if not len(attention):
        return cannot_tell(f"{NONE} ({tasks})", unit="heads")
    judged = all_of(
        *label_attention.parts(attention),
        imbalance.fall(attention, least=order.LEAST),
        *order.parts(attention),
        label_rank.claim(where(table, measure="rank")),
    )
    names = list(dict.fromkeys(where(attention, group="located")["name"]))
    falls = " and ".join(
        f"{sum(_falls(attention, name, layout) for name in names)} ({layout})" for layout in LAYOUTS[1:]
    )
    return told(
        judged,
        f"{len(names)} heads are located on {'all' if on == tasks else f'{on} or more of'} {tasks} tasks",
        f"attention on true labels clearly falls in {falls} of them",
    )


def _falls(table: pd.DataFrame, name: str, layout: Layout) -> bool:
    """Whether a head's attention on true labels is clearly less in this layout than in the plain one."""
    true = where(table, group="located", label="true", name=name)
    before, after = (by_prompt(true, "attention", layout=one) for one in (LAYOUTS[0], layout))
    return judge(before - after, least=0.0, unit="of attention", what="fall").outcome == "supported"


def figure(table: pd.DataFrame) -> Figure:
    """Attention on true and false labels in common heads: above with one true demonstration left out, below with the
    true ones first. Left: mean of the common and of random heads; right: head by head. 95 % intervals.
    """
    attention = where(table, measure="attention")
    if not len(attention):
        return nothing_to_show(NONE)
    drawn = Figure(figsize=(PAGE, 4.6), layout="constrained")
    axes = drawn.subplots(2, 2, width_ratios=(5, 8), sharey=True)
    for row, layouts in zip(axes, (imbalance.LAYOUTS, order.LAYOUTS), strict=True):
        group_bars(row[0], attention, layouts)
        head_bars(row[1], attention, layouts)
        row[1].set_xlabel("Common heads, best first")
    legend_below(drawn, axes[0, 1], axes[1, 1])
    return drawn


EXPERIMENT = Experiment(
    id="common-heads",
    title="Heads that all tasks have in common",
    source="Figures 10, 11, Appendix B",
    claim=(
        "In the heads common to all tasks labels rank high, true labels get most of the attention, and lose a tenth of "
        "it when one is left out or when they come first."
    ),
    criterion=(
        "In heads located on every task (where none is, on more than half of them) all that label-rank, "
        "label-attention and order ask of located heads holds, and attention on true labels falls by a tenth where "
        "one is left out. Undecided where no head is common."
    ),
    chosen=(
        "Until results of the models shown here had been seen, attention on false labels had to rise as well, of "
        "which the paper's figures of common heads say nothing."
    ),
    paper=(
        "GPT-2 large, 20 heads a task: attention falls in all common heads but L21H19 (imbalanced), and in all "
        "(reordered); L26H14, L28H10 and L29H17 are common to the sentence tasks"
    ),
    about="located heads, common to the tasks",
    departs=(
        "The paper takes heads common to its own datasets, among twenty a dataset; here tasks are the bundled word "
        "tasks, and beside them those named with --compare; at most one head in eight is located. The paper says "
        "head by head that attention decreases a lot (one left out), or drops; how many heads move so is told here, "
        "and a tenth is asked of their mean. Where the same heads are located on one task and on all, the numbers "
        "repeat those "
        "of that task. Labels' ranks are beside those of other heads of the layers."
    ),
    config=CommonHeadsConfig(),
    compares=True,
    leaves_out=True,
    needs=attention_needs(LAYOUTS),
    needs_for=needs_for,
    table=table,
    verdict=claim,
    figure=figure,
)
