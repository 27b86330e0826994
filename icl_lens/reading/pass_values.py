"""Values of heads at every position, which rows that end in one prompt share."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class PassValues:
    """What attention moves from each position: the values of every prompt that was run, and the
    prompt of each row.

    A "pass" is one prompt of a forward pass; rows that end at different positions of a prompt share
    it. Values contain b_V where the model's do, are once per key-value group, and are in the
    model's dtype.

    Example:
        >>> acts.values.of_layer(2).shape
        torch.Size([1, 19, 6, 16])
    """

    pass_v: Float[Tensor, "pass layer key kv_head d_head"]
    pass_index: Int[Tensor, " batch"] | None = None
    """Each row's index into `pass_v`; None if row i has pass i."""

    def of_layer(self, layer: int) -> Float[Tensor, "batch key kv_head d_head"]:
        """Return one layer's values at every position of every row; copies if rows share passes."""
        if self.pass_index is None:
            return self.pass_v[:, layer]
        return self.pass_v[self.pass_index, layer]

    def select(self, index: Any, width: int) -> "PassValues":
        """Return those of the selected rows at the first `width` positions; passes of other rows
        are dropped.
        """
        if self.pass_index is None:
            return PassValues(self.pass_v[:, :, :width][index])
        passes, pass_index = self.pass_index[index].unique(return_inverse=True)
        return PassValues(self.pass_v[:, :, :width][passes], pass_index)

    def to(self, device: torch.device | str) -> "PassValues":
        """Return a copy with its tensors on `device`."""
        pass_index = None if self.pass_index is None else self.pass_index.to(device)
        return PassValues(self.pass_v.to(device), pass_index)
