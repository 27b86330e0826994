"""Findings on icl-mini: all rows, known gaps, figures; located heads stand out, and heads chosen by chance do not."""

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tiny_study import rank_by_chance

import icl_lens as il
from experiments.catalogue import find
from experiments.findings.recency_bias import ordered
from experiments.framework import label_bias
from experiments.framework.arrangements import prompts_by_frequency
from experiments.framework.finding import Measured, rows_from_json, to_json
from experiments.framework.run import measure
from experiments.framework.study import Study
from experiments.framework.tasks import PAPER_TASKS
from icl_lens.metrics import bias_gap, is_correct, label_log_odds, majority_label, recent_label

N_PROMPTS = {
    "majority-bias": 8,
    "recency-bias": 8,
    "text-to-label": 8,
    "shared-heads": 24,
    "location": 16,
}


@pytest.fixture(scope="module")
def measured(icl_mini: Any) -> Any:
    """Return a function from a finding's id to (study, what the finding measures there); each is measured once."""

    @cache
    def get(name: str) -> tuple[Study, Measured]:
        study = Study(icl_mini, PAPER_TASKS[1], N_PROMPTS[name])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(label_bias, "N_RANDOM_SETS", 1)
            return study, measure(find(name), study)

    return get


@pytest.mark.parametrize(
    ("name", "n_axes"),
    [
        ("majority-bias", 1),
        pytest.param("recency-bias", 1, marks=pytest.mark.slow),
        pytest.param("text-to-label", 1, marks=pytest.mark.slow),
        pytest.param("shared-heads", 2, marks=pytest.mark.slow),  # heads in common, and log-odds lost
        pytest.param("location", 2, marks=pytest.mark.slow),
    ],
)
def test_every_measure_has_rows_and_is_drawn(measured: Any, name: str, n_axes: int) -> None:
    finding, found = find(name), to_json(measured(name)[1])
    rows = rows_from_json(found)
    assert {row.measure for row in rows} == {one.name for one in finding.measures}
    assert all(row.low < row.high or row.note for row in rows)
    assert finding.draw is not None
    details = pd.DataFrame(found["details"]).assign(model="icl-mini", task="animal-country")
    assert len(finding.draw(details).axes) == n_axes


@pytest.mark.parametrize("name", ["majority-bias", pytest.param("recency-bias", marks=pytest.mark.slow)])
def test_the_gap_is_the_bias_gap_of_all_prompts_together(icl_mini: Any, measured: Any, name: str) -> None:
    study, found = measured(name)
    if name == "majority-bias":
        prompts = prompts_by_frequency(study.prompts_with(3)[1], 2, 0)
        favored, unfavored, label_of = prompts["majority"], prompts["minority"], majority_label
    else:
        both = ordered(study, study.held_out.prompts, -1)
        favored, unfavored, label_of = both.favored.prompts, both.unfavored.prompts, recent_label
    batch = study.tokenize([*favored, *unfavored])
    log_probs = il.score(icl_mini, batch)
    gap = bias_gap(is_correct(log_probs, batch.answer), batch.answer, label_of(batch.label_index))
    odds = label_log_odds(log_probs, batch.answer).double().chunk(2)
    quantities = {row.measure: row.quantity for row in found.rows}
    assert quantities["gap"] == pytest.approx(gap)
    assert quantities["bias"] == pytest.approx(float((odds[0] - odds[1]).mean()), abs=1e-4)


@pytest.mark.slow
def test_tasks_share_heads_more_than_by_chance(measured: Any) -> None:
    rows = {(row.measure, row.ranking): row for row in measured("shared-heads")[1].rows}
    main = rows["overlap", "contrast"]
    assert 0 < main.low <= main.quantity - main.control < main.high
    assert rows["overlap_same", ""].quantity >= main.quantity
    assert "'->'" in rows["overlap_antonyms", ""].note
    assert "does not do the task" in rows["overlap_induction", ""].note
    assert "(guessing: 33%)" in rows["overlap_three_classes", ""].note
    arbitrary = "arbitrary labels"
    assert rows[f"{arbitrary} / {arbitrary}", ""].low > 0
    assert rows[f"cost: {arbitrary} → {arbitrary}", ""].low > 0
    assert rows[f"cost: natural labels → {arbitrary}", ""].high < 0  # other heads, in this model
    assert "no two different tasks" in rows[f"cost: pairs → {arbitrary}", ""].note


@pytest.mark.slow
def test_every_method_locates_heads_that_matter(icl_mini: Any, measured: Any) -> None:
    study, found = measured("location")
    lost = [row for row in found.rows if row.measure.startswith("lost_")]
    assert all(row.low > 0 and row.n_heads == study.n_located for row in lost)
    methods = found.details[found.details["kind"] == "method"].set_index("name")
    assert len(lost) == len(methods)
    assert methods.loc["contrast", "heads"] == " ".join(map(str, study.located))
    assert methods.loc["contrast", "in_common_with_contrast"] == study.n_located
    assert methods["passes"].tolist() == [1, 1, 49, 5, 1, 50]
    assert [row.ranking for row in found.rows if row.measure == "depth"] == ["contrast", "increase"]
    layers = found.details[(found.details["kind"] == "layer") & (found.details["ranking"] == "contrast")]
    batch = study.held_out
    increases = il.layer_log_prob_increase(
        il.capture(icl_mini, batch), batch.answer_tokens, against=batch.other_label_tokens
    )
    expected = torch.cat([one.mean(0) for one in increases]).numpy()
    np.testing.assert_allclose(layers["quantity"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "above", "none"),
    [
        pytest.param(
            "values",
            {"magnitude", "follows", "features"},
            {"rank", "magnitude", "follows", "features"},
            marks=pytest.mark.slow,
        ),
        ("label-attention", {"gap"}, {"share", "gap", "mass", "shift", "dose"}),
    ],
)
def test_heads_chosen_by_chance_show_no_difference(
    icl_mini: Any, monkeypatch: pytest.MonkeyPatch, name: str, above: set[str], none: set[str]
) -> None:
    study = Study(icl_mini, PAPER_TASKS[0], 24)
    finding = find(name)
    located = {row.measure: row for row in finding.measure(study).rows if row.ranking == "contrast"}
    assert all(located[measure].low > 0 for measure in above)
    rank_by_chance(monkeypatch, study)
    rows = [row for row in finding.measure(study).rows if row.measure in none]
    assert {(row.measure, row.ranking) for row in rows} == set(product(none, ("contrast", "increase")))
    for row in rows:
        assert row.low <= 0 <= row.high, row
