"""Write the page "What we found": a few sentences, one figure and one table, from the rows of the main measures."""

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

Numbered = Sequence[tuple[Finding, Sequence[Stored]]]

HEADINGS = {
    "every": f"**Quantities above their control on every task of {REAL}** on which they were measured:",
    "some": f"**Quantities above their control on some tasks of {REAL}**:",
    "none": f"**Quantities without a measurable difference from their control on any task of {REAL}** (there may be "
    "one):",
    "not as predicted": f"**Quantities without a measurable difference from their control on any task of {REAL}, "
    "although the paper predicts one**:",
    "small": f"**Quantities above their control on every small model and task, but not on every task of {REAL}**:",
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
    seeds_note = " “Other seeds” are the small models, trained with other seeds." if n_groups == 3 else ""
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
        "Hollow dot: its control. Bar: control plus the 95% interval of the difference. If the bar does not touch the "
        "hollow dot, the two differ.*",
        "## At a glance",
        f"Numbers are ranges over the tasks of {REAL}. The last columns count tasks, or pairs of model and task, in "
        "which the quantity is above its control, that is, the 95% interval of their difference is above zero."
        f"{seeds_note}",
        markdown.table(
            ["finding", f"{REAL}: quantity", "control", "what the control is", "unit", *names], rows, align="lrrll"
        ),
        "Each finding has a page of its own. There, rows named “by increase” use the paper's ranking of heads. [Ground "
        "truth](ground-truth.md) shows the same findings on models whose circuit is known.",
        f"To compute all of this on your model, run `{command} --all`. If interrupted, it resumes where it stopped.",
        "```{toctree}\n:hidden:\n\n" + "\n".join([*(finding.id for finding, _ in numbered), "ground-truth"]) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def sentences(numbered: Numbered) -> list[str]:
    """Return what the real model shows, what only the small models show, and how many prompts this is based on."""
    listed: dict[str, list[str]] = {kind: [] for kind in HEADINGS}
    for finding, cells in numbered:
        real, small, _ = (applicable(some, finding.main.name) for some in groups(cells))
        if not real:
            continue
        n_above = count(real, "above")
        nothing = "not as predicted" if finding.predicted_above else "none"
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
        f"{number_text(row.quantity, main)} vs. {number_text(row.control, main)} on {cell.task}" for cell, row in rows
    ]
    if rows[0][0].model != REAL:
        pairs = [" vs. ".join(_range(main, rows, attribute) for attribute in ("quantity", "control"))]
    return f"[{finding.short}]({finding.id}.md) (control: {main.control}): {'; '.join(pairs)} ({main.unit})"


def _cells_of(finding_id: str, numbered: Numbered) -> Sequence[Stored]:
    return next((cells for finding, cells in numbered if finding.id == finding_id), [])


def _together(cells: Sequence[Stored], *wanted: tuple[str, str]) -> list[tuple[Any, ...]]:
    """Return each cell with its rows of several (measure, ranking) pairs, for cells to which all of them apply."""
    found = [(cell, *(cell.row(*one) for one in wanted)) for cell in cells]
    return [(cell, *rows) for cell, *rows in found if all(row is not None and row.applies for row in rows)]


def _removed(numbered: Numbered) -> list[str]:
    """Return how much accuracy the real model loses without its located heads."""
    said: dict[bool, list[str]] = {True: [], False: []}
    real = groups(_cells_of("ablation", numbered))[0]
    for cell, intact, lost in _together(real, ("intact", "contrast"), ("accuracy", "contrast")):
        before, after, random = (f"{100 * x:.1f}" for x in (intact.quantity, intact.control, lost.control))
        said[lost.outcome == "above"].append(
            f"from {before} to {after}% on {cell.task} ({(k := len(cell.located['contrast']))} heads; removing {k} "
            f"random heads of the same layers costs {random} points)"
        )
    start = f"**Removing the located heads of {REAL}**"
    more = [f"{start} lowers [accuracy](ablation.md) {'; '.join(said[True])}."] * bool(said[True])
    none = f"On other tasks, accuracy does not change measurably: {'; '.join(said[False])}."
    return [" ".join([*more, *[none] * bool(said[False])])] * bool(more or said[False])


def _known_words(numbered: Numbered) -> list[str]:
    """Return where the real model relies on the meaning of label words, and which tasks it learns with any labels."""
    known, learned = [], []
    for cell, row, random in _together(groups(_cells_of("behavior", numbered))[0], ("exchanged", ""), ("accuracy", "")):
        if random.outcome == "above":
            which = learned if row.outcome == "above" else known
            which.append(f"from {100 * random.quantity:.1f} to {100 * row.quantity:.1f}% on {cell.task}")
    start = (
        f"If the labels of all demonstrations are exchanged, the [accuracy](behavior.md) of {REAL} changes as follows "
        "on tasks on which it beats copying the last label."
    )
    relies = f"Where it no longer beats copying, **it relies on what the label words mean**: {'; '.join(known)}."
    learns = f"Where it still beats copying, **it learns these tasks**: {'; '.join(learned)}."
    return [" ".join([start, *[relies] * bool(known), *[learns] * bool(learned)])] * bool(known or learned)


def _unlike_the_paper(numbered: Numbered) -> list[str]:
    """Return what the paper does or finds differently, with the numbers that show it."""
    parts = (_orders, _rankings, _by_increase, _neighbors, _fixes)
    said = [sentence for part in parts for sentence in part(numbered)]
    return [_nested("**Differences from the paper**:", said)] * bool(said)


def _orders(numbered: Numbered) -> list[str]:
    """Return what the paper's order of demonstrations hides."""
    real = groups(_cells_of("behavior", numbered))[0]
    said = [
        f"{100 * last.quantity:.1f} vs. {100 * first.quantity:.1f}% on {cell.task}"
        for cell, last, first in _together(real, ("order", ""), ("reorder", ""))
    ]
    return [
        "the paper demonstrates the query's class last, which also rewards copying the last label: [accuracy]"
        f"(behavior.md) with that class last vs. first is {', '.join(said)}"
    ] * bool(said)


def _rankings(numbered: Numbered) -> list[str]:
    """Return what removing the heads of either ranking costs; the paper ranks by increase."""
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
        "the paper ranks heads by increase, which also finds heads that raise both labels: removing the heads it finds "
        "[lowers the answer's log-odds less](ablation.md) than removing the heads ranked by contrast in "
        f"{fewer} of {total} pairs of model and task ({'; '.join(said)})"
    ] * bool(said)


def _by_increase(numbered: Numbered) -> list[str]:
    """Return the real model's findings that are above the control by contrast, but not by increase."""
    said = []
    for finding, cells in numbered:
        by_either = _together(groups(cells)[0], *((finding.main.name, ranking) for ranking in ("contrast", "increase")))
        pairs = [(cell, b) for cell, a, b in by_either if a.outcome == "above" and b.outcome != "above"]
        if pairs:
            said.append(_named(finding, pairs))
    start = "ranked by increase, the heads show no measurable difference from their control in"
    return [f"{start} {'; '.join(said)}"] * bool(said)


def _neighbors(numbered: Numbered) -> list[str]:
    """Return what the paper assumes about the text next to the query, and what we measured."""
    said = []
    for cell, row in applicable(groups(_cells_of("recency-bias", numbered))[0], "neighbor", "contrast"):
        measure = next(one for one in cell.finding.measures if one.name == "neighbor")
        said.append(f"{number_text(row.quantity, measure)}% on {cell.task}")
    return [
        "the paper assumes that a fifth of the effect that the located heads' queries have on the answer comes from "
        f"the text of the last demonstration; we [measured](recency-bias.md) {', '.join(said)} (if negative, that text "
        "moves the answer in the opposite direction)"
    ] * bool(said)


def _fixes(numbered: Numbered) -> list[str]:
    """Return which share of each bias the paper's corrections remove, in the paper and here."""
    said = []
    for finding, cells in numbered:
        for measure in (one for one in finding.measures if one.name == "removed" and one.paper):
            real, small = (applicable(some, "removed", "contrast") for some in groups(cells)[:2])
            found = [f"{number_text(row.quantity, measure)}% on {cell.task}" for cell, row in real]
            found += [f"{_range(measure, small, 'quantity')}% on the small models"] * bool(small)
            (theirs,) = measure.paper.values()
            said.append(f"the [{finding.short}]({finding.id}.md) by {theirs}% (here: {', '.join(found)})")
    return [f"according to the paper, its corrections reduce {'; '.join(said)}"] * bool(said)


def _post_hoc(numbered: Numbered) -> list[str]:
    """Return which main measures were changed after results had been seen, and what the earlier ones show."""
    changed = []
    for finding, cells in numbered:
        if finding.earlier:
            before = next(measure for measure in finding.measures if measure.name == finding.earlier)
            found = [applicable(groups(cells)[0], one.name) for one in (before, finding.main)]
            then, now = (f"{count(rows, 'above')} of {len(rows)}" for rows in found)
            changed.append(
                f"[{finding.short}]({finding.id}.md): the earlier measure (“{before.quantity}” vs. “{before.control}”; "
                f"{before.unit}) is above its control on {then} tasks, the current one on {now}"
            )
    heading = (
        f"**Changed after seeing results** on {REAL}: the main measure or control of the following findings. Their "
        "pages give the reasons."
    )
    return [_nested(heading, changed)] * bool(changed)


def _missing(numbered: Numbered) -> list[str]:
    """Return which findings have not been measured on which of the real model's tasks."""
    measured = [{cell.task for cell in groups(cells)[0]} for _, cells in numbered]
    said = []
    for task in dict.fromkeys(cell.task for _, cells in numbered for cell in groups(cells)[0]):
        lacking = [str(number) for number, tasks in enumerate(measured, start=1) if task not in tasks]
        said += [f"findings {', '.join(lacking)} on {task}"] * bool(lacking)
    return [f"**Not measured yet** on {REAL}: {'; '.join(said)}."] * bool(said)


def _sizes(cells: Iterable[Stored]) -> str:
    """Return how many held-out prompts each group of models was measured on."""
    names = (REAL, "the small models", "their other training seeds")
    found = [(name, some) for name, some in zip(names, groups(cells), strict=True) if some]
    parts = [
        f"{' or '.join(sorted({str(cell.n) for cell in some}))} held-out prompts per task on {name}"
        for name, some in found
    ]
    seeds = any(name == names[2] for name, _ in found)
    missing = "" if seeds else " Other training seeds of the small models have not been measured yet."
    return f"**Sample sizes**: {', '.join(parts)}. Intervals are clustered by query word.{missing}"


def _range(measure: Measure, rows: Rows, attribute: str) -> str:
    return span((getattr(row, attribute) for _, row in rows), measure) if rows else "–"
