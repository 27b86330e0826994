"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), in float32.

Momentum whose singular values are made equal: small transformers leave chance in a third of the
steps that Adam takes. torch.optim.Muon orthogonalizes in bfloat16, which is slow on a CPU.
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the Newton-Schulz iteration that takes singular values from (0, 1] to about 1 in five steps.
"""


def orthogonalized(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Return the nearest matrix whose singular values are all 1, to within about 30%."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Updates matrices by the orthogonalized Nesterov momentum of their gradients.

    An update's root mean square is about 0.2 × `lr`, the size of AdamW's, whatever the matrix's
    shape. Parameters of a group with `parts` > 1 are `parts` matrices stacked along `axis`
    (queries, keys and values in one).
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum, "parts": 1, "axis": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        average = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        average.lerp_(gradient, 1 - group["momentum"])
        nesterov = gradient.lerp(average, group["momentum"])
        updates = []
        for part in nesterov.chunk(group["parts"], group["axis"]):
            updates.append(orthogonalized(part) * 0.2 * max(part.shape) ** 0.5)
        parameter.add_(torch.cat(updates, group["axis"]), alpha=-group["lr"])
