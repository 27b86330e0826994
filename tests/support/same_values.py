"""Whether two values of any type are the same to the last bit."""

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from icl_lens.prompts.decisions import Decisions
from icl_lens.reading.pass_values import PassValues


def same(ours: Any, theirs: Any) -> bool:
    """Whether two values are equal to the last bit, and of the same types; a tuple equals a
    list.
    """
    if isinstance(ours, torch.Tensor):
        return _same_tensors(ours, theirs)
    if isinstance(ours, (tuple, list)):
        return (
            isinstance(theirs, (tuple, list))
            and len(ours) == len(theirs)
            and all(map(same, ours, theirs))
        )
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(
            ours, theirs, equal_nan=ours.dtype.kind == "f"
        )
    if isinstance(ours, pd.DataFrame):
        pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
        return True
    if is_dataclass(ours):
        return all(
            same(getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours)
        )
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(
            same(value, theirs[name]) for name, value in ours.items()
        )
    return ours == theirs or ours != ours


def tensors_of(record: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a batch or activations by name, and those of `decisions` and `values`
    under names with a dot.
    """
    tensors = {}
    for name, value in ({} if record is None else vars(record)).items():
        if isinstance(value, torch.Tensor):
            tensors[prefix + name] = value
        elif isinstance(value, (Decisions, PassValues)):
            tensors |= tensors_of(value, f"{name}.")
    return tensors


def _same_tensors(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    ours, theirs = (value.as_subclass(torch.Tensor) for value in (ours, theirs))
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
