"""Results judged anew from their tables, by the rules and captions of today: no model, no prompt is needed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from matplotlib import rc_context

from experiments.lab import competence
from experiments.lab.drawing import STYLE
from experiments.lab.experiment import Experiment
from experiments.lab.results import Result, read_all, save_figures, save_result
from experiments.lab.study import Ranking
from experiments.lab.verdict import Verdict
from icl_lens.errors import InputError


@dataclass(frozen=True)
class Rejudged:
    """What came of it: a folder, and in words what became of its verdicts; nothing where they are as they were."""

    folder: Path
    changes: tuple[str, ...]
    failed: str = ""
    """Why it could not be judged, if so."""


def rejudge(out: Path, *, find: Callable[[str], Experiment], figures: bool = True) -> Iterator[Rejudged]:
    """Judges every result under a folder by the rules of this program, with its captions, and draws its figures anew.

    Tables, configurations and versions stay. A table of another program's columns, and a result of no experiment that
    there is, stay as they are and are told. Raises InputError if there are no results, or one cannot be read.
    """
    for folder, old in read_all(out):
        try:
            experiment = find(old.id)
            table = pd.read_parquet(folder / "table.parquet")
            with rc_context(STYLE):
                new = judged(experiment, table, old)
                if figures:
                    save_figures(folder, experiment.figures(table))
        except (InputError, OSError, KeyError, ValueError, IndexError, TypeError) as error:
            why = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
            yield Rejudged(folder, (), why)
            continue
        if new.to_json() != old.to_json():
            save_result(folder, new)
        yield Rejudged(folder, tuple(_changes(old, new)))


def judged(experiment: Experiment, table: pd.DataFrame, old: Result) -> Result:
    """The result with the verdicts and captions of this program."""
    verdicts = verdicts_on(experiment, table, old.competence)
    return replace(old, **experiment.caption(), verdict=verdicts["increase"], contrast=verdicts.get("contrast"))


def verdicts_on(experiment: Experiment, table: pd.DataFrame, able: competence.Competence) -> dict[Ranking, Verdict]:
    """An experiment's verdicts on a table; a claim about how a model does the task is open where it does not."""
    found = experiment.verdicts(table)
    if not experiment.mechanism:
        return found
    return {ranking: competence.gated(verdict, able) for ranking, verdict in found.items()}


def _changes(old: Result, new: Result) -> Iterator[str]:
    """By ranking, which outcome became which other."""
    before: Mapping[str, object] = {ranking: verdict.outcome for ranking, verdict in old.verdicts.items()}
    for ranking, verdict in new.verdicts.items():
        was = before.get(ranking, "no verdict")
        if was != verdict.outcome:
            yield f"by {ranking}: {was} → {verdict.outcome}"
