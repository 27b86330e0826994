"""Verdicts by today's rules from tables that are there, and what is said of those that cannot be judged."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import test_experiments_verdicts as paper

import icl_lens as il
from experiments.catalogue import find
from experiments.lab.competence import Competence
from experiments.lab.rejudge import rejudge
from experiments.lab.results import Result, read_all, save
from experiments.lab.verdict import Verdict

YESTERDAY = Verdict("undecided", 0.1, 0.0, 0.2, "nats", "an old rule", 0.5)


def two_rankings(table: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([paper.asked(table).assign(by=by) for by in ("increase", "contrast")])


def stored(out: Path, named: str, table: pd.DataFrame, *, accuracy: float = 0.9, **changes: Any) -> Path:
    """A result as another version wrote it."""
    experiment = find(named)
    able = Competence(accuracy, accuracy - 0.05, accuracy + 0.05, 0.5)
    result = Result(
        **experiment.caption(),
        model="icl-mini",
        task="x",
        configuration={"n": 20},
        verdict=YESTERDAY,
        contrast=YESTERDAY,
        competence=able,
        heads=(),
        versions={"torch": "1"},
    )
    folder = out / "icl-mini" / "x" / named
    save(folder, replace(result, claim="an old claim", **changes), table, {})
    return folder


def test_verdicts_captions_and_figures_are_those_of_today(tmp_path: Path) -> None:
    table = two_rankings(paper.unbalanced(0.3, 0.3))
    folder = stored(tmp_path, "imbalance", table)
    before = (folder / "table.parquet").read_bytes()
    (one,) = rejudge(tmp_path, find=find)
    assert one.changes == ("by increase: undecided → supported", "by contrast: undecided → supported")
    new = Result.read(folder)
    assert new.verdicts == find("imbalance").verdicts(table)
    assert (new.claim, new.configuration, new.versions) == (find("imbalance").claim, {"n": 20}, {"torch": "1"})
    assert (folder / "table.parquet").read_bytes() == before
    for name in ("figure.png", "figure.pdf", "figure-contrast.png"):
        assert (folder / name).stat().st_size > 1000
    (again,) = rejudge(tmp_path, find=find, figures=False)
    assert again.changes == ()


def test_a_model_that_does_not_do_the_task_stays_undecided(tmp_path: Path) -> None:
    folder = stored(tmp_path, "imbalance", two_rankings(paper.unbalanced(0.3, 0.3)), accuracy=0.5)
    (one,) = rejudge(tmp_path, find=find, figures=False)
    assert (one.changes, Result.read(folder).verdict.outcome) == ((), "undecided")
    assert "does not do the task" in Result.read(folder).verdict.reason


def test_what_cannot_be_judged_is_told_and_stays(tmp_path: Path) -> None:
    """A table of another version's columns, and an experiment that there is no more; the others are judged."""
    short = two_rankings(paper.unbalanced(0.3, 0.3)).drop(columns="attention")
    stored(tmp_path / "a", "imbalance", short)
    stored(tmp_path / "a", "order", two_rankings(paper.attended(0.4, 0.2, 0.2, 0.3)))
    gone = stored(tmp_path / "a", "layers", short, id="gone")
    bytes_before = {path: path.read_bytes() for path in (gone / "result.json",)}
    found = {one.folder.name: one for one in rejudge(tmp_path / "a", find=find)}
    assert found["order"].changes
    assert "attention" in found["imbalance"].failed
    assert "gone" in found["layers"].failed
    assert all(path.read_bytes() == was for path, was in bytes_before.items())
    assert {result.verdict.outcome for folder, result in read_all(tmp_path / "a") if folder.name != "order"} == {
        "undecided"
    }
    with pytest.raises(il.InputError, match="there are no results"):
        next(rejudge(tmp_path / "b", find=find))


def test_the_command_says_what_changed(tmp_path: Path) -> None:
    stored(tmp_path, "imbalance", two_rankings(paper.unbalanced(0.3, 0.3)))
    command = [sys.executable, "-m", "experiments", "rejudge", "--out", str(tmp_path), "--no-figures"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "by increase: undecided → supported, by contrast: undecided → supported" in said
    stored(tmp_path, "layers", pd.DataFrame({"prompt": [1]}))
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "layers: stays as it is" in again.stdout
    assert "imbalance" not in again.stdout


def test_without_scipy_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys, runpy; sys.modules['scipy'] = None; sys.argv = ['experiments', 'list']; "
        "runpy.run_module('experiments', run_name='__main__')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.strip().splitlines() == [
        "experiments: scipy is not installed, which verdicts need; pip install -e '.[experiments]'"
    ]
