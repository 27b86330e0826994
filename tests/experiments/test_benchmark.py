"""The benchmarks' scripts on a small shape: tables have all rows, and searches agree."""

import json
import sys

import pandas as pd
import pytest
import torch
from browsers import CHROMIUM

from experiments.benchmark import function_costs, live, search
from experiments.benchmark.model_shapes import random_prompts
from experiments.benchmark.timing import time_in_turns

pytestmark = pytest.mark.slow


def test_the_search_has_a_row_for_each_way_and_size(tmp_path, monkeypatch):
    out = tmp_path / "search.csv"
    options = [
        "--shape",
        "small",
        "--sizes",
        "14x2,40x1",
        "--repeats",
        "1",
        "--slow",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", ["search", *options])
    search.main()
    table = pd.read_csv(out)
    assert list(table["tokens"].unique()) == [14, 40]
    assert len(table) == 2 * (len(search.FAST) + len(search.SLOW))
    assert (table.loc[table["way"] == "forward", "forwards"] == 1).all()
    assert [path.name for path in tmp_path.iterdir()] == ["search.csv"]


def test_a_search_that_finds_other_values_is_an_error(monkeypatch, icl_mini):
    wrong = {"wrong": lambda model, batch: search.certified_search(model, batch) + 0.1}
    monkeypatch.setattr(search, "SLOW", wrong)
    with pytest.raises(ValueError, match=r"differs from the certified search by 0\.1 nats"):
        search.measure(icl_mini, "icl-mini", 14, 1, repeats=1, with_slow=True)


def test_calls_are_timed_in_turns():
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = time_in_turns(calls, repeats=2)
    assert order == ["a", "b"] * 3
    assert all(0 <= value < 1 for value in seconds.values())


def test_each_number_of_the_live_view_arrives(icl_mini):
    rows = live.measure(icl_mini, "icl-mini", repeats=1)
    expected = ["forward pass", *live.NUMBERS.values(), live.ALL_OF_A_CLICK]
    assert [row["number"] for row in rows] == expected
    assert all(row["seconds"] > 0 for row in rows)


def test_operations_are_those_of_matrix_products():
    product = function_costs.operations(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    assert product == 2 * 2 * 3 * 4


def test_the_table_of_costs_says_what_was_stopped_and_what_was_not_run(tmp_path):
    lines = []
    for name, forwards, is_stopped in (("whole", 1.0, False), ("stopped", 3.0, True)):
        cost = {"name": name, "tokens": 1089, "forwards": forwards, "peak": 0.25}
        lines.append(json.dumps(cost | {"is_stopped": is_stopped, "error": ""}))
    lines.append(
        json.dumps(cost | {"name": "long", "prompts": 4, "is_stopped": False, "error": ""})
    )
    lines[-1] = lines[-1].replace("}", ', "is_run": false}')
    (tmp_path / "costs.jsonl").write_text("\n".join(lines))
    table = function_costs.table(tmp_path / "costs.jsonl")
    assert table.columns.tolist() == ["forwards, 1,089 tokens", "GiB, 1,089 tokens"]
    assert table.loc["whole"].tolist() == ["1.0", "0.25"]
    assert table.loc["stopped"].tolist() == ["≥ 3.0", "≥ 0.25"]
    assert table.loc["long"].tolist() == ["not run: 12 forwards", ""]


def test_a_call_of_more_forwards_than_are_allowed_is_not_run(tmp_path, icl_mini):
    path, names = tmp_path / "costs.jsonl", ["score", "tokenize"]
    function_costs.run(path, names, [20], icl_mini, 60.0, counts_operations=True)
    function_costs.run(path, names, [30], icl_mini, 60.0, counts_operations=True, max_forwards=1.0)
    table = function_costs.table(path)
    not_run = [column for column in table if table.loc["score", column].startswith("not run: ")]
    assert len(not_run) == 1
    assert not any(text.startswith("not") for text in table.loc["tokenize"])


@pytest.mark.parametrize(
    ("served", "package"), [(live.served_page, "marimo"), (live.served_notebook, "jupyterlab")]
)
def test_actions_on_the_page_and_in_jupyter_are_timed(served, package):
    if CHROMIUM is None:
        pytest.skip("Chromium is missing: no page is drawn")
    for name in (package, "playwright"):
        pytest.importorskip(name)
    with served("icl-mini") as page:
        rows = live.measure_page(page, "icl-mini", repeats=1)
        assert page.get_by_label("Query").input_value() == "good one one"
        assert page.get_by_label("Label 1", exact=True).input_value() == "foo"  # exchanged
    assert len(rows) == 6
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.parametrize("n_tokens", [14, 200])
def test_prompts_have_as_many_tokens_as_asked(n_tokens):
    assert {len(str(prompt).split()) for prompt in random_prompts(3, n_tokens)} == {n_tokens}
