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
    if one is None or math.isnan(one.low):
        return "–"
    scale, digits = (100.0, 0) if percent else (1.0, 2)
    values = (one.quantity, one.control, one.low, one.high)
    quantity, control, low, high = (number(value, scale=scale, digits=digits) for value in values)
    return f"{quantity}{'%' * percent} ({control}) [{low}, {high}]"


def _real(cells: Sequence[Any]) -> list[Any]:
    """Return the real models' cells that have kinds of tasks, in the order of the models."""
    found = [cell for cell in cells if cell.model in REAL_MODELS and len(cell.details)]
    return sorted(found, key=lambda cell: list(REAL_MODELS).index(cell.model))


# Sentences


def answer(cells: Sequence[Any]) -> str:
    """Return three sentences: what kinds of tasks share, what removing heads costs, and the most shared heads."""
    real = _real(cells)
    if not real:
        return "Not measured on a real model."
    k = real[0].row("overlap").n_heads
    cannot = [cannot for cell in real if (cannot := _cannot_chat(cell))]
    return (
        f"Of {k} heads located on a task with arbitrary labels, {'; '.join(map(_in_common, real))}. Removing these "
        f"heads at the last position costs answers, in nats of log-odds, {'; '.join(map(_lost, real))}. On more lists "
        f"than any head in {DRAWS:,} draws of random lists {'; '.join(map(_most, real))}"
        f"{'; '.join(['', *cannot, *filter(None, map(_not_above, real))])}."
    )


def _in_common(cell: Any) -> str:
    """Return how many heads located on arbitrary labels are also located on other kinds, or write the last output."""
    said = [
        (words, _find(cell, IN_COMMON, *_in_order(ARBITRARY, kind)))
        for words, kind in (
            ("are located on another such task", ARBITRARY),
            ("on the task as chat", CHAT),
            ("on pairs", PAIRS),
            ("on natural labels", NATURAL),
        )
    ]
    said.append(("among those that most favor the output shown last", _find(cell, LAST, ARBITRARY, "")))
    numbers = _with_controls(said, "random lists of the same layers", percent=True)
    return f"in {TITLES[cell.model]}, {numbers}"


def _lost(cell: Any) -> str:
    """Return what removing the heads of arbitrary labels costs other kinds, and what those of other kinds cost it."""
    said = [
        (words, _find(cell, COST, first, second))
        for words, first, second in (
            ("on other such tasks", ARBITRARY, ARBITRARY),
            ("on chat", ARBITRARY, CHAT),
            ("on pairs", ARBITRARY, PAIRS),
            ("on natural labels", ARBITRARY, NATURAL),
            ("and removing heads of pairs costs arbitrary labels", PAIRS, ARBITRARY),
        )
    ]
    return f"in {TITLES[cell.model]} {_with_controls(said, 'random heads')}"


def _with_controls(said: Sequence[tuple[str, Any | None]], control: str, *, percent: bool = False) -> str:
    """Return numbers in words, the control named once: "56% on pairs (random lists 21%; difference 24 to 45), …"."""
    scale, digits, unit = (100.0, 0, "%") if percent else (1.0, 2, "")
    parts = []
    for words, one in said:
        if one is None or math.isnan(one.low):
            continue
        values = (one.quantity, one.control, one.low, one.high)
        quantity, other, low, high = (number(value, scale=scale, digits=digits) for value in values)
        names = ("", "") if parts else (f"{control} ", "difference ")
        numbers = f"({names[0]}{other}{unit}; {names[1]}{low} to {high})"
        leads = words.startswith("and")
        parts.append(f"{words} {quantity}{unit} {numbers}" if leads else f"{quantity}{unit} {words} {numbers}")
    return ", ".join(parts)


def _in_order(first: str, second: str) -> tuple[str, str]:
    """Return two kinds in the order in which details name them."""
    low, high = sorted((first, second), key=[*KINDS].index)
    return low, high


def _most(cell: Any) -> str:
    """Return how many heads are on more lists than by chance, and the first of them."""
    heads = [one for one in _details(cell, "head") if one.quantity > one.control]
    named = [f"{one.first} on {one.quantity:.0f} of {one.high:.0f}" for one in heads[:NAMED_HEADS]]
    many = "is 1 head" if len(heads) == 1 else f"are {len(heads) or 'no'} heads"
    return f"{many} in {TITLES[cell.model]}" + f" ({', '.join(named)})" * bool(named)


def _cannot_chat(cell: Any) -> str:
    """Return why there are no heads of the task as chat; empty if there are, or if there is no chat template."""
    one = next((one for one in _details(cell, "task") if one.first == CHAT), None)
    if one is None or one.heads or "does not do" not in one.text:
        return ""
    return f"{TITLES[cell.model]} does not do its task as chat ({one.text.partition(': ')[2]})"


def _not_above(cell: Any) -> str:
    """Return which kinds share no more than random lists, and whose heads cost no more than random heads."""
    pairs = [_find(cell, IN_COMMON, *kinds) for kinds in combinations_with_replacement(LABEL_KINDS, 2)]
    costs = [_find(cell, COST, *kinds) for kinds in product(LABEL_KINDS, repeat=2)]
    shared = [f"{one.first} and {one.second}" for one in pairs if one is not None and not one.low > 0]
    removed = [f"{one.first} from {one.second}" for one in costs if one is not None and not one.low > 0]
    said = [f"no more heads in common for {', '.join(shared)}"] * bool(shared)
    said += [f"no more lost by removing heads of {', '.join(removed)}"] * bool(removed)
    return f"in {TITLES[cell.model]}, there are {' and '.join(said)} than with random heads" if said else ""


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
    pairs = [[name, *(text for cell in real for text in _pair(cell, name))] for name in bundled_pairs()]
    columns = [f"{title}: {what}" for title in names for what in ("accuracy, %", "no demonstrations", "heads")]
    heads = [
        [title, one.first, f"{one.quantity:.0f} of {one.high:.0f}", f"{one.control:.0f}", one.text]
        for title, cell in zip(names, real, strict=True)
        for one in _details(cell, "head")
        if one.quantity > one.control
    ]
    tasks = [f"{title}: {_tasks(cell)}" for title, cell in zip(names, real, strict=True)]
    return "\n\n".join(
        [
            "## Heads in common, by kind of task",
            "Mean over pairs of different tasks, % of the located heads (random lists) [95% interval of the "
            "difference]. “Writing the last output”: as many heads, those that most favor the output shown last.",
            markdown.table(["kinds", *names], [*in_common, *last]),
            "Tasks that a model does, by kind (“this task”: the one in the next section's table):",
            markdown.bullets(tasks),
            "## What removing heads costs",
            "Log-odds that answers lose, nats (without random heads of the same layers) [95% interval of the "
            "difference]. A row is the kind of task on which heads are located, a column the kind of the other tasks, "
            f"whose answers are scored; “{OWN}”: heads of the task itself.",
            markdown.table(["model", "heads of", *LABEL_KINDS], lost, align="ll"),
            "## The twelve bundled tasks of word pairs",
            f"{PAIRS_SHOWN} demonstrations, at most {PAIR_PROMPTS} held-out prompts; an answer is right if its first "
            "token is the most probable of the whole vocabulary [95% interval]. Heads: the first "
            f"{HEADS_OF_TASK} located ones; “–”: the model does not clearly do better than without demonstrations (see "
            "`il.task_check`), so the task is in no other table.",
            markdown.table(["task", *columns], pairs, align="l" + "lrl" * len(real)),
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
    return [f"{quantity} [{low}, {high}]", control, " ".join(one.heads.split()[:HEADS_OF_TASK]) or "–"]
