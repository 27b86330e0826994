"""Annotations of the package are checked under pytest, except those of functions made within functions."""

import jaxtyping
import pytest
import torch
from annotations import checked

from icl_lens.metrics import label_log_odds


def test_a_call_with_a_wrong_shape_is_refused():
    with pytest.raises(jaxtyping.TypeCheckError, match="label_log_odds"):
        label_log_odds(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_inner_functions_are_left_as_they_are():
    def inner(n: int) -> int:
        return n

    assert checked(inner) is inner
