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
        line("finding", f"{REAL}: quantity", "control", "unit", *names),
        line("---", "---:", "---:", "---", *["---:"] * n_groups),
    ]
    for number, (finding, cells) in enumerate(numbered, start=1):
        real, small, seeds = map(main_rows, groups(cells))
        spread = [_range(finding.main, real, attribute) for attribute in ("quantity", "control")]
        counts = [
            f"{_count(some, 'above')} of {len(some)}" if some else "–" for some in (real, small, seeds)[:n_groups]
        ]
        rows.append(line(f"{number}. [{finding.short}]({finding.id}.md)", *spread, finding.main.unit, *counts))
    parts = [
        "# What we found",
        "\n".join(f"- {sentence}" for sentence in sentences(numbered)),
        "![Every finding's main measure](figures/overview.svg)",
        "*Filled dots are quantities, hollow dots their controls, and bars the 95 % intervals of the difference, "
        f"shifted by the control's value. One line per task of {REAL} (blue), then one per small model and task "
        "(gray). Where a bar does not reach the hollow dot, quantity and control differ.*",
        "## At a glance",
        f"The range over the tasks of {REAL}, and in how many pairs of model and task the interval is above the "
        "control:",
        "\n".join(rows),
        f"{REAL_NOTE} Heads are located on other prompts than those they are measured on, by *contrast*: what a head "
        "adds to log p(answer) − log p(other label). The paper ranks by *increase*, what it adds to log p(answer); "
        "rows named “by increase” show these heads. [Ground truth](ground-truth.md) shows the same findings on models "
        "whose circuit is known.",
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
        f"**On every task of {REAL} where they were measured**, these are above their control:{{}}": (
            lambda finding: everywhere(finding, real),
            real,
        ),
        f"**On some tasks of {REAL}**:{{}}": (sometimes, real),
        f"**On no task of {REAL}**:{{}}": (lambda finding: nowhere(finding) and not finding.predicted, real),
        f"**On no task of {REAL}, although the paper predicts it** (an interval that includes zero does not refute "
        "it):{}": (lambda finding: nowhere(finding) and finding.predicted, real),
        "**Everywhere on the small models, but not on every task of the real one**:{}": (
            lambda finding: everywhere(finding, small) and bool(real[finding.id]) and not everywhere(finding, real),
            small,
        ),
    }
    said = [phrase.format(listed(*of)) for phrase, of in found.items() if listed(*of)]
    return [
        *_removed(numbered),
        *_known_words(numbered),
        *said,
        *_by_increase(numbered),
        *_rankings(numbered),
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
    return f"[{finding.short}]({finding.id}.md): {'; '.join(pairs)} ({main.unit})"


def _removed(numbered: Numbered) -> list[str]:
    """What the located heads are worth in accuracy, on the real model."""
    cells = next((cells for finding, cells in numbered if finding.id == "ablation"), [])
    said = []
    for cell in groups(cells)[0]:
        intact, lost = cell.row("intact", "contrast"), cell.row("accuracy", "contrast")
        if intact is not None and lost is not None:
            before, after, random = (f"{100 * x:.1f}" for x in (intact.quantity, intact.control, lost.control))
            n_heads = len(cell.located["contrast"])
            said.append(f"{before} to {after} % on {cell.task} ({n_heads} heads; random ones cost {random} points)")
    if not said:
        return []
    return [f"**Removing the located heads of {REAL}** lowers [accuracy](ablation.md) from {'; from '.join(said)}."]


def _known_words(numbered: Numbered) -> list[str]:
    """On which of the real model's tasks exchanged labels are not learned: it knows the label words."""
    cells = next((cells for finding, cells in numbered if finding.id == "behavior"), [])
    said = [
        f"{100 * row.quantity:.1f} % on {cell.task}"
        for cell in groups(cells)[0]
        if (row := cell.row("exchanged")) and row.quantity < CHANCE
    ]
    return [
        f"**{REAL} knows the label words** where exchanged labels leave its [accuracy](behavior.md) below chance: "
        f"{'; '.join(said)}. Other tasks are learned from the demonstrations."
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
            said.append(f"\n  - {_named(finding, pairs)}")
    start = f"**On {REAL}, with heads ranked by increase as in the paper**, these are not above their control:"
    return [start + "".join(said)] * bool(said)


def _rankings(numbered: Numbered) -> list[str]:
    """What removing heads costs by either ranking; the paper's is by increase."""
    said, fewer, total = [], 0, 0
    for finding, cells in numbered:
        if finding.id != "ablation":
            continue
        real, small, _ = groups(cells)
        for name, some in ((REAL, real), ("the small models", small)):
            rows = [
                (cell, contrast, increase)
                for cell in some
                if (contrast := cell.row(finding.main.name, "contrast"))
                and (increase := cell.row(finding.main.name, "increase"))
            ]
            if rows:
                numbers = [_range(finding.main, [(cell, pair[i]) for cell, *pair in rows], "quantity") for i in (1, 0)]
                said.append(f"{numbers[0]} instead of {numbers[1]} nats on {name}")
                fewer += sum(increase.quantity < contrast.quantity for _, contrast, increase in rows)
                total += len(rows)
    if not said:
        return []
    return [
        "**By the paper's ranking** (increase of log p(answer), which also rewards heads that raise both labels), "
        f"removing the located heads [costs the answer less](ablation.md) than by contrast in {fewer} of {total} pairs "
        "of model and task: "
        f"{'; '.join(said)}."
    ]


def _post_hoc(numbered: Numbered) -> list[str]:
    """Which main measures were changed after results had been seen."""
    changed = [f"[{finding.short}]({finding.id}.md)" for finding, _ in numbered if finding.post_hoc]
    start = "**Changed after seeing results**: the main measure or control of"
    return [f"{start} {', '.join(changed)}; each page says why."] * bool(changed)


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
