"""The page about heads located on several kinds of tasks: its sentences, tables and figure, from stored details."""

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement, product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.framework import markdown
from experiments.framework.head_kinds import DRAWS, KINDS, LABEL_KINDS
from experiments.framework.models import REAL_MODELS
from experiments.framework.other_tasks import PAIR_PROMPTS, PAIRS_SHOWN
from experiments.framework.plotting import cell_rows
from experiments.framework.sentences import TITLES, number
from icl_lens.prompts.pair_task import bundled_pairs

OWN = "own"
"""Stands for the heads of the task itself where heads are removed."""
IN_COMMON, COST, COST_LOG_PROB, LAST = "overlap of kinds", "cost", "cost in log p", "overlap with last"
"""Parts of the details, in the column "what", that compare two kinds."""
ARBITRARY, NATURAL, CHAT, PAIRS = LABEL_KINDS
NAMED_HEADS, HEADS_OF_TASK = 3, 5
"""Most shared heads that a sentence names for each model, and heads of a task in the table of pairs."""


# Figure


def draw(details: pd.DataFrame) -> Figure:
    """Draw heads in common and what removing them costs by kind of task, a row of two heat maps per model."""
    shown: Any = details[details["what"].isin([IN_COMMON, COST])]
    figure, rows = cell_rows(shown, 2)
    figure.set_size_inches(7.2, 0.2 + 3.1 * len(rows))
    for (left, right), title, part in rows:
        in_common: Any = part[part["what"] == IN_COMMON]
        cost: Any = part[part["what"] == COST]
        mirrored = in_common.rename(columns={"first": "second", "second": "first"})
        left.set_title(f"{title}\nheads in common, %", fontsize=8)
        both = pd.concat([in_common, mirrored]).drop_duplicates(["first", "second"])
        _heat_map(left, both, KINDS, KINDS, scale=100.0, digits=0)
        right.set_title("log-odds lost, nats", fontsize=8)
        _heat_map(right, cost, (OWN, *KINDS), LABEL_KINDS, scale=1.0, digits=1)
        right.set_ylabel("heads of", fontsize=8)
        right.set_xlabel("answers of", fontsize=8)
    return figure


def _heat_map(
    axes: Axes, part: pd.DataFrame, rows: Sequence[str], columns: Sequence[str], *, scale: float, digits: int
) -> None:
    """Draw the quantity of each pair in numbers and shade, its control in parentheses; empty without a pair."""
    named: list[Any] = [*part.itertuples(index=False)]
    found = {(one.first, one.second): one for one in named}
    shades = np.full((len(rows), len(columns)), np.nan)
    for (y, first), (x, second) in product(enumerate(rows), enumerate(columns)):
        if one := found.get((first, second)):
            quantity, control = (number(value, scale=scale, digits=digits) for value in (one.quantity, one.control))
            shades[y, x] = max(one.quantity - one.control, 0)
            axes.text(x, y, f"{quantity}\n({control})", ha="center", va="center", fontsize=6.5)
    largest = max(float(np.nanmax(shades, initial=0)), 1e-9)
    axes.imshow(shades, vmin=0, vmax=2 * largest, cmap="Blues", aspect="auto")  # light enough for black numbers
    axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right", rotation_mode="anchor", fontsize=7)
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.spines[:].set_visible(False)


# Numbers of a cell


def _details(cell: Any, what: str) -> list[Any]:
    """Return the rows of one part of a cell's details."""
    return [*cell.details[cell.details["what"] == what].itertuples(index=False)]


def _find(cell: Any, what: str, first: str, second: str) -> Any | None:
    return next((one for one in _details(cell, what) if (one.first, one.second) == (first, second)), None)


def _numbers(one: Any | None, *, percent: bool = False) -> str:
    """Return quantity, control, and the interval of their difference: "41.7 (20.4) [15.7, 26.9]"."""
    if (shown := _shown(one, percent=percent)) is None:
        return "–"
    quantity, control, low, high = shown
    return f"{quantity}{'%' * percent} ({control}) [{low}, {high}]"


def _shown(one: Any | None, *, percent: bool) -> list[str] | None:
    """Return quantity, control, low and high as text; None if they are not measured."""
    if one is None or math.isnan(one.low):
        return None
    scale, digits = (100.0, 0) if percent else (1.0, 2)
    return [number(value, scale=scale, digits=digits) for value in (one.quantity, one.control, one.low, one.high)]


def _real(cells: Sequence[Any]) -> list[Any]:
    """Return the real models' cells that have kinds of tasks, in the order of the models."""
    found = [cell for cell in cells if cell.model in REAL_MODELS and len(cell.details)]
    return sorted(found, key=lambda cell: list(REAL_MODELS).index(cell.model))


# Sentences


def answer(cells: Sequence[Any]) -> str:
    """Return three sentences: what kinds of tasks share, what removing heads costs, and which heads these are."""
    real = _real(cells)
    if not real:
        return "Not measured on a real model."
    k = real[0].row("overlap").n_heads
    lists = "random lists of the same layers"
    among = _each(real, IN_COMMON, ARBITRARY, ARBITRARY, lists, percent=True)
    with_chat, with_pairs = (_each(real, IN_COMMON, ARBITRARY, kind, percent=True) for kind in (CHAT, PAIRS))
    parts = [f"{among} with each other", f"{with_chat} with the task as chat", f"{with_pairs} with pairs"]
    shared = [part for part in parts if not part.startswith(" ")]
    costs = [(kind, _each(real, COST, ARBITRARY, kind, "random heads" if kind == PAIRS else "")) for kind in COSTLY]
    lost = [f"{kind} {numbers}" for kind, numbers in costs if numbers]
    last = _each(real, LAST, ARBITRARY, "", "random lists", percent=True)
    return (
        f"Of {k} located heads, tasks with arbitrary labels share {'; '.join(shared)}. Removing the heads of arbitrary "
        f"labels at the last position costs, in nats of log-odds, {'; '.join(lost)}. Of these heads, {last} are among "
        f"those that most favor the output shown last; on more lists than any head in {DRAWS:,} draws of random "
        f"lists: {' and '.join(map(_most, real))}."
    )


COSTLY = (PAIRS, NATURAL, CHAT)
"""Kinds for which a sentence says what removing the heads of arbitrary labels costs them."""


def _each(real: Sequence[Any], what: str, first: str, second: str, control: str = "", *, percent: bool = False) -> str:
    """Return a number in every model: "56% in SmolLM2 (random lists 21%, difference 24 to 45) and 72% in Qwen (…)"."""
    parts, unit = list[str](), "%" * percent
    for cell in real:
        if (shown := _shown(_find(cell, what, first, second), percent=percent)) is None:
            continue
        quantity, other, low, high = shown
        names = (f"{control} ", "difference ") if control and not parts else ("", "")
        parts.append(f"{quantity}{unit} in {TITLES[cell.model]} ({names[0]}{other}{unit}, {names[1]}{low} to {high})")
    return " and ".join(parts)


def _most(cell: Any) -> str:
    """Return how many heads are on more lists than by chance, and the first of them."""
    heads = [one for one in _details(cell, "head") if one.quantity > one.control]
    named = [f"{one.first}, on {one.quantity:.0f} of {one.high:.0f}" for one in heads[:NAMED_HEADS]]
    many = f"{len(heads) or 'no'} head{'s' * (len(heads) != 1)} in {TITLES[cell.model]}"
    return many + f" ({'; '.join(named)})" * bool(named)


def _not_above(real: Sequence[Any], what: str, words: str, kinds: Sequence[tuple[str, str]]) -> str:
    """Return which pairs of kinds are not above their control in which model."""
    said = []
    for cell in real:
        found = [_find(cell, what, first, second) for first, second in kinds]
        names = [words.format(one.first, one.second) for one in found if one is not None and not one.low > 0]
        said += [f"in {TITLES[cell.model]} {', '.join(names)}"] * bool(names)
    return f"Not above the control: {'; '.join(said)}." if said else "All are above the control."


def _cannot_chat(cell: Any) -> str:
    """Return why there are no heads of the task as chat; empty if there are, or if there is no chat template."""
    one = next((one for one in _details(cell, "task") if one.first == CHAT), None)
    if one is None or one.heads or "does not do" not in one.text:
        return ""
    return f"; not its task as chat ({one.text.partition(': ')[2]})"


# Tables


def tables(cells: Sequence[Any]) -> str:
    """Return tables of the real models: heads in common, what removing them costs, pairs, and most shared heads."""
    real = _real(cells)
    if not real:
        return ""
    names = [TITLES[cell.model] for cell in real]
    in_common = [
        [f"{first} / {second}", *(_numbers(_find(cell, IN_COMMON, first, second), percent=True) for cell in real)]
        for first, second in combinations_with_replacement(KINDS, 2)
    ]
    last = [
        [f"{kind} / writing the last output", *(_numbers(_find(cell, LAST, kind, ""), percent=True) for cell in real)]
        for kind in LABEL_KINDS
    ]
    lost = [
        [title, source, *(_numbers(_find(cell, COST, source, target)) for target in LABEL_KINDS)]
        for title, cell in zip(names, real, strict=True)
        for source in (OWN, *KINDS)
    ]
    columns = ["accuracy, %", "without demonstrations", "heads"]
    pairs = [
        markdown.table([title, *columns], [[name, *_pair(cell, name)] for name in bundled_pairs()], align="lrrl")
        for title, cell in zip(names, real, strict=True)
    ]
    heads = [
        [title, one.first, f"{one.quantity:.0f} of {one.high:.0f}", f"{one.control:.0f}", one.text]
        for title, cell in zip(names, real, strict=True)
        for one in _details(cell, "head")
        if one.quantity > one.control
    ]
    tasks = [f"{title}: {_tasks(cell)}{_cannot_chat(cell)}" for title, cell in zip(names, real, strict=True)]
    return "\n\n".join(
        [
            "## Heads in common, by kind of task",
            "Mean over pairs of different tasks, % of the located heads (random lists) [95% interval of the "
            "difference]. “Writing the last output”: as many heads, those that most favor the output shown last.",
            markdown.table(["kinds", *names], [*in_common, *last]),
            _not_above(real, IN_COMMON, "{} / {}", [*combinations_with_replacement(LABEL_KINDS, 2)]),
            "Tasks that a model does, by kind (“this task”: the one in the next section's table):",
            markdown.bullets(tasks),
            "## What removing heads costs",
            "Log-odds that answers lose, nats (without random heads of the same layers) [95% interval of the "
            "difference]. A row is the kind of task on which heads are located, a column the kind of the other tasks, "
            f"whose answers are scored; “{OWN}”: heads of the task itself.",
            markdown.table(["model", "heads of", *LABEL_KINDS], lost, align="ll"),
            _not_above(real, COST, "{} → {}", [*product((OWN, *LABEL_KINDS), LABEL_KINDS)]),
            "## The twelve bundled tasks of word pairs",
            f"{PAIRS_SHOWN} demonstrations, at most {PAIR_PROMPTS} held-out prompts; an answer is right if its first "
            "token is the most probable of the whole vocabulary [95% interval]. Heads: the first "
            f"{HEADS_OF_TASK} located ones; “–”: the model does not clearly do better than without demonstrations (see "
            "`il.task_check`), so the task is in no other table.",
            *pairs,
            f"## Heads on more lists than any head in {DRAWS:,} draws of random lists",
            markdown.table(["model", "head", "on lists", "most by chance", "tasks"], heads, align="llrrl"),
            "## This task and other classification tasks",
        ]
    )


def _tasks(cell: Any) -> str:
    """Return the tasks that the model does, by kind."""
    done = [one for one in _details(cell, "task") if one.heads]
    by_kind = {kind: [one.first.replace(", ", " with ") for one in done if one.second == kind] for kind in LABEL_KINDS}
    return "; ".join(f"{kind} – {', '.join(some)}" for kind, some in by_kind.items() if some)


def _pair(cell: Any, name: str) -> list[str]:
    """Return a task's accuracy with its interval, that without demonstrations, and its first heads."""
    one = _find(cell, "task", name, PAIRS)
    if one is None or math.isnan(one.quantity):
        return ["–"] * 3
    quantity, control, low, high = (f"{100 * value:.0f}" for value in (one.quantity, one.control, one.low, one.high))
    return [f"{quantity} [{low},\N{NO-BREAK SPACE}{high}]", control, " ".join(one.heads.split()[:HEADS_OF_TASK]) or "–"]
