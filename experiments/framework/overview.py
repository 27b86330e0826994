"""The page "What we found": a few sentences, one figure and one table, put together from the main measures' rows."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context

from experiments.framework import markdown
from experiments.framework.finding import Finding, Measure
from experiments.framework.pages import (
    REAL,
    REAL_NOTE,
    Rows,
    Stored,
    applicable,
    count,
    groups,
    number_text,
    save_figure,
    span,
)
from experiments.framework.plotting import STYLE, overview_forest

CHANCE = 0.5
Numbered = Sequence[tuple[Finding, Sequence[Stored]]]

HEADINGS = {
    "every": f"**Above their control on every task of {REAL}** on which they were measured:",
    "some": f"**Above their control on some tasks of {REAL}**:",
    "none": f"**No difference shown on any task of {REAL}**, which does not mean that there is none:",
    "not as predicted": f"**No difference shown on any task of {REAL}, although the paper predicts one**:",
    "small": "**Above their control on every small model and task, but not on every task of the real one**:",
}


def save(numbered: Numbered, path: Path) -> None:
    """Draw every finding's main measure in its own unit: the real model's tasks first, then the small models'."""
    panels = []
    for number, (finding, cells) in enumerate(numbered, start=1):
        lines = []
        for is_real, some in zip((True, False), groups(cells), strict=False):
            for _, row in applicable(some, finding.main.name):
                values = (row.quantity, row.control, row.low, row.high)
                lines.append((is_real, [value * finding.main.scale for value in values]))
        panels.append((f"{number}. {finding.short}", finding.main.unit, lines))
    with rc_context(STYLE):
        save_figure(overview_forest(panels), path)


def text(numbered: Numbered, *, command: str) -> str:
    """Return the page in Markdown."""
    n_groups = 3 if any(cell.training_seed for _, cells in numbered for cell in cells) else 2
    names = ["above its control", "small models", "other seeds"][:n_groups]
    rows = []
    for number, (finding, cells) in enumerate(numbered, start=1):
        main = finding.main
        found = [applicable(some, main.name) for some in groups(cells)]
        spread = [_range(main, found[0], attribute) for attribute in ("quantity", "control")]
        counts = [f"{count(some, 'above')} of {len(some)}" if some else "–" for some in found[:n_groups]]
        rows.append([f"{number}. [{finding.short}]({finding.id}.md)", *spread, main.control, main.unit, *counts])
    parts = [
        "# What we found",
        f"{REAL_NOTE} A prompt shows labeled texts in random order and ends with a text to label. Heads are located on "
        "one set of prompts and measured on another. They are ranked by *contrast*: what a head adds to log p(answer) "
        "− log p(other label). The paper ranks by *increase*, what it adds to log p(answer) alone.",
        markdown.bullets(sentences(numbered)),
        "![Every finding's main measure](figures/overview.svg)",
        f"*One line per task of {REAL} (blue), then one per small model and task (gray). Filled dot: the quantity. "
        "Hollow dot: its control. Bar: the 95 % interval of the difference, added to the control. Where the bar does "
        "not touch the hollow dot, the two differ.*",
        "## At a glance",
        f"The range over the tasks of {REAL}, and in how many pairs of model and task the interval is above the "
        "control:",
        markdown.table(["finding", f"{REAL}: quantity", "control", "control is", "unit", *names], rows, align="lrrll"),
        "On the pages, rows named “by increase” show the heads of the paper's ranking. [Ground truth](ground-truth.md) "
        "shows the same findings on models whose circuit is known.",
        f"One command computes all of this on your model, and resumes where it stopped: `{command} --all`.",
        "```{toctree}\n:hidden:\n\n" + "\n".join([*(finding.id for finding, _ in numbered), "ground-truth"]) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def sentences(numbered: Numbered) -> list[str]:
    """Return five to eight sentences: what the real model shows, what only the small ones do, and how certain it is."""
    listed: dict[str, list[str]] = {kind: [] for kind in HEADINGS}
    for finding, cells in numbered:
        real, small, _ = (applicable(some, finding.main.name) for some in groups(cells))
        if not real:
            continue
        n_above = count(real, "above")
        nothing = "not as predicted" if finding.predicted else "none"
        listed["every" if n_above == len(real) else "some" if n_above else nothing].append(_named(finding, real))
        if small and count(small, "above") == len(small) and n_above < len(real):
            listed["small"].append(_named(finding, small))
    return [
        *_removed(numbered),
        *_known_words(numbered),
        *(_nested(HEADINGS[kind], some) for kind, some in listed.items() if some),
        *_unlike_the_paper(numbered),
        _sizes([cell for _, cells in numbered for cell in cells]),
        *_post_hoc(numbered),
        *_missing(numbered),
    ]


def _nested(heading: str, lines: Iterable[str]) -> str:
    return f"{heading}\n{markdown.bullets(lines, indent='  ')}"


def _named(finding: Finding, rows: Rows) -> str:
    main = finding.main
    pairs = [
        f"{number_text(row.quantity, main)} against {number_text(row.control, main)} on {cell.task}"
        for cell, row in rows
    ]
    if rows[0][0].model != REAL:
        pairs = [" against ".join(_range(main, rows, attribute) for attribute in ("quantity", "control"))]
    return f"[{finding.short}]({finding.id}.md) (control: {main.control}): {'; '.join(pairs)} ({main.unit})"


def _cells_of(finding_id: str, numbered: Numbered) -> Sequence[Stored]:
    return next((cells for finding, cells in numbered if finding.id == finding_id), [])


def _together(cells: Sequence[Stored], *wanted: tuple[str, str]) -> list[tuple[Any, ...]]:
    """Each cell with its rows of several measures, by these rankings, where all of them apply."""
    found = [(cell, *(cell.row(*one) for one in wanted)) for cell in cells]
    return [(cell, *rows) for cell, *rows in found if all(row is not None and row.applies for row in rows)]


def _removed(numbered: Numbered) -> list[str]:
    """What the located heads are worth in accuracy, on the real model."""
    said: dict[bool, list[str]] = {True: [], False: []}
    real = groups(_cells_of("ablation", numbered))[0]
    for cell, intact, lost in _together(real, ("intact", "contrast"), ("accuracy", "contrast")):
        before, after, random = (f"{100 * x:.1f}" for x in (intact.quantity, intact.control, lost.control))
        said[lost.outcome == "above"].append(
            f"from {before} to {after} % on {cell.task} ({(k := len(cell.located['contrast']))} heads; {k} random "
            f"heads of their layers cost {random} points)"
        )
    start = f"**Removing the located heads of {REAL}**"
    more = [f"{start} lowers [accuracy](ablation.md) {'; '.join(said[True])}."] * bool(said[True])
    none = f"It does not change accuracy measurably on other tasks: {'; '.join(said[False])}."
    return [" ".join([*more, *[none] * bool(said[False])])] * bool(more or said[False])


def _known_words(numbered: Numbered) -> list[str]:
    """Where the real model uses what the label words mean: exchanged labels leave it below chance."""
    real = groups(_cells_of("behavior", numbered))[0]
    said = [
        f"from {100 * random.quantity:.1f} to {100 * row.quantity:.1f} % on {cell.task}"
        for cell, row, random in _together(real, ("exchanged", ""), ("accuracy", ""))
        if row.quantity < CHANCE
    ]
    return [
        f"**{REAL} uses what the label words mean** where its [accuracy](behavior.md) falls below chance with the "
        f"labels of all demonstrations exchanged: {'; '.join(said)}. Other tasks are learned from the "
        "demonstrations."
    ] * bool(said)


def _unlike_the_paper(numbered: Numbered) -> list[str]:
    """What the paper does or finds otherwise, with the numbers that show it."""
    parts = (_orders, _rankings, _by_increase, _neighbors, _fixes)
    said = [sentence for part in parts for sentence in part(numbered)]
    return [_nested("**Unlike the paper**:", said)] * bool(said)


def _orders(numbered: Numbered) -> list[str]:
    """What the paper's order of demonstrations hides."""
    real = groups(_cells_of("behavior", numbered))[0]
    said = [
        f"{100 * last.quantity:.1f} and {100 * first.quantity:.1f} % on {cell.task}"
        for cell, last, first in _together(real, ("order", ""), ("reorder", ""))
    ]
    return [
        "its order, with the query's class demonstrated last, also rewards copying the last label: [accuracy]"
        f"(behavior.md) with that class last and first is {', '.join(said)}"
    ] * bool(said)


def _rankings(numbered: Numbered) -> list[str]:
    """What removing heads costs by either ranking; the paper's is by increase."""
    said, fewer, total = [], 0, 0
    cells = _cells_of("ablation", numbered)
    for name, some in zip((REAL, "the small models"), groups(cells), strict=False):
        main = cells[0].finding.main if cells else None
        if main and (rows := _together(some, (main.name, "contrast"), (main.name, "increase"))):
            contrast, increase = ([row.quantity for row in column] for column in list(zip(*rows, strict=True))[1:])
            said.append(f"{span(increase, main)} instead of {span(contrast, main)} nats on {name}")
            fewer += sum(a < b for a, b in zip(increase, contrast, strict=True))
            total += len(rows)
    return [
        "its ranking by increase also finds heads that raise both labels: removing them [costs the answer less]"
        f"(ablation.md) than by contrast in {fewer} of {total} pairs of model and task ({'; '.join(said)})"
    ] * bool(said)


def _by_increase(numbered: Numbered) -> list[str]:
    """Findings of the real model that depend on the ranking: above the control by contrast, and not by increase."""
    said = []
    for finding, cells in numbered:
        by_either = _together(groups(cells)[0], *((finding.main.name, ranking) for ranking in ("contrast", "increase")))
        pairs = [(cell, b) for cell, a, b in by_either if a.outcome == "above" and b.outcome != "above"]
        if pairs:
            said.append(_named(finding, pairs))
    return [f"ranked by increase, the heads show no difference in {'; '.join(said)}"] * bool(said)


def _neighbors(numbered: Numbered) -> list[str]:
    """What the paper assumes about the text next to the query."""
    said = []
    for cell, row in applicable(groups(_cells_of("recency-bias", numbered))[0], "neighbor", "contrast"):
        measure = next(one for one in cell.finding.measures if one.name == "neighbor")
        said.append(f"{number_text(row.quantity, measure)} % on {cell.task}")
    return [
        "it assumes that the text of the last demonstration accounts for a fifth of the effect on the answer through "
        f"the located heads' queries; we [measured](recency-bias.md) {', '.join(said)} (negative: that text moves the "
        "answer the other way)"
    ] * bool(said)


def _fixes(numbered: Numbered) -> list[str]:
    """What share of a bias the paper's fixes remove."""
    said = []
    for finding, cells in numbered:
        for measure in (one for one in finding.measures if one.name == "removed" and one.paper):
            real, small = (applicable(some, "removed", "contrast") for some in groups(cells)[:2])
            found = [f"{number_text(row.quantity, measure)} % on {cell.task}" for cell, row in real]
            found += [f"{_range(measure, small, 'quantity')} % on the small models"] * bool(small)
            (theirs,) = measure.paper.values()
            said.append(f"{theirs} % of the [{finding.short}]({finding.id}.md), here {', '.join(found)}")
    return [f"its corrections remove {'; '.join(said)}"] * bool(said)


def _post_hoc(numbered: Numbered) -> list[str]:
    """Which main measures were changed after results had been seen, and what the earlier ones show."""
    changed = []
    for finding, cells in numbered:
        if finding.earlier:
            before = next(measure for measure in finding.measures if measure.name == finding.earlier)
            found = [applicable(groups(cells)[0], one.name) for one in (before, finding.main)]
            then, now = (f"{count(rows, 'above')} of {len(rows)}" for rows in found)
            changed.append(
                f"[{finding.short}]({finding.id}.md): before, {before.quantity} against {before.control} "
                f"({before.unit}), above the control on {then}; now on {now}"
            )
    heading = (
        f"**Changed after seeing results**: the main measure or control of these findings, with the number of {REAL}'s "
        "tasks on which each is above its control. The pages say why."
    )
    return [_nested(heading, changed)] * bool(changed)


def _missing(numbered: Numbered) -> list[str]:
    """Which findings have not been measured on which of the real model's tasks."""
    measured = [{cell.task for cell in groups(cells)[0]} for _, cells in numbered]
    said = []
    for task in dict.fromkeys(cell.task for _, cells in numbered for cell in groups(cells)[0]):
        lacking = [str(number) for number, tasks in enumerate(measured, start=1) if task not in tasks]
        said += [f"findings {', '.join(lacking)} on {task}"] * bool(lacking)
    return [f"**Not measured yet** on {REAL}: {'; '.join(said)}."] * bool(said)


def _sizes(cells: Iterable[Stored]) -> str:
    """How many prompts, tasks and training seeds there are."""
    names = (REAL, "the small models", "their other training seeds")
    found = [(name, some) for name, some in zip(names, groups(cells), strict=True) if some]
    parts = [
        f"{' or '.join(sorted({str(cell.n) for cell in some}))} held-out prompts per task on {name}"
        for name, some in found
    ]
    seeds = any(name == names[2] for name, _ in found)
    missing = "" if seeds else " Other training seeds of the small models have not been measured yet."
    return f"**How certain**: {', '.join(parts)}; intervals are clustered by query word.{missing}"


def _range(measure: Measure, rows: Rows, attribute: str) -> str:
    return span((getattr(row, attribute) for _, row in rows), measure) if rows else "–"
