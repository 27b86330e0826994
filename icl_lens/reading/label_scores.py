"""Scores of labels that carry their labels, so that those of other words are not subtracted by
mistake.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from icl_lens.errors import InputError, short_repr

# Functions whose result has the same columns; all others return plain tensors.
_KEEP_COLUMNS = frozenset(
    "add sub rsub mul rmul div truediv rtruediv neg abs exp log clone detach contiguous to cpu "
    "cuda float double half "
    "bfloat16 masked_fill softmax log_softmax".split()
)
MAX_PRINTED = 12
"""The number of labels that are printed with the scores."""
_REDUCE_ROWS = frozenset({"mean", "sum"})


class LabelScores(Tensor):
    """A tensor whose last axis has one column per label.

    Arithmetic on the scores of other labels, or of the same labels in another order, raises
    InputError. Element-wise functions, selections of rows and means over the first axis keep
    `labels`; all others return plain tensors. Copies and files of `torch.save` keep them too. A new
    process must import this class before `torch.load` reads a file.

    Example:
        >>> scores = il.score(model, batch)
        >>> scores.labels, scores.to_frame().columns.tolist()
        (('bar', 'foo'), ['bar', 'foo'])
    """

    labels: tuple[str, ...]
    """The labels of the last axis."""

    @classmethod
    def from_tensor(cls, scores: Tensor, labels: Sequence[str]) -> "LabelScores":
        """Return a tensor as scores of `labels`."""
        label_scores = scores.as_subclass(cls)
        label_scores.labels = tuple(labels)
        return label_scores

    def __deepcopy__(self, memo: dict[int, Any]) -> "LabelScores":
        if id(self) not in memo:
            memo[id(self)] = self.from_tensor(
                copy.deepcopy(self.as_subclass(Tensor), memo), self.labels
            )
        return memo[id(self)]

    def __repr__(self, **_: Any) -> str:
        text = repr(self.as_subclass(Tensor))
        labels = getattr(self, "labels", ())
        if not labels:
            return text
        more = "" if len(labels) <= MAX_PRINTED else f", … {len(labels)} labels"
        return (
            f"{text.removesuffix(')')}, "
            f"labels=({', '.join(map(repr, labels[:MAX_PRINTED]))}{more}))"
        )

    def to_frame(self) -> pd.DataFrame:
        """Return one row per prompt (and, with more axes, per head set or setting) and one column
        per label.
        """
        rows = (
            self.as_subclass(Tensor).detach().cpu().flatten(0, -2) if self.ndim > 1 else self[None]
        )
        return pd.DataFrame(rows.double().numpy(), columns=list(self.labels))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        scores_of_labels = {
            scores.labels: scores for scores in _label_scores([*args, *kwargs.values()])
        }
        if len(scores_of_labels) > 1:
            first, second, *_ = scores_of_labels
            raise InputError(
                f"scores must have the same labels in the same order, got {short_repr(first)} and "
                f"{second!r}; pass the same labels= to il.tokenize, or select columns by their "
                "labels"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if (
            scores_of_labels
            and type(result) is Tensor
            and result.ndim
            and _keeps_columns(func.__name__.strip("_"), args, kwargs)
        ):
            ((labels, _),) = scores_of_labels.items()
            if result.shape[-1] == len(labels):
                return cls.from_tensor(result, labels)
        return result


torch.serialization.add_safe_globals(
    [LabelScores]
)  # for `torch.load`, which reads only plain tensors by default


def _label_scores(values: Sequence[Any]) -> Iterator[LabelScores]:
    """Yield the scores among arguments, also those in lists, that have labels."""
    for value in values:
        for entry in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(entry, LabelScores) and hasattr(entry, "labels"):
                yield entry


def _keeps_columns(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of these arguments keeps the last axis unchanged."""
    if name in _KEEP_COLUMNS:
        return True
    if name in _REDUCE_ROWS:
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        return args[0].ndim > 1 and axis == 0
    if name == "getitem":
        scores, index = args
        return _selects_rows(index, scores.ndim)
    return False


def _selects_rows(index: Any, ndim: int) -> bool:
    """Return whether an index of scores with `ndim` axes selects along others than the last."""
    if isinstance(index, tuple):
        indexes_last_axis = len(index) >= ndim
        return not indexes_last_axis and all(isinstance(axis, (int, slice)) for axis in index)
    if ndim == 1 or index is None or index is Ellipsis:
        return False
    is_mask_of_cells = isinstance(index, Tensor) and index.ndim > 1
    return not is_mask_of_cells
