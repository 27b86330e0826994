"""Are the same heads used by different tasks?

Each task has a list of the k heads of largest mean contrast; the overlap of two lists is heads in common / k. Random
lists with as many heads in each layer have Σ_layers a · b / H heads in common on average, where a layer of H heads has
a on one list and b on the other. This is the control: two lists are not similar just because both contain deep heads.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

import icl_lens as il
from experiments.framework import other_tasks
from experiments.framework.estimate import Comparison, compare, compare_drawn
from experiments.framework.finding import Finding, Measured, Row, percent
from experiments.framework.other_tasks import (
    CATEGORIES,
    MAPPINGS,
    MAX_PROMPTS,
    TaskPrompts,
    answer_beats_others,
    n_prompts,
)
from experiments.framework.overlap import Lists, drawn_lists, expected_overlap, overlap
from experiments.framework.plotting import panels
from experiments.framework.sentences import by_outcome, each
from experiments.framework.study import MAX_ROWS, Study, clusters_of, contrasts, increases
from experiments.framework.tasks import Task

OWN = "this task"


def _two_classes(study: Study, *, task_of: Callable[[Study], Task], seed: int) -> TaskPrompts:
    """Return the locating prompts of another task with two classes, in balanced order."""
    batch = Study(study.model, task_of(study), n_prompts(study), seed).halves()[0]
    return TaskPrompts(batch, clusters_of(batch))


CLASSIFICATION: dict[str, Callable[..., TaskPrompts]] = {
    "other labels": partial(_two_classes, task_of=other_tasks.other_labels),
    "natural labels": partial(_two_classes, task_of=other_tasks.natural_labels),
    "other classes": partial(_two_classes, task_of=other_tasks.other_classes),
    "three classes": partial(other_tasks.classes, categories=CATEGORIES[:3]),
    "four classes": partial(other_tasks.classes, categories=CATEGORIES),
}
TASKS: dict[str, Callable[..., TaskPrompts]] = {
    **CLASSIFICATION,
    **{name: partial(other_tasks.mapping, name=name) for name in MAPPINGS},
    "copying": other_tasks.copying,
    "IOI": other_tasks.ioi,
    "induction": other_tasks.induction,
}

MEAN = percent(
    "overlap",
    "heads in common with other classification tasks",
    "the same number of random heads per layer",
    "% of the located heads",
)
CEILING = replace(MEAN, name="overlap_same", quantity="in common with the same task on other prompts")
OF_TASK = {
    name: replace(MEAN, name=f"overlap_{name}".replace("-", "_").replace(" ", "_"), quantity=f"in common with {name}")
    for name in TASKS
}


@dataclass(frozen=True)
class Ranked:
    """A task that the model does: its heads of largest mean, in the data and in each bootstrap draw."""

    lists: Lists
    accuracy: Comparison

    @property
    def note(self) -> str:
        right, chance = (f"{100 * share:.0f}%" for share in (self.accuracy.quantity, self.accuracy.control))
        return f"{right} of the answers are right (guessing: {chance})"


def rank(study: Study, prompts: TaskPrompts, *, seed: int) -> Ranked:
    """Rank heads by contrast; raise InputError if the model does not do the task."""

    def score(acts: il.Activations) -> Float[Tensor, "row part"]:
        return torch.cat([contrasts(acts).flatten(1), answer_beats_others(acts)[:, None]], dim=1)

    found = study.map(prompts.batch, score).double().numpy()
    accuracy = compare(found[:, -1], prompts.chance, prompts.clusters, bounds=(0, 1))
    if not accuracy.low > 0:
        low, high = (f"{100 * (accuracy.control + end):.0f}" for end in (accuracy.low, accuracy.high))
        raise il.InputError(
            f"the model does not do the task: {100 * accuracy.quantity:.0f}% [{low}, {high}] of answers are right, "
            f"and guessing gives {100 * accuracy.control:.0f}%"
        )
    values = found[:, :-1].reshape(-1, study.view.n_layers, study.view.n_heads)
    return Ranked(drawn_lists(values, prompts.clusters, study.n_located, seed=seed), accuracy)


def measure(study: Study) -> Measured:
    """Measure the overlap of the located heads with those of each other task that the model does, and its mean."""
    locating, held_out = (TaskPrompts(half, clusters_of(half)) for half in study.halves())
    own, same = rank(study, locating, seed=0), rank(study, held_out, seed=1)
    ranked, tasks = {OWN: own}, dict[str, TaskPrompts]()
    rows = [_row("overlap_same", own, own.lists, [same.lists], note=same.note)]
    for i, (name, build) in enumerate(TASKS.items()):
        try:
            tasks[name] = build(study, seed=study.seed + 1 + i)
            ranked[name] = rank(study, tasks[name], seed=2 + i)
            rows.append(_row(OF_TASK[name].name, own, own.lists, [ranked[name].lists], note=ranked[name].note))
        except il.InputError as error:
            rows.append(Row.from_result(OF_TASK[name].name, str(error)))
    done = [name for name in CLASSIFICATION if name in ranked]
    if not done:
        raise il.InputError("the model does none of the other classification tasks")
    by_contrast = [ranked[name].lists for name in done]
    values = study.ranked_by("increase").head_scores().double().numpy()
    own_by_increase = drawn_lists(values, locating.clusters, study.n_located, seed=0)
    by_increase = [_lists_by_increase(study, tasks[name], seed=2 + i) for i, name in enumerate(done)]
    note = "mean over " + ", ".join(done)
    main = [
        _row("overlap", own, own.lists, by_contrast, "contrast", note),
        _row("overlap", own, own_by_increase, by_increase, "increase", note),
    ]
    return Measured([*main, *rows], pd.DataFrame(_matrix(ranked)))


def _lists_by_increase(study: Study, prompts: TaskPrompts, *, seed: int) -> Lists:
    values = study.map(prompts.batch[:MAX_ROWS], increases).double().numpy()
    return drawn_lists(values, prompts.clusters[:MAX_ROWS], study.n_located, seed=seed)


def _row(measure: str, own: Ranked, lists: Lists, others: list[Lists], ranking: str = "", note: str = "") -> Row:
    """Compare the mean overlap with other tasks' lists with that of random lists."""
    shared = np.mean([overlap(lists, other) for other in others], axis=0)
    random = np.mean([expected_overlap(lists, other) for other in others], axis=0)
    sizes = own.accuracy.n_prompts, own.accuracy.n_clusters
    found = compare_drawn(shared, random, *sizes, n_heads=int(lists[0].sum()), bounds=(0, 1))
    return Row.from_result(measure, found, ranking=ranking, note=note)


def _matrix(ranked: dict[str, Ranked]) -> Iterator[dict[str, object]]:
    """Yield the overlap of each pair of tasks, that of random lists, and the first task's accuracy."""
    for first, one in ranked.items():
        for second, other in ranked.items():
            lists = one.lists[:1], other.lists[:1]
            shares = {"overlap": float(overlap(*lists)[0]), "random": float(expected_overlap(*lists)[0])}
            yield {"first": first, "second": second, **shares, "accuracy": one.accuracy.quantity}


def draw(details: pd.DataFrame) -> Figure:
    """Draw the overlap of all pairs of tasks that the model does, a heat map per model and task."""
    figure, parts = panels(details, height=3.5, columns=2)
    images = []
    for axes, part in parts:
        names = list(dict.fromkeys(part["first"]))
        table = part.pivot(index="first", columns="second", values="overlap").loc[names, names].to_numpy()
        images.append(axes.imshow(100 * table, vmin=0, vmax=100, cmap="Blues"))
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=6)
        axes.set_yticks(range(len(names)), names, fontsize=6)
        axes.spines[:].set_visible(False)
        for (y, x), value in np.ndenumerate(table):
            color = "white" if value > 0.6 else "black"
            axes.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=5, color=color)
    figure.colorbar(images[0], ax=[axes for axes, _ in parts], label="heads in common, %", shrink=0.6)
    return figure


def answer(cells: Sequence[Any]) -> str:
    """Return the answer in one or two sentences."""
    said = by_outcome(
        cells,
        "overlap",
        every="More than random lists with as many heads in each layer, on every task",
        some="More than random lists with as many heads in each layer, on {n} of {total} tasks",
        none="Not more than random lists with as many heads in each layer",
        ranking="contrast",
    )
    return f"{said}: {each(cells, 'overlap', '{q}% of the heads (random lists: {c}%)', 'contrast')}."


FINDING = Finding(
    id="shared-heads",
    short="heads shared across tasks",
    title="Are the same heads used by different tasks?",
    question="Do the heads located on one task also lead the ranking on other tasks?",
    answer=answer,
    claim="In GPT-2 large, the 20 heads of largest increase are similar on all word and sentence datasets (heads "
    "26-14, 28-10 and 29-17 are important on all of them): different tasks share the same in-context heads. Whether "
    "tasks that are not classification share them is an open question of the published version.",
    covers="section 4.2, appendix A (Figures 3, 4 and 12–15), and open question 2 of the published version",
    measures=(MEAN, CEILING, *OF_TASK.values()),
    measure=measure,
    look_for="Heads in common for each pair of tasks that the model does, %.",
    method="Every task has its own prompts, answers are scored against another label or another output of the prompt, "
    "and as many heads are listed as are located on this task. For the interval, prompts of both tasks are resampled "
    "(by query or answer), and heads are ranked again in each sample. Mappings show six pairs on lines such as “France "
    f"-> Paris”. Each other task has at most {MAX_PROMPTS} prompts; by increase, at most {MAX_ROWS} are used.",
    caveats=(
        "A task counts only if the model does it: the interval of its accuracy is above guessing.",
        "Heads in common need not do the same thing on both tasks.",
        "Answers of mappings are one token; two tasks with few heads per list can only agree in large steps.",
    ),
    draw=draw,
)
