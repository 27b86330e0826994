"""Findings see two towers where they are planted and nowhere else, and location recovers the planted heads."""

import shutil
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import icl_lens as il
from experiments import ground_truth as truth
from experiments.catalogue import IDS, find
from experiments.framework.run import run
from experiments.planted import Kind, Planted

QUICK = ("label-attention", "two-towers")
FEW = {name: truth.SETTINGS[name] for name in ("two-tower", "compare-copy", "last-label", "majority")}
PLANTED = sorted(truth.PLANTED)

Models = dict[tuple[Kind, int], Planted]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return truth.planted_models(tmp_path_factory.mktemp("models"), seeds=(0,))


@pytest.fixture(scope="module")
def load() -> Callable[[str], Any]:
    """Load every model once."""
    return cache(partial(il.load_model, device="cpu"))


@pytest.fixture(scope="module")
def quick(models: Models, load: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the cells of the quick findings."""
    folder = tmp_path_factory.mktemp("quick")
    run(truth.cells(models, list(map(find, QUICK)), 24, FEW), folder, load=load, report=lambda _: None)
    return folder


def observe(folder: Path, ids: tuple[str, ...], settings: Mapping[str, Any]) -> truth.Table:
    found = truth.observe(folder, list(map(find, ids)))
    assert [key for key in truth.EXPECTED if key[0] in ids] == list(found)
    assert all(row.keys() == settings.keys() for row in found.values())
    return found


def unexpected(found: truth.Table) -> list[str]:
    return [
        f"{about}, {name}, {setting}: {one.rows}"
        for (about, name), row in found.items()
        for setting, one in row.items()
        if not (one.as_expected or one.explained)
    ]


@pytest.mark.slow
def test_quick_findings_see_what_was_planted(quick):
    assert not unexpected(observe(quick, QUICK, FEW))


@pytest.mark.slow
def test_all_findings_see_what_was_planted(models, load, tmp_path):
    run(truth.cells(models, list(map(find, IDS)), 60), tmp_path, load=load, report=lambda _: None)
    assert not unexpected(observe(tmp_path, IDS, truth.SETTINGS))


def test_every_finding_has_an_expectation_that_a_control_can_miss():
    assert {about for about, _ in truth.EXPECTED} == {*IDS}
    for (about, name), one in truth.EXPECTED.items():
        assert name in [measure.name for measure in find(about).measures]
        assert {*one.above, *one.explained} < {*truth.SETTINGS}
        assert bool(one.why) or not {*one.above} & {*one.explained}
    mains = {(one, find(one).main.name) for one in IDS}
    assert mains <= truth.EXPECTED.keys()


@pytest.mark.parametrize("kind", ["two-tower", pytest.param("compare-copy", marks=pytest.mark.slow)])
def test_location_recovers_planted_heads(models, load, kind):
    found = truth.recovery(models[kind, 0], 24, load)
    role, k = {"two-tower": ("two-tower", 4), "compare-copy": ("copier", 3)}[kind]
    assert found["contrast"][role] == k  # all that write the answer
    assert kind != "two-tower" or found["contrast"] == {role: k}  # precision and recall 1
    assert found["increase"]["decoy"] >= 1
    assert found["effects"]["mover"] == 1
    for name in ("attention", "tracing"):
        assert {*found[name]} <= {*truth.ANSWERING}


@pytest.mark.slow
def test_page_marks_what_is_not_as_predicted(quick, tmp_path):
    findings, folder = [find("label-attention")], tmp_path / "cells"
    shutil.copytree(quick, folder)
    recovered = {kind: [{name: {"two-tower": 3, "decoy": 1} for name in truth.METHODS}] for kind in truth.PLANTED}
    page = truth.page(folder, findings, recovered, 24)
    assert "8 pairs of measure and model, 8 are as predicted" in page
    assert "| 3 of 4, 1 decoy |" in page
    for path in folder.glob("planted-majority/*/label-attention.json"):
        source = folder / "planted-two-tower" / path.parent.name / path.name
        path.write_text(source.read_text().replace("planted two-tower", "planted majority"))
    page = truth.page(folder, findings, recovered, 24)
    assert "8 pairs of measure and model, 6 are as predicted" in page
    assert page.count(" ⚠ |") == 2  # against chance, and against other heads
