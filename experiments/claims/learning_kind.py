"""What kind of learning: accuracy by demonstrations, classes and labels; task recognition against task learning.

Labels name the class (right), name the other class (exchanged), are drawn for each demonstration (random; Min et al.
2022), or mean nothing (arbitrary). A model that only recognises the task says the class's name whatever the
demonstrations say, also where they are drawn; one that learns says what they gave the class, also where it means the
other class or nothing (Pan et al. 2023: random and abstract labels; Wei et al. 2023: flipped ones).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import icl_lens as il
from experiments.claims.shots import ARBITRARY, Kind, Row, classes_of, names_of, rows_of
from experiments.lab.controls import beside
from experiments.lab.drawing import WHISKERS, legend_below, means, whiskers
from experiments.lab.editing import BAR, FOO, Sets, located_for_both, side_by_side
from experiments.lab.experiment import NO_HEADS, Experiment
from experiments.lab.frames import by_prompt, stack, where
from experiments.lab.passes import Tensors, joined
from experiments.lab.reductions import head_increases
from experiments.lab.study import ASKED, Need, Study, Variant
from experiments.lab.verdict import SHARE, Verdict, all_of, any_of, cannot_tell, judge, told, verdict
from icl_lens.interventions.head_sets import answers_without
from icl_lens.report.palette import BLUE, GREEN, GREY, ORANGE, PINK
from icl_lens.report.plots import PAGE

KINDS: dict[Kind, tuple[str, str, str]] = {
    "right": ("names, right", GREEN, "o-"),
    "exchanged": ("names, exchanged", ORANGE, "s-"),
    "random": ("names, at random", PINK, "v-"),
    "arbitrary": ("labels without meaning", BLUE, "^-"),
}
"""How each kind of labels is told and drawn."""
JUDGED = 8
"""Demonstrations at which verdicts are given; fewer where a prompt of so many does not fit."""
MARGIN = 0.05
"""Accuracy beyond chance that is worth the claim."""


@dataclass(frozen=True)
class LearningKindConfig:
    """Prompts of each condition (as many as are under study, if these are fewer); numbers of demonstrations; of
    classes, and of demonstrations of each; heads; sets.
    """

    prompts: int = 200
    shots: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    classes: tuple[int, ...] = (3, 4)
    each: tuple[int, ...] = (2, 4)
    heads: int = 6
    draws: int = 5


@dataclass
class _Made:
    """The rows of the table so far, and numbers of queries."""

    study: Study
    frames: list[pd.DataFrame] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def add(self, rows: Sequence[Row], found: Tensors | None, **columns: object) -> None:
        """A condition: NaN where nothing was found."""
        queries = [self.numbers.setdefault(row.query, len(self.numbers)) for row in rows]
        frame = pd.DataFrame({"prompt": [row.number for row in rows], "query": queries})
        for name in ("correct", "vocabulary"):
            frame[name] = np.nan if found is None else found[name].double().numpy()
        self.frames.append(frame.assign(layer=-1, **columns))


def table(study: Study, config: LearningKindConfig) -> pd.DataFrame:
    """classes, kind (of KINDS), shots, group ("none" | "located" | "random"), name, layer, prompt, query, correct, …

    `correct` (0 or 1): the label that is right is the likeliest of the labels; `vocabulary`: of all tokens. NaN where
    prompts do not fit the context, or the words or the vocabulary have not enough for them. Heads are set to zero, all
    together, at the number of demonstrations that is judged, where the query is no word that heads are located on;
    each class is asked as often.
    """
    made = _Made(study)
    pair = classes_of(study.settings.task, study.settings.path, 2)
    names = names_of(study, pair)
    labels = {kind: ARBITRARY[:2] if kind == "arbitrary" else names for kind in KINDS}
    most = min(config.prompts, study.settings.n)
    rows = _rows(study, pair, most, config.shots)
    for kind in KINDS:
        for shots in config.shots:
            found = _said(study, rows, kind, labels[kind], shots)
            made.add(rows, found, classes=2, kind=kind, shots=shots, group="none", name="")
    judged_at = _judged_at(stack(*made.frames))
    for count in config.classes:
        for each in config.each:
            several = _several(study, count, most, count * each)
            found = _said(study, several, "arbitrary", ARBITRARY[:count], count * each) if several else None
            common = {"classes": count, "kind": "arbitrary", "shots": count * each}
            made.add(several or rows, found, **common, group="none", name="")
    # Heads are located on some words: what they cost is measured on others, as many of either class.
    tested = {study.prompts(Variant(asked=asked))[row].query for asked in ASKED for row in study.apart[1].tolist()}
    others = [row for row in rows if row.query in tested]
    each = min(sum(row.asked == side for row in others) for side in (0, 1))
    others = [row for side in (0, 1) for row in [row for row in others if row.asked == side][:each]]
    if judged_at > 0 and others:
        heads = located_for_both(study, study.few(config.heads))
        sets = [("located", "located", heads)]
        sets += [("random", f"set {i}", drawn) for i, drawn in enumerate(study.controls(heads, config.draws))]
        for kind in KINDS:
            every = _said_without(study, others, kind, labels[kind], judged_at, [removed for *_, removed in sets])
            for (group, name, _), found in zip(sets, every, strict=True):
                made.add(others, found, classes=2, kind=kind, shots=judged_at, group=group, name=name)
    return stack(*made.frames)


def _rows(study: Study, classes: Sequence[str], n: int, shots: Sequence[int]) -> list[Row]:
    """Rows with as many demonstrations as the words allow, of these numbers; raises InputError if they allow none."""
    path, seed = study.settings.path, study.settings.seed
    for most in sorted({*shots} - {0}, reverse=True)[:-1]:
        try:
            return rows_of(classes, path, n, most, seed)
        except il.InputError:
            continue
    return rows_of(classes, path, n, min({*shots} - {0}), seed)


def _several(study: Study, count: int, n: int, shots: int) -> list[Row] | None:
    """Rows of more classes; None where the word list has too few categories or words."""
    try:
        return rows_of(
            classes_of(study.settings.task, study.settings.path, count),
            study.settings.path,
            n,
            shots,
            study.settings.seed,
        )
    except il.InputError:
        return None


def _shown(
    study: Study, rows: Sequence[Row], kind: Kind, labels: Sequence[str] | None, shots: int
) -> il.PromptBatch | None:
    """A condition's prompts, with one demonstration where there are to be none; None where they cannot be made."""
    if labels is None or shots > len(rows[0].shown):
        return None
    prompts = [row.prompt(kind, labels, max(shots, 1)) for row in rows]
    try:
        return il.tokenize(study.model, prompts, template=study.settings.template, labels=labels)
    except il.InputError:
        return None


def _said(study: Study, rows: Sequence[Row], kind: Kind, labels: Sequence[str] | None, shots: int) -> Tensors | None:
    """Whether the model is right on a condition's rows; None where they cannot be put to it."""
    shown = _shown(study, rows, kind, labels, shots)
    if shown is None or labels is None:
        return None
    batch = shown
    if not shots:
        try:
            batch = study.alone([row.query for row in rows])
        except il.InputError:
            return None
    right = shown.label_tokens[[list(labels).index(row.answer(kind, labels)) for row in rows]]
    pieces = _pieces(study, shown)

    def said(i: int) -> Tensors:
        log_probs = il.last_log_probs(study.model, batch[pieces[i]]).cpu()
        own = log_probs.gather(1, right[pieces[i]].cpu()[:, None])
        among = log_probs[:, shown.label_tokens.cpu()]
        return {
            "correct": (own[:, 0] >= among.max(-1).values).float(),
            "vocabulary": (log_probs.argmax(-1) == right[pieces[i]].cpu()).float(),
        }

    what = f"{shots} demonstrations, {KINDS[kind][0]}, {len(labels)} classes"
    return joined(study.passes.run(what, [len(rows[piece]) for piece in pieces], said))


def _said_without(
    study: Study,
    rows: Sequence[Row],
    kind: Kind,
    labels: Sequence[str] | None,
    shots: int,
    sets: Sequence[list[il.Head]],
) -> list[Tensors | None]:
    """The same without each set of heads."""
    shown = _shown(study, rows, kind, labels, shots)
    if shown is None:
        return [None] * len(sets)

    def said(batch: il.PromptBatch, some: Sets) -> Tensors:
        found = answers_without(study.model, batch, some)
        own = [one.label_log_probs.gather(1, one.answer[:, None])[:, 0] for one in found]
        correct = [mine >= one.label_log_probs.max(-1).values for mine, one in zip(own, found, strict=True)]
        return {
            "correct": torch.stack(correct, dim=1).float(),
            "vocabulary": torch.stack([one.right for one in found], dim=1).float(),
        }

    what = f"{shots} demonstrations, {KINDS[kind][0]}, without heads"
    found = side_by_side(study, what, study.pieces(shown), sets, said, cost=1.0)
    return [{name: values[:, i] for name, values in found.items()} for i in range(len(sets))]


def _pieces(study: Study, shown: il.PromptBatch) -> list[slice]:
    """Rows that fit into memory together."""
    size = len(study.pieces(shown)[0])
    return [slice(start, start + size) for start in range(0, len(shown), size)]


def claim(table: pd.DataFrame) -> Verdict:
    """The model says what demonstrations gave the class, where that is the other class's name and where it is no name.

    Undecided for a model to which the names mean nothing, neither alone nor given at random: exchanging them would
    exchange nothing.
    """
    whole = where(table, group="none", classes=2)
    judged_at = _judged_at(whole)
    if judged_at == 0:
        return cannot_tell("no demonstrations fit this model's context and vocabulary", unit="accuracy")
    at = {kind: by_prompt(whole, "correct", kind=kind, shots=judged_at) for kind in KINDS}
    least = 0.5 + MARGIN

    def beyond(kind: Kind, what: str) -> Verdict:
        return judge(at[kind], least=least, unit="accuracy", what=what, bounds=SHARE)

    arbitrary = beyond("arbitrary", f"labels without meaning, {judged_at} demonstrations")
    notes = [*_curves(whole), *_more_classes(table), *_unfit(table)]
    if at["right"].isna().all():
        why = "the model has no words for the classes' names, so that what it learns against them cannot be asked"
        return told(cannot_tell(why, unit="accuracy"), arbitrary.reason, *notes)
    alone = by_prompt(whole, "correct", kind="right", shots=0)
    recognised = beyond("random", "names given at random, the class's own chosen")
    known = any_of(judge(alone, least=least, unit="accuracy", what="names alone", bounds=SHARE), recognised)
    notes = [f"recognises the task: {recognised.outcome} ({recognised.reason})", *notes, *_heads(table)]
    if known.outcome != "supported":
        why = f"the names mean nothing to the model ({known.reason}), and exchanging them exchanges nothing"
        return told(cannot_tell(why, unit="accuracy"), arbitrary.reason, *notes)
    exchanged = beyond("exchanged", f"names exchanged, as {judged_at} demonstrations have them")
    return told(all_of(exchanged, arbitrary), *notes)


def _judged_at(whole: pd.DataFrame) -> int:
    """The largest number of demonstrations up to JUDGED with prompts of every kind of labels there is."""
    there = whole.dropna(subset=["correct"])
    there = there.loc[(there["shots"] > 0) & (there["shots"] <= JUDGED)]
    of_kinds = [{int(shots) for shots in where(there, kind=kind)["shots"]} for kind in KINDS]
    if not of_kinds[list(KINDS).index("arbitrary")]:
        return 0
    return max(set.intersection(*(shots for shots in of_kinds if shots)), default=0)


def _share(values: Any) -> str:
    return "–" if values.isna().all() else f"{values.mean():.0%}"


def _curves(whole: pd.DataFrame) -> list[str]:
    """Accuracy by demonstrations, between labels and over the vocabulary."""
    shots = sorted({int(one) for one in whole["shots"]})
    lines = []
    for kind, (name, *_) in KINDS.items():
        both = [
            "/".join(_share(where(whole, kind=kind, shots=one)[column]) for column in ("correct", "vocabulary"))
            for one in shots
        ]
        lines.append(f"{name}: {', '.join(both)}")
    header = f"with {', '.join(map(str, shots))} demonstrations, between labels/over the vocabulary: "
    return [header + "; ".join(lines)]


def _more_classes(table: pd.DataFrame) -> list[str]:
    """Accuracy on more than two classes."""
    parts = []
    for count in sorted({int(one) for one in table["classes"]} - {2}):
        for shots in sorted({int(one) for one in where(table, classes=count)["shots"]}):
            share = _share(where(table, classes=count, shots=shots)["correct"])
            parts.append(f"{count} classes with {shots} demonstrations: {share} (chance {1 / count:.0%})")
    return [", ".join(parts)] if parts else []


def _unfit(table: pd.DataFrame) -> list[str]:
    """Which conditions could not be put to the model."""
    found: Any = table.groupby(["classes", "kind", "shots"])["correct"].count()
    missing = sorted({(int(c), int(s)) for (c, kind, s), there in found.items() if not there and kind == "arbitrary"})
    if not missing:
        return []
    named = ", ".join(f"{shots} of {count} classes" for count, shots in missing)
    return [f"demonstrations that do not fit the model's context, its vocabulary or the word list: {named}"]


def _heads(table: pd.DataFrame) -> list[str]:
    """What accuracy loses without located heads, beyond random sets of their layers."""
    lines = []
    for kind, (name, *_) in KINDS.items():
        part = where(table, kind=kind, classes=2)
        part = part.loc[part["group"] != "none"]
        if not len(part) or part["correct"].isna().all():
            continue
        sets = beside(part, "correct")
        gap = verdict(
            sets.drawn.estimate(sets.random - sets.located), least=0.0, unit="of accuracy", what=f"{name}, cost"
        )
        lines.append(
            f"{name} {sets.located[0]:.0%} (beside {sets.random[0]:.0%}: {gap.effect:.2g} [{gap.low:.2g}, "
            f"{gap.high:.2g}])"
        )
    return [f"without located heads (beside random sets: cost): {', '.join(lines)}"] if lines else []


def figure(table: pd.DataFrame) -> Figure:
    """Accuracy by demonstrations and labels; by classes; without located and random heads. 95 % intervals."""
    drawn = Figure(figsize=(PAGE, 3.0), layout="constrained")
    left, middle, right = drawn.subplots(1, 3, sharey=True, width_ratios=(1.3, 0.8, 1.2))
    whole = where(table, group="none", classes=2)
    shots = sorted({int(one) for one in whole["shots"]})
    at = np.arange(len(shots))
    for kind, (name, hue, style) in KINDS.items():
        samples = [by_prompt(whole, "correct", kind=kind, shots=one).dropna() for one in shots]
        left.plot(at, means(samples), style, color=hue, markersize=3.5, linewidth=1, label=name)
        left.errorbar(at, means(samples), yerr=whiskers(samples), fmt="none", ecolor=hue, elinewidth=0.8, capsize=1.5)
        every = [by_prompt(whole, "vocabulary", kind=kind, shots=one).dropna() for one in shots]
        label = "the same over the vocabulary" if kind == "arbitrary" else None
        left.plot(at, means(every), ":", color=hue, linewidth=1, label=label)
    left.axhline(0.5, color="0.3", linewidth=0.6, linestyle="--")
    left.set_xticks(at, [str(one) for one in shots])
    left.set(xlabel="Demonstrations", ylabel="Accuracy (0–1)", ylim=(-0.03, 1.05), title="Two classes")
    _draw_classes(middle, table)
    _draw_heads(right, table)
    legend_below(drawn, left, right, columns=3)
    return drawn


def _draw_classes(ax: Axes, table: pd.DataFrame) -> None:
    """Bars of accuracy by number of classes and of demonstrations of each; chance as a line on each."""
    several = where(table, kind="arbitrary", group="none")
    places = []
    for count in sorted({int(one) for one in several["classes"]} - {2}):
        part = where(several, classes=count)
        places += [(count, int(shots)) for shots in sorted(set(part["shots"]))]
    samples = [by_prompt(several, "correct", classes=count, shots=shots).dropna() for count, shots in places]
    at = np.arange(len(places))
    ax.bar(at, means(samples), width=0.7, color=BLUE)
    ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
    for x, (count, _) in zip(at, places, strict=True):
        ax.plot([x - 0.4, x + 0.4], [1 / count] * 2, color="0.2", linewidth=0.8, linestyle="--")
    ax.set_xticks(at, [f"{count}\n{shots}" for count, shots in places])
    ax.set(xlabel="Classes,\ndemonstrations", title="More classes")


def _draw_heads(ax: Axes, table: pd.DataFrame) -> None:
    """Bars of accuracy by labels: nothing, random heads, located heads removed."""
    two = where(table, classes=2)
    edited = two.loc[two["group"] != "none"]
    judged_at = int(edited["shots"].max()) if len(edited) else _judged_at(where(two, group="none"))
    part = where(two, shots=judged_at)
    groups = {"none": ("nothing removed", "0.8"), "random": ("random heads removed", GREY)}
    groups["located"] = ("located heads removed", "0.15")
    if len(edited):
        part = part.loc[part["prompt"].isin(edited["prompt"])]
    for place, (group, (name, hue)) in enumerate(groups.items()):
        samples = [by_prompt(part, "correct", kind=kind, group=group).dropna() for kind in KINDS]
        at = np.arange(len(KINDS)) + 0.27 * (place - 1)
        ax.bar(at, means(samples), width=0.25, color=hue, label=name)
        ax.errorbar(at, means(samples), yerr=whiskers(samples), **WHISKERS)
    ax.axhline(0.5, color="0.3", linewidth=0.6, linestyle="--")
    ax.set_xticks(range(len(KINDS)), ["right", "exch.", "random", "arbitr."])
    ax.set(xlabel=f"Labels, {judged_at} demonstrations", title="Without heads")


EXPERIMENT = Experiment(
    id="learning-kind",
    title="What kind of learning",
    source="Open (section 2.1 leads one to expect the opposite for labels with a meaning)",
    claim="The model learns what labels mean from its demonstrations, also against what their names mean to it.",
    criterion=(
        "With the classes' names exchanged in the demonstrations, and with labels without meaning, accuracy by what "
        "the demonstrations say is beyond chance by five points with 8 demonstrations (fewer where 8 do not fit). "
        "Undecided where the names mean nothing to the model, neither alone nor given at random."
    ),
    about=NO_HEADS,
    paper=None,
    departs=(
        "Section 2.1 expects the opposite where labels have a meaning: a model that keeps to what it knows when they "
        "are "
        "exchanged. So a claim that is not supported because of the exchanged names agrees with the paper. "
        "The paper itself uses labels without meaning only, with four demonstrations of two classes. Labels with a "
        "meaning, exchanged and random ones, other numbers of demonstrations and more classes are added. Label words "
        "are the experiment's own, whatever those of the study are."
    ),
    config=LearningKindConfig(),
    needs=(Need(FOO, head_increases), Need(BAR, head_increases)),
    table=table,
    verdict=claim,
    figure=figure,
    mechanism=False,
)
