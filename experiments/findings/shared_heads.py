"""Which heads do tasks share, and what does removing the heads of one kind of task cost the others?

Each task has a list of the k heads of largest mean contrast; the overlap of two lists is heads in common / k. Random
lists with as many heads in each layer have Σ_layers a · b / H heads in common on average, where a layer of H heads has
a on one list and b on the other. This is the control: two lists are not similar just because both contain deep heads.
Kinds of tasks, and what removing heads costs: `head_kinds`.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

import icl_lens as il
from experiments.framework import other_tasks, shared_heads_page
from experiments.framework.estimate import Comparison, compare
from experiments.framework.finding import Finding, Measure, Measured, Row, percent
from experiments.framework.head_kinds import (
    KINDS,
    LABEL_KINDS,
    N_TESTED,
    RANDOM_SETS,
    Kind,
    Located,
    Removals,
    mean_overlap,
    most_shared,
    shared,
    shared_with_last,
)
from experiments.framework.other_tasks import (
    CATEGORIES,
    MAX_PROMPTS,
    Split,
    TaskPrompts,
    answer_beats_others,
    n_prompts,
)
from experiments.framework.overlap import Lists, drawn_lists, expected_overlap, overlap
from experiments.framework.study import Study, contrasts, increases
from experiments.framework.tasks import Task
from icl_lens.analyses.pair_behavior import PairCheck
from icl_lens.prompts.pair_task import bundled_pairs

OWN = "this task"
INCREASE_PROMPTS = 12
"""Most prompts of a task by which heads are ranked by increase, which takes every head's full vocabulary."""


def _two_classes(study: Study, *, task_of: Callable[[Study], Task], seed: int) -> tuple[Split, Kind]:
    """Return the prompts of another task with two classes, in balanced order, and its kind."""
    task = task_of(study)
    kind = "chat" if task.name == "chat" else "natural labels" if task.natural else "arbitrary labels"
    return Split.of(Study(study.model, task, n_prompts(study), seed).halves()), kind


def _chat(study: Study, *, seed: int) -> tuple[Split, Kind]:
    """Return the study's task as a conversation, half of the prompts: they are several times as long."""
    few = replace(study, n=max(n_prompts(study) // 2, 16))
    return _two_classes(few, task_of=other_tasks.chat, seed=seed)


CLASSIFICATION: dict[str, Callable[..., Any]] = {
    "other labels": partial(_two_classes, task_of=other_tasks.other_labels),
    "natural labels": partial(_two_classes, task_of=other_tasks.natural_labels),
    "other classes": partial(_two_classes, task_of=other_tasks.other_classes),
    "three classes": partial(other_tasks.classes, categories=CATEGORIES[:3]),
    "four classes": partial(other_tasks.classes, categories=CATEGORIES),
}
"""The tasks of the main measure."""
PAIRS = tuple(bundled_pairs())
TASKS: dict[str, Callable[..., Any]] = {
    **CLASSIFICATION,
    "other classes, natural labels": partial(_two_classes, task_of=other_tasks.other_natural_labels),
    "chat": _chat,
    **{name: partial(other_tasks.word_pairs, name=name) for name in PAIRS},
    "copying": other_tasks.copying,
    "IOI": other_tasks.ioi,
    "induction": other_tasks.induction,
}
COPYING = ("copying", "induction")

MEAN = percent(
    "overlap",
    "heads in common with other classification tasks",
    "the same number of random heads per layer",
    "% of the located heads",
)
CEILING = replace(MEAN, name="overlap_same", quantity="in common with the same task on other prompts")
OF_TASK = {
    name: replace(
        MEAN,
        name=f"overlap_{name}".replace(",", "").replace("-", "_").replace(" ", "_"),
        quantity=f"in common with {name}",
    )
    for name in TASKS
}
SHARED = {
    (first, second): replace(MEAN, name=f"{first} / {second}", quantity=f"{first} and {second}", tabled=True)
    for first, second in combinations_with_replacement(KINDS, 2)
}
LAST: dict[Kind, Measure] = {
    kind: replace(
        MEAN,
        name=f"last output: {kind}",
        quantity=f"{kind}: in common with heads that write the last output",
        tabled=True,
    )
    for kind in LABEL_KINDS
}
COST: dict[tuple[Kind | None, Kind], Measure] = {
    (source, target): Measure(
        f"cost: {source or 'own'} → {target}",
        f"lost by {target} without the heads of {source or 'the same task'}",
        "without random heads",
        "log-odds of the answer, nats",
        tabled=True,
    )
    for source in (None, *KINDS)
    for target in LABEL_KINDS
}
COST_LOG_PROB = {
    kinds: replace(measure, name=f"{measure.name}, log p", unit="log p of the answer, nats")
    for kinds, measure in COST.items()
}


def rank(study: Study, prompts: TaskPrompts, *, seed: int, check: PairCheck | None = None) -> Located:
    """Rank heads by contrast; raise InputError if the model does not do the task.

    Without a check, a model does a task if its answers beat what they are compared with more often than guesses.
    """
    shows_outputs = len(prompts.batch.labels) > 0

    def score(acts: il.Activations) -> Float[Tensor, "row part"]:
        scores = [contrasts(acts).flatten(1), answer_beats_others(acts)[:, None]]
        return torch.cat([*scores, *([last_contrasts(acts).flatten(1)] if shows_outputs else [])], dim=1)

    found = study.map(prompts.batch, score).double().numpy()
    n_heads = study.view.n_layers * study.view.n_heads
    accuracy = compare(found[:, n_heads], prompts.chance, prompts.clusters, bounds=(0, 1))
    if not (accuracy.low > 0 if check is None else check.does_task):
        raise il.InputError(_cannot(accuracy) if check is None else str(check))
    values = found.reshape(len(found), -1)[:, :n_heads].reshape(-1, study.view.n_layers, study.view.n_heads)
    best = np.argsort(-values.mean(0).flatten(), kind="stable")[: study.n_located]
    heads = [il.Head.from_index(int(index), study.view.n_heads) for index in best]
    last = None
    if shows_outputs:
        of_last = found[:, n_heads + 1 :].reshape(values.shape)
        last = drawn_lists(of_last, prompts.clusters, study.n_located, seed=seed)
    return Located(heads, drawn_lists(values, prompts.clusters, study.n_located, seed=seed), accuracy, last)


def _cannot(accuracy: Comparison) -> str:
    low, high = (f"{100 * (accuracy.control + end):.0f}" for end in (accuracy.low, accuracy.high))
    return (
        f"the model does not do the task: {100 * accuracy.quantity:.0f}% [{low}, {high}] of answers are right, "
        f"and guessing gives {100 * accuracy.control:.0f}%"
    )


def last_contrasts(acts: il.Activations) -> Float[Tensor, "row layer head"]:
    """Return every head's contrast of the output shown last with the prompt's other outputs, nats."""
    shown = acts.batch.label_index
    last = (shown >= 0).sum(1) - 1
    tokens = acts.batch.label_tokens[shown.gather(1, last[:, None])[:, 0]]
    return il.head_log_prob_increase(acts, tokens, against=acts.batch.tokens_to_compare(tokens))


def measure(study: Study) -> Measured:
    """Measure which heads tasks share, by task and by kind, and what removing a kind's heads costs the others."""
    halves = Split.of(study.halves())
    own, same = rank(study, halves.locating, seed=0), rank(study, halves.held_out, seed=1)
    own_kind: Kind = "natural labels" if study.task.natural else "arbitrary labels"
    located = {OWN: replace(own, kind=own_kind, tested=halves.held_out.batch[:N_TESTED])}
    tasks = dict[str, TaskPrompts]()
    rows = [_row("overlap_same", own, own.lists, [same.lists], note=same.note)]
    about: list[dict[str, Any]] = [_about(OWN, own_kind, own)]
    for i, (name, build) in enumerate(TASKS.items()):
        check = None
        try:
            built = build(study, seed=study.seed + 1 + i)
            split, kind = (Split(built, built), None) if isinstance(built, TaskPrompts) else built
            if isinstance(kind, PairCheck):
                check, kind = kind, "pairs"
            tasks[name] = split.locating
            one = rank(study, split.locating, seed=2 + i, check=check)
            rows.append(_row(OF_TASK[name].name, own, own.lists, [one.lists], note=one.note))
            about.append(_about(name, kind, one, check))
            tested = split.held_out.batch[:N_TESTED] if kind else None
            located[name] = replace(one, kind="copying" if name in COPYING else kind, tested=tested)
        except il.InputError as error:
            rows.append(Row.from_result(OF_TASK[name].name, str(error)))
            about.append(_about(name, "pairs" if name in PAIRS else None, None, check, str(error)))
    done = [name for name in CLASSIFICATION if name in located]
    if not done:
        raise il.InputError("the model does none of the other classification tasks")
    by_contrast = [located[name].lists for name in done]
    values = study.ranked_by("increase").head_scores().double().numpy()
    own_by_increase = drawn_lists(values, halves.locating.clusters, study.n_located, seed=0)
    by_increase = [_lists_by_increase(study, tasks[name], seed=2 + i) for i, name in enumerate(done)]
    note = "mean over " + ", ".join(done)
    main = [
        _row("overlap", own, own.lists, by_contrast, "contrast", note),
        _row("overlap", own, own_by_increase, by_increase, "increase", note),
    ]
    by_kind, details = _by_kind(study, {name: one for name, one in located.items() if one.kind is not None})
    details = [*about, *_matrix(located), *details]
    return Measured([*main, *rows, *by_kind], pd.DataFrame(details))


def _by_kind(study: Study, tasks: dict[str, Located]) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return the rows and details of kinds of tasks: shared heads, and what removing them costs."""
    rows, details = list[Row](), list[dict[str, Any]]()

    def add(what: str, first: str, second: str, name: str, compute: Callable[[], Comparison]) -> None:
        try:
            row = Row.from_result(name, compute())
            numbers = {key: getattr(row, key) for key in ("quantity", "control", "low", "high")}
            details.append({"what": what, "first": first, "second": second, **numbers})
        except il.InputError as error:
            row = Row.from_result(name, str(error))
        rows.append(row)

    for kinds, one in SHARED.items():
        add("overlap of kinds", *kinds, one.name, partial(shared, tasks, *kinds))
    for kind, one in LAST.items():
        add("overlap with last", kind, "", one.name, partial(shared_with_last, tasks, kind))
    removals = Removals(study, tasks)
    for what, measures, unit in (("cost", COST, "log_odds"), ("cost in log p", COST_LOG_PROB, "log_prob")):
        for (source, target), one in measures.items():
            add(what, source or "own", target, one.name, partial(removals.cost, source, target, unit))
    for first, second, quantity, control in removals.means():
        details.append(
            {"what": "cost of tasks", "first": first, "second": second, "quantity": quantity, "control": control}
        )
    return rows, [*details, *most_shared(tasks)]


def _about(
    name: str, kind: Kind | None, one: Located | None, check: PairCheck | None = None, reason: str = ""
) -> dict[str, Any]:
    """Return a task's accuracy with its own interval, that of its control, and its heads or why there are none.

    The accuracy of pairs is over the whole vocabulary, and the control without demonstrations; that of other tasks is
    among what the answer is compared with, and the control is guessing.
    """
    numbers = {}
    if check is not None:
        given, none = check.accuracy["given"], check.accuracy["none"]
        numbers = {"quantity": given.value, "control": none.value, "low": given.low, "high": given.high}
        numbers |= {"mismatched": check.accuracy["mismatched"].value, "copied_last": check.copied_last}
    elif one is not None:
        found = one.accuracy
        numbers = {"quantity": found.quantity, "control": found.control}
        numbers |= {"low": found.control + found.low, "high": found.control + found.high}
    heads = " ".join(map(str, one.heads)) if one else ""
    return {"what": "task", "first": name, "second": kind or "", **numbers, "heads": heads, "text": reason}


def _lists_by_increase(study: Study, prompts: TaskPrompts, *, seed: int) -> Lists:
    values = study.map(prompts.batch[:INCREASE_PROMPTS], increases).double().numpy()
    return drawn_lists(values, prompts.clusters[:INCREASE_PROMPTS], study.n_located, seed=seed)


def _row(measure: str, own: Located, lists: Lists, others: list[Lists], ranking: str = "", note: str = "") -> Row:
    """Compare the mean overlap with other tasks' lists with that of random lists."""
    found = mean_overlap([(lists, other) for other in others], [own])
    return Row.from_result(measure, replace(found, n_prompts=own.accuracy.n_prompts), ranking=ranking, note=note)


def _matrix(tasks: dict[str, Located]) -> Iterator[dict[str, object]]:
    """Yield the overlap of each pair of tasks, and that of random lists."""
    for first, one in tasks.items():
        for second, other in tasks.items():
            lists = one.lists[:1], other.lists[:1]
            shares = {"quantity": float(overlap(*lists)[0]), "control": float(expected_overlap(*lists)[0])}
            yield {"what": "overlap of tasks", "first": first, "second": second, **shares}


FINDING = Finding(
    id="shared-heads",
    title="Are the same heads used by different tasks?",
    question="Do the heads located on one kind of task lead the ranking on the others, and do the others need them?",
    answer=shared_heads_page.answer,
    claim="In GPT-2 large, the 20 heads of largest increase are similar on all word and sentence datasets (heads "
    "26-14, 28-10 and 29-17 are important on all of them): different tasks share the same in-context heads. Whether "
    "tasks that are not classification share them is an open question of the published version.",
    covers="section 4.2, appendix A (Figures 3, 4 and 12–15), and open question 2 of the published version",
    measures=(
        MEAN,
        CEILING,
        *OF_TASK.values(),
        *SHARED.values(),
        *LAST.values(),
        *COST.values(),
        *COST_LOG_PROB.values(),
    ),
    measure=measure,
    look_for="Heads in common (random lists), and what answers lose without heads (without random heads). Darker: "
    "further above the control.",
    method="Every task has its own prompts, answers are scored against another label or all other outputs of the "
    "prompt, and as many heads are listed as are located on this task. For the interval of heads in common, prompts of "
    "both "
    "tasks are resampled (by query or answer), and heads are ranked again in each sample. Word pairs show ten pairs "
    "on lines such as “France -> Paris” after the line “Words:”; outputs of a prompt begin with different tokens. "
    "In two-class tasks, each label is the answer and the last label half the time, so a head that writes the last "
    "label, or always the same one, has no contrast on average; the last output of word pairs is not the answer "
    f"(except in animal-class). Heads are set to zero at the last position, on at most {N_TESTED} held-out prompts "
    f"of a task, and compared with at least {RANDOM_SETS} random sets for each kind; the interval resamples queries. "
    f"“Copying” is repeating a word, and induction. Each other task has at most {MAX_PROMPTS} prompts, pairs "
    f"{other_tasks.PAIR_PROMPTS}, chat half as many as this task; by increase, at most {INCREASE_PROMPTS} are used. "
    "The loss of log p instead of log-odds is in the file with every number.",
    caveats=(
        "A task counts only if the model does it: the interval of its accuracy is above guessing or, for pairs, "
        "`il.task_check` finds more right answers than without demonstrations and than the last output gives.",
        "Heads in common need not do the same thing on both tasks. Heads that write the answer may also favor the "
        "output shown last: then tasks share heads that copy outputs, however these choose one.",
        "Two tasks with few heads per list can only agree in large steps.",
        "Removing heads costs more where log-odds are large: compare numbers of one column.",
        "Intervals resample queries, not tasks or random sets; they do not speak of other tasks of the same kind.",
    ),
    post_hoc="The line “Words:” was added after the accuracy on three tasks of pairs had been seen: without it, a "
    "query without demonstrations begins the text, which these models cannot read well. The numbers of prompts "
    "were lowered for time, before any of these results.",
    tables=shared_heads_page.tables,
    draw=shared_heads_page.draw,
)
