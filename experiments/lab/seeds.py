"""Verdicts on models of one architecture that were trained with different seeds: which flip, and the page of them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.lab.given import Given
from experiments.lab.pages import SEEDS, rounded
from experiments.lab.report import MARKS, in_order
from experiments.lab.results import Result, read_all
from experiments.lab.study import RANKINGS, Ranking, StudySettings, folder_of
from experiments.lab.verdict import Outcome
from icl_lens.errors import InputError
from icl_lens.files import write_text
from icl_lens.models.load import bundled_models

PAGE = SEEDS
"""The page's name among the documentation's pages of results; its numbers are beside it, in a .json file."""

Place = tuple[str, Ranking]
"""An experiment's id, and by what heads are located."""


@dataclass(frozen=True)
class Trained:
    """Folders of models that are the same but for the seed they were trained with, under a common name."""

    name: str
    folders: tuple[str, ...]

    def settings(self, *, n: int, task: str) -> tuple[StudySettings, ...]:
        """Of a study of each."""
        return tuple(StudySettings(model=folder, n=n, task=task) for folder in self.folders)


def trained(given: Sequence[str]) -> list[Trained]:
    """What "NAME=FOLDER,FOLDER,…" names; raises InputError for what is not of that form, and for what is no folder.

    A bundled model's name stands for its folder.

    Results lie under a folder's own name, so no two folders may have the same.
    """
    found = []
    for one in given:
        name, equals, listed = one.partition("=")
        folders = tuple(folder.strip() for folder in listed.split(","))
        if not (name.strip() and equals and all(folders)):
            raise InputError(f"{one!r} is not of the form NAME=FOLDER,FOLDER; give an architecture's folders so")
        for folder in folders:
            if not Path(folder).is_dir() and folder not in bundled_models():
                raise InputError(
                    f"there is no folder {folder!r}, of {name.strip()!r}; give folders of saved models, or the name of "
                    "a bundled one"
                )
        found.append(Trained(name.strip(), folders))
    if len({one.name for one in found}) < len(found):
        raise InputError("a name is given twice; give all folders of an architecture behind one name")
    own = Counter(str(folder_of(StudySettings(model=folder)).parent) for one in found for folder in one.folders)
    twice = [name for name, count in own.items() if count > 1]
    if twice:
        raise InputError(f"two folders are called {twice[0]!r}, and so would their results; rename one")
    return found


def write_seeds(models: Sequence[Trained], out: Path, page: Path, *, n: int, task: str, order: Sequence[str]) -> None:
    """Writes the page, and its numbers beside it (.json), from the results under `out`; raises InputError for none."""
    wanted = {
        folder_of(settings): (one.name, folder_of(settings).parts[0])
        for one in models
        for settings in one.settings(n=n, task=task)
    }
    results: dict[tuple[str, str], list[Result]] = {place: [] for place in wanted.values()}
    for path, result in read_all(out):
        place = wanted.get(path.parent.relative_to(out))
        if place is not None and result.id in order:
            results[place].append(result)
    write_text(page, seeds_page(results, n=n, task=task, order=order))
    given = Given.of([result for of_model in results.values() for result in of_model])
    named = {seed: name for name, seed in results}
    rows = [
        {
            **asdict(verdict),
            "id": result.id,
            "architecture": named[result.model],
            "model": result.model,
            "by": by,
            "holm": holm,
        }
        for result, by, verdict, holm in given.every()
    ]
    write_text(page.with_suffix(".json"), json.dumps(rounded(rows), indent=1, ensure_ascii=False) + "\n")


def seeds_page(results: Mapping[tuple[str, str], Sequence[Result]], *, n: int, task: str, order: Sequence[str]) -> str:
    """The page, from the results of each architecture and seed: what flips, then every verdict."""
    every = [result for of_model in results.values() for result in of_model]
    given = Given.of(every)
    names = list(dict.fromkeys(name for name, _ in results))
    ids = in_order((result.id for result in every), order)
    judged = {(one.id, ranking) for one in every for ranking in one.verdicts}
    places: list[Place] = [(name, ranking) for name in ids for ranking in RANKINGS if (name, ranking) in judged]
    outcomes: dict[tuple[Place, str], list[Outcome]] = {
        (place, name): [
            one.verdicts[place[1]].outcome
            for (architecture, _), of_model in results.items()
            for one in _of(of_model, place[0])
            if architecture == name and place[1] in one.verdicts
        ]
        for place in places
        for name in names
    }
    kinds = Counter(kind(seen) for seen in outcomes.values() if seen)
    lines = [
        "# Training seeds",
        "",
        "Made by `python -m experiments seeds`: claims on models of one architecture that differ in the seed they "
        f"were trained with, {_prompts(results, n)} of {task} each. "
        "A claim **flips** if it is supported with one seed and not supported with another: what it says is then about "
        "a model, not about the architecture or the task. It is unsure if it is undecided with some seeds only. Only "
        "seed 0 is in the package; the [index](index.md) may judge it on more prompts, and not always alike. "
        "[How verdicts are given](../verdicts.md) has the rules.",
        "",
        f"Of {sum(kinds.values())} claims, by architecture and ranking of heads, {kinds['same']} have the same verdict "
        f"with every seed, {kinds['flips']} flip and {kinds['unsure']} are unsure. {given} † marks those.",
        "",
        "| experiment | heads | " + " | ".join(names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for place in places:
        cells = [summary(outcomes[place, name]) for name in names]
        lines.append(f"| [{place[0]}]({place[0]}.md) | {_by(place, every)} | " + " | ".join(cells) + " |")
    for name in names:
        lines += ["", f"## {name}", "", *_of_architecture(name, results, places, given)]
    return "\n".join([*lines, "", f"The numbers as a file: {{download}}`{Path(PAGE).with_suffix('.json')}`.", ""])


def _prompts(results: Mapping[tuple[str, str], Sequence[Result]], n: int) -> str:
    """How many prompts, and which models were asked another number, as the results themselves say it."""
    other: dict[int, list[str]] = {}
    for (_, model), of_model in results.items():
        for asked in sorted({int(one.configuration["n"]) for one in of_model} - {n}):
            other.setdefault(asked, []).append(model)
    listed = "; ".join(f"{', '.join(models)}: {asked:,}" for asked, models in other.items())
    return f"{n:,} prompts ({listed})" if listed else f"{n:,} prompts"


def _of_architecture(
    name: str,
    results: Mapping[tuple[str, str], Sequence[Result]],
    places: Sequence[Place],
    given: Given,
) -> list[str]:
    """Every verdict on one architecture's models, a column for each seed."""
    seeds = {seed: of_model for (architecture, seed), of_model in results.items() if architecture == name}
    every = [result for of_model in seeds.values() for result in of_model]
    accuracies = []
    for of_model in seeds.values():
        able = of_model[0].competence if of_model else None
        accuracies.append("–" if able is None else f"{able.accuracy:.1%} [{able.low:.1%}, {able.high:.1%}]")
    lines = [
        "| experiment | heads | " + " | ".join(seeds) + " | with all seeds |",
        "|---|---|" + "---|" * (len(seeds) + 1),
        "| accuracy, both labels, orders and classes | | " + " | ".join(accuracies) + " | |",
    ]
    for place in places:
        cells, seen = [], []
        for of_model in seeds.values():
            found = [one for one in _of(of_model, place[0]) if place[1] in one.verdicts]
            cells.append(_cell(found[0], place[1], given) if found else "–")
            seen += [one.verdicts[place[1]].outcome for one in found]
        row = [place[0], _by(place, every), *cells, summary(seen)]
        lines.append("| " + " | ".join(row) + " |")
    return lines


def _of(results: Sequence[Result], name: str) -> list[Result]:
    return [result for result in results if result.id == name]


def _by(place: Place, results: Sequence[Result]) -> str:
    """By what heads are located; nothing where the claim is about none."""
    both = any("contrast" in one.verdicts for one in _of(results, place[0]))
    return f"by {place[1]}" if both else ""


def _cell(result: Result, ranking: Ranking, given: Given) -> str:
    verdict = result.verdicts[ranking]
    mark = "" if given.survives(result, ranking) else " †"
    said = f"{MARKS[verdict.outcome]} {verdict.outcome}{mark}"
    if verdict.low != verdict.low:
        return said
    return f"{said}<br>{verdict.effect:.3g} [{verdict.low:.3g}, {verdict.high:.3g}] {verdict.unit}"


def kind(outcomes: Sequence[Outcome]) -> str:
    """What seeds do to a verdict: "same", "flips" (supported and not supported), "unsure" (undecided with some); or
    "none" for no verdicts.
    """
    seen = {*outcomes}
    if not seen:
        return "none"
    if {"supported", "not supported"} <= seen:
        return "flips"
    return "same" if len(seen) == 1 else "unsure"


def summary(outcomes: Sequence[Outcome]) -> str:
    """The verdicts of all seeds in a few words: "● supported, 3 of 3", "**flips**: ● 2, ✕ 1"."""
    which, count = kind(outcomes), Counter(outcomes)
    if which == "none":
        return "–"
    if which == "same":
        return f"{MARKS[outcomes[0]]} {outcomes[0]}, {len(outcomes)} of {len(outcomes)}"
    shown = ", ".join(f"{mark} {count[outcome]}" for outcome, mark in MARKS.items() if count[outcome])
    return f"**flips**: {shown}" if which == "flips" else f"unsure: {shown}"
