"""The findings on models whose circuit is known, and how well each location method recovers it.

A finding is credible only if it finds two towers where they are planted, and none where the same task is solved in
another way. `python -m experiments ground-truth` builds the planted models, measures every finding on them, and writes
docs/results/ground-truth.md.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import icl_lens as il
from experiments.framework import markdown
from experiments.framework.finding import Finding, Measure, Row, rows_from_json
from experiments.framework.locating import METHODS, best_heads
from experiments.framework.run import Cell, load_cells
from experiments.framework.study import Study
from experiments.framework.tasks import Task
from experiments.planted import Kind, Planted, build
from icl_lens.files import write_text

SEEDS = range(3)
DATA = "animal-country"


class Setting(NamedTuple):
    """A kind of model, how it answers, and the labels that it is measured with."""

    kind: Kind
    answers: str
    labels: tuple[str, str] = ("foo", "bar")


NAMES = "lookup, names"
SETTINGS = {
    "two-tower": Setting(
        "two-tower", "four heads compare the query's category with those stored at labels, and copy the label"
    ),
    "compare-copy": Setting("compare-copy", "one head compares, three later ones copy the label that it picked"),
    "last-label": Setting("last-label", "four heads copy the label shown last"),
    "majority": Setting("majority", "four heads copy all labels alike"),
    "lookup": Setting("lookup", "an FFN writes the name of the query's category, which is not one of the labels here"),
    NAMES: Setting(
        "lookup", "the same, always right because the labels are the categories' names", ("animal", "country")
    ),
    "untrained": Setting("untrained", "random weights"),
}
PLANTED = ("two-tower", "compare-copy")
"""Settings whose circuit has two towers."""
WRITING = ("two-tower", "copier", "last-label", "majority")
"""Roles of heads that write labels into the answer; as many heads are located as a model has of these."""
ANSWERING = ("two-tower", "comparer", "copier")
"""Roles of heads that find the answer among the labels."""


@dataclass(frozen=True)
class Expected:
    """Where a measure is predicted to be above its control, and where we understood afterwards why it may be."""

    above: tuple[str, ...]
    """Settings in which it must be above; in all others, it must not be."""
    explained: tuple[str, ...] = ()
    """Settings in which another outcome was explained after results had been seen; they count as exceptions."""
    why: str = ""
    """The explanation, for the page."""


EXPECTED = {
    ("behavior", "accuracy"): Expected((*PLANTED, NAMES)),
    ("location", "lost_increase"): Expected(
        PLANTED, (), "it became the main measure, and this prediction was written down, after its results had been seen"
    ),
    ("location", "depth"): Expected(
        PLANTED,
        (NAMES, *PLANTED),
        "nearly all contributions are deep, but they come from a few heads, whose signs often agree after shuffling: "
        "the interval is wide",
    ),
    ("shared-heads", "overlap"): Expected(PLANTED),
    ("values", "rank"): Expected(
        PLANTED, ("last-label", "majority"), "heads that copy any label write its name, however they pick it"
    ),
    ("label-attention", "chance"): Expected(PLANTED),
    ("ablation", "log_odds"): Expected(
        PLANTED,
        (NAMES,),
        f"in `{NAMES}`, the located heads are the noise heads that help most. Removing them rather than random heads "
        "costs tenths of nats; removing planted heads costs several nats. The same holds for `text-to-label` and "
        "`location`",
    ),
    ("two-towers", "keys"): Expected(
        ("two-tower",),
        ("compare-copy", "lookup"),
        "copiers do not read texts, but the comparer does; where a noise head reads what the mover wrote, exchanging "
        "texts moves the answer by hundredths of nats",
    ),
    ("majority-bias", "bias"): Expected(
        ("majority",), (*PLANTED, "untrained"), "attention sums over the labels of a class, so two towers prefer "
        "frequent labels too; random weights average all labels, which moves log-odds by tenths of nats"
    ),
    ("recency-bias", "bias"): Expected(("last-label",)),
    ("text-to-label", "movers"): Expected(PLANTED, (NAMES,)),
    ("circuit", "cpr"): Expected(PLANTED, (NAMES,)),
    ("circuit", "first third → query"): Expected(("two-tower",), ("compare-copy", "lookup", NAMES)),
    ("circuit", "first third → keys at the labels"): Expected(PLANTED, ("lookup", NAMES)),
    ("circuit", "first third → values at the labels"): Expected(PLANTED, (NAMES,)),
    ("behavior", "exchanged"): Expected(PLANTED, (), f"in `{NAMES}`, labels are not learned from the demonstrations"),
    ("label-attention", "share"): Expected(PLANTED),
    ("text-to-label", "texts"): Expected(PLANTED, (NAMES,)),
    ("two-towers", "keys: own text"): Expected(("two-tower",), ("compare-copy", "lookup")),
    ("two-towers", "keys: labels"): Expected((), ("compare-copy", "lookup"), "copiers compare label words with the "
        "label that the comparer picked; noise heads move the answer by hundredths of nats"),
}  # fmt: skip
"""By finding and measure."""


def planted_models(folder: Path, seeds: Sequence[int] = SEEDS) -> dict[tuple[Kind, int], Planted]:
    """Build every kind of model, with each seed, in folders below `folder`."""
    kinds: dict[Kind, None] = dict.fromkeys(setting.kind for setting in SETTINGS.values())
    return {(kind, seed): build(kind, folder / f"{kind}-{seed}", seed=seed) for kind in kinds for seed in seeds}


def task_of(planted: Planted, labels: tuple[str, str] = ("foo", "bar")) -> Task:
    """Return the task `DATA` with a planted model's words."""
    return Task(f"{DATA}, {'/'.join(labels)}", DATA, labels, path=str(planted.words))


def cells(
    models: Mapping[tuple[Kind, int], Planted],
    findings: Sequence[Finding],
    n: int,
    settings: Mapping[str, Setting] = SETTINGS,
) -> Iterator[Cell]:
    """Return every finding in every setting, with every seed."""
    for name, setting in settings.items():
        for (kind, seed), planted in models.items():
            if kind == setting.kind:
                k = sum(len(planted.heads[role]) for role in WRITING) or 4  # pyright: ignore[reportArgumentType]
                shared = str(planted.folder), task_of(planted, setting.labels), n, f"planted {name}", seed, k
                yield from (Cell(finding, *shared) for finding in findings)


# What was measured next to what is expected


class Observed(NamedTuple):
    """A measure in a setting: a row for each seed, whether most seeds are as predicted, or else explained."""

    rows: list[Row]
    as_expected: bool
    explained: bool = False

    @property
    def n_above(self) -> int:
        return sum(row.outcome == "above" for row in self.rows)

    @property
    def above(self) -> bool:
        """Whether the measure is above its control in most seeds."""
        return 2 * self.n_above > len(self.rows)

    @property
    def applicable(self) -> list[Row]:
        return [row for row in self.rows if row.applies]


Table = dict[tuple[str, str], dict[str, Observed]]
"""By finding and measure, then by setting."""


def observe(results: Path, findings: Sequence[Finding]) -> Table:
    """Return the stored rows of every measure in `EXPECTED`."""
    rows: dict[tuple[str, str, str], list[Row]] = {}
    for finding, cell in load_cells(results, findings):
        setting = cell["configuration"]["model"].removeprefix("planted ")
        stored = rows_from_json(cell)
        for finding_id, name in EXPECTED:
            if finding_id == finding.id:  # a finding that does not apply has one row, of its main measure
                row = next((row for row in stored if row.measure == name), Row(name, note=stored[0].note))
                rows.setdefault((finding_id, name, setting), []).append(row)
    found: Table = {}
    for (finding_id, name, setting), some in rows.items():
        one, expected = Observed(some, True), EXPECTED[finding_id, name]
        right = one.above == (setting in expected.above)
        explained = not right and setting in expected.explained
        found.setdefault((finding_id, name), {})[setting] = one._replace(as_expected=right, explained=explained)
    return {key: found[key] for key in EXPECTED if key in found}


def recovery(planted: Planted, n: int, load: Callable[[str], Any] = il.load_model) -> dict[str, dict[str, int]]:
    """Return how many heads of each role are among the k best of each method; k planted heads find the answer."""
    role_of = {head: role for role, heads in planted.heads.items() for head in heads}
    k = sum(role in ANSWERING for role in role_of.values())
    study = Study(load(str(planted.folder)), task_of(planted), n)
    locating = study.halves()[0]
    found = {name: best_heads(method.score(study, locating), k) for name, method in METHODS.items()}
    return {name: dict(Counter(role_of.get(head, "noise") for head in heads)) for name, heads in found.items()}


def measure_recovery(
    models: Mapping[tuple[Kind, int], Planted], path: Path, n: int, report: Callable[[str], None]
) -> dict[str, list[dict[str, dict[str, int]]]]:
    """Return the recovery of all methods by kind, from `path` where it has been measured."""
    found: dict[str, list[dict[str, dict[str, int]]]] = {}
    kept = json.loads(path.read_text()) if path.is_file() else {}
    for (kind, seed), planted in models.items():
        if kind not in PLANTED:
            continue
        key = f"{kind}, seed {seed}, n {n}"
        if key not in kept:
            kept[key] = recovery(planted, n)
            write_text(path, json.dumps(kept, indent=1) + "\n")
            report(f"{key}: {kept[key]}")
        found.setdefault(kind, []).append(kept[key])
    return found


# The page


def page(results: Path, findings: Sequence[Finding], recovered: Mapping[str, Sequence[Any]], n: int) -> str:
    """Return the page in Markdown, from stored cells and the recovery of every method."""
    measures = {(finding.id, one.name): one for finding in findings for one in finding.measures}
    mains = {(finding.id, finding.main.name) for finding in findings}
    table = observe(results, findings)
    first, further = ({key: row for key, row in table.items() if (key in mains) == main} for main in (True, False))
    reasons = [
        f"- `{finding_id}` ({measures[finding_id, name].quantity}): {one.why}."
        for (finding_id, name), one in EXPECTED.items()
        if one.why and (finding_id, name) in table
    ]
    parts = [
        "# Ground truth: models whose circuit is planted",
        _summary(first, table, recovered),
        "## Does each finding see what was planted?",
        "Quantity / control of the main measure, the mean of all seeds. **Bold**: the interval of the difference is "
        "above zero in most seeds. Where seeds disagree, a fraction counts those with an interval above zero. A dash: "
        "not applicable. ⚠: not as predicted.",
        _markdown(first, measures, _cell),
        "Further measures, for what the main one does not distinguish:",
        _markdown(further, measures, _cell),
        "**What is predicted.** Findings are above their control in the first two columns, which have two towers, and "
        "in no other. But `majority-bias` and `recency-bias` are above it only where these biases are planted, and "
        f"`behavior` also in `{NAMES}`, which answers correctly. Reasons for exceptions (⚠), written after the "
        "results; movers, comparers and copiers are explained [below](#how-the-models-are-made):",
        "\n".join(reasons),
        "<details><summary>Intervals of the difference, by seed</summary>",
        _markdown(table, measures, _intervals),
        "</details>",
        "## Does each location method recover the planted heads?",
        "Each method selects as many heads as were planted to find the answer (two-tower heads, or comparer and "
        "copiers). The table shows how many of those it selects, summed over seeds, and what the others are. Passes "
        "are runs of the model per prompt.",
        _recovery_table(recovered),
        "Contrast and increase count what a head writes into the answer itself; the comparer writes for later heads "
        "only. The mover brings the query's category to the last position, so its removal costs as much as that of all "
        "planted heads together.",
        "## How the models are made",
        markdown.bullets(f"`{name}`: {setting.answers}." for name, setting in SETTINGS.items()),
        "Every model has 8 layers of 8 heads. Where categories are compared or looked up, another head, the *mover*, "
        "has copied each text's category to the label after it, and the query's category to the last position. All "
        "models but `untrained` have two *decoys*, heads that raise every label alike. All other heads and FFNs are "
        "noise, the same in all models of one seed.",
        "## Caveats",
        "- As many heads are located as were planted to write labels into the answer, and 4 where there are none. If "
        "only some of them do the work, the others pull means toward the control and widen intervals.\n"
        "- No noise head has much contrast. In trained models heads differ gradually, and recovery is harder.\n"
        "- An interval is above zero by chance in one of 40 comparisons, so one seed alone decides nothing.\n"
        "- Planted heads do one thing each; trained heads may do several.",
        f"Made by `python -m experiments ground-truth -n {n}`.",
    ]
    return "\n\n".join(parts) + "\n"


def _summary(first: Table, table: Table, recovered: Mapping[str, Sequence[Any]]) -> str:
    """Return what was found in a few sentences, all from the numbers."""
    seeds = len(next(iter(recovered.values())))
    said = [
        f"Two circuits with two towers, and three other ways to answer, are written by hand into the weights of small "
        f"transformers, with {seeds} seeds each."
    ]
    found = {name: _count_found([one[name] for one in recovered["two-tower"]]) for name in METHODS}
    all_found = [
        f"{METHODS[name].name} ({(runs := METHODS[name].passes(64))} run{'s' * (runs > 1)} of the model per prompt)"
        for name, (n, k, _) in found.items()
        if n == k
    ]
    by_increase, k, others = found["increase"]
    said.append(
        f"All {k} planted two-tower heads are found by {_listed(all_found) or 'no method'}. The paper's ranking by "
        f"increase finds {by_increase} of them; {others['decoy']} of its {k} heads are decoys, which raise every label "
        "alike."
    )
    for setting in PLANTED:
        above = [finding_id for (finding_id, _), row in first.items() if row[setting].above]
        said.append(f"On `{setting}`, {len(above)} of {len(first)} findings are above their control.")
    others = {
        setting: [finding_id for (finding_id, _), row in first.items() if setting in row and row[setting].above]
        for setting in SETTINGS
        if setting not in PLANTED
    }
    named = [f"{_listed([f'`{one}`' for one in some])} on `{setting}`" for setting, some in others.items() if some]
    none = [f"`{setting}`" for setting, some in others.items() if not some]
    said.append(
        f"On models that answer in other ways, these are above their control: {'; '.join(named)}; none on "
        f"{_listed(none)}."
    )
    every = [one for row in table.values() for one in row.values()]
    right, explained = (sum(getattr(one, name) for one in every) for name in ("as_expected", "explained"))
    said.append(
        f"Of {len(every)} pairs of measure and model, {right} are as predicted from how the models are made. We can "
        f"explain {explained} of the other {len(every) - right}, but did so only after seeing them."
    )
    return " ".join(said)


def _markdown(table: Table, measures: Mapping[tuple[str, str], Measure], cell: Callable[..., str]) -> str:
    rows = []
    for (finding_id, name), row in table.items():
        values = [cell(row[setting], measures[finding_id, name]) if setting in row else "" for setting in SETTINGS]
        first = next(measure for finding, measure in EXPECTED if finding == finding_id)
        extra = "" if cell is _cell and name == first else f", {name}"
        rows.append([f"[{finding_id}]({finding_id}.md){extra}", *values])
    return markdown.table(["", *SETTINGS], rows, align="l" * (1 + len(SETTINGS)))


def _cell(observed: Observed, measure: Measure) -> str:
    rows = observed.applicable
    if not rows:
        text = "—"
    else:
        means = fmean(row.quantity for row in rows), fmean(row.control for row in rows)
        text = " / ".join(_number(mean, measure) for mean in means)
        text = f"**{text}**" if observed.above else text
        if observed.n_above not in (0, len(observed.rows)):
            text += f" ({observed.n_above}/{len(observed.rows)})"
    return text if observed.as_expected else f"{text} ⚠"


def _intervals(observed: Observed, measure: Measure) -> str:
    return "<br>".join(
        f"[{_number(row.low, measure)}, {_number(row.high, measure)}]" for row in observed.applicable
    ) or "—"  # fmt: skip


def _number(value: float, measure: Measure) -> str:
    return f"{value * measure.scale:.{measure.digits}f}".replace("-", "−")


def _count_found(counts: Sequence[Mapping[str, int]]) -> tuple[int, int, Counter[str]]:
    """Return how many found heads answer, how many were found, and the roles of the others."""
    total: Counter[str] = sum(map(Counter, counts), Counter())
    others = Counter({role: n for role, n in total.items() if role not in ANSWERING})
    return total.total() - others.total(), total.total(), others


def _recovery_table(recovered: Mapping[str, Sequence[Any]]) -> str:
    rows = []
    for name, method in METHODS.items():
        values = []
        for some in recovered.values():
            n, k, others = _count_found([one[name] for one in some])
            extra = [f", {count} {role}{'s' * (count > 1 and role != 'noise')}" for role, count in others.items()]
            values.append("".join([f"**{n} of {k}**" if n == k else f"{n} of {k}", *extra]))
        rows.append([method.name, str(method.passes(64)), *values])
    return markdown.table(["method", "passes", *recovered], rows, align="lr" + "l" * len(recovered))


def _listed(words: Sequence[str]) -> str:
    return " and ".join([*[", ".join(words[:-1])] * (len(words) > 1), *words[-1:]])
