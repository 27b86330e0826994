"""Annotations of the package are checked under pytest, except those of functions made within
functions.
"""

from dataclasses import dataclass

import jaxtyping
import pytest
import torch
from annotations import CHECKED, checked
from beartype.roar import BeartypeCallHintParamViolation

from icl_lens.metrics import label_log_odds


def doubled(n: int) -> int:
    return 2 * n


@dataclass
class Point:
    x: int


def test_a_call_with_a_wrong_shape_is_refused():
    with pytest.raises(jaxtyping.TypeCheckError, match="label_log_odds"):
        label_log_odds(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("decorated", [doubled, Point])
def test_functions_and_classes_without_axes_are_checked_until_checks_are_off(decorated):
    call = jaxtyping.jaxtyped(decorated, typechecker=checked)
    with pytest.raises(BeartypeCallHintParamViolation):
        call("a")
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        call("a")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_inner_functions_are_left_as_they_are():
    def inner(n: int) -> int:
        return n

    assert jaxtyping.jaxtyped(inner) is inner


CALL = jaxtyping.jaxtyped(doubled, typechecker=checked)


@pytest.mark.parametrize("test", range(2))
def test_the_first_calls_of_each_test_are_checked(test):
    for _ in range(CHECKED):
        with pytest.raises(BeartypeCallHintParamViolation):
            CALL("a")
    assert CALL("a") == "aa"
