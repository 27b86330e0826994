"""Open question 2: heads located on one task, removed on another."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

import icl_lens as il
from experiments.lab.drawing import WHISKERS, legend_below, whiskers
from experiments.lab.editing import BAR, FOO, located_for_both, odds, right, scores, zeroed
from experiments.lab.experiment import Experiment
from experiments.lab.frames import by_prompt, stack
from experiments.lab.reductions import head_increases
from experiments.lab.study import Need, Study, StudySettings, Variant
from experiments.lab.verdict import Verdict, all_of, judge
from icl_lens.report.palette import BLUE, GREY, ORANGE
from icl_lens.report.plots import COLUMN

GROUPS = {"none": ("nothing", "0.85"), "random": ("random heads", GREY), "other": ("located elsewhere", BLUE)}
GROUPS["own"] = ("located here", ORANGE)


@dataclass(frozen=True)
class TaskTransferConfig:
    """Other tasks, of which the first that is not the one under study is taken; heads for each label; random sets."""

    others: tuple[str, ...] = ("animal-country", "sentiment-number")
    heads: int = 6
    draws: int = 10


def _variants(config: TaskTransferConfig, task: str) -> list[Variant]:
    other = next(name for name in config.others if name != task)
    return [replace(variant, task=other) for variant in (FOO, BAR)]


def needs_for(config: TaskTransferConfig, settings: StudySettings) -> Iterable[Need]:
    return [Need(variant, head_increases) for variant in (FOO, BAR, *_variants(config, settings.task))]


def table(study: Study, config: TaskTransferConfig) -> pd.DataFrame:
    """removed ("none" | "own" | "other" | "random": mean of draws), prompt, answer, correct, odds (nats), …

    "own": heads located on this task; "other": as many located on the other task.
    """
    everything = len(study.view.heads())
    own = located_for_both(study, study.few(config.heads))
    away = _variants(config, study.settings.task)
    pairs = zip(*(study.located(everything, variant) for variant in away), strict=True)
    other = list(dict.fromkeys(head for pair in pairs for head in pair))[: len(own)]
    draws = study.controls(own, config.draws, avoid=other)
    frames = []
    for answer, variant in (("foo", FOO), ("bar", BAR)):

        def measured(
            removed: list[il.Head], variant: Variant = variant, answer: str = answer
        ) -> Float[np.ndarray, "2 row"]:
            label_scores = scores(study, variant, study.test, zeroed(study, removed), what=f"transfer, {answer}")
            return np.stack([measure(study, variant, study.test, label_scores) for measure in (right, odds)])

        values = {
            "none": measured([]),
            "own": measured(own),
            "other": measured(other),
            "random": np.mean([measured(drawn) for drawn in draws], axis=0),
        }
        for removed, (correct, log_odds) in values.items():
            frame = pd.DataFrame({"prompt": study.test.tolist(), "correct": correct, "odds": log_odds})
            frames.append(
                frame.assign(removed=removed, answer=answer, located_on=away[0].task, shared=len({*own} & {*other}))
            )
    return stack(*frames)


def claim(table: pd.DataFrame) -> Verdict:
    """Heads located on the other task cost at least half of what this task's own cost, and more than random ones."""
    none, own, other, random = (by_prompt(table, "odds", removed=name) for name in ("none", "own", "other", "random"))
    return all_of(
        judge(none - own, least=0.0, unit="nats", what="fall of the answer without this task's heads"),
        judge(
            (none - other) - 0.5 * (none - own),
            least=0.0,
            unit="nats",
            what="the other task's heads minus half of that",
        ),
        judge(random - other, least=0.0, unit="nats", what="the other task's heads beyond random ones"),
    )


def figure(table: pd.DataFrame) -> Figure:
    """Accuracy and log-odds of the answer by what is removed, 95 % intervals."""
    drawn = Figure(figsize=(COLUMN, 2.4), layout="constrained")
    axes = drawn.subplots(1, 2)
    for ax, value, title in zip(axes, ("correct", "odds"), ("Accuracy (0–1)", "Answer's log-odds (nats)"), strict=True):
        for i, (removed, (label, hue)) in enumerate(GROUPS.items()):
            sample = by_prompt(table, value, removed=removed)
            ax.bar(i, sample.mean(), color=hue, width=0.8, label=label)
            ax.errorbar(i, sample.mean(), yerr=whiskers([sample]), **WHISKERS)
        ax.set_xticks([])
        ax.axhline(0, color="0.3", linewidth=0.6)
        ax.set_ylabel(title)
    axes[0].set_xlabel("Removed")
    axes[1].set_xlabel(f"elsewhere: {table['located_on'].iloc[0]}", fontsize=7)
    legend_below(drawn, axes[0], columns=2)
    return drawn


EXPERIMENT = Experiment(
    id="task-transfer",
    title="Do tasks share their heads",
    source="Published version, open question 2",
    claim="Tasks share in-context heads: those located on one task matter on another.",
    criterion="Removing the other task's heads costs half of what the own ones cost or more, and more than random.",
    paper=None,
    config=TaskTransferConfig(),
    needs_for=needs_for,
    table=table,
    verdict=claim,
    figure=figure,
)
