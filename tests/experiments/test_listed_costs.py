"""The benchmark of costs calls every public function and every edit that runs a model."""

import inspect
from pathlib import Path

import pandas as pd
import public_edits

import icl_lens as il
from experiments.benchmark import function_costs

COSTS = Path(__file__).parents[2] / "docs" / "howto" / "costs.csv"
MEASURED = {name.partition(",")[0] for name in function_costs.CALLS}
WITHOUT_COST = {"live", "random_head_sets", "head_overlap", "map_prompts"}
"""Functions that take a model and whose cost says nothing of its own."""


def test_every_function_that_runs_a_model_has_a_cost():
    unmeasured = set()
    for name in dir(il):
        function = getattr(il, name)
        if inspect.isfunction(function):
            parameters = list(inspect.signature(function).parameters)
            if parameters[:1] == ["model"] and name not in MEASURED | WITHOUT_COST:
                unmeasured.add(name)
    assert not unmeasured, "add calls to CALLS in experiments/benchmark/function_costs.py"


def test_every_edit_has_a_cost():
    unmeasured = public_edits.by_name().keys() - MEASURED
    assert not unmeasured, "add calls to CALLS in experiments/benchmark/function_costs.py"


def test_every_call_is_in_the_published_table():
    published = set(pd.read_csv(COSTS)["call"])
    assert published == set(function_costs.CALLS), "measure them, as docs/contributing.md says"
