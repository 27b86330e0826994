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
    """A kind of model, the labels that it is measured with, and how it answers."""

    kind: Kind
    words: str
    labels: tuple[str, str] = ("foo", "bar")


NAMES = "lookup, names"
SETTINGS = {
    "two-tower": Setting(
        "two-tower", "four heads compare the query's category with those stored at labels, and copy the label"
    ),
    "compare-copy": Setting("compare-copy", "one head compares, three later ones copy the label that it picked"),
    "last-label": Setting("last-label", "four heads copy the label shown last"),
    "majority": Setting("majority", "four heads copy all labels alike"),
    "lookup": Setting("lookup", "an FFN says the name of the query's category, which is not among the labels here"),
    NAMES: Setting("lookup", "the same with the categories' names as labels: always right", ("animal", "country")),
    "untrained": Setting("untrained", "random weights"),
}
PLANTED = ("two-tower", "compare-copy")
"""Settings whose circuit has two towers."""
WRITING = ("two-tower", "copier", "last-label", "majority")
"""Roles of heads that write labels as outputs; a study locates as many heads as there are."""
ANSWERING = ("two-tower", "comparer", "copier")
"""Roles of heads that find the answer among the labels."""


@dataclass(frozen=True)
class Expected:
    """Settings in which a measure must be above its control, and where it may be, and why; elsewhere it must not be."""

    above: tuple[str, ...]
    may: tuple[str, ...] = ()
    why: str = ""


EXPECTED = {
    ("behavior", "accuracy"): Expected((*PLANTED, NAMES)),
    ("location", "depth"): Expected(PLANTED, (NAMES,)),
    ("shared-heads", "overlap"): Expected(PLANTED),
    ("values", "rank"): Expected(
        PLANTED, ("last-label", "majority"), "heads that copy any label write its name, however they pick it"
    ),
    ("label-attention", "chance"): Expected(PLANTED),
    ("ablation", "log_odds"): Expected(
        PLANTED,
        (NAMES,),
        f"in `{NAMES}` the noise heads that help most are removed, and help with hundredths of nats: how much is lost "
        "tells the two apart, not that something is. The same holds for `information-flow` and `location`",
    ),
    ("two-towers", "key_texts"): Expected(
        ("two-tower",),
        ("compare-copy", "lookup"),
        "copiers do not read texts, and the comparer that does writes nothing into the answer and is not located by "
        "contrast; where a noise head reads what a mover wrote, exchanging texts moves the answer by hundredths of "
        "nats",
    ),
    ("metric", "auroc"): Expected((), (), "the mover has brought categories to labels and to the last position, where "
        "the cosine finds them always; nothing can exceed it, and the table of further measures rotates keys instead"),
    ("majority-bias", "bias"): Expected(
        ("majority",), (*PLANTED, "untrained"), "attention sums over labels of a class, so that two towers prefer "
        "frequent labels too; random weights average the labels that they see, which moves log-odds by hundredths"
    ),
    ("recency-bias", "bias"): Expected(("last-label",)),
    ("information-flow", "text_to_label"): Expected(PLANTED, (NAMES,)),
    ("other-papers", "induction"): Expected(
        (), PLANTED, "a repeated text has the same category, so that two towers look at the label after it"
    ),
    ("tower-inputs", "early_key"): Expected(PLANTED, (NAMES,)),
    ("value-inputs", "early"): Expected(PLANTED, (NAMES,)),
    ("circuit", "cpr"): Expected(PLANTED, (NAMES,)),
    ("circuit", "early → query"): Expected(
        ("two-tower",), ("compare-copy", "lookup", NAMES), "copiers read the label that the comparer picked, in the "
        "fourth of eight layers; noise heads read what the FFN looked up, which moves the answer by hundredths of nats"
    ),
    ("circuit", "early → keys at the labels"): Expected(
        PLANTED, ("lookup", NAMES), "noise heads move the answer by hundredths of nats"
    ),
    ("circuit", "early → values at the labels"): Expected(PLANTED, (NAMES,)),
    ("behavior", "exchanged"): Expected(PLANTED, (), f"in `{NAMES}` labels are not learned from the demonstrations"),
    ("label-attention", "share"): Expected(PLANTED),
    ("two-towers", "auroc"): Expected(PLANTED),
    ("two-towers", "relabeled"): Expected(
        ("two-tower",), (), "copiers compare label words with the picked one, so that exchanged labels mislead them"
    ),
    ("metric", "rotated"): Expected(
        ("two-tower",), ("compare-copy",), "with two classes the inputs differ along one direction, which a random "
        "form, with its better sign, separates nearly as well"
    ),
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
                about = str(planted.folder), task_of(planted, setting.labels), n, f"planted {name}", seed, k
                yield from (Cell(one, *about) for one in findings)


# What was measured next to what is expected


class Observed(NamedTuple):
    """A measure in a setting: a row for each seed, and whether `above`, the result of most seeds, is as expected."""

    rows: list[Row]
    as_expected: bool

    @property
    def n_above(self) -> int:
        return sum(row.outcome == "above" for row in self.rows)

    @property
    def above(self) -> bool:
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
        for about, name in EXPECTED:
            if about == finding.id:  # a finding that does not apply has one row, of its main measure
                row = next((row for row in stored if row.measure == name), Row(name, note=stored[0].note))
                rows.setdefault((about, name, setting), []).append(row)
    found: Table = {}
    for (about, name, setting), some in rows.items():
        one, expected = Observed(some, True), EXPECTED[about, name]
        right = setting in expected.may or one.above == (setting in expected.above)
        found.setdefault((about, name), {})[setting] = one._replace(as_expected=right)
    return {key: found[key] for key in EXPECTED if key in found}


def recovery(planted: Planted, n: int, load: Callable[[str], Any] = il.load_model) -> dict[str, dict[str, int]]:
    """Return, for each location method, the roles of its k best heads, where k heads of the planted circuit answer."""
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
    reasons = [f"- `{about}` ({measures[about, name].quantity}): {one.why}." for (about, name), one in EXPECTED.items()
               if one.why and (about, name) in table]  # fmt: skip
    parts = [
        "# Ground truth: models whose circuit is planted",
        _summary(first, table, recovered),
        "## Does each finding see what was planted?",
        "Quantity / control of the main measure, the mean of all seeds. **Bold**: the interval of the difference is "
        "above zero in most seeds; a fraction counts the seeds in which it is, where they disagree. A dash: not "
        "applicable. ⚠: not as expected.",
        _markdown(first, measures, _cell),
        "Measures that tell apart what the main one does not:",
        _markdown(further, measures, _cell),
        "**What is expected.** Two towers in the first two columns and in no other; `majority-bias` and `recency-bias` "
        f"where they are planted; `behavior` also in `{NAMES}`, which is right. Exceptions, written down after the "
        f"first results, and why:",
        "\n".join(reasons),
        "<details><summary>Intervals of the difference, by seed</summary>",
        _markdown(table, measures, _intervals),
        "</details>",
        "## Does each location method recover the planted heads?",
        "Planted heads that answer (two-tower heads; comparer and copiers) among as many found ones, summed over "
        "seeds, and what else was found. Passes count runs of the model per prompt.",
        _recovery_table(recovered),
        "Contrast and increase count what a head writes into the answer itself; the comparer writes for later heads "
        "only. The mover brings the query's category to the last position, so its removal costs as much as that of all "
        "planted heads together.",
        "## How the models are made",
        markdown.bullets(f"`{name}`: {setting.words}." for name, setting in SETTINGS.items()),
        "Every model has 8 layers of 8 heads. All other heads and FFNs are noise that is the same in all kinds of one "
        "seed, and two decoys raise every label alike.",
        "## Caveats",
        "- As many heads are located as were planted to write labels. Where more are located than do the work, the "
        "others pull means toward the control and widen intervals.\n"
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
        f"Two circuits with two towers, and four other ways to answer, are written by hand into the weights of small "
        f"transformers; seeds of each: {seeds}."
    ]
    found = {name: _found([one[name] for one in recovered["two-tower"]]) for name in METHODS}
    all_found = [f"{METHODS[name].name} ({METHODS[name].passes(64)})" for name, (n, k, _) in found.items() if n == k]
    by_increase, k, others = found["increase"]
    said.append(
        f"All {k} planted two-tower heads are found by {_listed(all_found) or 'no method'} (in brackets: runs of the "
        f"model per prompt). The paper's ranking by increase finds {by_increase}, and decoys in {others['decoy']} of "
        f"the {k} places."
    )
    for setting in PLANTED:
        above = [about for (about, _), row in first.items() if row[setting].above]
        said.append(f"On `{setting}`, {len(above)} of {len(first)} findings are above their control.")
    others = {
        setting: [about for (about, _), row in first.items() if setting in row and row[setting].above]
        for setting in SETTINGS
        if setting not in PLANTED
    }
    named = [f"{_listed([f'`{one}`' for one in some])} on `{setting}`" for setting, some in others.items() if some]
    none = [f"`{setting}`" for setting, some in others.items() if not some]
    said.append(f"On models that answer otherwise: {'; '.join(named)}; none on {_listed(none)}.")
    every = [one for row in table.values() for one in row.values()]
    right = sum(one.as_expected for one in every)
    said.append(
        f"Of {len(every)} pairs of measure and model, {right} are as expected from how the models are made, counting "
        f"the "
        "exceptions listed below as expected."
    )
    return " ".join(said)


def _markdown(table: Table, measures: Mapping[tuple[str, str], Measure], cell: Callable[..., str]) -> str:
    rows = []
    for (about, name), row in table.items():
        values = [cell(row[setting], measures[about, name]) if setting in row else "" for setting in SETTINGS]
        first = next(measure for finding, measure in EXPECTED if finding == about)
        extra = "" if cell is _cell and name == first else f", {name}"
        rows.append([f"[{about}]({about}.md){extra}", *values])
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


def _found(counts: Sequence[Mapping[str, int]]) -> tuple[int, int, Counter[str]]:
    """Return how many found heads answer, how many were found, and the roles of the others."""
    total: Counter[str] = sum(map(Counter, counts), Counter())
    others = Counter({role: n for role, n in total.items() if role not in ANSWERING})
    return total.total() - others.total(), total.total(), others


def _recovery_table(recovered: Mapping[str, Sequence[Any]]) -> str:
    rows = []
    for name, method in METHODS.items():
        values = []
        for some in recovered.values():
            n, k, others = _found([one[name] for one in some])
            extra = [f", {count} {role}{'s' * (count > 1 and role != 'noise')}" for role, count in others.items()]
            values.append("".join([f"**{n} of {k}**" if n == k else f"{n} of {k}", *extra]))
        rows.append([method.name, str(method.passes(64)), *values])
    return markdown.table(["method", "passes", *recovered], rows, align="lr" + "l" * len(recovered))


def _listed(words: Sequence[str]) -> str:
    return " and ".join([*[", ".join(words[:-1])] * (len(words) > 1), *words[-1:]])
