"""Which heads do tasks share, and what does removing the heads of one kind of task cost the others?

1. Every task that the model does (its accuracy is above guessing) has a list of the 12 heads of
   largest mean contrast on its locating prompts. Tasks are classifications with other labels,
   classes and templates, pairs of words, and copying (`shared_tasks.py`).
2. The overlap of two lists is heads in common / 12. Two random lists with as many heads in each
   layer have Σ a · b / H heads in common on average, where a layer of H heads has a on one list and
   b on the other: the control. Lists are not similar just because both contain deep heads.
   Intervals are over pairs of tasks.
3. A kind's heads cost another kind what the answers of its testing prompts lose, on average over
   pairs of different tasks, when the heads of a task of the first kind are set to zero at the last
   position. The control are random heads of the same layers. Intervals are over queries.

    python experiments/shared_heads.py --model icl-mini --task animal-country -n 100

The paper's section 4.2, appendix A (Figures 3, 4 and 12–15), and open question 2 of the published
version."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement, product

import numpy as np
import pandas as pd
import torch
from common import Study, Table, from_command_line, grid
from location import best_heads, contrasts
from matplotlib.figure import Figure
from shared_tasks import Kind, TaskPrompts, task_builders

import icl_lens as il

LABEL_KINDS: tuple[Kind, ...] = ("arbitrary labels", "natural labels", "chat", "pairs")
KINDS: tuple[Kind, ...] = (*LABEL_KINDS, "copying")
"""Heads of copying tasks are removed, but their answers are not tested: they are a control."""
CLASSIFICATION = (
    "other labels",
    "natural labels",
    "other classes",
    "three classes",
    "four classes",
)
N_TESTED, N_RANDOM_SETS = 20, 10
"""Testing prompts of a task without heads; random sets of a kind's heads, divided among its tasks.
"""
DRAWS = 2000
"""Draws of random lists, of all tasks jointly."""
RANDOM_LISTS = "random lists with as many heads per layer"
NO_PAIRS = "the model does no two different tasks of these kinds"


@dataclass(frozen=True)
class TaskHeads:
    """A task that the model does, with the heads located on it."""

    prompts: TaskPrompts
    heads: list[il.Head]
    last: list[il.Head]
    """As many heads, those that write the output shown last; empty if no outputs are shown."""


def main(arguments: list[str] | None = None) -> pd.DataFrame:
    """Locate heads on every task, compare the lists, and measure what removing them costs."""
    study = Study.from_command_line(
        "shared-heads", "Are the same heads used by different tasks?", arguments
    )
    table = Table(study)
    tasks: dict[str, TaskHeads] = {}
    for name, build in task_builders(study):
        try:
            tasks[name] = locate(study, table, name, build())
        except il.InputError as error:
            if name == "this task":
                raise
            table.add_missing(f"accuracy on {name}", error)
    add_overlaps(study, table, tasks)
    add_kinds(study, table, tasks)
    add_costs(study, table, tasks)
    add_most_shared(study, table, tasks)
    return table.write(draw(table.to_frame()))


def locate(study: Study, table: Table, name: str, prompts: TaskPrompts) -> TaskHeads:
    """Return the heads of largest contrast; raise InputError if the model does not do the task."""
    batch = prompts.locating
    scores = study.read(
        f"located on {name}", batch, lambda acts: task_scores(acts), what="contrast, right, last"
    )
    shape = (len(batch), study.model.cfg.n_layers, study.model.cfg.n_heads)
    n_heads = shape[1] * shape[2]
    right = scores[:, 0]
    about = {"unit": "%", "versus": "guessing", "at": prompts.kind}
    table.add(f"accuracy on {name}", right, prompts.chance, batch.queries, **about)
    is_done = prompts.is_done
    if is_done is None:
        bounds = (-prompts.chance, 1 - prompts.chance)
        above_chance = il.metrics.bootstrap_interval(
            right - prompts.chance, clusters=batch.queries, bounds=bounds
        )
        is_done = above_chance.low > 0
    if not is_done:
        raise il.InputError(
            f"the model does not do the task {name!r}: {right.mean():.0%} of the answers are right"
        )
    heads = best_heads(scores[:, 1 : 1 + n_heads].reshape(shape), study.n_located)
    last = []
    if batch.labels:
        last = best_heads(scores[:, 1 + n_heads :].reshape(shape), study.n_located)
    return TaskHeads(prompts, heads, last)


def task_scores(acts: il.Activations) -> torch.Tensor:
    """Return whether the answer is right, every head's contrast of the answer, and that of the
    output shown last.

    The result has the axes [prompt column]. A right answer beats all that it is compared with.
    """
    batch = acts.batch
    answers, compared = batch.answer_tokens, compared_tokens(batch)
    log_odds = [
        acts.token_log_probs(answers) - acts.token_log_probs(tokens.clamp(min=0))
        for tokens in compared.T
    ]
    beats = [(odds > 0) | (tokens < 0) for odds, tokens in zip(log_odds, compared.T, strict=True)]
    columns = [torch.stack(beats, dim=1).all(1, keepdim=True).float()]
    columns.append(il.head_log_prob_increase(acts, answers, against=compared).flatten(1))
    if batch.labels:
        last_shown = (batch.label_index >= 0).sum(1, keepdim=True) - 1
        last = batch.label_tokens[batch.label_index.gather(1, last_shown)[:, 0]]
        not_last = other_choices(batch, last)
        columns.append(il.head_log_prob_increase(acts, last, against=not_last).flatten(1))
    return torch.cat(columns, dim=1)


def other_choices(batch: il.PromptBatch, tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens of each prompt's labels, with -1 for those that are its token of `tokens`
    and for labels that it does not choose from."""
    choices = batch.label_tokens.expand(len(batch), -1)
    return torch.where(batch.label_mask & (choices != tokens[:, None]), choices, -1)


def compared_tokens(batch: il.PromptBatch) -> torch.Tensor:
    """Return the tokens that answers are compared with: other labels or, without labels, those in
    `against`."""
    return batch.other_label_tokens if batch.against is None else batch.against


# Heads in common


def overlap(
    first: Sequence[il.Head], second: Sequence[il.Head], n_heads: int
) -> tuple[float, float]:
    """Return the share of the first list that is on the second, and the same for random lists."""
    of_first, of_second = (Counter(head.layer for head in heads) for heads in (first, second))
    by_chance = sum(count * of_second[layer] for layer, count in of_first.items()) / n_heads
    return len({*first} & {*second}) / len(first), by_chance / len(first)


def add_mean_overlap(
    study: Study,
    table: Table,
    measure: str,
    lists: Sequence[tuple[Sequence[il.Head], Sequence[il.Head]]],
    at: str = "",
) -> None:
    """Add the mean overlap of pairs of lists, next to that of random lists, with an interval over
    the pairs."""
    shares = np.array([overlap(first, second, study.model.cfg.n_heads) for first, second in lists])
    about = {"unit": "%", "versus": RANDOM_LISTS, "at": at}
    if len(lists) > 1:
        pairs = [str(pair) for pair in range(len(lists))]
        table.add(measure, shares[:, 0], shares[:, 1], pairs, **about)
    elif lists:
        table.add_row(measure, quantity=100 * shares[0, 0], control=100 * shares[0, 1], **about)
    else:
        table.add_missing(measure, NO_PAIRS, at=at)


def add_overlaps(study: Study, table: Table, tasks: dict[str, TaskHeads]) -> None:
    """Add heads in common of this task with other classification tasks, with each task, and with
    itself."""
    this = tasks["this task"].heads
    pairs = [(this, tasks[name].heads) for name in CLASSIFICATION if name in tasks]
    add_mean_overlap(study, table, "heads in common with other classification tasks", pairs)
    again = study.read("located on testing", study.testing, contrasts, what="contrast")
    same = [(this, best_heads(again, study.n_located))]
    add_mean_overlap(study, table, "heads in common with the same task on other prompts", same)
    for name, task in tasks.items():
        if name != "this task":
            add_mean_overlap(study, table, f"heads in common with {name}", [(this, task.heads)])


def add_kinds(study: Study, table: Table, tasks: dict[str, TaskHeads]) -> None:
    """Add heads in common of two kinds of tasks, and of each kind with heads that write the output
    shown last."""
    for first, second in combinations_with_replacement(KINDS, 2):
        names = [
            (a, b) for a, b in product(of_kind(tasks, first), of_kind(tasks, second)) if a != b
        ]
        if first == second:
            names = [(a, b) for a, b in names if a < b]
        lists = [(tasks[a].heads, tasks[b].heads) for a, b in names]
        add_mean_overlap(study, table, "heads in common of kinds", lists, at=f"{first} / {second}")
    for kind in LABEL_KINDS:
        lists = [(task.heads, task.last) for task in of_kind(tasks, kind).values() if task.last]
        add_mean_overlap(
            study, table, "heads in common with those that write the last output", lists, at=kind
        )


def of_kind(tasks: dict[str, TaskHeads], kind: Kind) -> dict[str, TaskHeads]:
    """Return the tasks of a kind."""
    return {name: task for name, task in tasks.items() if task.prompts.kind == kind}


def add_most_shared(study: Study, table: Table, tasks: dict[str, TaskHeads]) -> None:
    """Add on how many lists each head is, next to the most-listed head of random lists."""
    compared = [task.heads for task in tasks.values() if task.prompts.kind in LABEL_KINDS]
    rng, n_heads = np.random.default_rng(0), study.model.cfg.n_heads
    counts = np.zeros((DRAWS, study.model.cfg.n_layers, n_heads), dtype=int)
    for heads in compared:
        per_layer = np.zeros((study.model.cfg.n_layers, 1), dtype=int)
        np.add.at(per_layer[:, 0], [head.layer for head in heads], 1)
        counts += rng.random(counts.shape).argsort(axis=2).argsort(axis=2) < per_layer
    by_chance = int(counts.max())
    on_lists = Counter(chain.from_iterable(compared))
    for head, count in sorted(on_lists.items(), key=lambda pair: (-pair[1], pair[0])):
        numbers = {"quantity": count, "control": by_chance, "unit": f"of {len(compared)} lists"}
        versus = f"largest number in {DRAWS} draws of random lists"
        table.add_row("lists that a head is on", at=str(head), versus=versus, **numbers)


# What removing heads costs


def add_costs(study: Study, table: Table, tasks: dict[str, TaskHeads]) -> None:
    """Add what each kind's answers lose without the heads of each kind, and of the same task,
    beside random heads."""
    head_sets: list[list[il.Head]] = []
    places: dict[str, slice] = {}
    for name, task in tasks.items():
        n_random = max(1, -(-N_RANDOM_SETS // len(of_kind(tasks, task.prompts.kind))))
        random_sets = il.random_head_sets(
            study.model, task.heads, n_random=n_random, seed=study.seed
        )
        places[name] = slice(len(head_sets), len(head_sets) + 1 + n_random)
        head_sets += [task.heads, *random_sets]
    lost = {}
    for name, task in tasks.items():
        if task.prompts.testing:
            lost[name] = losses(study, name, task, head_sets)
    for target_kind in LABEL_KINDS:
        targets = [name for name in of_kind(tasks, target_kind) if name in lost]
        for source_kind in ("the same task", *KINDS):
            add_cost(table, tasks, lost, places, source_kind, targets, target_kind)


def add_cost(
    table: Table,
    tasks: dict[str, TaskHeads],
    lost: dict[str, np.ndarray],
    places: dict[str, slice],
    source_kind: str,
    targets: Sequence[str],
    target_kind: Kind,
) -> None:
    """Add what the answers of some tasks lose without the heads of a kind, on average over
    different tasks."""
    of_heads, of_random, queries = [], [], []
    for target in targets:
        sources = [target]
        if source_kind != "the same task":
            of_source = [name for name, task in tasks.items() if task.prompts.kind == source_kind]
            sources = [name for name in of_source if name != target]
        if sources:
            by_source = [lost[target][:, places[name]] for name in sources]
            of_heads.append(np.mean([values[:, 0] for values in by_source], axis=0))
            of_random.append(np.mean([values[:, 1:].mean(1) for values in by_source], axis=0))
            testing = tasks[target].prompts.testing
            queries += testing.queries[:N_TESTED] if testing is not None else ()
    for column, unit in enumerate(("log-odds", "log p")):
        measure, at = f"lost by {target_kind} without heads of {source_kind}", unit
        if not of_heads:
            table.add_missing(measure, NO_PAIRS, at=at)
            continue
        quantity, control = (np.concatenate(values)[:, column] for values in (of_heads, of_random))
        about = {"at": at, "versus": "without random heads of the same layers"}
        table.add(measure, quantity, control, queries, **about)


def losses(
    study: Study, name: str, task: TaskHeads, head_sets: Sequence[Sequence[il.Head]]
) -> np.ndarray:
    """Return what answers lose without each set, nats, [prompt set 2]: log-odds and log p."""
    assert task.prompts.testing is not None
    batch = task.prompts.testing[:N_TESTED]
    edits = [[], *([il.Ablate(heads, positions="last")] for heads in head_sets)]
    compared = compared_tokens(batch)

    def scores(rows: list[int]) -> torch.Tensor:
        answers, rivals = batch.answer_tokens[rows], compared[rows]

        def read(log_probs: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
            of_answer = log_probs.gather(1, answers[prompt][:, None])[:, 0]
            of_others = log_probs.gather(1, rivals[prompt].clamp(min=0))
            of_others = of_others.masked_fill(rivals[prompt] < 0, -torch.inf)
            return torch.stack([of_answer - of_others.logsumexp(1), of_answer], dim=1)

        return il.score(study.model, batch[rows], edits, read=read).double()

    options = {"heads": [" ".join(map(str, heads)) for heads in head_sets]}
    values = il.map_prompts(
        study.model, batch, scores, options=options, run=study.run(f"removed on {name}")
    )
    return values[:, :1] - values[:, 1:]


def draw(table: pd.DataFrame) -> Figure:
    """Draw heads in common by kind of task, and what removing them costs: a row of two heat maps
    per model."""
    kinds = table.query("measure == 'heads in common of kinds'").copy()
    pairs = kinds["at"].str.split(" / ", expand=True)
    kinds = kinds.assign(first=pairs[0], second=pairs[1])
    figure, rows_of_panels = grid(table, 2)
    for (left, right), title, rows in rows_of_panels:
        in_common = np.full((len(KINDS), len(KINDS)), np.nan)
        cost = np.full((len(KINDS), len(LABEL_KINDS)), np.nan)
        for row in kinds.loc[rows.index.intersection(kinds.index)].to_dict("records"):
            place = KINDS.index(row["first"]), KINDS.index(row["second"])
            in_common[place] = in_common[place[::-1]] = row["quantity"]
        for i, source in enumerate(KINDS):
            for j, target in enumerate(LABEL_KINDS):
                measure = f"lost by {target} without heads of {source}"
                of_kinds = rows.query(
                    "measure == @measure and at == 'log-odds'", local_dict={"measure": measure}
                )
                if len(of_kinds):
                    cost[i, j] = of_kinds["quantity"].iloc[0]
        for axes, values, columns, what in (
            (left, in_common, KINDS, "heads in common, %"),
            (right, cost, LABEL_KINDS, "log-odds lost by (columns) without heads of (rows)"),
        ):
            axes.imshow(values, cmap="Blues", aspect="auto", vmin=0)
            axes.set_facecolor("0.93")  # where the model does no such tasks
            axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right", fontsize=6)
            axes.set_yticks(range(len(KINDS)), KINDS, fontsize=6)
            axes.set_title(f"{title}\n{what}", fontsize=7)
            for (i, j), value in np.ndenumerate(values):
                if not np.isnan(value):
                    color = "white" if value > 0.6 * np.nanmax(values) else "black"
                    text = f"{value:.3g}".replace("-", "−")
                    axes.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
    return figure


if __name__ == "__main__":
    from_command_line(main)
