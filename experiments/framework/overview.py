"""The page "What we found": a few sentences, one figure and one table, put together from the main measures' rows."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from experiments.framework.finding import Finding, Measure, Row
from experiments.framework.pages import (
    REAL,
    REAL_NOTE,
    Outcome,
    Stored,
    groups,
    line,
    main_rows,
    number_text,
    outcome,
    save_figure,
    span,
)
from experiments.framework.plotting import STYLE, overview_forest

CHANCE = 0.5
Numbered = Sequence[tuple[Finding, Sequence[Stored]]]


def figure(numbered: Numbered) -> Figure:
    """Draw every finding's main measure in its own unit: the real model's tasks first, then the small models'."""
    panels = []
    for number, (finding, cells) in enumerate(numbered, start=1):
        real, small, _ = map(main_rows, groups(cells))
        scaled = [
            (is_real, [value * finding.main.scale for value in (row.quantity, row.control, row.low, row.high)])
            for is_real, rows in ((True, real), (False, small))
            for _, row in rows
        ]
        panels.append((f"{number}. {finding.short}", finding.main.unit, scaled))
    return overview_forest(panels)


def save(numbered: Numbered, path: Path) -> None:
    """Write the figure."""
    with rc_context(STYLE):
        save_figure(figure(numbered), path)


def text(numbered: Numbered, *, command: str) -> str:
    """Return the page in Markdown."""
    n_groups = 3 if any(cell.training_seed for _, cells in numbered for cell in cells) else 2
    names = ["above its control", "small models", "other seeds"][:n_groups]
    rows = [
        line("finding", f"{REAL}: quantity", "control", "control is", "unit", *names),
        line("---", "---:", "---:", "---", "---", *["---:"] * n_groups),
    ]
    for number, (finding, cells) in enumerate(numbered, start=1):
        real, small, seeds = map(main_rows, groups(cells))
        spread = [_range(finding.main, real, attribute) for attribute in ("quantity", "control")]
        counts = [
            f"{_count(some, 'above')} of {len(some)}" if some else "–" for some in (real, small, seeds)[:n_groups]
        ]
        rows.append(
            line(
                f"{number}. [{finding.short}]({finding.id}.md)",
                *spread,
                finding.main.control,
                finding.main.unit,
                *counts,
            )
        )
    parts = [
        "# What we found",
        f"{REAL_NOTE} A prompt shows labeled texts in random order and ends with a text to label. Heads are located on "
        "one set of prompts and measured on another. They are ranked by *contrast*: what a head adds to log p(answer) "
        "− log p(other label). The paper ranks by *increase*, what it adds to log p(answer) alone.",
        "\n".join(f"- {sentence}" for sentence in sentences(numbered)),
        "![Every finding's main measure](figures/overview.svg)",
        f"*One line per task of {REAL} (blue), then one per small model and task (gray). Filled dot: the quantity. "
        "Hollow dot: its control. Bar: the 95 % interval of the difference, added to the control. Where the bar does "
        "not touch the hollow dot, the two differ.*",
        "## At a glance",
        f"The range over the tasks of {REAL}, and in how many pairs of model and task the interval is above the "
        "control:",
        "\n".join(rows),
        "On the pages, rows named “by increase” show the heads of the paper's ranking. [Ground truth](ground-truth.md) "
        "shows the same findings on models whose circuit is known.",
        f"One command computes all of this on your model, and resumes where it stopped: `{command} --all`.",
        "```{toctree}\n:hidden:\n\n" + "\n".join([*(finding.id for finding, _ in numbered), "ground-truth"]) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def sentences(numbered: Numbered) -> list[str]:
    """Return five to eight sentences: what the real model shows, what only the small ones do, and how certain it is."""
    real = {finding.id: main_rows(groups(cells)[0]) for finding, cells in numbered}
    small = {finding.id: main_rows(groups(cells)[1]) for finding, cells in numbered}

    def listed(wanted: Callable[[Finding], bool], rows: dict[str, list[tuple[Stored, Row]]]) -> str:
        return "".join(f"\n  - {_named(finding, rows[finding.id])}" for finding, _ in numbered if wanted(finding))

    def everywhere(finding: Finding, rows: dict[str, list[tuple[Stored, Row]]]) -> bool:
        return bool(rows[finding.id]) and _count(rows[finding.id], "above") == len(rows[finding.id])

    def nowhere(finding: Finding) -> bool:
        return bool(real[finding.id]) and not _count(real[finding.id], "above")

    def sometimes(finding: Finding) -> bool:
        return bool(real[finding.id]) and not everywhere(finding, real) and not nowhere(finding)

    found = {
        f"**Above their control on every task of {REAL}** on which they were measured:{{}}": (
            lambda finding: everywhere(finding, real),
            real,
        ),
        f"**Above their control on some tasks of {REAL}**:{{}}": (sometimes, real),
        f"**No difference shown on any task of {REAL}**, which does not mean that there is none:{{}}": (
            lambda finding: nowhere(finding) and not finding.predicted,
            real,
        ),
        f"**No difference shown on any task of {REAL}, although the paper predicts one**:{{}}": (
            lambda finding: nowhere(finding) and finding.predicted,
            real,
        ),
        "**Above their control on every small model and task, but not on every task of the real one**:{}": (
            lambda finding: everywhere(finding, small) and bool(real[finding.id]) and not everywhere(finding, real),
            small,
        ),
    }
    said = [phrase.format(listed(*of)) for phrase, of in found.items() if listed(*of)]
    return [
        *_removed(numbered),
        *_known_words(numbered),
        *said,
        *_unlike_the_paper(numbered),
        _sizes([cell for _, cells in numbered for cell in cells]),
        *_post_hoc(numbered),
        *_missing(numbered),
    ]


def _named(finding: Finding, rows: Sequence[tuple[Stored, Row]]) -> str:
    main = finding.main
    pairs = [
        f"{number_text(row.quantity, main)} against {number_text(row.control, main)} on {cell.task}"
        for cell, row in rows
    ]
    if rows[0][0].model != REAL:
        pairs = [" against ".join(_range(main, rows, attribute) for attribute in ("quantity", "control"))]
    return f"[{finding.short}]({finding.id}.md) (control: {main.control}): {'; '.join(pairs)} ({main.unit})"


def _removed(numbered: Numbered) -> list[str]:
    """What the located heads are worth in accuracy, on the real model."""
    said: dict[bool, list[str]] = {True: [], False: []}
    for cell in groups(_cells_of("ablation", numbered))[0]:
        intact, lost = cell.row("intact", "contrast"), cell.row("accuracy", "contrast")
        if intact is not None and lost is not None:
            before, after, random = (f"{100 * x:.1f}" for x in (intact.quantity, intact.control, lost.control))
            said[outcome(lost) == "above"].append(
                f"from {before} to {after} % on {cell.task} ({len(cell.located['contrast'])} heads; as many random "
                f"heads cost {random} points)"
            )
    start = f"**Removing the located heads of {REAL}**"
    more = [f"{start} lowers [accuracy](ablation.md) {'; '.join(said[True])}."] * bool(said[True])
    none = f"It does not change accuracy measurably on other tasks: {'; '.join(said[False])}."
    return [" ".join([*more, *[none] * bool(said[False])])] * bool(more or said[False])


def _known_words(numbered: Numbered) -> list[str]:
    """Where the real model partly goes by what the label words mean: exchanged labels leave it below chance."""
    said = [
        f"from {100 * random.quantity:.1f} to {100 * row.quantity:.1f} % on {cell.task}"
        for cell in groups(_cells_of("behavior", numbered))[0]
        if (row := cell.row("exchanged")) and (random := cell.row("accuracy")) and row.quantity < CHANCE
    ]
    return [
        f"**{REAL} partly goes by what the label words mean** where [accuracy](behavior.md) falls below chance with "
        f"the labels of all demonstrations exchanged: {'; '.join(said)}. Other tasks are learned from the "
        "demonstrations."
    ] * bool(said)


def _unlike_the_paper(numbered: Numbered) -> list[str]:
    """What the paper does or finds otherwise, with the numbers that show it."""
    parts = (_orders, _rankings, _by_increase, _neighbors, _fixes)
    said = [sentence for part in parts for sentence in part(numbered)]
    return ["**Unlike the paper**:" + "".join(f"\n  - {sentence}" for sentence in said)] * bool(said)


def _orders(numbered: Numbered) -> list[str]:
    """What the paper's order of demonstrations hides."""
    said = [
        f"{100 * last.quantity:.1f} and {100 * first.quantity:.1f} % on {cell.task}"
        for cell in groups(_cells_of("behavior", numbered))[0]
        if (last := cell.row("order")) and (first := cell.row("reorder"))
    ]
    return [
        "its order, with the query's class demonstrated last, also rewards copying the last label: [accuracy]"
        f"(behavior.md) with that class last and first is {', '.join(said)}"
    ] * bool(said)


def _by_increase(numbered: Numbered) -> list[str]:
    """Findings of the real model that depend on the ranking: above the control by contrast, and not by increase."""
    said = []
    for finding, cells in numbered:
        pairs = [
            (cell, by_increase)
            for cell in groups(cells)[0]
            if (by_contrast := cell.row(finding.main.name, "contrast")) and outcome(by_contrast) == "above"
            if (by_increase := cell.row(finding.main.name, "increase")) and outcome(by_increase) != "above"
        ]
        if pairs:
            said.append(_named(finding, pairs))
    return [f"ranked by increase, the heads show no difference in {'; '.join(said)}"] * bool(said)


def _rankings(numbered: Numbered) -> list[str]:
    """What removing heads costs by either ranking; the paper's is by increase."""
    said, fewer, total = [], 0, 0
    main = next((finding.main for finding, _ in numbered if finding.id == "ablation"), None)
    if main is None:
        return []
    real, small, _ = groups(_cells_of("ablation", numbered))
    for name, some in ((REAL, real), ("the small models", small)):
        rows = [
            (cell, contrast, increase)
            for cell in some
            if (contrast := cell.row(main.name, "contrast")) and (increase := cell.row(main.name, "increase"))
        ]
        if rows:
            numbers = [_range(main, [(cell, pair[i]) for cell, *pair in rows], "quantity") for i in (1, 0)]
            said.append(f"{numbers[0]} instead of {numbers[1]} nats on {name}")
            fewer += sum(increase.quantity < contrast.quantity for _, contrast, increase in rows)
            total += len(rows)
    return [
        "its ranking by increase also finds heads that raise both labels: removing them [costs the answer less]"
        f"(ablation.md) than by contrast in {fewer} of {total} pairs of model and task ({'; '.join(said)})"
    ] * bool(said)


def _neighbors(numbered: Numbered) -> list[str]:
    """What the paper assumes about the text next to the query."""
    measures = [one for finding, _ in numbered for one in finding.measures if one.name == "neighbor"]
    real = groups(_cells_of("recency-bias", numbered))[0]
    said = [
        f"{number_text(row.quantity, measures[0])} % on {cell.task}"
        for cell in real
        if measures and (row := cell.row("neighbor", "contrast")) and outcome(row) != "not applicable"
    ]
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
            real, small = (
                [
                    (cell, row)
                    for cell in some
                    if (row := cell.row("removed", "contrast")) and outcome(row) != "not applicable"
                ]
                for some in groups(cells)[:2]
            )
            found = [f"{number_text(row.quantity, measure)} % on {cell.task}" for cell, row in real]
            found += [f"{_range(measure, small, 'quantity')} % on the small models"] * bool(small)
            (theirs,) = measure.paper.values()
            said.append(f"{theirs} % of the [{finding.short}]({finding.id}.md), here {', '.join(found)}")
    return [f"its fixes remove {'; '.join(said)}"] * bool(said)


def _cells_of(finding_id: str, numbered: Numbered) -> Sequence[Stored]:
    return next((cells for finding, cells in numbered if finding.id == finding_id), [])


def _post_hoc(numbered: Numbered) -> list[str]:
    """Which main measures were changed after results had been seen, and what the earlier ones show."""
    changed = []
    for finding, cells in numbered:
        if finding.earlier:
            before = next(measure for measure in finding.measures if measure.name == finding.earlier)
            counts = []
            for name in (finding.earlier, finding.main.name):
                rows = [
                    row for cell in groups(cells)[0] if (row := cell.row(name)) and outcome(row) != "not applicable"
                ]
                counts.append(f"{sum(outcome(row) == 'above' for row in rows)} of {len(rows)}")
            changed.append(
                f"\n  - [{finding.short}]({finding.id}.md): before, {before.quantity} against {before.control} "
                f"({before.unit}), above the control on {counts[0]}; now on {counts[1]}"
            )
    return [
        f"**Changed after seeing results**: the main measure or control of these findings, with the number of {REAL}'s "
        "tasks on which each is above its control. The pages say why." + "".join(changed)
    ] * bool(changed)


def _missing(numbered: Numbered) -> list[str]:
    """Which findings have not been measured on which of the real model's tasks."""
    tasks = dict.fromkeys(cell.task for _, cells in numbered for cell in groups(cells)[0])
    said = []
    for task in tasks:
        lacking = [
            str(number)
            for number, (_, cells) in enumerate(numbered, start=1)
            if task not in {cell.task for cell in groups(cells)[0]}
        ]
        if lacking:
            said.append(f"findings {', '.join(lacking)} on {task}")
    return [f"**Not measured yet** on {REAL}: {'; '.join(said)}."] * bool(said)


def _sizes(cells: Iterable[Stored]) -> str:
    """How many prompts, tasks and training seeds there are."""
    real, small, seeds = groups(list(cells))
    parts = [
        f"{' or '.join(sorted({str(cell.n) for cell in some}))} held-out prompts per task on {name}"
        for name, some in ((REAL, real), ("the small models", small), ("their other training seeds", seeds))
        if some
    ]
    missing = "" if seeds else " Other training seeds of the small models have not been measured yet."
    return f"**How certain**: {', '.join(parts)}; intervals are clustered by query word.{missing}"


def _range(measure: Measure, rows: Sequence[tuple[Stored, Row]], attribute: str) -> str:
    return span((getattr(row, attribute) for _, row in rows), measure) if rows else "–"


def _count(rows: Sequence[tuple[Stored, Row]], kind: Outcome) -> int:
    return sum(outcome(row) == kind for _, row in rows)
