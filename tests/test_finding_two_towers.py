"""Two towers: rows are those of il.two_towers on the held-out prompts, next to the mean of the random sets."""

from typing import Any

import numpy as np
import pytest

import icl_lens as il
from experiments.findings import two_towers as finding
from experiments.framework.study import Study
from experiments.framework.tasks import PAPER_TASKS


@pytest.fixture(scope="module")
def study(icl_mini: Any) -> Study:
    return Study(icl_mini, PAPER_TASKS[1], 8)


@pytest.mark.slow
def test_rows_are_the_exchanges_of_held_out_prompts(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "N_RANDOM_SETS", 2)
    found = finding.measure(study)
    assert {row.measure for row in found.rows} == {one.name for one in finding.FINDING.measures}
    rows = {row.measure: row for row in found.rows}
    heads = rows["keys"].note.split()
    two = il.two_towers(study.model, list(study.held_out.prompts), heads[:2], n_random=2).lost
    assert rows["two heads: keys"].quantity == pytest.approx(two["keys"].value, abs=1e-4)
    assert len(heads) == study.n_located
    again = il.two_towers(study.model, list(study.held_out.prompts), heads, n_random=2).to_frame()
    for name, lost, random, accuracy in again[["exchanged", "log_odds_lost", "random", "as_predicted"]].to_numpy():
        assert (rows[name].quantity, rows[name].control) == pytest.approx((lost, random), abs=1e-4)
        if f"predicted: {name}" in rows:
            assert rows[f"predicted: {name}"].quantity == pytest.approx(accuracy)
    assert rows["two heads: keys"].n_heads == 2
    assert "'->'" in rows["arrows: keys"].note  # not a word of icl-mini
    assert rows["two heads: keys"].note.split() == heads[:2]
    assert len(finding.FINDING.draw(found.details.assign(model="icl-mini", task="animal-country")).axes) == 1


def test_scanned_and_exchanged_prompts_share_no_query(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[il.PromptBatch] = []
    original = il.locate_towers

    def locate_towers(model: Any, prompts: il.PromptBatch) -> Any:
        scanned.append(prompts)
        return original(model, prompts)

    monkeypatch.setattr(il, "locate_towers", locate_towers)
    heads = finding.scanned_heads(study)
    (batch,) = scanned
    assert not set(batch.queries) & set(study.held_out.queries)
    assert heads == original(study.model, batch).top(study.n_located)
    other = finding.replicate(study, seed=1)
    assert other.held_out.prompts != study.held_out.prompts
    assert finding.replicate(study, template=finding.ARROWS).task.template == finding.ARROWS


@pytest.mark.slow
def test_heads_whose_query_matters_least_show_no_effect(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random sets may hold heads that matter, so a difference may lie below zero."""
    heads = il.locate_towers(study.model, study.halves()[0]).top(study.n_located)
    (found,) = finding.exchanged(study, [heads], finding.EXCHANGES[:3], 3)
    assert all(row.low > 0 for row in finding.loss_rows(study, found, ""))
    idle = il.locate_towers(study.model, study.halves()[0]).top(len(study.view.heads()))[-study.n_located :]
    (found,) = finding.exchanged(study, [idle], finding.EXCHANGES[:3], 3)
    assert all(row.low <= 0 for row in finding.loss_rows(study, found, ""))


def test_random_sets_are_averaged_per_prompt(study: Study) -> None:
    found = il.two_towers(study.model, list(study.held_out.prompts), ["L4H0"], n_random=3)
    (row,) = [one for one in finding.loss_rows(study, found, "") if one.measure == "values"]
    (values,) = [one for one in found.exchanges if one.name == "values"]
    assert row.control == pytest.approx(float(np.mean(values.random_lost)))
    assert row.quantity == pytest.approx(float(np.mean(values.lost)))
