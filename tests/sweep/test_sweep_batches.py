"""Every public function that takes a model, on a family of each kind: alone = in a batch = in
pieces = after others.

Within a kind, families take turns; `test_sweep_numbers` runs every function on every family, in a
batch.
"""

import inspect
import sys
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import families
import pytest
import sweep
from family_tables import EXACT
from sweep import CALLS, OTHERS, PROMPTS, Case, assert_same, is_refused

import icl_lens as il
from icl_lens.models.passes import memory

# Other tests check the types of what these calls pass around, which takes longer than the calls.
pytestmark = pytest.mark.usefixtures("no_type_checks")

ALONE = 1
"""The prompt that is run alone, the shortest: in the batch it is padded most."""


def test_no_function_that_takes_a_model_is_forgotten() -> None:
    assert sweep.takes_a_model() | sweep.OTHER_SCORES == set(CALLS)


@pytest.fixture(scope="module")
def results(load_tiny) -> Any:
    """Return a function from a family to its model, its cases and what a fresh model gave, one
    function at a time.
    """

    @cache
    def get(family: str) -> SimpleNamespace:
        model = load_tiny(family)
        case = Case(model, PROMPTS, OTHERS)
        return SimpleNamespace(
            model=model, case=case, alone=Case(model, PROMPTS[ALONE : ALONE + 1], OTHERS[ALONE:2])
        )

    return get


def budgets() -> Iterator[tuple[Any, str]]:
    """Yield (module, name) of every limit on memory or tokens at once in the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("icl_lens."):
            for key in vars(module):
                if key.isupper() and key in vars(memory) and key != "BUDGET":
                    yield module, key


QUICK = {"attention_score_parts", "mean_score_parts", "score"}
QUICK_FAMILIES = ("llama_gqa",)
CASES = [
    pytest.param(
        name, family, marks=() if name in QUICK and family in QUICK_FAMILIES else pytest.mark.slow
    )
    for number, name in enumerate(sorted(CALLS))
    for family in dict.fromkeys(
        [*families.in_turn(number, EXACT), *(QUICK_FAMILIES if name in QUICK else ())]
    )
]


def test_every_family_has_one_kind_and_a_turn() -> None:
    assert sorted(family for kind in families.KINDS.values() for family in kind) == sorted(
        families.CONFIGS
    )
    assert {family for _, family in (case.values for case in CASES)} == set(EXACT)


@pytest.mark.parametrize(("function", "family"), CASES)
def test_neither_neighbors_nor_pieces_nor_earlier_runs_matter(
    results, monkeypatch, family, function
) -> None:
    run, call = results(family), CALLS[function]
    if is_refused(function, family, lambda: call.function(run.case)):
        return
    together = call.function(run.case)  # its longest prompt runs before the shortest one runs alone
    if call.of_prompts:
        assert_same(together, call.function(run.alone), row=ALONE, msg="alone")
    for module, name in budgets():
        monkeypatch.setattr(module, name, 1)
    case = Case(run.model, PROMPTS, OTHERS)
    options = inspect.signature(call.function).parameters.keys() - {"c", "case"}
    assert_same(
        call.function(case, **({"run": il.Run(memory=1)} if options else {})),
        together,
        msg="in pieces",
    )
