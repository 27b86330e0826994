"""Table 2: how often the right label is the more probable one, on each word task, with either label as the answer."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.lab.drawing import WHISKERS, legend_below, means, whiskers
from experiments.lab.experiment import NO_HEADS, Experiment
from experiments.lab.frames import by_prompt, long, stack
from experiments.lab.reductions import correct
from experiments.lab.study import Need, Study, StudySettings, Variant
from experiments.lab.verdict import SHARE, Verdict, all_of, judge
from icl_lens.prompts.tasks import WORD_TASKS
from icl_lens.report.palette import BLUE, ORANGE
from icl_lens.report.plots import PAGE

CHANCE = 0.5
LAYOUTS = {"order": "true ones last", "reorder": "true ones first"}
HUES = (BLUE, ORANGE)


@dataclass(frozen=True)
class AccuracyConfig:
    """The word tasks of the table."""

    tasks: tuple[str, ...] = WORD_TASKS


def variants(config: AccuracyConfig, settings: StudySettings) -> list[Variant]:
    """The rows of the table: the word tasks if the one under study is one of them, else only that one."""
    tasks = config.tasks if settings.task in config.tasks else (settings.task,)
    return [
        Variant(layout, swapped, task) for task in tasks for swapped in (False, True) for layout in ("order", "reorder")
    ]


def needs_for(config: AccuracyConfig, settings: StudySettings) -> Iterable[Need]:
    return [Need(variant, correct) for variant in variants(config, settings)]


def table(study: Study, config: AccuracyConfig) -> pd.DataFrame:
    """task, answer, layout, prompt, query, correct (0 or 1)."""
    frames = []
    for variant in variants(config, study.settings):
        values = study.get(correct, variant)
        frames.append(
            long(
                values[None, None, None],
                "correct",
                task=[variant.task],
                answer=[study.labels[int(variant.swapped)]],
                layout=[variant.layout],
                prompt=range(len(values)),
            ).assign(query=study.queries(variant))
        )
    return stack(*frames)


def claim(table: pd.DataFrame) -> Verdict:
    """Every task and answer beyond chance, averaged over both orders: saying the nearest label fails."""
    rows = [
        judge(
            by_prompt(table, "correct", task=task, answer=answer),
            least=CHANCE + 0.05,
            unit="accuracy",
            what=f"{task} with {answer!r} as the answer",
            bounds=SHARE,
        )
        for task, answer in table[["task", "answer"]].drop_duplicates().itertuples(index=False)
    ]
    return all_of(*rows)


def figure(table: pd.DataFrame) -> Figure:
    """Accuracy by task, answer and order, with 95 % intervals and chance."""
    tasks, answers = (list(dict.fromkeys(table[column])) for column in ("task", "answer"))
    drawn = Figure(figsize=(PAGE, 2.4), layout="constrained")
    axes = drawn.subplots(1, len(LAYOUTS), sharey=True)
    for ax, (layout, title) in zip(axes, LAYOUTS.items(), strict=True):
        for i, (answer, hue) in enumerate(zip(answers, HUES, strict=False)):
            samples = [by_prompt(table, "correct", task=task, answer=answer, layout=layout) for task in tasks]
            at = np.arange(len(tasks)) + 0.4 * (i - 0.5)
            ax.bar(at, means(samples), width=0.4, color=hue, label=f"the answer is {answer!r}")
            ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
            for x, mean in zip(at, means(samples), strict=True):
                ax.text(x, 1.04, f"{mean:.0%}", ha="center", va="bottom", fontsize=6)
        ax.axhline(CHANCE, color="0.3", linewidth=0.8, linestyle="--")
        ax.set(title=f"Demonstrations: {title}", ylim=(0, 1.15), xlim=(-0.6, len(tasks) - 0.4))
        ax.set_xticks(range(len(tasks)), [task.replace("-", "–\n") for task in tasks])
    axes[0].set_ylabel("Accuracy (share of prompts)")
    legend_below(drawn, axes[0])
    return drawn


EXPERIMENT = Experiment(
    id="accuracy",
    title="Does the model classify from demonstrations",
    source="Table 2",
    claim="The model classifies words from their demonstrations alone, whichever label word belongs to which class.",
    criterion=(
        "For every task and answer, accuracy over both orders of the demonstrations is beyond chance by five points. "
        "(The paper's table has the first order only; always saying the nearest label would be right there.)"
    ),
    about=NO_HEADS,
    departs=(
        "The paper's table has the true demonstrations last only; here the verdict is on the mean of both orders, "
        "since always saying the nearest label would be right in the first. Right is the likelier of the two labels; "
        "the paper does not say whether it compares labels or all words."
    ),
    paper="GPT-2 large: 87–100 % in the eight rows",
    config=AccuracyConfig(),
    needs_for=needs_for,
    table=table,
    verdict=claim,
    figure=figure,
    mechanism=False,
)
